"""Next-token prediction."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int, PRNGKeyArray, PyTree

from latte_eqx.layers import INIT_STD, sinusoidal
from latte_eqx.models.config import ModelConfig
from latte_eqx.models.stack import LayerWrapper, Stack
from latte_eqx.ops.segments import positions_in_segments


class LanguageModelState(eqx.Module):
    """The states of all layers and how many tokens there were."""

    layers: PyTree
    position: Int[Array, ""]


class LanguageModel(eqx.Module):
    """Embedding, blocks, norm, and the embedding once more as the output map, unless there is a `head`.

    `model(tokens)` gives the logits of each next token. `init_state` and `extend` give the same logits piece by piece,
    at a cost per token that does not grow.
    """

    embedding: Float[Array, "vocab dim"]
    head: Float[Array, "vocab dim"] | None
    stack: Stack
    dropout: eqx.nn.Dropout
    has_sinusoidal: bool = eqx.field(static=True)
    scale_embedding: bool = eqx.field(static=True)
    logit_cap: float | None = eqx.field(static=True)

    def __init__(self, config: ModelConfig, *, key: PRNGKeyArray):
        if not config.causal:
            raise ValueError("A language model must have `causal` true, got causal=False.")
        embedding_key, stack_key = jax.random.split(key)
        table = lambda key: INIT_STD * jax.random.normal(key, (config.vocab_size, config.dim))
        self.embedding = table(embedding_key)
        self.head = None if config.tie_embedding else table(jax.random.fold_in(embedding_key, 1))
        self.stack = Stack(config, key=stack_key)
        self.dropout = eqx.nn.Dropout(config.dropout)
        self.has_sinusoidal = config.positions == "sinusoidal"
        self.scale_embedding, self.logit_cap = config.scale_embedding, config.logit_cap

    def __call__(
        self,
        tokens: Int[Array, " seq"],
        segment_ids: Int[Array, " seq"] | None = None,
        *,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "seq vocab"]:
        """Return the logits of each next token; a `key` turns dropout on."""
        return self.logits(self.features(tokens, segment_ids, key=key))

    def features(
        self,
        tokens: Int[Array, " seq"],
        segment_ids: Int[Array, " seq"] | None = None,
        *,
        key: PRNGKeyArray | None = None,
        wrap: LayerWrapper | None = None,
        dtype: DTypeLike | None = None,
    ) -> Float[Array, "seq dim"]:
        """Return what `logits` makes logits of. `wrap` is that of `Stack`; `dtype` is the type
        in which the layers compute, by default that of the embedding.
        """
        embedding_key, stack_key = (None, None) if key is None else jax.random.split(key)
        positions = positions_in_segments(segment_ids, tokens.shape[0])
        x = self._embed(tokens, positions).astype(self.embedding.dtype if dtype is None else dtype)
        x = self.dropout(x, key=embedding_key, inference=key is None)
        return self.stack(x, segment_ids, key=stack_key, wrap=wrap)

    def layer_inputs(
        self, tokens: Int[Array, " seq"], segment_ids: Int[Array, " seq"] | None = None
    ) -> Float[Array, "layers seq dim"]:
        """Return what each layer is given, to look into it."""
        positions = positions_in_segments(segment_ids, tokens.shape[0])
        return self.stack.layer_inputs(self._embed(tokens, positions), segment_ids)

    def init_state(self) -> LanguageModelState:
        """Return the state before the first token."""
        return LanguageModelState(self.stack.init_state(), jnp.zeros((), jnp.int32))

    def extend(
        self, tokens: Int[Array, " seq"], state: LanguageModelState
    ) -> tuple[Float[Array, "seq vocab"], LanguageModelState]:
        """Return the logits after further tokens."""
        x = self._embed(tokens, state.position + jnp.arange(tokens.shape[0]))
        x, layers = self.stack.extend(x, state.layers)
        return self.logits(x), LanguageModelState(layers, state.position + tokens.shape[0])

    def logits(self, features: Float[Array, "seq dim"]) -> Float[Array, "seq vocab"]:
        """Return the logits of each next token."""
        table = self.embedding if self.head is None else self.head
        return next_token_logits(features, table, self.logit_cap)

    def _embed(self, tokens, positions):
        x = self.embedding[tokens]
        if self.scale_embedding:
            x *= math.sqrt(x.shape[-1])
        return x + sinusoidal(positions, x.shape[-1]).astype(x.dtype) if self.has_sinusoidal else x


def next_token_logits(
    features: Float[Array, "seq dim"], table: Float[Array, "vocab dim"], cap: float | None = None
) -> Float[Array, "seq vocab"]:
    """Compare the features with each token's row of a table; float32 whatever the inputs are, and below a cap."""
    logits = jnp.einsum("sd,vd->sv", features, table, preferred_element_type=jnp.float32)
    return logits if cap is None else cap * jnp.tanh(logits / cap)
