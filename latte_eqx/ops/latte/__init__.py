"""Latent averages: causal and bidirectional Latte, and undirected linear attention."""

from latte_eqx.ops.latte.bidirectional import latte_bidirectional, linear_attention_bidirectional
from latte_eqx.ops.latte.causal import latte_causal
from latte_eqx.ops.latte.state import LatteState
from latte_eqx.ops.latte.undirected import linear_attention

__all__ = ["LatteState", "latte_bidirectional", "latte_causal", "linear_attention", "linear_attention_bidirectional"]
