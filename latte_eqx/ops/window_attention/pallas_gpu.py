r"""Window attention on GPUs, in Triton by way of Pallas: logits never leave the chip, and each array is moved about once.

**Forward**, a program takes a block of queries of one head and goes along the blocks of keys that they reach, with a
running peak and sum.

**Backward**, one kernel does all, since each kernel more would read all inputs again. Nothing but the inputs is kept
from the forward pass, so a program takes a piece of several blocks and goes over it three times. First, what all
queries that see its keys need to know: their peak, what makes their weights sum to 1, and $\delta_t = \sum_s p_{ts}\,
dp_{ts}$. Then the gradients of its own queries, from the keys that they see, and last those of its own keys and values,
from the queries that see them: nobody adds to what another program writes. Queries after the piece are looked at by two
programs; the longer the pieces, the fewer.

Arrays lie in memory as projections give them, (seq, heads, width), and a program takes the columns of its head.
"""

import operator
from functools import partial, reduce
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from latte_eqx.ops.batching import output_like
from latte_eqx.ops.window_attention.reference import LOWEST

DTYPES = (jnp.float32, jnp.bfloat16)
# Tiles have sides that are powers of two, and those of products at least so long and at most so wide.
SMALLEST_TILE, COLUMNS = 16, 64
# A piece may have so many blocks, if that leaves two programs for each multiprocessor: a GPU has 108 or 132.
LONGEST_PIECE, ENOUGH_PROGRAMS = 8, 256
# Which axes a product contracts: the last of both or, as in x @ y, the last and the first.
LAST, INNER = ((1,), (1,)), ((1,), (0,))
# The labels of keys and queries after the end.
HIDDEN, NOBODY = -1, -2


class Plan(NamedTuple):
    """How many positions a block has, and how many warps share its work."""

    block: int
    warps: int


FORWARD, BACKWARD = Plan(64, 4), Plan(64, 8)


class Settings(NamedTuple):
    """What the kernels know when they are compiled: a query reaches so many keys `before` and `after` its own."""

    before: int
    after: int
    scale: float
    soft_cap: float | None
    interpret: bool


def pallas_gpu(
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
    interpret: bool = False,
) -> Float[Array, "*batch kv_heads group seq value_dim"]:
    """Take O(seq x window) work, and memory for the inputs alone, forward and backward."""
    *batch, kv_heads, group, seq, _ = queries.shape
    rows, before = prod(batch), min(window, keys.shape[-2] - 1)

    def side_by_side(x):
        return x.reshape(rows, -1, *x.shape[-2:]).swapaxes(1, 2)

    def of_rows(labels):
        labels = labels.reshape(*labels.shape[: len(batch)], labels.shape[-2])
        return jnp.broadcast_to(labels, (*batch, labels.shape[-1])).reshape(rows, -1)

    output = _attention(
        *map(side_by_side, (queries, keys, values)),
        *map(of_rows, (query_labels, key_labels)),
        Settings(before, 0 if causal else before, scale, soft_cap, interpret),
    )
    return output.swapaxes(1, 2).reshape(*batch, kv_heads, group, seq, -1)


def _forward(queries, keys, values, query_labels, key_labels, settings) -> Array:
    rows, seq, heads, _ = queries.shape
    output = output_like(queries, (rows, seq, heads, values.shape[-1]), values.dtype)
    program = _program(queries, keys, values, FORWARD, settings)
    head = lambda _, head, row: (row, 0, head, 0)
    kv_head = lambda _, head, row: (row, 0, head // (heads // keys.shape[2]), 0)
    return pl.pallas_call(
        partial(_forward_kernel, program=program),
        grid=(program.queries.blocks, heads, rows),
        in_specs=[
            program.queries.spec(head),
            program.keys.spec(kv_head),
            program.values.spec(kv_head),
            program.queries.label_spec(),
            program.keys.label_spec(),
        ],
        out_specs=program.outputs.spec(head),
        out_shape=output,
        compiler_params=plgpu.CompilerParams(num_warps=FORWARD.warps, num_stages=1),
        name="window_attention_forward",
        interpret=settings.interpret,
    )(queries, keys, values, query_labels, key_labels)


def _save(*arrays_and_settings):
    *arrays, _ = arrays_and_settings
    return _forward(*arrays_and_settings), arrays


def _restore(settings, arrays, cotangent):
    queries, keys, values, *_ = arrays
    (rows, _, heads, _), kv_heads = queries.shape, keys.shape[2]
    group = heads // kv_heads
    program = _program(queries, keys, values, BACKWARD, settings)
    piece = _blocks_of_a_piece(program.keys.blocks, rows * kv_heads)
    pieces = pl.cdiv(program.keys.blocks, piece)
    known = min(program.queries.blocks, program.seeing_queries.count + piece - 1)

    kv_head = lambda _, head, row: (row, 0, head, 0)
    at_queries, at_outputs = (x.spec(kv_head, group) for x in (program.queries, program.outputs))
    at_keys, at_values = (x.spec(kv_head) for x in (program.keys, program.values))
    facts = output_like(queries, (rows, kv_heads, pieces, group, known * BACKWARD.block))
    at_facts = pl.BlockSpec((None, None, None, *facts.shape[3:]), lambda piece, head, row: (row, head, piece, 0, 0))
    gradients = pl.pallas_call(
        partial(_backward_kernel, program=program, piece=piece, known=known, group=group),
        grid=(pieces, kv_heads, rows),
        in_specs=[
            at_queries, at_keys, at_values, program.queries.label_spec(), program.keys.label_spec(), at_outputs,
        ],
        out_specs=[at_queries, at_keys, at_values, *[at_facts] * 3],
        out_shape=[*(output_like(queries, x.shape, x.dtype) for x in (queries, keys, values)), *[facts] * 3],
        compiler_params=plgpu.CompilerParams(num_warps=BACKWARD.warps, num_stages=1),
        name="window_attention_backward",
        interpret=settings.interpret,
    )(*arrays, cotangent)  # fmt: skip
    return *gradients[:3], None, None


_attention = jax.custom_vjp(_forward, nondiff_argnums=(5,))
_attention.defvjp(_save, _restore)


def _blocks_of_a_piece(blocks: int, rows: int) -> int:
    """As many as still leave enough programs."""
    return max(1, min(LONGEST_PIECE, blocks * rows // ENOUGH_PROGRAMS))


class _Tokens(NamedTuple):
    """How a head of an array is read and written: a block of positions at a time, in tiles of some columns each."""

    length: int
    width: int
    block: int

    @property
    def blocks(self):
        return pl.cdiv(self.length, self.block)

    @property
    def tiles(self):
        """Where tiles begin and how wide they are: 96 columns are 64 and 32."""
        tiles, start = [], 0
        while start < self.width:
            size = 1 << ((self.width - start).bit_length() - 1)
            tiles.append((start, min(COLUMNS, max(SMALLEST_TILE, size))))
            start = sum(tiles[-1])
        return tiles

    def spec(self, place, heads=None):
        # Only the interpreter asks how long a block is: it has to have room for whole tiles.
        return pl.BlockSpec((None, self.blocks * self.block, heads, sum(self.tiles[-1])), place)

    def label_spec(self):
        return pl.BlockSpec((None, self.blocks * self.block), lambda block, head, row: (row, 0))

    def load(self, ref, index, *head):
        return [_load(ref.at[place], mask, 0) for place, mask in self._places(index, *head)]

    def store(self, ref, index, tiles, *head):
        for (place, mask), tile in zip(self._places(index, *head), tiles, strict=True):
            plgpu.store(ref.at[place], tile.astype(ref.dtype), mask=mask)

    def load_labels(self, ref, index, other):
        mask = None
        if self.length % self.block:
            mask = index * self.block + lax.iota(jnp.int32, self.block) < self.length
        return _load(ref.at[pl.ds(index * self.block, self.block)], mask, other)

    def zeros(self):
        return [jnp.zeros((self.block, size), jnp.float32) for _, size in self.tiles]

    def _places(self, index, *head):
        return [
            ((pl.ds(index * self.block, self.block), *head, pl.ds(start, size)), self._inside(index, start, size))
            for start, size in self.tiles
        ]

    def _inside(self, index, start, size):
        masks = []
        if self.length % self.block:
            masks.append(index * self.block + lax.broadcasted_iota(jnp.int32, (self.block, size), 0) < self.length)
        if start + size > self.width:
            masks.append(start + lax.broadcasted_iota(jnp.int32, (self.block, size), 1) < self.width)
        return reduce(operator.and_, masks) if masks else None


class _Reach(NamedTuple):
    """Which blocks of keys a block of queries sees, or the other way round: `count` from `first` on, of `total`.

    They are counted from the block's own. So many are looked at even at the ends, where fewer are seen.
    """

    first: int
    count: int
    total: int

    def start(self, index, blocks=1):
        """The first block that any of some blocks looks at."""
        return jnp.clip(index + self.first, 0, self.total - min(self.count + blocks - 1, self.total))


def _reach(low: int, high: int, tokens: _Tokens) -> _Reach:
    """Blocks from position `low` to `high`, where a block's own first is 0."""
    first, last = low // tokens.block, high // tokens.block
    return _Reach(first, min(last - first + 1, tokens.blocks), tokens.blocks)


class _Program(NamedTuple):
    """What a program works on."""

    queries: _Tokens
    keys: _Tokens
    values: _Tokens
    outputs: _Tokens
    settings: Settings

    @property
    def block(self):
        return self.queries.block

    @property
    def past(self):
        return self.keys.length - self.queries.length

    @property
    def seen_keys(self):
        low, high = self.past - self.settings.before, self.past + self.block - 1 + self.settings.after
        return _reach(low, high, self.keys)

    @property
    def seeing_queries(self):
        low, high = -self.past - self.settings.after, self.block - 1 + self.settings.before - self.past
        return _reach(low, high, self.queries)

    def sees(self, query_index, key_index, query_labels, key_labels, query_axis):
        """Tell which keys are seen, with queries along one axis and keys along the other."""
        shape = self.block, self.block
        query_place, key_place = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (query_axis, 1 - query_axis))
        distance = self.past + (query_index - key_index) * self.block + query_place - key_place
        in_window = (distance <= self.settings.before) & (distance >= -self.settings.after)
        same = _along(query_labels, query_axis) == _along(key_labels, 1 - query_axis)
        return in_window & same

    def logits(self, x, y, sees):
        """Logits, lowest where nothing is seen, and their slope to the products."""
        logits, slope = self.settings.scale * _dots(x, y), self.settings.scale
        if self.settings.soft_cap is not None:
            capped = jnp.tanh(logits / self.settings.soft_cap)
            logits, slope = self.settings.soft_cap * capped, self.settings.scale * (1 - capped * capped)
        return jnp.where(sees, logits, LOWEST), slope


def _program(queries, keys, values, plan, settings):
    (_, seq, _, head_dim), (_, source, _, value_dim) = queries.shape, values.shape
    shapes = (seq, head_dim), (source, head_dim), (source, value_dim), (seq, value_dim)
    return _Program(*(_Tokens(*shape, plan.block) for shape in shapes), settings)


def _forward_kernel(queries, keys, values, query_labels, key_labels, output, *, program):
    index = pl.program_id(0)
    query = program.queries.load(queries, index)
    labels = program.queries.load_labels(query_labels, index, NOBODY)
    first = program.seen_keys.start(index)

    def add(step, carry):
        peak, total, sums = carry
        at = first + step
        sees = program.sees(index, at, labels, program.keys.load_labels(key_labels, at, HIDDEN), 0)
        logits, _ = program.logits(query, program.keys.load(keys, at), sees)
        peak, kept, weights = _raise_peak(peak, logits, sees)
        added = [_dot(weights, v, INNER) for v in program.values.load(values, at)]
        sums = [kept[:, None] * x + new for x, new in zip(sums, added, strict=True)]
        return peak, kept * total + weights.sum(axis=1), sums

    carry = *_nothing(program.block), program.outputs.zeros()
    _, total, sums = lax.fori_loop(0, program.seen_keys.count, add, carry)
    # The largest weight is 1, which is exact. Divided before the product, it would be rounded.
    inverse = _inverse(total)[:, None]
    program.outputs.store(output, index, [inverse * x for x in sums])


def _backward_kernel(
    queries, keys, values, query_labels, key_labels, cotangent, dqueries, dkeys, dvalues, *facts,
    program, piece, known, group,
):  # fmt: skip
    seen, seeing = program.seen_keys, program.seeing_queries
    first_key = pl.program_id(0) * piece
    first_known = seeing.start(first_key, piece)

    def load_query(index, head):
        """A block of queries, the cotangent of their outputs, and their labels."""
        query, dy = program.queries.load(queries, index, head), program.outputs.load(cotangent, index, head)
        return query, dy, program.queries.load_labels(query_labels, index, NOBODY)

    def load_key(index):
        key, value = program.keys.load(keys, index), program.values.load(values, index)
        return key, value, program.keys.load_labels(key_labels, index, HIDDEN)

    def place(index, head):
        return head, pl.ds((index - first_known) * program.block, program.block)

    def look(index, head):
        query, dy, labels = load_query(index, head)
        first = seen.start(index)

        def add(step, carry):
            peak, total, moment = carry
            key, value, key_label = load_key(first + step)
            sees = program.sees(index, first + step, labels, key_label, 0)
            peak, kept, weights = _raise_peak(peak, program.logits(query, key, sees)[0], sees)
            moment = kept * moment + (weights * _dots(dy, value)).sum(axis=1)
            return peak, kept * total + weights.sum(axis=1), moment

        carry = *_nothing(program.block), jnp.zeros(program.block, jnp.float32)
        peak, total, moment = lax.fori_loop(0, seen.count, add, carry)
        inverse = _inverse(total)
        for ref, fact in zip(facts, (peak, inverse, inverse * moment), strict=True):
            plgpu.store(ref.at[place(index, head)], fact)

    def differentiate(query, key, sees, dweights, index, head, query_axis):
        """The weights and the gradients of the products, for a block of queries and one of keys."""
        peak, inverse, delta = (_along(plgpu.load(x.at[place(index, head)]), query_axis) for x in facts)
        logits, slope = program.logits(*((query, key) if query_axis == 0 else (key, query)), sees)
        weights = inverse * _weights(logits, peak, sees)
        return weights, weights * (dweights - delta) * slope

    def unlook(index, head):
        query, dy, labels = load_query(index, head)
        first = seen.start(index)

        def add(step, dquery):
            key, value, key_label = load_key(first + step)
            sees = program.sees(index, first + step, labels, key_label, 0)
            _, dlogits = differentiate(query, key, sees, _dots(dy, value), index, head, 0)
            return [x + _dot(dlogits, k, INNER) for x, k in zip(dquery, key, strict=True)]

        program.queries.store(
            dqueries, index, lax.fori_loop(0, seen.count, add, program.queries.zeros()), head
        )

    def unlook_key(index):
        key, value, labels = load_key(index)
        first = seeing.start(index)

        def add(head, step, gradients):
            dkey, dvalue = gradients
            at = first + step
            query, dy, query_label = load_query(at, head)
            sees = program.sees(at, index, query_label, labels, 1)
            weights, dlogits = differentiate(query, key, sees, _dots(value, dy), at, head, 1)
            dkey = [x + _dot(dlogits, q, INNER) for x, q in zip(dkey, query, strict=True)]
            dvalue = [x + _dot(weights, g, INNER) for x, g in zip(dvalue, dy, strict=True)]
            return dkey, dvalue

        def add_head(head, gradients):
            return lax.fori_loop(0, seeing.count, partial(add, head), gradients)

        dkey, dvalue = lax.fori_loop(0, group, add_head, (program.keys.zeros(), program.values.zeros()))
        program.keys.store(dkeys, index, dkey)
        program.values.store(dvalues, index, dvalue)

    _for_each(known, group, lambda step, head: look(first_known + step, head))
    if not program.settings.interpret:
        # All threads shall see what each has stored.
        plgpu.debug_barrier()
    first_query = first_key - program.past // program.block

    def unlook_if_there(step, head):
        index = first_query + step
        pl.when((index >= 0) & (index < program.queries.blocks))(lambda: unlook(index, head))

    def unlook_key_if_there(step, _):
        index = first_key + step
        pl.when(index < program.keys.blocks)(lambda: unlook_key(index))

    _for_each(piece, group, unlook_if_there)
    _for_each(piece, 1, unlook_key_if_there)


def _for_each(count, heads, act):
    @pl.loop(0, count)
    def _(step):
        @pl.loop(0, heads)
        def _(head):
            act(step, head)


def _nothing(block):
    """The peak and sum of weights before anything is seen."""
    return jnp.full(block, LOWEST, jnp.float32), jnp.zeros(block, jnp.float32)


def _raise_peak(peak, logits, sees):
    """The new peak, what the old weights are relative to it, and the new weights."""
    new_peak = jnp.maximum(peak, logits.max(axis=1))
    return new_peak, jnp.exp(peak - new_peak), _weights(logits, new_peak[:, None], sees)


def _weights(logits, peak, sees):
    """Masked again, since without any key the peak itself is lowest; computed anew, a logit may be above its peak."""
    return jnp.where(sees, jnp.exp(jnp.minimum(logits - peak, 0.0)), 0.0)


def _inverse(total):
    return 1 / jnp.where(total == 0, 1, total)


def _load(ref, mask, other):
    return plgpu.load(ref, mask=mask, other=None if mask is None else jnp.asarray(other, ref.dtype))


def _along(x, axis):
    return x[:, None] if axis == 0 else x[None, :]


def _dots(x, y):
    """Sum over the columns of both, tile by tile."""
    return sum(_dot(x_tile, y_tile, LAST) for x_tile, y_tile in zip(x, y, strict=True))


def _dot(x, y, axes):
    """Products of factors in the dtype of `y`, summed in float32."""
    how = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    return lax.dot_general(x.astype(y.dtype), y, (axes, ((), ())), **how)
