"""The tasks of the Long Range Arena as examples, from the files in which they were released.

A file that is missing or damaged is an error, which says what must be there and what was found.
"""

import hashlib
import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8

from data import listops
from data.preparing import Example
from data.tokenizer import load_tokenizer

CIFAR_NPZ = "cifar10.npz"
CIFAR_BATCHES = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}
GREY = np.array([2989, 5870, 1140], np.int32)
"""What red, green and blue add to grey, in units of 1/10,000: integers, so that nothing depends on rounding."""
PATHFINDER = "curv_contour_length_14"


class Found(NamedTuple):
    """Examples, and how many there are."""

    total: int
    examples: Iterable[Example]


class _Form(NamedTuple):
    """What a line looks like, and how it is read."""

    text: str
    parse: Callable[[bytes], Any]

    def read(self, line: bytes, path: Path, number: int) -> Any:
        try:
            return self.parse(line)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"Line {number} of {path} must be like {self.text}, got {line[:80]!r} ({error!r})."
            ) from error


class _Labelled(NamedTuple):
    content: bytes
    label: int


def read_listops(source: Path) -> Found:
    """Read `basic_{train,val,test}.tsv`: under a line of headings an expression and its value on each line."""
    names = {"train": "basic_train.tsv", "valid": "basic_val.tsv", "test": "basic_test.tsv"}
    return _read_tables(source, names, _Form("'( ( ( [MAX 2 ) 9 ) ] )', a tab, '9'", _expression), num_headings=1)


def read_retrieval(source: Path) -> Found:
    """Read `new_aan_pairs.{train,eval,test}.tsv`: a label, two names and two texts on each line."""
    names = {"train": "train", "valid": "eval", "test": "test"}
    names = {split: f"new_aan_pairs.{name}.tsv" for split, name in names.items()}
    return _read_tables(source, names, _Form("0.0 or 1.0, two names and two texts, with tabs between them", _pair))


def read_reviews(source: Path, valid_fraction: float, seed: int) -> Found:
    """Read IMDb: `{train,test}/{pos,neg}/*.txt`, or `{train,test}.jsonl` with the fields text and label."""
    train, test = (_reviews(source, split) for split in ("train", "test"))
    return _with_valid(_mix(train, seed), _mix(test, seed), valid_fraction, seed)


def read_cifar(source: Path, valid_fraction: float, seed: int) -> Found:
    """Read CIFAR-10 in grey: the binary version, or `cifar10.npz` with train_x, train_y, test_x and test_y."""
    read = _cifar_npz if (source / CIFAR_NPZ).is_file() else _cifar_batches
    train, test = (read(source, split) for split in ("train", "test"))
    return _with_valid(train, test, valid_fraction, seed)


def read_pathfinder(source: Path) -> tuple[Found, int]:
    """Read the pictures that `curv_contour_length_14/metadata/*.npy` list, and return how many of them are empty files.

    These are left out. In the order of the lists 80 % are to train on, 10 % to validate on, and 10 % to test on.
    """
    directory = source / PATHFINDER
    tables = sorted((directory / "metadata").glob("*.npy"), key=lambda path: (len(path.name), path.name))
    if not tables:
        raise ValueError(f"`source` must hold {PATHFINDER}/metadata/*.npy; {_contents(directory / 'metadata')}.")
    form = _Form("'imgs/0 sample_0.png 0 1', the last of which is the class", _listed)
    # These are lines of text, in spite of their name.
    lines = [(line, table, i) for table in tables for i, line in enumerate(table.read_bytes().splitlines(), 1)]
    listed = [form.read(*line) for line in lines]
    splits = np.repeat(("train", "valid", "test"), np.diff([0, *(len(listed) * i // 10 for i in (8, 9, 10))])).tolist()
    paths = [directory / name for name, _ in listed]
    is_empty = [_size(path) == 0 for path in paths]
    rows = zip(splits, paths, listed, is_empty, strict=True)
    examples = (Example(split, [_picture(path)], label) for split, path, (_, label), empty in rows if not empty)
    return Found(is_empty.count(False), examples), is_empty.count(True)


def _read_tables(source: Path, names: Mapping[str, str], form: _Form, num_headings: int = 0) -> Found:
    paths = _find(source, list(names.values()))
    total = sum(_count_lines(path) - num_headings for path in paths)

    def examples() -> Iterator[Example]:
        for split, path in zip(names, paths, strict=True):
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if number > num_headings:
                        yield Example(split, *form.read(line.rstrip(b"\r\n"), path, number))

    return Found(total, examples())


def _expression(line: bytes) -> tuple[list[np.ndarray], int]:
    text, value = line.decode().split("\t")
    # Every argument is in brackets of its own, which say nothing.
    text = text.replace("(", "").replace(")", "").replace("]", listops.CLOSE)
    return [np.array([listops.IDS[token] for token in text.split()], np.uint8)], range(10).index(int(value))


def _pair(line: bytes) -> tuple[list[np.ndarray], int]:
    label, _, _, first, second = line.split(b"\t")
    return [np.frombuffer(text, np.uint8) for text in (first, second)], [0.0, 1.0].index(float(label))


def _reviews(source: Path, split: str) -> list[_Labelled]:
    if (table := source / f"{split}.jsonl").is_file():
        form = _Form('{"text": "...", "label": 0 or 1}', _review)
        return [form.read(line, table, i) for i, line in enumerate(table.read_bytes().splitlines(), 1)]
    found = [(label, sorted((source / split / name).glob("*.txt"))) for label, name in enumerate(("neg", "pos"))]
    if not all(paths for _, paths in found):
        raise ValueError(
            f"`source` must hold {split}.jsonl, or {split}/pos/*.txt and {split}/neg/*.txt as in aclImdb; "
            f"{_contents(source)}; {_contents(source / split)}."
        )
    return [_Labelled(path.read_bytes(), label) for label, paths in found for path in paths]


def _review(line: bytes) -> _Labelled:
    row = json.loads(line)
    return _Labelled(load_tokenizer("bytes").encode(row["text"]).astype(np.uint8).tobytes(), [0, 1].index(row["label"]))


def _cifar_npz(source: Path, split: str) -> list[_Labelled]:
    path, names = source / CIFAR_NPZ, (f"{split}_x", f"{split}_y")
    try:
        with np.load(path, allow_pickle=False) as file:
            pictures, labels = (file[name] for name in names)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} must hold the arrays {' and '.join(names)}, got: {error}.") from error
    if pictures.dtype != np.uint8 or pictures.shape != (len(labels), 32, 32, 3):
        raise ValueError(
            f"{names[0]} in {path} must be an 8-bit picture of (32, 32, 3) for each of {len(labels)} labels, "
            f"got {pictures.dtype} of {pictures.shape}."
        )
    return _in_grey(pictures, labels, path)


def _cifar_batches(source: Path, split: str) -> list[_Labelled]:
    rows = []
    for path in _find(source, CIFAR_BATCHES[split], f", or {CIFAR_NPZ}"):
        content = np.fromfile(path, np.uint8)
        if not len(content) or len(content) % 3073:
            raise ValueError(f"{path} must hold a label and 3,072 bytes for each picture, got {len(content):,} bytes.")
        content = content.reshape(-1, 3073)
        pictures = content[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        rows += _in_grey(pictures, content[:, 0], path)
    return rows


def _in_grey(pictures: UInt8[np.ndarray, "pictures 32 32 3"], labels: np.ndarray, path: Path) -> list[_Labelled]:
    if labels.max() > 9:
        raise ValueError(f"A label in {path} must be one of 0 to 9, got {labels.max()}.")
    grey = (pictures @ GREY // 10_000).astype(np.uint8)
    return [_Labelled(picture.tobytes(), label) for picture, label in zip(grey, labels.tolist(), strict=True)]


def _listed(line: bytes) -> tuple[str, int]:
    directory, name, _, label, *_ = line.decode().split()
    return f"{directory}/{name}", [0, 1].index(int(label))


def _size(path: Path) -> int:
    if not path.is_file():
        raise ValueError(f"{path} must be a picture, since the metadata list it, but it is missing.")
    return path.stat().st_size


def _picture(path: Path) -> UInt8[np.ndarray, " pixels"]:
    # Slow to import, and needed for this alone.
    from matplotlib.image import imread

    try:
        picture = imread(path, format="png")
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{path} must be a PNG file, got: {error}.") from error
    if picture.shape != (32, 32):
        raise ValueError(f"{path} must have 32 x 32 pixels in grey, got {' x '.join(map(str, picture.shape))}.")
    return np.round(255 * picture).astype(np.uint8).ravel()


def _with_valid(train: Sequence[_Labelled], test: Sequence[_Labelled], fraction: float, seed: int) -> Found:
    """Set a fraction of each class of the training examples apart for validation."""
    drawn = _draw(train, fraction, seed)
    splits = [*("valid" if i in drawn else "train" for i in range(len(train))), *["test"] * len(test)]
    rows = zip(splits, [*train, *test], strict=True)
    examples = (Example(split, [np.frombuffer(row.content, np.uint8)], row.label) for split, row in rows)
    return Found(len(splits), examples)


def _draw(rows: Sequence[_Labelled], fraction: float, seed: int) -> set[int]:
    """Draw a fraction of each class by the contents: in what order or in which files they come does not matter."""
    if not 0 < fraction < 1:
        raise ValueError(f"`valid_fraction` must be between 0 and 1, got {fraction}.")
    ranks = [_rank(row, seed) for row in rows]
    drawn = set()
    for label in {row.label for row in rows}:
        numbers = sorted((i for i, row in enumerate(rows) if row.label == label), key=ranks.__getitem__)
        drawn.update(numbers[: round(fraction * len(numbers))])
    return drawn


def _mix(rows: Sequence[_Labelled], seed: int) -> list[_Labelled]:
    """Put what comes class by class in an order in which any part has all classes."""
    return sorted(rows, key=lambda row: _rank(row, seed))


def _rank(row: _Labelled, seed: int) -> bytes:
    return hashlib.blake2b(row.content, digest_size=16, key=str(seed).encode()).digest()


def _find(source: Path, names: Sequence[str], alternative: str = "") -> list[Path]:
    missing = [name for name in names if not (source / name).is_file()]
    if missing:
        raise ValueError(
            f"`source` must hold {', '.join(names)}{alternative}, but there is no {', '.join(missing)}: "
            f"{_contents(source)}."
        )
    return [source / name for name in names]


def _contents(directory: Path) -> str:
    """Say what is in a directory."""
    if not directory.is_dir():
        return f"{directory} is no directory"
    names = sorted(path.name for path in directory.iterdir())
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"{directory} holds {', '.join(names[:10]) or 'nothing'}{more}"


def _count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)
