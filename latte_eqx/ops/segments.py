"""Documents packed in a row, told apart by segment ids."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Int


def count_segments(segment_ids: Int[Array, "..."], shape: tuple[int, ...]) -> Int[Array, "..."]:
    """Check ids that are to broadcast against `shape`, `(*batch, seq)`, and return the running count of their changes.

    The count has as many axes as `shape`. A change of id always begins a document, even if the number came before;
    numbers that can be read at once are checked not to decrease.
    """
    if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise TypeError(f"`segment_ids` must have an integer dtype, got {segment_ids.dtype}.")
    segment_ids = segment_ids.reshape((1,) * (len(shape) - segment_ids.ndim) + segment_ids.shape)
    sizes_fit = all(got in (1, want) for got, want in zip(segment_ids.shape[:-1], shape[:-1], strict=False))
    if segment_ids.ndim != len(shape) or segment_ids.shape[-1] != shape[-1] or not sizes_fit:
        raise ValueError(f"`segment_ids` must broadcast to the shape (*batch, seq) = {shape}, got {segment_ids.shape}.")
    if not isinstance(segment_ids, Tracer) and np.any(np.diff(np.asarray(segment_ids)) < 0):
        raise ValueError("`segment_ids` must not decrease along the sequence, got a later number that is smaller.")
    changes = jnp.diff(segment_ids, prepend=segment_ids[..., :1]) != 0
    return jnp.cumsum(changes, axis=-1, dtype=jnp.int32)


def positions_in_segments(segment_ids: Int[Array, " seq"] | None, seq: int) -> Int[Array, " seq"]:
    """Return how many tokens of its document stand before each token."""
    index = jnp.arange(seq)
    if segment_ids is None:
        return index
    starts = jnp.diff(segment_ids, prepend=segment_ids[:1]) != 0
    return index - lax.cummax(jnp.where(starts, index, 0))
