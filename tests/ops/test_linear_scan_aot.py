"""The kernels, compiled for accelerators that need not be here."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from latte_eqx.ops import linear_scan
from tests.aot import target_or_skip

# Compiled as users compile.
pytestmark = pytest.mark.usefixtures("optimized")

# Shapes of inputs, and how many of the GPU's kernels they take: a few channels of long rows are cut into pieces.
SETTINGS = {
    "whole": ((6, 1024, 768), jnp.float32, jnp.float32, 2),
    "pieces": ((1, 1024, 1536), jnp.float32, jnp.bfloat16, 4),
    "odd": ((3, 777, 96), jnp.bfloat16, jnp.float32, 4),
    "coarse": ((8, 1024, 768), jnp.bfloat16, jnp.bfloat16, 2),
    "token": ((2, 1, 1000), jnp.float32, jnp.float32, 2),
    "long": ((1, 65536, 256), jnp.bfloat16, jnp.bfloat16, 4),
}


def every_setting(**quick):
    """All settings on all accelerators; those that are not named as `quick` are slow."""
    cases = [
        pytest.param(name, setting, marks=[] if setting in chosen else pytest.mark.slow)
        for name, chosen in quick.items()
        for setting in SETTINGS
    ]
    return pytest.mark.parametrize(("kind", "setting"), cases)


def both_passes(log_decay, inputs, state, *cotangents):
    function = partial(linear_scan, implementation="pallas")
    outputs, pullback = jax.vjp(lambda *arrays: function(*arrays[:2], state=arrays[2]), log_decay, inputs, state)
    return outputs, pullback(cotangents)


def abstract_arrays(topology, setting):
    """Return the target, and abstract arguments that lie on its first device."""
    shape, decay_dtype, dtype, _ = SETTINGS[setting]
    target = target_or_skip(topology)
    abstract = partial(jax.ShapeDtypeStruct, sharding=jax.sharding.SingleDeviceSharding(target.devices[0]))
    h, state = abstract(shape, dtype), abstract((shape[0], shape[2]), jnp.float32)
    return target, (abstract(shape, decay_dtype), h, state, h, state)


@pytest.mark.tpu_aot
@every_setting(v5e=["whole", "pieces", "odd"], v5p=["whole"], v6e=["whole"])
def test_tpu(kind, setting):
    target, arrays = abstract_arrays(f"{kind}:{'2x2x1' if kind == 'v5p' else '1x1'}", setting)
    text = target.compile(jax.jit(both_passes), *arrays).as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 2
    assert " pad(" not in text
    assert " while(" not in text


@pytest.mark.gpu_aot
@every_setting(a100=["whole", "pieces"], h100=["odd"])
def test_gpu(kind, setting):
    """All that a thread knows stays in registers."""
    target, arrays = abstract_arrays(f"{kind}:1", setting)
    _, kernels = target.compile_kernels(jax.jit(both_passes), *arrays)
    kernels = [x for x in kernels if "linear_scan" in x.name]
    assert len(kernels) == SETTINGS[setting][-1]
    assert not any(kernel.spilled for kernel in kernels), kernels
