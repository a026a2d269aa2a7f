"""The real-gated linear recurrent unit of Griffin."""

import math
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from latte_eqx.layers import BlockLinear
from latte_eqx.ops import linear_scan
from latte_eqx.ops.segments import count_segments, segment_starts

# The recurrence gate works on the exponent: decay = decay_at_full_gate ** (EXPONENT * gate).
EXPONENT = 8.0
MIN_DECAY, MAX_DECAY = 0.9, 0.999


class RGLRUState(eqx.Module):
    """The last output, in float32, and whether there was one."""

    hidden: Float[Array, " dim"]
    is_empty: Bool[Array, ""]


class RGLRU(eqx.Module):
    r"""A linear recurrence whose decay and input are gated by the input.

    $$y_t = a_t y_{t-1} + \sqrt{1 - a_t^2}\,(i_t \odot x_t), \quad \log a_t = -8\,\mathrm{softplus}(\Lambda)\,r_t$$

    with gates $r_t, i_t$ that are sigmoids of block-diagonal maps of $x_t$. The first token of a document has $a = 0$
    and enters with factor one.
    """

    to_recurrence_gate: BlockLinear
    to_input_gate: BlockLinear
    decay_logit: Float[Array, " dim"]

    def __init__(self, dim: int, num_blocks: int, *, ring_on: Literal["a", "a_pow_c"] = "a", key: PRNGKeyArray):
        if ring_on not in ("a", "a_pow_c"):
            raise ValueError(f"`ring_on` must be 'a' or 'a_pow_c', got {ring_on!r}.")
        recurrence_key, input_key, decay_key = jax.random.split(key, 3)
        std = 1 / math.sqrt(dim)
        self.to_recurrence_gate = BlockLinear(num_blocks, dim, dim, use_bias=True, std=std, key=recurrence_key)
        self.to_input_gate = BlockLinear(num_blocks, dim, dim, use_bias=True, std=std, key=input_key)
        # The squared decays are uniform in a ring; softplus(decay_logit) is minus the logarithm of the decay.
        squared = jax.random.uniform(decay_key, (dim,), minval=MIN_DECAY**2, maxval=MAX_DECAY**2)
        rate = -0.5 * jnp.log(squared) / (1 if ring_on == "a" else EXPONENT)
        self.decay_logit = jnp.log(jnp.expm1(rate))

    def __call__(
        self, x: Float[Array, "seq dim"], segment_ids: Int[Array, " seq"] | None = None
    ) -> Float[Array, "seq dim"]:
        """Run over a whole sequence."""
        return self._mix(x, self.init_state(), segment_ids)[0]

    def init_state(self) -> RGLRUState:
        """Return the state before the first token."""
        return RGLRUState(jnp.zeros(self.decay_logit.shape), jnp.array(True))

    def extend(self, x: Float[Array, "seq dim"], state: RGLRUState) -> tuple[Float[Array, "seq dim"], RGLRUState]:
        """Run over further tokens."""
        return self._mix(x, state, None)

    def _mix(self, x, state, segment_ids):
        starts = (jnp.arange(x.shape[0]) == 0) & state.is_empty
        if segment_ids is not None:
            starts |= segment_starts(count_segments(segment_ids, (x.shape[0],)))
        starts = starts[:, None]

        inputs = x.astype(jnp.float32)
        recurrence_gate = jax.nn.sigmoid(self.to_recurrence_gate(x).astype(jnp.float32))
        input_gate = jax.nn.sigmoid(self.to_input_gate(x).astype(jnp.float32))
        rate = jax.nn.softplus(self.decay_logit.astype(jnp.float32))[None]
        log_decay = -EXPONENT * rate * recurrence_gate
        factor = jnp.where(starts, 1, _bounded_sqrt(-jnp.expm1(2 * log_decay)))
        log_decay = jnp.where(starts, -jnp.inf, log_decay)
        y, hidden = linear_scan(log_decay, factor * input_gate * inputs, state=state.hidden)
        return y.astype(x.dtype), RGLRUState(hidden, state.is_empty & (x.shape[0] == 0))


@jax.custom_jvp
def _bounded_sqrt(x):
    return jnp.sqrt(x)


@_bounded_sqrt.defjvp
def _bounded_sqrt_jvp(primals, tangents):
    """Bound the derivative: it is infinite where the decay reaches one."""
    root = jnp.sqrt(primals[0])
    return root, tangents[0] * jnp.minimum(0.5 / root, 1000.0)
