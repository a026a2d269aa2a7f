"""The language models of the paper's two tables, by row."""

from latte_eqx.models.config import ModelConfig

PAPER_ROWS: dict[str, ModelConfig] = {
    "latte": ModelConfig(mixer="latte", feed=None, style="base", positions="sinusoidal"),
    "latte_pp": ModelConfig(mixer="latte", feed=None, positions="sinusoidal"),
    "latte_conv": ModelConfig(mixer="latte", feed="conv"),
    "latte_conv_swa": ModelConfig(mixer="macchiato", feed="conv"),
    "latte_r": ModelConfig(mixer="latte", feed="rglru"),
    "latte_r_swa": ModelConfig(mixer="macchiato", feed="rglru"),
    "transformer_pp": ModelConfig(mixer="attention"),
    "r_swa": ModelConfig(mixer="r_swa"),
}
