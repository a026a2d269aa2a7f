"""Timing in one run: contestants take turns, and the best of several turns counts."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax


def best_times(contestants: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Return the least seconds of each contestant over `repeats` rounds, after one round that compiles.

    Each turn begins with a call that is not timed, so that nobody pays for the memory the one before has left behind.
    """
    for run in contestants.values():
        jax.block_until_ready(run())
    best = dict.fromkeys(contestants, float("inf"))
    for _ in range(repeats):
        for name, run in contestants.items():
            jax.block_until_ready(run())
            start = time.perf_counter()
            jax.block_until_ready(run())
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def machine() -> str:
    """Describe where the numbers come from."""
    return f"jax {jax.__version__}, {jax.default_backend()}, {os.cpu_count()} cores"


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table."""
    print(f"\n{title}\n")
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, ["-" * width for width in widths], *rows):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
