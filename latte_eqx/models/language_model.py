"""Next-token prediction."""

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
    """Embedding, blocks, norm, and the embedding once more as the output map.

    `model(tokens)` gives the logits of each next token. `init_state` and `extend` give the same logits piece by piece,
    at a cost per token that does not grow.
    """

    embedding: Float[Array, "vocab dim"]
    stack: Stack
    dropout: eqx.nn.Dropout
    has_sinusoidal: bool = eqx.field(static=True)

    def __init__(self, config: ModelConfig, *, key: PRNGKeyArray):
        if not config.causal:
            raise ValueError("A language model must have `causal` true, got causal=False.")
        embedding_key, stack_key = jax.random.split(key)
        self.embedding = INIT_STD * jax.random.normal(embedding_key, (config.vocab_size, config.dim))
        self.stack = Stack(config, key=stack_key)
        self.dropout = eqx.nn.Dropout(config.dropout)
        self.has_sinusoidal = config.positions == "sinusoidal"

    def __call__(
        self,
        tokens: Int[Array, " seq"],
        segment_ids: Int[Array, " seq"] | None = None,
        *,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "seq vocab"]:
        """Return the logits of each next token; a `key` turns dropout on."""
        return next_token_logits(self.features(tokens, segment_ids, key=key), self.embedding)

    def features(
        self,
        tokens: Int[Array, " seq"],
        segment_ids: Int[Array, " seq"] | None = None,
        *,
        key: PRNGKeyArray | None = None,
        wrap: LayerWrapper | None = None,
        dtype: DTypeLike | None = None,
    ) -> Float[Array, "seq dim"]:
        """Return what the logits are a linear map of. `wrap` is that of `Stack`; `dtype` is the type
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
        return next_token_logits(x, self.embedding), LanguageModelState(layers, state.position + tokens.shape[0])

    def _embed(self, tokens, positions):
        x = self.embedding[tokens]
        return x + sinusoidal(positions, x.shape[-1]).astype(x.dtype) if self.has_sinusoidal else x


def next_token_logits(
    features: Float[Array, "seq dim"], embedding: Float[Array, "vocab dim"]
) -> Float[Array, "seq vocab"]:
    """Compare the features with the embedding of each token; float32 whatever the inputs are."""
    return jnp.einsum("sd,vd->sv", features, embedding, preferred_element_type=jnp.float32)
