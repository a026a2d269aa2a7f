"""The paper's ablation of language models, at a size that a CPU trains: 4 layers of width 64, bytes, 256 in a row.

Variants, from the paper's worst to its best: latte, latte_pp, latte_conv, latte_r, latte_conv_swa, latte_r_swa,
transformer_pp; and r_swa, which is not among its ablations. All see the same tokens in the same order.

    xz -dc novels_valid.txt.xz | head -c 400000 > novels_valid.txt
    python -m data.prepare text novels_train.txt.xz --valid novels_valid.txt --out prepared/novels
    python -m train.sweep --config configs/ablation.py --variants latte latte_pp latte_conv latte_r latte_conv_swa \\
        latte_r_swa transformer_pp --seeds 0 1 2 --split valid --data.directory prepared/novels --out runs/ablation

Parameters: 0.17M to 0.26M. Tokens: 2.5 million, 600 steps of 16 x 256. Cost: 2e12 to 4e12 FLOPs (`train.flops`).
"""

from dataclasses import replace

from latte_eqx import PAPER_ROWS
from train.config import CheckpointConfig, Config, DataConfig, OptimConfig, choose

SEQ, BATCH, STEPS = 256, 16, 600


def get_config(variant: str = "latte_r_swa") -> Config:
    """Return the run of a variant."""
    sizes = dict(vocab_size=257, num_layers=4, dim=64, num_heads=4, mlp_dim=192, num_latents=32, window=32)
    return Config(
        model=replace(choose(PAPER_ROWS, variant), **sizes, max_length=8 * SEQ),
        data=DataConfig(seq=SEQ, batch_size=BATCH),
        optim=OptimConfig(peak_lr=2e-3, end_lr=2e-4, warmup_steps=50),
        checkpoint=CheckpointConfig(every=200),
        tokens=STEPS * BATCH * SEQ,
        compute_dtype="float32",
        remat="none",
        eval_every=200,
        eval_batches=10,
    )
