"""The layers that mix tokens; all of them read one sequence and can be extended token by token."""

from latte_eqx.mixers.attention import SWA, FullAttention
from latte_eqx.mixers.latte import LatteBidir, LatteCausal
from latte_eqx.mixers.macchiato import Macchiato
from latte_eqx.mixers.r_swa import RSWA

__all__ = ["RSWA", "SWA", "FullAttention", "LatteBidir", "LatteCausal", "Macchiato"]
