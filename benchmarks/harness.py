"""Timing in one run: contestants take turns, and the best of several turns counts."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax


def alternate(contestants: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each contestant in each round, after one round that compiles.

    Each turn begins with a call that is not timed, so that nobody pays for the memory the one before has left behind.
    """
    for run in contestants.values():
        jax.block_until_ready(run())
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            jax.block_until_ready(run())
            start = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name].append(time.perf_counter() - start)
    return seconds


def best_times(contestants: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the least seconds of each contestant."""
    return {name: min(seconds) for name, seconds in alternate(contestants, rounds).items()}


def machine() -> str:
    """Describe where the numbers come from."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"jax {jax.__version__}, {jax.default_backend()}, cores: {cores}"


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table."""
    print(f"\n{title}\n")
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, ["-" * width for width in widths], *rows):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
