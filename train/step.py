"""One step of training, and one of evaluation, over all devices."""

from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PyTree

from latte_eqx import LanguageModel
from latte_eqx.pretrained import is_new, load, to_macchiato
from train import fsdp
from train.config import Config
from train.objective import Batch, Scores, Sums, make_model, summed_loss, summed_scores
from train.optim import make_optimizer, make_schedule

# How far the running mean of the loss looks back, in steps.
LOSS_MEMORY = 100


class TrainState(eqx.Module):
    """Everything a run carries from step to step: arrays only. `params` is the model without its functions.

    All of a model is trained, but of a pretrained one that gets latents only what is new: the rest is kept in the type
    of the matrix products, and the optimizer does not know of it.
    """

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
    eval_step: Callable[[TrainState, Batch], Sums]
    abstract_state: TrainState
    static: PyTree
    config: Config = eqx.field(static=True)
    mesh: Mesh = eqx.field(static=True)

    def put_batch(self, batch: dict[str, Any]) -> Batch:
        """Make global arrays of the rows that this process has read."""
        specs = batch_specs(batch)
        put = lambda name: jax.make_array_from_process_local_data(NamedSharding(self.mesh, specs[name]), batch[name])
        return {name: put(name) for name in batch}

    def measure(self, state: TrainState, batches: Iterable[dict[str, Any]]) -> Scores:
        """Return the scores over some batches."""
        total = Scores(*[np.zeros(len(self.config.task.groups) + 1)] * 3)
        for batch in batches:
            new = jax.device_get(self.eval_step(state, self.put_batch(batch)))
            total = Scores(*map(np.add, total, new))
        return total

    def language_model(self, state: TrainState) -> LanguageModel:
        """Return the model, with its arrays where they are."""
        model = eqx.combine(state.params, self.static)
        if not isinstance(model, LanguageModel):
            raise ValueError(f"The run must be one of `next_token`, got task.kind={self.config.task.kind!r}.")
        return model


def batch_specs(batch: dict[str, Any]) -> dict[str, PartitionSpec]:
    """Say how each array of a batch is cut."""
    return {name: fsdp.ROWS if x.ndim == 1 else fsdp.TOKENS for name, x in batch.items()}


def which_are_trained(config: Config, params: PyTree) -> PyTree[bool]:
    """Say of each array of a model whether it is trained; the arrays may be abstract."""
    gets_latents = config.pretrained.path is not None and config.model.mixer == "macchiato"
    return is_new(params) if gets_latents else jax.tree.map(lambda _: True, params)


def make_trainer(config: Config, mesh: Mesh) -> Trainer:
    """Compile nothing yet; say how."""
    rows = mesh.shape["data"] * mesh.shape["fsdp"] * config.optim.accumulate
    if config.data.batch_size % rows:
        got = f"data.batch_size={config.data.batch_size}, mesh {dict(mesh.shape)}, accumulate={config.optim.accumulate}"
        raise ValueError(f"Devices times `optim.accumulate` ({rows}) must divide `data.batch_size`, got {got}.")
    make = lambda: make_model(config.model, config.task, key=jax.random.key(config.seed))
    build = lambda: eqx.partition(make(), eqx.is_inexact_array)
    abstract, static = eqx.filter_eval_shape(build)
    is_trained = which_are_trained(config, abstract)
    specs = fsdp.parameter_specs(abstract, mesh)
    trained_specs, frozen_specs = eqx.partition(specs, is_trained)
    optimizer = make_optimizer(config.optim, config.steps)

    def begin(model):
        """Return the state before the first step."""
        trained, frozen = eqx.partition(model, is_trained)
        params = eqx.combine(trained, jax.tree.map(lambda x: x.astype(config.compute_dtype), frozen))
        zero = jnp.zeros((), jnp.int32)
        return TrainState(params, optimizer.init(trained), zero, zero, zero, jnp.zeros(()))

    abstract_state = jax.eval_shape(begin, abstract)
    optimizer_specs = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, spec: spec,
        abstract_state.optimizer,
        trained_specs,
        transform_non_params=lambda _: PartitionSpec(),
    )
    state_specs = jax.tree.map(lambda _: PartitionSpec(), abstract_state)
    state_specs = eqx.tree_at(lambda state: (state.params, state.optimizer), state_specs, (specs, optimizer_specs))
    state_shardings = fsdp.shardings(state_specs, mesh)
    place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    loss_and_gradient = _loss_and_gradient(config, mesh, static, specs, (trained_specs, frozen_specs))
    schedule = make_schedule(config.optim, config.steps)
    if config.pretrained.path is None:
        init = jax.jit(lambda: begin(build()[0]), out_shardings=state_shardings)
    else:
        read = lambda: jax.device_put(_read_pretrained(config, abstract, mesh), fsdp.shardings(specs, mesh))
        init = lambda: jax.jit(begin, out_shardings=state_shardings)(read())

    def train_step(state, batch):
        trained, frozen = eqx.partition(state.params, is_trained)
        loss, gradient = loss_and_gradient(trained, frozen, batch, state.step)
        # Optax relies on implicit promotion, which strict settings forbid.
        with jax.numpy_dtype_promotion("standard"):
            updates, optimizer_state = optimizer.update(gradient, state.optimizer, trained)
            learning_rate = schedule(state.step)
        after = TrainState(
            eqx.combine(optax.apply_updates(trained, updates), frozen),
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
        state = _skip_unless(is_good, state, after)
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
        init,
        jax.jit(train_step, donate_argnums=0, out_shardings=(state_shardings, None)),
        jax.jit(lambda state, batch: _evaluate(config, mesh, static, specs)(state.params, batch)),
        jax.tree.map(place, abstract_state, state_shardings),
        static,
        config,
        mesh,
    )


def _skip_unless(is_good: Bool[Array, ""], before: TrainState, after: TrainState) -> TrainState:
    """Take the state after a step if it is good, else the one before, with one more step skipped."""
    skipped = eqx.tree_at(
        lambda state: (state.num_skipped, state.num_skipped_in_a_row),
        before,
        (before.num_skipped + 1, before.num_skipped_in_a_row + 1),
    )
    # Chosen, never multiplied: zero times infinity would be let in.
    return jax.tree.map(lambda new, old: jnp.where(is_good, new, old), after, skipped)


def _read_pretrained(config: Config, abstract: PyTree, mesh: Mesh) -> PyTree:
    """Return the arrays of the pretrained model, with new latents if it gets some; they must be as the config says.

    Every device reads its own shards.
    """
    assert config.pretrained.path is not None
    sizes = config.model
    is_abstract_array = lambda x: isinstance(x, jax.ShapeDtypeStruct)
    specs = lambda model: fsdp.parameter_specs(eqx.filter(model, is_abstract_array), mesh)
    model = load(config.pretrained.path, shardings=lambda model: fsdp.shardings(specs(model), mesh)).model
    if sizes.mixer == "macchiato":
        model = to_macchiato(
            model,
            window=sizes.window,
            num_latents=sizes.num_latents,
            feed=sizes.feed,
            latent_proj=sizes.latent_proj,
            p0=config.pretrained.window_share,
            key=jax.random.key(config.seed),
        )
    arrays = eqx.filter(model, eqx.is_inexact_array)
    shapes = lambda tree: {jax.tree_util.keystr(path): x.shape for path, x in jax.tree_util.tree_leaves_with_path(tree)}
    wanted, got = shapes(abstract), shapes(arrays)
    for name in sorted(wanted.keys() | got.keys()):
        if wanted.get(name) != got.get(name):
            difference = f"{name} of shape {wanted.get(name)}, got {got.get(name)} in {config.pretrained.path}"
            raise ValueError(f"`model` must be the pretrained model, with its latents if any: it has {difference}.")
    return jax.tree.unflatten(jax.tree.structure(abstract), jax.tree.leaves(arrays))


def _running_mean(mean: Float[Array, ""], loss: Float[Array, ""], step: Int[Array, ""]) -> Float[Array, ""]:
    """Average the losses so far, the latest ones most."""
    share = 1 / jnp.minimum(step + 1, LOSS_MEMORY).astype(jnp.float32)
    return mean + share * (loss - mean)


def _loss_and_gradient(config: Config, mesh: Mesh, static: PyTree, specs: PyTree, split_specs: tuple[PyTree, PyTree]):
    """Return the mean loss over the batch and its gradient, sharded as the trained parameters are."""

    def local(trained, frozen, batch, step):
        count = fsdp.total((batch["targets"] >= 0).sum())
        scale = 1 / jnp.maximum(count, 1).astype(jnp.float32)
        whole = lambda trained: eqx.combine(trained, frozen)
        loss = lambda trained, part: scale * summed_loss(config, static, specs, whole(trained), part, step)
        if config.optim.accumulate == 1:
            value, gradient = jax.value_and_grad(loss)(trained, batch)
            return fsdp.total(value), gradient
        num_parts = config.optim.accumulate
        parts = jax.tree.map(lambda x: x.reshape(num_parts, x.shape[0] // num_parts, *x.shape[1:]), batch)

        def accumulate(sums, part):
            value, gradient = jax.value_and_grad(loss)(trained, part)
            return jax.tree.map(jnp.add, sums, (fsdp.total(value), gradient)), None

        sums, _ = lax.scan(accumulate, (jnp.zeros(()), jax.tree.map(jnp.zeros_like, trained)), parts)
        return sums

    def run(trained, frozen, batch, step):
        in_specs = (*split_specs, batch_specs(batch), PartitionSpec())
        sharded = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=(PartitionSpec(), split_specs[0]))
        return sharded(trained, frozen, batch, step)

    return run


def _evaluate(config: Config, mesh: Mesh, static: PyTree, specs: PyTree):
    """Return the sums of a batch."""

    def local(params, batch):
        return fsdp.total(summed_scores(config, static, specs, params, batch))

    def run(params, batch):
        in_specs = (specs, batch_specs(batch))
        return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=PartitionSpec())(params, batch)

    return run
