r"""Window attention on GPUs, in Triton by way of Pallas: logits never leave the chip, and each array is moved once.

**Forward**, a program takes a block of queries of one head and goes along the blocks of keys that they reach, with a
running peak and sum.

**Backward**, one kernel does all, since a second one would read all inputs again. The forward pass leaves it nothing
but the inputs. So a program takes a piece of several blocks of one head of keys, and goes over it three times: for what
must be known of all queries that see its keys, which are their peak, what makes their weights sum to 1, and
$\delta_t = \sum_s p_{ts} \, dp_{ts}$; for the gradients of the piece's own queries; and for those of its keys and
values. No two programs write to one place. What is known of queries near the end of a piece is found out twice, by the
program of the next piece as well: the longer pieces are, the less that matters.

Arrays lie in memory as projections give them, (seq, heads, width), and a program takes the columns of its head.
"""

import operator
from functools import partial, reduce
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from latte_eqx.ops.batching import output_like
from latte_eqx.ops.window_attention.reference import LOWEST

DTYPES = (jnp.float32, jnp.bfloat16)


class Cut(NamedTuple):
    """How many positions a block has, and how many warps share its work."""

    block: int
    warps: int


class Plan(NamedTuple):
    """How each pass cuts its work."""

    forward: Cut
    backward: Cut


# By the widest head, and whether any array is float32: what compiles without spilling registers on an A100 and H100,
# with 64, 96, 128 and 256 dims. Tiles are powers of two wide, so that heads of 96 dims take those of 128: cut into 64
# and 32, they would save a quarter of the products, but the addresses of twice as many tiles would fill the registers.
# Backward, blocks of 64 would spill with 64 dims; those of 32 take 168 registers, so that three programs share a
# multiprocessor. Products of float32 factors are not for matrix units. The assembler sometimes spills a little so that
# one more program has room: with 96 and 128 dims of float32 it does if a program has more than two warps, backward, and
# for windows to both sides with a soft cap if it has but four.
NARROW, TO_BOTH_SIDES_WITH_CAP = Plan(Cut(64, 4), Cut(32, 4)), Plan(Cut(64, 4), Cut(32, 8))
PLANS = {
    (128, False): NARROW,
    (256, False): Plan(Cut(64, 8), Cut(32, 8)),
    (64, True): Plan(Cut(32, 8), Cut(16, 8)),
    (128, True): Plan(Cut(32, 8), Cut(16, 2)),
    (256, True): Plan(Cut(16, 8), Cut(16, 8)),
}
# Loads for the next block are under way while a block is worked on, and go to shared memory by themselves: through
# registers, without a second stage, most of these kernels would spill.
STAGES = 2
# The least that a matrix unit multiplies.
SMALLEST_TILE = 16
# A piece has as many blocks as leave two programs for each multiprocessor, of which a GPU has 108 or 132, but at most
# twice as many as see one of them: what then is found out twice is a third.
ENOUGH_PROGRAMS = 256
# Which axes a product contracts: the last of both or, as in x @ y, the last and the first.
LAST, INNER = ((1,), (1,)), ((1,), (0,))
# The labels of keys and of queries after the end.
HIDDEN, NOBODY = -1, -2


class Settings(NamedTuple):
    """What the kernels know when they are compiled: a query reaches so many keys `before` and `after` its own."""

    plan: Plan
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
    plan = plan_or_reason(queries, keys, values)
    if isinstance(plan, str):
        raise ValueError(f"For the GPU kernels of `window_attention` {plan}")
    if plan is NARROW and soft_cap is not None and not causal:
        plan = TO_BOTH_SIDES_WITH_CAP
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
        Settings(plan, before, 0 if causal else before, scale, soft_cap, interpret),
    )
    return output.swapaxes(1, 2).reshape(*batch, kv_heads, group, seq, -1)


def plan_or_reason(
    queries: Float[Array, "*batch kv_heads group seq head_dim"],
    keys: Float[Array, "*batch kv_heads source head_dim"],
    values: Float[Array, "*batch kv_heads source value_dim"],
) -> Plan | str:
    """Take the plan for the width and the dtype, or say why the kernels cannot do it."""
    dtypes = [x.dtype for x in (queries, keys, values)]
    if not all(dtype in DTYPES for dtype in dtypes):
        return f"arrays must be float32 or bfloat16, got {', '.join(map(str, dtypes))}."
    head_dim, value_dim = queries.shape[-1], values.shape[-1]
    for (widest, is_float32), plan in PLANS.items():
        if max(head_dim, value_dim) <= widest and (jnp.float32 in dtypes) == is_float32:
            return plan
    return f"heads must have at most 256 dims, got {head_dim=}, {value_dim=}."


def _forward(queries, keys, values, query_labels, key_labels, settings) -> Array:
    rows, seq, heads, _ = queries.shape
    cut = settings.plan.forward
    program = _program(queries, keys, values, cut.block, settings)
    own = lambda _, head, row: (row, 0, head, 0)
    shared = lambda _, head, row: (row, 0, head // (heads // keys.shape[2]), 0)
    return pl.pallas_call(
        partial(_forward_kernel, program=program),
        grid=(program.queries.blocks, heads, rows),
        in_specs=[
            program.queries.spec(own), program.keys.spec(shared), program.values.spec(shared), *program.label_specs,
        ],
        out_specs=program.outputs.spec(own),
        out_shape=output_like(queries, (rows, seq, heads, values.shape[-1]), values.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=cut.warps, num_stages=STAGES),
        name="window_attention_forward",
        interpret=settings.interpret,
    )(queries, keys, values, query_labels, key_labels)  # fmt: skip


def _save(*arrays_and_settings):
    *arrays, _ = arrays_and_settings
    return _forward(*arrays_and_settings), arrays


def _restore(settings, arrays, cotangent):
    queries, keys, values, *_ = arrays
    (rows, _, heads, _), kv_heads, cut = queries.shape, keys.shape[2], settings.plan.backward
    group, program = heads // kv_heads, _program(queries, keys, values, cut.block, settings)
    piece = _blocks_of_a_piece(program, rows * kv_heads)
    pieces, known = pl.cdiv(program.keys.blocks, piece), program.seeing_queries.blocks(piece)

    place = lambda _, head, row: (row, 0, head, 0)
    at_queries, at_outputs = (x.spec(place, group) for x in (program.queries, program.outputs))
    at_keys, at_values = (x.spec(place) for x in (program.keys, program.values))
    facts = output_like(queries, (rows, kv_heads, pieces, group, known * cut.block))
    at_facts = pl.BlockSpec((None, None, None, *facts.shape[3:]), lambda piece, head, row: (row, head, piece, 0, 0))
    gradients = pl.pallas_call(
        partial(_backward_kernel, program=program, piece=piece, group=group),
        grid=(pieces, kv_heads, rows),
        in_specs=[at_queries, at_keys, at_values, *program.label_specs, at_outputs],
        out_specs=[at_queries, at_keys, at_values, *[at_facts] * 3],
        out_shape=[*(output_like(queries, x.shape, x.dtype) for x in (queries, keys, values)), *[facts] * 3],
        compiler_params=plgpu.CompilerParams(num_warps=cut.warps, num_stages=STAGES),
        name="window_attention_backward",
        interpret=settings.interpret,
    )(*arrays, cotangent)
    return *gradients[:3], None, None


_attention = jax.custom_vjp(_forward, nondiff_argnums=(5,))
_attention.defvjp(_save, _restore)


def _blocks_of_a_piece(program, rows: int) -> int:
    blocks = program.keys.blocks
    longest = max(1, min(2 * program.seeing_queries.span, blocks * rows // ENOUGH_PROGRAMS))
    # Shared out evenly.
    return pl.cdiv(blocks, pl.cdiv(blocks, longest))


class _Tokens(NamedTuple):
    """How one head of an array is read and written, a block of positions at a time."""

    length: int
    width: int
    block: int

    @property
    def blocks(self):
        return pl.cdiv(self.length, self.block)

    @property
    def tile(self):
        """The width of a tile."""
        return max(SMALLEST_TILE, pl.next_power_of_2(self.width))

    def spec(self, place, heads=None):
        # Whole tiles: else the interpreter would shift the last ones to where they fit.
        return pl.BlockSpec((None, self.blocks * self.block, heads, self.tile), place)

    def load(self, ref, index, *head):
        return _load(ref.at[self._rows(index), *head], self._inside(index, self.tile), 0)

    def store(self, ref, index, x, *head):
        plgpu.store(ref.at[self._rows(index), *head], x.astype(ref.dtype), mask=self._inside(index, self.tile))

    def load_labels(self, ref, index, other):
        return _load(ref.at[self._rows(index)], self._inside(index), other)

    def zeros(self):
        return jnp.zeros((self.block, self.tile), jnp.float32)

    def _rows(self, index):
        return pl.ds(index * self.block, self.block)

    def _inside(self, index, *tile):
        """Tell what of a block is there; nothing need be told of whole ones."""
        place = partial(lax.broadcasted_iota, jnp.int32, (self.block, *tile))
        masks = [index * self.block + place(0) < self.length] if self.length % self.block else []
        masks += [place(1) < self.width] if tile and self.width < self.tile else []
        return reduce(operator.and_, masks) if masks else None


class _Reach(NamedTuple):
    """The blocks of keys that a block of queries sees or, the other way round, of queries that see a block of keys.

    They span so many of a `total`, and begin `first` blocks after its own. As many are looked at even at the ends of a
    sequence, where fewer are seen.
    """

    first: int
    span: int
    total: int

    def blocks(self, piece=1):
        """How many are looked at for a piece of some blocks."""
        return min(self.span + piece - 1, self.total)

    def start(self, index, piece=1):
        return jnp.clip(index + self.first, 0, self.total - self.blocks(piece))


class _Block(NamedTuple):
    """A block of queries or of keys: products of their `match` are logits, and those of their `content` what these get.

    The content of keys is values, that of queries the cotangents of their outputs.
    """

    number: Array
    labels: Array
    match: Array
    content: Array | None = None


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
        return self._reach(self.keys, self.past - self.settings.before, self.past + self.settings.after)

    @property
    def seeing_queries(self):
        return self._reach(self.queries, -self.past - self.settings.after, -self.past + self.settings.before)

    def _reach(self, tokens, low, high):
        """Reach from `low` to `high` positions after one's own."""
        first, last = low // self.block, (high + self.block - 1) // self.block
        return _Reach(first, min(last - first + 1, tokens.blocks), tokens.blocks)

    @property
    def label_specs(self):
        lengths = [tokens.blocks * self.block for tokens in (self.queries, self.keys)]
        return [pl.BlockSpec((None, length), lambda _, head, row: (row, 0)) for length in lengths]

    def load_queries(self, queries, query_labels, cotangent, index, *head):
        labels = self.queries.load_labels(query_labels, index, NOBODY)
        content = None if cotangent is None else self.outputs.load(cotangent, index, *head)
        return _Block(index, labels, self.queries.load(queries, index, *head), content)

    def load_keys(self, keys, key_labels, values, index):
        labels = self.keys.load_labels(key_labels, index, HIDDEN)
        return _Block(index, labels, self.keys.load(keys, index), self.values.load(values, index))

    def logits(self, rows, columns, query_axis):
        """The logits, lowest where nothing is seen; where something is; and the slope of logits to products."""
        logits, slope = self.settings.scale * _dot(rows.match, columns.match, LAST), self.settings.scale
        if self.settings.soft_cap is not None:
            capped = jnp.tanh(logits / self.settings.soft_cap)
            logits, slope = self.settings.soft_cap * capped, self.settings.scale * (1 - capped * capped)
        places = [
            block.number * self.block + lax.broadcasted_iota(jnp.int32, logits.shape, axis)
            for axis, block in enumerate((rows, columns))
        ]
        distance = self.past + places[query_axis] - places[1 - query_axis]
        sees = (distance <= self.settings.before) & (distance >= -self.settings.after)
        sees &= rows.labels[:, None] == columns.labels[None, :]
        return jnp.where(sees, logits, LOWEST), sees, slope


def _program(queries, keys, values, block, settings):
    (_, seq, _, head_dim), (_, source, _, value_dim) = queries.shape, values.shape
    queries, keys = (_Tokens(length, head_dim, block) for length in (seq, source))
    values, outputs = (_Tokens(length, value_dim, block) for length in (source, seq))
    return _Program(queries, keys, values, outputs, settings)


def _forward_kernel(queries, keys, values, query_labels, key_labels, output, *, program):
    index = pl.program_id(0)
    mine = program.load_queries(queries, query_labels, None, index)

    def add(at, carry):
        peak, total, sums = carry
        near = program.load_keys(keys, key_labels, values, at)
        peak, kept, weights = _raise_peak(peak, *program.logits(mine, near, 0)[:2])
        return peak, kept * total + weights.sum(axis=1), kept[:, None] * sums + _dot(weights, near.content, INNER)

    nothing = *_unseen(program), program.outputs.zeros()
    _, total, sums = _for_each(program.seen_keys, index, add, nothing)
    # The largest weight is 1, which is exact. Divided before the product, it would be rounded.
    program.outputs.store(output, index, _inverse(total)[:, None] * sums)


def _backward_kernel(
    queries, keys, values, query_labels, key_labels, cotangent, dqueries, dkeys, dvalues, *facts,
    program, piece, group,
):  # fmt: skip
    """The gradients of a piece, given room for three facts about each of the queries that see it."""
    seeing, first = program.seeing_queries, pl.program_id(0) * piece
    first_known = seeing.start(first, piece)
    load_queries = partial(program.load_queries, queries, query_labels, cotangent)
    load_keys = partial(program.load_keys, keys, key_labels, values)
    place = lambda index, head: (head, pl.ds((index - first_known) * program.block, program.block))
    load_facts = lambda index, head: [plgpu.load(x.at[place(index, head)]) for x in facts]

    @pl.loop(0, seeing.blocks(piece) * group)
    def _(step):
        index, head = first_known + lax.div(step, group), lax.rem(step, group)
        for ref, fact in zip(facts, _look(program, load_queries(index, head), load_keys), strict=True):
            plgpu.store(ref.at[place(index, head)], fact)

    if not program.settings.interpret:
        # All threads shall see what each has stored.
        plgpu.debug_barrier()

    @pl.loop(0, piece * group)
    def _(step):
        index, head = first - program.past // program.block + lax.div(step, group), lax.rem(step, group)

        @pl.when((index >= 0) & (index < program.queries.blocks))
        def _():
            dquery = _query_gradient(program, load_queries(index, head), load_keys, load_facts(index, head))
            program.queries.store(dqueries, index, dquery, head)

    @pl.loop(0, piece)
    def _(step):
        index = first + step

        @pl.when(index < program.keys.blocks)
        def _():
            dkey, dvalue = _key_gradients(program, load_keys(index), load_queries, load_facts, group)
            program.keys.store(dkeys, index, dkey)
            program.values.store(dvalues, index, dvalue)


def _look(program, mine, load_keys):
    """What must be known of queries: the peak, what makes the weights sum to 1, and delta."""

    def add(at, carry):
        peak, total, delta = carry
        near = load_keys(at)
        peak, kept, weights = _raise_peak(peak, *program.logits(mine, near, 0)[:2])
        dweights = _dot(mine.content, near.content, LAST)
        return peak, kept * total + weights.sum(axis=1), kept * delta + (weights * dweights).sum(axis=1)

    nothing = *_unseen(program), jnp.zeros(program.block, jnp.float32)
    peak, total, delta = _for_each(program.seen_keys, mine.number, add, nothing)
    return peak, _inverse(total), _inverse(total) * delta


def _query_gradient(program, mine, load_keys, facts):
    facts = [x[:, None] for x in facts]

    def add(at, dquery):
        near = load_keys(at)
        _, dlogits = _differentiate(program, mine, near, facts, 0)
        return dquery + _dot(dlogits, near.match, INNER)

    return _for_each(program.seen_keys, mine.number, add, program.queries.zeros())


def _key_gradients(program, mine, load_queries, load_facts, group):
    """The gradients of keys and values, from the queries of all heads that share them."""

    def add(head, at, gradients):
        dkey, dvalue = gradients
        near = load_queries(at, head)
        # Keys x queries, so that no product has to turn round what it gets.
        weights, dlogits = _differentiate(program, mine, near, [x[None, :] for x in load_facts(at, head)], 1)
        return dkey + _dot(dlogits, near.match, INNER), dvalue + _dot(weights, near.content, INNER)

    def add_head(head, gradients):
        return _for_each(program.seeing_queries, mine.number, partial(add, head), gradients)

    return lax.fori_loop(0, group, add_head, (program.keys.zeros(), program.values.zeros()))


def _differentiate(program, rows, columns, facts, query_axis):
    """The weights, and the gradients of the products that the logits come from."""
    peak, inverse, delta = facts
    logits, sees, slope = program.logits(rows, columns, query_axis)
    weights = inverse * _weights(logits, peak, sees)
    return weights, weights * (_dot(rows.content, columns.content, LAST) - delta) * slope


def _for_each(reach, index, add, carry):
    """Go along the blocks that a block reaches."""
    start = reach.start(index)
    return lax.fori_loop(0, reach.span, lambda step, carry: add(start + step, carry), carry)


def _unseen(program):
    """The peak and the sum of weights before anything is seen."""
    return jnp.full(program.block, LOWEST, jnp.float32), jnp.zeros(program.block, jnp.float32)


def _raise_peak(peak, logits, sees):
    """The new peak, what remains of old weights relative to it, and the new weights."""
    new_peak = jnp.maximum(peak, logits.max(axis=1))
    return new_peak, jnp.exp(peak - new_peak), _weights(logits, new_peak[:, None], sees)


def _weights(logits, peak, sees):
    """Masked again, as the peak of a query without keys is lowest itself. Computed anew, a logit may pass its peak."""
    return jnp.where(sees, jnp.exp(jnp.minimum(logits - peak, 0.0)), 0.0)


def _inverse(total):
    return 1 / jnp.where(total == 0, 1, total)


def _load(ref, mask, other):
    return plgpu.load(ref, mask=mask, other=None if mask is None else jnp.asarray(other, ref.dtype))


def _dot(x, y, axes):
    """Products of factors in the dtype of `y`, summed in float32."""
    how = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    return lax.dot_general(x.astype(y.dtype), y, (axes, ((), ())), **how)
