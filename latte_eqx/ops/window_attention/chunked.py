"""Window attention in blocks of queries, each against the slab of keys its window reaches."""

from math import ceil

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from latte_eqx.ops.window_attention.reference import attend, visible

SMALLEST_BLOCK, LARGEST_BLOCK = 32, 64
# Logits of one head that exist at a time: few enough to stay in cache. Longer sequences take several steps.
LOGITS_PER_STEP = 2**15


def chunked(
    queries: Float[Array, "*batch group seq head_dim"],
    keys: Float[Array, "*batch source head_dim"],
    values: Float[Array, "*batch source value_dim"],
    query_labels: Int[Array, "*#batch 1 seq 1"],
    key_labels: Int[Array, "*#batch source 1"],
    *,
    window: int,
    causal: bool,
    scale: float,
    soft_cap: float | None,
) -> Float[Array, "*batch group seq value_dim"]:
    """Take O(seq x window) work, and memory for one step's logits, forward and backward."""
    seq = queries.shape[-2]
    unreachable = max(0, keys.shape[-2] - seq - window)
    source = keys.shape[-2] - unreachable
    sources = [x[..., unreachable:, :] for x in (keys, values, key_labels)]
    before = min(window, source - 1)
    after = 0 if causal else before

    steps, blocks, block = plan(seq, source, before + after)
    width = before + block + after
    whole = width >= source
    reach = source if whole else block * (blocks - 1 + ceil(width / block))
    if not whole:
        # Room for the window of the first query and of the last, padded, one.
        front = before - (source - seq)
        back = (steps - 1) * blocks * block + reach - front - source
        sources = [pad(x, front, back) for x in sources]

    def step(
        index: Int[Array, ""], queries: Float[Array, "..."], query_labels: Int[Array, "..."]
    ) -> Float[Array, "..."]:
        start = index * (blocks * block)
        near = sources if whole else [jax.lax.dynamic_slice_in_dim(x, start, reach, axis=x.ndim - 2) for x in sources]
        keys, values, key_labels = (overlap(x, blocks, block, width) for x in near)
        offset = source - seq + start if whole else before
        mask = visible(query_labels, key_labels, offset, before=before, after=after)
        return attend(queries, keys, values, mask, scale=scale, soft_cap=soft_cap)

    # The logits are computed again for the backward pass, not kept.
    step = jax.checkpoint(step, prevent_cse=steps == 1)
    split = [split_queries(x, steps, blocks, block) for x in (queries, query_labels)]
    if steps == 1:
        output = step(jnp.int32(0), *(x[0] for x in split))[None]
    else:
        output = jax.lax.map(lambda inputs: step(*inputs), (jnp.arange(steps), *split))
    return join_queries(output)[..., :seq, :]


def plan(seq: int, source: int, reach: int) -> tuple[int, int, int]:
    """Choose the number of steps, of blocks in a step, and of queries in a block."""
    block = min(max(reach, SMALLEST_BLOCK), LARGEST_BLOCK)
    if reach + block >= source:
        # Every block would see all keys, so that larger blocks cost no more.
        block, blocks = max(block, LOGITS_PER_STEP // source), 1
    else:
        blocks = max(1, LOGITS_PER_STEP // (block * (reach + block)))
    # Shared out evenly, for little padding.
    steps = ceil(seq / (blocks * block))
    blocks = ceil(seq / (steps * block))
    return steps, blocks, ceil(seq / (steps * blocks))


def pad(x: Shaped[Array, "*batch seq dim"], front: int, back: int) -> Shaped[Array, "*batch padded dim"]:
    """Lengthen a sequence; labels are padded with -1, which no query has."""
    fill = -1 if jnp.issubdtype(x.dtype, jnp.integer) else 0
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(front, back), (0, 0)], constant_values=fill)


def split_queries(
    x: Shaped[Array, "*batch group seq dim"], steps: int, blocks: int, block: int
) -> Shaped[Array, "{steps} *batch {blocks} group {block} dim"]:
    """Pad and cut the queries into steps, and these into blocks."""
    x = pad(x, 0, steps * blocks * block - x.shape[-2])
    x = x.reshape(*x.shape[:-2], steps, blocks, block, x.shape[-1])
    return jnp.moveaxis(x, (-4, -3), (0, -4))


def join_queries(x: Shaped[Array, "steps *batch blocks group block dim"]) -> Shaped[Array, "*batch group padded dim"]:
    """Undo `split_queries`, but for the padding."""
    x = jnp.moveaxis(x, (0, -4), (-4, -3))
    return x.reshape(*x.shape[:-4], -1, x.shape[-1])


def overlap(
    x: Shaped[Array, "*batch near dim"], blocks: int, block: int, width: int
) -> Shaped[Array, "*batch {blocks} slab dim"]:
    """Cut slabs of `width`, each `block` after the one before, from shifted views: their gradient needs no scatter."""
    if blocks == 1:
        return jnp.expand_dims(x[..., :width, :], -3)
    shifts = [x[..., start : start + blocks * block, :] for start in range(0, width, block)]
    views = [shift.reshape(*x.shape[:-2], blocks, block, x.shape[-1]) for shift in shifts]
    return jnp.concatenate(views, axis=-2)[..., :width, :]
