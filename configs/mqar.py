"""Multi-query associative recall: how well a model repeats the value that followed a key, near and far.

Variants: latte_r_swa, swa (the same window without latents), linear_attention (undirected), r_swa, attention. As they
are for rows of 256 tokens with 16 pairs; with the ending _512 for 512 tokens with 64 pairs; with the ending _cpu for 64
tokens of 64 kinds with 4 pairs, and a window of 8, which a CPU learns in minutes.

    python -m data.prepare mqar --seq 256 --pairs 16 --out prepared/mqar_256
    python -m train.main --config configs/mqar.py:latte_r_swa --data.directory prepared/mqar_256

    python -m data.prepare mqar --seq 64 --pairs 4 --num-tokens 64 --out prepared/mqar_cpu
    python -m train.sweep --config configs/mqar.py --variants latte_r_swa_cpu swa_cpu attention_cpu --seeds 0 1 2 \\
        --data.directory prepared/mqar_cpu --out runs/mqar_cpu

Validation tells answers inside the window from answers beyond it: `task.groups` is the window. The learning rate is one
of the four that the protocol tries (1e-4, 4.6e-4, 2.2e-3, 1e-2), the third or, for some of _cpu, the fourth: give
others as --optim.peak-lr. For linear_attention_cpu and r_swa_cpu the two were not compared.
Parameters: 0.56M to 0.59M, most of them the embedding of 8193 tokens; 0.04M to 0.07M with _cpu.
Cost: 64 epochs of 100,000 rows, 6e15 FLOPs (`train.flops`), with _512 1.2e16; with _cpu 1e12 to 3e12.
"""

from dataclasses import replace

from latte_eqx import ModelConfig
from train.config import Config, DataConfig, OptimConfig, TaskConfig, choose

# The mixers, and with which of the protocol's learning rates the small ones are trained.
MIXERS = {
    "latte_r_swa": (1e-2, ModelConfig(mixer="macchiato", feed="rglru")),
    "swa": (2.2e-3, ModelConfig(mixer="swa")),
    "linear_attention": (1e-2, ModelConfig(mixer="linear_attention", feed="rglru")),
    "r_swa": (2.2e-3, ModelConfig(mixer="r_swa")),
    "attention": (2.2e-3, ModelConfig(mixer="attention")),
}
# Tokens in a row, kinds of tokens, window, rows in a batch, and rows to train on in all.
SIZES = {
    "": (256, 8192, 128, 256, 64 * 100_000),
    "_512": (512, 8192, 128, 128, 64 * 100_000),
    "_cpu": (64, 64, 8, 64, 100_000),
}


def get_config(variant: str = "latte_r_swa") -> Config:
    """Return the run of a variant."""
    variants = {mixer + size: (*MIXERS[mixer], SIZES[size]) for mixer in MIXERS for size in SIZES}
    small_lr, model, (seq, num_tokens, window, batch_size, rows) = choose(variants, variant)
    sizes = dict(vocab_size=num_tokens + 1, num_layers=2, dim=64, num_heads=1, mlp_dim=0, num_latents=64)
    return Config(
        model=replace(model, **sizes, window=window, max_length=seq),
        data=DataConfig(seq=seq, batch_size=batch_size),
        task=TaskConfig(groups=(window + 1,)),
        optim=OptimConfig(
            peak_lr=small_lr if variant.endswith("_cpu") else 2.2e-3,
            end_lr=0.0,
            warmup_steps=100,
            schedule="cosine",
            weight_decay=0.1,
        ),
        tokens=rows * seq,
        compute_dtype="float32",
        remat="none",
        eval_every=500,
    )
