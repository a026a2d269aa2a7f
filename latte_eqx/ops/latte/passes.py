"""What all implementations that read in chunks share: how a sequence is cut, and what is kept for the backward pass.

The forward pass keeps the states between chunks, and the backward pass computes the rest again from them. Sequences
are a whole number of chunks long, cut alike on every platform:

    forward(weights, keys, values, segment_ids, state, *, chunk, keep)
        returns the outputs, the last state, and, to keep, the states before each chunk, with the chunks as the last
        axis of the batch; of those that its own backward pass does not read, what they are does not matter
    backward(weights, keys, values, segment_ids, state, last_state, states, dy, dstate, *, chunk)
        returns the cotangents of weights, keys, values and the first state
"""

from functools import partial
from math import ceil

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from latte_eqx.ops.batching import leading_vmap
from latte_eqx.ops.dispatch import Passes
from latte_eqx.ops.latte.state import LatteState, divide
from latte_eqx.ops.precision import exact_products

# Every chunk has at most so many tokens, and is a whole number of blocks unless it is shorter than one.
CHUNK, BLOCK = 256, 32
# What steep keys alone take bears this name in traces and profiles.
TOKEN_BY_TOKEN = "token_by_token"


def latte_causal(
    weights: Float[Array, "*batch seq latents"],
    keys: Float[Array, "*batch seq latents"],
    values: Float[Array, "*batch seq dim"],
    segment_ids: Int[Array, "*#batch seq"] | None,
    state: LatteState,
    *,
    passes: Passes,
    shortest: int = 1,
) -> tuple[Float[Array, "*batch seq dim"], LatteState]:
    """Read a chunk at a time; shorter sequences are padded to `shortest`."""
    seq = keys.shape[-2]
    if seq == 0:
        return values, state
    chunk, chunks = _plan(max(seq, shortest))
    padding = chunk * chunks - seq
    pad = lambda x, **how: jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, padding), (0, 0)], **how)
    if padding:
        # A padded token weighs nothing and belongs to the last document, so it leaves the state as it is.
        weights, values, keys = pad(weights), pad(values), pad(keys, constant_values=-jnp.inf)
        if segment_ids is not None:
            segment_ids = pad(segment_ids[..., None], mode="edge")[..., 0]
    y, state = _latte_causal(weights, keys, values, segment_ids, state, passes, chunk)
    return y[..., :seq, :], state


def _plan(seq: int) -> tuple[int, int]:
    """Return the tokens in a chunk, and the chunks, with little to pad."""
    block = min(BLOCK, seq)
    blocks = ceil(seq / block)
    chunks = ceil(blocks * block / CHUNK)
    return block * ceil(blocks / chunks), chunks


def asked_of_sums(
    last_state: LatteState, dstate: LatteState
) -> tuple[Float[Array, "*batch latents dim"], Float[Array, "*batch latents"]]:
    """Turn what is asked of the last average and mass into what is asked of the sum of values and the mass."""
    of_sum = divide(dstate.average, last_state.mass[..., None])
    return of_sum, dstate.mass - (of_sum * last_state.average).sum(axis=-1)


def asked_of_state(
    state: LatteState, of_sum: Float[Array, "*batch latents dim"], of_mass: Float[Array, "*batch latents"]
) -> LatteState:
    """Turn what is asked before the first chunk back into what is asked of the state there."""
    dmass = of_mass + (of_sum * state.average).sum(axis=-1)
    return LatteState(state.mass[..., None] * of_sum, state.mass * dmass, dmass)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _latte_causal(weights, keys, values, segment_ids, state, passes, chunk):
    forward = leading_vmap(partial(passes.forward, chunk=chunk, keep=False))
    y, last, _ = forward(weights, keys, values, segment_ids, state)
    return y, last


def _save(weights, keys, values, segment_ids, state, passes, chunk):
    forward = leading_vmap(partial(passes.forward, chunk=chunk, keep=True))
    y, last, states = forward(weights, keys, values, segment_ids, state)
    return (y, last), (weights, keys, values, segment_ids, state, last, states)


def _restore(passes, chunk, residuals, cotangents):
    backward = leading_vmap(partial(passes.backward, chunk=chunk))
    with exact_products(cotangents[0].dtype):
        dweights, dkeys, dvalues, dstate = backward(*residuals, *cotangents)
    return dweights, dkeys, dvalues, None, dstate


_latte_causal.defvjp(_save, _restore)
