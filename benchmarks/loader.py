"""How many tokens a second does the loader deliver?

    python benchmarks/loader.py [--seq 1024] [--batch-size 64] [--repeats 5] [--median-length 600]

Writes documents of random tokens to a temporary directory, with lengths as in web text (log-normal), and
reads shuffled batches with and without worker processes. Also times the packing of many documents.
"""

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# The harness lies beside this file, the packages one directory up.
sys.path.append(str(Path(__file__).parent.parent))

import numpy as np
import tyro
from harness import machine, print_table

from data.loader import make_batches, open_rows
from data.packing import pack_documents
from data.tokenizer import load_tokenizer
from data.writing import writing


@dataclass(frozen=True)
class Arguments:
    """Time the loader."""

    seq: int = 1024
    """Tokens in a row."""
    batch_size: int = 64
    """Rows in a batch."""
    num_batches: int = 200
    """Batches in one measurement."""
    repeats: int = 5
    """Measurements; the best one counts."""
    num_tokens: int = 50_000_000
    """Size of the data."""
    median_length: float = 600
    """Tokens in a document of the middle length."""
    pack_documents: int = 8_000_000
    """How many documents to pack, without tokens."""


def draw_lengths(num_documents: int, median: float) -> np.ndarray:
    generator = np.random.default_rng(0)
    return np.clip(generator.lognormal(np.log(median), 1.0, num_documents), 1, 100_000).astype(np.int64)


def write(directory: Path, arguments: Arguments) -> None:
    # The mean of these lengths is exp(1/2) times their median.
    num_documents = int(arguments.num_tokens / (1.65 * arguments.median_length))
    generator, tokenizer = np.random.default_rng(1), load_tokenizer("gpt2")
    with writing(directory, tokenizer, splits=("train",)) as writer:
        for length in draw_lengths(num_documents, arguments.median_length):
            writer.append("train", generator.integers(0, tokenizer.end_of_text, length, np.uint16))
            writer.end_document("train")
        writer.finish({"kind": "random"})


def rate(directory: Path, pack: Literal["concat", "documents"], num_workers: int, arguments: Arguments) -> float:
    """Return the best tokens per second."""
    rows = open_rows(directory, "train", seq=arguments.seq, pack=pack)
    batches = make_batches(rows, batch_size=arguments.batch_size, seed=0, num_workers=num_workers)
    for _ in range(10):
        next(batches)
    best = float("inf")
    for _ in range(arguments.repeats):
        start = time.perf_counter()
        for _ in range(arguments.num_batches):
            next(batches)
        best = min(best, time.perf_counter() - start)
    batches.close()
    return arguments.num_batches * arguments.batch_size * arguments.seq / best


def main(arguments: Arguments) -> None:
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), arguments)
        table = [
            (pack, str(num_workers), f"{rate(Path(name), pack, num_workers, arguments) / 1e6:.1f}")
            for pack in ("concat", "documents")
            for num_workers in (0, 2)
        ]
    print_table(f"batches of {arguments.batch_size} x {arguments.seq}", ("pack", "workers", "M tokens/s"), table)

    offsets = np.concatenate([[0], np.cumsum(draw_lengths(arguments.pack_documents, arguments.median_length) + 1)])
    start = time.perf_counter()
    packing = pack_documents(offsets, arguments.seq)
    seconds = time.perf_counter() - start
    full = packing.lengths.sum(dtype=np.int64) / (len(packing) * packing.seq)
    print(f"\n{arguments.pack_documents:,} documents: {len(packing):,} rows in {seconds:.1f} s, {full:.2%} full")


if __name__ == "__main__":
    main(tyro.cli(Arguments))
