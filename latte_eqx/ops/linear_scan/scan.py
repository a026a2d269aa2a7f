"""The recurrence token by token: the simple fallback and the yardstick."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32


def linear_scan_scan(
    log_decay: Float[Array, "*batch seq dim"],
    inputs: Float[Array, "*batch seq dim"],
    state: Float32[Array, "*batch dim"],
) -> tuple[Float[Array, "*batch seq dim"], Float32[Array, "*batch dim"]]:
    """One `lax.scan` step per token, differentiated by JAX."""

    def step(h: Float32[Array, "*batch dim"], token: tuple[Array, Array]) -> tuple[Array, Array]:
        decay, addition = token
        h = decay * h + addition
        return h, h

    decay = jnp.moveaxis(jnp.exp(log_decay.astype(jnp.float32)), -2, 0)
    additions = jnp.moveaxis(inputs.astype(jnp.float32), -2, 0)
    last, h = lax.scan(step, state, (decay, additions))
    return jnp.moveaxis(h, 0, -2).astype(inputs.dtype), last
