"""Both passes as GPU kernels: every thread follows one channel along the sequence.

Where rows and channels alone would leave most of the GPU idle, the sequence is cut into pieces that are followed side
by side. A first kernel then finds out what each piece does to a state, at the price of reading its inputs twice.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from latte_eqx.ops.batching import output_like
from latte_eqx.ops.dispatch import Passes

# A warp, with a channel for each thread: it reads 128 bytes of float32 at a time.
CHANNELS = 32
# Positions whose loads are under way together. With enough threads they keep the memory busy.
POSITIONS = 32
FEW_THREADS, MANY_THREADS = 4096, 16384
SHORTEST_PIECE = 256


def forward(
    log_decay: Float[Array, "*batch seq dim"],
    inputs: Float[Array, "*batch seq dim"],
    state: Float32[Array, "*batch dim"],
    *,
    dtypes: tuple[DTypeLike, ...],
    interpret: bool = False,
) -> tuple[tuple[Float[Array, "*batch seq dim"], ...], Float32[Array, "*batch dim"]]:
    """All h in each of the `dtypes`, and the last one."""
    *h, last = _run(_forward_kernel, dtypes, state, [log_decay, inputs], reverse=False, interpret=interpret)
    return tuple(h), last


def backward(
    log_decay: Float[Array, "*batch seq dim"],
    state: Float32[Array, "*batch dim"],
    h: Float[Array, "*batch seq dim"],
    h_cotangent: Float[Array, "*batch seq dim"],
    last_cotangent: Float32[Array, "*batch dim"],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "*batch seq dim"], Float[Array, "*batch seq dim"], Float32[Array, "*batch dim"]]:
    """The gradients of `log_decay`, of the inputs and of `state`."""
    dtypes = log_decay.dtype, h_cotangent.dtype
    arrays = [log_decay, h_cotangent, h, state]
    log_decay_grad, inputs_grad, state_grad = _run(
        _backward_kernel, dtypes, last_cotangent, arrays, reverse=True, interpret=interpret
    )
    return log_decay_grad, inputs_grad, state_grad


PASSES = Passes(forward, backward)


def _run(
    kernel: Callable[..., None],
    dtypes: tuple[DTypeLike, ...],
    start: Float32[Array, "*batch dim"],
    arrays: list[Array],
    *,
    reverse: bool,
    interpret: bool,
) -> list[Array]:
    """Run `kernel` from `start` over `arrays`, decays and additions first; return sequences and the last state."""
    *batch, length, dim = arrays[0].shape
    rows = prod(batch)
    steps = _steps(rows * dim, length)
    pieces = pl.cdiv(length, steps)
    walk = partial(_Walk, length, dim, steps, reverse)
    output = partial(output_like, start)

    def call(kernel: Callable[..., None], pieces: int, out_shapes: list[Any], *arrays: Any) -> Any:
        return pl.pallas_call(
            partial(kernel, walk),
            grid=(rows, pl.cdiv(dim, CHANNELS), pieces),
            out_shape=[output(*shape) for shape in out_shapes],
            compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
            interpret=interpret,
            name="linear_scan" + kernel.__name__.removesuffix("_kernel"),
        )(*arrays)

    start, *arrays = (x.reshape(rows, *x.shape[len(batch) :]) for x in (start, *arrays))
    effects = []
    if pieces > 1:
        # Nobody comes after the last piece.
        shape = (rows, pieces - 1, dim)
        effects = call(_effect_kernel, pieces - 1, [(shape,), (shape,)], *arrays[:2])
    shapes = [((rows, length, dim), dtype) for dtype in dtypes]
    outputs = call(kernel, pieces, [*shapes, ((rows, dim),)], start, effects, *arrays)
    return [x.reshape(*batch, *x.shape[1:]) for x in outputs]


def _steps(threads: int, length: int) -> int:
    """The positions of a piece, a whole number of groups, so that there are enough pieces."""
    pieces = 1 if threads >= FEW_THREADS else min(pl.cdiv(MANY_THREADS, threads), pl.cdiv(length, SHORTEST_PIECE))
    return POSITIONS * pl.cdiv(length, POSITIONS * pieces)


def _effect_kernel(begin: "Begin", log_decay, additions, through, own):
    """What a piece makes of a state: `through` times it, plus `own`."""
    walk = begin()

    def read(step):
        return walk.load(log_decay, step), walk.load(additions, step)

    def advance(step, values, carry):
        (log_decay, addition), (through, own) = values, carry
        decay = jnp.exp(log_decay)
        return decay * through, decay * (own + addition) if walk.reverse else decay * own + addition

    nothing = jnp.zeros(CHANNELS, jnp.float32)
    for ref, value in zip((through, own), walk.follow(read, advance, (nothing + 1, nothing)), strict=True):
        walk.store_state(ref, value, walk.piece)


def _forward_kernel(begin: "Begin", start, effects, log_decay, inputs, *outputs):
    walk = begin()
    *outputs, last = outputs

    def read(step):
        return walk.load(log_decay, step), walk.load(inputs, step)

    def advance(step, values, h):
        log_decay, addition = values
        h = jnp.exp(log_decay) * h + addition
        for output in outputs:
            walk.store(output, h, step)
        return h

    walk.leave(last, walk.follow(read, advance, walk.enter(start, effects)))


def _backward_kernel(
    begin: "Begin", start, effects, log_decay, h_cotangent, h, state, log_decay_grad, inputs_grad, state_grad
):
    walk = begin()
    first = walk.load_state(state)

    def read(step):
        # The walk is from the end, so one step further is one position earlier.
        return walk.load(log_decay, step), walk.load(h_cotangent, step), walk.load(h, step + 1)

    def advance(step, values, passed):
        log_decay, cotangent, previous = values
        gradient = cotangent + passed
        passed = jnp.exp(log_decay) * gradient
        walk.store(inputs_grad, gradient, step)
        walk.store(log_decay_grad, passed * jnp.where(step == walk.length - 1, first, previous), step)
        return passed

    walk.leave(state_grad, walk.follow(read, advance, walk.enter(start, effects)))


class _Walk:
    """A program's way: `steps` steps through one row and `CHANNELS` channels, along the sequence or from its end."""

    def __init__(self, length: int, dim: int, steps: int, reverse: bool):
        self.length, self.steps, self.reverse = length, steps, reverse
        self.row, part, self.piece = (pl.program_id(axis) for axis in range(3))
        self.is_last = self.piece == pl.num_programs(2) - 1
        self.channels = pl.ds(part * CHANNELS, CHANNELS)
        self.exist = part * CHANNELS + jnp.arange(CHANNELS) < dim

    def enter(self, start, effects) -> Float32[Array, " channels"]:
        """The state that the pieces before this one turn `start` into."""
        state = self.load_state(start)
        if not effects:
            return state
        through, own = effects

        def pass_through(piece, state):
            return self.load_state(through, piece) * state + self.load_state(own, piece)

        return lax.fori_loop(0, self.piece, pass_through, state)

    def follow(self, read: Callable[..., Any], advance: Callable[..., Any], carry: Any) -> Any:
        """Read a group of positions, then advance over them: no load waits for a store."""

        def advance_group(group, carry):
            first = self.piece * self.steps + group * POSITIONS
            steps = [first + index for index in range(POSITIONS)]
            for step, values in zip(steps, [read(step) for step in steps], strict=True):
                carry = advance(step, values, carry)
            return carry

        return lax.fori_loop(0, self.steps // POSITIONS, advance_group, carry)

    def leave(self, last, state: Float32[Array, " channels"]) -> None:
        """Store the state behind the last piece."""

        @pl.when(self.is_last)
        def _():
            self.store_state(last, state)

    def load(self, ref, step) -> Float32[Array, " channels"]:
        """What is after the end reads as zeros, which let a state pass: decay 1, and nothing to add."""
        place, mask = self._place(step)
        return plgpu.load(ref.at[place], mask=mask, other=0.0).astype(jnp.float32)

    def store(self, ref, value: Float32[Array, " channels"], step) -> None:
        """Write where `load` reads."""
        place, mask = self._place(step)
        plgpu.store(ref.at[place], value.astype(ref.dtype), mask=mask)

    def load_state(self, ref, *piece) -> Float32[Array, " channels"]:
        """The row's state, or what belongs to one of its pieces."""
        return plgpu.load(ref.at[self.row, *piece, self.channels], mask=self.exist, other=0.0)

    def store_state(self, ref, value: Float32[Array, " channels"], *piece) -> None:
        """Write where `load_state` reads."""
        plgpu.store(ref.at[self.row, *piece, self.channels], value, mask=self.exist)

    def _place(self, step):
        position = self.length - 1 - step if self.reverse else step
        return (self.row, position, self.channels), self.exist & (step < self.length)


Begin = Callable[[], _Walk]
