"""OpenWebText through Hugging Face `datasets`, split as is usual: 0.05 % for validation, seed 2357."""

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data.sources import Advance, Piece

NAME = "Skylion007/openwebtext"
BATCH_SIZE = 1000


def load(source: str) -> dict[str, Any]:
    """Return the splits of a data set on the hub, or of a local file or directory, that has a column `text`."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise ImportError("OpenWebText needs `datasets`: pip install 'latte-eqx[openwebtext]'.") from error
    path = Path(source)
    kinds = {".jsonl": "json", ".parquet": "parquet"}
    if path.is_file() and path.suffix in kinds:
        dataset = datasets.load_dataset(kinds[path.suffix], data_files=source, split="train")
    else:
        dataset = datasets.load_dataset(source, split="train")
    if "text" not in dataset.column_names:
        raise ValueError(f"`source` must have a column `text`, got {', '.join(dataset.column_names)}.")
    parts = dataset.train_test_split(test_size=0.0005, seed=2357, shuffle=True)
    return {"train": parts["train"], "valid": parts["test"]}


def pieces(splits: Mapping[str, Any], advance: Advance) -> Iterator[Piece]:
    """Yield all documents; the progress is counted in documents. Blank ones are left out."""
    for split, dataset in splits.items():
        for batch in dataset.iter(batch_size=BATCH_SIZE):
            yield from (Piece(split, text, ends=True) for text in batch["text"] if text.strip())
            advance(len(batch["text"]))
