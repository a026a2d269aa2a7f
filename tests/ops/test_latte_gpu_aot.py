"""The GPU's kernels of causal Latte, compiled for GPUs that need not be here."""

import re
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from latte_eqx.ops import latte_causal
from latte_eqx.ops.dispatch import Passes
from latte_eqx.ops.latte import chunked, pallas_gpu
from latte_eqx.ops.latte.state import LatteState
from tests.aot import target_or_skip
from train.hardware import GPU_TRAITS

# Compiled as users compile.
pytestmark = [pytest.mark.gpu_aot, pytest.mark.usefixtures("optimized")]

ROWS, HEADS, CHUNK = 2, 2, 256
# Latents, columns, tokens, dtype, and whether documents are packed.
QUICK = {
    "a100": [(32, 96, 1024, "bfloat16", True), (16, 64, 1024, "float32", True)],
    "h100": [(32, 96, 1024, "bfloat16", True)],
}
ALL = [
    (latents, dim, seq, dtype, packed)
    for latents, dim, dtype in product((16, 32), (64, 96, 128, 256), ("bfloat16", "float32"))
    for seq, packed in ((1024, True), (16384, False))
]
EXACT = {f"latte_{name}_exact" for name in ("read", "ask", "unread")}
FAST = {name.removesuffix("_exact") for name in EXACT} | {"latte_add_up", "latte_carry", "latte_carry_back"}


def every_setting():
    return pytest.mark.parametrize(
        ("kind", "setting"),
        [
            pytest.param(kind, setting, id=f"{kind}-{setting}", marks=[] if setting in quick else pytest.mark.slow)
            for kind, quick in QUICK.items()
            for setting in ALL
        ],
    )


def both_passes(weights, keys, values, segment_ids, state, dy, dstate):
    arrays = weights, keys, values, segment_ids
    state = LatteState(*state)
    y, last, states = pallas_gpu.forward(*arrays, state, chunk=CHUNK, keep=True)
    return y, last, pallas_gpu.backward(*arrays, state, last, states, dy, LatteState(*dstate), chunk=CHUNK)


def abstract_arrays(device, latents, dim, seq, dtype, packed):
    abstract = partial(jax.ShapeDtypeStruct, sharding=jax.sharding.SingleDeviceSharding(device))
    latent, value = abstract((ROWS, HEADS, seq, latents), dtype), abstract((ROWS, HEADS, seq, dim), dtype)
    ids = abstract((ROWS, 1, seq), jnp.int32) if packed else None
    vector = abstract((ROWS, HEADS, latents), jnp.float32)
    state = abstract((ROWS, HEADS, latents, dim), jnp.float32), vector, vector
    return latent, latent, value, ids, state, value, state


@every_setting()
def test_kernels(kind, setting):
    """All that a thread knows stays in registers, but for kernels that are rarely run."""
    target = target_or_skip(f"{kind}:1")
    _, kernels = target.compile_kernels(jax.jit(both_passes), *abstract_arrays(target.devices[0], *setting))
    kernels = {kernel.name: kernel for kernel in kernels if kernel.name.startswith("latte")}
    assert set(kernels) == FAST | EXACT
    assert not any(kernels[name].spilled for name in FAST), kernels
    assert 0 < max(kernel.shared_memory for kernel in kernels.values()) <= GPU_TRAITS[kind]["shared_optin"]


@pytest.mark.parametrize(("rows", "kernels"), [(1, 9), (64, 4)], ids=["pieces", "whole rows"])
def test_heads_are_not_moved(rows, kernels):
    """Tokens are read where projections leave them, and with many rows by one kernel, and its exact form, in a pass."""
    target = target_or_skip("a100:1")
    apart = lambda x: x.reshape(*x.shape[:2], HEADS, -1).swapaxes(1, 2)

    def both(weights, keys, values, dy):
        op = lambda *arrays: latte_causal(*map(apart, arrays), implementation="pallas")[0]
        y, pull_back = jax.vjp(op, weights, keys, values)
        return y.swapaxes(1, 2), pull_back(apart(dy))

    abstract = partial(jax.ShapeDtypeStruct, sharding=jax.sharding.SingleDeviceSharding(target.devices[0]))
    latents, values = (abstract((rows, 1024, HEADS * width), jnp.bfloat16) for width in (16, 96))
    text = target.compile(jax.jit(both), latents, latents, values, values).as_text()
    assert text is not None
    assert not re.findall(r" (?:transpose|copy)\(", text)
    assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == kernels


@pytest.mark.parametrize("columns", [128, 2], ids=["whole heads", "thirds of heads"])
@pytest.mark.parametrize("programs", [1, 8], ids=["whole rows", "halves"])
@pytest.mark.parametrize("keys_scale", [1, 60])
def test_pieces_are_as_chunks(programs, columns, keys_scale, monkeypatch):
    """Values and cotangents do not depend on what of a row a program reads; heads may share documents."""
    rng = np.random.default_rng(0)
    batch, seq, latents, dim, chunk = (2, 2), 256, 4, 6, 64
    draw = lambda *shape: jnp.asarray(rng.normal(size=(*batch, *shape)), jnp.float32)
    keys, values, dy = keys_scale * draw(seq, latents), draw(seq, dim), draw(seq, dim)
    arrays = jnp.exp(draw(seq, latents)), keys, values
    segment_ids = jnp.asarray(np.sort(rng.integers(6, size=(2, 1, seq))), jnp.int32)
    state, dstate = (
        LatteState(draw(latents, dim), peak, jnp.exp(draw(latents)))
        for peak in (draw(latents), jnp.zeros((*batch, latents)))
    )

    @partial(jax.jit, static_argnums=0)
    def run(passes, *arrays):
        y, last, states = passes.forward(*arrays, segment_ids, state, chunk=chunk, keep=True)
        return y, last, states, passes.backward(*arrays, segment_ids, state, last, states, dy, dstate, chunk=chunk)

    monkeypatch.setattr(pallas_gpu, "MOST_FLOAT32_COLUMNS", columns)
    # As many pieces whatever a head is cut into.
    monkeypatch.setattr(pallas_gpu, "ENOUGH_PROGRAMS", programs * max(1, dim // columns))
    # So that it, too, keeps the state before every chunk.
    monkeypatch.setattr(chunked, "LONGEST_STEP", chunk)
    interpreted = Passes(*(partial(function, interpret=True) for function in pallas_gpu.PASSES))
    *values, cotangents = run(interpreted, *arrays)
    *want_values, want_cotangents = run(chunked.PASSES, *arrays)
    for got, want in zip(jax.tree.leaves(values), jax.tree.leaves(want_values), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())
    largest = max(np.abs(x).max() for x in jax.tree.leaves(want_cotangents))
    for got, want in zip(jax.tree.leaves(cotangents), jax.tree.leaves(want_cotangents), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * largest)


@pytest.mark.parametrize(("dtype", "products"), [("bfloat16", {"bf16"}), ("float32", set())])
def test_matrix_units_see_no_rounded_float32(dtype, products, tmp_path):
    target = target_or_skip("a100:1")
    arrays = abstract_arrays(target.devices[0], 16, 64, 1024, dtype, False)
    target.compile(jax.jit(both_passes), *arrays, xla_dump_to=str(tmp_path))
    text = "".join(path.read_text() for path in tmp_path.glob("*.ptx"))
    assert set(re.findall(r"mma\.sync\.aligned\.\w+\.row\.col\.f32\.(\w+)", text)) == products
