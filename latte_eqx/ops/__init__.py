"""Pure functions on arrays. Leading axes are free; sequence and feature come last."""

from latte_eqx.ops.dispatch import describe
from latte_eqx.ops.latte import (
    LatteState,
    latte_bidirectional,
    latte_causal,
    linear_attention,
    linear_attention_bidirectional,
)
from latte_eqx.ops.linear_scan import linear_scan
from latte_eqx.ops.window_attention import window_attention

__all__ = [
    "LatteState",
    "describe",
    "latte_bidirectional",
    "latte_causal",
    "linear_attention",
    "linear_attention_bidirectional",
    "linear_scan",
    "window_attention",
]
