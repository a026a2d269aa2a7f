"""What does the loop cost beyond the compiled step?

    python benchmarks/loop.py [--steps 150] [--repeats 3]

The smoke run of Latte-R-SWA++ without validation, checkpoints and start-up, against the same compiled step called in a
bare Python loop on one batch. Contestants take turns; the best of each counts.
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

# Steps before both are in their stride.
WARM_UP = 20


@dataclass(frozen=True)
class Arguments:
    """Compare the training loop with bare calls of the compiled step."""

    steps: int = 150
    """Steps of each turn."""
    repeats: int = 3
    """Turns; the best one counts."""


class Stopwatch:
    """A sink of metrics that takes the time of a step, from the end of the warm-up to the last step."""

    def __init__(self, steps: int):
        self.steps, self.start, self.seconds = steps, 0.0, 0.0

    def write(self, step, values):
        if step == WARM_UP:
            self.start = time.perf_counter()
        if step == self.steps:
            self.seconds = (time.perf_counter() - self.start) / (self.steps - WARM_UP)

    def close(self):
        pass


def loop_seconds(config: Config, directory: Path) -> float:
    watch: Any = Stopwatch(config.steps)
    with open_workdir(directory) as workdir, contextlib.redirect_stdout(io.StringIO()):
        train(config, workdir, sinks=[watch])
    return watch.seconds


def bare_seconds(config: Config) -> float:
    assert config.data.directory is not None
    trainer = make_trainer(config, make_mesh(config.mesh))
    rows = open_rows(config.data.directory, "train", seq=config.data.seq, pack=config.data.pack)
    batches = make_batches(rows, batch_size=config.data.batch_size, seed=0)
    batch, state = trainer.put_batch(next(batches)), trainer.init()
    batches.close()
    watch = Stopwatch(config.steps)
    for step in range(1, config.steps + 1):
        state, _ = trainer.train_step(state, batch)
        if step in (WARM_UP, config.steps):
            jax.block_until_ready(state)
        watch.write(step, {})
    return watch.seconds


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
