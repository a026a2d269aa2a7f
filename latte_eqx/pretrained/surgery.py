"""Attention of a pretrained model becomes the window of a Macchiato, to which new latents are added."""

import math
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray, PyTree

from latte_eqx.mixers import FullAttention
from latte_eqx.mixers.latents import Feed, LatentProjection
from latte_eqx.models import LanguageModel
from latte_eqx.models.config import make_mixer
from latte_eqx.models.stack import Stack

# What projects and norms queries and keys.
HEADS = ("to_query", "to_key", "query_norm", "key_norm")


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
    stack, config = model.stack, model.stack.config
    full = stack.blocks.mixer
    if not isinstance(full, FullAttention):
        raise TypeError(f"The layers must attend fully, got the mixer {config.mixer!r}.")
    if not 0 < p0 <= 1:
        raise ValueError(f"`p0` must lie in (0, 1], got {p0=}.")
    if num_latents % config.num_heads:
        raise ValueError(
            f"`num_latents` must be a multiple of the heads, got {num_latents=}, heads={config.num_heads}."
        )
    # As large as it takes for the rest to vanish in float32.
    bias = math.log(num_latents // config.num_heads * p0 / (1 - p0)) if p0 < 1 else 1e4
    config = replace(
        config,
        mixer="macchiato",
        window=window,
        num_latents=num_latents,
        feed=feed,
        latent_proj=latent_proj,
        window_bias=bias,
        local_window=None,
    )

    def make(key):
        mixer = make_mixer(config, key=key)
        # What a token asks of the latents starts from nothing, so that all begin alike.
        return eqx.tree_at(lambda m: m.latents.to_query.weight, mixer, replace_fn=jnp.zeros_like)

    # Compiled, so that what is inherited anyway is not made first.
    new = lambda mixer: (mixer.latents, mixer.window_bias)
    keys = jax.random.split(jax.random.key(0) if key is None else key, config.num_layers)
    made = eqx.filter_jit(eqx.filter_vmap(lambda key: new(make(key))))(keys)
    old = full.attention
    heads = [name for name in HEADS if getattr(old.attention, name) is not None]
    inherited = [getattr(old.attention, name) for name in heads]
    mixers = eqx.tree_at(
        lambda mixer: [*new(mixer), *(getattr(mixer.window, name) for name in heads), mixer.to_value, mixer.to_out],
        eqx.filter_eval_shape(eqx.filter_vmap(make), keys),
        [*made, *inherited, old.to_value, old.to_out],
    )
    template = eqx.filter_eval_shape(Stack, config, key=keys[0])
    blocks = eqx.tree_at(lambda blocks: blocks.mixer, stack.blocks, mixers)
    new_stack = eqx.tree_at(lambda stack: (stack.blocks, stack.norm), template, (blocks, stack.norm))
    return eqx.tree_at(lambda model: model.stack, model, new_stack)


def is_new(model: LanguageModel) -> PyTree[bool]:
    """Say of each array of a model that `to_macchiato` made whether it is new, to be trained, or inherited.

    As `eqx.partition(model, is_new(model))` takes it. The arrays may be abstract.
    """
    nothing = jax.tree.map(lambda _: False, model)
    new = lambda tree: (tree.stack.blocks.mixer.latents, tree.stack.blocks.mixer.window_bias)
    is_float = lambda x: hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)
    return eqx.tree_at(new, nothing, jax.tree.map(is_float, new(model)))
