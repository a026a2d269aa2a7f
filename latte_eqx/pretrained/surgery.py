"""Attention of a pretrained model becomes the window of a Macchiato, to which new latents are added."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray, PyTree

from latte_eqx.mixers import FullAttention, Macchiato
from latte_eqx.mixers.latents import Feed, LatentProjection
from latte_eqx.models import LanguageModel


def to_macchiato(
    model: LanguageModel,
    *,
    window: int = 128,
    num_latents: int = 128,
    feed: Feed | None = "rglru",
    latent_proj: LatentProjection = "dense",
    p0: float | int = 0.95,
    key: PRNGKeyArray | None = None,
) -> LanguageModel:
    r"""Replace the attention of every layer by a Macchiato mixer that inherits its queries, keys, values and output.

    The window sees `window` past keys. At first every token gives it the share `p0`, whatever the token is, and the
    rest evenly to the latents: the new model begins close to the old one with a window. With `p0=1` it would be that
    model, but no gradient would reach the latents.

    `is_new` tells the weights that are new from those that are inherited.
    """
    attention = model.stack.blocks.mixer
    if not isinstance(attention, FullAttention):
        raise TypeError(f"The layers must attend fully, got {type(attention).__name__}.")
    if not 0 < p0 <= 1:
        raise ValueError(f"`p0` must lie in (0, 1], got {p0=}.")
    old = attention.attention.attention
    num_layers, dim, _ = attention.attention.to_out.weight.shape
    if num_latents % old.num_heads:
        raise ValueError(f"`num_latents` must be a multiple of the heads, got {num_latents=}, heads={old.num_heads}.")
    latents_per_head = num_latents // old.num_heads
    # As large as it takes for the rest to vanish in float32.
    bias = math.log(latents_per_head * p0 / (1 - p0)) if p0 < 1 else 1e4

    def make(key):
        mixer = Macchiato(
            dim,
            num_latents,
            old.num_heads,
            window,
            feed=feed,
            latent_proj=latent_proj,
            window_bias=bias,
            num_kv_heads=old.num_kv_heads,
            rotary_base=old.rotary_base,
            yarn=old.yarn,
            key=key,
        )
        # What a token asks of the latents starts from nothing, so that all begin alike.
        return eqx.tree_at(lambda m: m.latents.to_query.weight, mixer, replace_fn=jnp.zeros_like)

    mixers = eqx.filter_vmap(make)(jax.random.split(jax.random.key(0) if key is None else key, num_layers))
    mixers = eqx.tree_at(
        lambda m: (m.window.to_query, m.window.to_key, m.to_value, m.to_out),
        mixers,
        (old.to_query, old.to_key, attention.attention.to_value, attention.attention.to_out),
    )
    return eqx.tree_at(lambda m: m.stack.blocks.mixer, model, mixers)


def is_new(model: LanguageModel) -> PyTree[bool]:
    """Say of each array of a model that `to_macchiato` made whether it is new, to be trained, or inherited.

    As `eqx.partition(model, is_new(model))` takes it. The arrays may be abstract.
    """
    nothing = jax.tree.map(lambda _: False, model)
    new = lambda tree: (tree.stack.blocks.mixer.latents, tree.stack.blocks.mixer.window_bias)
    is_float = lambda x: hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)
    return eqx.tree_at(new, nothing, jax.tree.map(is_float, new(model)))
