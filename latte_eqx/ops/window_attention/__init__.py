"""Softmax attention inside a window."""

from collections.abc import Callable
from functools import partial
from math import sqrt
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from latte_eqx.ops.batching import leading_vmap, vary_alike
from latte_eqx.ops.dispatch import DEFAULTS, Implementation, select
from latte_eqx.ops.segments import count_segments
from latte_eqx.ops.validation import check_broadcasts, check_mask
from latte_eqx.ops.window_attention.chunked import chunked
from latte_eqx.ops.window_attention.pallas_gpu import pallas_gpu
from latte_eqx.ops.window_attention.pallas_gpu import plan_or_reason as gpu_plan_or_reason
from latte_eqx.ops.window_attention.pallas_tpu import pallas_tpu
from latte_eqx.ops.window_attention.pallas_tpu import plan_or_reason as tpu_plan_or_reason
from latte_eqx.ops.window_attention.reference import reference

KERNELS = {"tpu": pallas_tpu, "cuda": pallas_gpu}
# Fewer queries make less than one block of a kernel, and one step of `chunked` on any platform: decoding, above all.
SHORTEST_FOR_CHOICE = 128


def window_attention(
    queries: Float[Array, "*batch heads seq head_dim"],
    keys: Float[Array, "*batch kv_heads source head_dim"],
    values: Float[Array, "*batch kv_heads source value_dim"],
    *,
    window: int,
    causal: bool = True,
    segment_ids: Int[Array, "*#batch seq"] | None = None,
    key_mask: Bool[Array, "*#batch source"] | None = None,
    past: int = 0,
    scale: float | None = None,
    soft_cap: float | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "*batch heads seq value_dim"]:
    r"""Attend to the `window` keys before each query and to its own: `window + 1` keys.

    $$y_t = \frac{\sum_{s=t-w}^t e^{z_{ts}} v_s}{\sum_{s=t-w}^t e^{z_{ts}}}, \qquad z_{ts} = \alpha \, q_t \cdot k_s$$

    With `causal=False` the window reaches as far ahead: $|t - s| \le w$. The scale $\alpha$ is by default
    $1 / \sqrt{\mathrm{head\_dim}}$; a `soft_cap` c then bounds the logits, $z \to c \tanh(z / c)$.

    Query head h uses key head `h // (heads // kv_heads)`. For a sequence that comes in pieces, keys and values begin
    with the `past` positions before the first query: `source = past + seq`. A query sees only keys of its own document
    (a new one begins where `segment_ids`, which must not decrease, change) whose `key_mask` is true; a query without
    any gives 0. Logits, softmax and sums are float32; the output has the dtype of `values`.

    `implementation=None` takes `"pallas"` on a TPU or GPU where it can, and `"chunked"` otherwise; like `"pallas"`,
    which takes only what the kernels of both can do, it can be differentiated once, in reverse. `"chunked"` has no such
    limit.
    """
    attention = automatic if implementation is None else select("window_attention", IMPLEMENTATIONS, implementation)
    check_numbers(window, causal, past, soft_cap)
    check_arrays(queries, keys, values, segment_ids, key_mask, past)
    *batch, heads, seq, head_dim = queries.shape
    kv_heads, source, value_dim = values.shape[-3:]
    if seq == 0:
        return jnp.zeros_like(values, shape=(*batch, heads, 0, value_dim))

    # One number per position says all: a query sees the keys that bear its own. Hidden keys bear -1.
    if segment_ids is None:
        query_labels, key_labels = jnp.zeros(seq, jnp.int32), jnp.zeros(source, jnp.int32)
    else:
        query_labels = key_labels = count_segments(segment_ids, (*batch, seq))
    query_labels, key_labels = with_rank(query_labels, len(batch) + 1), with_rank(key_labels, len(batch) + 1)
    if key_mask is not None:
        key_labels = jnp.where(with_rank(key_mask, len(batch) + 1), key_labels, -1)

    arrays = (
        queries.reshape(*batch, kv_heads, heads // kv_heads, seq, head_dim),
        keys,
        values,
        query_labels[..., None, None, :, None],
        key_labels[..., None, :, None],
    )
    output = attention(
        *vary_alike(arrays),
        window=window,
        causal=causal,
        scale=1 / sqrt(head_dim) if scale is None else scale,
        soft_cap=soft_cap,
    )
    return output.reshape(*batch, heads, seq, value_dim)


def automatic(
    queries: Float[Array, "*batch kv_heads group seq head_dim"],
    keys: Float[Array, "*batch kv_heads source head_dim"],
    values: Float[Array, "*batch kv_heads source value_dim"],
    *labels: Int[Array, "..."],
    window: int,
    causal: bool,
    **settings: Any,
) -> Float[Array, "*batch kv_heads group seq value_dim"]:
    """Take the implementation for the platform that the program is compiled for."""
    settings |= {"window": window, "causal": causal}
    default = partial(chunked, **settings)
    if queries.shape[-2] < SHORTEST_FOR_CHOICE:
        return default(queries, keys, values, *labels)
    plans = {
        "tpu": tpu_plan_or_reason(queries, keys, values, window=window, causal=causal),
        "cuda": gpu_plan_or_reason(queries, keys, values),
    }
    kernels = {
        platform: partial(KERNELS[platform], **settings)
        for platform, plan in plans.items()
        if DEFAULTS["window_attention"][platform].implementation == "pallas" and not isinstance(plan, str)
    }
    return choose_when_compiled(**kernels, default=default)(queries, keys, values, *labels)


def pallas(*arrays: Shaped[Array, "..."], **settings: Any) -> Float[Array, "..."]:
    """Take the kernels of the platform; on one that has none, Pallas says so when the program is compiled."""
    kernels = {platform: partial(kernel, **settings) for platform, kernel in KERNELS.items()}
    return choose_when_compiled(**kernels, default=kernels["tpu"])(*arrays)


IMPLEMENTATIONS = {"reference": reference, "chunked": chunked, "pallas": pallas}


def choose_when_compiled(**platforms: Callable[..., Any]) -> Callable[..., Any]:
    """Return attention that takes the implementation of the platform that a program is compiled for.

    Differentiated through, the choice would keep what any of them needs. So each pass chooses, and between them only
    the inputs are kept: all implementations compute the rest again.
    """
    pullbacks = {platform: pullback(attention) for platform, attention in platforms.items()}

    @jax.custom_vjp
    def attention(*arrays):
        return leading_vmap(lambda *arrays: lax.platform_dependent(*arrays, **platforms))(*arrays)

    def save(*arrays):
        return attention(*arrays), arrays

    def restore(arrays, cotangent):
        gradients = leading_vmap(lambda *arrays: lax.platform_dependent(*arrays, **pullbacks))(cotangent, *arrays)
        return *gradients, None, None

    attention.defvjp(save, restore)
    return attention


def pullback(attention: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the cotangent and the inputs that gives the gradients of queries, keys and values."""

    def run(cotangent, queries, keys, values, *labels):
        return jax.vjp(lambda *arrays: attention(*arrays, *labels), queries, keys, values)[1](cotangent)

    return run


def with_rank(x: Shaped[Array, "..."], rank: int) -> Shaped[Array, "..."]:
    """Add leading axes of length 1."""
    return jnp.expand_dims(x, range(rank - x.ndim))


def check_numbers(window: int, causal: bool, past: int, soft_cap: float | None) -> None:
    """Raise for settings that contradict themselves."""
    for name, number in {"window": window, "past": past}.items():
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"`{name}` must be an int, got {name}={number!r}.")
        if number < 0:
            raise ValueError(f"`{name}` must not be negative, got {name}={number}.")
    if past and not causal:
        raise ValueError(f"`past` must be 0 with causal=False, got {past=}.")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"`soft_cap` must be positive, got {soft_cap=}.")


def check_arrays(
    queries: Shaped[Array, "..."],
    keys: Shaped[Array, "..."],
    values: Shaped[Array, "..."],
    segment_ids: Shaped[Array, "..."] | None,
    key_mask: Shaped[Array, "..."] | None,
    past: int,
) -> None:
    """Raise for arrays that do not fit together."""
    dtypes = f"queries {queries.dtype}, keys {keys.dtype}, values {values.dtype}"
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (queries, keys, values)) or queries.dtype != keys.dtype:
        raise TypeError(f"`queries`, `keys` and `values` must be floating, the first two alike, got {dtypes}.")
    shapes = f"queries {queries.shape}, keys {keys.shape}, values {values.shape}"
    if not (queries.ndim == keys.ndim == values.ndim >= 3 and keys.shape[:-1] == values.shape[:-1]):
        raise ValueError(f"`keys` and `values` must have the axes (*batch, kv_heads, source, dim), got {shapes}.")
    if queries.shape[:-3] != keys.shape[:-3] or queries.shape[-1] != keys.shape[-1]:
        raise ValueError(f"`queries` and `keys` must have the same batch axes and head_dim, got {shapes}.")
    *batch, heads, seq, _ = queries.shape
    kv_heads, source, _ = keys.shape[-3:]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"the heads of `keys` must divide those of `queries`, got {kv_heads=}, {heads=}.")
    if source != past + seq:
        raise ValueError(f"`keys` must have past + seq positions, got {source=}, {past=}, {seq=}.")
    if segment_ids is not None and past:
        raise ValueError(f"`segment_ids` must be None with past > 0, pieces being of one document, got {past=}.")
    if segment_ids is not None:
        check_broadcasts("segment_ids", segment_ids, (*batch, seq))
    if key_mask is not None:
        check_mask("key_mask", key_mask, (*batch, source))
