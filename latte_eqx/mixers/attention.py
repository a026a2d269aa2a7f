"""Softmax attention: inside a window, or over everything."""

from typing import TypedDict, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from latte_eqx.layers import YaRN, linear, rotary
from latte_eqx.mixers.latents import join_heads, split_heads
from latte_eqx.ops import window_attention


class HeadSettings(TypedDict, total=False):
    """What attention can be told beyond its sizes; what each means, and is by default, stands in `Window`."""

    num_kv_heads: int | None
    head_dim: int | None
    causal: bool
    rotary_base: float | None
    yarn: YaRN | None
    scale: float | None
    soft_cap: float | None
    norm_eps: float | None


class WindowState(eqx.Module):
    """The last `window + 1` keys (rotated) and values, and how many tokens there were.

    Token n has the place n modulo the number of places: one more token changes one place, and then sees what is in all
    of them. Fewer places are enough where no more tokens than that will come.
    """

    keys: Float[Array, "kv_heads places head_dim"]
    values: Float[Array, "kv_heads places head_dim"]
    position: Int[Array, ""]


class Window(eqx.Module):
    """Queries and keys of a sliding window; values come from outside. A query sees itself and `window` past keys.

    With fewer `num_kv_heads`, several heads share a key. Heads have `head_dim` dims, by default `dim / num_heads`. They
    are rotated by `rotary_base` (`None` for no rotation), which `yarn` may stretch. `scale` multiplies the logits, by
    default one over the root of `head_dim`, and `soft_cap` then bounds them. With a `norm_eps`, queries and keys are
    normed before they are rotated.
    """

    to_query: eqx.nn.Linear
    to_key: eqx.nn.Linear
    query_norm: eqx.nn.RMSNorm | None
    key_norm: eqx.nn.RMSNorm | None
    num_heads: int = eqx.field(static=True)
    num_kv_heads: int = eqx.field(static=True)
    window: int = eqx.field(static=True)
    causal: bool = eqx.field(static=True)
    rotary_base: float | None = eqx.field(static=True)
    yarn: YaRN | None = eqx.field(static=True)
    scale: float | None = eqx.field(static=True)
    soft_cap: float | None = eqx.field(static=True)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        window: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = True,
        rotary_base: float | None = 10_000.0,
        yarn: YaRN | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        norm_eps: float | None = None,
        key: PRNGKeyArray,
    ):
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if window < 0:
            raise ValueError(f"`window` must not be negative, got {window=}.")
        if num_heads < 1 or (head_dim is None and dim % num_heads):
            raise ValueError(f"`num_heads` must divide `dim`, got {num_heads=}, {dim=}.")
        head_dim = dim // num_heads if head_dim is None else head_dim
        if head_dim < 1:
            raise ValueError(f"`head_dim` must be positive, got {head_dim=}.")
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"`num_kv_heads` must divide `num_heads`, got {num_kv_heads=}, {num_heads=}.")
        if rotary_base is not None and head_dim % 2:
            raise ValueError(f"Rotary positions need an even head size, got {head_dim=}.")
        if rotary_base is None and yarn is not None:
            raise ValueError(f"`yarn` must be None where nothing is rotated, got {rotary_base=}, {yarn=}.")
        query_key, key_key = jax.random.split(key)
        self.to_query = linear(dim, head_dim * num_heads, key=query_key)
        self.to_key = linear(dim, head_dim * num_kv_heads, key=key_key)
        norm = lambda: None if norm_eps is None else eqx.nn.RMSNorm(head_dim, eps=norm_eps, use_bias=False)
        self.query_norm, self.key_norm = norm(), norm()
        self.num_heads, self.num_kv_heads, self.window, self.causal = num_heads, num_kv_heads, window, causal
        self.rotary_base, self.yarn, self.scale, self.soft_cap = rotary_base, yarn, scale, soft_cap

    def __call__(
        self,
        x: Float[Array, "seq dim"],
        values: Float[Array, "kv_heads seq head_dim"],
        segment_ids: Int[Array, " seq"] | None = None,
        *,
        mask: Bool[Array, " seq"] | None = None,
    ) -> Float[Array, "heads seq head_dim"]:
        """Attend inside a whole sequence; tokens where `mask` is false are not seen."""
        queries, keys = self._project(x, jnp.arange(x.shape[0]))
        return self._attend(queries, keys, values, segment_ids=segment_ids, key_mask=mask)

    def init_state(self) -> WindowState:
        """Return the empty cache."""
        head_dim = self.to_query.weight.shape[0] // self.num_heads
        empty = jnp.zeros((self.num_kv_heads, self.window + 1, head_dim), self.to_key.weight.dtype)
        return WindowState(empty, empty, jnp.zeros((), jnp.int32))

    def extend(
        self, x: Float[Array, "seq dim"], values: Float[Array, "kv_heads seq head_dim"], state: WindowState
    ) -> tuple[Float[Array, "heads seq head_dim"], WindowState]:
        """Attend from further tokens to themselves and to the cache."""
        seq, places = x.shape[0], state.keys.shape[1]
        queries, keys = self._project(x, state.position + jnp.arange(seq))
        old_keys, old_values = state.keys.astype(keys.dtype), state.values.astype(values.dtype)
        position = state.position
        if seq == 1:
            is_new = (jnp.arange(places) == position % places)[:, None]
            keys, values = jnp.where(is_new, keys, old_keys), jnp.where(is_new, values, old_values)
            y = self._attend(queries, keys, values, past=places - 1, key_mask=jnp.arange(places) <= position)
            return y, WindowState(keys, values, position + 1)
        # The oldest first, then the further tokens; at the end each goes to its place.
        keys = jnp.concatenate([jnp.roll(old_keys, -position, axis=1), keys], axis=1)
        values = jnp.concatenate([jnp.roll(old_values, -position, axis=1), values], axis=1)
        is_filled = jnp.arange(1, places + seq) >= places - position
        y = self._attend(queries, keys[:, 1:], values[:, 1:], past=places - 1, key_mask=is_filled)
        position += seq
        keys, values = (jnp.roll(x[:, seq:], position, axis=1) for x in (keys, values))
        return y, WindowState(keys, values, position)

    def _project(self, x, positions):
        queries = split_heads(jax.vmap(self.to_query)(x), self.num_heads)
        keys = split_heads(jax.vmap(self.to_key)(x), self.num_kv_heads)
        if self.query_norm is not None and self.key_norm is not None:
            each = lambda norm: jax.vmap(jax.vmap(norm))
            queries, keys = each(self.query_norm)(queries), each(self.key_norm)(keys)
        if self.rotary_base is None:
            return queries, keys
        return tuple(rotary(x, positions, self.rotary_base, self.yarn) for x in (queries, keys))

    def _attend(self, queries, keys, values, **kwargs):
        settings = dict(window=self.window, causal=self.causal, scale=self.scale, soft_cap=self.soft_cap)
        return window_attention(queries, keys, values, **settings, **kwargs)


class SWA(eqx.Module):
    r"""Attention to the token itself and to the `window` tokens before it.

    $$y_t = \sum_{s=t-w}^t \mathrm{softmax}_s(q_t \cdot k_s / \sqrt{d})\, v_s$$

    With `causal=False`, `window` tokens on either side. Further settings are those of `Window`.
    """

    attention: Window
    to_value: eqx.nn.Linear
    to_out: eqx.nn.Linear

    def __init__(self, dim: int, num_heads: int, window: int, *, key: PRNGKeyArray, **settings: Unpack[HeadSettings]):
        attention_key, value_key, out_key = jax.random.split(key, 3)
        self.attention = Window(dim, num_heads, window, key=attention_key, **settings)
        self.to_value = linear(dim, self.attention.to_key.weight.shape[0], key=value_key)
        self.to_out = linear(self.attention.to_query.weight.shape[0], dim, key=out_key)

    def __call__(
        self,
        x: Float[Array, "seq dim"],
        segment_ids: Int[Array, " seq"] | None = None,
        *,
        mask: Bool[Array, " seq"] | None = None,
    ) -> Float[Array, "seq dim"]:
        """Mix a whole sequence; tokens where `mask` is false are not seen."""
        return self._out(self.attention(x, self._values(x), segment_ids, mask=mask))

    def init_state(self) -> WindowState:
        """Return the empty cache."""
        return self.attention.init_state()

    def extend(self, x: Float[Array, "seq dim"], state: WindowState) -> tuple[Float[Array, "seq dim"], WindowState]:
        """Mix further tokens."""
        y, state = self.attention.extend(x, self._values(x), state)
        return self._out(y), state

    def _values(self, x):
        return split_heads(jax.vmap(self.to_value)(x), self.attention.num_kv_heads)

    def _out(self, y):
        return jax.vmap(self.to_out)(join_heads(y))


class FullAttention(eqx.Module):
    r"""Attention to all tokens so far, or to all tokens with `causal=False`.

    It is a window as long as the longest sequence, `max_length`: a longer one raises, and while extending, the cache
    holds the last `max_length` tokens.
    """

    attention: SWA
    max_length: int = eqx.field(static=True)

    def __init__(
        self, dim: int, num_heads: int, max_length: int, *, key: PRNGKeyArray, **settings: Unpack[HeadSettings]
    ):
        if max_length < 1:
            raise ValueError(f"`max_length` must be positive, got {max_length=}.")
        self.max_length = max_length
        self.attention = SWA(dim, num_heads, max_length - 1, key=key, **settings)

    def __call__(
        self,
        x: Float[Array, "seq dim"],
        segment_ids: Int[Array, " seq"] | None = None,
        *,
        mask: Bool[Array, " seq"] | None = None,
    ) -> Float[Array, "seq dim"]:
        """Mix a whole sequence; tokens where `mask` is false are not seen."""
        if x.shape[0] > self.max_length:
            raise ValueError(f"The sequence must have at most max_length={self.max_length} tokens, got {x.shape[0]}.")
        return self.attention(x, segment_ids, mask=mask)

    def init_state(self) -> WindowState:
        """Return the empty cache."""
        return self.attention.init_state()

    def extend(self, x: Float[Array, "seq dim"], state: WindowState) -> tuple[Float[Array, "seq dim"], WindowState]:
        """Mix further tokens."""
        return self.attention.extend(x, state)
