r"""Causal Latte on GPUs, in Triton by way of Pallas: all pieces of all rows at once.

A piece is a whole number of chunks, as many as still leave a program for each multiprocessor. With enough rows that is
all of them, and each pass is one kernel that reads a row along its chunks. Else each pass is three kernels, since sums
over tokens are sums over pieces. Forward: what each piece adds to the state; the states before each piece, one after
another; the outputs. Backward: what each piece asks of the state before it; what all later ones ask, one after another
from the last; the cotangents. With $m$ the peaks and $z$ the masses,

    H_s = sum_{u>=s} exp(m_s - m_u) (w_u / z_u) dy_u^T        c_s = -sum_{u>=s} exp(m_s - m_u) (w_u / z_u) dw_u

are all that a token needs of later ones: dk_s = exp(k_s - m_s) (H_s v_s + c_s) and dv_s = exp(k_s - m_s)^T H_s. In the
code H is the `pull` on the values, and c the `push` on the masses. The cotangents of a chunk's weights go forwards,
from the state before it, and then those of its keys and values backwards, while the chunk is still in the cache.

Tokens lie in memory as projections give them, (seq, heads, width), and a program takes the rows of its head.

A chunk is read block by block. The masses in a block are relative to one reference, the largest key that any of its
tokens sees. That is exact while no mass is e^50 below the reference. Pieces in which one is are reported and read again
by a kernel that takes such tokens one by one, each relative to the largest key that it sees itself. For all other
pieces that kernel has nothing to do: ordinary keys never pay for it, not even with the registers it needs.
"""

import operator
from functools import partial, reduce, wraps
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from latte_eqx.ops.batching import output_like
from latte_eqx.ops.dispatch import Passes
from latte_eqx.ops.latte.passes import TOKEN_BY_TOKEN, asked_of_state, asked_of_sums
from latte_eqx.ops.latte.state import LOWEST, SMALLEST_MASS, LatteState


class _Plan(NamedTuple):
    """How a kernel cuts its piece: tokens in a block, columns of values in one product, warps, and latents at least."""

    block: int
    columns: int
    warps: int
    latents: int = 16


# What compiles without spilling registers, on an A100 and an H100, with 64, 96, 128 and 256 dims. A block of 32 tokens
# takes up to 243 of the 255 registers that each of 128 threads has; most are addresses in shared memory. Wider values
# need twice the threads. Products of float32 factors are not for matrix units, and hold whole rows of both factors in
# registers. So many threads share fewer than 32 latents badly.
NARROW, WIDE, FLOAT32 = _Plan(32, 64, 4), _Plan(16, 128, 8, latents=32), _Plan(16, 32, 8, latents=32)
# In the backward pass a block of 32 tokens would spill, and so would more columns of float32.
BACKWARD_BLOCK, BACKWARD_FLOAT32_COLUMNS = 16, 16
# Heads with more columns of float32 would spill whatever the plan: programs share them, and each has so many at most.
# What all columns say of weights and keys is then added up: in bfloat16 that would be most of what is moved.
MOST_FLOAT32_COLUMNS = 128
# Exact kernels are rarely run.
EXACT_WARPS = 8
# The kernels that go along the pieces take so many columns of the state each, and load so many pieces ahead.
CARRIED_COLUMNS, CARRYING_WARPS, AHEAD = 32, 4, 4
# One for each multiprocessor: a GPU has 108 or 132.
ENOUGH_PROGRAMS = 128


def forward(
    weights: Float[Array, "*batch seq latents"],
    keys: Float[Array, "*batch seq latents"],
    values: Float[Array, "*batch seq dim"],
    segment_ids: Int[Array, "*#batch seq"] | None,
    state: LatteState,
    *,
    chunk: int,
    keep: bool,
    interpret: bool = False,
) -> tuple[Float[Array, "*batch seq dim"], LatteState, LatteState | None]:
    """Return the outputs, the last state, and the states before each chunk."""
    call = _Caller(keys, values, segment_ids, chunk, interpret)
    w, k, v = call.cut(weights), call.cut(keys), call.cut(values, call.splits)
    average, peak, mass = call.of_programs(state.average, state.peak, state.mass)
    # An empty state has no average, whatever stands in its place.
    states = [jnp.where(mass[..., None] > 0, average, 0.0), peak, mass]
    if call.pieces > 1:
        # Nobody comes after the last piece.
        added = call.each_piece(_add_up, [k, v], call.states(call.pieces - 1))
        states = call.along(_carry, [*added, *states], call.states(call.pieces))
    outputs = [call.like(v), *call.states(1), *(call.states(call.chunks) if keep else [])]
    y, *states = call.each_piece_exactly(_read, [w, k, v, *states], outputs)
    last, kept = [x[:, 0] for x in states[:3]], states[3:]
    return call.uncut(y), LatteState(*call.batched(*last)), LatteState(*call.batched(*kept)) if keep else None


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
    interpret: bool = False,
) -> tuple[
    Float[Array, "*batch seq latents"], Float[Array, "*batch seq latents"], Float[Array, "*batch seq dim"], LatteState
]:
    """Return the cotangents of weights, keys, values and the first state."""
    call = _Caller(keys, values, segment_ids, chunk, interpret)
    tokens = w, k, v, _ = call.cut(weights), call.cut(keys), call.cut(values, call.splits), call.cut(dy, call.splits)
    boundaries = call.of_programs(states.average, states.peak, states.mass)
    of_sum, of_mass = asked_of_sums(last_state, dstate)
    # What is asked of masses is the sum over programs.
    *later, last_peak = call.of_programs(of_sum, of_mass / call.splits, last_state.peak)
    if call.pieces > 1:
        # Nobody comes before the first piece.
        outputs = call.states(call.pieces - 1)[:2]
        asked = call.each_piece_exactly(_ask, [*tokens, *boundaries], outputs, skip=1)
        peaks = jnp.concatenate([boundaries[1][:, :: call.chunks // call.pieces], last_peak], axis=1)
        later = call.along(_carry_back, [*asked, peaks, *later], call.states(call.pieces)[:2])
    outputs = [call.summands(w), call.summands(k), call.like(v), *call.states(call.pieces)[:2], *call.blocks]
    dweights, dkeys, dvalues, pull, push, *_ = call.each_piece_exactly(_unread, [*tokens, *boundaries, *later], outputs)
    of_sum, of_mass = call.batched(pull[:, 0], push[:, 0], add=True)
    dfirst = asked_of_state(state, of_sum, of_mass)
    return call.added(dweights, weights.dtype), call.added(dkeys, keys.dtype), call.uncut(dvalues), dfirst


PASSES = Passes(forward, backward)


class _Caller:
    """Calls kernels: for each piece of each row by itself, or along the pieces of each row.

    A row is of one head. Where heads are too wide for a program, `splits` of them share it, and each takes its columns
    as a narrower head with the same weights and keys.
    """

    def __init__(self, keys, values, segment_ids, chunk, interpret):
        self.batch, seq, latents, dim = keys.shape[:-2], *keys.shape[-2:], values.shape[-1]
        self.heads = self.batch[-1] if len(self.batch) > 1 else 1
        self.chunks, is_float32 = seq // chunk, values.dtype == jnp.float32
        splits = pl.cdiv(dim, MOST_FLOAT32_COLUMNS) if is_float32 else 1
        self.splits = splits if dim % splits == 0 else 1
        self.programs = prod(self.batch) * self.splits
        self.pieces = _pieces(self.programs, self.chunks)
        self.plan = FLOAT32 if is_float32 else NARROW if dim <= 128 else WIDE
        self.program = _Program(
            latents, dim // self.splits, seq // self.pieces, chunk, self.plan.block, self.plan.columns,
            values.dtype, interpret,
        )  # fmt: skip
        self.output = partial(output_like, keys)
        self.ids = [] if segment_ids is None else [self._id_rows(segment_ids)]
        # The peaks and masses before the blocks of a chunk.
        blocks = self.output((self.programs, self.pieces * (chunk // BACKWARD_BLOCK), latents))
        self.blocks = [blocks, blocks]

    def states(self, count):
        """So many states for each program of a row."""
        shape = self.programs, count, self.program.latents
        return [self.output((*shape, self.program.dim)), self.output(shape), self.output(shape)]

    def like(self, x):
        return self.output(x.shape, x.dtype)

    def summands(self, x):
        """What each program of a row says of weights or keys: beside float32 values in float32, even if `x` is not."""
        *shape, heads, width = x.shape
        dtype = jnp.float32 if self.program.dtype == jnp.float32 else x.dtype
        return self.output((*shape, heads * self.splits, width), dtype)

    def cut(self, x, splits=1):
        """Cut tokens into pieces, with the heads of a token side by side: so it was before heads were set apart."""
        x = x if self.heads == 1 else x.swapaxes(-3, -2)
        return x.reshape(-1, self.pieces, self.program.piece, self.heads * splits, x.shape[-1] // splits)

    def uncut(self, x):
        """Undo `cut`."""
        seq = self.pieces * self.program.piece
        if self.heads == 1:
            return x.reshape(*self.batch, seq, -1)
        return x.reshape(*self.batch[:-1], seq, self.heads, -1).swapaxes(-3, -2)

    def added(self, x, dtype):
        """Add up what the programs of a row say."""
        if self.splits > 1:
            x = x.reshape(*x.shape[:3], self.heads, self.splits, x.shape[-1]).sum(axis=-2)
        return self.uncut(x).astype(dtype)

    def of_programs(self, wide, *narrow):
        """States of rows, with an axis of chunks: one for each, or a single one. A program has its columns of them."""
        rows, latents, dim = prod(self.batch), self.program.latents, self.program.dim
        wide = jnp.moveaxis(wide.reshape(rows, -1, latents, self.splits, dim), -2, 1)
        narrow = [jnp.broadcast_to(x.reshape(rows, 1, -1, latents), (*wide.shape[:3], latents)) for x in narrow]
        return [x.reshape(self.programs, *x.shape[2:]) for x in (wide, *narrow)]

    def batched(self, wide, *narrow, add=False):
        """Undo `of_programs`: what is not of columns is the same for all programs of a row, or to be added up."""
        wide, *narrow = (x.reshape(-1, self.splits, *x.shape[1:]) for x in (wide, *narrow))
        wide = jnp.moveaxis(wide, 1, -2)
        wide = wide.reshape(*wide.shape[:-2], -1)
        narrow = [x.sum(axis=1) if add and self.splits > 1 else x[:, 0] for x in narrow]
        return [x.reshape(*self.batch, *x.shape[1:]) for x in (wide, *narrow)]

    def each_piece(self, kernel, inputs, outputs, skip=0):
        """Call a kernel for each piece of the first output; of the inputs, the first pieces can be skipped."""
        grid = self.programs, outputs[0].shape[1]
        specs = [self._by_piece(x, skip) for x in inputs], [self._by_piece(x) for x in outputs]
        return self._call(kernel, kernel.__name__, grid, inputs, outputs, *specs, self.plan.warps, skip)

    def each_piece_exactly(self, kernel, inputs, outputs, skip=0):
        """Call a kernel for each piece, and then its exact form for the pieces that it says are unsafe."""
        grid = self.programs, outputs[0].shape[1]

        def fast(program, *refs):
            refs[-1][0] = kernel(program, *refs[:-1])

        def exact(program, *refs):
            @pl.when(refs[0][0] > 0)
            def _():
                kernel(program._replace(exact=True), *refs[1 : 1 + len(inputs)], *refs[-len(outputs) :])

        *results, flags = self.each_piece(wraps(kernel)(fast), inputs, [*outputs, self.output(grid, jnp.int32)], skip)
        in_specs = [self._by_piece(flags), *(self._by_piece(x, skip) for x in inputs), *map(self._by_piece, results)]
        out_specs = [self._by_piece(x) for x in outputs]
        # What the first kernel has written stays where it is.
        first = len(self.ids) + 1 + len(inputs)
        aliases = {first + i: i for i in range(len(outputs))}
        name, again = f"{kernel.__name__}_exact", [flags, *inputs, *results]
        with jax.named_scope(TOKEN_BY_TOKEN):
            return self._call(exact, name, grid, again, outputs, in_specs, out_specs, EXACT_WARPS, skip, aliases)

    def along(self, kernel, inputs, outputs):
        """Call a kernel for some columns of all states in each row."""

        def spec(x):
            _, count, latents, *dim = x.shape
            block = None, count, _padded(latents), *(CARRIED_COLUMNS for _ in dim)
            return pl.BlockSpec(block, lambda row, part: (row, 0, 0, part)[: x.ndim])

        grid = self.programs, pl.cdiv(self.program.dim, CARRIED_COLUMNS)
        in_specs, out_specs = map(spec, inputs), map(spec, outputs)
        return self._call(kernel, kernel.__name__, grid, inputs, outputs, in_specs, out_specs, CARRYING_WARPS)

    def _call(self, kernel, name, grid, inputs, outputs, in_specs, out_specs, warps, skip=0, aliases=None):
        def run(*refs):
            ids, refs = (refs[0], refs[1:]) if self.ids else (None, refs)
            kernel(self.program._replace(ids=ids, index=pl.program_id(1) + skip), *refs)

        return pl.pallas_call(
            run,
            grid=grid,
            in_specs=[*map(self._by_row, self.ids), *in_specs],
            out_specs=list(out_specs),
            out_shape=outputs,
            input_output_aliases=aliases or {},
            compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
            name=f"latte{name}",
            interpret=self.program.interpret,
        )(*self.ids, *inputs)

    def _id_rows(self, ids):
        """Documents of rows, once for all heads that share them."""
        *batch, seq = (1,) * (len(self.batch) + 1 - ids.ndim) + ids.shape
        rows = (*self.batch[:-1], batch[-1]) if self.heads > 1 else self.batch
        return jnp.broadcast_to(ids.reshape(*batch, seq), (*rows, seq)).reshape(-1, seq)

    def _by_row(self, ids):
        heads = self.programs // ids.shape[0]
        return pl.BlockSpec((None, ids.shape[1]), lambda row, _: (row // heads, 0))

    def _by_piece(self, x, skip=0):
        if x.ndim == 5:
            # Tokens, of which a program sees one head, or its part of one.
            *_, tokens, heads, width = x.shape
            each, sharing = self.heads * self.splits, self.heads * self.splits // heads
            place = lambda row, piece: (row // each, piece + skip, 0, row % each // sharing, 0)
            return pl.BlockSpec((None, None, tokens, None, _padded(width, self.plan.latents)), place)
        # So many for each piece, or one for the row.
        _, total, *sizes = x.shape
        count = max(1, total // self.pieces)
        place = lambda row, piece: (row, jnp.minimum(piece + skip, total // count - 1), 0, 0)[: x.ndim]
        return pl.BlockSpec((None, count, *(_padded(size, self.plan.latents) for size in sizes)), place)


def _pieces(rows: int, chunks: int) -> int:
    """Into how many pieces of as many chunks each to cut a row."""
    enough = (pieces for pieces in range(1, chunks) if chunks % pieces == 0 and rows * pieces >= ENOUGH_PROGRAMS)
    return next(enough, chunks)


class _Program(NamedTuple):
    """What a program works on, and its ways to memory. Values are taken in parts of a few columns each."""

    latents: int
    dim: int
    piece: int  # of so many tokens
    chunk: int
    block: int
    columns: int
    dtype: Any  # of the factors of products
    interpret: bool
    ids: Any = None
    index: Any = None  # the piece, or the columns that are carried
    exact: bool = False  # or to leave out, and report, what a common reference is too large for

    def backward(self):
        """The same for a kernel of the backward pass."""
        columns = BACKWARD_FLOAT32_COLUMNS if self.dtype == jnp.float32 else self.columns
        return self._replace(block=BACKWARD_BLOCK, columns=columns)

    def parts(self):
        columns = min(self.columns, _padded(self.dim))
        return [(pl.ds(start, columns), min(columns, self.dim - start)) for start in range(0, self.dim, columns)]

    def rows(self, index, token=None):
        """Where a block's tokens, or one of them, stand in the piece."""
        return pl.ds(index * self.block, self.block) if token is None else pl.ds(index * self.block + token, 1)

    def load_latents(self, ref, rows, other=0.0):
        return _load(ref.at[rows], self.latents, other=other).astype(jnp.float32)

    def store_latents(self, ref, rows, x):
        _store(ref.at[rows], x, self.latents)

    def load(self, ref, rows):
        return [_load(ref.at[rows, part], width) for part, width in self.parts()]

    def store(self, ref, rows, x):
        for (part, width), x_part in zip(self.parts(), x, strict=True):
            _store(ref.at[rows, part], x_part, width)

    def load_state(self, *refs, index=0):
        """Load an average or a pull, and what goes with it."""
        index = _traced(index)
        wide = [_load(refs[0].at[index, :, part], self.latents, width) for part, width in self.parts()]
        return wide, *(_load(x.at[index], self.latents) for x in refs[1:])

    def store_state(self, refs, wide, *narrow, index=0):
        index = _traced(index)
        for (part, width), x in zip(self.parts(), wide, strict=True):
            _store(refs[0].at[index, :, part], x, self.latents, width)
        for ref, x in zip(refs[1:], narrow, strict=True):
            _store(ref.at[index], x, self.latents)

    def wait(self):
        """Let all threads see what each has stored."""
        if not self.interpret:
            plgpu.debug_barrier()

    def rounded(self, x):
        return x.astype(self.dtype).astype(jnp.float32)

    def dot(self, x, y, x_axis, y_axis):
        """Sum over an axis of each, in float32."""
        if x.shape[0] == 1:
            # One token: too little for a matrix unit.
            x, y = x.astype(jnp.float32), y.astype(jnp.float32)
            if x_axis == y_axis == 1:
                return (x * y).sum(axis=1)[None]
            product = x.reshape(x.shape[1], 1) * y
            return product if x_axis == 0 else product.sum(axis=0)[None]
        return lax.dot_general(
            x.astype(self.dtype),
            y.astype(self.dtype),
            (((x_axis,), (y_axis,)), ((), ())),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )

    def dots(self, x, y):
        """Sum over the columns of both."""
        return sum(self.dot(x_part, y_part, 1, 1) for x_part, y_part in zip(x, y, strict=True))


class _Block(NamedTuple):
    """The keys of a block, and the peak and mass of the state before it."""

    program: _Program
    keys: Array
    peak: Array
    mass: Array
    lasts: Array | float  # (token, 1) is 1 in the document that the block ends in
    joined: Array | float  # is 1 if that is the document that the state is of

    def token_mass(self, reference):
        """Rounded here once, so that all shares of a token sum to one."""
        return self.program.rounded(_mass(self.keys, reference))

    def start_mass(self, reference):
        return self.mass * _mass(self.peak, reference)

    def seen_mass(self, targets, reference):
        own = self.program.dot(targets.sees, self.token_mass(reference), 1, 0)
        return own + targets.continues * self.start_mass(reference)[None]

    def last_peak(self):
        """The largest key of the document that the block ends in."""
        if isinstance(self.lasts, float):
            return jnp.maximum(self.keys.max(axis=0), self.peak)
        peak = jnp.where(self.lasts > 0, self.keys, LOWEST).max(axis=0)
        return jnp.maximum(peak, jnp.where(self.joined > 0, self.peak, LOWEST))

    def after(self, average, values):
        """The state after the block."""
        peak = self.last_peak()
        token_mass = self.lasts * self.token_mass(peak)
        start_mass = self.joined * self.start_mass(peak)
        mass = start_mass + token_mass.sum(axis=0)
        added = [self.program.dot(token_mass, v, 0, 0) for v in values]
        sums = [start_mass[:, None] * x + new for x, new in zip(average, added, strict=True)]
        return _scale(_inverse(mass), sums), peak, mass


def _block(program, keys, index, peak, mass):
    keys = program.load_latents(keys, program.rows(index), other=-jnp.inf)
    ids = program.ids
    if ids is None:
        return _Block(program, keys, peak, mass, 1.0, 1.0)
    start = program.index * program.piece + index * program.block
    before, last = ids[jnp.maximum(start - 1, 0)], ids[start + program.block - 1]
    # A first token that begins a document finds an empty state.
    kept = ids[start] == before
    lasts = (ids[pl.ds(start, program.block)] == last).astype(jnp.float32)[:, None]
    joined = (last == before).astype(jnp.float32)
    return _Block(program, keys, jnp.where(kept, peak, LOWEST), jnp.where(kept, mass, 0.0), lasts, joined)


class _Targets(NamedTuple):
    """Tokens of a block, all or one of them, and what they see."""

    token: Array | None
    sees: Array  # (target, source) is 1 where the source is not later and of the same document
    continues: Array | float  # (target, 1) is 1 in the document of the state before the block
    from_start: Array | float  # (target, 1) is 1 in the document of the state before the piece

    def place(self, x):
        """Give each target its row in the block."""
        if self.token is None:
            return x
        row = lax.broadcasted_iota(jnp.int32, (self.sees.shape[1], 1), 0)
        return jnp.where(row == self.token, x, 0.0)


def _targets(program, index, token):
    count, first = (program.block, 0) if token is None else (1, token)
    # What is the same for all blocks is kept from one to the next, in many registers if it is a factor of float32
    # products. So for them these are places in the piece.
    origin = index * program.block if program.dtype == jnp.float32 else 0
    target = lax.broadcasted_iota(jnp.int32, (count, program.block), 0) + (origin + first)
    sees = lax.broadcasted_iota(jnp.int32, (count, program.block), 1) + origin <= target
    ids = program.ids
    if ids is None:
        return _Targets(token, sees.astype(jnp.float32), 1.0, 1.0)
    piece_start = program.index * program.piece
    start = piece_start + index * program.block
    own = ids[pl.ds(start + first, count)][:, None]
    sees &= own == ids[pl.ds(start, program.block)][None]
    continues, from_start = (own == ids[jnp.maximum(x - 1, 0)] for x in (start, piece_start))
    return _Targets(token, sees.astype(jnp.float32), continues.astype(jnp.float32), from_start.astype(jnp.float32))


def _for_each_reference(block, everyone, look, add, sums):
    """Add up what tokens contribute, given a reference and the inverses of their masses, which are 0 to leave one out.

    `everyone` is what `add` wants of all tokens, first of all the targets, and `look` gives the same of one token.
    Tokens that a common reference is too large for are reported or, by an exact program, added one by one.
    """
    reference = jnp.maximum(block.keys.max(axis=0), block.peak)
    mass = block.seen_mass(everyone[0], reference)
    small = mass < SMALLEST_MASS
    sums = add(sums, *everyone, reference, jnp.where(small, 0.0, 1 / mass))
    has_seen = (block.keys > -jnp.inf) | (everyone[0].continues * block.mass[None] > 0)
    unsafe = (small & has_seen).astype(jnp.int32).max()
    if not block.program.exact:
        return sums, unsafe
    left = small.astype(jnp.float32)

    def add_token(token, sums):
        one = look(token)
        targets = one[0]
        visible = targets.sees.reshape(targets.sees.shape[1], 1) > 0
        peak = block.peak
        if not isinstance(targets.continues, float):
            peak = jnp.where(targets.continues[0] > 0, peak, LOWEST)
        reference = jnp.maximum(jnp.where(visible, block.keys, LOWEST).max(axis=0), peak)
        inverse_mass = _inverse(block.seen_mass(targets, reference))
        is_left = targets.place(left).max(axis=0)[None]
        return add(sums, *one, reference, is_left * inverse_mass)

    return lax.fori_loop(0, unsafe * block.program.block, add_token, sums), 0


def _add_up(program, keys, values, average, peak, mass):
    """What a piece adds to the state: the average of its last document, relative to its own peak."""
    ids, start, blocks = program.ids, program.index * program.piece, program.piece // program.block

    def load(index):
        x = program.load_latents(keys, program.rows(index), other=-jnp.inf)
        if ids is None:
            return x
        lasts = ids[pl.ds(start + index * program.block, program.block)] == ids[start + program.piece - 1]
        return jnp.where(lasts[:, None], x, -jnp.inf)

    lowest = jnp.full((program.block, keys.shape[-1]), LOWEST, jnp.float32)
    largest = lax.fori_loop(0, blocks, lambda index, x: jnp.maximum(x, load(index)), lowest).max(axis=0)

    def add(index, sums):
        values_sum, rounded_sum, mass_sum = sums
        token_mass = _mass(load(index), largest)
        rounded = program.rounded(token_mass)
        added = [program.dot(rounded, v, 0, 0) for v in program.load(values, program.rows(index))]
        values_sum = [x + new for x, new in zip(values_sum, added, strict=True)]
        return values_sum, rounded_sum + rounded, mass_sum + token_mass

    zeros = [jnp.zeros((keys.shape[-1], part.size), jnp.float32) for part, _ in program.parts()]
    values_sum, rounded_sum, mass_sum = lax.fori_loop(0, blocks, add, (zeros, *[jnp.zeros_like(lowest)] * 2))
    new_average = _scale(_inverse(rounded_sum.sum(axis=0)), values_sum)
    program.store_state((average, peak, mass), new_average, largest, mass_sum.sum(axis=0))


def _read(program, weights, keys, values, average, peak, mass, y, *states):
    """The outputs of a piece, from the state before it; the state after the last piece, and those before each chunk."""
    last, kept = states[:3], states[3:]
    blocks = program.chunk // program.block

    def read(index, carry):
        (average, peak, mass), unsafe = carry
        rows = program.rows(index)
        block = _block(program, keys, index, peak, mass)

        def look(token=None):
            w = program.load_latents(weights, program.rows(index, token))
            return _targets(program, index, token), w, program.load(values, rows)

        def add(y, targets, w, v, reference, inverse_mass):
            share = w * inverse_mass
            mixing = program.dot(share, block.token_mass(reference), 1, 1) * targets.sees
            start_share = targets.continues * share * block.start_mass(reference)[None]
            new = [
                program.dot(mixing, v_part, 1, 0) + program.dot(start_share, average_part, 1, 0)
                for v_part, average_part in zip(v, average, strict=True)
            ]
            return [y_part + targets.place(new_part) for y_part, new_part in zip(y, new, strict=True)]

        everyone = look()
        v = everyone[2]
        zeros = [jnp.zeros(x.shape, jnp.float32) for x in v]
        y_block, now = _for_each_reference(block, everyone, look, add, zeros)
        program.store(y, rows, y_block)
        return block.after(average, v), jnp.maximum(unsafe, now)

    def read_chunk(chunk, carry):
        if kept:
            program.store_state(kept, *carry[0], index=chunk)
        return lax.fori_loop(0, blocks, lambda index, carry: read(chunk * blocks + index, carry), carry)

    carry = program.load_state(average, peak, mass), 0
    state, unsafe = lax.fori_loop(0, program.piece // program.chunk, read_chunk, carry)

    @pl.when(program.index == pl.num_programs(1) - 1)
    def _():
        program.store_state(last, *state)

    return unsafe


def _unread_weights(program, weights, keys, values, dy, index, state, add, sums):
    """The state after a block, and the sums, to which its tokens add given the cotangents of their weights."""
    average, peak, mass = state
    block = _block(program, keys, index, peak, mass)

    def look(token=None):
        rows = program.rows(index, token)
        targets, g = _targets(program, index, token), program.load(dy, rows)
        agreement = program.dots(g, program.load(values, program.rows(index))) * targets.sees
        start_agreement = targets.continues * program.dots(g, average)
        return targets, program.load_latents(weights, rows), g, agreement, start_agreement

    def add_given(sums, targets, w, g, agreement, start_agreement, reference, inverse_mass):
        dw = program.dot(agreement, block.token_mass(reference), 1, 0)
        dw = (dw + start_agreement * block.start_mass(reference)[None]) * inverse_mass
        return add(sums, targets, w * inverse_mass, g, dw, reference)

    everyone = look()
    after = block.after(average, program.load(values, program.rows(index)))
    sums, unsafe = _for_each_reference(block, everyone, look, add_given, sums)
    return after, sums, unsafe


def _ask(program, weights, keys, values, dy, average, peak, mass, pull, push):
    """What a piece asks of the state before it: its own part of H and c there."""
    program = program.backward()
    state = first_average, first_peak, _ = program.load_state(average, peak, mass)

    def add(sums, targets, share, g, dw, reference):
        pull, push = sums
        share = targets.from_start * share * _mass(first_peak, reference)[None]
        pull = [x + program.dot(share, g_part, 0, 0) for x, g_part in zip(pull, g, strict=True)]
        return pull, push - (share * dw).sum(axis=0)

    def read(index, carry):
        state, sums, unsafe = carry
        state, sums, now = _unread_weights(program, weights, keys, values, dy, index, state, add, sums)
        return state, sums, jnp.maximum(unsafe, now)

    nothing = [jnp.zeros_like(x) for x in first_average], jnp.zeros_like(first_peak)
    _, sums, unsafe = lax.fori_loop(0, program.piece // program.block, read, (state, nothing, 0))
    program.store_state((pull, push), *sums)
    return unsafe


def _unread(
    program, weights, keys, values, dy, average, peak, mass, later_pull, later_push,
    dweights, dkeys, dvalues, pull, push, peaks, masses,
):  # fmt: skip
    """The cotangents of a piece, from H and c after it; H and c before it."""
    program = program.backward()
    chunks, blocks = program.piece // program.chunk, program.chunk // program.block

    def add(dw, targets, share, g, new_dw, reference):
        return dw + targets.place(new_dw)

    def read(step, unsafe):
        chunk = chunks - 1 - step

        def forwards(block, carry):
            state, unsafe = carry
            _store(peaks.at[block], state[1], program.latents)
            _store(masses.at[block], state[2], program.latents)
            index = chunk * blocks + block
            nothing = jnp.zeros((program.block, keys.shape[-1]), jnp.float32)
            state, dw, now = _unread_weights(program, weights, keys, values, dy, index, state, add, nothing)
            program.store_latents(dweights, program.rows(index), dw)
            return state, jnp.maximum(unsafe, now)

        def backwards(step, carry):
            later, unsafe = carry
            block = blocks - 1 - step
            before = [_load(x.at[block], program.latents) for x in (peaks, masses)]
            index = chunk * blocks + block
            later, now = _unread_block(
                program, weights, keys, values, dy, dweights, index, before, later, dkeys, dvalues
            )
            return later, jnp.maximum(unsafe, now)

        state = program.load_state(average, peak, mass, index=chunk)
        _, unsafe = lax.fori_loop(0, blocks, forwards, (state, unsafe))
        program.wait()
        # Between chunks they stay in memory, and leave their registers to others.
        later = program.load_state(pull, push)
        later, unsafe = lax.fori_loop(0, blocks, backwards, (later, unsafe))
        program.store_state((pull, push), *later)
        program.wait()
        return unsafe

    program.store_state((pull, push), *program.load_state(later_pull, later_push))
    return lax.fori_loop(0, chunks, read, 0)


def _unread_block(program, weights, keys, values, dy, dweights, index, before, later, dkeys, dvalues):
    """The cotangents of a block's keys and values, from H and c after it; H and c before it."""
    pull, push = later
    block = _block(program, keys, index, *before)
    v = program.load(values, program.rows(index))

    def look(token=None):
        rows = program.rows(index, token)
        targets, g = _targets(program, index, token), program.load(dy, rows)
        agreement = program.dots(g, v) * targets.sees
        w, dw = program.load_latents(weights, rows), program.load_latents(dweights, rows)
        return targets, w, dw, g, agreement

    def add(sums, targets, w, dw, g, agreement, reference, inverse_mass):
        dk, dv, pull, push = sums
        share, token_mass = w * inverse_mass, block.token_mass(reference)
        mixing = program.dot(share, token_mass, 1, 1) * targets.sees
        dmass = program.dot(agreement, share, 0, 0) - program.dot(targets.sees, share * dw, 0, 0)
        start_share = targets.continues * share * _mass(block.peak, reference)[None]
        dk, push = dk + dmass * token_mass, push - (start_share * dw).sum(axis=0)
        # Part by part, so that one is done with before the next takes registers.
        parts = [
            (dv_part + program.dot(mixing, g_part, 0, 0), pull_part + program.dot(start_share, g_part, 0, 0))
            for dv_part, pull_part, g_part in zip(dv, pull, g, strict=True)
        ]
        return dk, [dv_part for dv_part, _ in parts], [pull_part for _, pull_part in parts], push

    everyone = look()
    last_peak = block.last_peak()
    last_mass = block.lasts * block.token_mass(last_peak)
    dk = last_mass * (program.dots(v, pull) + push[None])
    dv = [program.dot(last_mass, x, 1, 0) for x in pull]
    kept = block.joined * _mass(block.peak, last_peak)
    sums = dk, dv, _scale(kept, pull), kept * push
    (dk, dv, pull, push), unsafe = _for_each_reference(block, everyone, look, add, sums)
    program.store_latents(dkeys, program.rows(index), dk)
    program.store(dvalues, program.rows(index), dv)
    return (pull, push), unsafe


def _carry(program, added_average, added_peak, added_mass, average, peak, mass, *states):
    """The states before each piece."""
    widths = _carried(program)

    def load(index):
        joined = _joined(program, index)
        return *_load_state([x.at[index] for x in (added_average, added_peak, added_mass)], widths), joined

    def add(index, added, state):
        (new_average, new_peak, new_mass, joined), (average, peak, mass) = added, state
        _store_state([x.at[index] for x in states], state, widths)
        average = jnp.where(joined, average, 0.0)
        peak, mass = jnp.where(joined, peak, LOWEST), jnp.where(joined, mass, 0.0)
        last_peak = jnp.maximum(peak, new_peak)
        new_mass *= _mass(new_peak, last_peak)
        last_mass = mass * _mass(peak, last_peak) + new_mass
        share = new_mass * _inverse(last_mass)
        # As a step towards the new average: two rounded shares would not add up to one, and the average would drift.
        return average + share[:, None] * (new_average - average), last_peak, last_mass

    first = _load_state([x.at[_traced(0)] for x in (average, peak, mass)], widths)
    others = added_average.shape[0]
    last = _one_after_another(others, load, add, first)
    _store_state([x.at[_traced(others)] for x in states], last, widths)


def _carry_back(program, added_pull, added_push, peaks, last_pull, last_push, pulls, pushes):
    """H and c after each piece."""
    latents, width = _carried(program)
    others = added_pull.shape[0]

    def load(step):
        index = others - 1 - step
        # What is asked is of the second piece and on.
        kept = _mass(_load(peaks.at[index + 1], latents), _load(peaks.at[index + 2], latents))
        kept = jnp.where(_joined(program, index + 1), kept, 0.0)
        return _load(added_pull.at[index], latents, width), _load(added_push.at[index], latents), kept

    def store(index, pull, push):
        _store(pulls.at[index], pull, latents, width)
        _store(pushes.at[index], push, latents)

    def add(step, added, later):
        (new_pull, new_push, kept), (pull, push) = added, later
        store(others - step, pull, push)
        return new_pull + kept[:, None] * pull, new_push + kept * push

    last = _load(last_pull.at[_traced(0)], latents, width), _load(last_push.at[_traced(0)], latents)
    store(_traced(0), *_one_after_another(others, load, add, last))


def _one_after_another(pieces, load, add, carry):
    """Go along the pieces. What does not depend on the carry is loaded ahead, so that not every piece has to wait."""

    def several(start, count, carry):
        for index, x in [(start + i, load(start + i)) for i in range(count)]:
            carry = add(index, x, carry)
        return carry

    groups = pieces // AHEAD
    carry = lax.fori_loop(0, groups, lambda group, carry: several(group * AHEAD, AHEAD, carry), carry)
    return lax.fori_loop(groups * AHEAD, pieces, lambda index, carry: several(index, 1, carry), carry)


def _joined(program, index):
    """Tell whether the document before a piece goes on to its end."""
    if program.ids is None:
        return True
    start = index * program.piece
    return program.ids[jnp.maximum(start - 1, 0)] == program.ids[start + program.piece - 1]


def _carried(program):
    """How many latents and columns there are of a carried state."""
    fits = program.dim % CARRIED_COLUMNS == 0
    return program.latents, CARRIED_COLUMNS if fits else program.dim - program.index * CARRIED_COLUMNS


def _load_state(refs, widths):
    average, peak, mass = refs
    return _load(average, *widths), _load(peak, widths[0], other=LOWEST), _load(mass, widths[0])


def _store_state(refs, state, widths):
    _store(refs[0], state[0], *widths)
    for ref, x in zip(refs[1:], state[1:], strict=True):
        _store(ref, x, widths[0])


def _traced(index):
    """The interpreter takes no index that is known before."""
    return jnp.full((), index, jnp.int32)


def _load(ref, *sizes, other=0.0):
    """Read an array whose last axes have `sizes`; the rest of its tile is `other`."""
    mask = _inside(ref.shape, sizes)
    return plgpu.load(ref, mask=mask, other=None if mask is None else jnp.asarray(other, ref.dtype))


def _store(ref, x, *sizes):
    plgpu.store(ref, x.astype(ref.dtype), mask=_inside(ref.shape, sizes))


def _inside(shape, sizes):
    first = len(shape) - len(sizes)
    masks = [
        lax.broadcasted_iota(jnp.int32, shape, axis) < size
        for axis, size in enumerate(sizes, first)
        if not isinstance(size, int) or size < shape[axis]
    ]
    return reduce(operator.and_, masks) if masks else None


def _mass(keys, reference):
    """Mass relative to a reference. Above it are only keys that do not count."""
    reference = reference[None] if keys.ndim > reference.ndim else reference
    return jnp.exp(jnp.minimum(keys - reference, 0.0))


def _inverse(mass):
    """`1 / mass`, and 0 where nothing has been seen."""
    return jnp.where(mass > 0, 1 / mass, 0.0)


def _scale(factors, parts):
    return [factors[:, None] * x for x in parts]


def _padded(size: int, least: int = 16) -> int:
    """Tiles are powers of two, and those of products at least 16."""
    return max(least, pl.next_power_of_2(size))
