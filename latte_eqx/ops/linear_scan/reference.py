"""The recurrence written out as a sum over the past."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


def linear_scan_reference(
    log_decay: Float[Array, "*batch seq dim"],
    inputs: Float[Array, "*batch seq dim"],
    state: Float32[Array, "*batch dim"],
) -> tuple[Float[Array, "*batch seq dim"], Float32[Array, "*batch dim"]]:
    """h_t = sum over s <= t of exp(sum of log_decay_r over s < r <= t) inputs_s, where the state is inputs_0."""
    additions = jnp.concatenate([state[..., None, :], inputs.astype(jnp.float32)], axis=-2)
    log_decay = jnp.concatenate([jnp.zeros_like(state)[..., None, :], log_decay.astype(jnp.float32)], axis=-2)

    *batch, length, dim = additions.shape
    square = (*batch, length, length, dim)
    later = jnp.broadcast_to(jnp.tri(length, k=-1, dtype=bool)[:, :, None], square)  # [r, s]: r > s
    causal = jnp.broadcast_to(jnp.tri(length, dtype=bool)[:, :, None], square)  # [t, s]: t >= s
    # Each pair has a sum of its own. The difference of two cumulative sums would cancel, and be NaN after a reset.
    exponents = jnp.cumsum(jnp.where(later, log_decay[..., :, None, :], 0.0), axis=-3)
    weights = jnp.where(causal, jnp.exp(exponents), 0.0)
    h = jnp.einsum("...tsd,...sd->...td", weights, additions, precision="highest")[..., 1:, :]
    return h.astype(inputs.dtype), h[..., -1, :]
