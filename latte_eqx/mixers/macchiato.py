"""Latte-Macchiato: a window and latents under one softmax."""

from typing import Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from latte_eqx.layers import linear
from latte_eqx.mixers.attention import HeadSettings, Window, WindowState
from latte_eqx.mixers.latents import Feed, LatentProjection, Latents, document_ids, join_heads, split_heads
from latte_eqx.ops import LatteState, latte_bidirectional, latte_causal


class MacchiatoState(eqx.Module):
    """The window's cache, the latents' averages, and what the feed remembers."""

    window: WindowState
    latte: LatteState
    feed: PyTree


class Macchiato(eqx.Module):
    r"""Each token splits its attention between the window, state 0, and the latents.

    $$y_t = p(0|t) \sum_{s=t-w}^t p_0(s|t) v_s + \sum_{l \ge 1} p(l|t) \sum_{s \le t} p(s|l,t) v_s$$

    per head, where $p(\cdot|t)$ is one softmax over `num_latents / num_heads + 1` states, and all states share values
    and output map: before that map, every output is a convex combination of values. The latent logits come from a
    feed; the window reads the tokens themselves. `window_bias` starts a learned bias of state 0. With fewer
    `num_kv_heads`, several heads share keys of the window and values, which the latents of each of them average. This
    and all further settings are those of `Window`.

    With `causal=False` the window looks both ways and the latents average the whole document.
    """

    latents: Latents
    window: Window
    to_value: eqx.nn.Linear
    to_out: eqx.nn.Linear
    window_bias: Float[Array, " heads"] | None

    def __init__(
        self,
        dim: int,
        num_latents: int,
        num_heads: int,
        window: int,
        *,
        feed: Feed | None = "rglru",
        latent_proj: LatentProjection = "dense",
        norm_feed: bool = False,
        window_bias: float | None = None,
        key: PRNGKeyArray,
        **settings: Unpack[HeadSettings],
    ):
        latents_key, window_key, value_key, out_key = jax.random.split(key, 4)
        self.window = Window(dim, num_heads, window, key=window_key, **settings)
        self.latents = Latents(
            dim,
            num_latents,
            num_heads,
            feed=feed,
            latent_proj=latent_proj,
            norm_feed=norm_feed,
            extra_states=1,
            causal=self.window.causal,
            key=latents_key,
        )
        self.to_value = linear(dim, self.window.to_key.weight.shape[0], key=value_key)
        self.to_out = linear(self.window.to_query.weight.shape[0], dim, key=out_key)
        self.window_bias = None if window_bias is None else jnp.full(num_heads, window_bias, jnp.float32)

    def __call__(
        self,
        x: Float[Array, "seq dim"],
        segment_ids: Int[Array, " seq"] | None = None,
        *,
        mask: Bool[Array, " seq"] | None = None,
    ) -> Float[Array, "seq dim"]:
        """Mix a whole sequence; tokens where `mask` is false are not seen."""
        queries, keys, _ = self.latents(x, document_ids(segment_ids, mask))
        values, shares = self._values(x), self._shares(queries)
        local = self.window(x, values, segment_ids, mask=mask)
        if self.window.causal:
            keys = keys if mask is None else jnp.where(mask[None, :, None], keys, -jnp.inf)
            remote, _ = latte_causal(shares[..., 1:], keys, self._repeat(values), segment_ids=segment_ids)
        else:
            values = self._repeat(values)
            remote = latte_bidirectional(shares[..., 1:], keys, values, mask=mask, segment_ids=segment_ids)
        return self._out(shares, local, remote)

    def init_state(self) -> MacchiatoState:
        """Return the state before the first token."""
        window = self.window.init_state()
        num_heads, head_dim = self.window.num_heads, window.values.shape[-1]
        latte = LatteState.empty(num_heads, latents=self.latents.latents_per_head, dim=head_dim)
        return MacchiatoState(window, latte, self.latents.init_state())

    def extend(
        self, x: Float[Array, "seq dim"], state: MacchiatoState
    ) -> tuple[Float[Array, "seq dim"], MacchiatoState]:
        """Mix further tokens."""
        queries, keys, feed = self.latents(x, state=state.feed)
        values, shares = self._values(x), self._shares(queries)
        local, window = self.window.extend(x, values, state.window)
        remote, latte = latte_causal(shares[..., 1:], keys, self._repeat(values), state=state.latte)
        return self._out(shares, local, remote), MacchiatoState(window, latte, feed)

    def shares(
        self, x: Float[Array, "seq dim"], segment_ids: Int[Array, " seq"] | None = None
    ) -> Float[Array, "heads seq states"]:
        """Return $p(l|t)$; state 0 is the window."""
        return self._shares(self.latents(x, segment_ids)[0])

    def _shares(self, queries):
        if self.window_bias is not None:
            queries = queries.at[..., 0].add(self.window_bias[:, None].astype(queries.dtype))
        return jax.nn.softmax(queries)

    def _values(self, x):
        return split_heads(jax.vmap(self.to_value)(x), self.window.num_kv_heads)

    def _repeat(self, values):
        """Give each head the values that it shares."""
        return jnp.repeat(values, self.window.num_heads // self.window.num_kv_heads, axis=0)

    def _out(self, shares, local, remote):
        y = shares[..., :1] * local.astype(jnp.float32) + remote.astype(jnp.float32)
        return jax.vmap(self.to_out)(join_heads(y.astype(local.dtype)))
