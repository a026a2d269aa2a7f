"""Does a run survive `kill -9` at any moment?

    python benchmarks/chaos.py [--kills 200] [--seed 0]

A small run is started again and again and killed at random moments: while it starts, computes, writes a checkpoint in
the background, deletes an old one, reads ahead. When it has come to its end, the loss of every step and every bit of
the final state must be those of a run that nobody disturbed. Then the next one begins, until there were enough kills.
A run is killed one to eight times.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import tyro
from harness import print_table

from train.metrics import read_metrics

ROOT = Path(__file__).parents[1]
STEPS, SEQ, ROWS = 120, 64, 8
# A checkpoint every second step: one is being written, or deleted, nearly always.
OPTIONS = (
    f"--smoke --tokens {STEPS * SEQ * ROWS} --data.seq {SEQ} --data.batch-size {ROWS} --checkpoint.every 2 "
    "--eval-every 30 --eval-batches 2 --model.num-layers 2 --model.dim 64 --model.mlp-dim 128 --model.num-latents 32"
).split()


@dataclass(frozen=True)
class Arguments:
    """Kill a run at random moments, and see whether it ends as if nothing had happened."""

    kills: int = 200
    """How often to kill."""
    seed: int = 0
    """Decides the moments."""
    longest_life: float = 12.0
    """Most seconds before a kill."""


def start(workdir: Path, log: Path) -> subprocess.Popen:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",
        "JAX_COMPILATION_CACHE_DIR": str(workdir.parent / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    words = ["--config", str(ROOT / "configs" / "owt_latte_r_swa.py"), "--workdir", str(workdir), *OPTIONS]
    with log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "train.main", *words], env=environment, cwd=ROOT, stdout=output, stderr=output
        )


def moment(workdir: Path) -> str:
    """Say what the run was doing."""
    names = [path.name for path in (workdir / "checkpoints").glob("*")]
    if not (workdir / "metrics.jsonl").exists():
        return "starting for the first time"
    if any("tmp" in name for name in names):
        return "writing a checkpoint"
    if sum(name.isdigit() for name in names) > 3:
        return "deleting a checkpoint"
    return "computing, or starting again"


def outcome(workdir: Path) -> tuple[dict[int, float], dict[str, int]]:
    """Return the losses, by step, and the digests in the last checkpoint."""
    losses = {record["step"]: record["loss"] for record in read_metrics(workdir / "metrics.jsonl") if "loss" in record}
    last = workdir / "checkpoints" / str(STEPS)
    (record,) = [path for path in last.rglob("*") if path.is_file() and b'"digest"' in path.read_bytes()]
    return losses, json.loads(record.read_text())["record"]["digest"]


def finish(run: subprocess.Popen, log: Path) -> None:
    if run.wait() != 0:
        sys.exit(f"A run that should go on did not:\n{log.read_text()[-4000:]}")


def main(arguments: Arguments) -> None:
    rng = random.Random(arguments.seed)
    moments: Counter[str] = Counter()
    num_runs = num_kills = 0
    with tempfile.TemporaryDirectory() as directory:
        base, log = Path(directory), Path(directory) / "log.txt"
        finish(start(base / "undisturbed", log), log)
        want = outcome(base / "undisturbed")
        assert list(want[0]) == list(range(1, STEPS + 1))
        while num_kills < arguments.kills:
            workdir = base / f"run{num_runs}"
            # Few enough kills for a run that many runs come to their end.
            lives = min(rng.randint(1, 8), arguments.kills - num_kills)
            for _ in range(lives):
                run = start(workdir, log)
                # Half of the lives end early, among imports, restoring and the first checkpoints.
                life = arguments.longest_life * rng.random() ** rng.choice([1, 2])
                deadline = time.monotonic() + life
                while time.monotonic() < deadline and run.poll() is None:
                    time.sleep(0.01)
                if run.poll() is not None:
                    finish(run, log)
                    break
                run.kill()
                run.wait()
                num_kills += 1
                moments[moment(workdir)] += 1
                print(f"kill {num_kills} of {arguments.kills}, after {life:.2f} s", flush=True)
            finish(start(workdir, log), log)
            if outcome(workdir) != want:
                sys.exit(f"Run {num_runs} did not end as the undisturbed one did.")
            num_runs += 1
            print(f"run {num_runs} ended bit for bit as the undisturbed one", flush=True)
    rows = [(name, str(count)) for name, count in sorted(moments.items())]
    print_table(f"{num_kills} kills, {num_runs} runs, no difference", ("killed while", "times"), rows)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
