"""Train variants of a config from several seeds, and compare what came of them.

    python -m train.sweep --config configs/mqar.py --variants latte_r_swa_cpu swa_cpu --seeds 0 1 2 \\
        --out runs/mqar_cpu --data.directory prepared/mqar_cpu

Every run is one of `python -m train.main`, in a directory of its own, and further options are passed on to it. The same
command goes on where a sweep was left. At the end there are `results.md`, `results.json` and `results.png`.
"""

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import matplotlib.pyplot as plt
import numpy as np
import tyro
from rich.console import Console

from train.console import plain_errors
from train.metrics import read_metrics


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Train variants of a config from several seeds, and compare them."""

    config: Path
    """A file whose `get_config` takes a variant."""
    variants: tuple[str, ...]
    """Variants to train."""
    out: Path
    """Where the runs and the results go."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds to train each of them from."""
    split: str = "test"
    """Which part of the data to measure on, after training."""
    select: Literal["last", "best"] = "last"
    """Which checkpoint counts: the last one; or of those that were kept the one that validated best, and beside it, as
    the paper chooses, the one that is best on the part measured on. `--checkpoint.keep` says how many are kept."""


class RunFailed(RuntimeError):
    """A run has ended with an error."""


def run_sweep(arguments: Arguments, options: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Train and measure all that has not been yet; return the measurements of each variant."""
    pairs = [(variant, seed) for variant in arguments.variants for seed in arguments.seeds]
    console, results = Console(stderr=True, highlight=False), {}
    for number, (variant, seed) in enumerate(pairs, 1):
        workdir = arguments.out / f"{variant}_{seed}"
        console.print(f"{number}/{len(pairs)}  {variant}, seed {seed}: {workdir}")
        results.setdefault(variant, []).append(_run(arguments, variant, seed, workdir, options))
        console.print(f"    {json.dumps(results[variant][-1])}")
    return results


def _run(arguments: Arguments, variant: str, seed: int, workdir: Path, options: Sequence[str]) -> dict[str, Any]:
    path = workdir / "result.json"
    # With other options it would be another run.
    recipe = {"options": list(options), "split": arguments.split, "select": arguments.select}
    if path.exists():
        result = json.loads(path.read_text())
        if result.pop("recipe") != recipe:
            raise ValueError(f"{path} must be of the same options, got others. Choose another --out.")
        return result
    workdir.mkdir(parents=True, exist_ok=True)
    start, log = time.monotonic(), workdir / "log.txt"
    which = ["--config", f"{arguments.config}:{variant}", "--seed", str(seed), "--workdir", str(workdir)]
    _python(["-m", "train.main", *which, *options], log)
    seconds = time.monotonic() - start
    every = ["--every-checkpoint"] if arguments.select == "best" else []
    lines = _python(["-m", "train.evaluate", "--workdir", str(workdir), "--split", arguments.split, *every], log)
    measured = [json.loads(line) for line in lines.splitlines() if line.startswith("{")]
    result = measured[-1]
    if arguments.select == "best":
        result = select_best(measured, list(read_metrics(workdir / "metrics.jsonl")))
    result["seconds"] = round(seconds)
    path.write_text(json.dumps({**result, "recipe": recipe}))
    return result


def select_best(measured: Sequence[dict[str, Any]], metrics: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what was measured where the validation loss was lowest, and the best accuracy of all measured."""
    losses = {record["step"]: record["valid_loss"] for record in metrics if "valid_loss" in record}
    validated = [scores for scores in measured if scores["step"] in losses]
    if not validated:
        raise ValueError("`--select best` must have checkpoints that were validated when they were saved, got none.")
    chosen = min(validated, key=lambda scores: losses[scores["step"]])
    return {**chosen, "best_accuracy": max(scores["accuracy"] for scores in measured)}


def _python(arguments: Sequence[str], log: Path) -> str:
    """Run Python, write down what it says, and return what it prints."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    with log.open("a") as file:
        file.write(f"$ python {shlex.join(arguments)}\n{done.stdout}{done.stderr}")
    if done.returncode:
        raise RunFailed(f"`python {shlex.join(arguments)}` must end well, got:\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def metrics_of(result: dict[str, Any]) -> dict[str, float]:
    """Return what to compare: accuracies, of groups too if there are some, or bits per token of text."""
    if "groups" in result:
        bounds = lambda group: (
            f"from {group['from']}" if group["to"] is None else f"{group['from']} to {group['to'] - 1}"
        )
        return {f"accuracy, {bounds(group)}": group["accuracy"] for group in result["groups"]}
    if "perplexity" in result:
        return {"bits per token": result["bits_per_token"]}
    best = {"accuracy, chosen on it": result["best_accuracy"]} if "best_accuracy" in result else {}
    common = {"accuracy of the most common class": result["most_common"]} if "most_common" in result else {}
    return {"accuracy": result["accuracy"], **best, **common}


def summarise(results: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, tuple[float, float]]]:
    """Return the mean of each metric over the seeds of each variant, and the spread: half of largest minus least."""
    summary = {}
    for variant, runs in results.items():
        values = [metrics_of(run) for run in runs]
        columns = {name: np.array([value[name] for value in values]) for name in values[0]}
        summary[variant] = {name: (float(x.mean()), float(np.ptp(x) / 2)) for name, x in columns.items()}
    return summary


def write_report(arguments: Arguments, options: Sequence[str], results: dict[str, list[dict[str, Any]]]) -> None:
    """Write the table, the figure, and the numbers of every run."""
    summary = summarise(results)
    names = list(next(iter(summary.values())))
    command = ["python", "-m", "train.sweep", "--config", str(arguments.config), "--variants", *arguments.variants]
    command += [
        "--seeds",
        *map(str, arguments.seeds),
        "--split",
        arguments.split,
        "--select",
        arguments.select,
        "--out",
        str(arguments.out),
        *options,
    ]
    minutes = sum(run["seconds"] for runs in results.values() for run in runs) / 60
    device = jax.devices()[0]
    what = f"{os.cpu_count()} cores" if device.platform == "cpu" else f"{jax.device_count()} {device.device_kind}"
    where = f"{what}, {platform.machine()}, jax {jax.__version__}"
    show = lambda name, mean, spread: (
        f"{mean:.1%} ± {spread:.1%}" if name.startswith("accuracy") else f"{mean:.4f} ± {spread:.4f}"
    )
    lines = [
        f"    {shlex.join(command)}",
        "",
        f"Seeds: {len(arguments.seeds)}, mean ± half of the range; {where}; {minutes:.0f} minutes in all.",
        "",
        f"| variant | {' | '.join(names)} |",
        f"| --- {'| --- ' * len(names)}|",
        *(
            f"| {variant} | {' | '.join(show(name, *row[name]) for name in names)} |"
            for variant, row in summary.items()
        ),
    ]
    (arguments.out / "results.md").write_text("\n".join(lines) + "\n")
    (arguments.out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    _draw(summary, arguments.out / "results.png")
    print("\n".join(lines))


def _draw(summary: dict[str, dict[str, tuple[float, float]]], path: Path) -> None:
    names = list(next(iter(summary.values())))
    plt.switch_backend("agg")  # It needs no display.
    figure, axes = plt.subplots(figsize=(7, 0.5 * len(summary) * len(names) + 1.5), layout="constrained")
    height = 0.8 / len(names)
    for i, name in enumerate(names):
        places = np.arange(len(summary)) + i * height
        means, spreads = zip(*(row[name] for row in summary.values()), strict=True)
        axes.barh(places, means, height, xerr=spreads, label=name, color=("#b07d4f", "#3d2b1f", "#d9b38c")[i % 3])
    axes.set_yticks(np.arange(len(summary)) + 0.4 - height / 2, list(summary))
    axes.invert_yaxis()
    if len(names) > 1:
        figure.legend(loc="outside lower center", ncols=len(names), frameon=False)
    axes.set_xlabel(names[0] if len(names) == 1 else names[0].split(",")[0])
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(command_line: Sequence[str] | None = None) -> None:
    """Run a sweep and report it."""
    arguments, options = tyro.cli(Arguments, args=command_line, return_unknown_args=True, description=__doc__)
    write_report(arguments, options, run_sweep(arguments, options))


if __name__ == "__main__":
    with plain_errors():
        main()
