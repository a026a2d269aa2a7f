"""What a model is trained for: the next token, or the class of an example."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from latte_eqx import LanguageModel, ModelConfig, SequenceClassifier
from latte_eqx.models.classifier import PairClassifier
from latte_eqx.models.language_model import next_token_logits
from train import fsdp
from train.config import Config, TaskConfig

Batch = dict[str, Array]
Model = LanguageModel | SequenceClassifier | PairClassifier


class Sums(NamedTuple):
    """Sums over the targets of a batch, for each group of them: losses, hits, and how many targets there are."""

    losses: Float[Array, " groups"]
    hits: Float[Array, " groups"]
    targets: Float[Array, " groups"]


class Scores(NamedTuple):
    """The same over any number of batches, in float64."""

    losses: Float[np.ndarray, " groups"]
    hits: Float[np.ndarray, " groups"]
    targets: Float[np.ndarray, " groups"]

    @property
    def num_targets(self) -> int:
        """How many targets there were."""
        return int(self.targets.sum())

    @property
    def loss(self) -> float:
        """The mean loss of all targets."""
        return float(self.losses.sum() / max(self.num_targets, 1))

    @property
    def accuracy(self) -> float:
        """The share of targets that were the likeliest."""
        return float(self.hits.sum() / max(self.num_targets, 1))

    def by_group(self) -> list[dict[str, float]]:
        """Return the same of each group."""
        rows = zip(*(self.losses, self.hits, self.targets), strict=True)
        return [{"loss": x / max(n, 1), "accuracy": y / max(n, 1), "targets": n} for x, y, n in rows]


def make_model(config: ModelConfig, task: TaskConfig, *, key: PRNGKeyArray) -> Model:
    """Build the model that a task asks for."""
    if task.kind == "next_token":
        return LanguageModel(config, key=key)
    kind = SequenceClassifier if task.kind == "classify" else PairClassifier
    return kind(config, task.num_classes, num_features=1 if task.is_numeric else None, key=key)


def summed_loss(
    config: Config, static: PyTree, specs: PyTree, params: PyTree, batch: Batch, step: Int[Array, ""]
) -> Float[Array, ""]:
    """Return the summed loss of the rows on this device, with dropout."""
    keys = None
    if config.model.dropout > 0:
        key = jax.random.fold_in(jax.random.key(config.seed), step)
        # By the example's place in the stream of all rows, so that masks do not depend on the devices.
        keys = jax.vmap(lambda index: jax.random.fold_in(key, index))(batch["index"])
    return _scores(config, static, specs, params, batch, keys, None)


def summed_scores(config: Config, static: PyTree, specs: PyTree, params: PyTree, batch: Batch) -> Sums:
    """Return the sums of the rows on this device, without dropout."""
    edges = jnp.asarray(config.task.groups, jnp.int32)
    position = jnp.broadcast_to(jnp.arange(batch["inputs"].shape[1]), batch["inputs"].shape[:2])
    distance = batch.get("distance", position) if batch["targets"].ndim == 2 else jnp.zeros_like(batch["targets"])
    groups = jnp.searchsorted(edges, distance, side="right")
    return _scores(config, static, specs, params, batch, None, groups)


def _scores(config, static, specs, params, batch, keys, groups):
    """Return the summed loss, or, given groups, all sums of each."""
    dtype = jnp.dtype(config.compute_dtype)
    score = _score_next_tokens if config.task.kind == "next_token" else _score_classes
    return score(config, static, specs, params, batch, keys, groups, dtype)


def _score_classes(config, static, specs, params, batch, keys, groups, dtype):
    wrap = fsdp.gathered_layers(specs.encoder.stack.blocks, dtype, config.remat)
    # All but the layers is small: it is gathered once, and computes in float32.
    model = eqx.combine(fsdp.gather_unstacked(params, specs, jnp.float32), static)
    names = ("inputs", "mask") if config.task.kind == "classify" else ("inputs", "others", "mask", "other_mask")
    classify = jax.vmap(lambda key, *arrays: model(*arrays, key=key, wrap=wrap, dtype=dtype))
    logits = classify(keys, *(batch[name] for name in names))
    losses, correct = _compare(logits, batch["targets"])
    if groups is None:
        return losses.sum()
    return _sum_groups(config, losses, correct, batch["targets"] >= 0, groups)


def _score_next_tokens(config, static, specs, params, batch, keys, groups, dtype):
    wrap = fsdp.gathered_layers(specs.stack.blocks, dtype, config.remat)
    outer = lambda tree: (tree.embedding, tree.stack.norm)
    embedding, norm = fsdp.gather(outer(params), outer(specs), dtype)
    # Float32 from here on, so that the gradients of all tokens are summed in float32.
    model = eqx.combine(eqx.tree_at(outer, params, (embedding.astype(jnp.float32), norm)), static)
    features = jax.vmap(
        lambda inputs, segment_ids, key: model.features(inputs, segment_ids, key=key, wrap=wrap, dtype=dtype)
    )(batch["inputs"], batch.get("segment_ids"), keys)

    def head(shard, features):
        table = fsdp.gather(shard, spec, dtype).astype(jnp.float32)

        def add_row(sums, row):
            """One row at a time, computed again for the backward pass: of all logits only a row's ever exist."""
            features, targets, groups = row
            logits = next_token_logits(features, table.astype(features.dtype), config.model.logit_cap)
            losses, correct = _compare(logits, targets)
            new = losses.sum() if groups is None else _sum_groups(config, losses, correct, targets >= 0, groups)
            return jax.tree.map(jnp.add, sums, new), None

        zeros = lambda *shape: jnp.zeros_like(features, shape=shape, dtype=jnp.float32)
        start = zeros() if groups is None else Sums(*[zeros(len(config.task.groups) + 1)] * 3)
        rows = features, batch["targets"], groups
        return lax.scan(jax.checkpoint(add_row, prevent_cse=False), start, rows)[0]

    shard, spec = (x.embedding if params.head is None else x.head for x in (params, specs))
    return jax.checkpoint(head)(shard, features)


def _compare(
    logits: Float[Array, "places classes"], targets: Int[Array, " places"]
) -> tuple[Float[Array, " places"], Bool[Array, " places"]]:
    """Return minus the logarithms of the targets' probabilities, and where they are the largest; 0 without a target."""
    chosen = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[:, None], axis=-1)[:, 0]
    losses = jnp.where(targets >= 0, jax.nn.logsumexp(logits, axis=-1) - chosen, 0)
    return losses, jnp.argmax(logits, axis=-1) == targets


def _sum_groups(config, losses, correct, is_target, groups):
    number = jnp.arange(len(config.task.groups) + 1)[None]
    member = (groups[:, None] == number) & is_target[:, None]
    add = lambda x: jnp.where(member, x.astype(jnp.float32)[:, None], 0).sum(axis=0)
    return Sums(add(losses), add(correct), add(is_target))
