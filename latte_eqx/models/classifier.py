"""Classification of sequences, and of pairs of sequences."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Int, PRNGKeyArray

from latte_eqx.layers import INIT_STD, linear, sinusoidal
from latte_eqx.mixers import RSWA, LatteCausal
from latte_eqx.models.config import ModelConfig
from latte_eqx.models.stack import LayerWrapper, Stack


class Encoder(eqx.Module):
    """A sequence of tokens or of numbers to one vector: embed, mix, average over the unmasked positions."""

    embedding: Float[Array, "vocab dim"] | eqx.nn.Linear
    stack: Stack
    dropout: eqx.nn.Dropout
    has_sinusoidal: bool = eqx.field(static=True)
    scale_embedding: bool = eqx.field(static=True)

    def __init__(self, config: ModelConfig, *, num_features: int | None = None, key: PRNGKeyArray):
        embedding_key, stack_key = jax.random.split(key)
        if num_features is None:
            self.embedding = INIT_STD * jax.random.normal(embedding_key, (config.vocab_size, config.dim))
        else:
            self.embedding = linear(num_features, config.dim, use_bias=True, key=embedding_key)
        self.stack = Stack(config, key=stack_key)
        self.dropout = eqx.nn.Dropout(config.dropout)
        self.has_sinusoidal = config.positions == "sinusoidal"
        self.scale_embedding = config.scale_embedding

    def __call__(
        self,
        inputs: Int[Array, " seq"] | Float[Array, "seq features"],
        mask: Bool[Array, " seq"] | None = None,
        *,
        key: PRNGKeyArray | None = None,
        wrap: LayerWrapper | None = None,
        dtype: DTypeLike | None = None,
    ) -> Float[Array, " dim"]:
        """Return the average output; a `key` turns dropout on. `wrap` is that of `Stack`; `dtype` is the type in which
        the layers compute, by default that of the embedding.
        """
        embedding_key, stack_key = (None, None) if key is None else jax.random.split(key)
        x = self._embed(inputs)
        if self.has_sinusoidal:
            x += sinusoidal(jnp.arange(x.shape[0]), x.shape[1]).astype(x.dtype)
        x = self.dropout(x if dtype is None else x.astype(dtype), key=embedding_key, inference=key is None)
        x = self._mix(x, mask, key=stack_key, wrap=wrap).astype(jnp.float32)
        weight = jnp.ones(x.shape[0]) if mask is None else mask.astype(jnp.float32)
        return weight @ x / jnp.maximum(weight.sum(), 1)

    def _mix(self, x, mask, **how):
        if mask is None:
            return self.stack(x, **how)
        if isinstance(self.stack.blocks.mixer, LatteCausal | RSWA):
            name = type(self.stack.blocks.mixer).__name__
            raise ValueError(f"`mask` must be None for a mixer that takes none, got a mask for {name}.")
        return self.stack(x, **how, mask=mask)

    def _embed(self, inputs):
        is_floating = jnp.issubdtype(inputs.dtype, jnp.floating)
        if isinstance(self.embedding, eqx.nn.Linear):
            if not is_floating:
                raise TypeError(f"`inputs` must be floating, since `num_features` is set, got {inputs.dtype}.")
            return jax.vmap(self.embedding)(inputs)
        if is_floating:
            raise TypeError(f"`inputs` must be integer tokens, since `num_features` is not set, got {inputs.dtype}.")
        x = self.embedding[inputs]
        return x * math.sqrt(x.shape[-1]) if self.scale_embedding else x


class SequenceClassifier(eqx.Module):
    """Classes of a sequence: an encoder and a linear map.

    Inputs are integer tokens, or `num_features` numbers per position. Positions where `mask` is false change nothing.
    """

    encoder: Encoder
    to_classes: eqx.nn.Linear

    def __init__(self, config: ModelConfig, num_classes: int, *, num_features: int | None = None, key: PRNGKeyArray):
        _check_classes(num_classes)
        encoder_key, head_key = jax.random.split(key)
        self.encoder = Encoder(config, num_features=num_features, key=encoder_key)
        self.to_classes = linear(config.dim, num_classes, use_bias=True, key=head_key)

    def __call__(
        self,
        inputs: Int[Array, " seq"] | Float[Array, "seq features"],
        mask: Bool[Array, " seq"] | None = None,
        *,
        key: PRNGKeyArray | None = None,
        wrap: LayerWrapper | None = None,
        dtype: DTypeLike | None = None,
    ) -> Float[Array, " classes"]:
        """Return the logits of the classes; `wrap` and `dtype` are those of `Encoder`."""
        x = self.encoder(inputs, mask, key=key, wrap=wrap, dtype=dtype)
        return self.to_classes(x.astype(self.to_classes.weight.dtype))


class PairClassifier(eqx.Module):
    r"""Classes of two sequences: one encoder for both, and an MLP on $[a, b, a - b, a \odot b]$."""

    encoder: Encoder
    to_hidden: eqx.nn.Linear
    to_classes: eqx.nn.Linear

    def __init__(self, config: ModelConfig, num_classes: int, *, num_features: int | None = None, key: PRNGKeyArray):
        _check_classes(num_classes)
        encoder_key, hidden_key, head_key = jax.random.split(key, 3)
        self.encoder = Encoder(config, num_features=num_features, key=encoder_key)
        self.to_hidden = linear(4 * config.dim, config.dim, use_bias=True, key=hidden_key)
        self.to_classes = linear(config.dim, num_classes, use_bias=True, key=head_key)

    def __call__(
        self,
        first: Int[Array, " seq"] | Float[Array, "seq features"],
        second: Int[Array, " other_seq"] | Float[Array, "other_seq features"],
        first_mask: Bool[Array, " seq"] | None = None,
        second_mask: Bool[Array, " other_seq"] | None = None,
        *,
        key: PRNGKeyArray | None = None,
        wrap: LayerWrapper | None = None,
        dtype: DTypeLike | None = None,
    ) -> Float[Array, " classes"]:
        """Return the logits of the classes; `wrap` and `dtype` are those of `Encoder`."""
        first_key, second_key = (None, None) if key is None else jax.random.split(key)
        a = self.encoder(first, first_mask, key=first_key, wrap=wrap, dtype=dtype)
        b = self.encoder(second, second_mask, key=second_key, wrap=wrap, dtype=dtype)
        features = jnp.concatenate([a, b, a - b, a * b]).astype(self.to_hidden.weight.dtype)
        return self.to_classes(jax.nn.gelu(self.to_hidden(features)))


def _check_classes(num_classes):
    if num_classes < 2:
        raise ValueError(f"`num_classes` must be at least 2, got {num_classes=}.")
