"""Documents packed in a row, told apart by segment ids."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, Int

from latte_eqx.ops.validation import check_broadcasts


def count_segments(segment_ids: Int[Array, "..."], shape: tuple[int, ...]) -> Int[Array, "..."]:
    """Check ids that are to broadcast against `shape`, `(*batch, seq)`, and return the running count of their changes.

    The count has as many axes as `shape`. A change of id always begins a document, even if the number came before;
    numbers that can be read at once are checked not to decrease.
    """
    if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise TypeError(f"`segment_ids` must have an integer dtype, got {segment_ids.dtype}.")
    check_broadcasts("segment_ids", segment_ids, shape)
    segment_ids = jnp.expand_dims(segment_ids, range(len(shape) - segment_ids.ndim))
    if not isinstance(segment_ids, Tracer) and np.any(np.diff(np.asarray(segment_ids)) < 0):
        raise ValueError("`segment_ids` must not decrease along the sequence, got a later number that is smaller.")
    return jnp.cumsum(segment_starts(segment_ids), axis=-1, dtype=jnp.int32)


def segment_starts(segment_ids: Int[Array, "*batch seq"]) -> Bool[Array, "*batch seq"]:
    """Tell which tokens begin a document; the first token of all continues what was before it."""
    return jnp.diff(segment_ids, prepend=segment_ids[..., :1]) != 0


def positions_in_segments(segment_ids: Int[Array, " seq"] | None, seq: int) -> Int[Array, " seq"]:
    """Return how many tokens of its document stand before each token."""
    index = jnp.arange(seq)
    if segment_ids is None:
        return index
    return index - lax.cummax(jnp.where(segment_starts(segment_ids), index, 0))
