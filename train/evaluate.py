"""Perplexity, or accuracy, of a trained model over all of the validation data; or its answers to tasks of lm-eval.

    python -m train.evaluate --workdir runs/owt_latte_r_swa_smoke
    python -m train.evaluate --workdir runs/owt_latte_r_swa_smoke --harness blimp,piqa --tasks-dir TASKS

`python -m data.harness_tasks` writes such tasks.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.progress import track

from data.loader import open_rows, sequential_batches
from train.console import plain_errors
from train.restore import Run, restore_every, restore_run


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Measure a trained model: mean loss, the perplexity that is its exp, and accuracy."""

    workdir: Path | None = None
    """The work directory of the run."""
    step: int | None = None
    """The checkpoint to use; by default the newest."""
    every_checkpoint: bool = False
    """Measure all checkpoints that were kept, and print a line for each."""
    data: Path | None = None
    """Prepared data to measure on; by default the run's."""
    split: str = "valid"
    """Which part of the data."""
    seq: int | None = None
    """Tokens in a row; by default as many as the run was trained on."""
    batch: Path | None = None
    """Show instead the loss of each row of this batch, which a run that failed has left."""
    harness: str | None = None
    """Measure instead on these tasks of lm-eval, with commas between their names. Needs the extra `harness`."""
    tasks_dir: Path | None = None
    """The directory of these tasks' files."""
    model: Path | None = None
    """A pretrained model to measure on them, in the place of a run."""
    limit: int | None = None
    """Take only the first so many examples of each task."""
    num_fewshot: int | None = None
    """Put so many solved examples before each one; by default as many as the task says."""
    out: Path | None = None
    """A file such as results.json for what was measured."""

    def __post_init__(self):
        needed, refused = "workdir", ("tasks_dir", "model", "limit", "num_fewshot", "out")
        if self.harness is not None:
            needed, refused = "tasks_dir", ("data", "split", "seq", "batch", "every_checkpoint")
        given = [name for name in refused if getattr(self, name) != getattr(Arguments, name)]
        if getattr(self, needed) is None or given:
            flag = lambda name: f"`--{name.replace('_', '-')}`"
            word = "Without" if self.harness is None else "With"
            raise ValueError(
                f"{word} `--harness` there must be {flag(needed)}, and none of {', '.join(map(flag, refused))}, "
                f"got {', '.join(map(flag, given)) or f'no {flag(needed)}'}."
            )
        if self.every_checkpoint and (self.step is not None or self.batch is not None):
            raise ValueError("`--every-checkpoint` must come without `--step` and `--batch`, got one of them.")
        if self.seq is not None and (self.seq < 1 or self.batch is not None):
            raise ValueError(f"`--seq` must be positive and come without `--batch`, got seq={self.seq}.")


def evaluate_stream(run: Run, directory: Path, split: str, seq: int | None = None) -> dict[str, Any]:
    """Return mean loss and accuracy over all rows of a split, of `seq` tokens each if they are not to be the run's; of
    text also perplexity and bits per token, of classes also the accuracy of always naming the most common one.
    """
    kind = run.config.data
    rows = open_rows(directory, split, seq=seq or kind.seq, pack=kind.pack)
    num_batches = math.ceil(len(rows) / kind.batch_size)
    batches = track(sequential_batches(rows, batch_size=kind.batch_size), "evaluating", total=num_batches)
    scores = run.trainer.measure(run.state, batches)
    loss, task = scores.loss, run.config.task
    of_text = {"perplexity": math.exp(loss), "bits_per_token": loss / math.log(2)}
    return {
        "loss": loss,
        **(of_text if task.kind == "next_token" else {}),
        "accuracy": scores.accuracy,
        **({} if task.kind == "next_token" else {"most_common": _share_of_the_most_common(rows)}),
        "tokens" if task.kind == "next_token" else "examples": scores.num_targets,
        **({"groups": _named_groups(task.groups, scores.by_group())} if task.groups else {}),
    }


def _share_of_the_most_common(rows: Any) -> float:
    classes = Counter(int(rows[index]["targets"]) for index in range(len(rows)))
    return max(classes.values()) / classes.total()


def _named_groups(edges: Sequence[int], groups: Sequence[dict[str, float]]) -> list[dict[str, Any]]:
    """Say of each group which numbers it is of: from one edge up to, without it, the next."""
    bounds = pairwise([0, *edges, None])
    return [{"from": start, "to": end, **group} for (start, end), group in zip(bounds, groups, strict=True)]


def row_losses(run: Run, batch: dict[str, np.ndarray]) -> list[float]:
    """Return the mean loss of each row, by giving the other rows no targets."""
    losses = []
    for row in range(len(batch["targets"])):
        targets = np.full_like(batch["targets"], -1)
        targets[row] = batch["targets"][row]
        losses.append(run.trainer.measure(run.state, [{**batch, "targets": targets}]).loss)
    return losses


def _measure_on_tasks(arguments: Arguments) -> None:
    # It needs lm-eval, which is an extra.
    from train.harness import run_harness

    assert arguments.harness is not None
    assert arguments.tasks_dir is not None
    run_harness(
        [name.strip() for name in arguments.harness.split(",") if name.strip()],
        arguments.tasks_dir,
        model=arguments.model,
        workdir=arguments.workdir,
        step=arguments.step,
        limit=arguments.limit,
        num_fewshot=arguments.num_fewshot,
        out=arguments.out,
    )


def main(arguments: Arguments) -> None:
    """Restore a run, or all of its checkpoints, and measure it."""
    if arguments.harness is not None:
        _measure_on_tasks(arguments)
        return
    assert arguments.workdir is not None
    if arguments.batch is not None:
        run = restore_run(arguments.workdir, step=arguments.step)
        with np.load(arguments.batch) as batch:
            for row, loss in enumerate(row_losses(run, dict(batch))):
                print(f"row {row}: {loss:.4f} nats per token")
        return
    one = lambda path=arguments.workdir: iter([restore_run(path, step=arguments.step)])
    for run in restore_every(arguments.workdir) if arguments.every_checkpoint else one():
        directory = arguments.data or run.config.data.directory
        assert directory is not None
        print(json.dumps({"step": run.step, **evaluate_stream(run, directory, arguments.split, arguments.seq)}))


if __name__ == "__main__":
    with plain_errors():
        main(tyro.cli(Arguments, description=__doc__))
