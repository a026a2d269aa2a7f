r"""Causal Latte as Pallas kernels for TPUs.

A grid step reads one chunk of one row; chunks of a row come one after another, with the state in scratch memory. The
mathematics of a block of tokens is that of `chunked.py`, in the variables of one block:

    E_s = exp(k_s - M), M the largest key in sight      Z_t = sum of the E_s that t sees + a, a the state's mass
    p_t = w_t / Z_t                                     y_t = sum of the (p_t . E_s) v_s that t sees + p_t (a S)

The backward pass needs no states inside a chunk. It carries, from the end, what later tokens ask of the sums up to here
relative to the state's peak: $H$ (latents x dim) of the sum of values, and $c$ (latents) of the mass:

    dw_t = (S_t dy_t)         dE_s = H_s v_s + c_s      dv_s = E_s H_s
    H_s = sum over the u that see s of p_u dy_u^T       c_s = - sum over the same u of p_u dw_u

**Heads share a tile.** A TPU works on tiles of 128 lanes, and stores arrays in them: an array whose last axis is 16
latents would be padded eightfold in memory already. So as many heads as have 128 latents together lie side by side,
(seq, heads x latents) and (seq, heads x dim), and their states form one block-diagonal matrix. Products with the state
then use whole tiles (8 heads of 16 latents and 96 dims: 6 tiles of 128 x 128, where one by one each head would take a
tile of its own, and no lane is moved). Only the square products inside a block, which differ from head to head, are
done head by head; there the contraction over latents runs over the 128 lanes of all heads, masked.

**Steep keys.** Where a mass comes near the smallest float, the block is read token by token, in the kernel: a branch
that ordinary keys never take.
"""

from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from latte_eqx.ops.batching import output_like
from latte_eqx.ops.dispatch import Passes
from latte_eqx.ops.latte.passes import TOKEN_BY_TOKEN, asked_of_state, asked_of_sums
from latte_eqx.ops.latte.state import LOWEST, SMALLEST_MASS, LatteState, divide
from latte_eqx.ops.precision import product_precision

LANES = 128
# Tokens in a block at most. Longer ones spend more on squares, shorter ones more on states: in products of 128 x 128,
# 8 heads of 16 latents and 96 dims take 28 per 128 tokens; in blocks of 64 they would take 34, in blocks of 256, 41.
BLOCK = 128
# The largest tile of states where heads cannot be split into groups that fill tiles.
MOST_LATENTS, MOST_DIMS = 512, 2048
PARAMETERS = pltpu.CompilerParams(
    dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=48 * 2**20
)
# Which axes a product contracts: the last of both, the first of both, or, as in x @ y, the last and the first.
LAST, FIRST, INNER = ((1,), (1,)), ((0,), (0,)), ((1,), (0,))


def forward(
    weights: Float[Array, "*batch seq latents"],
    keys: Float[Array, "*batch seq latents"],
    values: Float[Array, "*batch seq dim"],
    segment_ids: Int[Array, "*#batch seq"] | None,
    state: LatteState,
    *,
    chunk: int,
    keep: bool,
    interpret: Any = False,
) -> tuple[Float[Array, "*batch seq dim"], LatteState, LatteState | None]:
    """Read the chunks one after another, rows and groups of heads side by side."""
    layout = _layout(keys, values, segment_ids, chunk)
    tokens = [layout.pack(x) for x in (weights, keys, values)]
    ids = [] if segment_ids is None else [layout.pack_ids(segment_ids)]
    start = layout.pack_state(state)
    kept = start if keep else []
    y, *states = pl.pallas_call(
        partial(_forward_kernel, layout, bool(ids), keep),
        grid=layout.grid,
        in_specs=[*map(layout.token_spec, tokens), *map(layout.id_spec, ids), *map(layout.state_spec, start)],
        out_specs=[layout.token_spec(tokens[2]), *map(layout.state_spec, start), *map(layout.boundary_spec, kept)],
        out_shape=[
            output_like(values, tokens[2].shape, values.dtype),
            *[output_like(values, x.shape) for x in start],
            *[output_like(values, (*x.shape[:2], layout.chunks, *x.shape[2:])) for x in kept],
        ],
        scratch_shapes=[*layout.state_scratch(), *layout.token_scratch(latents=2, dims=2, ids=bool(ids))],
        compiler_params=PARAMETERS,
        interpret=interpret,
    )(*tokens, *ids, *start)
    return layout.unpack(y), layout.unpack_state(states[:3]), layout.unpack_state(states[3:]) if keep else None


def backward(
    weights: Float[Array, "*batch seq latents"],
    keys: Float[Array, "*batch seq latents"],
    values: Float[Array, "*batch seq dim"],
    segment_ids: Int[Array, "*#batch seq"] | None,
    state: LatteState,
    last_state: LatteState,
    states: LatteState,
    dy: Float[Array, "*batch seq dim"],
    dstate: LatteState,
    *,
    chunk: int,
    interpret: Any = False,
) -> tuple[
    Float[Array, "*batch seq latents"], Float[Array, "*batch seq latents"], Float[Array, "*batch seq dim"], LatteState
]:
    """Go from the last chunk to the first."""
    layout = _layout(keys, values, segment_ids, chunk)._replace(is_reversed=True)
    tokens = [layout.pack(x) for x in (weights, keys, values, dy)]
    ids = [] if segment_ids is None else [layout.pack_ids(segment_ids)]
    boundaries = layout.pack_state(states)
    of_sum, of_mass = asked_of_sums(last_state, dstate)
    asked = layout.pack_state(LatteState(of_sum, last_state.peak, of_mass))
    dweights, dkeys, dvalues, of_sum, of_mass = pl.pallas_call(
        partial(_backward_kernel, layout, bool(ids)),
        grid=layout.grid,
        in_specs=[
            *map(layout.token_spec, tokens),
            *map(layout.id_spec, ids),
            *map(layout.boundary_spec, boundaries),
            *map(layout.state_spec, asked),
        ],
        out_specs=[*map(layout.token_spec, tokens[:3]), layout.state_spec(asked[0]), layout.state_spec(asked[2])],
        out_shape=[
            *[output_like(dy, x.shape, x.dtype) for x in tokens[:3]],
            output_like(dy, asked[0].shape),
            output_like(dy, asked[2].shape),
        ],
        scratch_shapes=[
            *layout.state_scratch() * layout.blocks,
            *layout.state_scratch()[::2],
            *layout.token_scratch(latents=6, dims=3, ids=bool(ids)),
        ],
        compiler_params=PARAMETERS,
        interpret=interpret,
    )(*tokens, *ids, *boundaries, *asked)
    asked = layout.unpack_state([of_sum, of_mass, of_mass])
    dfirst = asked_of_state(state, asked.average, asked.mass)
    return layout.unpack(dweights), layout.unpack(dkeys), layout.unpack(dvalues), dfirst


PASSES = Passes(forward, backward)


class _Layout(NamedTuple):
    """How arrays lie in memory: `groups` tiles of `heads` heads side by side, cut into `chunks` of `blocks` blocks."""

    batch: tuple[int, ...]
    rows: int
    groups: int
    heads: int
    latents: int
    dim: int
    chunks: int
    blocks: int
    block: int
    dtype: Any  # of the factors of products
    is_reversed: bool = False

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.rows, self.groups, self.chunks

    def pack(self, x):
        """Lay the heads of a token side by side."""
        *_, seq, width = x.shape
        x = x.reshape(self.rows, self.groups * self.heads, seq, width)
        return x.swapaxes(1, 2).reshape(self.rows, seq, -1)

    def unpack(self, x):
        """Undo `pack`."""
        x = x.reshape(self.rows, x.shape[1], self.groups * self.heads, -1)
        return x.swapaxes(1, 2).reshape(*self.batch, x.shape[1], -1)

    def pack_state(self, state: LatteState) -> list[Array]:
        """Lay the latents of a group's heads one below the other; of peaks and masses, side by side."""
        extra = state.peak.shape[len(self.batch) : -1]  # the chunks, if it is one state for each
        average = state.average.reshape(self.rows, self.groups, self.heads, *extra, self.latents, self.dim)
        average = jnp.moveaxis(average, 2, -3).reshape(self.rows, self.groups, *extra, -1, self.dim)

        def row(x):
            x = x.reshape(self.rows, self.groups, self.heads, *extra, self.latents)
            return jnp.moveaxis(x, 2, -2).reshape(self.rows, self.groups, *extra, 1, -1)

        return [average, row(state.peak), row(state.mass)]

    def unpack_state(self, arrays) -> LatteState:
        """Undo `pack_state`."""
        average, peak, mass = arrays
        extra = average.shape[2:-2]
        average = average.reshape(self.rows, self.groups, *extra, self.heads, self.latents, self.dim)

        def row(x):
            x = x.reshape(self.rows, self.groups, *extra, self.heads, self.latents)
            return jnp.moveaxis(x, -2, 2).reshape(*self.batch, *extra, self.latents)

        average = jnp.moveaxis(average, -3, 2).reshape(*self.batch, *extra, self.latents, self.dim)
        return LatteState(average, row(peak), row(mass))

    def pack_ids(self, segment_ids):
        """Count, in each block, from the document of the token before it; the first token of all continues one."""
        batch = self.batch[: len(self.batch) - (self.rows < prod(self.batch))]
        if len(batch) < len(self.batch):
            segment_ids = segment_ids[..., 0, :]
        ids = jnp.broadcast_to(segment_ids, (*batch, segment_ids.shape[-1])).reshape(self.rows, -1, self.block)
        before = jnp.concatenate([ids[:, :1, 0], ids[:, :-1, -1]], axis=1)
        return (ids - before[..., None]).astype(jnp.float32).reshape(self.rows, self.chunks, 1, -1)

    def _chunk(self, index):
        return self.chunks - 1 - index if self.is_reversed else index

    def token_spec(self, x):
        shape = (None, self.blocks * self.block, x.shape[-1] // self.groups)
        return pl.BlockSpec(shape, lambda row, group, index: (row, self._chunk(index), group))

    def id_spec(self, x):
        return pl.BlockSpec((None, None, *x.shape[2:]), lambda row, group, index: (row, self._chunk(index), 0, 0))

    def state_spec(self, x):
        """One state for all chunks of a row."""
        return pl.BlockSpec((None, None, *x.shape[-2:]), lambda row, group, index: (row, group, 0, 0))

    def boundary_spec(self, x):
        """One state for each chunk."""
        shape = (None, None, None, *x.shape[-2:])
        return pl.BlockSpec(shape, lambda row, group, index: (row, group, self._chunk(index), 0, 0))

    def state_scratch(self):
        """Memory for average (block-diagonal), peak and mass."""
        latents, dims = self.heads * self.latents, self.heads * self.dim
        return [pltpu.VMEM(shape, jnp.float32) for shape in ((latents, dims), (1, latents), (1, latents))]

    def token_scratch(self, *, latents: int, dims: int, ids: bool):
        """Float32 memory for a block's tokens that can be read one by one."""
        widths = [self.heads * self.latents] * latents + [self.heads * self.dim] * dims + [LANES] * ids
        return [pltpu.VMEM((self.block, width), jnp.float32) for width in widths]

    def is_own(self):
        """Tell which entries of a (latents, dims) matrix belong to the same head."""
        shape = (self.heads * self.latents, self.heads * self.dim)
        return _index(shape, 0, self.latents) == _index(shape, 1, self.dim)

    def spread(self, average):
        """Make the block-diagonal matrix of the heads' averages, which are one below the other."""
        return jnp.where(self.is_own(), jnp.tile(average, (1, self.heads)), 0)

    def gather(self, matrix):
        """Undo `spread`."""
        size = (self.latents, self.dim)
        parts = [matrix[tuple(slice(h * n, (h + 1) * n) for n in size)] for h in range(self.heads)]
        return jnp.concatenate(parts, axis=0)

    def of_head(self, head, x):
        """Set the latents of all other heads to zero."""
        if self.heads == 1:
            return x
        return jnp.where(_index(x.shape, 1, self.latents) == head, x, 0)

    def dims_of_head(self, head):
        return slice(head * self.dim, (head + 1) * self.dim)

    def dot(self, x, y, axes=INNER):
        """Multiply in the layout's dtype, and add up in float32."""
        how = {"precision": product_precision(self.dtype), "preferred_element_type": jnp.float32}
        return lax.dot_general(x.astype(self.dtype), y.astype(self.dtype), (axes, ((), ())), **how)


def _layout(keys, values, segment_ids, chunk) -> _Layout:
    *batch, seq, latents = keys.shape
    dim = values.shape[-1]
    # Rows that lie side by side share their documents.
    is_shared = segment_ids is None or segment_ids.shape[-2:-1] in ((), (1,))
    heads = _heads_in_a_tile(batch[-1], latents, dim) if batch and is_shared else None
    groups = 1 if heads is None else batch[-1] // heads
    rows = prod(batch) if heads is None else prod(batch[:-1])
    blocks = -(-chunk // BLOCK)
    dtype = jnp.bfloat16 if values.dtype == jnp.bfloat16 else jnp.float32
    return _Layout(tuple(batch), rows, groups, heads or 1, latents, dim, seq // chunk, blocks, chunk // blocks, dtype)


def _heads_in_a_tile(heads: int, latents: int, dim: int) -> int | None:
    """Return how many heads lie side by side: those that fill 128 lanes, else all; none if all would be too many."""
    parts = [n for n in range(1, heads + 1) if heads % n == 0]
    whole = [n for n in parts if n == heads or (n * latents % LANES == n * dim % LANES == 0)]
    fitting = [n for n in whole if n * latents <= LANES]
    chosen = fitting[-1] if fitting else whole[0]
    return None if chosen * latents > MOST_LATENTS or chosen * dim > MOST_DIMS else chosen


def _forward_kernel(layout: _Layout, has_ids, keep, weights, keys, values, *refs):
    ids, refs = (refs[0], refs[1:]) if has_ids else (None, refs)
    start, (y, *last), boundary, refs = refs[:3], refs[3:7], refs[7 : 7 + 3 * keep], refs[7 + 3 * keep :]
    state, slow = refs[:3], refs[3:]
    average, peak, mass = state

    @pl.when(pl.program_id(2) == 0)
    def _():
        average[...] = layout.spread(start[0][...])
        peak[...], mass[...] = start[1][...], start[2][...]

    if keep:
        _store_state(layout, boundary, state)
    for index in range(layout.blocks):
        rows = slice(index * layout.block, (index + 1) * layout.block)
        block = _load(layout, weights, keys, values, ids, peak[...], mass[...], rows)
        is_safe = block.is_safe()

        @pl.when(is_safe)
        def _(block=block, rows=rows):
            y[rows, :] = _read_block(layout, block, average[...]).astype(y.dtype)
            _advance(layout, block, state)

        @pl.when(~is_safe)
        def _(block=block, rows=rows):
            y[rows, :] = _read_tokens(layout, block, state, *slow).astype(y.dtype)

    @pl.when(pl.program_id(2) == layout.chunks - 1)
    def _():
        _store_state(layout, last, state)


def _backward_kernel(layout: _Layout, has_ids, weights, keys, values, dy, *refs):
    ids, refs = (refs[0], refs[1:]) if has_ids else (None, refs)
    boundary, asked, (dweights, dkeys, dvalues, *first) = refs[:3], refs[3:6], refs[6:11]
    states = [refs[11 + 3 * index : 14 + 3 * index] for index in range(layout.blocks)]
    (of_sum, of_mass), slow = refs[11 + 3 * layout.blocks :][:2], refs[13 + 3 * layout.blocks :]

    @pl.when(pl.program_id(2) == 0)
    def _():
        of_sum[...], of_mass[...] = layout.spread(asked[0][...]), asked[2][...]

    # The states before each block, from the one before the chunk.
    states[0][0][...] = layout.spread(boundary[0][...])
    states[0][1][...], states[0][2][...] = boundary[1][...], boundary[2][...]
    blocks = []
    for index, state in enumerate(states):
        rows = slice(index * layout.block, (index + 1) * layout.block)
        block = _load(layout, weights, keys, values, ids, state[1][...], state[2][...], rows)
        is_safe = block.is_safe()
        blocks.append((block, is_safe, state, rows))
        if index + 1 == layout.blocks:
            break
        after = states[index + 1]
        for x, y in zip(after, state, strict=True):
            x[...] = y[...]

        @pl.when(is_safe)
        def _(block=block, after=after):
            _advance(layout, block, after)

        @pl.when(~is_safe)
        def _(block=block, after=after):
            _walk(layout, block, after, lambda row: None, slow[1], slow[6], *slow[9:])

    for block, is_safe, state, rows in reversed(blocks):

        def write(gradients, rows=rows):
            for ref, gradient in zip((dweights, dkeys, dvalues), gradients, strict=True):
                ref[rows, :] = gradient.astype(ref.dtype)

        @pl.when(is_safe)
        def _(block=block, state=state, rows=rows, write=write):
            write(_unread_block(layout, block, state[0][...], dy[rows, :], of_sum, of_mass))

        @pl.when(~is_safe)
        def _(block=block, state=state, rows=rows, write=write):
            write(_unread_tokens(layout, block, state, dy[rows, :], of_sum, of_mass, *slow))

    @pl.when(pl.program_id(2) == layout.chunks - 1)
    def _():
        first[0][...], first[1][...] = layout.gather(of_sum[...]), of_mass[...]


def _store_state(layout, refs, state):
    refs[0][...] = layout.gather(state[0][...])
    refs[1][...], refs[2][...] = state[1][...], state[2][...]


class _Block(NamedTuple):
    """The tokens of a block, who sees whom, and the masses relative to the largest key in sight."""

    weights: Array
    keys: Array
    values: Array
    ids: Array  # (block, 1), 0 in the document that the state has seen
    sees: Array  # (target, source) is 1 where the source is not later and of the same document
    continues: Array | float  # (block, 1) is 1 in the document that the state has seen
    lasts: Array | float  # (block, 1) is 1 in the document that the block ends in
    keeps: Array | float  # (1, 1) is 1 if that is the same
    peak: Array  # the state's
    mass: Array
    reference: Array  # (1, latents), as are those two
    token_mass: Array  # (block, latents)
    state_mass: Array  # (1, latents)
    seen_mass: Array  # (block, latents)

    def is_safe(self):
        """Tell whether every token that has seen a key has a mass far from underflow."""
        small = self.seen_mass < SMALLEST_MASS
        is_lost = small & (self.keys > -jnp.inf)
        is_forgotten = small[:1] & (self.mass * self.continues_first() > 0)
        return jnp.max(jnp.where(is_lost, 1.0, 0.0)) + jnp.max(jnp.where(is_forgotten, 1.0, 0.0)) == 0

    def continues_first(self):
        return self.continues[:1] if isinstance(self.continues, Array) else self.continues

    def last_mass(self):
        """The mass of the document that the block ends in, relative to the reference."""
        return self.keeps * self.state_mass + (self.lasts * self.token_mass).sum(axis=0, keepdims=True)

    def last_peak(self):
        if not isinstance(self.lasts, Array):
            return self.reference
        largest = jnp.where(self.lasts > 0, self.keys, LOWEST).max(axis=0, keepdims=True)
        return jnp.maximum(largest, jnp.where(self.keeps > 0, self.peak, LOWEST))

    def last_scale(self, last_mass, last_peak):
        """Turn masses relative to the reference into ones relative to the peak of the last document."""
        return jnp.exp(jnp.where(last_mass > 0, self.reference - last_peak, 0))


def _load(layout, weights, keys, values, ids, peak, mass, rows) -> _Block:
    weights, keys = (x[rows, :].astype(jnp.float32) for x in (weights, keys))
    square = (layout.block, layout.block)
    not_later = _index(square, 0) >= _index(square, 1)
    continues = lasts = keeps = 1.0
    if ids is None:
        column, sees = jnp.zeros((layout.block, 1)), jnp.where(not_later, 1.0, 0.0)
    else:
        sources = jnp.broadcast_to(ids[:, rows], square)
        targets = sources.T
        column, last = targets[:, :1], targets[-1:, :1]
        sees = jnp.where(not_later & (sources == targets), 1.0, 0.0)
        continues, lasts, keeps = (jnp.where(x, 1.0, 0.0) for x in (column == 0, column == last, last == 0))
    # The state matters to the reference only if some token sees it.
    seen_peak = peak if ids is None else jnp.where(column[:1] == 0, peak, LOWEST)
    reference = jnp.maximum(keys.max(axis=0, keepdims=True), seen_peak)
    token_mass = jnp.exp(keys - reference)
    state_mass = mass * jnp.exp(jnp.minimum(peak - reference, 0))
    if ids is not None:
        state_mass = jnp.where(column[:1] == 0, state_mass, 0)
    seen_mass = _exact_dot(sees, token_mass, INNER) + continues * state_mass
    return _Block(
        weights, keys, values[rows, :], column, sees, continues, lasts, keeps,
        peak, mass, reference, token_mass, state_mass, seen_mass,
    )  # fmt: skip


def _read_block(layout, block: _Block, average):
    share = divide(block.weights, block.seen_mass)
    mixed = []
    for head in range(layout.heads):
        mixing = layout.dot(layout.of_head(head, share), block.token_mass, LAST) * block.sees
        mixed.append(layout.dot(mixing, block.values[:, layout.dims_of_head(head)]))
    return jnp.concatenate(mixed, axis=1) + layout.dot(block.continues * share * block.state_mass, average)


def _advance(layout, block: _Block, state):
    """Write the state after a block."""
    average, peak, mass = state
    last_mass, last_peak = block.last_mass(), block.last_peak()
    added = layout.dot(divide(block.lasts * block.token_mass, last_mass), block.values, FIRST)
    kept = divide(block.keeps * block.state_mass, last_mass)
    average[...] = kept.T * average[...] + jnp.where(layout.is_own(), added, 0)
    peak[...], mass[...] = last_peak, last_mass * block.last_scale(last_mass, last_peak)


def _unread_block(layout, block: _Block, average, dy, of_sum, of_mass):
    """Return the cotangents of the tokens; turn what is asked after the block into what is asked before it."""
    share = divide(block.weights, block.seen_mass)
    dshare = block.continues * block.state_mass * layout.dot(dy, average, LAST)
    dtoken_mass = jnp.zeros_like(share)
    dvalues = []
    for head in range(layout.heads):
        dims = layout.dims_of_head(head)
        mixing = layout.dot(layout.of_head(head, share), block.token_mass, LAST) * block.sees
        agreement = layout.dot(dy[:, dims], block.values[:, dims], LAST) * block.sees
        dshare += layout.of_head(head, layout.dot(agreement, block.token_mass))
        dtoken_mass += layout.of_head(head, layout.dot(agreement, share, FIRST))
        dvalues.append(layout.dot(mixing, dy[:, dims], FIRST))
    dweights = divide(dshare, block.seen_mass)
    dseen_mass = -dweights * share

    last_mass = block.last_mass()
    scale = block.last_scale(last_mass, block.last_peak())
    after_sum, after_mass = scale.T * of_sum[...], scale * of_mass[...]
    dtoken_mass += _exact_dot(block.sees, dseen_mass, FIRST)
    dtoken_mass += block.lasts * (layout.dot(block.values, after_sum, LAST) + after_mass)
    last_token_mass = block.lasts * block.token_mass
    dvalues = jnp.concatenate(dvalues, axis=1) + layout.dot(last_token_mass, after_sum)

    decay = jnp.exp(jnp.minimum(block.peak - block.reference, 0))
    asked = layout.dot(block.continues * share, dy, FIRST)
    of_sum[...] = decay.T * (block.keeps * after_sum + jnp.where(layout.is_own(), asked, 0))
    of_mass[...] = decay * (block.keeps * after_mass + (block.continues * dseen_mass).sum(axis=0, keepdims=True))
    return dweights, dtoken_mass * block.token_mass, dvalues


@jax.named_scope(TOKEN_BY_TOKEN)
def _read_tokens(layout, block: _Block, state, weights, keys, values, y, *ids):
    """The slow way: token by token, advancing the state. The last arguments are memory."""
    weights[...] = block.weights

    def mix(row):
        y[row, :] = (weights[row, :].T * state[0][...]).sum(axis=0, keepdims=True)

    _walk(layout, block, state, mix, keys, values, *ids)
    return y[...]


@jax.named_scope(TOKEN_BY_TOKEN)
def _unread_tokens(
    layout,
    block: _Block,
    state,
    dy,
    of_sum,
    of_mass,
    weights,
    keys,
    peaks,
    masses,
    dweights,
    dkeys,
    values,
    dys,
    dvalues,
    *ids,
):
    """The slow way: once forwards, for the states that each token has seen, and once backwards."""
    weights[...], dys[...] = block.weights, dy.astype(jnp.float32)

    def compare(row):
        peaks[row, :], masses[row, :] = state[1][...], state[2][...]
        dweights[row, :] = _exact_dot(dys[row, :], state[0][...], LAST)

    _walk(layout, block, state, compare, keys, values, *ids)
    own = layout.is_own()

    def step(index, later):
        later_peak, later_id = later
        row = pl.ds(layout.block - 1 - index, 1)
        peak, dweight = peaks[row, :], dweights[row, :]
        # A later token's peak is lower only in another document.
        decay, token_id = jnp.exp(jnp.minimum(peak - later_peak, 0)), None
        if ids:
            token_id = ids[0][row, :1]
            decay *= _is_same(token_id, later_id)
        share = divide(weights[row, :], masses[row, :])
        of_sum[...] = decay.T * of_sum[...] + jnp.where(own, share.T * dys[row, :], 0)
        of_mass[...] = decay * of_mass[...] - share * dweight
        token_mass = jnp.exp(keys[row, :] - peak)
        dkeys[row, :] = token_mass * (_exact_dot(values[row, :], of_sum[...], LAST) + of_mass[...])
        dvalues[row, :] = (token_mass.T * of_sum[...]).sum(axis=0, keepdims=True)
        return peak, token_id

    last_id = block.ids[-1:] if ids else None
    first_peak, first_id = lax.fori_loop(0, layout.block, step, (peaks[-1:, :], last_id))
    decay = jnp.exp(jnp.minimum(block.peak - first_peak, 0))
    if ids:
        decay *= _is_same(first_id, jnp.zeros_like(first_id))
    of_sum[...], of_mass[...] = decay.T * of_sum[...], decay * of_mass[...]
    return dweights[...], dkeys[...], dvalues[...]


@jax.named_scope(TOKEN_BY_TOKEN)
def _walk(layout, block: _Block, state, visit, keys, values, *ids):
    """Advance the state token by token, and visit it after each; the last arguments are memory."""
    average, peak, mass = state
    keys[...], values[...] = block.keys, block.values.astype(jnp.float32)
    if ids:
        ids[0][...] = jnp.broadcast_to(block.ids, ids[0].shape)
    own = layout.is_own()

    def step(index, last_id):
        row = pl.ds(index, 1)
        old_average, old_peak, old_mass, token_id = average[...], peak[...], mass[...], None
        if ids:
            token_id = ids[0][row, :1]
            keeps = _is_same(token_id, last_id)
            old_average, old_mass = keeps * old_average, keeps * old_mass
            old_peak = keeps * old_peak + (1 - keeps) * LOWEST
        peak[...] = jnp.maximum(old_peak, keys[row, :])
        added = jnp.exp(keys[row, :] - peak[...])
        mass[...] = old_mass * jnp.exp(old_peak - peak[...]) + added
        # As a step towards the value: two rounded shares would not add up to one, and the average would drift.
        share = divide(added, mass[...])
        average[...] = old_average + jnp.where(own, share.T * (values[row, :] - old_average), 0)
        visit(row)
        return token_id

    lax.fori_loop(0, layout.block, step, jnp.zeros((1, 1)) if ids else None)


def _index(shape, axis, size=1):
    """Number the places along an axis in steps of `size`. (`//` would ask for a TPU while lowering.)"""
    return lax.div(lax.broadcasted_iota(jnp.int32, shape, axis), jnp.int32(size))


def _is_same(x, y):
    return jnp.where(x == y, 1.0, 0.0)


def _exact_dot(x, y, axes):
    """Multiply in float32: for masses, whose small terms count, and where there is no hurry."""
    precision = lax.Precision.HIGHEST
    return lax.dot_general(x, y, (axes, ((), ())), precision=precision, preferred_element_type=jnp.float32)
