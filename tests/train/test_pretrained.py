"""Training of a pretrained model: its own weights stay, and latents learn."""

import dataclasses
import json
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from data.loader import open_rows
from data.prepare import prepare_text
from data.tokenizer import load_tokenizer
from latte_eqx import ModelConfig
from latte_eqx.pretrained import is_new, load, save, to_macchiato
from train import extrapolate, generate, write_texts
from train.config import Config, DataConfig, MeshConfig, OptimConfig, PretrainedConfig
from train.fsdp import make_mesh
from train.main import main
from train.restore import restore_run
from train.step import make_trainer

STORIES = Path(__file__).parents[2] / "data" / "models" / "stories260K" / "stories260K.bin"
TEXT = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her dog. "
SIZES = dict(vocab_size=512, num_layers=5, dim=64, num_heads=8, num_kv_heads=4, mlp_dim=172, norm_eps=1e-5)
MODEL = ModelConfig(mixer="macchiato", **SIZES, num_latents=32, window=8, window_bias=0.0)
ROWS, SEQ = 8, 64


def config(**changes):
    optim = OptimConfig(peak_lr=1e-2, warmup_steps=2, clip_norm=100.0)
    values = dict(model=MODEL, pretrained=PretrainedConfig(path=STORIES), compute_dtype="float32") | changes
    return Config(data=DataConfig(seq=SEQ, batch_size=ROWS), optim=optim, tokens=10 * ROWS * SEQ, **values)


@pytest.fixture(scope="module")
def stories():
    return load(STORIES)


@pytest.fixture(scope="module")
def batch(stories):
    tokens = np.array(stories.tokenizer.encode(8 * TEXT).ids, np.int32)
    rows = np.stack([tokens[start : start + SEQ + 1] for start in range(ROWS)])
    return {"inputs": rows[:, :-1], "targets": rows[:, 1:], "index": np.arange(ROWS, dtype=np.uint32)}


def run(settings, batch, num_devices, steps=6):
    trainer = make_trainer(settings, make_mesh(settings.mesh, jax.devices()[:num_devices]))
    state, losses = trainer.init(), []
    first = jax.device_get(state)
    for _ in range(steps):
        state, metrics = trainer.train_step(state, trainer.put_batch(batch))
        losses.append(float(metrics["loss"]))
    return np.array(losses), trainer, first, state


def test_frozen_weights_stay_and_latents_learn(stories, batch):
    losses, trainer, first, state = run(config(), batch, 8)
    assert losses[-1] < losses[0] - 0.1
    (before, old), (after, new) = (eqx.partition(jax.device_get(x.params), is_new(x.params)) for x in (first, state))
    assert jax.tree.all(jax.tree.map(np.array_equal, old, new))
    np.testing.assert_array_equal(new.embedding, stories.model.embedding)
    count = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
    assert count(new) == 260_032
    # Two moments for each weight that is trained, a counter, and nothing for the others.
    assert count(state.optimizer) == pytest.approx(2 * count(after), abs=4)
    assert jax.tree.all(jax.tree.map(lambda x, y: np.any(x != y), before, after))
    # Large matrices are cut over all devices.
    table = state.params.embedding
    assert table.addressable_shards[0].data.size == table.size // 8
    model = trainer.language_model(state)
    logits = jax.vmap(model)(jnp.asarray(batch["inputs"]))
    assert logits.shape == (ROWS, SEQ, 512)


def test_eight_devices_equal_one(batch):
    one, *_ = run(config(), batch, 1)
    for mesh in (MeshConfig(), MeshConfig(data=2, fsdp=4)):
        np.testing.assert_allclose(run(config(mesh=mesh), batch, 8)[0], one, rtol=0, atol=2e-5)


def test_frozen_weights_are_kept_in_the_type_of_the_products(batch):
    losses, _, _, state = run(config(compute_dtype="bfloat16"), batch, 2, steps=2)
    assert np.isfinite(losses).all()
    trained, frozen = eqx.partition(state.params, is_new(state.params))
    assert {x.dtype for x in jax.tree.leaves(frozen)} == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in jax.tree.leaves(trained)} == {jnp.dtype(jnp.float32)}


def test_the_config_must_fit_the_model():
    for changes, message in (
        (dict(dim=128), r"`model` must be the pretrained model, with its latents if any: it has .* in .*stories260K"),
        (dict(num_layers=4), "`model` must be the pretrained model"),
    ):
        settings = config(model=dataclasses.replace(MODEL, **changes))
        with pytest.raises(ValueError, match=message):
            make_trainer(settings, make_mesh(settings.mesh)).init()
    with pytest.raises(ValueError, match=r"become a 'macchiato' with a `model\.window_bias`, got .*'swa'"):
        config(model=ModelConfig(mixer="swa", **SIZES))


def test_from_the_command_line(stories, tmp_path, capsys):
    """Text is prepared with the model's tokenizer, latents are trained, resumed, and the result writes."""
    save(tmp_path / "model", stories)
    (tmp_path / "stories.txt").write_text(200 * TEXT)
    tokenizer = tmp_path / "model" / "tokenizer.json"
    prepare_text([tmp_path / "stories.txt"], tmp_path / "prepared", tokenizer=str(tokenizer), quiet=True)
    # That of the next story ends a story.
    assert load_tokenizer(str(tokenizer)).end_of_text == stories.tokenizer.token_to_id("<s>") == 1
    file = Path(__file__).parents[2] / "configs" / "stories_macchiato.py"
    sizes = [
        f"--model.{name.replace('_', '-')}={value}" for name, value in (SIZES | dict(num_latents=32, window=8)).items()
    ]
    arguments = ["--config", str(file), "--pretrained.path", str(tmp_path / "model"), *sizes]
    arguments += ["--data.directory", str(tmp_path / "prepared"), "--data.seq", "64", "--data.batch-size", "8"]
    arguments += ["--workdir", str(tmp_path / "run"), "--eval-every", "4", "--checkpoint.every", "2"]
    main([*arguments, "--tokens", str(4 * 8 * 64)])
    assert "Once upon a time" in capsys.readouterr().out
    generate.main(generate.Arguments(workdir=tmp_path / "run", max_new_tokens=8, temperature=0.0))
    assert "Once upon a time" in capsys.readouterr().out
    np.testing.assert_array_equal(restore_run(tmp_path / "run").state.params.embedding, stories.model.embedding)

    # What it began from is measured beside it: in the window alone, and as it was.
    sizes = dict(factors=(1, 2), trained=64)
    extrapolate.main(extrapolate.Arguments(workdirs=(tmp_path / "run",), out=tmp_path / "longer", **sizes))
    records = json.loads((tmp_path / "longer" / "results.json").read_text())
    found = {(record["model"], record["seq"]): record for record in records}
    names = "run", "run: the window alone", "run: the transformer"
    assert set(found) == {(name, seq) for name in names for seq in (64, 128)}
    assert [found[name, 64]["trained"] for name in names] == [64, 512, 512]
    rows = open_rows(tmp_path / "prepared", "valid", seq=128, pack="concat")
    windowed = to_macchiato(stories.model, window=8, num_latents=32, p0=1)
    for name, model in (names[1], windowed), (names[2], stories.model):
        inputs, targets = (jnp.stack([rows[index][key] for index in range(len(rows))]) for key in ("inputs", "targets"))
        losses = optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(inputs), jnp.maximum(targets, 0))
        want = losses.mean(where=targets >= 0)
        assert found[name, 128]["loss"] == pytest.approx(float(want), rel=1e-5)


def test_a_transformer_can_be_trained_on(stories, batch):
    transformer = config(model=stories.config)
    losses, _, first, state = run(transformer, batch, 8)
    logits = jax.vmap(stories.model)(jnp.asarray(batch["inputs"]))
    want = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()
    assert losses[0] == pytest.approx(float(want), rel=1e-5)
    assert losses[-1] < losses[0] - 0.1
    assert jax.tree.all(jax.tree.map(lambda x, y: np.any(x != y), first.params, jax.device_get(state.params)))


def test_texts_of_its_own(stories, tmp_path, capsys):
    """As many as were asked for, in batches, the same again after an interruption, and such as can be prepared."""
    make = lambda out, **more: write_texts.Arguments(
        **dict(model=STORIES, out=tmp_path / out, num_texts=7, max_tokens=24, batch_size=3) | more
    )
    write_texts.main(make("texts.jsonl"))
    lines = (tmp_path / "texts.jsonl").read_text().splitlines(keepends=True)
    texts = [json.loads(line)["text"] for line in lines]
    assert len(set(texts)) == 7
    assert all(2 <= len(stories.tokenizer.encode(text).ids) <= 26 for text in texts)
    (tmp_path / "texts.jsonl").write_text("".join(lines[:4]) + lines[4][:9])
    write_texts.main(make("texts.jsonl"))
    assert (tmp_path / "texts.jsonl").read_text() == "".join(lines)
    with pytest.raises(ValueError, match="must be of the same arguments"):
        write_texts.main(make("texts.jsonl", seed=1))
    with pytest.raises(FileNotFoundError, match="A model must be"):
        write_texts.main(make("others.jsonl", model=tmp_path / "nothing"))
    assert not list(tmp_path.glob("others*"))
    manifest = prepare_text([tmp_path / "texts.jsonl"], tmp_path / "prepared", valid_fraction=0.0, quiet=True)
    assert manifest.vocab_size == 257
    for wrong in ({"num_texts": 0}, {"batch_size": 0}, {"max_tokens": 0}, {"out": "texts.txt"}):
        with pytest.raises(ValueError, match=f"`{next(iter(wrong))}` must"):
            make(**{"out": "texts.jsonl"} | wrong)
