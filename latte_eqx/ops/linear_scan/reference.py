"""The recurrence written out as a sum over the past."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


def linear_scan_reference(
    log_decay: Float[Array, "*batch seq dim"],
    inputs: Float[Array, "*batch seq dim"],
    state: Float32[Array, "*batch dim"],
) -> tuple[Float[Array, "*batch seq dim"], Float32[Array, "*batch dim"]]:
    """h_t = sum over s <= t of (product of decay_r over s < r <= t) inputs_s, where the state counts as inputs_0."""
    decay = jnp.exp(log_decay.astype(jnp.float32))
    additions = jnp.concatenate([state[..., None, :], inputs.astype(jnp.float32)], axis=-2)
    decay = jnp.concatenate([jnp.ones_like(state)[..., None, :], decay], axis=-2)

    length = additions.shape[-2]
    square = (*additions.shape[:-2], length, length, additions.shape[-1])
    after = jnp.broadcast_to(jnp.tri(length, k=-1, dtype=bool)[:, :, None], square)  # [r, s]: r comes after s
    factors = jnp.where(after, jnp.broadcast_to(decay[..., :, None, :], square), jnp.ones_like(decay, shape=square))
    # Products, not differences of cumulative logarithms: exact at decay 0, and no cancellation at long lengths.
    weights = jnp.cumprod(factors, axis=-3)
    causal = jnp.broadcast_to(jnp.tri(length, dtype=bool)[:, :, None], square)
    terms = weights * jnp.broadcast_to(additions[..., None, :, :], square)
    h = jnp.sum(jnp.where(causal, terms, jnp.zeros_like(terms)), axis=-2)[..., 1:, :]
    return h.astype(inputs.dtype), h[..., -1, :]
