"""The small parts that mixers, blocks and models share: projections, convolution, MLPs, positions."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from latte_eqx.ops.segments import count_segments

# Every matrix starts as Normal(0, INIT_STD^2); models rescale some of them.
INIT_STD = 0.02
# What opens a gated MLP; "gelu" is the approximation by tanh.
Gate = Literal["silu", "gelu"]


def linear(in_features: int, out_features: int, *, use_bias: bool = False, key: PRNGKeyArray) -> eqx.nn.Linear:
    """Make a linear layer with normal weights and zero biases."""
    layer = eqx.nn.Linear(in_features, out_features, use_bias=use_bias, key=key)
    weight = INIT_STD * jax.random.normal(key, (out_features, in_features))
    layer = eqx.tree_at(lambda layer: layer.weight, layer, weight)
    return eqx.tree_at(lambda layer: layer.bias, layer, jnp.zeros(out_features)) if use_bias else layer


class BlockLinear(eqx.Module):
    """A linear layer whose matrix is block-diagonal: each block of inputs feeds its own outputs."""

    weight: Float[Array, "blocks inputs outputs"]
    bias: Float[Array, "blocks outputs"] | None

    def __init__(
        self,
        num_blocks: int,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = False,
        std: float = INIT_STD,
        key: PRNGKeyArray,
    ):
        if num_blocks < 1 or in_features % num_blocks or out_features % num_blocks:
            raise ValueError(
                f"`num_blocks` must divide `in_features` and `out_features`, "
                f"got {num_blocks=}, {in_features=}, {out_features=}."
            )
        shape = (num_blocks, in_features // num_blocks, out_features // num_blocks)
        self.weight = std * jax.random.normal(key, shape)
        self.bias = jnp.zeros((num_blocks, out_features // num_blocks)) if use_bias else None

    def __call__(self, x: Float[Array, "seq inputs"]) -> Float[Array, "seq outputs"]:
        """Map each token."""
        blocks = x.reshape(x.shape[0], *self.weight.shape[:2])
        y = jnp.einsum("sbi,bio->sbo", blocks, self.weight)
        if self.bias is not None:
            y += self.bias[None]
        return y.reshape(x.shape[0], y.shape[1] * y.shape[2])


class CausalConv(eqx.Module):
    r"""A depthwise convolution over the current token and the `width - 1` before it, inside its document.

    $$y_t = b + \sum_{i=0}^{K-1} c_i \odot x_{t-i}$$
    """

    weight: Float[Array, "width dim"]
    bias: Float[Array, " dim"]

    def __init__(self, dim: int, width: int = 3, *, key: PRNGKeyArray):
        if width < 1:
            raise ValueError(f"`width` must be positive, got {width=}.")
        # Fan-in scaling: the output varies as much as the input.
        self.weight = jax.random.normal(key, (width, dim)) / math.sqrt(width)
        self.bias = jnp.zeros(dim)

    def __call__(
        self, x: Float[Array, "seq dim"], segment_ids: Int[Array, " seq"] | None = None
    ) -> Float[Array, "seq dim"]:
        """Convolve a whole sequence."""
        return self._mix(x, self.init_state(), segment_ids)[0]

    def init_state(self) -> Float[Array, "past dim"]:
        """Return the inputs before the first: zeros."""
        return jnp.zeros((self.weight.shape[0] - 1, self.weight.shape[1]), self.weight.dtype)

    def extend(
        self, x: Float[Array, "seq dim"], state: Float[Array, "past dim"]
    ) -> tuple[Float[Array, "seq dim"], Float[Array, "past dim"]]:
        """Convolve further tokens."""
        return self._mix(x, state, None)

    def _mix(self, x, state, segment_ids):
        past, seq = state.shape[0], x.shape[0]
        if segment_ids is not None:
            segment_ids = count_segments(segment_ids, (seq,))
        padded = jnp.concatenate([state.astype(x.dtype), x])
        y = jnp.broadcast_to(self.bias[None], x.shape)
        for lag, tap in enumerate(self.weight):
            term = padded[past - lag : past - lag + seq]
            if segment_ids is not None and lag:
                # Zeros stand before the first document as before every other.
                same = segment_ids[lag:] == segment_ids[:-lag]
                term = jnp.where(jnp.pad(same, (min(lag, seq), 0))[:seq, None], term, 0)
            y += tap[None] * term
        return y, padded[seq:]


class GatedMLP(eqx.Module):
    r"""$W_\text{out}(\mathrm{gate}(W_\text{gate} x) \odot W_\text{in} x)$, without biases; SwiGLU if it is silu."""

    to_gate: eqx.nn.Linear
    to_hidden: eqx.nn.Linear
    to_out: eqx.nn.Linear
    gate: Gate = eqx.field(static=True)

    def __init__(self, dim: int, mlp_dim: int, *, gate: Gate = "silu", key: PRNGKeyArray):
        if gate not in get_args(Gate):
            raise ValueError(f"`gate` must be one of {get_args(Gate)}, got {gate!r}.")
        self.gate = gate
        gate_key, hidden_key, out_key = jax.random.split(key, 3)
        self.to_gate = linear(dim, mlp_dim, key=gate_key)
        self.to_hidden = linear(dim, mlp_dim, key=hidden_key)
        self.to_out = linear(mlp_dim, dim, key=out_key)

    def __call__(self, x: Float[Array, " dim"]) -> Float[Array, " dim"]:
        """Map one token."""
        gate = jax.nn.silu if self.gate == "silu" else jax.nn.gelu
        return self.to_out(gate(self.to_gate(x)) * self.to_hidden(x))


class GeluMLP(eqx.Module):
    r"""$W_\text{out}\,\mathrm{gelu}(W_\text{in} x)$, with biases."""

    to_hidden: eqx.nn.Linear
    to_out: eqx.nn.Linear

    def __init__(self, dim: int, mlp_dim: int, *, key: PRNGKeyArray):
        hidden_key, out_key = jax.random.split(key)
        self.to_hidden = linear(dim, mlp_dim, use_bias=True, key=hidden_key)
        self.to_out = linear(mlp_dim, dim, use_bias=True, key=out_key)

    def __call__(self, x: Float[Array, " dim"]) -> Float[Array, " dim"]:
        """Map one token."""
        return self.to_out(jax.nn.gelu(self.to_hidden(x)))


def angles(positions: Int[Array, " seq"], frequencies: np.ndarray) -> Float[Array, "seq frequencies"]:
    """Return position times frequency, up to whole turns, exact to a few 1e-4 for any 30-bit position.

    A float32 product is off by a tenth of a radian at position 1e6. So positions are cut into digits of ten bits, each
    with its own frequency, reduced to one turn in float64.
    """
    turn = 2 * np.pi
    total = jnp.zeros((positions.shape[0], len(frequencies)))
    for digit in range(3):
        reduced = np.remainder(frequencies * 1024.0**digit, turn).astype(np.float32)
        digits = jnp.right_shift(positions, 10 * digit) & 1023
        total += jnp.remainder(digits[:, None].astype(jnp.float32) * reduced[None], turn)
    return total


@dataclass(frozen=True)
class YaRN:
    r"""Stretches a rotation trained on sequences of `length` tokens to `scale` times as many; no parameter changes.

    $$\theta' = \left(g + \frac{1 - g}{s}\right) \theta, \qquad
    g = \min\left(\max\left(\frac{r - 1}{32 - 1}, 0\right), 1\right), \qquad r = \frac{T \theta}{2 \pi}$$

    where r says how often a pair turned in training. Fast pairs tell neighbours apart and stay. Slow ones have not seen
    all angles, and turn more slowly so as to meet no new ones. Logits grow by $(0.1 \ln s + 1)^2$, half of it on each
    side, since a softmax over more tokens is flatter.
    """

    scale: float
    length: int

    def __post_init__(self):
        if not 1 <= self.scale < math.inf:
            raise ValueError(f"`scale` must be at least 1 and finite, got scale={self.scale}.")
        if self.length < 1:
            raise ValueError(f"`length` must be positive, got length={self.length}.")

    @property
    def gain(self) -> float:
        """By how much queries and keys grow."""
        return 0.1 * math.log(self.scale) + 1

    def stretch(self, frequencies: np.ndarray) -> np.ndarray:
        """Return the frequencies to rotate with, in radians per token; at scale 1 the same ones, to the bit."""
        turns = self.length * frequencies / (2 * np.pi)
        kept = np.clip((turns - 1) / (32 - 1), 0, 1)
        return frequencies * (kept + (1 - kept) / self.scale)


def rotary(
    x: Float[Array, "heads seq head_dim"], positions: Int[Array, " seq"], base: float, yarn: YaRN | None = None
) -> Float[Array, "heads seq head_dim"]:
    """Rotate the pairs (i, i + head_dim / 2) by their position, so that products tell the distance of two tokens."""
    half = x.shape[-1] // 2
    frequencies, gain = base ** -(np.arange(half) / half), 1.0
    if yarn is not None:
        frequencies, gain = yarn.stretch(frequencies), yarn.gain
    turned = angles(positions, frequencies)[None]
    cos, sin = gain * jnp.cos(turned), gain * jnp.sin(turned)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def sinusoidal(positions: Int[Array, " seq"], dim: int) -> Float[Array, "seq dim"]:
    """Return the sines and cosines of the positions, as a first transformer adds to its embeddings."""
    half = dim // 2
    turned = angles(positions, 10_000.0 ** -(np.arange(half) / half))
    return jnp.concatenate([jnp.sin(turned), jnp.cos(turned)], axis=-1)
