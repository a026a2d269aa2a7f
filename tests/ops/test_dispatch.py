"""What `describe` says is what is compiled."""

import jax
import jax.numpy as jnp
import pytest

from latte_eqx.ops import describe, latte_causal, linear_scan, window_attention
from latte_eqx.ops.dispatch import DEFAULTS
from tests.aot import lowering

SEQ = 128
RUNS = {
    "latte_causal": lambda x: latte_causal(x, x, x)[0],
    "linear_scan": lambda x: linear_scan(x, x)[0],
    "window_attention": lambda x: window_attention(x, x, x, window=16),
}


@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
@pytest.mark.parametrize("op", DEFAULTS)
def test_the_default_is_the_one_described(op, platform, capsys):
    """Both passes, under `vmap` as in the mixers."""
    gradient = jax.vmap(jax.grad(lambda x: RUNS[op](x).astype(jnp.float32).sum()))
    with lowering(platform):
        traced = jax.jit(gradient).trace(jax.ShapeDtypeStruct((2, 3, SEQ, 96), jnp.bfloat16))
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    implementation = DEFAULTS[op][platform].implementation
    assert ("tpu_custom_call" in text or "xla.gpu.triton" in text) == (implementation == "pallas")
    describe()
    lines = capsys.readouterr().out.splitlines()
    (line,) = [x for x in lines[lines.index(op) + 1 :][: len(DEFAULTS[op])] if x.split()[0] == platform]
    assert line.split()[1] == implementation


def test_every_op_is_described():
    assert set(DEFAULTS) == set(RUNS)
