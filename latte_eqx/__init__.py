"""Latte and Latte-Macchiato: linear-time attention as a latent-variable model, in JAX and Equinox."""

from latte_eqx.blocks import MacchiatoBlock
from latte_eqx.decoding import generate, prefill
from latte_eqx.layers import CausalConv
from latte_eqx.mixers import RSWA, SWA, FullAttention, LatteBidir, LatteCausal, Macchiato
from latte_eqx.models import PAPER_ROWS, LanguageModel, ModelConfig, PairClassifier, SequenceClassifier
from latte_eqx.rglru import RGLRU

__all__ = [
    "PAPER_ROWS",
    "RGLRU",
    "RSWA",
    "SWA",
    "CausalConv",
    "FullAttention",
    "LanguageModel",
    "LatteBidir",
    "LatteCausal",
    "Macchiato",
    "MacchiatoBlock",
    "ModelConfig",
    "PairClassifier",
    "SequenceClassifier",
    "generate",
    "prefill",
]
