"""Both passes as TPU kernels: every array is read or written once, and the state never leaves the chip.

The grid walks along the sequence in blocks. Within a block, groups of eight positions, one register high, are scanned
in three steps of doubling reach; only a multiplication and an addition per group wait for the group before.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from latte_eqx.ops.batching import output_like
from latte_eqx.ops.dispatch import Passes

Interpret = bool | pltpu.InterpretParams

# A block of so many positions and channels takes long enough to fetch for the cost of a grid step to be hidden.
POSITIONS, CHANNELS, LANES = 512, 512, 128
# Positions handled together: enough groups to fill each other's waiting times, few enough to stay in registers.
GROUP, TILE = 8, 32
# Positions fetched for the sake of the one before a block: a bfloat16 register holds so many.
BEFORE = 16


def forward(
    log_decay: Float[Array, "*batch seq dim"],
    inputs: Float[Array, "*batch seq dim"],
    state: Float32[Array, "*batch dim"],
    *,
    dtypes: tuple[DTypeLike, ...],
    interpret: Interpret = False,
) -> tuple[tuple[Float[Array, "*batch seq dim"], ...], Float32[Array, "*batch dim"]]:
    """All h in each of the `dtypes`, and the last one."""
    *h, last = _run(_forward_kernel, [state], [log_decay, inputs], dtypes, interpret=interpret)
    return tuple(h), last


def backward(
    log_decay: Float[Array, "*batch seq dim"],
    state: Float32[Array, "*batch dim"],
    h: Float[Array, "*batch seq dim"],
    h_cotangent: Float[Array, "*batch seq dim"],
    last_cotangent: Float32[Array, "*batch dim"],
    *,
    interpret: Interpret = False,
) -> tuple[Float[Array, "*batch seq dim"], Float[Array, "*batch seq dim"], Float32[Array, "*batch dim"]]:
    """The gradients of `log_decay`, of the inputs and of `state`."""
    states, sequences = [last_cotangent, state], [log_decay, h_cotangent, h]
    dtypes = log_decay.dtype, h_cotangent.dtype
    log_decay_grad, inputs_grad, state_grad = _run(
        _backward_kernel, states, sequences, dtypes, before=[h], reverse=True, interpret=interpret
    )
    return log_decay_grad, inputs_grad, state_grad


PASSES = Passes(forward, backward)


def _run(
    kernel: Callable[..., None],
    states: Sequence[Array],
    sequences: Sequence[Array],
    dtypes: Sequence[DTypeLike],
    *,
    before: Sequence[Array] = (),
    reverse: bool = False,
    interpret: Interpret,
) -> list[Array]:
    """Run `kernel` over blocks of states, of sequences, and of what is before these; return sequences and a state."""
    *batch, length, dim = sequences[0].shape
    rows = prod(batch)
    positions = min(POSITIONS, TILE * pl.cdiv(length, TILE))
    channels = dim if dim <= CHANNELS else LANES * pl.cdiv(dim, LANES * pl.cdiv(dim, CHANNELS))
    num_blocks = pl.cdiv(length, positions)

    def place(step: Any) -> Any:
        return num_blocks - 1 - step if reverse else step

    def place_before(step: Any) -> Any:
        return jnp.maximum(place(step) * (positions // BEFORE) - 1, 0)

    state_block = pl.BlockSpec((None, 1, channels), lambda row, part, step: (row, 0, part))
    block = pl.BlockSpec((None, positions, channels), lambda row, part, step: (row, place(step), part))
    block_before = pl.BlockSpec((None, BEFORE, channels), lambda row, part, step: (row, place_before(step), part))

    output = partial(output_like, sequences[0])
    *outputs, state = pl.pallas_call(
        partial(kernel, place=place, length=length),
        grid=(rows, pl.cdiv(dim, channels), num_blocks),
        in_specs=[state_block] * len(states) + [block] * len(sequences) + [block_before] * len(before),
        out_specs=[block] * len(dtypes) + [state_block],
        out_shape=[*(output((rows, length, dim), dtype) for dtype in dtypes), output((rows, 1, dim))],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="linear_scan" + kernel.__name__.removesuffix("_kernel"),
    )(*(x.reshape(rows, -1, dim) for x in (*states, *sequences, *before)))
    return [*(x.reshape(*batch, length, dim) for x in outputs), state.reshape(*batch, dim)]


def _forward_kernel(state, log_decay, inputs, *outputs, place: Callable[..., Any], length: int):
    # The block of the last output is the same at every step: it carries the state along.
    *outputs, carry = outputs
    step, positions = pl.program_id(2), inputs.shape[0]

    @pl.when(step == 0)
    def _():
        carry[...] = state[...]

    def read(tile, h):
        rows, is_there = _tile(tile, place(step), positions, length)
        decay = jnp.exp(_load(log_decay, rows, is_there))
        h, last = _scan(decay, _load(inputs, rows, is_there), h)
        for output in outputs:
            output[rows] = h.astype(output.dtype)
        return last

    carry[...] = lax.fori_loop(0, positions // TILE, read, carry[...])


def _backward_kernel(
    last_cotangent, state, log_decay, h_cotangent, h, before, log_decay_grad, inputs_grad, carry, *, place, length: int
):
    step, positions = pl.program_id(2), h.shape[0]

    @pl.when(step == 0)
    def _():
        carry[...] = last_cotangent[...]

    first = jnp.where(place(step) > 0, before[-1:].astype(jnp.float32), state[...])

    def unread(index, passed):
        tile = positions // TILE - 1 - index
        rows, is_there = _tile(tile, place(step), positions, length)
        rows_before, _ = _tile(jnp.maximum(tile - 1, 0), place(step), positions, length)
        previous = jnp.where(tile > 0, h[rows_before][-1:].astype(jnp.float32), first)
        decay, cotangent = jnp.exp(_load(log_decay, rows, is_there)), _load(h_cotangent, rows, is_there)
        # What h_t passes down to h_{t-1} is decayed already: it follows the same recurrence, from the end.
        passes, last = _scan(decay, decay * cotangent, passed, reverse=True)
        gradient = cotangent + _shift(passes, passed, reverse=True)
        inputs_grad[rows] = gradient.astype(inputs_grad.dtype)
        gradient = passes * _shift(h[rows].astype(jnp.float32), previous)
        log_decay_grad[rows] = gradient.astype(log_decay_grad.dtype)
        return last

    carry[...] = lax.fori_loop(0, positions // TILE, unread, carry[...])


def _tile(tile, block, positions: int, length: int):
    """Where a tile lies in its block, and which of its positions are in the sequence, unless all are."""
    start = pl.multiple_of(tile * TILE, TILE)
    rows = pl.ds(start, TILE)
    if length % positions == 0:
        return rows, None
    position = block * positions + start + lax.broadcasted_iota(jnp.int32, (TILE, 1), 0)
    return rows, position < length


def _load(ref, rows, is_there) -> Float32[Array, "tile channels"]:
    """Rows after the end of the sequence hold anything. Zeros let the state pass: decay 1, and nothing to add."""
    x = ref[rows].astype(jnp.float32)
    return x if is_there is None else jnp.where(is_there, x, 0.0)


def _scan(
    decay: Float32[Array, "tile channels"],
    additions: Float32[Array, "tile channels"],
    start: Float32[Array, "1 channels"],
    *,
    reverse: bool = False,
) -> tuple[Float32[Array, "tile channels"], Float32[Array, "1 channels"]]:
    """The recurrence over a tile from `start`, and its last value."""
    groups = (TILE // GROUP, GROUP, decay.shape[-1])
    through, own = decay.reshape(groups), additions.reshape(groups)
    position = lax.broadcasted_iota(jnp.int32, groups, 1)
    for reach in (1, 2, 4):
        is_inside = position < GROUP - reach if reverse else position >= reach
        shift = GROUP - reach if reverse else reach
        own = own + through * jnp.where(is_inside, pltpu.roll(own, shift, 1), 0.0)
        through = through * jnp.where(is_inside, pltpu.roll(through, shift, 1), 1.0)

    results = {}
    for group in range(TILE // GROUP)[:: -1 if reverse else 1]:
        results[group] = own[group] + through[group] * start
        start = results[group][:1] if reverse else results[group][-1:]
    return jnp.concatenate([results[group] for group in range(TILE // GROUP)]), start


def _shift(
    x: Float32[Array, "tile channels"], entering: Float32[Array, "1 channels"], *, reverse: bool = False
) -> Float32[Array, "tile channels"]:
    """Each position's predecessor, or successor if `reverse`; `entering` is that of the outermost."""
    position = lax.broadcasted_iota(jnp.int32, x.shape, 0)
    outermost, shift = (TILE - 1, TILE - 1) if reverse else (0, 1)
    return jnp.where(position == outermost, entering, pltpu.roll(x, shift, 0))
