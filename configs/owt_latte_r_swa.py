"""Latte-R-SWA++ on OpenWebText. Latte-Macchiato with an RG-LRU, the paper's best: window and latents under one softmax.

Paper: perplexity 17.64 on the validation split. Parameters: 156.10M. Tokens: 8.0 billion, 122,070 steps of 64 x 1024.

    python -m data.prepare openwebtext --out prepared/openwebtext
    python -m train.main --config configs/owt_latte_r_swa.py --data.directory prepared/openwebtext

Cost: 7.6e18 FLOPs (`train.flops`), that is 17 hours of one A100 at an assumed 40 % of its peak.
On a CPU, in minutes: add --smoke.
"""

from latte_eqx import PAPER_ROWS
from train.config import Config


def get_config() -> Config:
    """Return the run."""
    return Config(model=PAPER_ROWS["latte_r_swa"])
