"""Latte++ on OpenWebText. Latte in the block with RMSNorm and SwiGLU.

Paper: perplexity 21.56 on the validation split. Parameters: 140.07M. Tokens: 8.0 billion, 122,070 steps of 64 x 1024.

    python -m data.prepare openwebtext --out prepared/openwebtext
    python -m train.main --config configs/owt_latte_pp.py --data.directory prepared/openwebtext

Cost: 6.7e18 FLOPs (`train.flops`), that is 15 hours of one A100 at an assumed 40 % of its peak.
On a CPU, in minutes: add --smoke.
"""

from latte_eqx import PAPER_ROWS
from train.config import Config


def get_config() -> Config:
    """Return the run."""
    return Config(model=PAPER_ROWS["latte_pp"])
