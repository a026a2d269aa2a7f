"""What does the loop cost beyond the compiled step?

    python benchmarks/loop.py [--steps 45] [--repeats 6]

The smoke run of Latte-R-SWA++ without validation, checkpoints and start-up, against the same compiled step called in a
bare Python loop on one batch. Contestants take turns; the best twenty steps of each count.
"""

import contextlib
import dataclasses
import io
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import tyro
from harness import machine

from data import CORPUS
from data.loader import make_batches, open_rows
from data.prepare import prepare_text
from train.config import Config, load_config, smoke
from train.fsdp import make_mesh
from train.loop import train
from train.step import make_trainer
from train.workdir import open_workdir

# Steps over which a time is taken.
STRETCH = 20


@dataclass(frozen=True)
class Arguments:
    """Compare the training loop with bare calls of the compiled step."""

    steps: int = 45
    """Steps of each turn."""
    repeats: int = 6
    """Turns of each."""


class Stopwatch:
    """A sink of metrics that notes when each step was over; its time is that of the best stretch of steps."""

    def __init__(self):
        self.moments: list[float] = []

    def write(self, step, values):
        self.moments.append(time.perf_counter())

    def close(self):
        """Nothing is open."""

    def seconds(self) -> float:
        stretches = zip(self.moments, self.moments[STRETCH:], strict=False)
        return min(end - start for start, end in stretches) / STRETCH


def loop_seconds(config: Config, directory: Path) -> float:
    watch: Any = Stopwatch()
    with open_workdir(directory) as workdir, contextlib.redirect_stdout(io.StringIO()):
        train(config, workdir, sinks=[watch])
    return watch.seconds()


def bare_seconds(config: Config) -> float:
    assert config.data.directory is not None
    trainer = make_trainer(config, make_mesh(config.mesh))
    rows = open_rows(config.data.directory, "train", seq=config.data.seq, pack=config.data.pack)
    batches = make_batches(rows, batch_size=config.data.batch_size, seed=0)
    batch, state = trainer.put_batch(next(batches)), trainer.init()
    batches.close()
    watch = Stopwatch()
    for step in range(config.steps):
        state, _ = trainer.train_step(state, batch)
        jax.block_until_ready(state)
        watch.write(step, {})
    return watch.seconds()


def main(arguments: Arguments) -> None:
    print(machine())
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        jax.config.update("jax_compilation_cache_dir", str(base / "cache"))
        prepare_text([CORPUS], base / "data", quiet=True)
        config = smoke(load_config(Path(__file__).parents[1] / "configs/owt_latte_r_swa.py"), directory=base / "data")
        tokens = arguments.steps * config.data.batch_size * config.data.seq
        never = dict(eval_every=10**6, checkpoint=dataclasses.replace(config.checkpoint, every=10**6))
        config = dataclasses.replace(config, tokens=tokens, **never)
        turns = [(bare_seconds(config), loop_seconds(config, base / f"run{turn}")) for turn in range(arguments.repeats)]
    bare, loop = (min(column) for column in zip(*turns, strict=True))
    print(f"bare step {1e3 * bare:.1f} ms, in the loop {1e3 * loop:.1f} ms: overhead {100 * (loop / bare - 1):.1f} %")


if __name__ == "__main__":
    main(tyro.cli(Arguments))
