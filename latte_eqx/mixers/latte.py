"""Latte: each token picks latents; each latent averages values."""

import equinox as eqx
import jax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from latte_eqx.layers import linear
from latte_eqx.mixers.latents import Feed, LatentProjection, Latents, document_ids, join_heads, split_heads
from latte_eqx.ops import (
    LatteState,
    latte_bidirectional,
    latte_causal,
    linear_attention,
    linear_attention_bidirectional,
)


class LatteMixerState(eqx.Module):
    """What the heads have averaged and what the feed remembers."""

    latte: LatteState
    feed: PyTree


class LatteCausal(eqx.Module):
    r"""Each token picks latents; each latent averages the values seen so far.

    $$y_t = \sum_l \mathrm{softmax}(q_t)_l \frac{\sum_{s \le t} e^{k_{sl}} v_s}{\sum_{s \le t} e^{k_{sl}}}$$

    per head, with `num_latents / num_heads` latents each. `directed=False` gives undirected linear attention with
    exponential features instead: a token then also prefers latents that hold much mass.
    """

    latents: Latents
    to_value: eqx.nn.Linear
    to_out: eqx.nn.Linear
    num_heads: int = eqx.field(static=True)
    directed: bool = eqx.field(static=True)

    def __init__(
        self,
        dim: int,
        num_latents: int,
        num_heads: int,
        *,
        feed: Feed | None = None,
        latent_proj: LatentProjection = "dense",
        norm_feed: bool = False,
        directed: bool = True,
        key: PRNGKeyArray,
    ):
        latents_key, value_key, out_key = jax.random.split(key, 3)
        self.latents = Latents(
            dim, num_latents, num_heads, feed=feed, latent_proj=latent_proj, norm_feed=norm_feed, key=latents_key
        )
        self.to_value = linear(dim, dim, key=value_key)
        self.to_out = linear(dim, dim, key=out_key)
        self.num_heads = num_heads
        self.directed = directed

    def __call__(
        self, x: Float[Array, "seq dim"], segment_ids: Int[Array, " seq"] | None = None
    ) -> Float[Array, "seq dim"]:
        """Mix a whole sequence."""
        queries, keys, _ = self.latents(x, segment_ids)
        return self._average(x, queries, keys, segment_ids, None)[0]

    def init_state(self) -> LatteMixerState:
        """Return the state before the first token."""
        head_dim = self.to_value.weight.shape[0] // self.num_heads
        latte = LatteState.empty(self.num_heads, latents=self.latents.latents_per_head, dim=head_dim)
        return LatteMixerState(latte, self.latents.init_state())

    def extend(
        self, x: Float[Array, "seq dim"], state: LatteMixerState
    ) -> tuple[Float[Array, "seq dim"], LatteMixerState]:
        """Mix further tokens."""
        queries, keys, feed = self.latents(x, state=state.feed)
        y, latte = self._average(x, queries, keys, None, state.latte)
        return y, LatteMixerState(latte, feed)

    def shares(
        self, x: Float[Array, "seq dim"], segment_ids: Int[Array, " seq"] | None = None
    ) -> Float[Array, "heads seq latents"]:
        """Return $p(l|t)$."""
        if not self.directed:
            raise ValueError("Shares must not depend on the masses of the latents, got directed=False.")
        return jax.nn.softmax(self.latents(x, segment_ids)[0])

    def _average(self, x, queries, keys, segment_ids, state):
        values = split_heads(jax.vmap(self.to_value)(x), self.num_heads)
        if self.directed:
            weights = jax.nn.softmax(queries)
            y, state = latte_causal(weights, keys, values, segment_ids=segment_ids, state=state)
        else:
            y, state = linear_attention(queries, keys, values, segment_ids=segment_ids, state=state)
        return jax.vmap(self.to_out)(join_heads(y)), state


class LatteBidir(eqx.Module):
    r"""Each token picks latents; each latent averages the values of the whole document.

    $$y_t = \sum_l \mathrm{softmax}(q_t)_l \frac{\sum_s e^{k_{sl}} v_s}{\sum_s e^{k_{sl}}}$$

    Without a feed and without positions it does not notice the order of the tokens. `directed=False` gives undirected
    linear attention instead, as in `LatteCausal`; it does not take documents apart.
    """

    latents: Latents
    to_value: eqx.nn.Linear
    to_out: eqx.nn.Linear
    num_heads: int = eqx.field(static=True)
    directed: bool = eqx.field(static=True)

    def __init__(
        self,
        dim: int,
        num_latents: int,
        num_heads: int,
        *,
        feed: Feed | None = None,
        latent_proj: LatentProjection = "dense",
        norm_feed: bool = False,
        directed: bool = True,
        key: PRNGKeyArray,
    ):
        latents_key, value_key, out_key = jax.random.split(key, 3)
        self.latents = Latents(
            dim,
            num_latents,
            num_heads,
            feed=feed,
            latent_proj=latent_proj,
            norm_feed=norm_feed,
            causal=False,
            key=latents_key,
        )
        self.to_value = linear(dim, dim, key=value_key)
        self.to_out = linear(dim, dim, key=out_key)
        self.num_heads = num_heads
        self.directed = directed

    def __call__(
        self,
        x: Float[Array, "seq dim"],
        segment_ids: Int[Array, " seq"] | None = None,
        *,
        mask: Bool[Array, " seq"] | None = None,
    ) -> Float[Array, "seq dim"]:
        """Mix a whole sequence; tokens where `mask` is false are not seen."""
        queries, keys, _ = self.latents(x, document_ids(segment_ids, mask))
        values = split_heads(jax.vmap(self.to_value)(x), self.num_heads)
        if self.directed:
            weights = jax.nn.softmax(queries)
            y = latte_bidirectional(weights, keys, values, mask=mask, segment_ids=segment_ids)
        elif segment_ids is None:
            y = linear_attention_bidirectional(queries, keys, values, mask=mask)
        else:
            raise ValueError("`segment_ids` must be None for bidirectional linear attention, got some.")
        return jax.vmap(self.to_out)(join_heads(y))
