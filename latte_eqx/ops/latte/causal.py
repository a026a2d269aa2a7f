"""Causal Latte: each token picks latents, each latent averages the values seen so far."""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from latte_eqx.ops.batching import vary_alike
from latte_eqx.ops.dispatch import Implementation, chosen_passes, kernels_only, select
from latte_eqx.ops.latte import chunked, pallas_gpu, pallas_tpu, passes, reference, scan
from latte_eqx.ops.latte.state import LatteState, empty_like
from latte_eqx.ops.precision import exact_products
from latte_eqx.ops.segments import count_segments
from latte_eqx.ops.validation import check_floating, check_shape

KERNELS = {"tpu": pallas_tpu.PASSES, "cuda": pallas_gpu.PASSES}
IMPLEMENTATIONS = {
    "reference": reference.latte_causal,
    "scan": scan.latte_causal,
    "chunked": partial(passes.latte_causal, passes=chunked.PASSES),
    "pallas": partial(passes.latte_causal, passes=kernels_only(**KERNELS), shortest=passes.BLOCK),
}
CHOSEN_PASSES = chosen_passes("latte_causal", KERNELS, chunked.PASSES)


def automatic(weights: Float[Array, "*batch seq latents"], *arrays: Any) -> tuple[Array, LatteState]:
    """Take the implementation for the platform that the program is compiled for."""
    # A few tokens, while decoding above all, are not worth a kernel.
    is_short = weights.shape[-2] < passes.BLOCK
    return passes.latte_causal(weights, *arrays, passes=chunked.PASSES if is_short else CHOSEN_PASSES)


def latte_causal(
    weights: Float[Array, "*batch seq latents"],
    keys: Float[Array, "*batch seq latents"],
    values: Float[Array, "*batch seq dim"],
    *,
    segment_ids: Int[Array, "*#batch seq"] | None = None,
    state: LatteState | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "*batch seq dim"], LatteState]:
    r"""Mix causal averages of the values, one average per latent.

    $$y_t = \sum_l w_{tl} \frac{\sum_{s \le t} e^{k_{sl}} v_s}{\sum_{s \le t} e^{k_{sl}}}$$

    **Arguments:**

    - `weights`: $p(l|t)$, non-negative, with any row sum: what is missing to one is another mixer's share.
    - `keys`: unscaled logits, any finite numbers; `-inf` marks a padded position, which no token sees.
    - `values`: what is averaged.
    - `segment_ids`: document numbers, not decreasing along `seq`; a change starts a fresh state.
    - `state`: what was read before; the first token continues its document.
    - `implementation`: `"reference"`, `"scan"`, `"chunked"` or `"pallas"` (for TPUs and GPUs); `None` chooses by the
      platform that the program is compiled for, see `latte_eqx.ops.describe`.

    **Returns:** `y`, in the dtype of `values`, and the state after the last token. A token that has seen only padded
    positions gets zero. All sums are float32. The state's peak counts as a constant in derivatives: it is a unit in
    which the mass is counted, and cancels.
    """
    implement = automatic if implementation is None else select("latte_causal", IMPLEMENTATIONS, implementation)
    check_floating(weights=weights, keys=keys, values=values)
    if keys.ndim < 2:
        raise ValueError(f"`keys` must have at least the axes (seq, latents), got shape {keys.shape}.")
    check_shape("weights", weights, keys.shape, "that of `keys`")
    check_shape("values", values, (*keys.shape[:-1], None), "that of `keys` but for the last axis")
    if segment_ids is not None:
        segment_ids = count_segments(segment_ids, keys.shape[:-1])
    if state is None:
        state = empty_like(keys, values)
    else:
        batch, latents, dim = keys.shape[:-2], keys.shape[-1], values.shape[-1]
        check_shape("state.average", state.average, (*batch, latents, dim), "(*batch, latents, dim)")
        check_shape("state.peak", state.peak, (*batch, latents), "(*batch, latents)")
        check_shape("state.mass", state.mass, (*batch, latents), "(*batch, latents)")
        state = LatteState(*(x.astype(jnp.float32) for x in (state.average, state.peak, state.mass)))
    with exact_products(values.dtype):
        return implement(*vary_alike((weights, keys, values, segment_ids, state)))
