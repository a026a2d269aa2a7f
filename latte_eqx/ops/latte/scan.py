"""Token by token, as the paper lists it: the simple fallback and the yardstick."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from latte_eqx.ops.latte.state import LOWEST, LatteState


def latte_causal(
    weights: Float[Array, "*batch seq latents"],
    keys: Float[Array, "*batch seq latents"],
    values: Float[Array, "*batch seq dim"],
    segment_ids: Int[Array, "*#batch seq"] | None,
    state: LatteState,
    *,
    unroll: int = 1,
) -> tuple[Float[Array, "*batch seq dim"], LatteState]:
    """Read one token at a time."""
    arrays = tuple(jnp.moveaxis(x.astype(jnp.float32), -2, 0) for x in (weights, keys, values))
    starts = None
    if segment_ids is not None:
        starts = jnp.diff(segment_ids, prepend=segment_ids[..., :1]) != 0
        starts = jnp.moveaxis(starts, -1, 0)[..., None]

    def read(state: LatteState, token):
        (weight, key, value), start = token
        old_peak, old_mass = state.peak, state.mass
        if start is not None:
            old_peak, old_mass = jnp.where(start, LOWEST, old_peak), jnp.where(start, 0, old_mass)
        peak = lax.stop_gradient(jnp.maximum(old_peak, key))
        kept, added = old_mass * jnp.exp(old_peak - peak), jnp.exp(key - peak)
        mass = kept + added
        share = 1 / jnp.where(mass > 0, mass, 1)
        average = (kept * share)[..., None] * state.average + (added * share)[..., None] * value[..., None, :]
        return LatteState(average, peak, mass), jnp.einsum("...l,...ld->...d", weight, average)

    state, y = lax.scan(read, state, (arrays, starts), unroll=unroll)
    return jnp.moveaxis(y, 0, -2).astype(values.dtype), state
