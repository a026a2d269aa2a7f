import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from latte_eqx import ModelConfig
from train.config import Config, DataConfig, MeshConfig, OptimConfig, TaskConfig
from train.fsdp import make_mesh
from train.step import make_trainer

SEQ, ROWS, CLASSES = 24, 16, 3
MODEL = ModelConfig(
    vocab_size=20, num_layers=2, dim=16, num_heads=2, mlp_dim=32, num_latents=8, window=4, max_length=SEQ, causal=False
)


def config(task, **changes):
    return Config(
        model=dataclasses.replace(MODEL, **changes),
        data=DataConfig(seq=SEQ, batch_size=ROWS),
        task=task,
        optim=OptimConfig(warmup_steps=1),
        mesh=MeshConfig(data=2, fsdp=4),
        compute_dtype="float32",
        tokens=SEQ * ROWS * 10,
    )


def make_examples(task, seed=0):
    rng = np.random.default_rng(seed)

    def sequence():
        if task.is_numeric:
            return rng.uniform(-1, 1, (ROWS, SEQ, 1)).astype(np.float32)
        return rng.integers(0, 20, (ROWS, SEQ), dtype=np.int32)

    mask = lambda: np.arange(SEQ) < rng.integers(1, SEQ + 1, (ROWS, 1))
    batch = {"inputs": sequence(), "mask": mask(), "targets": rng.integers(0, CLASSES, ROWS, dtype=np.int32)}
    if task.kind == "classify_pairs":
        batch |= {"others": sequence(), "other_mask": mask()}
    batch["targets"][-1] = -1
    return batch | {"index": np.arange(ROWS, dtype=np.uint32)}


@pytest.mark.parametrize("kind", ["classify", "classify_pairs"])
@pytest.mark.parametrize("is_numeric", [False, True])
def test_classes_are_learned_as_on_one_device(kind, is_numeric):
    """Loss, accuracy and one step on a mesh are those of the plain model."""
    task = TaskConfig(kind=kind, num_classes=CLASSES, is_numeric=is_numeric)
    settings, batch = config(task), make_examples(task)
    trainer = make_trainer(settings, make_mesh(settings.mesh))
    state = trainer.init()
    params = jax.tree.map(jnp.asarray, jax.device_get(state.params))
    names = ("inputs", "mask") if kind == "classify" else ("inputs", "others", "mask", "other_mask")

    def plain(params):
        logits = jax.vmap(eqx.combine(params, trainer.static))(*(batch[name] for name in names))[:-1]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"][:-1])
        return losses.mean(), logits

    (loss, logits), gradient = jax.value_and_grad(plain, has_aux=True)(params)
    scores = trainer.measure(state, [batch])
    assert scores.num_targets == ROWS - 1
    np.testing.assert_allclose(scores.loss, loss, rtol=1e-5)
    assert scores.accuracy == pytest.approx(np.mean(np.argmax(logits, -1) == batch["targets"][:-1]))
    _, metrics = trainer.train_step(state, trainer.put_batch(batch))
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["gradient_norm"], optax.tree.norm(gradient), rtol=1e-4)


def test_dropout_acts_in_training_only():
    task = TaskConfig(kind="classify", num_classes=CLASSES)
    settings, batch = config(task, dropout=0.5), make_examples(task)
    trainer = make_trainer(settings, make_mesh(settings.mesh))
    state = trainer.init()
    scores = [trainer.measure(state, [batch]).loss for _ in range(2)]
    assert scores[0] == scores[1]
    _, metrics = trainer.train_step(state, trainer.put_batch(batch))
    assert abs(float(metrics["loss"]) - scores[0]) > 1e-4


@pytest.mark.parametrize("has_distance", [False, True])
def test_groups_split_the_targets(has_distance):
    """By place in the row, or by the distance that the data give; together the groups are the whole."""
    settings = config(TaskConfig(groups=(3, 10)), causal=True)
    trainer = make_trainer(settings, make_mesh(settings.mesh))
    rng = np.random.default_rng(1)
    batch = {
        "inputs": rng.integers(0, 20, (ROWS, SEQ), dtype=np.int32),
        "targets": rng.integers(-1, 20, (ROWS, SEQ), dtype=np.int32),
        "index": np.arange(ROWS, dtype=np.uint32),
    }
    place = np.broadcast_to(np.arange(SEQ), (ROWS, SEQ))
    if has_distance:
        place = batch["distance"] = rng.integers(0, 20, (ROWS, SEQ), dtype=np.int32)
    state = trainer.init()
    model = trainer.language_model(jax.tree.map(jnp.asarray, jax.device_get(state)))
    logits = jax.vmap(model)(batch["inputs"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(batch["targets"], 0))
    hits = np.argmax(logits, -1) == batch["targets"]
    scores = trainer.measure(state, [batch, batch])
    for group, member in zip(scores.by_group(), (place < 3, (place >= 3) & (place < 10), place >= 10), strict=True):
        chosen = member & (batch["targets"] >= 0)
        assert group["targets"] == 2 * chosen.sum()
        np.testing.assert_allclose(group["loss"], np.asarray(losses)[chosen].mean(), rtol=1e-5)
        assert group["accuracy"] == pytest.approx(hits[chosen].mean())
    with pytest.raises(ValueError, match=r"`task.groups` must increase, got \(3, 3\)"):
        config(TaskConfig(groups=(3, 3)))


def test_text_cannot_be_written_by_a_model_of_classes():
    settings = config(TaskConfig(kind="classify", num_classes=CLASSES))
    trainer = make_trainer(settings, make_mesh(settings.mesh))
    with pytest.raises(ValueError, match=r"must be one of `next_token`, got task\.kind='classify'"):
        trainer.language_model(trainer.abstract_state)
