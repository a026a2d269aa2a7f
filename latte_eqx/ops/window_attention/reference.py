"""Window attention by its definition: every query against every key, under a mask."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from latte_eqx.ops.precision import product_precision

# Finite, so that a row without any key has no inf - inf.
LOWEST = -1e30


def reference(
    queries: Float[Array, "*batch group seq head_dim"],
    keys: Float[Array, "*batch source head_dim"],
    values: Float[Array, "*batch source value_dim"],
    query_labels: Int[Array, "*#batch 1 seq 1"],
    key_labels: Int[Array, "*#batch source 1"],
    *,
    window: int,
    causal: bool,
    scale: float,
    soft_cap: float | None,
) -> Float[Array, "*batch group seq value_dim"]:
    """Build the whole seq x source mask: for tests and for reading."""
    past = keys.shape[-2] - queries.shape[-2]
    mask = visible(query_labels, key_labels, past, before=window, after=0 if causal else window)
    return attend(queries, keys, values, mask, scale=scale, soft_cap=soft_cap)


def visible(
    query_labels: Int[Array, "*#batch 1 seq 1"],
    key_labels: Int[Array, "*#batch source 1"],
    offset: int | Int[Array, ""],
    *,
    before: int,
    after: int,
) -> Bool[Array, "*#batch 1 seq source"]:
    """Tell which keys a query sees, the first query being `offset` places after the first key."""
    query_place = offset + jnp.arange(query_labels.shape[-2])[:, None]
    distance = query_place - jnp.arange(key_labels.shape[-2])[None, :]
    in_window = (-after <= distance) & (distance <= before)
    same_label = query_labels == jnp.expand_dims(jnp.swapaxes(key_labels, -1, -2), -3)
    return same_label & jnp.expand_dims(in_window, range(same_label.ndim - 2))


def attend(
    queries: Float[Array, "*batch group seq head_dim"],
    keys: Float[Array, "*batch source head_dim"],
    values: Float[Array, "*batch source value_dim"],
    mask: Bool[Array, "*#batch 1 seq source"],
    *,
    scale: float,
    soft_cap: float | None,
) -> Float[Array, "*batch group seq value_dim"]:
    """Softmax attention of the query heads of a group to the keys they share; 0 where the mask leaves no key."""
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    logits = scale * product("...gtd,...sd->...gts", queries, keys, precision=product_precision(queries.dtype))
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    peak = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True, where=mask, initial=LOWEST))
    # Masked before and after `exp`: before, for a finite gradient; after, because in an empty row the peak is LOWEST.
    weights = jnp.where(mask, jnp.exp(jnp.where(mask, logits - peak, LOWEST)), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights.astype(values.dtype)
    output = product("...gts,...sd->...gtd", weights, values, precision=product_precision(values.dtype))
    return (output / jnp.where(total == 0, 1, total)).astype(values.dtype)
