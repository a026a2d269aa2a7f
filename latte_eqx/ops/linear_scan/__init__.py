"""The elementwise linear recurrence h_t = a_t h_{t-1} + x_t."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from latte_eqx.ops.dispatch import Implementation, select
from latte_eqx.ops.linear_scan.chunked import linear_scan_chunked
from latte_eqx.ops.linear_scan.reference import linear_scan_reference
from latte_eqx.ops.linear_scan.scan import linear_scan_scan

IMPLEMENTATIONS = {
    "reference": linear_scan_reference,
    "scan": linear_scan_scan,
    "chunked": linear_scan_chunked,
}


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
    """
    _check(log_decay, inputs, state)
    run = select("linear_scan", IMPLEMENTATIONS, implementation)
    if state is None:
        state = jnp.zeros_like(inputs, shape=inputs.shape[:-2] + inputs.shape[-1:], dtype=jnp.float32)
    log_decay, inputs, state = _vary_alike(log_decay, inputs, state.astype(jnp.float32))
    if inputs.shape[-2] == 0:
        return inputs, state
    return run(log_decay, inputs, state)


def _check(log_decay: Array, inputs: Array, state: Array | None) -> None:
    """Raise where shapes or dtypes do not fit together."""
    named = {"log_decay": log_decay, "inputs": inputs} | ({} if state is None else {"state": state})
    for name, array in named.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"`{name}` must have a floating dtype, got {array.dtype}.")
    if inputs.ndim < 2:
        raise ValueError(f"`inputs` must have the axes (*batch, seq, dim), got shape {inputs.shape}.")
    if log_decay.shape != inputs.shape:
        raise ValueError(f"`log_decay` must have the shape of `inputs`, {inputs.shape}, got {log_decay.shape}.")
    expected = inputs.shape[:-2] + inputs.shape[-1:]
    if state is not None and state.shape != expected:
        raise ValueError(
            f"`state` must have the shape of `inputs` without its seq axis, {expected}, got {state.shape}."
        )


def _vary_alike(*arrays: Array) -> tuple[Array, ...]:
    """Give all arrays one type inside `shard_map`: a replicated state could not be carried beside sharded inputs."""
    varying = [jax.typeof(array).manual_axis_type.varying for array in arrays]
    axes = frozenset().union(*varying)
    return tuple(lax.pcast(x, tuple(axes - own), to="varying") for x, own in zip(arrays, varying, strict=True))
