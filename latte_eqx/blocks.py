"""The residual block around a mixer."""

from typing import Literal, get_args

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from latte_eqx.layers import Gate, GatedMLP, GeluMLP
from latte_eqx.mixers import RSWA, SWA, FullAttention, LatteBidir, LatteCausal, Macchiato

Mixer = LatteCausal | LatteBidir | Macchiato | SWA | FullAttention | RSWA
Norm = eqx.nn.LayerNorm | eqx.nn.RMSNorm
BlockStyle = Literal["base", "plus_plus"]


def make_norm(style: BlockStyle, dim: int, eps: float = 1e-6) -> Norm:
    """Make the norm of a style: LayerNorm with a bias for `"base"`, RMSNorm without for `"plus_plus"`."""
    if style not in get_args(BlockStyle):
        raise ValueError(f"`style` must be one of {get_args(BlockStyle)}, got {style!r}.")
    return eqx.nn.LayerNorm(dim, eps=eps) if style == "base" else eqx.nn.RMSNorm(dim, eps=eps, use_bias=False)


class MacchiatoBlock(eqx.Module):
    r"""Any mixer and an MLP, each normed before and added to its input.

    $$h = x + \mathrm{mixer}(\mathrm{norm}(x)), \quad y = h + \mathrm{mlp}(\mathrm{norm}(h))$$

    Style `"plus_plus"` has RMSNorm and SwiGLU without biases, or another `gate`, `"base"` LayerNorm and a GELU MLP with
    biases. Without an MLP if `mlp_dim` is 0. With `norm_after`, what mixer and MLP add is normed too. Dropout acts on
    what they add, and only where a `key` is given.
    """

    mixer: Mixer
    mixer_norm: Norm
    mlp: GatedMLP | GeluMLP | None
    mlp_norm: Norm | None
    mixer_norm_after: Norm | None
    mlp_norm_after: Norm | None
    dropout: eqx.nn.Dropout

    def __init__(
        self,
        mixer: Mixer,
        dim: int,
        mlp_dim: int,
        *,
        style: BlockStyle = "plus_plus",
        dropout: float = 0.0,
        norm_eps: float = 1e-6,
        norm_after: bool = False,
        gate: Gate = "silu",
        key: PRNGKeyArray,
    ):
        if mlp_dim < 0:
            raise ValueError(f"`mlp_dim` must not be negative, got {mlp_dim=}.")
        if not 0 <= dropout < 1:
            raise ValueError(f"`dropout` must lie in [0, 1), got {dropout=}.")
        self.mixer = mixer
        norm = lambda: make_norm(style, dim, norm_eps)
        self.mixer_norm, self.mixer_norm_after = norm(), norm() if norm_after else None
        self.mlp = self.mlp_norm = self.mlp_norm_after = None
        if mlp_dim:
            is_base = style == "base"
            self.mlp = GeluMLP(dim, mlp_dim, key=key) if is_base else GatedMLP(dim, mlp_dim, gate=gate, key=key)
            self.mlp_norm, self.mlp_norm_after = norm(), norm() if norm_after else None
        self.dropout = eqx.nn.Dropout(dropout)

    def __call__(
        self,
        x: Float[Array, "seq dim"],
        segment_ids: Int[Array, " seq"] | None = None,
        *,
        key: PRNGKeyArray | None = None,
        **mixer_arguments: Array | None,
    ) -> Float[Array, "seq dim"]:
        """Mix a whole sequence. Further arguments, as a `mask`, go to the mixer."""
        mixer_key, mlp_key = (None, None) if key is None else jax.random.split(key)
        y = self.mixer(jax.vmap(self.mixer_norm)(x), segment_ids, **mixer_arguments)
        x += self._drop(_normed(self.mixer_norm_after, y), mixer_key)
        return self._add_mlp(x, mlp_key)

    def init_state(self) -> PyTree:
        """Return the mixer's state before the first token."""
        return self._causal_mixer().init_state()

    def extend(self, x: Float[Array, "seq dim"], state: PyTree) -> tuple[Float[Array, "seq dim"], PyTree]:
        """Mix further tokens."""
        y, state = self._causal_mixer().extend(jax.vmap(self.mixer_norm)(x), state)
        return self._add_mlp(x + _normed(self.mixer_norm_after, y), None), state

    def _causal_mixer(self):
        if isinstance(self.mixer, LatteBidir):
            raise TypeError("Only a causal mixer can be extended, got a LatteBidir.")
        return self.mixer

    def _add_mlp(self, x, key):
        if self.mlp is None or self.mlp_norm is None:
            return x
        y = jax.vmap(self.mlp)(jax.vmap(self.mlp_norm)(x))
        return x + self._drop(_normed(self.mlp_norm_after, y), key)

    def _drop(self, x, key):
        return self.dropout(x, key=key, inference=key is None)


def _normed(norm, x):
    return x if norm is None else jax.vmap(norm)(x)
