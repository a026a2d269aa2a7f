"""Token by token, as the paper lists it but with averages in place of sums: the simple fallback and the yardstick."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from latte_eqx.ops.latte.state import LOWEST, LatteState
from latte_eqx.ops.segments import segment_starts


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
    starts = None if segment_ids is None else segment_starts(segment_ids)
    y, state = read_tokens(weights, keys, values, starts, state, unroll=unroll)
    return y.astype(values.dtype), state


def read_tokens(
    weights: Float[Array, "*batch seq latents"],
    keys: Float[Array, "*batch seq latents"],
    values: Float[Array, "*batch seq dim"],
    starts: Bool[Array, "*#batch seq"] | None,
    state: LatteState,
    *,
    unroll: int = 1,
) -> tuple[Float[Array, "*batch seq dim"], LatteState]:
    """Read one token at a time, beginning anew where `starts` is true."""
    arrays = tuple(jnp.moveaxis(x.astype(jnp.float32), -2, 0) for x in (weights, keys, values))
    starts = None if starts is None else jnp.moveaxis(starts, -1, 0)[..., None]

    def read(state: LatteState, token):
        (weight, key, value), start = token
        average, old_peak, old_mass = state.average, state.peak, state.mass
        if start is not None:
            average = jnp.where(start[..., None], 0, average)
            old_peak, old_mass = jnp.where(start, LOWEST, old_peak), jnp.where(start, 0, old_mass)
        peak = lax.stop_gradient(jnp.maximum(old_peak, key))
        added = jnp.exp(key - peak)
        mass = old_mass * jnp.exp(old_peak - peak) + added
        share = added / jnp.where(mass > 0, mass, 1)
        # As a step towards the value: two rounded shares would not add up to one, and the average would drift.
        average += share[..., None] * (value[..., None, :] - average)
        return LatteState(average, peak, mass), jnp.einsum("...l,...ld->...d", weight, average)

    # An empty state has no average, whatever stands in its place.
    state = LatteState(jnp.where(state.mass[..., None] > 0, state.average, 0), state.peak, state.mass)
    state, y = lax.scan(read, state, (arrays, starts), unroll=unroll)
    return jnp.moveaxis(y, 0, -2), state
