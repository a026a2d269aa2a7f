"""Rows that are examples of a task.

To classify: `inputs` and `mask` of `seq` positions, and `targets`, the class; of pairs `others` and `other_mask`, too.
With a target for each position: `inputs` and `targets` as in text, and `distance`, how far back of each position the
token stood that followed the same token before: what a model must look back to repeat it.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Integer

from data.packing import Element
from data.prepared import CorruptData, Examples, PreparedSplit


@dataclass(frozen=True)
class ExamplePacking:
    """Row i is example i, cut at `seq` tokens and padded to them. Ends of documents are left out."""

    offsets: Integer[np.ndarray, " documents_and_one"]
    labels: Integer[np.ndarray, "examples *positions"]
    examples: Examples
    seq: int

    def __len__(self) -> int:
        return len(self.labels)

    def element(self, tokens: np.ndarray, row: int) -> Element:
        """Gather one row."""
        first = row * self.examples.num_documents
        documents = [self._document(tokens, first + i) for i in range(self.examples.num_documents)]
        label = np.asarray(self.labels[row], np.int32)
        if not self.examples.num_classes:
            return {"inputs": documents[0][0], "targets": label, "distance": distances(documents[0][0])}
        names = ("inputs", "mask"), ("others", "other_mask")
        arrays = {name: x for pair, document in zip(names, documents, strict=False)
                  for name, x in zip(pair, document, strict=True)}  # fmt: skip
        return {**arrays, "targets": label}

    def _document(self, tokens: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
        start, end = self.offsets[number : number + 2].tolist()
        found = tokens[start : min(end - 1, start + self.seq)]
        inputs = np.zeros(self.seq, np.int32)
        inputs[: len(found)] = found
        mask = np.arange(self.seq) < len(found)
        return (inputs[:, None] / np.float32(127.5) - 1 if self.examples.is_numeric else inputs), mask


def pack_examples(prepared: PreparedSplit, seq: int) -> ExamplePacking:
    """Plan a row for each example of a split."""
    examples, labels = prepared.manifest.examples, prepared.labels
    assert examples is not None
    assert labels is not None
    num_examples, rest = divmod(len(prepared.offsets) - 1, examples.num_documents)
    positions = [] if examples.num_classes else [len(labels) // num_examples]
    if rest or len(labels) != num_examples * (positions[0] if positions else 1):
        raise CorruptData(f"Every example must have its label, got {len(labels)} labels of {num_examples} examples.")
    if positions and positions[0] != seq:
        raise ValueError(f"`seq` must be {positions[0]}, the positions of each example, got {seq=}.")
    return ExamplePacking(
        np.asarray(prepared.offsets), np.asarray(labels).reshape(num_examples, *positions), examples, seq
    )


def distances(tokens: Integer[np.ndarray, " seq"]) -> Integer[np.ndarray, " seq"]:
    """Return how far back stands what followed the last token of the same kind; 0 where there was none."""
    order = np.argsort(tokens, kind="stable")
    again = tokens[order][1:] == tokens[order][:-1]
    found = np.zeros(len(tokens), np.int32)
    found[order[1:][again]] = (np.diff(order) - 1)[again]
    return found
