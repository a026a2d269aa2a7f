"""One step of training, and one of evaluation, over all devices."""

from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from latte_eqx import LanguageModel
from latte_eqx.models.language_model import next_token_logits
from train import fsdp
from train.config import Config
from train.optim import make_optimizer, make_schedule

# How far the running mean of the loss looks back, in steps.
LOSS_MEMORY = 100
Batch = dict[str, Array]


class TrainState(eqx.Module):
    """Everything a run carries from step to step: arrays only. `params` is the model without its functions."""

    params: PyTree
    optimizer: optax.OptState
    step: Int[Array, ""]
    num_skipped: Int[Array, ""]
    num_skipped_in_a_row: Int[Array, ""]
    mean_loss: Float[Array, ""]


class Trainer(eqx.Module):
    """The compiled functions of a run and the shardings of what they take and give."""

    init: Callable[[], TrainState]
    train_step: Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array]]]
    eval_step: Callable[[TrainState, Batch], tuple[Array, Array]]
    abstract_state: TrainState
    static: PyTree
    mesh: Mesh = eqx.field(static=True)

    def put_batch(self, batch: dict[str, Any]) -> Batch:
        """Make global arrays of the rows that this process has read."""
        specs = batch_specs(batch)
        put = lambda name: jax.make_array_from_process_local_data(NamedSharding(self.mesh, specs[name]), batch[name])
        return {name: put(name) for name in batch}

    def mean_loss(self, state: TrainState, batches: Iterable[dict[str, Any]]) -> tuple[float, int]:
        """Return the mean loss over all tokens of some batches, and how many they are."""
        total, count = 0.0, 0
        for batch in batches:
            summed, tokens = self.eval_step(state, self.put_batch(batch))
            total, count = total + float(summed), count + int(tokens)
        return total / max(count, 1), count

    def model(self, state: TrainState) -> LanguageModel:
        """Return the model, with its arrays where they are."""
        return eqx.combine(state.params, self.static)


def batch_specs(batch: dict[str, Any]) -> dict[str, PartitionSpec]:
    """Say how each array of a batch is cut."""
    return {name: fsdp.ROWS if name == "index" else fsdp.TOKENS for name in batch}


def make_trainer(config: Config, mesh: Mesh) -> Trainer:
    """Compile nothing yet; say how."""
    rows = mesh.shape["data"] * mesh.shape["fsdp"] * config.optim.accumulate
    if config.data.batch_size % rows:
        got = f"data.batch_size={config.data.batch_size}, mesh {dict(mesh.shape)}, accumulate={config.optim.accumulate}"
        raise ValueError(f"Devices times `optim.accumulate` ({rows}) must divide `data.batch_size`, got {got}.")
    build = lambda: eqx.partition(LanguageModel(config.model, key=jax.random.key(config.seed)), eqx.is_inexact_array)
    abstract_params, static = eqx.filter_eval_shape(build)
    specs = fsdp.parameter_specs(abstract_params, mesh)
    optimizer = make_optimizer(config.optim, config.steps)

    def init():
        params, _ = build()
        zero = jnp.zeros((), jnp.int32)
        return TrainState(params, optimizer.init(params), zero, zero, zero, jnp.zeros(()))

    abstract_state = jax.eval_shape(init)
    optimizer_specs = optax.tree_utils.tree_map_params(
        optimizer, lambda _, spec: spec, abstract_state.optimizer, specs, transform_non_params=lambda _: PartitionSpec()
    )
    state_specs = jax.tree.map(lambda _: PartitionSpec(), abstract_state)
    state_specs = eqx.tree_at(lambda state: (state.params, state.optimizer), state_specs, (specs, optimizer_specs))
    state_shardings = fsdp.shardings(state_specs, mesh)
    place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    loss_and_gradient = _loss_and_gradient(config, mesh, static, specs)
    schedule = make_schedule(config.optim, config.steps)

    def train_step(state, batch):
        loss, gradient = loss_and_gradient(state.params, batch, state.step)
        # Optax relies on implicit promotion, which strict settings forbid.
        with jax.numpy_dtype_promotion("standard"):
            updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.params)
            learning_rate = schedule(state.step)
        after = TrainState(
            optax.apply_updates(state.params, updates),
            optimizer_state,
            state.step,
            state.num_skipped,
            jnp.zeros((), jnp.int32),
            _running_mean(state.mean_loss, loss, state.step),
        )
        norm = optax.tree.norm(gradient)
        is_good = jnp.isfinite(loss) & jnp.isfinite(norm)
        if config.spike_factor is not None:
            is_good &= (state.step < LOSS_MEMORY) | (loss <= config.spike_factor * state.mean_loss)
        skipped = eqx.tree_at(
            lambda state: (state.num_skipped, state.num_skipped_in_a_row),
            state,
            (state.num_skipped + 1, state.num_skipped_in_a_row + 1),
        )
        # Chosen, never multiplied: zero times infinity would be let in.
        state = jax.tree.map(lambda new, old: jnp.where(is_good, new, old), after, skipped)
        metrics = {
            "loss": loss,
            "gradient_norm": norm,
            "learning_rate": learning_rate,
            "is_skipped": ~is_good,
            "num_skipped": state.num_skipped,
            "num_skipped_in_a_row": state.num_skipped_in_a_row,
        }
        return eqx.tree_at(lambda state: state.step, state, state.step + 1), metrics

    return Trainer(
        jax.jit(init, out_shardings=state_shardings),
        jax.jit(train_step, donate_argnums=0, out_shardings=(state_shardings, None)),
        jax.jit(lambda state, batch: _evaluate(config, mesh, static, specs)(state.params, batch)),
        jax.tree.map(place, abstract_state, state_shardings),
        static,
        mesh,
    )


def _running_mean(mean: Float[Array, ""], loss: Float[Array, ""], step: Int[Array, ""]) -> Float[Array, ""]:
    """Average the losses so far, the latest ones most."""
    share = 1 / jnp.minimum(step + 1, LOSS_MEMORY).astype(jnp.float32)
    return mean + share * (loss - mean)


def _loss_and_gradient(config: Config, mesh: Mesh, static: PyTree, specs: PyTree):
    """Return the mean loss over the batch and its gradient, sharded as the parameters are."""

    def local(params, batch, step):
        count = lax.psum((batch["targets"] >= 0).sum(), fsdp.AXES)
        scale = 1 / jnp.maximum(count, 1).astype(jnp.float32)
        loss = lambda params, part: scale * _summed_loss(config, static, specs, params, part, step)
        if config.optim.accumulate == 1:
            value, gradient = jax.value_and_grad(loss)(params, batch)
            return lax.psum(value, fsdp.AXES), gradient
        num_parts = config.optim.accumulate
        parts = jax.tree.map(lambda x: x.reshape(num_parts, x.shape[0] // num_parts, *x.shape[1:]), batch)

        def accumulate(sums, part):
            value, gradient = jax.value_and_grad(loss)(params, part)
            return jax.tree.map(jnp.add, sums, (lax.psum(value, fsdp.AXES), gradient)), None

        sums, _ = lax.scan(accumulate, (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)), parts)
        return sums

    def run(params, batch, step):
        in_specs = (specs, batch_specs(batch), PartitionSpec())
        sharded = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=(PartitionSpec(), specs))
        return sharded(params, batch, step)

    return run


def _evaluate(config: Config, mesh: Mesh, static: PyTree, specs: PyTree):
    """Return the summed loss of a batch and the number of tokens in the sum."""

    def local(params, batch):
        total = _summed_loss(config, static, specs, params, batch, None)
        return lax.psum(total, fsdp.AXES), lax.psum((batch["targets"] >= 0).sum(), fsdp.AXES)

    def run(params, batch):
        in_specs = (specs, batch_specs(batch))
        return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=(PartitionSpec(), PartitionSpec()))(
            params, batch
        )

    return run


def _summed_loss(config: Config, static, specs, params, batch, step):
    """Return the summed loss of the rows on this device. With a `step` dropout is on."""
    dtype = jnp.dtype(config.compute_dtype)
    keys = None
    if step is not None and config.model.dropout > 0:
        key = jax.random.fold_in(jax.random.key(config.seed), step)
        # By the example's place in the stream of all rows, so that masks do not depend on the devices.
        keys = jax.vmap(lambda index: jax.random.fold_in(key, index))(batch["index"])

    wrap = fsdp.gathered_layers(specs.stack.blocks, dtype, config.remat)
    outer = lambda tree: (tree.embedding, tree.stack.norm)
    embedding, norm = fsdp.gather(outer(params), outer(specs), dtype)
    # Float32 from here on, so that the gradients of all tokens are summed in float32.
    model = eqx.combine(eqx.tree_at(outer, params, (embedding.astype(jnp.float32), norm)), static)
    features = jax.vmap(
        lambda inputs, segment_ids, key: model.features(inputs, segment_ids, key=key, wrap=wrap, dtype=dtype)
    )(batch["inputs"], batch.get("segment_ids"), keys)
    head = jax.checkpoint(
        lambda shard, features: _summed_cross_entropy(
            features, fsdp.gather(shard, specs.embedding, dtype), batch["targets"]
        )
    )
    return head(params.embedding, features)


def _summed_cross_entropy(
    features: Float[Array, "batch seq dim"], embedding: Float[Array, "vocab dim"], targets: Int[Array, "batch seq"]
) -> Float[Array, ""]:
    """Sum minus the logarithms of the targets' probabilities, where there is a target.

    One row at a time, computed again for the backward pass: of all logits only those of one row ever exist.
    """
    table = embedding.astype(jnp.float32)

    def add_row(total, row):
        features, targets = row
        logits = next_token_logits(features, table.astype(features.dtype))
        chosen = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[:, None], axis=-1)[:, 0]
        losses = jax.nn.logsumexp(logits, axis=-1) - chosen
        return total + jnp.where(targets >= 0, losses, 0).sum(), None

    zero = jnp.zeros_like(features, shape=(), dtype=jnp.float32)
    return lax.scan(jax.checkpoint(add_row, prevent_cse=False), zero, (features, targets))[0]
