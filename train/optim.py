"""The optimizer: AdamW after a clip of the global norm, with warm-up and decay."""

import jax
import optax
from jaxtyping import PyTree

from train.config import OptimConfig
from train.fsdp import is_stacked

NEVER_DECAYED = ("bias", "decay_logit", "window_bias")


def make_schedule(config: OptimConfig, steps: int) -> optax.Schedule:
    """Return the learning rate as a function of the step."""
    warmup = min(config.warmup_steps, steps)
    rest = max(steps - warmup, 1)
    match config.schedule:
        case "linear":
            decay = optax.linear_schedule(config.peak_lr, config.end_lr, rest)
        case "cosine":
            decay = optax.cosine_decay_schedule(config.peak_lr, rest, alpha=config.end_lr / config.peak_lr)
        case "constant":
            decay = optax.constant_schedule(config.peak_lr)
    return optax.join_schedules([optax.linear_schedule(0.0, config.peak_lr, max(warmup, 1)), decay], [warmup])


def make_optimizer(config: OptimConfig, steps: int) -> optax.GradientTransformation:
    """Return the optimizer. It works on whole arrays, sharded or not, outside `shard_map`."""
    adamw = optax.adamw(
        make_schedule(config, steps),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=is_decayed,
    )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)


def is_decayed(params: PyTree) -> PyTree:
    """Tell which arrays weight decay acts on: matrices, but no norms, biases or decays of the RG-LRU."""

    def decays(path, leaf):
        names = [entry.name for entry in path if hasattr(entry, "name")]
        matrix = leaf.ndim - is_stacked(path) >= 2
        return matrix and names[-1] not in NEVER_DECAYED and not any("norm" in name for name in names)

    return jax.tree_util.tree_map_with_path(decays, params)
