"""The Long Range Arena: five tasks of long sequences to classify, with the paper's sizes.

Variants are TASK_ROW: listops, text, retrieval, image or pathfinder; and latte, latte_r, latte_r_swa, attention or
linear_attention (undirected). Prepare the data first (see `python -m data.prepare --help`), then for example

    python -m data.prepare lra-listops --out prepared/listops
    python -m train.main --config configs/lra.py:listops_latte_r_swa --data.directory prepared/listops

Small ones for a CPU, on short trees and on the first 512 bytes of reviews: listops_ROW_cpu and text_ROW_cpu

    python -m data.prepare lra-listops --min-length 5 --max-length 100 --num-train 50000 --out prepared/listops_cpu
    python -m train.main --config configs/lra.py:listops_latte_r_swa_cpu --data.directory prepared/listops_cpu
    python -m data.prepare lra-text --source DIR --out prepared/imdb
    python -m train.main --config configs/lra.py:text_latte_r_swa_cpu --data.directory prepared/imdb

On two cores JAX_NUM_CPU_DEVICES=2 in the environment makes that a fifth faster.

All look both ways. Latte's row has sinusoidal positions everywhere; the others have them for pictures, and rotary ones
in their windows otherwise. Weight decay is the paper's table; its code has 0.01 for all tasks.
Parameters: 1.1M (listops) to 27M (image); with _cpu 0.15M to 0.17M for latte_r_swa.
Cost: 6e16 to 2e18 FLOPs (`train.flops`); with _cpu 1e13 to 5e13.
"""

from dataclasses import replace
from math import log

from latte_eqx import PAPER_ROWS, ModelConfig
from train.config import CheckpointConfig, Config, DataConfig, OptimConfig, TaskConfig, choose

ROWS = {
    **{name: PAPER_ROWS[name] for name in ("latte", "latte_r", "latte_r_swa")},
    "attention": PAPER_ROWS["transformer_pp"],
    "linear_attention": ModelConfig(mixer="linear_attention", feed="rglru"),
}
# Tokens in a row, kinds of tokens, latents, width, learning rate, rows in a batch, weight decay, dropout, epochs, rows.
TASKS = {
    "listops": (2048, 16, 40, 128, 1e-3, 64, 0.01, 0.1, 50, 96_000),
    "text": (4000, 257, 256, 256, 1e-3, 32, 0.05, 0.1, 32, 22_500),
    "retrieval": (4000, 257, 40, 128, 1e-4, 32, 0.01, 0.1, 20, 147_086),
    "image": (1024, 257, 40, 512, 1e-3, 32, 0.05, 0.1, 200, 45_000),
    "pathfinder": (1024, 257, 256, 256, 1e-3, 64, 0.03, 0.2, 200, 160_000),
    "listops_cpu": (128, 16, 32, 64, 2e-3, 64, 0.01, 0.0, 2, 50_000),
    "text_cpu": (512, 257, 64, 64, 1e-3, 16, 0.05, 0.0, 3, 22_500),
}
# Short runs start with less to find: bytes make words, which a window of few bytes holds, with half of the attention,
# with rotations fast enough to tell neighbours apart, and embeddings that the first layer does not drown.
SMALL_MODELS = {
    "listops_cpu": dict(window=32),
    "text_cpu": dict(window=4, window_bias=log(16), init="lecun", rotary_base=10.0, scale_embedding=True),
}
# Gradients grow tenfold once words are found. A long memory of small ones would make the steps that follow too large.
SMALL_OPTIM = {"listops_cpu": dict(), "text_cpu": dict(b2=0.98)}
# A CPU's cache holds what there is of about so many tokens; larger batches are taken in parts.
CACHED_TOKENS = 4000
KINDS = {
    "listops": TaskConfig(kind="classify", num_classes=10),
    "text": TaskConfig(kind="classify"),
    "retrieval": TaskConfig(kind="classify_pairs"),
    "image": TaskConfig(kind="classify", num_classes=10),
    "pathfinder": TaskConfig(kind="classify", is_numeric=True),
}


def get_config(variant: str = "listops_latte_r_swa") -> Config:
    """Return the run of a variant."""
    names = {f"{task.removesuffix('_cpu')}_{row}{'_cpu' * task.endswith('_cpu')}": (task, row)
             for task in TASKS for row in ROWS}  # fmt: skip
    task, row = choose(names, variant)
    seq, vocab_size, num_latents, dim, peak_lr, batch_size, weight_decay, dropout, epochs, rows = TASKS[task]
    is_small, name = task.endswith("_cpu"), task.removesuffix("_cpu")
    model = ROWS[row]
    if name in ("image", "pathfinder"):
        model = replace(model, positions="sinusoidal", scale_embedding=True, rotary_base=None)
    model = replace(
        model,
        **dict(vocab_size=vocab_size, num_layers=2 if is_small else 6, dim=dim, num_heads=4, mlp_dim=4 * dim),
        **dict(num_latents=num_latents, max_length=seq, causal=False, dropout=dropout),
        **(SMALL_MODELS[task] if is_small else dict(window=128)),
    )
    steps = epochs * rows // batch_size
    return Config(
        model=model,
        data=DataConfig(seq=seq, batch_size=batch_size),
        task=KINDS[name],
        optim=OptimConfig(
            peak_lr=peak_lr,
            end_lr=0.0,
            warmup_steps=round(0.08 * steps) if name == "retrieval" else 100,
            schedule="cosine",
            weight_decay=weight_decay,
            accumulate=batch_size * seq // CACHED_TOKENS if is_small else 1,
            **(SMALL_OPTIM[task] if is_small else {}),
        ),
        checkpoint=CheckpointConfig(every=max(steps // epochs, 1)),
        tokens=steps * batch_size * seq,
        compute_dtype="float32" if is_small else "bfloat16",
        remat="none" if is_small else "full",
        eval_every=max(steps // epochs, 1),
        eval_batches=1000,
    )
