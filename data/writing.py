"""Writing a prepared directory so that nothing half-written looks finished.

Files grow under temporary names, are renamed once complete, and the manifest follows last. Whatever an interrupted
preparation leaves behind is replaced by the next one; what was finished before stays valid until then.
"""

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Integer

from data.prepared import DTYPES, MANIFEST, Examples, FileRecord, Manifest, SplitRecord, file_names
from data.tokenizer import AnyTokenizer, Vocabulary

PARTIAL = ".partial"


class _GrowingFile:
    """A file under a temporary name, hashed as it is written."""

    def __init__(self, path: Path):
        self.path = path
        self.partial = path.with_name(path.name + PARTIAL)
        self.file = self.partial.open("wb")
        self.hash = hashlib.sha256()
        self.size = 0

    def write(self, content: bytes) -> None:
        self.file.write(content)
        self.hash.update(content)
        self.size += len(content)

    def complete(self) -> FileRecord:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        return FileRecord(self.size, self.hash.hexdigest())

    def close(self) -> None:
        # Closing writes what is buffered, which fails again on a full disk.
        with contextlib.suppress(OSError):
            self.file.close()


class _SplitWriter:
    """The files of a split."""

    def __init__(self, directory: Path, split: str, dtype: str, examples: Examples | None):
        self.dtype = np.dtype(dtype)
        self.files = [_GrowingFile(directory / name) for name in file_names(split, examples)]
        self.tokens, self.documents, *_ = self.files
        self.num_documents = 0
        self.documents.write(np.int64(0).tobytes())

    @property
    def num_tokens(self) -> int:
        return self.tokens.size // self.dtype.itemsize

    def end_document(self, end_of_text: int) -> None:
        self.tokens.write(self.dtype.type(end_of_text).tobytes())
        self.documents.write(np.int64(self.num_tokens).tobytes())
        self.num_documents += 1


class Writer:
    """Takes the tokens of documents, split by split; see `writing` for how to get one."""

    def __init__(
        self, directory: Path, vocabulary: AnyTokenizer | Vocabulary, splits: tuple[str, ...], examples: Examples | None
    ):
        self._directory, self._vocabulary, self._examples = directory, vocabulary, examples
        self._dtype = next(dtype for dtype in DTYPES if vocabulary.vocab_size - 1 <= np.iinfo(dtype).max)
        self._splits = {split: _SplitWriter(directory, split, self._dtype, examples) for split in splits}

    def append(self, split: str, tokens: Integer[np.ndarray, " tokens"]) -> None:
        """Add tokens to the current document of `split`."""
        writer = self._splits[split]
        writer.tokens.write(tokens.astype(writer.dtype, casting="safe", copy=False).tobytes())

    def append_example(
        self, split: str, documents: Sequence[Integer[np.ndarray, " _"]], label: Integer[np.ndarray, "..."] | int
    ) -> None:
        """Add the documents of an example, and what is to be said of it: a class, or a target for each position."""
        writer = self._splits[split]
        for document in documents:
            self.append(split, document)
            self.end_document(split)
        writer.files[2].write(np.asarray(label, np.int32).tobytes())

    def end_document(self, split: str) -> None:
        """End the current document of `split`; the end of text is added here."""
        self._splits[split].end_document(self._vocabulary.end_of_text)

    def finish(self, source: Mapping[str, Any]) -> Manifest:
        """Put the files in place and write the manifest."""
        for split, writer in self._splits.items():
            if not writer.num_documents:
                raise ValueError(f"Every split must hold a document, but {split!r} has none.")
        records = {file.path.name: file.complete() for file in self._files()}
        splits = {split: SplitRecord(writer.num_documents, writer.num_tokens) for split, writer in self._splits.items()}
        vocabulary = self._vocabulary
        manifest = Manifest(
            vocabulary.name,
            vocabulary.vocab_size,
            vocabulary.end_of_text,
            self._dtype,
            source,
            splits,
            records,
            self._examples,
        )
        self._replace(manifest)
        return manifest

    def close(self) -> None:
        """Let go of the files, complete or not."""
        for file in self._files():
            file.close()

    def _files(self) -> Iterator[_GrowingFile]:
        for writer in self._splits.values():
            yield from writer.files

    def _replace(self, manifest: Manifest) -> None:
        path = self._directory / MANIFEST
        # Without this a kill between two renames would leave an old manifest beside new files.
        path.unlink(missing_ok=True)
        for file in self._files():
            file.partial.replace(file.path)
        last = _GrowingFile(path)
        last.write(manifest.to_json().encode())
        last.complete()
        last.partial.replace(path)
        _synchronize(self._directory)


def check_free(directory: Path, *, overwrite: bool) -> None:
    """Raise if there is something in the place of the directory to make."""
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"`out` must be a directory, but {directory} is a file.")
    if (directory / MANIFEST).exists() and not overwrite:
        raise ValueError(f"`out` must not hold prepared data already, but {directory} does: pass --overwrite.")


@contextlib.contextmanager
def writing(
    directory: Path,
    vocabulary: AnyTokenizer | Vocabulary,
    *,
    splits: tuple[str, ...] = ("train", "valid"),
    examples: Examples | None = None,
    overwrite: bool = False,
) -> Iterator[Writer]:
    """Give a `Writer` into `directory` for itself alone, and clean up if its `finish` is not reached."""
    check_free(directory, overwrite=overwrite)
    directory.mkdir(parents=True, exist_ok=True)
    with _alone_in(directory):
        try:
            with contextlib.closing(Writer(directory, vocabulary, splits, examples)) as writer:
                yield writer
        except OSError as error:
            raise OSError(error.errno, f"Nothing was finished in {directory}: {error}. Run it again.") from error
        finally:
            for path in directory.glob("*" + PARTIAL):
                path.unlink()


@contextlib.contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Hold a lock that ends with the process, however it ends."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        _lock(descriptor, directory)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, directory: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(f"`out` must have one writer at a time, but another one is at work in {directory}.") from error


def _synchronize(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
