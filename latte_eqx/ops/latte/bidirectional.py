"""Bidirectional Latte: each token picks latents, each latent averages the whole document."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from latte_eqx.ops.latte.causal import latte_causal
from latte_eqx.ops.latte.undirected import running_mass, undirected_weights
from latte_eqx.ops.segments import count_segments
from latte_eqx.ops.validation import check_floating, check_mask, check_shape

LOWEST = jnp.finfo(jnp.float32).min


def latte_bidirectional(
    weights: Float[Array, "*batch seq latents"],
    keys: Float[Array, "*batch seq latents"],
    values: Float[Array, "*batch seq dim"],
    *,
    mask: Bool[Array, "*#batch seq"] | None = None,
    segment_ids: Int[Array, "*#batch seq"] | None = None,
) -> Float[Array, "*batch seq dim"]:
    r"""Mix averages of the values over the whole sequence, one average per latent.

    $$y_t = \sum_l w_{tl} \frac{\sum_s e^{k_{sl}} v_s}{\sum_s e^{k_{sl}}}$$

    `mask` is false at positions that no token sees, as are positions whose key is `-inf`. With none left, the result is
    zero. With `segment_ids` (not decreasing) the sums run over the token's own document. Sums are float32; the result
    has the dtype of `values`.
    """
    check_floating(weights=weights, keys=keys, values=values)
    if keys.ndim < 2:
        raise ValueError(f"`keys` must have at least the axes (seq, latents), got shape {keys.shape}.")
    check_shape("weights", weights, keys.shape, "that of `keys`")
    check_shape("values", values, (*keys.shape[:-1], None), "that of `keys` but for the last axis")
    logits = _visible(keys, mask)
    if keys.shape[-2] == 0:
        return values
    if segment_ids is not None:
        return _average_documents(weights, logits, values, count_segments(segment_ids, keys.shape[:-1]))
    mass = jnp.exp(logits - _peak(logits))
    total = mass.sum(axis=-2)
    average = jnp.einsum("...sl,...sd->...ld", mass, values.astype(jnp.float32))
    average /= jnp.where(total > 0, total, 1)[..., None]
    return jnp.einsum("...tl,...ld->...td", weights.astype(jnp.float32), average).astype(values.dtype)


def linear_attention_bidirectional(
    queries: Float[Array, "*batch seq latents"],
    keys: Float[Array, "*batch seq latents"],
    values: Float[Array, "*batch seq dim"],
    *,
    mask: Bool[Array, "*#batch seq"] | None = None,
) -> Float[Array, "*batch seq dim"]:
    r"""Attend like `linear_attention`, but to the whole sequence.

    $$y_t = \frac{\sum_s \sum_l e^{q_{tl} + k_{sl}} v_s}{\sum_s \sum_l e^{q_{tl} + k_{sl}}}$$

    `mask` is that of `latte_bidirectional`.
    """
    check_floating(queries=queries, keys=keys)
    check_shape("queries", queries, keys.shape, "that of `keys`")
    logits = _visible(keys, mask)
    peak = _peak(logits)
    mass = jnp.exp(logits - peak).sum(axis=-2, keepdims=True)
    return latte_bidirectional(undirected_weights(queries, peak, mass), logits, values)


def _visible(keys, mask):
    """Return the keys in float32, `-inf` where `mask` is false."""
    logits = keys.astype(jnp.float32)
    if mask is None:
        return logits
    check_mask("mask", mask, keys.shape[:-1])
    return jnp.where(jnp.broadcast_to(mask, keys.shape[:-1])[..., None], logits, -jnp.inf)


def _peak(logits):
    return lax.stop_gradient(logits.max(axis=-2, keepdims=True, initial=LOWEST))


def _average_documents(weights, keys, values, segments):
    """Split each average at its token: what is not later comes from one causal pass, what is later from another.

    The two passes are weighted by their shares of the mass, so that nothing is normalised twice.
    """
    backwards = lambda x: jnp.flip(x, axis=-2)
    # The second pass reads backwards and one behind, so that a token sees only what is later in its document.
    joined = jnp.diff(segments, append=segments[..., -1:] + 1) == 0
    later_keys = jnp.where(joined[..., None], jnp.roll(keys, -1, axis=-2), -jnp.inf)
    later = backwards(later_keys), backwards(jnp.roll(values, -1, axis=-2))
    later_segments = -jnp.flip(segments, axis=-1)

    peak, mass = running_mass(keys, segments)
    later_peak, later_mass = map(backwards, running_mass(later[0], later_segments))
    highest = jnp.maximum(peak, later_peak)
    mass, later_mass = mass * jnp.exp(peak - highest), later_mass * jnp.exp(later_peak - highest)
    total = jnp.where(mass + later_mass > 0, mass + later_mass, 1)
    weights = weights.astype(jnp.float32)
    y, _ = latte_causal(weights * mass / total, keys, values, segment_ids=segments)
    later_y, _ = latte_causal(backwards(weights * later_mass / total), *later, segment_ids=later_segments)
    return y + backwards(later_y)
