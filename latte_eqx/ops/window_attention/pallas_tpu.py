"""Window attention as TPU kernels: logits never leave the chip, and nothing is copied to be overlapped.

A grid step holds one block of queries and the slab of keys that their windows reach: the block's own positions and
whole parts before it (without `causal`, after it too). Parts that would lie outside of the sequence are fetched from
inside it and not seen. As the slab has every key of a query, one look gives its softmax, in either pass.

The backward pass computes the logits again. Each step adds to the gradients of its slab, which wait on the chip, and
hands out the block of them that no later query reaches; so it goes on for `lag` steps after the last query.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil, prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from latte_eqx.ops.batching import output_like
from latte_eqx.ops.precision import product_precision
from latte_eqx.ops.window_attention.chunked import pad
from latte_eqx.ops.window_attention.reference import LOWEST

DTYPES = (jnp.float32, jnp.bfloat16)
# Registers are so wide; so are the smallest parts and blocks.
LANES = 128
# Queries in a block: the first of these that fits. By reckoning, 512 bfloat16 queries of one head, with a window and a
# head_dim of 128, cost a v5e so many microseconds, forward and backward, if a grid step costs a third of one:
#   blocks of 128: 2.4 of memory traffic, 1.2 of products, 2.8 of steps
#   blocks of 256: 2.1, 1.8, 1.4
#   blocks of 512: 1.9, 3.0, 0.7
BLOCKS = (256, 128)
# A kernel gets 16 MB of a v5e's and a v5p's own memory, later chips give more.
MEMORY = 14 * 2**20


class Plan(NamedTuple):
    """How a sequence is cut: `steps` blocks of queries, each reaching parts of `part` keys before and after it."""

    steps: int
    block: int
    part: int
    parts_before: int
    parts_after: int

    @property
    def before(self) -> int:
        """Keys of a slab before its block."""
        return self.parts_before * self.part

    @property
    def slab(self) -> int:
        """Keys that a block of queries reaches."""
        return self.before + self.block + self.parts_after * self.part

    @property
    def lag(self) -> int:
        """Blocks of queries that come before a block of keys is seen no more."""
        return ceil(self.before / self.block)


class Settings(NamedTuple):
    """What the kernels know when they are compiled."""

    plan: Plan
    window: int
    causal: bool
    scale: float
    soft_cap: float | None
    interpret: Any


def pallas_tpu(
    queries: Float[Array, "*batch kv_heads group seq head_dim"],
    keys: Float[Array, "*batch kv_heads source head_dim"],
    values: Float[Array, "*batch kv_heads source value_dim"],
    query_labels: Int[Array, "*#batch 1 1 seq 1"],
    key_labels: Int[Array, "*#batch 1 source 1"],
    *,
    window: int,
    causal: bool,
    scale: float,
    soft_cap: float | None,
    interpret: Any = False,
) -> Float[Array, "*batch kv_heads group seq value_dim"]:
    """Take O(seq x window) work, and memory for the inputs alone, forward and backward."""
    plan = plan_or_reason(queries, keys, values, window=window, causal=causal)
    if isinstance(plan, str):
        raise ValueError(f"For the TPU kernels of `window_attention` {plan}")
    *batch, kv_heads, source, value_dim = values.shape
    group, seq, head_dim = queries.shape[-3:]
    # Queries get a place beside every key, so that blocks of both begin alike.
    past, padding = source - seq, plan.steps * plan.block - source
    queries, query_labels = (pad(x, past, padding) for x in (queries, query_labels))
    keys, values, key_labels = (pad(x, 0, padding) for x in (keys, values, key_labels))
    rows, padded = prod(batch), source + padding
    output = _attention(
        queries.reshape(rows, kv_heads, group, padded, head_dim),
        keys.reshape(rows, kv_heads, padded, head_dim),
        values.reshape(rows, kv_heads, padded, value_dim),
        jnp.broadcast_to(query_labels[..., 0, 0, :, 0], (*batch, padded)).reshape(rows, 1, padded),
        jnp.broadcast_to(key_labels[..., 0, :, 0], (*batch, padded)).reshape(rows, 1, padded),
        Settings(plan, window, causal, scale, soft_cap, interpret),
    )
    return output.reshape(*batch, kv_heads, group, padded, value_dim)[..., past : past + seq, :]


def plan_or_reason(
    queries: Float[Array, "*batch kv_heads group seq head_dim"],
    keys: Float[Array, "*batch kv_heads source head_dim"],
    values: Float[Array, "*batch kv_heads source value_dim"],
    *,
    window: int,
    causal: bool,
) -> Plan | str:
    """Take the widest blocks with which a step fits on the chip, or say why the kernels cannot do what is asked."""
    dtypes = [x.dtype for x in (queries, keys, values)]
    if not all(dtype in DTYPES for dtype in dtypes):
        return f"arrays must be float32 or bfloat16, got {', '.join(map(str, dtypes))}."
    itemsize = max(dtype.itemsize for dtype in dtypes)
    dims = sum(LANES * ceil(x.shape[-1] / LANES) for x in (keys, values))
    for plan in (cut(keys.shape[-2], window, causal, block) for block in BLOCKS):
        # The backward pass needs most: four arrays like the logits; keys and values in two buffers and joined, with
        # their gradients in float32; queries, outputs and their gradients in two buffers each.
        logits = 4 * 4 * plan.block * plan.slab
        slab = plan.slab * dims * (3 * itemsize + 4)
        block = queries.shape[-3] * plan.block * dims * 3 * itemsize
        if logits + slab + block <= MEMORY:
            return plan
    group, head_dim, value_dim = queries.shape[-3], keys.shape[-1], values.shape[-1]
    return (
        "what a block of queries reaches must fit on the chip, "
        f"got {window=}, {head_dim=}, {value_dim=} and {group} query heads for each head of keys."
    )


def cut(source: int, window: int, causal: bool, block: int) -> Plan:
    """Cut a sequence into blocks of at most `block` queries."""
    block = min(block, LANES * ceil(source / LANES))
    steps = ceil(source / block)
    part = LANES if window <= LANES else block
    parts = min(ceil(window / part), (steps - 1) * block // part)
    return Plan(steps, block, part, parts, 0 if causal else parts)


def _forward(queries, keys, values, query_labels, key_labels, settings) -> Array:
    plan = settings.plan
    output = jax.ShapeDtypeStruct((*queries.shape[:-1], values.shape[-1]), values.dtype)
    return _call(
        partial(_forward_kernel, settings=settings),
        (*keys.shape[:2], plan.steps),
        *_inputs(queries, keys, values, query_labels, key_labels, plan),
        [(output, _query_spec(output, plan))],
        [],
        settings.interpret,
    )[0]


def _save(queries, keys, values, query_labels, key_labels, settings):
    arrays = (queries, keys, values, query_labels, key_labels)
    return _forward(*arrays, settings), arrays


def _restore(settings, arrays, cotangent):
    queries, keys, values, _, _ = arrays
    plan = settings.plan
    inputs, specs = _inputs(*arrays, plan=plan)
    finished = lambda i: jnp.maximum(i - plan.lag, 0)
    waiting = (plan.lag + 1) * plan.block + plan.parts_after * plan.part
    gradients = _call(
        partial(_backward_kernel, settings=settings),
        (*keys.shape[:2], plan.steps + plan.lag),
        [*inputs, cotangent],
        [*specs, _query_spec(cotangent, plan)],
        [
            (queries, _query_spec(queries, plan)),
            *((x, _key_spec(x, plan.block, finished)) for x in (keys, values)),
        ],
        [pltpu.VMEM((waiting, x.shape[-1]), jnp.float32) for x in (keys, values)],
        settings.interpret,
    )
    return *gradients, None, None


_attention = jax.custom_vjp(_forward, nondiff_argnums=(5,))
_attention.defvjp(_save, _restore)


def _call(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    inputs: Sequence[Array],
    specs: Sequence[pl.BlockSpec],
    outputs: Sequence[tuple[Any, pl.BlockSpec]],
    scratch: Sequence[Any],
    interpret: Any,
) -> Sequence[Array]:
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=specs,
        out_specs=[spec for _, spec in outputs],
        out_shape=[output_like(inputs[0], x.shape, x.dtype) for x, _ in outputs],
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
    )(*inputs)


def _inputs(queries, keys, values, query_labels, key_labels, plan):
    """Arrays, each as often as its slab has pieces, and which piece a step takes."""
    own = lambda i: jnp.minimum(i, plan.steps - 1)
    inputs = [queries, query_labels]
    specs = [_query_spec(queries, plan), _label_spec(plan.block, own)]
    for spec, x in ((partial(_key_spec, keys), keys), (partial(_key_spec, values), values), (_label_spec, key_labels)):
        pieces = [spec(size, partial(_piece, first=first, size=size, plan=plan)) for first, size in _pieces(plan)]
        inputs, specs = inputs + [x] * len(pieces), specs + pieces
    return inputs, specs


def _pieces(plan: Plan) -> list[tuple[int, int]]:
    """Where the pieces of a slab begin, counted from the block, and how long they are."""
    before = [(start, plan.part) for start in range(-plan.before, 0, plan.part)]
    after = [(plan.block + n * plan.part, plan.part) for n in range(plan.parts_after)]
    return [*before, (0, plan.block), *after]


def _piece(i, *, first, size, plan):
    """Index of a piece among all of its size; those outside of the sequence are replaced by one inside."""
    return jnp.clip(i * (plan.block // size) + first // size, 0, plan.steps * plan.block // size - 1)


def _query_spec(x, plan):
    own = lambda row, head, i: (row, head, 0, jnp.minimum(i, plan.steps - 1), 0)
    return pl.BlockSpec((None, None, x.shape[2], plan.block, x.shape[-1]), own)


def _key_spec(x, size, index):
    return pl.BlockSpec((None, None, size, x.shape[-1]), lambda row, head, i: (row, head, index(i), 0))


def _label_spec(size, index):
    return pl.BlockSpec((None, 1, size), lambda row, head, i: (row, 0, index(i)))


def _forward_kernel(queries, query_labels, *refs, settings):
    *slab, output = refs
    keys, values, mask = _slab(query_labels, slab, pl.program_id(2), settings)

    @pl.loop(0, queries.shape[0])
    def _(head):
        weights, total, _ = _weights(queries[head], keys, mask, settings)
        output[head] = (_dot(weights, values, ((1,), (0,))) / total).astype(output.dtype)


def _backward_kernel(queries, query_labels, *refs, settings):
    *slab, cotangent, dqueries, dkeys, dvalues, waiting_dkeys, waiting_dvalues = refs
    plan, i = settings.plan, pl.program_id(2)
    waiting = [(waiting_dkeys, dkeys), (waiting_dvalues, dvalues)]

    @pl.when(i == 0)
    def _():
        for gradient, _ in waiting:
            gradient[...] = jnp.zeros_like(gradient)

    @pl.when(i < plan.steps)
    def _():
        keys, values, mask = _slab(query_labels, slab, i, settings)
        here = pl.ds(plan.lag * plan.block - plan.before, plan.slab)

        @pl.loop(0, queries.shape[0])
        def _(head):
            weights, total, slope = _weights(queries[head], keys, mask, settings)
            weights = weights / total
            dweights = _dot(cotangent[head], values, ((1,), (1,)))
            dlogits = weights * (dweights - jnp.sum(weights * dweights, axis=1, keepdims=True)) * slope
            dqueries[head] = _dot(dlogits, keys, ((1,), (0,))).astype(dqueries.dtype)
            waiting_dkeys[here, :] += _dot(dlogits, queries[head], ((0,), (0,)))
            waiting_dvalues[here, :] += _dot(weights, cotangent[head], ((0,), (0,)))

    for gradient, finished in waiting:
        finished[...] = gradient[: plan.block].astype(finished.dtype)
        still_waiting = gradient.shape[0] - plan.block
        for start in range(0, still_waiting, plan.block):
            size = min(plan.block, still_waiting - start)
            gradient[pl.ds(start, size), :] = gradient[pl.ds(start + plan.block, size), :]
        gradient[still_waiting:] = jnp.zeros(finished.shape, gradient.dtype)


def _slab(query_labels, refs, i, settings):
    """The keys and values that a block of queries reaches, and which of them each query sees."""
    plan = settings.plan
    pieces = _pieces(plan)
    keys, values, labels = (refs[n : n + len(pieces)] for n in range(0, len(refs), len(pieces)))
    starts = [i * plan.block + first for first, _ in pieces]
    inside = [(start >= 0) & (start < plan.steps * plan.block) for start in starts]
    key_labels = [jnp.where(real, label[...], -1) for real, label in zip(inside, labels, strict=True)]
    shape = (plan.block, plan.slab)
    query_place, key_place = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    distance = query_place + plan.before - key_place
    in_window = (distance <= settings.window) & (distance >= (0 if settings.causal else -settings.window))
    mask = in_window & (query_labels[0][:, None] == jnp.concatenate(key_labels, axis=1))
    return *(jnp.concatenate([x[...] for x in part], axis=0) for part in (keys, values)), mask


def _weights(queries, keys, mask, settings):
    """Softmax weights, their sum to divide by, and the slope of the logits to the products of queries and keys."""
    logits = settings.scale * _dot(queries, keys, ((1,), (1,)))
    slope = settings.scale
    if settings.soft_cap is not None:
        capped = jnp.tanh(logits / settings.soft_cap)
        logits, slope = settings.soft_cap * capped, settings.scale * (1 - capped * capped)
    peak = jnp.max(jnp.where(mask, logits, LOWEST), axis=1, keepdims=True)
    weights = jnp.where(mask, jnp.exp(jnp.where(mask, logits - peak, LOWEST)), 0)
    total = jnp.sum(weights, axis=1, keepdims=True)
    return weights, jnp.where(total == 0, 1, total), slope


def _dot(x, y, axes):
    """Products of factors in the dtype of `y`, summed in float32."""
    how = {"precision": product_precision(y.dtype), "preferred_element_type": jnp.float32}
    return lax.dot_general(x.astype(y.dtype), y, (axes, ((), ())), **how)
