r"""Chunk by chunk with matrix products: fast, exact for any keys, and with little to keep for the backward pass.

Inside a chunk all masses are taken relative to one reference, the largest key $M$ that any of its tokens sees:

    E_s = exp(k_s - M)        the mass of token s                            exponents <= 0
    Z_t = sum_{s<=t} E_s + a  the mass seen by token t; a is the state's
    p_t = w_t / Z_t           so that y_t = sum_{s<=t} (p_t . E_s) v_s + p_t (a S)

which is two small matrix products. It is exact while every Z_t is far above the smallest float. Where keys rise so
steeply that one is not, the chunk is read token by token instead; no model in its right mind pays for that, and no key
breaks it. The backward pass keeps the states between chunks and recomputes the rest.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from latte_eqx.ops.batching import leading_vmap
from latte_eqx.ops.latte import scan
from latte_eqx.ops.latte.state import LOWEST, LatteState

CHUNK = 32
# A token whose mass falls below this is e^50 under its chunk's reference: terms that matter to it might underflow.
SMALLEST_MASS = 2e-22


def latte_causal(
    weights: Float[Array, "*batch seq latents"],
    keys: Float[Array, "*batch seq latents"],
    values: Float[Array, "*batch seq dim"],
    segment_ids: Int[Array, "*#batch seq"] | None,
    state: LatteState,
) -> tuple[Float[Array, "*batch seq dim"], LatteState]:
    """Read a chunk at a time."""
    seq = keys.shape[-2]
    if seq == 0:
        return values, state
    padding = -seq % min(CHUNK, seq)
    pad = lambda x, **how: jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, padding), (0, 0)], **how)
    # A padded token weighs nothing and belongs to the last document, so it leaves the state as it is.
    keys = pad(keys, constant_values=-jnp.inf)
    if segment_ids is not None:
        segment_ids = pad(segment_ids[..., None], mode="edge")[..., 0]
    y, state = _latte_causal(pad(weights), keys, pad(values), segment_ids, state)
    return y[..., :seq, :], state


@jax.custom_vjp
def _latte_causal(weights, keys, values, segment_ids, state):
    y, state, _ = _forward(weights, keys, values, segment_ids, state)
    return y, state


def _save(weights, keys, values, segment_ids, state):
    y, state, boundaries = _forward(weights, keys, values, segment_ids, state)
    return (y, state), (weights, keys, values, segment_ids, state, boundaries)


def _restore(residuals, cotangents):
    dy, dstate = cotangents
    return _backward(*residuals, dy, dstate)


_latte_causal.defvjp(_save, _restore)


@leading_vmap
def _forward(weights, keys, values, segment_ids, state):
    """Return the outputs, the last state, and the states before each chunk."""
    size = min(CHUNK, keys.shape[-2])

    def read(carry, index):
        state, y = carry
        chunk = _chunk(weights, keys, values, segment_ids, state, index, size)
        new_y, after = lax.cond(chunk.is_safe(), lambda: _read_chunk(chunk), lambda: _read_tokens(*chunk.arrays()))
        return (after, _put(y, new_y, index)), state

    (state, y), boundaries = lax.scan(read, (state, jnp.zeros_like(values)), jnp.arange(keys.shape[-2] // size))
    return y, state, jax.tree.map(lambda x: jnp.moveaxis(x, 0, keys.ndim - 2), boundaries)


@leading_vmap
def _backward(weights, keys, values, segment_ids, state, boundaries, dy, dstate):
    """Return the cotangents of the arguments, from the last chunk to the first."""
    size = min(CHUNK, keys.shape[-2])

    def unread(carry, step):
        dafter, after, gradients = carry
        index, before = step
        chunk = _chunk(weights, keys, values, segment_ids, before, index, size)
        cotangents = _slice(dy, index, size), dafter
        new, dbefore = lax.cond(
            chunk.is_safe(),
            lambda: _unread_chunk(chunk, after, *cotangents),
            lambda: _unread_tokens(chunk, *cotangents),
        )
        return (dbefore, before, tuple(map(_put, gradients, new, (index,) * 3))), None

    gradients = tuple(jnp.zeros_like(x) for x in (weights, keys, values))
    boundaries = jax.tree.map(lambda x: jnp.moveaxis(x, keys.ndim - 2, 0), boundaries)
    steps = jnp.arange(keys.shape[-2] // size), boundaries
    (dstate, _, gradients), _ = lax.scan(unread, (dstate, state, gradients), steps, reverse=True)
    return *gradients, None, dstate


class _Chunk(NamedTuple):
    """The tokens of a chunk, the state before them, who sees whom, and the masses relative to `reference`."""

    weights: Array
    keys: Array
    values: Array
    segment_ids: Array | None
    state: LatteState
    sees: Array  # (target, source) is 1 where the source is not later and of the same document
    continues: Array | float  # (token, 1) is 1 in the document of the state before the chunk
    lasts: Array | float  # (token, 1) is 1 in the document that the chunk ends in
    reference: Array  # (latents)
    mass: Array  # (token, latents)
    state_mass: Array  # (latents)
    seen_mass: Array  # (token, latents)

    def arrays(self):
        """Return the arguments of the token-by-token implementation."""
        return self.weights, self.keys, self.values, self.segment_ids, self.state

    def is_safe(self):
        """Tell whether every token that has seen a key has a mass far from underflow."""
        small = self.seen_mass < SMALLEST_MASS
        return ~(jnp.any(small & (self.keys > -jnp.inf)) | jnp.any(small[..., 0, :] & (self.state.mass > 0)))

    def has_state(self):
        """Return 1 where the chunk begins in the document of the state before it."""
        return self.continues[..., 0, :] if isinstance(self.continues, Array) else 1.0

    def keeps_state(self):
        """Return 1 where the chunk ends in the document of the state before it."""
        return self.continues[..., -1, :] if isinstance(self.continues, Array) else 1.0

    def last_peak(self):
        """Return the largest key of the document that the chunk ends in."""
        if self.segment_ids is None:
            return self.reference
        peak = jnp.where(self.lasts > 0, self.keys, LOWEST).max(axis=-2)
        return jnp.maximum(peak, jnp.where(self.keeps_state() > 0, self.state.peak, LOWEST))

    def last_scale(self, peak):
        """Return what turns a mass relative to the reference into one relative to the last document's `peak`."""
        if self.segment_ids is None:
            return 1.0
        return jnp.exp(jnp.where(self.seen_mass[..., -1, :] > 0, self.reference - peak, 0))


def _chunk(weights, keys, values, segment_ids, state, index, size):
    weights, keys, values = (_slice(x, index, size) for x in (weights, keys, values))
    sees = jnp.tril(jnp.ones((size, size), jnp.float32)).reshape(*[1] * (keys.ndim - 2), size, size)
    continues = lasts = 1.0
    if segment_ids is not None:
        before = lax.dynamic_slice_in_dim(segment_ids, jnp.maximum(index * size - 1, 0), 1, axis=-1)
        segment_ids = lax.dynamic_slice_in_dim(segment_ids, index * size, size, axis=-1)
        sees *= (segment_ids[..., :, None] == segment_ids[..., None, :]).astype(jnp.float32)
        continues = (segment_ids == before)[..., None].astype(jnp.float32)
        lasts = (segment_ids == segment_ids[..., -1:])[..., None].astype(jnp.float32)
        # A first token that begins a document finds an empty state.
        kept = continues[..., 0, :] > 0
        state = LatteState(state.average, jnp.where(kept, state.peak, LOWEST), jnp.where(kept, state.mass, 0))
    reference = jnp.maximum(keys.max(axis=-2), state.peak)
    mass = jnp.exp(keys - reference[..., None, :])
    state_mass = state.mass * jnp.exp(state.peak - reference)
    seen_mass = _matmul(sees, mass) + continues * state_mass[..., None, :]
    return _Chunk(
        weights, keys, values, segment_ids, state, sees, continues, lasts, reference, mass, state_mass, seen_mass
    )


def _read_chunk(chunk: _Chunk):
    share = _divide(chunk.weights, chunk.seen_mass)
    mixing = jnp.einsum("...tl,...sl->...ts", share, chunk.mass) * chunk.sees
    old_sum = chunk.state_mass[..., None] * chunk.state.average
    y = mixing @ chunk.values + (chunk.continues * share) @ old_sum

    last_mass, peak = chunk.seen_mass[..., -1, :], chunk.last_peak()
    last_sum = _sum_tokens(chunk.lasts * chunk.mass, chunk.values)
    last_sum += _column(chunk.keeps_state()) * old_sum
    return y, LatteState(_divide(1.0, last_mass)[..., None] * last_sum, peak, last_mass * chunk.last_scale(peak))


def _unread_chunk(chunk: _Chunk, after: LatteState, dy, dafter: LatteState):
    share = _divide(chunk.weights, chunk.seen_mass)
    mixing = jnp.einsum("...tl,...sl->...ts", share, chunk.mass) * chunk.sees
    agreement = jnp.einsum("...td,...sd->...ts", dy, chunk.values) * chunk.sees
    old_sum = chunk.state_mass[..., None] * chunk.state.average
    last_mass = chunk.seen_mass[..., -1, :]

    dlast_sum = _divide(1.0, last_mass)[..., None] * dafter.average
    dlast_mass = chunk.last_scale(after.peak) * dafter.mass
    dlast_mass -= _divide((dafter.average * after.average).sum(axis=-1), last_mass)

    dshare = agreement @ chunk.mass + chunk.continues * jnp.einsum("...td,...ld->...tl", dy, old_sum)
    dweights = _divide(dshare, chunk.seen_mass)
    dseen_mass = -dweights * share
    dmass = _matmul(chunk.sees.swapaxes(-1, -2), dseen_mass)
    dmass += _sum_tokens(agreement, share)
    dmass += chunk.lasts * (jnp.einsum("...sd,...ld->...sl", chunk.values, dlast_sum) + dlast_mass[..., None, :])
    dvalues = _sum_tokens(mixing, dy) + (chunk.lasts * chunk.mass) @ dlast_sum

    dold_sum = _sum_tokens(chunk.continues * share, dy)
    dold_sum += _column(chunk.keeps_state()) * dlast_sum
    dstate_mass = (chunk.continues * dseen_mass).sum(axis=-2) + chunk.keeps_state() * dlast_mass
    dstate_mass += (dold_sum * chunk.state.average).sum(axis=-1)
    dstate = LatteState(
        chunk.state_mass[..., None] * dold_sum,
        chunk.state_mass * dstate_mass,
        jnp.exp(chunk.state.peak - chunk.reference) * dstate_mass,
    )
    return (dweights, dmass * chunk.mass, dvalues), dstate


def _unread_tokens(chunk: _Chunk, dy, dafter: LatteState):
    """The slow way: differentiate the token-by-token implementation."""
    weights, keys, values, segment_ids, state = chunk.arrays()

    def read(weights, keys, values, state):
        return _read_tokens(weights, keys, values, segment_ids, state)

    _, pull_back = jax.vjp(read, weights, keys, values, state)
    *dtokens, dstate = pull_back((dy, dafter))
    kept = chunk.has_state()
    return tuple(dtokens), LatteState(_column(kept) * dstate.average, kept * dstate.peak, kept * dstate.mass)


_read_tokens = scan.latte_causal


def _slice(x, index, size):
    return lax.dynamic_slice_in_dim(x, index * size, size, axis=-2).astype(jnp.float32)


def _put(x, new, index):
    return lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), index * new.shape[-2], axis=-2)


def _divide(x, mass):
    """`x / mass`, and 0 where nothing has been seen."""
    return jnp.where(mass > 0, x / mass, 0)


def _matmul(sees, x):
    """`sees @ x`; as one large product where all rows share one `sees`. A sum of masses must be a float32 sum."""
    if sees.size == sees.shape[-1] ** 2:
        sees = sees.reshape(sees.shape[-2:])
        return jnp.einsum("ts,...sl->...tl", sees, x, precision=lax.Precision.HIGHEST)
    return jnp.matmul(sees, x, precision=lax.Precision.HIGHEST)


def _sum_tokens(x, y):
    """The product of `x`, transposed, and `y`: a sum over the tokens of both."""
    # Left alone, the transposition would be merged into the product, which is slower on CPUs than a copy.
    return lax.optimization_barrier(x.swapaxes(-1, -2)) @ y


def _column(x):
    return x if isinstance(x, float) else x[..., None]
