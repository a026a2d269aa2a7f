"""R-SWA++ on OpenWebText. The baseline without latents: an RG-LRU feeds a window with one key and value head.

Paper: perplexity 18.25 on the validation split. Parameters: 141.29M. Tokens: 8.0 billion, 122,070 steps of 64 x 1024.

    python -m data.prepare openwebtext --out prepared/openwebtext
    python -m train.main --config configs/owt_r_swa.py --data.directory prepared/openwebtext

Cost: 6.9e18 FLOPs (`train.flops`), that is 15 hours of one A100 at an assumed 40 % of its peak.
On a CPU, in minutes: add --smoke.
"""

from latte_eqx import PAPER_ROWS
from train.config import Config


def get_config() -> Config:
    """Return the run."""
    return Config(model=PAPER_ROWS["r_swa"])
