"""What a causal Latte layer remembers of the tokens it has read."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

# The peak of a state that has read nothing. It is finite, so that no difference of peaks is ever inf - inf.
LOWEST = float(jnp.finfo(jnp.float32).min)


# A token whose mass falls below this is e^50 under its reference: terms that matter to it might underflow.
SMALLEST_MASS = 2e-22


class LatteState(eqx.Module):
    r"""For each latent, the average of the values so far, the largest key, and the mass $\sum_s e^{k_s - \text{peak}}$.

    The average cannot grow and the mass lies between one and the number of tokens, so no length overflows. Nothing read
    yet: average 0, mass 0, and the lowest float as peak.
    """

    average: Float[Array, "*batch latents dim"]
    peak: Float[Array, "*batch latents"]
    mass: Float[Array, "*batch latents"]

    @classmethod
    def empty(cls, *batch: int, latents: int, dim: int) -> "LatteState":
        """Return the state before the first token."""
        return cls(jnp.zeros((*batch, latents, dim)), jnp.full((*batch, latents), LOWEST), jnp.zeros((*batch, latents)))


def divide(x: Float[Array, "..."] | float, mass: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return `x / mass`, and 0 where nothing has been seen; not to be differentiated."""
    return jnp.where(mass > 0, x / mass, 0)


def empty_like(keys: Float[Array, "*batch seq latents"], values: Float[Array, "*batch seq dim"]) -> LatteState:
    """Return the empty state of a sequence; made from its arrays, so that it is sharded as they are."""
    batch, latents, dim = keys.shape[:-2], keys.shape[-1], values.shape[-1]
    return LatteState(
        jnp.zeros_like(values, dtype=jnp.float32, shape=(*batch, latents, dim)),
        jnp.full_like(keys, LOWEST, dtype=jnp.float32, shape=(*batch, latents)),
        jnp.zeros_like(keys, dtype=jnp.float32, shape=(*batch, latents)),
    )
