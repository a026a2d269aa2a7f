"""Batches as a pure function of (seed, step), on any number of processes.

Training rows form one endless stream, shuffled anew in every epoch. Step k takes the rows from k * batch_size on; of
these process p of n takes every n-th, from the p-th on. Where the stream stands is a single number, so a run resumes
exactly, also on another number of processes or workers.
"""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import grain
import numpy as np
from absl import flags

from data.examples import ExamplePacking, pack_examples
from data.packing import NOTHING, ConcatPacking, Element, Packing, pack_documents
from data.prepared import CorruptData, fingerprint, open_split


class Rows:
    """The rows of a split by number. A copy in another process maps the files itself."""

    def __init__(self, directory: Path, split: str, packing: Packing | ExamplePacking):
        self.packing = packing
        self._directory, self._split = directory, split
        self._fingerprint = fingerprint(directory)

    def __len__(self) -> int:
        return len(self.packing)

    def __getitem__(self, index: int) -> Element:
        return self.packing.element(self._tokens, int(index))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_tokens"}

    @functools.cached_property
    def _tokens(self) -> np.ndarray:
        if fingerprint(self._directory) != self._fingerprint:
            raise CorruptData(f"The prepared data in {self._directory} must not change during a run, but they did.")
        # A plain view: `np.memmap` makes every slice dear.
        return open_split(self._directory, self._split).tokens.view(np.ndarray)


def open_rows(directory: Path | str, split: str, *, seq: int, pack: Literal["concat", "documents"]) -> Rows:
    """Plan the rows of a split of a prepared directory; see `packing` for the two ways.

    Where documents are examples of a task, a row is an example, cut at `seq` tokens; see `examples`.
    """
    if seq < 1:
        raise ValueError(f"`seq` must be positive, got {seq=}.")
    if pack not in ("concat", "documents"):
        raise ValueError(f"`pack` must be one of concat, documents, got {pack!r}.")
    prepared = open_split(directory, split)
    if prepared.manifest.examples is not None:
        return Rows(Path(directory), split, pack_examples(prepared, seq))
    num_tokens, num_documents = len(prepared.tokens), len(prepared.offsets) - 1
    packing = ConcatPacking(num_tokens, seq) if pack == "concat" else pack_documents(prepared.offsets, seq)
    if not len(packing):
        raise ValueError(
            f"{split!r} must fill at least one row, but its {num_tokens} tokens in {num_documents} documents do not "
            f"with {seq=}, {pack=}. Give it more text, or take shorter rows."
        )
    return Rows(Path(directory), split, packing)


def make_batches(
    rows: Rows,
    *,
    batch_size: int,
    seed: int,
    num_workers: int = 0,
    shuffle: bool = True,
    shard: grain.sharding.ShardOptions | None = None,
) -> grain.DatasetIterator:
    """Iterate over this process's part of endless batches of `batch_size` rows, counted over all processes.

    A batch is a dict of arrays of (local batch, seq), and `index`, uint32: where each row stands in the endless stream,
    the same on any number of processes. The iterator has `get_state()` and `set_state(state)`, whose states are
    small, fit into JSON and are equal on all processes; and `close()`, which ends the workers. `shard` is this process
    unless given.
    """
    shard = _checked_shard(shard, batch_size)
    dataset = grain.MapDataset.source(rows).seed(seed)
    dataset = (dataset.shuffle() if shuffle else dataset).repeat().map_with_index(_with_index)
    if num_workers:
        _parse_flags()
    elastic = grain.experimental.ElasticIterator(
        dataset,
        batch_size,
        shard,
        # The defaults would keep 500 batches in memory.
        read_options=grain.ReadOptions(num_threads=1, prefetch_buffer_size=2),
        multiprocessing_options=grain.MultiprocessingOptions(num_workers, 2) if num_workers else None,
    )
    return iter(elastic)


def state_at(step: int, batch_size: int) -> dict[str, int]:
    """Return the state that makes batch `step` the next one, the first being 0."""
    return {"global_next_index": step * batch_size}


def sequential_batches(
    rows: Rows, *, batch_size: int, shard: grain.sharding.ShardOptions | None = None
) -> Iterator[Element]:
    """Yield every row once, in order, in batches like those of `make_batches`.

    The last batch is filled up with rows that have nothing to predict, so that all processes get equally many.
    """
    shard = _checked_shard(shard, batch_size)
    blank = {name: np.zeros_like(array) for name, array in rows[0].items()} | {
        "targets": np.full_like(rows[0]["targets"], NOTHING)
    }
    for start in range(0, len(rows), batch_size):
        numbers = range(start + shard.shard_index, start + batch_size, shard.shard_count)
        elements = [_with_index(i, rows[i] if i < len(rows) else blank) for i in numbers]
        yield {name: np.stack([element[name] for element in elements]) for name in elements[0]}


def _with_index(index: int, element: Element) -> Element:
    return {**element, "index": np.array(index % 2**32, np.uint32)}


def _checked_shard(shard: grain.sharding.ShardOptions | None, batch_size: int) -> grain.sharding.ShardOptions:
    shard = grain.sharding.ShardByJaxProcess(drop_remainder=True) if shard is None else shard
    if batch_size < 1 or batch_size % shard.shard_count:
        raise ValueError(
            f"`batch_size` must be a positive multiple of the number of processes, got {batch_size=} "
            f"with {shard.shard_count} processes."
        )
    return shard


def _parse_flags() -> None:
    # Grain reads an absl flag when it starts workers, and fails in programs that have not parsed flags.
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
