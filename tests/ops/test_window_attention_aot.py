"""Window attention compiled for accelerators that are not here."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from latte_eqx.ops import window_attention
from tests.aot import target_or_skip
from train.hlo import Program

KERNEL = 'custom_call_target="tpu_custom_call"'


# Compiled as users compile.
pytestmark = pytest.mark.usefixtures("optimized")


def gradients(queries, keys, values, segment_ids, cotangent, *, head_dim, **settings):
    """Gradients of what mixers do: arrays come from projections, heads side by side, and go to one."""

    def attend(*arrays):
        apart = [x.reshape(len(x), -1, head_dim).swapaxes(0, 1) for x in arrays]
        return window_attention(*apart, segment_ids=segment_ids, **settings).swapaxes(0, 1).reshape(queries.shape)

    return jax.vjp(attend, queries, keys, values)[1](cotangent)


def arrays(sharding, seq, head_dim, dtype=jnp.bfloat16, batch=2, heads=4, kv_heads=4):
    make = partial(jax.ShapeDtypeStruct, sharding=sharding)
    queries, keys = (make((batch, seq, num * head_dim), dtype) for num in (heads, kv_heads))
    return queries, keys, keys, make((batch, seq), jnp.int32), queries


def compiled(name, seq, head_dim, window=128, dtype=jnp.bfloat16, batch=2, heads=4, kv_heads=4, **settings):
    target = target_or_skip(name)
    given = arrays(SingleDeviceSharding(target.devices[0]), seq, head_dim, dtype, batch, heads, kv_heads)
    # The mixers' way: one sequence, mapped over a batch.
    run = jax.vmap(partial(gradients, head_dim=head_dim, window=window, **settings))
    return target.compile(jax.jit(run), *given)


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


@pytest.mark.gpu_aot
def test_one_step_on_gpus():
    program = compiled("a100:1", 1024, 64)
    assert " while(" not in program.as_text()


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


@pytest.mark.slow
@pytest.mark.gpu_aot
@pytest.mark.parametrize("name", ["a100:1", "h100:1"])
@pytest.mark.parametrize("settings", [{}, {"dtype": jnp.float32}, {"kv_heads": 2, "soft_cap": 50.0}, {"causal": False}])
def test_gpus_compile(name, settings):
    program = compiled(name, 16384, 128, **settings)
    assert program.memory_analysis().temp_size_in_bytes < 2**30
