r"""Causal Latte on GPUs, in Triton by way of Pallas: all chunks of all rows at once.

Sums over tokens are sums over chunks, so each pass is three kernels. Forward: what each chunk adds to the state; the
states before each chunk, one after another; the outputs of each chunk, from the state before it. Backward: the
cotangents of the weights, and what each chunk adds to those of the state before it; the latter after each chunk, one
after another from the last; the cotangents of keys and values. With $m$ the peaks and $z$ the masses,

    H_s = sum_{u>=s} exp(m_s - m_u) (w_u / z_u) dy_u^T        c_s = -sum_{u>=s} exp(m_s - m_u) (w_u / z_u) dw_u

are all that a token needs of later ones: dk_s = exp(k_s - m_s) (H_s v_s + c_s) and dv_s = exp(k_s - m_s)^T H_s. In the
code H is the `pull` on the values, and c the `push` on the masses.

Inside a chunk the kernels go block by block. The masses in a block are relative to one reference, the largest key that
any of its tokens sees. That is exact while no mass is e^50 below the reference. Chunks in which one is are reported and
read again by a kernel that takes such tokens one by one, each relative to the largest key that it sees itself. For all
other chunks that kernel has nothing to do: ordinary keys never pay for it, not even with the registers it needs.
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
    """How a kernel cuts its chunk: tokens in a block, columns of values in one product, and warps."""

    block: int
    columns: int
    warps: int


# What compiles without spilling registers and still leaves room for two programs on a multiprocessor, if possible. A
# block of 32 tokens takes all 255 registers of 128 threads in the backward pass (about 220 in the forward pass), one of
# 16 tokens hardly fewer: most of them are addresses in shared memory. Wider values need twice the threads. Products of
# float32 factors are not for matrix units, and hold whole rows of both factors in registers.
NARROW, WIDE, FLOAT32 = _Plan(32, 128, 4), _Plan(16, 128, 8), _Plan(16, 64, 8)
# The last kernel holds a cotangent of the values beside one of the state, and spills with wider products.
LAST_COLUMNS = 64
# Exact kernels are rarely run.
EXACT_WARPS = 8
# The kernels that go along the chunks take so many columns of the state each, and load so many chunks ahead.
CARRIED_COLUMNS, CARRYING_WARPS, AHEAD = 32, 4, 4


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
    k, v = call.cut(keys), call.cut(values)
    added = call.chunks(_add_up, [k, v], call.states)
    states, last = call.along(_carry, added, call.states, call.rows(state))
    (y,) = call.chunks_exactly(_read, [call.cut(weights), k, v, *states], [call.like(v)])
    kept = LatteState(*call.batched(states)) if keep else None
    return y.reshape(values.shape), LatteState(*call.batched(last)), kept


def backward(
    weights: Float[Array, "*batch seq latents"],
    keys: Float[Array, "*batch seq latents"],
    values: Float[Array, "*batch seq dim"],
    segment_ids: Int[Array, "*#batch seq"] | None,
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
    tokens = w, k, v, _ = [call.cut(x) for x in (weights, keys, values, dy)]
    average, peak, mass = call.rows(states)
    _, last_peak, _ = call.rows(last_state)

    # The last kernel reads these: beside float32 values they must be float32, even if the weights are not.
    dweights = call.like(w, v.dtype if v.dtype == jnp.float32 else w.dtype)
    dweights, added_pull, added_push, *blocks = call.chunks_exactly(
        _unread_weights, [*tokens, average, peak, mass], [dweights, *call.states[:2], call.blocks, call.blocks]
    )
    next_peak = jnp.concatenate([peak[:, 1:], last_peak[:, None]], axis=1)
    last = [x.reshape(call.grid[0], *x.shape[len(call.batch) :]) for x in asked_of_sums(last_state, dstate)]
    later, first = call.along(_carry_back, [added_pull, added_push, peak, next_peak], call.states[:2], last)
    dkeys, dvalues = call.chunks_exactly(
        _unread_keys_and_values, [*tokens, dweights, *blocks, *later], [call.like(k), call.like(v)]
    )
    dfirst = asked_of_state(states, *call.batched(first))
    dweights = dweights.reshape(weights.shape).astype(weights.dtype)
    return dweights, dkeys.reshape(keys.shape), dvalues.reshape(values.shape), dfirst


PASSES = Passes(forward, backward)


class _Caller:
    """Calls kernels: for each chunk of each row by itself, or along the chunks of each row."""

    def __init__(self, keys, values, segment_ids, chunk, interpret):
        self.batch, seq, latents, dim = keys.shape[:-2], *keys.shape[-2:], values.shape[-1]
        self.grid = prod(self.batch), seq // chunk
        self.plan = FLOAT32 if values.dtype == jnp.float32 else NARROW if dim <= 128 else WIDE
        self.program = _Program(latents, dim, chunk, self.plan.block, self.plan.columns, values.dtype)
        self.interpret = interpret
        self.output = partial(output_like, keys)
        self.ids = []
        if segment_ids is not None:
            self.ids = [jnp.broadcast_to(segment_ids, keys.shape[:-1]).reshape(-1, seq)]
        float32 = lambda *shape: self.output((*self.grid, *shape))
        self.states = [float32(latents, dim), float32(latents), float32(latents)]
        self.blocks = float32(chunk // self.plan.block, latents)

    def like(self, x, dtype=None):
        return self.output(x.shape, dtype or x.dtype)

    def cut(self, x):
        """Cut tokens into rows and chunks."""
        return x.reshape(*self.grid, -1, x.shape[-1])

    def rows(self, state):
        return [x.reshape(-1, *x.shape[len(self.batch) :]) for x in (state.average, state.peak, state.mass)]

    def batched(self, arrays):
        return [x.reshape(*self.batch, *x.shape[1:]) for x in arrays]

    def chunks(self, kernel, inputs, outputs):
        """Call a kernel for each chunk."""
        in_specs, out_specs = map(_by_chunk, inputs), map(_by_chunk, outputs)
        return self._call(kernel, kernel.__name__, self.grid, inputs, outputs, in_specs, out_specs, self.plan.warps)

    def chunks_exactly(self, kernel, inputs, outputs):
        """Call a kernel for each chunk, and then its exact form for the chunks that it says are unsafe."""
        flags = self.output(self.grid, jnp.int32)

        def fast(program, *refs):
            refs[-1][...] = kernel(program, *refs[:-1])

        @jax.named_scope(TOKEN_BY_TOKEN)
        def exact(program, *refs):
            @pl.when(refs[0][...] > 0)
            def _():
                kernel(program._replace(exact=True), *refs[1 : 1 + len(inputs)], *refs[-len(outputs) :])

        *results, flags = self.chunks(wraps(kernel)(fast), inputs, [*outputs, flags])
        again = [flags, *inputs, *results]
        in_specs, out_specs = map(_by_chunk, again), map(_by_chunk, outputs)
        # What the first kernel has written stays where it is.
        first = len(self.ids) + len(again) - len(outputs)
        aliases = {first + i: i for i in range(len(outputs))}
        name = f"{kernel.__name__}_exact"
        return self._call(exact, name, self.grid, again, outputs, in_specs, out_specs, EXACT_WARPS, aliases)

    def along(self, kernel, inputs, outputs, carry):
        """Call a kernel for some columns of the state in each row; it returns what was carried last, too."""

        def spec(x, *chunks):
            latents, *dim = x.shape[1 + len(chunks) :]
            block = None, *chunks, _padded(latents), *(CARRIED_COLUMNS for _ in dim)
            return pl.BlockSpec(block, lambda row, part: (row, *(0 for _ in chunks), 0, part)[: x.ndim])

        carried = [spec(x) for x in carry]
        in_specs = [*(spec(x, self.grid[1]) for x in inputs), *carried]
        out_specs = [*(spec(x, self.grid[1]) for x in outputs), *carried]
        grid = self.grid[0], pl.cdiv(self.program.dim, CARRIED_COLUMNS)
        inputs, outputs = [*inputs, *carry], [*outputs, *map(self.like, carry)]
        out = self._call(kernel, kernel.__name__, grid, inputs, outputs, in_specs, out_specs, CARRYING_WARPS)
        return out[: -len(carry)], out[-len(carry) :]

    def _call(self, kernel, name, grid, inputs, outputs, in_specs, out_specs, warps, aliases=None):
        def run(*refs):
            ids, refs = (refs[0], refs[1:]) if self.ids else (None, refs)
            kernel(self.program._replace(ids=ids, index=pl.program_id(1)), *refs)

        return pl.pallas_call(
            run,
            grid=grid,
            in_specs=[*(pl.BlockSpec((None, x.shape[1]), lambda row, _: (row, 0)) for x in self.ids), *in_specs],
            out_specs=list(out_specs),
            out_shape=outputs,
            input_output_aliases=aliases or {},
            compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
            name=f"latte{name}",
            interpret=self.interpret,
        )(*self.ids, *inputs)


def _by_chunk(x):
    return pl.BlockSpec((None, None, *map(_padded, x.shape[2:])), lambda *index: (*index, 0, 0)[: x.ndim])


class _Program(NamedTuple):
    """What a program works on, and its ways to memory. Values are taken in parts of a few columns each."""

    latents: int
    dim: int
    chunk: int
    block: int
    columns: int
    dtype: Any  # of the factors of products
    ids: Any = None
    index: Any = None  # the chunk, or the columns that are carried
    exact: bool = False  # or to leave out, and report, what a common reference is too large for

    def parts(self):
        columns = min(self.columns, _padded(self.dim))
        return [(pl.ds(start, columns), min(columns, self.dim - start)) for start in range(0, self.dim, columns)]

    def rows(self, index, token=None):
        """Where a block's tokens, or one of them, stand in the chunk."""
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

    def load_state(self, average, peak, mass):
        average = [_load(average.at[:, part], self.latents, width) for part, width in self.parts()]
        return average, _load(peak, self.latents, other=LOWEST), _load(mass, self.latents)

    def store_state(self, refs, wide, *narrow):
        wide_ref, *narrow_refs = refs
        for (part, width), x in zip(self.parts(), wide, strict=True):
            _store(wide_ref.at[:, part], x, self.latents, width)
        for ref, x in zip(narrow_refs, narrow, strict=True):
            _store(ref, x, self.latents)

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
    start = program.index * program.chunk + index * program.block
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
    from_start: Array | float  # (target, 1) is 1 in the document of the state before the chunk

    def place(self, x):
        """Give each target its row in the block."""
        if self.token is None:
            return x
        row = lax.broadcasted_iota(jnp.int32, (self.sees.shape[1], 1), 0)
        return jnp.where(row == self.token, x, 0.0)


def _targets(program, index, token):
    count, first = (program.block, 0) if token is None else (1, token)
    target = lax.broadcasted_iota(jnp.int32, (count, program.block), 0) + first
    sees = lax.broadcasted_iota(jnp.int32, (count, program.block), 1) <= target
    ids = program.ids
    if ids is None:
        return _Targets(token, sees.astype(jnp.float32), 1.0, 1.0)
    chunk_start = program.index * program.chunk
    start = chunk_start + index * program.block
    own = ids[pl.ds(start + first, count)][:, None]
    sees &= own == ids[pl.ds(start, program.block)][None]
    continues, from_start = (own == ids[jnp.maximum(x - 1, 0)] for x in (start, chunk_start))
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
    """What a chunk adds to the state: the average of its last document, relative to its own peak."""
    ids, start, blocks = program.ids, program.index * program.chunk, program.chunk // program.block

    def load(index):
        x = program.load_latents(keys, program.rows(index), other=-jnp.inf)
        if ids is None:
            return x
        lasts = ids[pl.ds(start + index * program.block, program.block)] == ids[start + program.chunk - 1]
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


def _read(program, weights, keys, values, average, peak, mass, y):
    """The outputs of a chunk, from the state before it."""

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

    carry = program.load_state(average, peak, mass), 0
    return lax.fori_loop(0, program.chunk // program.block, read, carry)[1]


def _unread_weights(program, weights, keys, values, dy, average, peak, mass, dweights, pull, push, peaks, masses):
    """The cotangents of a chunk's weights, its own part of H and c at its start, and the peaks and masses of blocks."""
    state = first_average, first_peak, _ = program.load_state(average, peak, mass)

    def read(index, carry):
        (average, peak, mass), pull, push, unsafe = carry
        _store(peaks.at[index], peak, program.latents)
        _store(masses.at[index], mass, program.latents)
        block = _block(program, keys, index, peak, mass)

        def look(token=None):
            rows = program.rows(index, token)
            targets, g = _targets(program, index, token), program.load(dy, rows)
            agreement = program.dots(g, program.load(values, program.rows(index))) * targets.sees
            start_agreement = targets.continues * program.dots(g, average)
            return targets, program.load_latents(weights, rows), g, agreement, start_agreement

        def add(sums, targets, w, g, agreement, start_agreement, reference, inverse_mass):
            dw, pull, push = sums
            new_dw = program.dot(agreement, block.token_mass(reference), 1, 0)
            new_dw = (new_dw + start_agreement * block.start_mass(reference)[None]) * inverse_mass
            share = targets.from_start * w * inverse_mass * _mass(first_peak, reference)[None]
            pull = [x + program.dot(share, g_part, 0, 0) for x, g_part in zip(pull, g, strict=True)]
            return dw + targets.place(new_dw), pull, push - (share * new_dw).sum(axis=0)

        everyone = look()
        after = block.after(average, program.load(values, program.rows(index)))
        zeros = jnp.zeros(block.keys.shape, jnp.float32)
        (dw, pull, push), now = _for_each_reference(block, everyone, look, add, (zeros, pull, push))
        program.store_latents(dweights, program.rows(index), dw)
        return after, pull, push, jnp.maximum(unsafe, now)

    carry = state, [jnp.zeros_like(x) for x in first_average], jnp.zeros_like(first_peak), 0
    _, pull_sum, push_sum, unsafe = lax.fori_loop(0, program.chunk // program.block, read, carry)
    program.store_state((pull, push), pull_sum, push_sum)
    return unsafe


def _unread_keys_and_values(program, weights, keys, values, dy, dweights, peaks, masses, pull, push, dkeys, dvalues):
    """The cotangents of a chunk's keys and values, from H and c after it."""
    program = program._replace(columns=LAST_COLUMNS)
    blocks = program.chunk // program.block

    def read(step, later):
        pull, push, unsafe = later
        index = blocks - 1 - step
        peak, mass = _load(peaks.at[index], program.latents, other=LOWEST), _load(masses.at[index], program.latents)
        block = _block(program, keys, index, peak, mass)

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
            return (
                dk + dmass * token_mass,
                [x + program.dot(mixing, g_part, 0, 0) for x, g_part in zip(dv, g, strict=True)],
                [x + program.dot(start_share, g_part, 0, 0) for x, g_part in zip(pull, g, strict=True)],
                push - (start_share * dw).sum(axis=0),
            )

        v = program.load(values, program.rows(index))
        last_peak = block.last_peak()
        last_mass = block.lasts * block.token_mass(last_peak)
        dk = last_mass * (program.dots(v, pull) + push[None])
        dv = [program.dot(last_mass, x, 1, 0) for x in pull]
        kept = block.joined * _mass(block.peak, last_peak)
        sums = dk, dv, _scale(kept, pull), kept * push
        (dk, dv, pull, push), now = _for_each_reference(block, look(), look, add, sums)
        program.store_latents(dkeys, program.rows(index), dk)
        program.store(dvalues, program.rows(index), dv)
        return pull, push, jnp.maximum(unsafe, now)

    pull = [_load(pull.at[:, part], program.latents, width) for part, width in program.parts()]
    return lax.fori_loop(0, blocks, read, (pull, _load(push, program.latents), 0))[2]


def _carry(program, added_average, added_peak, added_mass, average, peak, mass, averages, peaks, masses, *last):
    """The states before each chunk and after the last."""
    widths = _carried(program)

    def load(index):
        joined = _joined(program, index)
        return *_load_state([x.at[index] for x in (added_average, added_peak, added_mass)], widths), joined

    def add(index, added, state):
        (new_average, new_peak, new_mass, joined), (average, peak, mass) = added, state
        _store_state([x.at[index] for x in (averages, peaks, masses)], state, widths)
        average = jnp.where(joined, average, 0.0)
        peak, mass = jnp.where(joined, peak, LOWEST), jnp.where(joined, mass, 0.0)
        last_peak = jnp.maximum(peak, new_peak)
        new_mass *= _mass(new_peak, last_peak)
        last_mass = mass * _mass(peak, last_peak) + new_mass
        share = new_mass * _inverse(last_mass)
        # As a step towards the new average: two rounded shares would not add up to one, and the average would drift.
        return average + share[:, None] * (new_average - average), last_peak, last_mass

    first, peak, mass = _load_state((average, peak, mass), widths)
    # An empty state has no average, whatever stands in its place.
    first = jnp.where(mass[:, None] > 0, first, 0.0)
    _store_state(last, _one_after_another(averages.shape[0], load, add, (first, peak, mass)), widths)


def _carry_back(program, added_pull, added_push, peak, next_peak, pull, push, pulls, pushes, first_pull, first_push):
    """H and c after each chunk and before the first."""
    latents, width = _carried(program)
    chunks = pulls.shape[0]

    def load(step):
        index = chunks - 1 - step
        kept = _mass(_load(peak.at[index], latents), _load(next_peak.at[index], latents))
        kept = jnp.where(_joined(program, index), kept, 0.0)
        return _load(added_pull.at[index], latents, width), _load(added_push.at[index], latents), kept

    def add(step, added, later):
        (new_pull, new_push, kept), (pull, push) = added, later
        index = chunks - 1 - step
        _store(pulls.at[index], pull, latents, width)
        _store(pushes.at[index], push, latents)
        return new_pull + kept[:, None] * pull, new_push + kept * push

    last = _load(pull, latents, width), _load(push, latents)
    pull_sum, push_sum = _one_after_another(chunks, load, add, last)
    _store(first_pull, pull_sum, latents, width)
    _store(first_push, push_sum, latents)


def _one_after_another(chunks, load, add, carry):
    """Go along the chunks. What does not depend on the carry is loaded ahead, so that not every chunk has to wait."""

    def several(start, count, carry):
        for index, x in [(start + i, load(start + i)) for i in range(count)]:
            carry = add(index, x, carry)
        return carry

    groups = chunks // AHEAD
    carry = lax.fori_loop(0, groups, lambda group, carry: several(group * AHEAD, AHEAD, carry), carry)
    return lax.fori_loop(groups * AHEAD, chunks, lambda index, carry: several(index, 1, carry), carry)


def _joined(program, index):
    """Tell whether the document before a chunk goes on to its end."""
    if program.ids is None:
        return True
    start = index * program.chunk
    return program.ids[jnp.maximum(start - 1, 0)] == program.ids[start + program.chunk - 1]


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


def _padded(size: int) -> int:
    """Tiles are powers of two, and those of products at least 16."""
    return max(16, pl.next_power_of_2(size))
