"""Latte-R-SWA++ at the width of Gemma 2 2B: a size to compile for, not a result of the paper.

Parameters: 2,848.7M, 589.8M of them embedding. Gemma's 2,614M have narrower heads (256 instead of 288) and half as many
for keys and values, and no latents. Tokens: 8.0 billion, 7,629 steps of 256 x 4096. Cost: 1.4e20 FLOPs (`train.flops`).

    python -m train.compile --config configs/scale_2b.py --topology v5e:16x16
    python -m train.compile --config configs/scale_2b.py --topology v5e:4x4 --optim.accumulate 16
    python -m train.compile --config configs/scale_2b.py --topology a100:4 --optim.accumulate 16

All fit, with the same batch: a device needs 12.6 of its 16.9 GB, 12.7 of 16.9, and 31.2 of 85.1. At 256 shards of the
parameters none divides the RG-LRU's gates, 34.5M, which every device then holds whole.
On a CPU, in minutes: python -m train.main --config configs/scale_2b.py --smoke
"""

from latte_eqx import ModelConfig
from train.config import Config, DataConfig


def get_config() -> Config:
    """Return the run."""
    model = ModelConfig(vocab_size=256_000, num_layers=26, dim=2304, mlp_dim=9216)
    return Config(model=model, data=DataConfig(seq=4096, batch_size=256))
