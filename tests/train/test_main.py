"""Runs from the command line: each config, stopped and resumed in every way."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from train.config import TaskConfig, load_config
from train.evaluate import Arguments as EvaluateArguments
from train.evaluate import main as evaluate
from train.main import main
from train.metrics import read_metrics
from train.restore import restore_run

ROOT = Path(__file__).parents[2]
TEXT_CONFIGS = [path for path in sorted((ROOT / "configs").glob("*.py")) if load_config(path).task == TaskConfig()]
SEQ, ROWS, STEPS = 32, 8, 60
TINY = {
    "--model.num-layers": 2,
    "--model.dim": 32,
    "--model.mlp-dim": 48,
    "--model.num-latents": 16,
    "--model.window": 8,
    "--data.seq": SEQ,
    "--data.batch-size": ROWS,
    "--checkpoint.every": 4,
    "--eval-every": 6,
    "--eval-batches": 2,
    "--log-every": 1,
    "--optim.warmup-steps": 2,
}


def arguments(workdir, *, config="owt_latte_r_swa", steps=STEPS, **more):
    options = TINY | {"--tokens": steps * SEQ * ROWS} | more
    words = [str(word) for pair in options.items() for word in pair]
    return ["--config", str(ROOT / "configs" / f"{config}.py"), "--smoke", "--workdir", str(workdir), *words]


def losses(workdir):
    return {r["step"]: r["loss"] for r in read_metrics(Path(workdir) / "metrics.jsonl") if "loss" in r}


def final_hash(workdir):
    """The digests that the last checkpoint holds of its own arrays."""
    steps = [path for path in (Path(workdir) / "checkpoints").iterdir() if path.name.isdigit()]
    last = max(steps, key=lambda path: int(path.name))
    (meta,) = [path for path in last.rglob("*") if path.is_file() and b'"digest"' in path.read_bytes()]
    return json.loads(meta.read_text())["record"]["digest"]


@pytest.mark.parametrize("path", TEXT_CONFIGS, ids=lambda path: path.stem)
def test_every_config_of_text_runs(path, tmp_path, capsys):
    """Trains, validates, writes a sample and a picture, and says how to go on."""
    workdir = tmp_path / "run"
    main(arguments(workdir, config=path.stem, steps=6))
    assert list(losses(workdir)) == list(range(1, 7))
    (valid,) = [r["valid_loss"] for r in read_metrics(workdir / "metrics.jsonl") if "valid_loss" in r]
    assert valid < 5.7
    assert (workdir / "loss.png").stat().st_size > 1000
    assert (workdir / "samples.txt").read_text().startswith("ROMEO:")
    assert json.loads((workdir / "config.json").read_text())["model"]["dim"] == 32
    output = capsys.readouterr().out
    assert f"python -m train.main --config {path}" in output
    assert "optim.peak_lr: 0.003" in output


class Process:
    """A run in a process of its own, with four devices."""

    def __init__(self, words, num_devices=4):
        code = "from train.main import main; main()"
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(num_devices),
        }
        words = [sys.executable, "-c", code, *words]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.run = subprocess.Popen(words, env=environment, **pipes)

    def wait_for_checkpoint(self, workdir):
        while not any(path.name.isdigit() for path in (Path(workdir) / "checkpoints").glob("*")):
            assert self.run.poll() is None, self.run.communicate()[0]
            time.sleep(0.02)

    def finish(self):
        output = self.run.communicate(timeout=300)[0]
        return self.run.returncode, output


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("whole") / "run"
    code, output = Process(arguments(workdir)).finish()
    assert code == 0, output
    return workdir


def test_killed_and_resumed_is_bit_for_bit_the_same(uninterrupted, tmp_path):
    workdir = tmp_path / "run"
    killed = Process(arguments(workdir))
    killed.wait_for_checkpoint(workdir)
    killed.run.kill()
    killed.finish()
    assert len(losses(workdir)) < STEPS
    code, output = Process(arguments(workdir)).finish()
    assert code == 0, output
    assert "goes on from step" in output
    assert losses(workdir) == losses(uninterrupted)
    assert final_hash(workdir) == final_hash(uninterrupted)


def test_sigterm_saves_and_exits_with_0(uninterrupted, tmp_path):
    workdir = tmp_path / "run"
    asked = Process(arguments(workdir))
    asked.wait_for_checkpoint(workdir)
    asked.run.send_signal(signal.SIGTERM)
    code, output = asked.finish()
    assert code == 0, output
    assert "asked to stop: saved step" in output
    done = max(losses(workdir))
    assert done < STEPS
    code, output = Process(arguments(workdir)).finish()
    assert code == 0, output
    assert f"goes on from step {done}" in output
    assert losses(workdir) == losses(uninterrupted)
    assert final_hash(workdir) == final_hash(uninterrupted)


def test_resumed_on_other_devices(uninterrupted, tmp_path):
    """The same batches, and losses that differ by roundings."""
    workdir = tmp_path / "run"
    killed = Process(arguments(workdir))
    killed.wait_for_checkpoint(workdir)
    killed.run.kill()
    killed.finish()
    code, output = Process(arguments(workdir), num_devices=2).finish()
    assert code == 0, output
    assert losses(workdir) == pytest.approx(losses(uninterrupted), rel=0, abs=1e-5)


def test_a_fresh_run_does_not_overwrite(uninterrupted):
    code, output = Process([*arguments(uninterrupted), "--fresh"]).finish()
    assert code != 0
    assert "A fresh run must have a work directory without a run" in output


def test_bad_steps_lead_back_once_and_then_to_a_reproducer(tmp_path, capsys):
    """A learning rate that throws the weights out of range: the second time the run stops and says where to look."""
    workdir = tmp_path / "run"
    wild = {"--optim.peak-lr": 1e30, "--max-skips": 2, "--checkpoint.every": 1, "--optim.warmup-steps": 3}
    with pytest.raises(RuntimeError, match=r"2 steps in a row up to step .* after going back once"):
        main(arguments(workdir, steps=12, **wild))
    output = capsys.readouterr().out
    assert "going back to step" in output
    records = list(read_metrics(workdir / "metrics.jsonl"))
    assert all(r["is_skipped"] for r in records if r["loss"] is None)
    assert "NaN" not in (workdir / "metrics.jsonl").read_text()
    evaluate(EvaluateArguments(workdir=workdir, batch=workdir / "bad_batch_0.npz"))
    assert capsys.readouterr().out.count("nats per token") == ROWS


def test_changed_data_are_refused(tmp_path):
    workdir = tmp_path / "run"
    main(arguments(workdir, steps=4))
    (workdir / "data" / "manifest.json").unlink()
    from data.prepare import prepare_text

    other = tmp_path / "other.txt"
    other.write_text("Another text. " * 4000)
    prepare_text([other], workdir / "data", overwrite=True, quiet=True)
    with pytest.raises(RuntimeError, match="The run began with the data"):
        main(arguments(workdir, steps=8))


def test_flipped_byte_in_the_data_is_refused(tmp_path):
    workdir = tmp_path / "run"
    main(arguments(workdir, steps=4))
    tokens = workdir / "data" / "train.tokens"
    content = bytearray(tokens.read_bytes())
    content[1000] ^= 1
    tokens.write_bytes(content)
    with pytest.raises(ValueError, match=r"train\.tokens"):
        main(arguments(workdir, steps=4))


def test_a_model_that_does_not_fit_leaves_the_run_as_it_is(tmp_path):
    """Refused with the leaves that differ; the run can still be looked at and go on."""
    workdir = tmp_path / "run"
    main(arguments(workdir, steps=4))
    before = (workdir / "config.json").read_bytes()
    with pytest.raises(RuntimeError, match=r"params\.embedding"):
        main(arguments(workdir, steps=8, **{"--model.dim": 64}))
    assert (workdir / "config.json").read_bytes() == before
    assert restore_run(workdir).step == 4
    main(arguments(workdir, steps=6))
    assert list(losses(workdir)) == list(range(1, 7))


def test_a_changed_setting_is_named(tmp_path, capsys):
    workdir = tmp_path / "run"
    main(arguments(workdir, steps=4))
    capsys.readouterr()
    main(arguments(workdir, steps=6, **{"--optim.peak-lr": 1e-3}))
    output = capsys.readouterr().out
    assert "differs from the last time: optim.peak_lr: 0.003 -> 0.001" in output
    assert "differs from the last time: tokens: 1024 -> 1536" in output
    assert output.count("differs") == 2
    assert "goes on from step 4 of 6" in output
    assert list(losses(workdir)) == list(range(1, 7))


def test_profile_and_tensorboard(tmp_path):
    """A trace of a few steps for xprof, and the scalars for TensorBoard."""
    workdir = tmp_path / "run"
    main([*arguments(workdir, steps=13), "--profile", "--tensorboard"])
    assert any(path.suffix == ".pb" for path in (workdir / "profile").rglob("*"))
    (events,) = (workdir / "tensorboard").glob("events.*")
    assert b"gradient_norm" in events.read_bytes()
