"""Latte on OpenWebText. Latent averages alone, with sinusoidal positions, LayerNorm and a GELU MLP.

Paper: perplexity 21.88 on the validation split. Parameters: 111.83M. Tokens: 8.0 billion, 122,070 steps of 64 x 1024.

    python -m data.prepare openwebtext --out prepared/openwebtext
    python -m train.main --config configs/owt_latte.py --data.directory prepared/openwebtext

Cost: 5.4e18 FLOPs (`train.flops`), that is 12 hours of one A100 at an assumed 40 % of its peak.
On a CPU, in minutes: add --smoke.
"""

from latte_eqx import PAPER_ROWS
from train.config import Config


def get_config() -> Config:
    """Return the run."""
    return Config(model=PAPER_ROWS["latte"])
