"""How much arithmetic a model needs: the count behind model FLOPs utilisation.

What the mathematics asks for, not what an implementation spends: no recomputation, no masked half of a square. A
multiplication and an addition count as two; element-wise work is left out. The backward pass is twice the forward pass.

    matrices     2 for each entry of each matrix, the output map included
    latte        4 x latents x head_dim: each token feeds every latent of every head, and reads it
    window       4 x width x keys, keys being the mean of those in sight over the row: min(t, window) + 1 if causal
    attention    4 x width x (seq + 1) / 2 if causal, otherwise 4 x width x seq; width is that of all heads
"""

import equinox as eqx
import jax
import numpy as np

from latte_eqx import ModelConfig
from train.config import TaskConfig
from train.hardware import ACCELERATORS
from train.objective import make_model
from train.optim import is_decayed


def forward_flops_per_token(config: ModelConfig, seq: int, task: TaskConfig | None = None) -> float:
    """Count the forward pass, per token of rows of `seq` tokens."""
    task = TaskConfig() if task is None else task
    build = lambda: eqx.filter(make_model(config, task, key=jax.random.key(0)), eqx.is_inexact_array)
    params = eqx.filter_eval_shape(build)
    # A model of classes has no output map for each token, and what it looks up costs nothing.
    matrices = params if task.kind == "next_token" else params.encoder.stack
    entries = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(eqx.filter(matrices, is_decayed(matrices))))
    if not config.tie_embedding:
        # What is only looked up.
        entries -= config.vocab_size * config.dim
    # A pair has two rows of so many tokens.
    rows = 2 if task.kind == "classify_pairs" else 1
    kinds = config.layers
    mixing = sum(_mixing_flops(kinds[layer % len(kinds)], seq) for layer in range(config.num_layers))
    return rows * (2 * entries + mixing)


def _mixing_flops(config: ModelConfig, seq: int) -> float:
    head_dim = config.dim // config.num_heads if config.head_dim is None else config.head_dim
    latents, width = 4.0 * config.num_latents * head_dim, head_dim * config.num_heads
    seen_in_window = float((np.minimum(np.arange(seq), config.window) + 1).mean())
    if not config.causal:
        seen_in_window = 2 * seen_in_window - 1
    match config.mixer:
        case "latte" | "linear_attention":
            return latents
        case "macchiato":
            return latents + 4 * width * seen_in_window
        case "swa" | "r_swa":
            return 4 * width * seen_in_window
        case "attention":
            return 4 * width * ((seq + 1) / 2 if config.causal else seq)


def train_flops_per_token(config: ModelConfig, seq: int, task: TaskConfig | None = None) -> float:
    """Count forward and backward pass."""
    return 3 * forward_flops_per_token(config, seq, task)


def peak_flops(device_kind: str) -> float | None:
    """Return what such a device could do at most, or none where nobody says."""
    return next((device.peak_flops for device in ACCELERATORS.values() if device.kind == device_kind), None)
