import json
from pathlib import Path

import numpy as np
import pytest

from data.mqar import prepare_mqar
from data.prepared import Examples
from data.preparing import Example, prepare_examples
from data.tokenizer import Vocabulary
from train import evaluate, sweep
from train.main import main

MQAR = Path(__file__).parents[2] / "configs" / "mqar.py"
TINY = [
    *("--data.seq", "32", "--model.max-length", "32", "--data.batch-size", "8", "--tokens", "2048"),
    *("--eval-every", "4", "--checkpoint.every", "4", "--model.dim", "16", "--model.num-latents", "16"),
]


@pytest.fixture(scope="module")
def recall(tmp_path_factory):
    path = tmp_path_factory.mktemp("mqar") / "data"
    sizes = dict(num_train=64, num_valid=16, num_test=24)
    prepare_mqar(path, seq=32, pairs=4, num_tokens=64, **sizes, quiet=True)
    return path


def test_a_sweep_compares_variants_and_goes_on(recall, tmp_path, monkeypatch, capsys):
    """Two variants from two seeds, through the commands themselves; the second time nothing is trained."""
    arguments = ["--config", str(MQAR), "--variants", "latte_r_swa_cpu", "swa_cpu", "--seeds", "0", "1"]
    arguments += ["--out", str(tmp_path / "out"), "--data.directory", str(recall), *TINY]
    sweep.main(arguments)
    table = (tmp_path / "out" / "results.md").read_text()
    assert "| variant | accuracy, 0 to 8 | accuracy, from 9 |" in table
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [len(results[name]) for name in ("latte_r_swa_cpu", "swa_cpu")] == [2, 2]
    # Each of 24 rows asks 4 times; the window of 8 tells near from far.
    groups = results["swa_cpu"][0]["groups"]
    assert sum(group["targets"] for group in groups) == 24 * 4
    assert all(group["targets"] > 0 for group in groups)
    assert (tmp_path / "out" / "results.png").stat().st_size > 1000
    monkeypatch.setattr(sweep.subprocess, "run", None)
    sweep.main(arguments)
    assert table.splitlines()[-1] in capsys.readouterr().out
    with pytest.raises(ValueError, match="must be of the same options, got others"):
        sweep.main([*arguments, "--optim.peak-lr", "1e-3"])


def test_a_run_that_fails_is_told(tmp_path):
    arguments = ["--config", str(MQAR), "--variants", "swa_cpu", "--seeds", "0", "--out", str(tmp_path)]
    with pytest.raises(sweep.RunFailed, match=r"(?s)train.main.*`data.directory` must name prepared data, got none"):
        sweep.main(arguments)


def test_summaries_are_means_and_half_ranges():
    runs = [{"accuracy": 0.5, "examples": 2}, {"accuracy": 0.8, "examples": 2}]
    assert sweep.summarise({"a": runs})["a"]["accuracy"] == pytest.approx((0.65, 0.15))
    assert sweep.metrics_of({"perplexity": 2.0, "bits_per_token": 1.0, "accuracy": 0.1}) == {"bits per token": 1.0}


def test_the_best_checkpoint_is_chosen_by_validation_and_on_the_split_itself():
    measured = [{"step": 4, "accuracy": 0.9}, {"step": 8, "accuracy": 0.5}, {"step": 12, "accuracy": 0.7}]
    metrics = [{"step": 4, "valid_loss": 2.0}, {"step": 5, "loss": 0.1}, {"step": 8, "valid_loss": 1.0}]
    chosen = sweep.select_best(measured, metrics)
    assert chosen == {"step": 8, "accuracy": 0.5, "best_accuracy": 0.9}
    assert sweep.metrics_of(chosen) == {"accuracy": 0.5, "accuracy, chosen on it": 0.9}
    with pytest.raises(ValueError, match="must have checkpoints that were validated"):
        sweep.select_best(measured, metrics[1:2])


def test_data_must_be_those_of_the_task(recall, tmp_path):
    lra = MQAR.with_name("lra.py")
    with pytest.raises(
        SystemExit, match=r"`task.kind` must be 'next_token' for the data in .*, got task.kind='classify'"
    ):
        main(["--config", f"{lra}:listops_latte_cpu", "--data.directory", str(recall), "--workdir", str(tmp_path)])


def test_classes_are_learned_from_files(tmp_path, capsys):
    """A task that is easy to learn, through the whole of training and evaluation: which of two tokens there is more."""
    rng = np.random.default_rng(0)

    def examples():
        for split, size in (("train", 512), ("valid", 64), ("test", 64)):
            for _ in range(size):
                tokens = rng.integers(0, 2, 2 * rng.integers(3, 8) + 1).astype(np.uint16)
                yield Example(split, [tokens], int(tokens.mean() > 0.5))

    prepare_examples(
        examples(),
        tmp_path / "data",
        vocabulary=Vocabulary("coins", 3),
        kind=Examples(num_classes=2),
        splits=("train", "valid", "test"),
        source={},
        total=640,
        overwrite=False,
        quiet=True,
    )
    lra = MQAR.with_name("lra.py")
    options = "--data.seq 16 --data.batch-size 32 --tokens 40960 --eval-every 40 --checkpoint.every 40 --model.dim 16"
    options += " --model.mlp-dim 32 --model.num-latents 8 --model.window 4 --task.num-classes 2 --optim.peak-lr 1e-2"
    options += " --optim.warmup-steps 5 --model.num-layers 1"
    where = ["--data.directory", str(tmp_path / "data"), "--workdir", str(tmp_path / "run")]
    main(["--config", f"{lra}:listops_latte_r_swa_cpu", *where, *options.split()])
    assert "accuracy" in capsys.readouterr().out
    evaluate.main(evaluate.Arguments(workdir=tmp_path / "run", split="test"))
    measured = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert measured["examples"] == 64
    assert measured["accuracy"] > 0.9
    evaluate.main(evaluate.Arguments(workdir=tmp_path / "run", split="test", every_checkpoint=True))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [line["step"] for line in lines] == [40, 80]
    assert lines[-1] == measured
    # Rows of fewer tokens say less, and rows of more are the same again: all of an example is in 16.
    evaluate.main(evaluate.Arguments(workdir=tmp_path / "run", split="test", seq=3))
    evaluate.main(evaluate.Arguments(workdir=tmp_path / "run", split="test", seq=40))
    short, long = (json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{"))
    assert short["accuracy"] < measured["accuracy"] == long["accuracy"]
