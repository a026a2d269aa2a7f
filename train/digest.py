"""A digest of arrays, taken on the devices that hold them: any flipped bit changes it, and no sharding does."""

import functools
import hashlib
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree, UInt32


def _scramble(words: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A bijection on 32-bit words in which every bit of a result depends on every bit of the word."""
    words = (words ^ (words >> np.uint32(16))) * np.uint32(0x9E3779B1)
    words = (words ^ (words >> np.uint32(15))) * np.uint32(0x85EBCA6B)
    return words ^ (words >> np.uint32(16))


def _words(leaf: Array) -> UInt32[Array, "..."]:
    """The bits of `leaf`, a word or two for each element."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.uint32)
    kind = jnp.finfo if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.iinfo
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating) or kind(leaf.dtype).bits not in (8, 16, 32, 64):
        raise TypeError(f"A leaf must be boolean, a key, or numbers of 8 to 64 bits, got {leaf.dtype}.")
    width = min(kind(leaf.dtype).bits, 32)
    return lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{width}")).astype(jnp.uint32)


def _leaf_digest(leaf: Array) -> UInt32[Array, "2"]:
    """Two wrap-around sums over the words, each scrambled with its position in the whole array.

    A sum does not mind in which order, and on how many devices, it is taken. A sum of words times odd weights would not
    do: two changed sign bits cancel in it. Positions are built axis by axis, since flattening would gather the shards.
    """
    words = _words(leaf)
    position = jnp.zeros(words.shape, jnp.uint32)
    for axis in range(words.ndim):
        stride = np.uint32(math.prod(words.shape[axis + 1 :]) % 2**32)
        position += lax.broadcasted_iota(jnp.uint32, words.shape, axis) * stride
    first = _scramble(words + _scramble(position))
    second = _scramble(first ^ np.uint32(0x5BD1E995))
    # One reduction of both: two would have the compiler keep all scrambled words, as many as the leaf has.
    add = lambda sums, terms: (sums[0] + terms[0], sums[1] + terms[1])
    return jnp.stack(lax.reduce((first, second), (np.uint32(0), np.uint32(0)), add, range(words.ndim)))


@functools.cache
def _digest_all(result: NamedSharding | None) -> jax.stages.Wrapped:
    """One compiled pass over all leaves; its result is on every process, so that each can read it."""
    return jax.jit(lambda leaves: jnp.stack([_leaf_digest(leaf) for leaf in leaves]), out_shardings=result)


def _named_leaves(tree: PyTree) -> dict[str, Any]:
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    for name, leaf in leaves.items():
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            raise TypeError(f"A checkpoint must hold arrays only, got {type(leaf).__name__} at {name}.")
    return leaves


def leaf_forms(tree: PyTree) -> dict[str, str]:
    """The dtype and shape of each leaf, as text, by its path."""
    return {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in _named_leaves(tree).items()}


def digest(state: PyTree) -> dict[str, int]:
    """64 bits for each leaf, by its path; the same however the leaf is sharded, other if any bit of it is other."""
    leaves = _named_leaves(state)
    if not leaves:
        return {}
    meshes = [leaf.sharding.mesh for leaf in leaves.values() if isinstance(leaf.sharding, NamedSharding)]
    result = NamedSharding(meshes[0], PartitionSpec()) if meshes else None
    pairs = jax.device_get(_digest_all(result)(list(leaves.values())))
    return {name: int(high) << 32 | int(low) for name, (high, low) in zip(leaves, pairs, strict=True)}


def parameter_hash(state: PyTree) -> str:
    """A hexadecimal hash of every bit, path, shape and dtype of `state`."""
    return seal({"forms": leaf_forms(state), "digest": digest(state)})


def seal(record: dict[str, Any]) -> str:
    """A hexadecimal hash of what JSON can hold."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
