"""A prepared directory: tokens on disk, where documents begin, and a manifest that vouches for both.

    train.tokens     every document followed by an end of text, one flat array
    train.documents  int64: where each document begins, and the end of the last
    train.labels     int32: where documents are examples of a task, what is to be said of each
    valid.tokens     ...
    manifest.json    counts, sizes and sha256 of the files, tokenizer, source

The manifest is written last. A directory without one was never finished.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

MANIFEST = "manifest.json"
VERSION = 1
DTYPES = ("uint16", "uint32")


class CorruptData(ValueError):
    """A prepared directory is not what its manifest says."""


class NotPrepared(CorruptData):
    """There is no finished prepared directory."""


@dataclass(frozen=True)
class FileRecord:
    """What a file must be."""

    size: int
    sha256: str


@dataclass(frozen=True)
class SplitRecord:
    """What a split holds; the ends of text are among the tokens."""

    num_documents: int
    num_tokens: int


@dataclass(frozen=True)
class Examples:
    """What documents are examples of: to classify, or with a target for each position."""

    num_classes: int
    """Classes of an example; 0 where each position has a target of its own, a token or -1."""
    num_documents: int = 1
    """Documents that make an example."""
    is_numeric: bool = False
    """Whether tokens are to be read as numbers: 0 to 255 as -1 to 1."""


@dataclass(frozen=True)
class Manifest:
    """Everything known about a prepared directory."""

    tokenizer: str
    vocab_size: int
    end_of_text: int
    dtype: str
    source: Mapping[str, Any]
    splits: Mapping[str, SplitRecord]
    files: Mapping[str, FileRecord]
    examples: Examples | None = None

    def to_json(self) -> str:
        """Return the text of the manifest, which carries a digest of itself."""
        content = {"version": VERSION, **asdict(self)}
        return json.dumps({**content, "digest": content_digest(content)}, indent=2) + "\n"


@dataclass(frozen=True)
class PreparedSplit:
    """One split, mapped into memory."""

    tokens: np.memmap
    offsets: np.memmap
    labels: np.memmap | None
    manifest: Manifest


def file_names(split: str, examples: Examples | None) -> list[str]:
    """Return the names of the files of `split`: its tokens, where its documents begin, and what is said of them."""
    return [f"{split}.{kind}" for kind in ("tokens", "documents", *(["labels"] if examples else []))]


def read_manifest(directory: Path | str) -> Manifest:
    """Return the manifest of a prepared directory, or say why it cannot be used."""
    path = Path(directory) / MANIFEST
    if not path.is_file():
        raise NotPrepared(
            f"A prepared directory must hold a finished {MANIFEST}, but {directory} has none. "
            f"Make it with `python -m data.prepare text FILE... --out {directory}` (or `openwebtext`)."
        )
    try:
        return _parse(json.loads(path.read_bytes()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = error if isinstance(error, CorruptData) else f"it must be a manifest in JSON, got {error!r}"
        raise _corrupt(directory, f"{MANIFEST}: {what}") from error


def _parse(content: Any) -> Manifest:
    version, digest = content.pop("version"), content.pop("digest")
    if version != VERSION:
        raise CorruptData(f"its format must be version {VERSION}, got {version!r}")
    if digest != content_digest({"version": version, **content}):
        raise CorruptData("it must have the digest it carries; it was damaged, or changed by hand")
    if content["dtype"] not in DTYPES:
        raise CorruptData(f"`dtype` must be one of {', '.join(DTYPES)}, got {content['dtype']!r}")
    splits = {name: SplitRecord(**record) for name, record in content.pop("splits").items()}
    files = {name: FileRecord(**record) for name, record in content.pop("files").items()}
    examples = content.pop("examples", None)
    return Manifest(**content, splits=splits, files=files, examples=None if examples is None else Examples(**examples))


def open_split(directory: Path | str, split: str, *, verify: bool = False) -> PreparedSplit:
    """Map one split of a prepared directory. Sizes are always checked, contents with `verify=True`."""
    directory, manifest = Path(directory), read_manifest(directory)
    if split not in manifest.splits:
        raise ValueError(f"`split` must be one of {', '.join(manifest.splits)} in {directory}, got {split!r}.")
    names = file_names(split, manifest.examples)
    _check_files(directory, manifest, names, contents=verify)
    types = manifest.dtype, np.int64, np.int32
    tokens, offsets, *labels = [
        np.memmap(directory / name, dtype, "r") for name, dtype in zip(names, types, strict=False)
    ]
    record, found = manifest.splits[split], SplitRecord(len(offsets) - 1, len(tokens))
    if record != found or offsets[0] != 0 or offsets[-1] != len(tokens):
        raise _corrupt(directory, f"{split} must hold {record}, ending at its last token, got {found}")
    return PreparedSplit(tokens, offsets, labels[0] if labels else None, manifest)


def verify(directory: Path | str) -> Manifest:
    """Read every byte of a prepared directory and compare it with the manifest, which is returned."""
    manifest = read_manifest(directory)
    for split in manifest.splits:
        open_split(directory, split, verify=True)
    return manifest


def fingerprint(directory: Path | str) -> str:
    """Return a digest of the tokens and what they mean: two directories have the same if they hold the same data."""
    manifest = read_manifest(directory)
    hashes = {name: record.sha256 for name, record in manifest.files.items()}
    meaning = [manifest.tokenizer, manifest.vocab_size, manifest.end_of_text, manifest.dtype, hashes]
    return content_digest(meaning if manifest.examples is None else [*meaning, asdict(manifest.examples)])


def _check_files(directory: Path, manifest: Manifest, names: Iterable[str], *, contents: bool) -> None:
    for name in names:
        path, record = directory / name, manifest.files[name]
        if not path.is_file():
            raise _corrupt(directory, f"{name} must exist, but it is missing")
        if path.stat().st_size != record.size:
            raise _corrupt(directory, f"{name} must have {record.size} bytes, got {path.stat().st_size}")
        if contents and (found := sha256(path)) != record.sha256:
            raise _corrupt(directory, f"{name} must have sha256 {record.sha256}, got {found}")


def sha256(path: Path) -> str:
    """Return the sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def content_digest(content: Any) -> str:
    """Return the sha256 of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _corrupt(directory: Path | str, what: str) -> CorruptData:
    return CorruptData(
        f"The prepared data in {directory} cannot be trusted: {what}. "
        f"Copy it anew, or prepare it again: `python -m data.prepare ... --out {directory} --overwrite`."
    )
