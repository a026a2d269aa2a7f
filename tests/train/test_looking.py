"""Looking at a run that is over: evaluate, generate, plot, and the files it left."""

import dataclasses
import json
import math
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from data.loader import open_rows
from latte_eqx import PAPER_ROWS, LanguageModel
from tests.train.test_main import ROWS, SEQ, arguments
from train import evaluate, generate, plot
from train.config import Config, from_dict
from train.console import plain_errors
from train.flops import forward_flops_per_token
from train.main import main
from train.metrics import MetricsLog, read_metrics
from train.restore import restore_run

STORIES = Path(__file__).parents[2] / "data" / "models" / "stories260K" / "stories260K.bin"


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    path = tmp_path_factory.mktemp("looked at") / "run"
    main(arguments(path, steps=8))
    return path


def test_evaluate_is_the_mean_over_the_whole_stream(workdir, capsys):
    """Against the plain model, row by row: every token of the validation text but the cut-off end, once."""
    evaluate.main(evaluate.Arguments(workdir=workdir))
    got = json.loads(capsys.readouterr().out.splitlines()[-1])
    run = restore_run(workdir)
    rows = open_rows(run.config.data.directory, "valid", seq=SEQ, pack="concat")
    elements = [rows[index] for index in range(len(rows))]
    inputs, targets = (jnp.asarray(np.stack([element[name] for element in elements])) for name in ("inputs", "targets"))
    losses = jax.lax.map(
        lambda row: optax.softmax_cross_entropy_with_integer_labels(
            run.trainer.language_model(run.state)(row[0]), row[1]
        ).sum(),
        (inputs, targets),
        batch_size=64,
    )
    want = float(losses.sum()) / targets.size
    assert got["tokens"] == targets.size > 100_000
    assert got["loss"] == pytest.approx(want, rel=1e-5)
    assert got["perplexity"] == pytest.approx(math.exp(want), rel=1e-4)
    assert got["step"] == 8


def test_generate_continues_the_prompt(workdir, capsys):
    make = lambda **more: generate.main(
        generate.Arguments(workdir=workdir, prompt="KING", max_new_tokens=20, temperature=0.0, **more)
    )
    make()
    text = capsys.readouterr().out
    assert text.startswith("\nKING")
    assert len(text.strip()) > len("KING")
    make()
    assert capsys.readouterr().out == text
    make(step=4)
    assert capsys.readouterr().out.startswith("\nKING")


def test_a_pretrained_model_continues_a_file(tmp_path, capsys):
    path = tmp_path / "prompt.txt"
    path.write_text("Once upon a time, there was a little girl")
    arguments = dict(model=STORIES, max_new_tokens=12, temperature=0.0)
    generate.main(generate.Arguments(**arguments, prompt_file=path))
    output = capsys.readouterr()
    assert output.out.startswith("\nOnce upon a time, there was a little girl named Lily. She loved to play")
    assert "13 tokens read" in output.err
    assert "tokens a second, 0.1 MiB of state" in output.err
    generate.main(generate.Arguments(**arguments))
    assert len(capsys.readouterr().out) > 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "Either `--workdir` or `--model` must be given"),
        ({"workdir": Path("x"), "model": STORIES}, "Either `--workdir` or `--model` must be given"),
        ({"model": STORIES, "prompt": "a", "prompt_file": Path("x")}, "Only one of `--prompt` and `--prompt-file`"),
        ({"model": STORIES, "step": 3}, "`--step` must come with `--workdir`"),
    ],
)
def test_what_writes_must_be_clear(arguments, message):
    with pytest.raises(ValueError, match=message):
        generate.main(generate.Arguments(**arguments))


def test_without_a_stream_the_same_is_written(capsys):
    arguments = dict(model=STORIES, prompt="Once upon a time", max_new_tokens=12, temperature=0.0)
    texts = []
    for stream in (True, False):
        generate.main(generate.Arguments(**arguments, stream=stream))
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_plots_are_drawn(workdir, capsys):
    plot.main(plot.Arguments(workdir=workdir))
    output = capsys.readouterr().out
    assert "5 states for each of 4 heads" in output
    assert output.count("\n| 1 |") == 1
    assert (workdir / "latents.md").read_text() in output
    for name in ("loss.png", "latents.png"):
        assert (workdir / name).stat().st_size > 5000


@pytest.mark.parametrize("row", ["latte", "latte_r_swa"])
def test_latent_shares_are_those_the_model_uses(row):
    """They sum to one, and with all values alike nothing else of the layer matters; layer inputs chain up."""
    small = dataclasses.replace(PAPER_ROWS[row], vocab_size=11, num_layers=3, dim=16, mlp_dim=24, num_latents=16)
    small = dataclasses.replace(small, num_heads=4)
    model = LanguageModel(small, key=jax.random.key(0))
    tokens = jnp.arange(10) % 11
    shares = plot.latent_shares(model, tokens)
    assert shares.shape == (3, 4, 10, 4 + (row == "latte_r_swa"))
    np.testing.assert_allclose(shares.sum(axis=-1), 1, rtol=1e-5)
    sources = plot.latent_sources(model, tokens)
    assert sources.shape == (3, 4, 4, 10)
    np.testing.assert_allclose(sources.sum(axis=-1), 1, rtol=1e-5)
    inputs = model.layer_inputs(tokens)
    last = jax.tree.map(lambda x: x[-1] if eqx.is_array(x) else x, model.stack.blocks)
    got = jax.vmap(model.stack.norm)(last(inputs[-1]))
    np.testing.assert_allclose(got, model.features(tokens), rtol=1e-5, atol=1e-6)


def test_latent_numbers():
    """One head spreads evenly, one always picks the window; all latents average all six tokens."""
    even, window = jnp.full((6, 4), 0.25), jnp.tile(jnp.array([1.0, 0, 0, 0])[None], (6, 1))
    sources = jnp.full((1, 2, 3, 6), 1 / 6)
    (numbers,) = plot.latent_numbers(jnp.stack([even, window])[None], sources, has_window=True)
    want = {"used_states": 2.5, "states_per_token": 2.5, "dead": 3, "tokens_per_latent": 6, "window_share": 0.625}
    assert numbers == pytest.approx(want, rel=1e-5)


def test_metrics_say_what_happened(workdir):
    records = [record for record in read_metrics(workdir / "metrics.jsonl") if "loss" in record]
    last = records[-1]
    assert last["tokens"] == 8 * ROWS * SEQ
    assert last["num_skipped"] == 0
    assert last["compile_seconds"] > 0
    assert 0 < last["goodput"] < 1
    assert last["memory_bytes"] > 1e6
    flops = 3 * forward_flops_per_token(restore_run(workdir).config.model, SEQ)
    assert last["model_flops_per_second"] == pytest.approx(flops * last["tokens_per_second"])


def test_a_cut_off_or_later_record_is_taken_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n{"step": 3, "lo')
    log = MetricsLog(path, step=1)
    log.write(2, loss=2.5)
    log.close()
    assert list(read_metrics(path)) == [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.5}]


@pytest.mark.parametrize(
    ("row", "mixing"),
    [
        ("latte", 4 * 128 * 96),
        ("latte_r_swa", 4 * 128 * 96 + 4 * 768 * (129 - 128 * 129 / 2 / 1024)),
        ("transformer_pp", 4 * 768 * 512.5),
    ],
)
def test_flops_of_the_papers_models(row, mixing):
    """Twice the entries of all matrices, and what the mixer adds, written out by hand."""
    config = PAPER_ROWS[row]
    params = eqx.filter_eval_shape(lambda: LanguageModel(config, key=jax.random.key(0)))
    count = lambda tree: sum(x.size for x in jax.tree.leaves(eqx.filter(tree, lambda x: hasattr(x, "size"))))
    vectors = {
        "latte": 12 * (4 * 768 + 3072 + 768) + 2 * 768,
        "latte_r_swa": 12 * 5 * 768 + 768,
        "transformer_pp": 25 * 768,
    }
    want = 2 * (count(params) - vectors[row]) + 12 * mixing
    assert forward_flops_per_token(config, 1024) == pytest.approx(want, rel=1e-9)


def test_a_step_that_was_not_saved_is_refused(workdir):
    with pytest.raises(ValueError, match=r"`step` must be one of \[4, 8\], .* got 7"):
        restore_run(workdir, step=7)


def test_looking_at_nothing_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="`workdir` must hold a run"):
        restore_run(tmp_path)


def test_errors_that_say_what_must_hold_come_without_a_traceback(tmp_path):
    with pytest.raises(SystemExit, match="`workdir` must hold a run"), plain_errors():
        restore_run(tmp_path)
    # What nobody raised on purpose keeps its traceback.
    with pytest.raises(KeyError), plain_errors():
        from_dict(Config, {"no such field": 1})
    with pytest.raises(TypeError), plain_errors():
        jnp.zeros(2) @ jnp.zeros(3)
