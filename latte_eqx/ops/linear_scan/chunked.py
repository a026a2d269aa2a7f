"""The recurrence position by position, or in chunks that advance together, with a backward pass written by hand.

Arrays are read and written one position at a time in the layout they come in, with no transposed copy and no
intermediate array as long as the sequence: the op is bound by memory traffic. Nothing is ever divided, and every factor
lies in [0, 1], so decays of exactly 0 and exactly 1 need no special care.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from latte_eqx.ops.batching import leading_vmap
from latte_eqx.ops.dispatch import Passes

# A sequence takes 2 * CHUNK + length / CHUNK steps one after another: about the least for lengths of a few thousand.
CHUNK = 64

Outputs = tuple[Float[Array, "*batch seq dim"], Float32[Array, "*batch dim"]]
Gradients = tuple[Float[Array, "*batch seq dim"], Float[Array, "*batch seq dim"], Float32[Array, "*batch dim"]]
Residuals = tuple[Float[Array, "*batch seq dim"], Float32[Array, "*batch dim"], Float[Array, "*batch seq dim"]]


def linear_scan_chunked(
    log_decay: Float[Array, "*batch seq dim"],
    inputs: Float[Array, "*batch seq dim"],
    state: Float32[Array, "*batch dim"],
    chunk: int | None = None,
) -> Outputs:
    """Chunks of `chunk` positions; `None` leaves the length of a chunk to the platform."""
    return linear_scan_in_passes(log_decay, inputs, state, chunked_passes(chunk))


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def linear_scan_in_passes(
    log_decay: Float[Array, "*batch seq dim"],
    inputs: Float[Array, "*batch seq dim"],
    state: Float32[Array, "*batch dim"],
    passes: Passes,
) -> Outputs:
    """Run the forward pass, and when differentiated the backward pass.

    `forward(log_decay, inputs, state, *, dtypes)` returns all h in each of the `dtypes`, and the last one in float32.
    `backward(log_decay, state, h, h_cotangent, last_cotangent)` returns the gradients of `log_decay`, of the inputs and
    of the state, each in the dtype of what it belongs to.
    """
    (h,), last = leading_vmap(partial(passes.forward, dtypes=(inputs.dtype,)))(log_decay, inputs, state)
    return h, last


def _forward_rule(
    log_decay: Float[Array, "*batch seq dim"],
    inputs: Float[Array, "*batch seq dim"],
    state: Float32[Array, "*batch dim"],
    passes: Passes,
) -> tuple[Outputs, Residuals]:
    # Keeping h beats computing it again from the chunks' starts: it is the output itself, alive anyway. Only if the
    # inputs are coarser than `log_decay`, whose gradient a rounded h would spoil, it is kept in float32 besides.
    is_coarser = inputs.dtype.itemsize < log_decay.dtype.itemsize
    dtypes = (inputs.dtype, jnp.float32) if is_coarser else (inputs.dtype,)
    h, last = leading_vmap(partial(passes.forward, dtypes=dtypes))(log_decay, inputs, state)
    return (h[0], last), (log_decay, state, h[-1])


def _backward_rule(passes: Passes, residuals: Residuals, cotangents: Outputs) -> Gradients:
    return leading_vmap(passes.backward)(*residuals, *cotangents)


linear_scan_in_passes.defvjp(_forward_rule, _backward_rule)


def chunked_passes(chunk: int | None = None) -> Passes:
    """The passes in chunks of `chunk` positions; `None` leaves the length of a chunk to the platform."""

    def forward(log_decay: Array, inputs: Array, state: Array, *, dtypes: tuple[Any, ...]) -> tuple[Any, Array]:
        h, last = _by_chunk(_forward, _forward_in_chunks, chunk, log_decay, inputs, state)
        return tuple(h.astype(dtype) for dtype in dtypes), last

    def backward(log_decay: Array, state: Array, h: Array, h_cotangent: Array, last_cotangent: Array) -> Gradients:
        arrays = log_decay, state, h, h_cotangent, last_cotangent
        log_decay_grad, inputs_grad, state_grad = _by_chunk(_backward, _backward_in_chunks, chunk, *arrays)
        return log_decay_grad.astype(log_decay.dtype), inputs_grad.astype(h_cotangent.dtype), state_grad

    return Passes(forward, backward)


def _by_chunk(whole: Callable[..., Any], in_chunks: Callable[..., Any], chunk: int | None, *arrays: Array) -> Any:
    """Run `whole` or `in_chunks`: as `chunk` says, or as suits the platform the computation is compiled for."""
    length = arrays[0].shape[-2]
    if length <= (chunk or CHUNK):
        return whole(*arrays)
    if chunk is not None:
        return in_chunks(*arrays, chunk=chunk)
    # A step costs a CPU little beyond its memory traffic, and without chunks everything is read only once. On an
    # accelerator each step is a launch, so few and wide ones are better.
    return lax.platform_dependent(*arrays, cpu=whole, default=partial(in_chunks, chunk=CHUNK))


def _forward(
    log_decay: Float[Array, "*batch seq dim"],
    inputs: Float[Array, "*batch seq dim"],
    state: Float32[Array, "*batch dim"],
) -> tuple[Float32[Array, "*batch seq dim"], Float32[Array, "*batch dim"]]:
    """All h and the last one, position by position."""

    def step(position: Int[Array, ""], carry: tuple[Array, Array]) -> tuple[Array, Array]:
        h, outputs = carry
        h = jnp.exp(_read(log_decay, position)) * h + _read(inputs, position)
        return h, _write(outputs, h, position)

    last, h = lax.fori_loop(0, inputs.shape[-2], step, (state, jnp.zeros_like(inputs, dtype=jnp.float32)))
    return h, last


def _backward(
    log_decay: Float[Array, "*batch seq dim"],
    state: Float32[Array, "*batch dim"],
    h: Float[Array, "*batch seq dim"],
    h_cotangent: Float[Array, "*batch seq dim"],
    last_cotangent: Float32[Array, "*batch dim"],
) -> tuple[Float32[Array, "*batch seq dim"], Float32[Array, "*batch seq dim"], Float32[Array, "*batch dim"]]:
    r"""The same recurrence from the end, carrying what h_t passes down to h_{t-1}.

    $$g_t = \bar h_t + a_{t+1} g_{t+1}, \quad \bar x_t = g_t, \quad \overline{\log a}_t = a_t g_t h_{t-1}$$
    """
    length = h.shape[-2]

    def step(index: Int[Array, ""], carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        passed, log_decay_grad, inputs_grad = carry
        position = length - 1 - index
        gradient = _read(h_cotangent, position) + passed
        passed = jnp.exp(_read(log_decay, position)) * gradient
        # At position 0 the read wraps around to a value that is not used.
        previous = lax.select(position > 0, _read(h, position - 1), state)
        log_decay_grad = _write(log_decay_grad, passed * previous, position)
        return passed, log_decay_grad, _write(inputs_grad, gradient, position)

    empty = jnp.zeros_like(h, dtype=jnp.float32)
    passed, log_decay_grad, inputs_grad = lax.fori_loop(0, length, step, (last_cotangent, empty, empty))
    return log_decay_grad, inputs_grad, passed


def _forward_in_chunks(
    log_decay: Float[Array, "*batch seq dim"],
    inputs: Float[Array, "*batch seq dim"],
    state: Float32[Array, "*batch dim"],
    *,
    chunk: int,
) -> tuple[Float32[Array, "*batch seq dim"], Float32[Array, "*batch dim"]]:
    """What `_forward` returns, with the chunks as one more batch axis."""
    log_decays, pieces = _split(log_decay, chunk), _split(inputs, chunk)
    # The compiler drops the outputs of this first pass, of which only the last h is used.
    nothing = jnp.zeros_like(pieces[..., 0, :], dtype=jnp.float32)
    _, own = _forward(log_decays, pieces, nothing)
    starts = _chunk_starts(log_decays, own, state, reverse=False)
    h, ends = _forward(log_decays, pieces, starts)
    return _join(h, inputs.shape[-2]), ends[..., -1, :]


def _backward_in_chunks(
    log_decay: Float[Array, "*batch seq dim"],
    state: Float32[Array, "*batch dim"],
    h: Float[Array, "*batch seq dim"],
    h_cotangent: Float[Array, "*batch seq dim"],
    last_cotangent: Float32[Array, "*batch dim"],
    *,
    chunk: int,
) -> tuple[Float32[Array, "*batch seq dim"], Float32[Array, "*batch seq dim"], Float32[Array, "*batch dim"]]:
    """What `_backward` returns, with the chunks as one more batch axis."""
    log_decays, hs, h_cotangents = _split(log_decay, chunk), _split(h, chunk), _split(h_cotangent, chunk)
    states = jnp.concatenate([state[..., None, :], hs[..., :-1, -1, :].astype(jnp.float32)], axis=-2)
    _, _, own = _backward(log_decays, states, hs, h_cotangents, jnp.zeros_like(states))
    starts = _chunk_starts(log_decays, own, last_cotangent, reverse=True)
    log_decay_grad, inputs_grad, passed = _backward(log_decays, states, hs, h_cotangents, starts)
    length = h.shape[-2]
    return _join(log_decay_grad, length), _join(inputs_grad, length), passed[..., 0, :]


def _chunk_starts(
    log_decays: Float[Array, "*batch chunks chunk dim"],
    own: Float32[Array, "*batch chunks dim"],
    first: Float32[Array, "*batch dim"],
    *,
    reverse: bool,
) -> Float32[Array, "*batch chunks dim"]:
    """What enters each chunk, where `own` is what each lets out when nothing enters."""
    through = jnp.exp(jnp.sum(log_decays, axis=-2, dtype=jnp.float32))

    def step(start: Float32[Array, "*batch dim"], of_chunk: tuple[Array, Array]) -> tuple[Array, Array]:
        through, own = of_chunk
        return through * start + own, start

    _, starts = lax.scan(step, first, (jnp.moveaxis(through, -2, 0), jnp.moveaxis(own, -2, 0)), reverse=reverse)
    return jnp.moveaxis(starts, 0, -2)


def _split(x: Float[Array, "*batch seq dim"], chunk: int) -> Float[Array, "*batch chunks chunk dim"]:
    """Cut into chunks. The last is filled up with zeros, which keep the state: decay 1, and nothing to add."""
    *batch, length, dim = x.shape
    x = jnp.pad(x, [(0, 0)] * len(batch) + [(0, -length % chunk), (0, 0)])
    return x.reshape(*batch, -1, chunk, dim)


def _join(x: Float[Array, "*batch chunks chunk dim"], length: int) -> Float[Array, "*batch seq dim"]:
    *batch, num_chunks, chunk, dim = x.shape
    return x.reshape(*batch, num_chunks * chunk, dim)[..., :length, :]


def _read(x: Float[Array, "*batch seq dim"], position: Int[Array, ""]) -> Float32[Array, "*batch dim"]:
    return lax.dynamic_index_in_dim(x, position, axis=-2, keepdims=False).astype(jnp.float32)


def _write(x: Float32[Array, "*batch seq dim"], row: Float32[Array, "*batch dim"], position: Int[Array, ""]) -> Array:
    # Into float32 only: XLA on CPU would convert the whole of a bfloat16 array at every step.
    return lax.dynamic_update_index_in_dim(x, row, position, axis=-2)
