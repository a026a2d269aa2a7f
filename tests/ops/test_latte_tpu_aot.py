"""The TPU kernels, compiled for TPUs that need not be here."""

from itertools import product

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from latte_eqx.ops import latte_causal
from tests.aot import target_or_skip
from train.hlo import Program

pytestmark = [pytest.mark.tpu_aot, pytest.mark.usefixtures("optimized")]

BATCH, HEADS = 2, 8
TOPOLOGIES = ("v5e:1x1", "v5p:1x1x1", "v6e:1x1", "tpu7x:1x1x1")
# Topology, latents and dims of a head, tokens, dtype, and whether documents are packed.
QUICK = [
    ("v5e:1x1", 16, 96, 1024, jnp.bfloat16, False),
    ("v5p:1x1x1", 32, 64, 1024, jnp.bfloat16, True),
    ("v6e:1x1", 16, 256, 16384, jnp.bfloat16, False),
    ("tpu7x:1x1x1", 32, 128, 1024, jnp.float32, True),
]
GRID = product(TOPOLOGIES, (16, 32), (64, 96, 128, 256), (1024, 16384), (jnp.bfloat16, jnp.float32), (False, True))
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in GRID if case not in QUICK)]


def heads_apart(x):
    return x.reshape(BATCH, x.shape[1], HEADS, -1).swapaxes(1, 2)


def mix(weights, keys, values, segment_ids):
    """As a mixer does it: the heads come side by side from a projection, and leave so."""
    ids = None if segment_ids is None else segment_ids[:, None]
    y, _ = latte_causal(*map(heads_apart, (weights, keys, values)), segment_ids=ids)
    return y.swapaxes(1, 2).reshape(values.shape)


def both_passes(weights, keys, values, segment_ids, dy):
    y, pull_back = jax.vjp(lambda *arrays: mix(*arrays, segment_ids), weights, keys, values)
    return y, pull_back(dy)


@pytest.mark.parametrize(("topology", "latents", "dim", "seq", "dtype", "packed"), CASES)
def test_kernels_move_little_more_than_they_must(topology, latents, dim, seq, dtype, packed):
    target = target_or_skip(topology)
    place = SingleDeviceSharding(target.devices[0])
    abstract = lambda width: jax.ShapeDtypeStruct((BATCH, seq, HEADS * width), dtype, sharding=place)
    tokens = [abstract(latents), abstract(latents), abstract(dim)]
    ids = jax.ShapeDtypeStruct((BATCH, seq), jnp.int32, sharding=place) if packed else None
    size = lambda *arrays: sum(x.size * x.dtype.itemsize for x in arrays)

    forward = target.compile(jax.jit(mix), *tokens, ids).as_text()
    assert forward.count('custom_call_target="tpu_custom_call"') == 1
    moved = Program(forward).memory_traffic()
    assert moved <= 1.3 * size(*tokens, tokens[2])

    both = target.compile(jax.jit(both_passes), *tokens, ids, tokens[2]).as_text()
    assert both.count('custom_call_target="tpu_custom_call"') == 2
    assert Program(both).memory_traffic() - moved <= 1.5 * size(*tokens, tokens[2], *tokens)
