"""The step: the same numbers on any devices, the gradient of the plain model, and nothing bad let in."""

import dataclasses
import re
import sys
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.pallas import tpu as pltpu

from latte_eqx import PAPER_ROWS, LanguageModel, ModelConfig
from latte_eqx.ops.dispatch import Passes
from latte_eqx.ops.latte import causal
from latte_eqx.ops.latte import pallas_tpu as latte_kernels
from latte_eqx.ops.latte.passes import BLOCK
from latte_eqx.ops.linear_scan import pallas_tpu as scan_kernels
from train.config import Config, DataConfig, MeshConfig, OptimConfig
from train.fsdp import make_mesh, parameter_specs
from train.step import make_trainer

ROWS, SEQ, VOCAB = 16, 24, 61
MODEL = ModelConfig(
    vocab_size=VOCAB, num_layers=2, dim=32, num_heads=4, mlp_dim=64, num_latents=16, window=8, max_length=SEQ
)


def config(**changes):
    model = dataclasses.replace(MODEL, **changes.pop("model", {}))
    optim = OptimConfig(peak_lr=3e-3, warmup_steps=5, **changes.pop("optim", {}))
    values = dict(tokens=20 * ROWS * SEQ, compute_dtype="float32") | changes
    return Config(model=model, data=DataConfig(seq=SEQ, batch_size=ROWS), optim=optim, **values)


def batch(step, *, documents=False, seq=SEQ):
    rng = np.random.default_rng(step)
    tokens = rng.integers(0, VOCAB, (ROWS, seq + 1)).astype(np.int32)
    made = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "index": np.arange(ROWS, dtype=np.uint32) + ROWS * step}
    if documents:
        made["segment_ids"] = np.sort(rng.integers(0, 3, (ROWS, seq)), axis=1).astype(np.int32)
        made["targets"] = np.where(np.diff(made["segment_ids"], append=-1) == 0, made["targets"], -1)
    return made


def run(config, num_devices, steps=20, **how):
    trainer = make_trainer(config, make_mesh(config.mesh, jax.devices()[:num_devices]))
    state, losses = trainer.init(), []
    for step in range(steps):
        state, metrics = trainer.train_step(state, trainer.put_batch(batch(step, **how)))
        losses.append(float(metrics["loss"]))
    return np.array(losses), trainer, state


@pytest.fixture(scope="module")
def one_device():
    return run(config(), 1)[0]


@pytest.mark.parametrize(
    ("mesh", "accumulate"),
    [(MeshConfig(), 1), (MeshConfig(data=2, fsdp=4), 1), (MeshConfig(), 2)],
    ids=["fsdp", "replicas", "accumulated"],
)
def test_eight_devices_equal_one(one_device, mesh, accumulate):
    losses, *_ = run(config(mesh=mesh, optim={"accumulate": accumulate}), 8)
    np.testing.assert_allclose(losses, one_device, rtol=0, atol=2e-5)
    assert one_device[-1] != pytest.approx(one_device[0], abs=1e-3)


def test_kernels_in_the_step_equal_plain_ops(monkeypatch):
    """The TPU's kernels of all ops, interpreted, on packed rows, inside the sharded step."""
    # The packages, whose names their main functions bear as well.
    scan_op, window_op = (sys.modules[f"latte_eqx.ops.{name}"] for name in ("linear_scan", "window_attention"))
    settings = config(model={"num_layers": 1})
    plain, *_ = run(settings, 2, steps=2, documents=True, seq=BLOCK)
    how = {"interpret": pltpu.InterpretParams()}
    interpreted = lambda kernels: Passes(partial(kernels.forward, **how), partial(kernels.backward, **how))
    # What is interpreted cannot be rematerialised.
    monkeypatch.setattr(jax, "checkpoint", lambda function, **_: function)
    monkeypatch.setattr(causal, "CHOSEN_PASSES", interpreted(latte_kernels))
    monkeypatch.setattr(scan_op, "CHOSEN_PASSES", interpreted(scan_kernels))
    attention = lambda **settings: window_op.choose_when_compiled(default=partial(window_op.pallas_tpu, **settings))
    monkeypatch.setattr(window_op, "automatic", lambda *arrays, **settings: attention(**settings, **how)(*arrays))
    losses, *_ = run(settings, 2, steps=2, documents=True, seq=BLOCK)
    np.testing.assert_allclose(losses, plain, rtol=0, atol=1e-5)
    assert plain[0] != plain[1]


@pytest.mark.parametrize("remat", ["full", "dots", "none"])
@pytest.mark.parametrize("documents", [False, True])
def test_loss_and_step_are_those_of_the_plain_model(remat, documents):
    """Against the whole model, plain autodiff and optax on one device: loss, norm of the gradient, and parameters."""
    settings = config(remat=remat)
    trainer = make_trainer(settings, make_mesh(settings.mesh))
    state, made = trainer.init(), batch(0, documents=documents)
    model = LanguageModel(settings.model, key=jax.random.key(settings.seed))

    def loss(model):
        logits = jax.vmap(model)(jnp.asarray(made["inputs"]), _ids(made))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(made["targets"], 0))
        return jnp.where(made["targets"] >= 0, losses, 0).sum() / float((made["targets"] >= 0).sum())

    want_loss, gradient = eqx.filter_jit(eqx.filter_value_and_grad(loss))(model)
    state, metrics = trainer.train_step(state, trainer.put_batch(made))
    np.testing.assert_allclose(metrics["loss"], want_loss, rtol=1e-6)
    np.testing.assert_allclose(metrics["gradient_norm"], optax.tree.norm(eqx.filter(gradient, eqx.is_array)), rtol=1e-5)
    # Adam's first mean is a tenth of the clipped gradient.
    clip = min(1.0, 1.0 / float(metrics["gradient_norm"]))
    mean = optax.tree_utils.tree_get(state.optimizer, "mu")
    for got, want in zip(jax.tree.leaves(mean), jax.tree.leaves(eqx.filter(gradient, eqx.is_array)), strict=True):
        np.testing.assert_allclose(got, 0.1 * clip * want, rtol=0, atol=1e-6)


def _ids(made):
    return None if "segment_ids" not in made else jnp.asarray(made["segment_ids"])


def test_each_device_holds_its_share():
    """Parameters and both moments: an eighth of the bytes, apart from arrays too small to cut."""
    _, _, state = run(config(), 8, steps=1)
    arrays = jax.tree.leaves((state.params, state.optimizer))
    held = sum(x.addressable_shards[0].data.nbytes for x in arrays)
    whole = sum(x.nbytes for x in arrays)
    small = sum(x.nbytes for x in arrays if x.sharding.is_fully_replicated)
    assert held == (whole - small) / 8 + small
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("row", PAPER_ROWS)
def test_of_the_papers_models_nearly_all_is_cut(row):
    mesh = make_mesh(MeshConfig())
    build = lambda: eqx.filter(LanguageModel(PAPER_ROWS[row], key=jax.random.key(0)), eqx.is_inexact_array)
    params = eqx.filter_eval_shape(build)
    specs = jax.tree.leaves(parameter_specs(params, mesh))
    sizes = [x.size for x in jax.tree.leaves(params)]
    held = sum(size / 8 if "fsdp" in spec else size for size, spec in zip(sizes, specs, strict=True))
    assert held < 1.001 * sum(sizes) / 8


def test_parameters_are_born_sharded():
    settings = config()
    trainer = make_trainer(settings, make_mesh(settings.mesh))
    compiled = trainer.init.lower().compile()
    whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(trainer.abstract_state))
    assert compiled.memory_analysis().output_size_in_bytes < 0.2 * whole


def test_dropout_does_not_depend_on_the_devices():
    dropped = config(model={"dropout": 0.2})
    eight, one = run(dropped, 8, steps=4)[0], run(dropped, 1, steps=4)[0]
    np.testing.assert_allclose(eight, one, rtol=0, atol=1e-5)
    assert np.abs(one - run(config(), 1, steps=4)[0]).max() > 1e-3


def test_bfloat16_crosses_devices_and_float32_comes_back(one_device):
    settings = config(compute_dtype="bfloat16")
    losses, trainer, state = run(settings, 8)
    np.testing.assert_allclose(losses, one_device, rtol=0, atol=0.02)
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.float32)}
    text = str(jax.make_jaxpr(trainer.train_step)(state, trainer.put_batch(batch(0))))
    gathered = re.findall(r":(\w+)\[[^]]*\]\S* = all_gather\[", text)
    reduced = re.findall(r":(\w+)\[[^]]*\]\S* = reduce_scatter\[", text)
    assert set(gathered) == {"bf16"}
    assert set(reduced) == {"f32"}


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_bad_steps_are_skipped(value):
    """A step that is not finite changes nothing but the counters; the next good one goes on."""
    settings = config()
    trainer = make_trainer(settings, make_mesh(settings.mesh))
    state, _ = trainer.train_step(trainer.init(), trainer.put_batch(batch(0)))
    good = jax.tree.map(np.asarray, state)
    weight = lambda state: state.params.stack.norm.weight
    bad = eqx.tree_at(weight, state, weight(state).at[0].set(value))
    before = jax.tree.map(np.asarray, bad)
    for count in (1, 2):
        bad, metrics = trainer.train_step(bad, trainer.put_batch(batch(1)))
        assert metrics["is_skipped"]
        assert int(metrics["num_skipped_in_a_row"]) == int(bad.num_skipped) == count
    assert int(bad.step) == 3
    jax.tree.map(np.testing.assert_array_equal, (bad.params, bad.optimizer), (before.params, before.optimizer))
    assert np.isfinite(bad.mean_loss)
    healed = eqx.tree_at(weight, bad, jax.device_put(weight(good), weight(bad).sharding))
    healed, metrics = trainer.train_step(healed, trainer.put_batch(batch(2)))
    assert not metrics["is_skipped"]
    assert (int(metrics["num_skipped_in_a_row"]), int(metrics["num_skipped"])) == (0, 2)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(healed))


def test_loss_spikes_can_count_as_bad():
    """Only once the running mean has seen enough steps."""
    settings = config(spike_factor=1.5)
    trainer = make_trainer(settings, make_mesh(settings.mesh))
    state = eqx.tree_at(lambda state: (state.step, state.mean_loss), trainer.init(), (jnp.array(100), jnp.array(1.0)))
    _, metrics = trainer.train_step(state, trainer.put_batch(batch(0)))
    assert metrics["is_skipped"]
    _, metrics = trainer.train_step(trainer.init(), trainer.put_batch(batch(0)))
    assert not metrics["is_skipped"]


def test_one_compilation_for_all_packed_batches():
    settings = config()
    trainer = make_trainer(settings, make_mesh(settings.mesh))
    state = trainer.init()
    state, _ = trainer.train_step(state, trainer.put_batch(batch(0, documents=True)))
    compilations = []

    def listen(event, *_, **what):
        if event == "/jax/core/compile/backend_compile_duration":
            compilations.append((event, what))

    jax.monitoring.register_event_duration_secs_listener(listen)
    for step in range(1, 200):
        state, _ = trainer.train_step(state, trainer.put_batch(batch(step, documents=True)))
        # Many steps under way at once can keep eight devices on two cores apart for longer than a collective waits.
        jax.block_until_ready(state)
    assert compilations == []


def test_validation_is_the_mean_loss():
    settings = config()
    trainer = make_trainer(settings, make_mesh(settings.mesh))
    state, made = trainer.init(), batch(3, documents=True)
    scores = trainer.measure(state, [made])
    _, metrics = trainer.train_step(state, trainer.put_batch(made))
    assert scores.num_targets == (made["targets"] >= 0).sum()
    np.testing.assert_allclose(scores.loss, metrics["loss"], rtol=1e-6)


def test_batches_that_devices_cannot_share_are_refused():
    with pytest.raises(ValueError, match=r"must divide `data.batch_size`, got data.batch_size=16.*accumulate=4"):
        make_trainer(config(optim={"accumulate": 4}), make_mesh(MeshConfig()))


@pytest.mark.parametrize("mesh", [MeshConfig(data=3), MeshConfig(data=-1, fsdp=-1), MeshConfig(fsdp=0)])
def test_impossible_meshes_are_refused(mesh):
    with pytest.raises(ValueError, match="mesh"):
        make_mesh(mesh)
