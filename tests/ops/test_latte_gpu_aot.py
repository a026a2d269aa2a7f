"""The GPU's kernels of causal Latte, compiled for GPUs that need not be here."""

import re
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import pytest

from latte_eqx.ops.latte import pallas_gpu
from latte_eqx.ops.latte.state import LatteState
from tests.aot import target_or_skip

# Compiled as users compile.
pytestmark = [pytest.mark.gpu_aot, pytest.mark.usefixtures("optimized")]

ROWS, CHUNK = 4, 256
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
EXACT = {f"latte_{name}_exact" for name in ("read", "unread_weights", "unread_keys_and_values")}
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
    y, last, states = pallas_gpu.forward(*arrays, LatteState(*state), chunk=CHUNK, keep=True)
    return y, last, pallas_gpu.backward(*arrays, last, states, dy, LatteState(*dstate), chunk=CHUNK)


def abstract_arrays(device, latents, dim, seq, dtype, packed):
    abstract = partial(jax.ShapeDtypeStruct, sharding=jax.sharding.SingleDeviceSharding(device))
    latent, value = abstract((ROWS, seq, latents), dtype), abstract((ROWS, seq, dim), dtype)
    ids = abstract((ROWS, seq), jnp.int32) if packed else None
    vector = abstract((ROWS, latents), jnp.float32)
    state = abstract((ROWS, latents, dim), jnp.float32), vector, vector
    return latent, latent, value, ids, state, value, state


def most_spilled(dim, dtype):
    """Bytes, stored and loaded: a few registers at most."""
    # A product of two wide float32 factors without matrix units has too many of them to hold.
    return 1024 if (dim, dtype) == (256, "float32") else 24


@every_setting()
def test_kernels(kind, setting):
    """All that a thread knows stays in registers, but for kernels that are rarely run."""
    target = target_or_skip(f"{kind}:1")
    kernels = target.gpu_kernels(jax.jit(both_passes), *abstract_arrays(target.devices[0], *setting))
    kernels = {kernel.name: kernel for kernel in kernels if kernel.name.startswith("latte")}
    assert set(kernels) == FAST | EXACT
    _, dim, _, dtype, _ = setting
    assert all(kernels[name].spilled <= most_spilled(dim, dtype) for name in FAST), kernels


@pytest.mark.parametrize(("dtype", "products"), [("bfloat16", {"bf16"}), ("float32", set())])
def test_matrix_units_see_no_rounded_float32(dtype, products, tmp_path):
    target = target_or_skip("a100:1")
    arrays = abstract_arrays(target.devices[0], 16, 64, 1024, dtype, False)
    target.compile(jax.jit(both_passes), *arrays, xla_dump_to=str(tmp_path))
    text = "".join(path.read_text() for path in tmp_path.glob("*.ptx"))
    assert set(re.findall(r"mma\.sync\.aligned\.\w+\.row\.col\.f32\.(\w+)", text)) == products
