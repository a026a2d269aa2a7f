"""Where the latent logits come from."""

from typing import Any, Literal, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from latte_eqx.layers import BlockLinear, CausalConv, linear
from latte_eqx.rglru import RGLRU

Feed = Literal["conv", "rglru"]
LatentProjection = Literal["dense", "per_head"]


class BothWays(eqx.Module):
    """The average of two recurrences, one from each end of the sequence."""

    forward: RGLRU
    backward: RGLRU

    def __init__(self, dim: int, num_blocks: int, *, key: PRNGKeyArray):
        forward_key, backward_key = jax.random.split(key)
        self.forward = RGLRU(dim, num_blocks, key=forward_key)
        self.backward = RGLRU(dim, num_blocks, key=backward_key)

    def __call__(
        self, x: Float[Array, "seq dim"], segment_ids: Int[Array, " seq"] | None = None
    ) -> Float[Array, "seq dim"]:
        """Run over a whole sequence."""
        # Read backwards, the documents count down: their negatives count up again.
        backward_ids = None if segment_ids is None else -segment_ids[::-1]
        return 0.5 * (self.forward(x, segment_ids) + self.backward(x[::-1], backward_ids)[::-1])


class Latents(eqx.Module):
    """Latent queries and keys of each token, read from the token or from what a feed makes of the tokens so far.

    The feed is a convolution (`"conv"`), a recurrence (`"rglru"`), or nothing. `"dense"` projections mix all channels;
    `"per_head"` ones see only the channels of their head. `extra_states` is how many more queries than keys a head has.
    """

    feed: CausalConv | RGLRU | BothWays | None
    norm: eqx.nn.RMSNorm | None
    to_query: eqx.nn.Linear | BlockLinear
    to_key: eqx.nn.Linear | BlockLinear
    num_heads: int = eqx.field(static=True)
    latents_per_head: int = eqx.field(static=True)

    def __init__(
        self,
        dim: int,
        num_latents: int,
        num_heads: int,
        *,
        feed: Feed | None = None,
        latent_proj: LatentProjection = "dense",
        norm_feed: bool = False,
        extra_states: int = 0,
        causal: bool = True,
        key: PRNGKeyArray,
    ):
        if feed not in (None, *get_args(Feed)):
            raise ValueError(f"`feed` must be None or one of {get_args(Feed)}, got {feed!r}.")
        if latent_proj not in get_args(LatentProjection):
            raise ValueError(f"`latent_proj` must be one of {get_args(LatentProjection)}, got {latent_proj!r}.")
        if num_heads < 1 or dim % num_heads or num_latents % num_heads or num_latents < 1:
            raise ValueError(
                f"`num_heads` must divide `dim` and `num_latents`, got {num_heads=}, {dim=}, {num_latents=}."
            )
        if norm_feed and feed is None:
            raise ValueError("`norm_feed` must be false without a feed, got norm_feed=True, feed=None.")
        if feed == "conv" and not causal:
            raise ValueError("`feed` must be None or 'rglru' where both sides are seen, got feed='conv'.")
        feed_key, query_key, key_key = jax.random.split(key, 3)
        self.num_heads = num_heads
        self.latents_per_head = num_latents // num_heads
        self.norm = eqx.nn.RMSNorm(dim, eps=1e-6, use_bias=False) if norm_feed else None
        if feed == "rglru":
            self.feed = (RGLRU if causal else BothWays)(dim, num_heads, key=feed_key)
        else:
            self.feed = CausalConv(dim, key=feed_key) if feed == "conv" else None
        num_queries = num_latents + extra_states * num_heads
        if latent_proj == "dense":
            self.to_query = linear(dim, num_queries, key=query_key)
            self.to_key = linear(dim, num_latents, key=key_key)
        else:
            self.to_query = BlockLinear(num_heads, dim, num_queries, key=query_key)
            self.to_key = BlockLinear(num_heads, dim, num_latents, key=key_key)

    def __call__(
        self,
        x: Float[Array, "seq dim"],
        segment_ids: Int[Array, " seq"] | None = None,
        state: Any = None,
    ) -> tuple[Float[Array, "heads seq queries"], Float[Array, "heads seq latents"], PyTree]:
        """Return queries, keys, and the feed's state if one came in."""
        if self.feed is not None and state is None:
            x = self.feed(x, segment_ids)
        elif self.feed is not None:
            x, state = self._causal_feed().extend(x, state)
        if self.norm is not None:
            x = jax.vmap(self.norm)(x)
        return self._heads(self.to_query, x), self._heads(self.to_key, x), state

    def init_state(self) -> PyTree:
        """Return the feed's state before the first token; `()` without a feed."""
        return () if self.feed is None else self._causal_feed().init_state()

    def _causal_feed(self):
        if not isinstance(self.feed, CausalConv | RGLRU):
            raise TypeError(f"Only a causal feed can be extended, got {type(self.feed).__name__}.")
        return self.feed

    def _heads(self, project, x):
        y = project(x) if isinstance(project, BlockLinear) else jax.vmap(project)(x)
        return split_heads(y, self.num_heads).astype(jnp.float32)


def split_heads(x: Float[Array, "seq width"], num_heads: int) -> Float[Array, "heads seq dim"]:
    """Cut the channels into heads."""
    return x.reshape(x.shape[0], num_heads, x.shape[1] // num_heads).swapaxes(0, 1)


def join_heads(x: Float[Array, "heads seq dim"]) -> Float[Array, "seq width"]:
    """Put the heads side by side again."""
    return x.swapaxes(0, 1).reshape(x.shape[1], x.shape[0] * x.shape[2])


def document_ids(segment_ids: Int[Array, " seq"] | None, mask: Bool[Array, " seq"] | None) -> Int[Array, " seq"] | None:
    """Return ids under which every run of masked tokens is a document of its own, which no other token notices."""
    if mask is None:
        return segment_ids
    changes = mask[1:] != mask[:-1]
    if segment_ids is not None:
        changes |= segment_ids[1:] != segment_ids[:-1]
    return jnp.cumsum(jnp.pad(changes, (1, 0)), dtype=jnp.int32)
