"""Which tokens make a row, decided from lengths alone.

A row has `seq` inputs, each with the token that follows it as its target. Two ways to fill one:

- `concat`: the stream of all tokens, cut. Rows ignore where documents begin.
- `documents`: whole documents, as many as fit, told apart by segment ids. A document of n tokens has n - 1 pairs of a
  token and its successor; if they are more than `seq` they are cut into pieces. A piece brings the target of its last
  input along, so every pair of every document is in exactly one row, and only padding has nothing to predict.
"""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

NOTHING = -1
"""The target where there is nothing to predict."""

Element = dict[str, np.ndarray]
"""A row: `inputs`, `targets` and, if documents are kept apart, `segment_ids`, each int32 of `seq`."""


@dataclass(frozen=True)
class ConcatPacking:
    """Row i begins at token i * seq; an incomplete last row is dropped."""

    num_tokens: int
    seq: int

    def __len__(self) -> int:
        return max(0, self.num_tokens - 1) // self.seq

    def element(self, tokens: np.ndarray, row: int) -> Element:
        """Gather one row."""
        start = row * self.seq
        pairs = tokens[start : start + self.seq + 1].astype(np.int32)
        return {"inputs": pairs[:-1], "targets": pairs[1:]}


@dataclass(frozen=True)
class DocumentPacking:
    """Row i holds the pieces `first[i]` to `first[i + 1]`."""

    starts: Int[np.ndarray, " pieces"]
    """The first token of each piece."""
    lengths: Int[np.ndarray, " pieces"]
    """How many inputs each piece has."""
    first: Int[np.ndarray, " rows_and_one"]
    seq: int

    def __len__(self) -> int:
        return len(self.first) - 1

    def element(self, tokens: np.ndarray, row: int) -> Element:
        """Gather one row; padding comes last and is a segment of its own."""
        inputs, targets = np.zeros(self.seq, np.int32), np.full(self.seq, NOTHING, np.int32)
        first, last = self.first[row : row + 2].tolist()
        segment_ids = np.full(self.seq, last - first, np.int32)
        begin = 0
        # Copying runs costs less than gathering single tokens, unless documents are very short.
        pieces = zip(self.starts[first:last].tolist(), self.lengths[first:last].tolist(), strict=True)
        for segment, (start, length) in enumerate(pieces):
            end = begin + length
            inputs[begin:end] = tokens[start : start + length]
            targets[begin:end] = tokens[start + 1 : start + length + 1]
            segment_ids[begin:end] = segment
            begin = end
        return {"inputs": inputs, "targets": targets, "segment_ids": segment_ids}


Packing = ConcatPacking | DocumentPacking


def pack_documents(offsets: Int[np.ndarray, " documents_and_one"], seq: int) -> DocumentPacking:
    """Plan rows of whole documents, which begin at `offsets`. Rows come in the order of their first documents."""
    starts, lengths = cut_documents(offsets, seq)
    rows, num_rows = best_fit(lengths, seq)
    order = np.argsort(rows, kind="stable")
    first = np.zeros(num_rows + 1, np.int64)
    np.cumsum(np.bincount(rows, minlength=num_rows), out=first[1:])
    return DocumentPacking(starts[order], lengths[order], first, seq)


def cut_documents(
    offsets: Int[np.ndarray, " documents_and_one"], seq: int
) -> tuple[Int[np.ndarray, " pieces"], Int[np.ndarray, " pieces"]]:
    """Return where the pieces of all documents start, and their numbers of inputs: `seq` but for the last of each."""
    num_inputs = np.diff(offsets) - 1
    num_pieces = -(-num_inputs // seq)
    last = np.cumsum(num_pieces)
    number = np.arange(num_pieces.sum()) - np.repeat(last - num_pieces, num_pieces)
    starts = np.repeat(offsets[:-1], num_pieces) + number * seq
    lengths = np.full(len(starts), seq, np.int32)
    lengths[last[num_pieces > 0] - 1] = (num_inputs - (num_pieces - 1) * seq)[num_pieces > 0]
    return starts, lengths


def best_fit(lengths: Int[np.ndarray, " pieces"], seq: int) -> tuple[Int[np.ndarray, " pieces"], int]:
    """Give each piece a row, the longest first, each into the fullest row that still has room for it.

    Returns the row of each piece and the number of rows. Pieces of one length and rows with the same room are handled
    together, and a row so handled has less than half of its room left: about seq * log(seq) steps, however many pieces.
    """
    # Sixteen bits sort in linear time.
    keys = (seq - lengths).astype(np.uint16 if seq < 2**16 else np.int64)
    order = np.argsort(keys, kind="stable")
    counts = np.bincount(lengths, minlength=seq + 1)
    rows = np.empty(len(lengths), np.int64)
    room, done = _Rooms(seq), 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        for assigned in room.place(length, int(counts[length])):
            rows[order[done : done + len(assigned)]] = assigned
            done += len(assigned)
    return _by_first_appearance(rows, room.num_rows), room.num_rows


class _Rooms:
    """Rows by the room that is left in them."""

    def __init__(self, seq: int):
        self.seq, self.num_rows = seq, 0
        self.groups: dict[int, list[np.ndarray]] = {}
        self.rooms: list[int] = []  # The keys of `groups`, ascending.

    def place(self, length: int, count: int) -> Iterator[np.ndarray]:
        """Yield the rows of `count` pieces of one length."""
        while count:
            room, rows = self._take(length, count)
            fit = room // length
            assigned = np.repeat(rows, fit)[:count]
            count -= len(assigned)
            yield assigned
            # Only the last row may have got fewer than fit.
            num_full, rest = divmod(len(assigned), fit)
            self._put(room - fit * length, rows[:num_full])
            self._put(room - rest * length, rows[num_full:])

    def _take(self, length: int, count: int) -> tuple[int, np.ndarray]:
        """Remove rows with the least sufficient room, no more than are needed; open new ones if there are none."""
        position = bisect.bisect_left(self.rooms, length)
        if position == len(self.rooms):
            needed = -(-count // (self.seq // length))
            self.num_rows += needed
            return self.seq, np.arange(self.num_rows - needed, self.num_rows)
        room = self.rooms.pop(position)
        rows = np.concatenate(self.groups.pop(room))
        needed = -(-count // (room // length))
        self._put(room, rows[needed:])
        return room, rows[:needed]

    def _put(self, room: int, rows: np.ndarray) -> None:
        if room and len(rows):
            if room not in self.groups:
                bisect.insort(self.rooms, room)
            self.groups.setdefault(room, []).append(rows)


def _by_first_appearance(rows: np.ndarray, num_rows: int) -> np.ndarray:
    """Number rows anew by the first piece in each, so that the first rows are a fair sample of all documents."""
    first = np.empty(num_rows, np.int64)
    first[rows[::-1]] = np.arange(len(rows))[::-1]
    number = np.empty(num_rows, np.int64)
    number[np.argsort(first)] = np.arange(num_rows)
    return number[rows]
