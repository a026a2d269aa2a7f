"""Window attention compiled for accelerators that are not here."""

import re
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from latte_eqx.ops import window_attention
from tests.aot import lowering, target_or_skip
from train.hardware import GPU_TRAITS
from train.hlo import Program

KERNEL = 'custom_call_target="tpu_custom_call"'
GPU_KERNEL = 'custom_call_target="__gpu$xla.gpu.triton"'


# Compiled as users compile.
pytestmark = pytest.mark.usefixtures("optimized")


def both_passes(queries, keys, values, segment_ids, cotangent, *, head_dim, **settings):
    """Outputs and gradients of what mixers do: arrays come from projections, heads side by side, and go to one."""

    def attend(*arrays):
        apart = [x.reshape(len(x), -1, head_dim).swapaxes(0, 1) for x in arrays]
        return window_attention(*apart, segment_ids=segment_ids, **settings).swapaxes(0, 1).reshape(queries.shape)

    output, pull_back = jax.vjp(attend, queries, keys, values)
    return output, pull_back(cotangent)


def gradients(*arrays, **settings):
    return both_passes(*arrays, **settings)[1]


def arrays(sharding, seq, head_dim, dtype=jnp.bfloat16, batch=2, heads=4, kv_heads=4):
    make = partial(jax.ShapeDtypeStruct, sharding=sharding)
    queries, keys = (make((batch, seq, num * head_dim), dtype) for num in (heads, kv_heads))
    return queries, keys, keys, make((batch, seq), jnp.int32), queries


def prepared(
    name, seq, head_dim, window=128, dtype=jnp.bfloat16, batch=2, heads=4, kv_heads=4, run=gradients, **settings
):
    """The target, what to compile for it, and the arguments."""
    target = target_or_skip(name)
    given = arrays(SingleDeviceSharding(target.devices[0]), seq, head_dim, dtype, batch, heads, kv_heads)
    # The mixers' way: one sequence, mapped over a batch.
    run = jax.vmap(partial(run, head_dim=head_dim, window=window, **settings))
    return target, jax.jit(run), given


def compiled(*arguments, **settings):
    target, run, given = prepared(*arguments, **settings)
    return target.compile(run, *given)


@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    ("name", "head_dim", "settings"),
    [
        ("v5e:1x1", 96, {"heads": 8, "kv_heads": 8}),
        ("v5e:1x1", 96, {"causal": False, "dtype": jnp.float32}),
        ("v5e:1x1", 64, {"heads": 8, "kv_heads": 2}),
        ("v6e:1x1", 256, {"kv_heads": 2, "soft_cap": 50.0}),
    ],
)
def test_one_kernel_on_tpus(name, head_dim, settings):
    program = compiled(name, 1024, head_dim, **settings)
    text = program.as_text()
    # The backward pass, which computes all again, without loops and without copies but of labels.
    assert text.count(KERNEL) == 1
    assert not re.search(r" while\(| (bf16|f32)\[\S* (copy|transpose)\(", text)
    assert program.memory_analysis().temp_size_in_bytes < 2**20


@pytest.mark.tpu_aot
def test_each_array_is_moved_once():
    # More than could wait on the chip.
    settings = {"batch": 32, "heads": 8, "kv_heads": 8}
    queries, *_ = arrays(None, 1024, 96, **settings)
    moved = Program(compiled("v5e:1x1", 1024, 96, **settings).as_text()).memory_traffic()
    assert moved < 1.02 * 7 * queries.size * queries.dtype.itemsize


@pytest.mark.tpu_aot
def test_kernels_in_shard_map():
    target = target_or_skip("v5e:2x2")
    mesh, spec = Mesh(np.array(target.devices), ("data",)), PartitionSpec("data")
    run = jax.shard_map(
        jax.vmap(partial(gradients, head_dim=128, window=128)), mesh=mesh, in_specs=spec, out_specs=spec
    )
    program = target.compile(jax.jit(run), *arrays(NamedSharding(mesh, spec), 300, 128, batch=4))
    assert program.as_text().count(KERNEL) == 1


@pytest.mark.tpu_aot
def test_no_kernel_where_it_cannot_be():
    program = compiled("v5e:1x1", 256, 128, dtype=jnp.float16, heads=1, kv_heads=1)
    assert KERNEL not in program.as_text()


# Head dims, tokens, dtype and what else is asked.
HARD = {"kv_heads": 2, "causal": False, "soft_cap": 50.0}
QUICK = {
    "a100": [(96, 1024, "bfloat16", {}), (96, 1000, "bfloat16", HARD), (64, 1024, "float32", {})],
    "h100": [(96, 1024, "bfloat16", {})],
}
ALL = [
    (head_dim, seq, dtype, settings)
    for head_dim, dtype in product((64, 96, 128, 256), ("bfloat16", "float32"))
    for seq, settings in ((1024, {}), (16384, {}), (1000, HARD))
]


@pytest.mark.gpu_aot
@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        pytest.param(kind, setting, id=f"{kind}-{setting}", marks=[] if setting in quick else pytest.mark.slow)
        for kind, quick in QUICK.items()
        for setting in ALL
    ],
)
def test_gpu_kernels(kind, setting):
    """One for each pass; all that a thread knows stays in registers, and all arrays where they are."""
    head_dim, seq, dtype, settings = setting
    target, run, given = prepared(f"{kind}:1", seq, head_dim, dtype=dtype, run=both_passes, **settings)
    program, kernels = target.compile_kernels(run, *given)
    kernels = {kernel.name: kernel for kernel in kernels if kernel.name.startswith("window_attention")}
    assert set(kernels) == {"window_attention_forward", "window_attention_backward"}
    assert not any(kernel.spilled for kernel in kernels.values()), kernels
    assert all(0 < kernel.shared_memory <= GPU_TRAITS[kind]["shared_optin"] for kernel in kernels.values()), kernels
    text = program.as_text()
    assert text.count(GPU_KERNEL) == 2
    assert not re.search(r" while\(| (transpose|copy)\(", text)


@pytest.mark.gpu_aot
def test_each_array_is_moved_once_on_gpus():
    settings = {"batch": 16, "heads": 8, "kv_heads": 8}
    queries, *_ = arrays(None, 1024, 96, **settings)
    moved = Program(compiled("a100:1", 1024, 96, run=both_passes, **settings).as_text()).memory_traffic()
    # What is known of queries comes on top.
    assert 11 <= moved / (queries.size * queries.dtype.itemsize) < 1.02 * 11


@pytest.mark.gpu_aot
@pytest.mark.parametrize(("dtype", "products"), [("bfloat16", {"bf16"}), ("float32", set())])
def test_matrix_units_see_no_rounded_float32(dtype, products, tmp_path):
    target, run, given = prepared("a100:1", 256, 64, dtype=dtype, run=both_passes)
    target.compile(run, *given, xla_dump_to=str(tmp_path))
    text = "".join(path.read_text() for path in tmp_path.glob("*.ptx"))
    assert "window_attention_backward" in text
    assert set(re.findall(r"mma\.sync\.aligned\.\w+\.row\.col\.f32\.(\w+)", text)) == products


@pytest.mark.gpu_aot
def test_gpu_kernels_in_shard_map():
    target = target_or_skip("a100:4")
    mesh, spec = Mesh(np.array(target.devices), ("data",)), PartitionSpec("data")
    run = jax.shard_map(
        jax.vmap(partial(gradients, head_dim=128, window=128)), mesh=mesh, in_specs=spec, out_specs=spec
    )
    program = target.compile(jax.jit(run), *arrays(NamedSharding(mesh, spec), 300, 128, batch=4))
    assert program.as_text().count(GPU_KERNEL) == 1


@pytest.mark.parametrize(
    ("seq", "head_dim", "dtype", "has_kernel"),
    [
        (128, 16, "bfloat16", True),
        (127, 16, "bfloat16", False),
        (128, 16, "float16", False),
        (128, 257, "bfloat16", False),
    ],
)
def test_gpu_kernels_where_they_can_be(seq, head_dim, dtype, has_kernel):
    queries = jax.ShapeDtypeStruct((2, seq, head_dim), dtype)
    with lowering("cuda"):
        traced = jax.jit(partial(window_attention, window=16)).trace(queries, queries, queries)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("xla.gpu.triton" in text) == has_kernel


@pytest.mark.slow
@pytest.mark.tpu_aot
@pytest.mark.parametrize("name", ["v5e:1x1", "v6e:1x1", "v5p:1x1x1"])
@pytest.mark.parametrize(
    ("head_dim", "settings"),
    [
        *((head_dim, {"dtype": dtype}) for head_dim in (64, 96, 128, 256) for dtype in (jnp.bfloat16, jnp.float32)),
        (128, {"kv_heads": 1, "heads": 32, "soft_cap": 50.0}),
        (128, {"causal": False}),
        # As wide as fits.
        (128, {"window": 2048, "soft_cap": 50.0}),
        (128, {"window": 2048, "soft_cap": 50.0, "dtype": jnp.float32}),
        (256, {"window": 1024, "soft_cap": 50.0, "dtype": jnp.float32}),
        (256, {"window": 512, "causal": False, "dtype": jnp.float32}),
    ],
)
def test_kernels_compile(name, head_dim, settings):
    assert compiled(name, 4096, head_dim, **settings).as_text().count(KERNEL) == 1
