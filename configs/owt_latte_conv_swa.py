"""Latte-Conv-SWA++ on OpenWebText. Latte-Macchiato with a convolution: window and latents under one softmax.

Paper: perplexity 18.52 on the validation split. Parameters: 154.34M. Tokens: 8.0 billion, 122,070 steps of 64 x 1024.

    python -m data.prepare openwebtext --out prepared/openwebtext
    python -m train.main --config configs/owt_latte_conv_swa.py --data.directory prepared/openwebtext

Cost: 7.5e18 FLOPs (`train.flops`), that is 17 hours of one A100 at an assumed 40 % of its peak.
On a CPU, in minutes: add --smoke.
"""

from latte_eqx import PAPER_ROWS
from train.config import Config


def get_config() -> Config:
    """Return the run."""
    return Config(model=PAPER_ROWS["latte_conv_swa"])
