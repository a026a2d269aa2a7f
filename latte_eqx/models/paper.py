"""The language models of the paper's two tables, by row."""

from typing import Any

from latte_eqx.models.config import ModelConfig

# Beside sines and cosines as large as 1, embeddings that begin at 0.02 would be hard to see, so they are scaled.
SINES: dict[str, Any] = dict(positions="sinusoidal", scale_embedding=True)

PAPER_ROWS: dict[str, ModelConfig] = {
    "latte": ModelConfig(mixer="latte", feed=None, style="base", **SINES),
    "latte_pp": ModelConfig(mixer="latte", feed=None, **SINES),
    "latte_conv": ModelConfig(mixer="latte", feed="conv"),
    "latte_conv_swa": ModelConfig(mixer="macchiato", feed="conv"),
    "latte_r": ModelConfig(mixer="latte", feed="rglru"),
    "latte_r_swa": ModelConfig(mixer="macchiato", feed="rglru"),
    "transformer_pp": ModelConfig(mixer="attention"),
    "r_swa": ModelConfig(mixer="r_swa"),
}
