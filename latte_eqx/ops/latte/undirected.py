"""Undirected linear attention with exponential features: Latte with another choice of latents."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from latte_eqx.ops.dispatch import Implementation
from latte_eqx.ops.latte.causal import latte_causal
from latte_eqx.ops.latte.state import LatteState, empty_like
from latte_eqx.ops.linear_scan import linear_scan
from latte_eqx.ops.segments import count_segments, segment_starts
from latte_eqx.ops.validation import check_floating, check_shape


def linear_attention(
    queries: Float[Array, "*batch seq latents"],
    keys: Float[Array, "*batch seq latents"],
    values: Float[Array, "*batch seq dim"],
    *,
    segment_ids: Int[Array, "*#batch seq"] | None = None,
    state: LatteState | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "*batch seq dim"], LatteState]:
    r"""Attend with the weights $\sum_l e^{q_{tl}} e^{k_{sl}}$, normalised over $s \le t$.

    $$y_t = \frac{\sum_{s \le t} \sum_l e^{q_{tl} + k_{sl}} v_s}{\sum_{s \le t} \sum_l e^{q_{tl} + k_{sl}}}$$

    This is `latte_causal` with weights $\mathrm{softmax}_l(q_{tl} + \log \sum_{s \le t} e^{k_{sl}})$: where Latte's
    token picks a latent by its query alone, here heavy latents draw more. The arguments are those of `latte_causal`.
    """
    check_floating(queries=queries, keys=keys)
    check_shape("queries", queries, keys.shape, "that of `keys`")
    weights = undirected_weights(queries, *running_mass(keys, segment_ids, state)).astype(values.dtype)
    return latte_causal(weights, keys, values, segment_ids=segment_ids, state=state, implementation=implementation)


def undirected_weights(
    queries: Float[Array, "*batch seq latents"],
    peak: Float[Array, "*batch #seq latents"],
    mass: Float[Array, "*batch #seq latents"],
) -> Float[Array, "*batch seq latents"]:
    r"""Return $\mathrm{softmax}(q + \log \text{mass})$, with masses relative to their peaks."""
    # Peaks are compared before anything small is added to them: sums with large peaks would lose it.
    relative = peak - peak.max(axis=-1, keepdims=True)
    logits = queries.astype(jnp.float32) + jnp.log(jnp.where(mass > 0, mass, 1)) + relative
    return jax.nn.softmax(jnp.where(mass > 0, logits, jnp.finfo(jnp.float32).min), axis=-1)


def running_mass(
    keys: Float[Array, "*batch seq latents"],
    segment_ids: Int[Array, "*#batch seq"] | None = None,
    state: LatteState | None = None,
) -> tuple[Float[Array, "*batch seq latents"], Float[Array, "*batch seq latents"]]:
    """Return the state's peak and mass after each token."""
    keys = keys.astype(jnp.float32)
    if state is None:
        state = empty_like(keys, keys[..., :0])
    starts = jnp.zeros((*[1] * (keys.ndim - 2), keys.shape[-2]), bool)
    if segment_ids is not None:
        starts = segment_starts(count_segments(segment_ids, keys.shape[:-1]))
    starts = jnp.broadcast_to(starts[..., None], keys.shape)

    before = state.peak[..., None, :]
    candidates = jnp.concatenate([before, jnp.maximum(keys, jnp.finfo(jnp.float32).min)], axis=-2)
    is_start = jnp.pad(starts, [(0, 0)] * (keys.ndim - 2) + [(1, 0), (0, 0)])
    peaks, _ = lax.associative_scan(_later_peak, (candidates, is_start), axis=keys.ndim - 2)
    peaks = lax.stop_gradient(peaks)
    peak, previous = peaks[..., 1:, :], peaks[..., :-1, :]
    log_decay = jnp.where(starts, -jnp.inf, previous - peak)
    # The start's own peak is an input as its mass is: this factor is one, but has a derivative.
    unit = jnp.exp(state.peak - lax.stop_gradient(state.peak))
    mass, _ = linear_scan(log_decay, jnp.exp(keys - peak), state=unit * state.mass)
    return peak, mass


def _later_peak(earlier, later):
    (peak, is_start), (later_peak, later_is_start) = earlier, later
    return jnp.where(later_is_start, later_peak, jnp.maximum(peak, later_peak)), is_start | later_is_start
