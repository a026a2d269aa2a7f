"""What does the loop cost beyond the compiled step?

    python benchmarks/loop.py [--rounds 20]

The smoke run of Latte-R-SWA++ without validation, checkpoints and start-up, against the same compiled step called in a
bare Python loop on one batch. The two take turns every few seconds inside one run, and each turn is compared with the
one beside it, so that a machine that is slow for a while is slow for both.
"""

import contextlib
import dataclasses
import io
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
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

# Steps of a turn that are timed, after some that are not: one of the other contestant may still be under way.
STEPS, UNTIMED = 12, 3


@dataclass(frozen=True)
class Arguments:
    """Compare the training loop with bare calls of the compiled step."""

    rounds: int = 20
    """Turns of each."""


class Turns:
    """A sink of metrics that is told when a step of the loop is over, and lets bare steps have every second turn."""

    def __init__(self, config: Config):
        assert config.data.directory is not None
        self._trainer = make_trainer(config, make_mesh(config.mesh))
        rows = open_rows(config.data.directory, "train", seq=config.data.seq, pack=config.data.pack)
        with contextlib.closing(make_batches(rows, batch_size=config.data.batch_size, seed=0)) as batches:
            self._batch = self._trainer.put_batch(next(batches))
        self._state, self._moments = self._trainer.init(), []
        # Seconds of a step, in the loop and bare.
        self.turns: list[tuple[float, float]] = []

    def write(self, step, values):
        if "loss" not in values:
            return
        self._moments.append(time.perf_counter())
        if len(self._moments) == UNTIMED + STEPS + 1:
            self.turns.append((_seconds(self._moments), self._bare_seconds()))
            self._moments = []

    def close(self):
        """Nothing is open."""

    def _bare_seconds(self) -> float:
        moments = []
        for _ in range(UNTIMED + STEPS + 1):
            self._state, _ = self._trainer.train_step(self._state, self._batch)
            jax.block_until_ready(self._state)
            moments.append(time.perf_counter())
        return _seconds(moments)


def _seconds(moments: list[float]) -> float:
    return (moments[-1] - moments[UNTIMED]) / STEPS


def main(arguments: Arguments) -> None:
    print(machine())
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        jax.config.update("jax_compilation_cache_dir", str(base / "cache"))
        prepare_text([CORPUS], base / "data", quiet=True)
        config = smoke(load_config(Path(__file__).parents[1] / "configs/owt_latte_r_swa.py"), directory=base / "data")
        # One round more than is counted: the first one compiles.
        tokens = (arguments.rounds + 1) * (UNTIMED + STEPS + 1) * config.data.batch_size * config.data.seq
        never = dict(eval_every=10**6, checkpoint=dataclasses.replace(config.checkpoint, every=10**6))
        config = dataclasses.replace(config, tokens=tokens, **never)
        turns: Any = Turns(config)
        with open_workdir(base / "run") as workdir, contextlib.redirect_stdout(io.StringIO()):
            train(config, workdir, sinks=[turns])
    loop, bare = zip(*turns.turns[1:], strict=True)
    overheads = [100 * (a / b - 1) for a, b in zip(loop, bare, strict=True)]
    low, _, high = quantiles(overheads, n=4)
    print(f"a step takes {1e3 * median(bare):.1f} ms bare and {1e3 * median(loop):.1f} ms in the loop (medians)")
    print(f"overhead {median(overheads):.1f} %; half of {len(overheads)} rounds lie between {low:.1f} and {high:.1f} %")


if __name__ == "__main__":
    main(tyro.cli(Arguments))
