"""The definition, written out: every weight of every token on every token. O(seq^2) in time and memory."""

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
) -> tuple[Float[Array, "*batch seq dim"], LatteState]:
    """Sum over every pair of tokens."""
    weights, keys, inputs = (x.astype(jnp.float32) for x in (weights, keys, values))
    seq = keys.shape[-2]
    if seq == 0:
        return values, state
    if segment_ids is None:
        segment_ids = jnp.zeros((*[1] * (keys.ndim - 2), seq), jnp.int32)
    causal = jnp.tril(jnp.ones((seq, seq), bool)).reshape(*[1] * (keys.ndim - 2), seq, seq)
    sees = (causal & (segment_ids[..., :, None] == segment_ids[..., None, :]))[..., None]
    sees_start = (segment_ids == segment_ids[..., :1])[..., None]

    # Axes of the pairwise arrays: target token, source token, latent.
    pairs = jnp.where(sees, keys[..., None, :, :], -jnp.inf)
    start_peak = jnp.where(sees_start, state.peak[..., None, :], LOWEST)
    peak = lax.stop_gradient(jnp.maximum(pairs.max(axis=-2), start_peak))
    mass_of_pair = jnp.exp(pairs - peak[..., None, :])
    start_mass = jnp.where(sees_start, state.mass[..., None, :], 0) * jnp.exp(start_peak - peak)
    mass = start_mass + mass_of_pair.sum(axis=-2)
    total = jnp.einsum("...tsl,...sd->...tld", mass_of_pair, inputs)
    total += start_mass[..., None] * state.average[..., None, :, :]
    average = total / jnp.where(mass > 0, mass, 1)[..., None]

    y = jnp.einsum("...tl,...tld->...td", weights, average).astype(values.dtype)
    return y, LatteState(average[..., -1, :, :], peak[..., -1, :], mass[..., -1, :])
