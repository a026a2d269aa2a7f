"""R-SWA++: window attention between recurrent outputs, without latents."""

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from latte_eqx.layers import YaRN, linear
from latte_eqx.mixers.attention import Window, WindowState
from latte_eqx.mixers.latents import join_heads, split_heads
from latte_eqx.rglru import RGLRU, RGLRUState


class RSWAState(eqx.Module):
    """The recurrence's state and the window's."""

    rglru: RGLRUState
    window: WindowState


class RSWA(eqx.Module):
    r"""Queries and keys from a recurrence, values from the tokens: $z = \mathrm{norm}(\mathrm{RGLRU}(x))$.

    $$y_t = \sum_{s=t-w}^t \mathrm{softmax}_s(W_q z_t \cdot W_k z_s / \sqrt{d})\, W_v x_s$$

    With one key and value head for all queries by default.
    """

    rglru: RGLRU
    norm: eqx.nn.RMSNorm
    attention: Window
    to_value: eqx.nn.Linear
    to_out: eqx.nn.Linear

    def __init__(
        self,
        dim: int,
        num_heads: int,
        window: int,
        *,
        num_kv_heads: int = 1,
        rotary_base: float | None = 10_000.0,
        yarn: YaRN | None = None,
        key: PRNGKeyArray,
    ):
        rglru_key, attention_key, value_key, out_key = jax.random.split(key, 4)
        self.rglru = RGLRU(dim, num_heads, key=rglru_key)
        self.norm = eqx.nn.RMSNorm(dim, eps=1e-6, use_bias=False)
        self.attention = Window(
            dim, num_heads, window, num_kv_heads=num_kv_heads, rotary_base=rotary_base, yarn=yarn, key=attention_key
        )
        self.to_value = linear(dim, self.attention.to_key.weight.shape[0], key=value_key)
        self.to_out = linear(dim, dim, key=out_key)

    def __call__(
        self, x: Float[Array, "seq dim"], segment_ids: Int[Array, " seq"] | None = None
    ) -> Float[Array, "seq dim"]:
        """Mix a whole sequence."""
        z = jax.vmap(self.norm)(self.rglru(x, segment_ids))
        return self._out(self.attention(z, self._values(x), segment_ids))

    def init_state(self) -> RSWAState:
        """Return the state before the first token."""
        return RSWAState(self.rglru.init_state(), self.attention.init_state())

    def extend(self, x: Float[Array, "seq dim"], state: RSWAState) -> tuple[Float[Array, "seq dim"], RSWAState]:
        """Mix further tokens."""
        recurrent, rglru = self.rglru.extend(x, state.rglru)
        y, window = self.attention.extend(jax.vmap(self.norm)(recurrent), self._values(x), state.window)
        return self._out(y), RSWAState(rglru, window)

    def _values(self, x):
        return split_heads(jax.vmap(self.to_value)(x), self.attention.num_kv_heads)

    def _out(self, y):
        return jax.vmap(self.to_out)(join_heads(y))
