"""Small prepared directories of random tokens."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from data.prepared import Manifest
from data.tokenizer import load_tokenizer
from data.writing import writing


def draw_documents(lengths: Sequence[int], seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, length).astype(np.uint16) for length in lengths]


def write(directory: Path, *, overwrite: bool = False, **splits: Iterable[np.ndarray]) -> Manifest:
    with writing(directory, load_tokenizer("bytes"), splits=tuple(splits), overwrite=overwrite) as writer:
        for split, documents in splits.items():
            for document in documents:
                writer.append(split, document)
                writer.end_document(split)
        return writer.finish({"kind": "made"})
