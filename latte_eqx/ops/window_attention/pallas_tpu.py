"""Window attention as TPU kernels: logits never leave the chip, and each array is moved once.

**Heads share tiles.** A TPU stores arrays in tiles of 128 lanes: heads of 96 dims apart from each other would be padded
to 128, and XLA would copy them there and back. So arrays stay as projections give them, (seq, heads x dim), and a grid
step takes heads of keys that fill whole tiles together (4 of 96 dims, 2 of 64), with all of their heads of queries.
Inside, a head's lanes are moved to the front of a register: those of keys and values once, when they arrive, those of
queries and outputs where they are used. (Left in place, and those of other heads masked, a v5e would need 2% more
instructions forward and 8% more backward for 96 dims, though 15% and 7% less for 64.)

**Keys wait on the chip.** A grid step brings one block of keys and values. Those that windows still reach wait in a
ring; so do, in the backward pass, their gradients, which leave when no later query reaches their keys. Where windows
reach forward, queries come some steps after their keys.

**A look gives a softmax.** Of a block, 128 queries at a time meet all keys that they reach; the backward pass computes
the logits again. They lie as keys x queries: maxima and sums then run over registers, not inside them, and the backward
pass turns round one factor of its products, not two.
"""

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
# Registers are so wide; and so many queries look at a time.
LANES = 128
# Tiles of logits that a look should have. What the compiler can mix hides latencies, until registers run out: on a
# v5e a head of 128 dims takes, for 128 queries and a window of 128, so many instructions, forward and backward:
#   2 tiles (1 head): 390 and 680;  4 tiles: 340 and 630;  8 tiles: 310 and 540;  16 tiles: 250 and 560
# So the forward pass mixes two looks.
LOGITS = 8
# Positions that a grid step brings: the first of these that fits.
BLOCKS = (512, 256, 128)
# What a step may need of the chip's own memory as reckoned, which is right to an eighth, and as the compiler counts.
MEMORY, LIMIT = 24 * 2**20, 32 * 2**20
PARAMETERS = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=LIMIT)
# Which axes a product contracts: the last of both, the first of both, or, as in x @ y, the last and the first.
LAST, FIRST, INNER = ((1,), (1,)), ((0,), (0,)), ((1,), (0,))


class Plan(NamedTuple):
    """How the work is cut: `sets` of `heads` heads of keys, each with a `group` of queries; `steps` blocks of `tiles`.

    The queries of a tile reach so many tiles of keys `before` it and `after` it.
    """

    sets: int
    heads: int
    group: int
    steps: int
    tiles: int
    before: int
    after: int

    @property
    def block(self) -> int:
        """Positions of a block."""
        return self.tiles * LANES

    @property
    def reach(self) -> int:
        """Tiles of keys that are looked at from a tile of queries."""
        return self.before + 1 + self.after

    @property
    def logits(self) -> int:
        """Tiles of logits that a tile of queries makes, in all heads."""
        return self.heads * self.group * self.reach

    @property
    def looks(self) -> int:
        """Tiles of queries that the forward pass mixes."""
        return 2 if self.logits <= LOGITS and self.tiles % 2 == 0 else 1

    @property
    def lag(self) -> int:
        """Blocks of keys before its own that a block of queries reaches."""
        return ceil(self.before / self.tiles)

    @property
    def ahead(self) -> int:
        """Blocks of keys after its own that a block of queries reaches."""
        return ceil(self.after / self.tiles)

    @property
    def places(self) -> int:
        """Tiles of keys that wait on the chip."""
        return (self.lag + 1 + self.ahead) * self.tiles


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
    *batch, kv_heads, group, seq, _ = queries.shape
    # Queries get a place beside every key, so that blocks of both begin alike.
    past, padding = keys.shape[-2] - seq, plan.steps * plan.block - keys.shape[-2]
    queries, query_labels = (pad(x, past, padding) for x in (queries, query_labels))
    keys, values, key_labels = (pad(x, 0, padding) for x in (keys, values, key_labels))
    rows, padded = prod(batch), past + seq + padding

    def side_by_side(x):
        return x.reshape(rows, -1, padded, x.shape[-1]).swapaxes(1, 2).reshape(rows, padded, -1)

    def of_rows(labels):
        labels = labels.reshape(*labels.shape[: len(batch)], padded)
        return jnp.broadcast_to(labels, (*batch, padded)).reshape(rows, 1, padded)

    output = _attention(
        *map(side_by_side, (queries, keys, values)),
        *map(of_rows, (query_labels, key_labels)),
        Settings(plan, window, causal, scale, soft_cap, interpret),
    )
    output = output.reshape(rows, padded, kv_heads * group, -1).swapaxes(1, 2)
    return output.reshape(*batch, kv_heads, group, padded, -1)[..., past : past + seq, :]


def plan_or_reason(
    queries: Float[Array, "*batch kv_heads group seq head_dim"],
    keys: Float[Array, "*batch kv_heads source head_dim"],
    values: Float[Array, "*batch kv_heads source value_dim"],
    *,
    window: int,
    causal: bool,
) -> Plan | str:
    """Take the best heads and the widest blocks that fit on the chip, or say why the kernels cannot do it."""
    dtypes = [x.dtype for x in (queries, keys, values)]
    if not all(dtype in DTYPES for dtype in dtypes):
        return f"arrays must be float32 or bfloat16, got {', '.join(map(str, dtypes))}."
    kv_heads, group, _, head_dim = queries.shape[-4:]
    value_dim = values.shape[-1]
    itemsize = max(dtype.itemsize for dtype in dtypes)
    plans = [
        Plan(kv_heads // heads, heads, group, *cut(keys.shape[-2], window, causal, block))
        for heads in heads_side_by_side(kv_heads, head_dim, value_dim)
        for block in BLOCKS
    ]
    for plan in sorted(plans, key=lambda plan: abs(plan.logits - LOGITS)):
        if memory(plan, head_dim, value_dim, itemsize) <= MEMORY:
            return plan
    return (
        "what a block of queries reaches must fit on the chip, "
        f"got {window=}, {head_dim=}, {value_dim=} and {group} query heads for each head of keys."
    )


def heads_side_by_side(kv_heads: int, *dims: int) -> list[int]:
    """Return how many heads of keys a grid step can take: those that fill whole tiles, or all."""
    fills = lambda heads: heads == kv_heads or not any(heads * dim % LANES for dim in dims)
    return [heads for heads in range(1, kv_heads + 1) if kv_heads % heads == 0 and fills(heads)]


def memory(plan: Plan, head_dim: int, value_dim: int, itemsize: int) -> int:
    """Return the bytes that the backward pass needs on the chip, the forward pass needs less."""
    # Queries, keys, values and the output's gradient come, three gradients leave, in two buffers each.
    moved = 2 * plan.block * itemsize * (2 * (plan.group + 1) * head_dim + (plan.group + 2) * value_dim)
    # Keys and values wait, with their gradients in float32; so do labels.
    lanes = LANES * (num_tiles(head_dim) + num_tiles(value_dim))
    waiting = plan.heads * (itemsize + 4) * lanes + 4 * LANES
    # A look takes keys and values of one head, and six arrays like the logits.
    look = itemsize * lanes + 6 * 4 * LANES
    return plan.heads * moved + plan.places * LANES * waiting + plan.reach * LANES * look


def num_tiles(size: int) -> int:
    """Return how many tiles hold so many lanes or positions."""
    return ceil(size / LANES)


def cut(source: int, window: int, causal: bool, block: int) -> tuple[int, int, int, int]:
    """Cut a sequence into equal blocks of at most `block` positions: steps, tiles, and those before and after."""
    steps = ceil(source / block)
    tiles = num_tiles(ceil(source / steps))
    before = min(num_tiles(window), steps * tiles - 1)
    return steps, tiles, before, 0 if causal else before


def _forward(queries, keys, values, query_labels, key_labels, settings) -> Array:
    plan = settings.plan
    output_dim = queries.shape[-1] // keys.shape[-1] * values.shape[-1]
    output = jax.ShapeDtypeStruct((*queries.shape[:2], output_dim), values.dtype)
    arrays = (queries, keys, values, query_labels, key_labels)
    return pl.pallas_call(
        partial(_forward_kernel, settings=settings),
        grid=(queries.shape[0], plan.sets, plan.steps + plan.ahead),
        in_specs=_input_specs(queries, keys, values, plan),
        out_specs=_spec(output, plan, plan.ahead),
        out_shape=output_like(queries, output.shape, output.dtype),
        scratch_shapes=_scratch(keys, values, plan),
        compiler_params=PARAMETERS,
        interpret=settings.interpret,
    )(*arrays)


def _save(*arrays_and_settings):
    *arrays, _ = arrays_and_settings
    return _forward(*arrays_and_settings), arrays


def _restore(settings, arrays, cotangent):
    queries, keys, values, *_ = arrays
    plan = settings.plan
    delay = plan.ahead + plan.lag
    waiting = _scratch(keys, values, plan)
    gradients = pl.pallas_call(
        partial(_backward_kernel, settings=settings),
        grid=(queries.shape[0], plan.sets, plan.steps + delay),
        in_specs=[*_input_specs(queries, keys, values, plan), _spec(cotangent, plan, plan.ahead)],
        out_specs=[_spec(queries, plan, plan.ahead), _spec(keys, plan, delay), _spec(values, plan, delay)],
        out_shape=[output_like(queries, x.shape, x.dtype) for x in (queries, keys, values)],
        scratch_shapes=[*waiting, *(pltpu.VMEM(x.shape, jnp.float32) for x in waiting[:2])],
        compiler_params=PARAMETERS,
        interpret=settings.interpret,
    )(*arrays, cotangent)
    return *gradients, None, None


_attention = jax.custom_vjp(_forward, nondiff_argnums=(5,))
_attention.defvjp(_save, _restore)


def _input_specs(queries, keys, values, plan):
    at_keys = [_spec(x, plan, 0) for x in (keys, values)]
    return [_spec(queries, plan, plan.ahead), *at_keys, _label_spec(plan, plan.ahead), _label_spec(plan, 0)]


def _spec(x, plan, delay):
    shape = (None, plan.block, x.shape[-1] // plan.sets)
    return pl.BlockSpec(shape, lambda row, chosen, i: (row, _block(i, plan, delay), chosen))


def _label_spec(plan, delay):
    return pl.BlockSpec((None, 1, plan.block), lambda row, chosen, i: (row, 0, _block(i, plan, delay)))


def _block(i, plan, delay):
    """Which block a step takes, `delay` steps after its keys have come."""
    return jnp.clip(i - delay, 0, plan.steps - 1)


def _scratch(keys, values, plan):
    """Memory for keys and values that wait, head by head, and for the keys' labels, the same in all lanes."""
    heads = plan.sets * plan.heads
    parts = [pltpu.VMEM((plan.heads, plan.places, LANES, x.shape[-1] // heads), x.dtype) for x in (keys, values)]
    return [*parts, pltpu.VMEM((1, plan.places, LANES, LANES), jnp.int32)]


def _forward_kernel(queries, keys, values, query_labels, key_labels, output, *near, settings):
    plan, i = settings.plan, pl.program_id(2)
    near_keys, near_values, near_labels = near
    _arrive((keys, values, key_labels), near, i, plan)

    @pl.when(i >= plan.ahead)
    def _():
        @pl.loop(0, plan.tiles, unroll=plan.looks)
        def _(tile):
            rows, places, limits = _look(i, tile, query_labels, near_labels, settings)
            for head, query_lanes, output_lanes in _query_heads(queries, output, plan):
                keys, values = _load(near_keys, head, places), _load(near_values, head, places)
                weights, inverse, _ = _weights(queries[rows, query_lanes], keys, limits, settings)
                # The largest weight is 1, which is exact. Divided before the product, it would be rounded.
                average = _dot(weights, values, FIRST) * _columns(inverse, values.shape[1])
                output[rows, output_lanes] = average.astype(output.dtype)


def _backward_kernel(queries, keys, values, query_labels, key_labels, cotangent, *refs, settings):
    dqueries, dkeys, dvalues, *near, near_dkeys, near_dvalues = refs
    near_keys, near_values, near_labels = near
    plan, i = settings.plan, pl.program_id(2)
    _arrive((keys, values, key_labels), near, i, plan)
    for place in _places(i * plan.tiles, plan.tiles, plan):
        for gradient in (near_dkeys, near_dvalues):
            gradient[:, place] = jnp.zeros((plan.heads, *gradient.shape[2:]), jnp.float32)

    @pl.when((i >= plan.ahead) & (i < plan.ahead + plan.steps))
    def _():
        @pl.loop(0, plan.tiles)
        def _(tile):
            rows, places, limits = _look(i, tile, query_labels, near_labels, settings)
            for head, query_lanes, output_lanes in _query_heads(queries, cotangent, plan):
                query, dy = queries[rows, query_lanes], cotangent[rows, output_lanes]
                keys, values = _load(near_keys, head, places), _load(near_values, head, places)
                weights, inverse, slope = _weights(query, keys, limits, settings)
                weights *= inverse
                dweights = _dot(values, dy, LAST)
                dlogits = weights * (dweights - jnp.sum(weights * dweights, axis=0, keepdims=True)) * slope
                dqueries[rows, query_lanes] = _dot(dlogits, keys, FIRST).astype(dqueries.dtype)
                _add(near_dkeys, head, places, _dot(dlogits, query, INNER))
                _add(near_dvalues, head, places, _dot(weights, dy, INNER))

    @pl.when(i >= plan.ahead + plan.lag)
    def _():
        oldest = (i - plan.ahead - plan.lag) * plan.tiles
        for tile, place in enumerate(_places(oldest, plan.tiles, plan)):
            for gradient, finished in ((near_dkeys, dkeys), (near_dvalues, dvalues)):
                for head, lanes in enumerate(_lanes(finished, plan.heads)):
                    finished[_rows(tile), lanes] = gradient[head, place].astype(finished.dtype)


def _arrive(arriving, near, i, plan):
    """Put a block of keys, values and labels to those that wait, in place of the oldest."""
    (*arriving, labels), (*near, near_labels) = arriving, near

    # Before the first there is nothing to see, and after the last.
    @pl.when(i == 0)
    def _():
        for place in _places(plan.places - plan.before, plan.before, plan):
            for x in near:
                x[:, place] = jnp.zeros((plan.heads, *x.shape[2:]), x.dtype)
            near_labels[0, place] = jnp.full((LANES, LANES), -1, jnp.int32)

    for tile, place in enumerate(_places(i * plan.tiles, plan.tiles, plan)):
        for x, waiting in zip(arriving, near, strict=True):
            for head, lanes in enumerate(_lanes(x, plan.heads)):
                waiting[head, place] = x[_rows(tile), lanes]
        near_labels[0, place] = _columns(jnp.where(i < plan.steps, labels[:, _rows(tile)], -1), LANES)


def _places(first, count, plan):
    """Where consecutive tiles of keys wait: in a ring."""
    return [lax.rem(first + n, plan.places) for n in range(count)]


def _load(near, head, places):
    return jnp.concatenate([near[head, place] for place in places], axis=0)


def _add(near, head, places, x):
    for n, place in enumerate(places):
        near[head, place] += x[n * LANES : (n + 1) * LANES]


def _columns(row, count):
    """Turn a row into so many equal columns."""
    return jnp.broadcast_to(row, (count, LANES)).T


def _rows(tile):
    return pl.ds(pl.multiple_of(tile * LANES, LANES), LANES)


def _lanes(x, heads):
    dim = x.shape[-1] // heads
    return [pl.ds(head * dim, dim) for head in range(heads)]


def _query_heads(queries, outputs, plan):
    """The head of keys for each head of queries, and the lanes of its queries and outputs."""
    lanes = (_lanes(x, plan.heads * plan.group) for x in (queries, outputs))
    return [(number // plan.group, *pair) for number, pair in enumerate(zip(*lanes, strict=True))]


def _look(i, tile, query_labels, near_labels, settings):
    """Where a tile of queries is, where the keys are that it reaches, and the highest logits that these may have."""
    plan = settings.plan
    own = (i - plan.ahead) * plan.tiles + tile
    places = _places(own + plan.places - plan.before, plan.reach, plan)
    key_place, query_place = (lax.broadcasted_iota(jnp.int32, (plan.reach * LANES, LANES), axis) for axis in (0, 1))
    distance = query_place + plan.before * LANES - key_place
    in_window = (distance <= settings.window) & (distance >= (0 if settings.causal else -settings.window))
    is_seen = in_window & (query_labels[:, _rows(tile)] == _load(near_labels, 0, places))
    return _rows(tile), places, jnp.where(is_seen, jnp.inf, LOWEST)


def _weights(queries, keys, limits, settings):
    """Softmax weights (keys x queries), what makes their sums 1, and the slope of the logits to the products."""
    logits = settings.scale * _dot(keys, queries, LAST)
    slope = settings.scale
    if settings.soft_cap is not None:
        capped = jnp.tanh(logits / settings.soft_cap)
        logits, slope = settings.soft_cap * capped, settings.scale * (1 - capped * capped)
    logits = jnp.minimum(logits, limits)
    peak = jnp.max(logits, axis=0, keepdims=True)
    # Of a query without keys all weights are 0, not 1.
    weights = jnp.exp(logits - jnp.where(peak > LOWEST, peak, 0))
    total = jnp.sum(weights, axis=0, keepdims=True)
    return weights, 1 / jnp.where(total == 0, 1, total), slope


def _dot(x, y, axes):
    """Products of factors in the dtype of `y`, summed in float32."""
    how = {"precision": product_precision(y.dtype), "preferred_element_type": jnp.float32}
    return lax.dot_general(x.astype(y.dtype), y, (axes, ((), ())), **how)
