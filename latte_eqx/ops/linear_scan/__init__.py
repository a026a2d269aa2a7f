"""The elementwise linear recurrence h_t = a_t h_{t-1} + x_t."""

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from latte_eqx.ops.batching import vary_alike
from latte_eqx.ops.dispatch import Implementation, chosen_passes, kernels_only, select
from latte_eqx.ops.linear_scan import pallas_gpu, pallas_tpu
from latte_eqx.ops.linear_scan.chunked import chunked_passes, linear_scan_chunked, linear_scan_in_passes
from latte_eqx.ops.linear_scan.reference import linear_scan_reference
from latte_eqx.ops.linear_scan.scan import linear_scan_scan
from latte_eqx.ops.validation import check_floating, check_shape

KERNELS = {"tpu": pallas_tpu.PASSES, "cuda": pallas_gpu.PASSES}
IMPLEMENTATIONS = {
    "reference": linear_scan_reference,
    "scan": linear_scan_scan,
    "chunked": linear_scan_chunked,
    "pallas": partial(linear_scan_in_passes, passes=kernels_only(**KERNELS)),
}
CHOSEN_PASSES = chosen_passes("linear_scan", KERNELS, chunked_passes())


def automatic(
    log_decay: Float[Array, "*batch seq dim"],
    inputs: Float[Array, "*batch seq dim"],
    state: Float32[Array, "*batch dim"],
) -> tuple[Float[Array, "*batch seq dim"], Float32[Array, "*batch dim"]]:
    """Take the implementation for the platform that the program is compiled for."""
    # A single token is a multiplication and an addition, which compilers join with what is around them.
    is_single = inputs.shape[-2] == 1
    return linear_scan_in_passes(log_decay, inputs, state, chunked_passes() if is_single else CHOSEN_PASSES)


def linear_scan(
    log_decay: Float[Array, "*batch seq dim"],
    inputs: Float[Array, "*batch seq dim"],
    *,
    state: Float[Array, "*batch dim"] | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "*batch seq dim"], Float32[Array, "*batch dim"]]:
    r"""Every channel forgets by its own decay, then adds its input.

    $$h_t = e^{\mathrm{log\_decay}_t} h_{t-1} + \mathrm{inputs}_t, \qquad h_0 = \mathrm{state}$$

    `log_decay` is at most 0: a 0 keeps the state exactly, `-inf` resets it exactly, as at the start of a document.
    Returns all h in the dtype of `inputs`, and the last one in float32, to be passed on as `state`. The recurrence runs
    in float32 whatever the inputs' dtypes; without a `state` it starts from zero.

    `implementation=None` takes `"pallas"` where it is compiled for a TPU or a CUDA GPU, and `"chunked"` elsewhere and
    for a single token.
    """
    _check(log_decay, inputs, state)
    run = automatic if implementation is None else select("linear_scan", IMPLEMENTATIONS, implementation)
    if state is None:
        state = jnp.zeros_like(inputs, shape=inputs.shape[:-2] + inputs.shape[-1:], dtype=jnp.float32)
    if inputs.shape[-2] == 0:
        return inputs, state.astype(jnp.float32)
    return run(*vary_alike((log_decay, inputs, state.astype(jnp.float32))))


def _check(log_decay: Array, inputs: Array, state: Array | None) -> None:
    """Raise where shapes or dtypes do not fit together."""
    check_floating(log_decay=log_decay, inputs=inputs, **({} if state is None else {"state": state}))
    if inputs.ndim < 2:
        raise ValueError(f"`inputs` must have the axes (*batch, seq, dim), got shape {inputs.shape}.")
    check_shape("log_decay", log_decay, inputs.shape, "that of `inputs`")
    if state is not None:
        check_shape("state", state, inputs.shape[:-2] + inputs.shape[-1:], "that of `inputs` without its seq axis")
