"""Text files as a stream of pieces of documents.

`.txt` holds one document, or several between separators; `.jsonl` holds one per line, in the field `text`. Both may be
compressed (`.gz`, `.xz`). A `.txt` without a separator is never in memory as a whole: it comes in pieces, cut where the
cut does not change its tokens. Of the others one document at a time is.
"""

import gzip
import hashlib
import io
import itertools
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

SplitOf = Callable[[str], str]
Advance = Callable[[int], object]
"""Is told how many further bytes were read from the disk."""

READ_SIZE = 2**20
OPENERS: dict[str, Callable[[Any], Any]] = {"": io.BufferedReader, ".gz": gzip.open, ".xz": lzma.open}
SUFFIXES = tuple(kind + compression for kind in (".txt", ".jsonl") for compression in OPENERS)

# GPT-2's rules leave the last space or line break before a word to that word or to itself, and never look further
# ahead: whatever comes before it is cut into tokens as if the text ended there.
CUT = re.compile(r"(?=[ \n][!-~\w])")


class Piece(NamedTuple):
    """A part of a document, or all of it."""

    split: str
    text: str
    ends: bool
    """Whether the document ends here."""


@dataclass(frozen=True)
class TextFiles:
    """Files, and what stands between two documents in them."""

    paths: Sequence[Path]
    separator: str | None = None

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        return sum(path.stat().st_size for path in self.paths)

    @property
    def is_one_document(self) -> bool:
        """Whether this is one text and no collection."""
        return len(self.paths) == 1 and self.separator is None and ".jsonl" not in self.paths[0].suffixes

    def pieces(self, split_of: SplitOf, advance: Advance) -> Iterator[Piece]:
        """Yield all documents; `split_of` maps the first piece of one to its split. Blank documents are left out."""
        for path in self.paths:
            for document in self._documents(path, advance):
                yield from _document(document, split_of)

    def last_fraction(self, fraction: float, advance: Advance) -> Iterator[Piece]:
        """Yield the only document as two: its beginning for `train`, its last `fraction` for `valid`."""
        (path,) = self.paths
        total = sum(len(text) for text in _read(path, lambda size: None))
        sides = _sides(_read(path, advance), int(total * (1 - fraction)))
        for split, group in itertools.groupby(sides, key=itemgetter(0)):
            yield from _document(cut_in_pieces(text for _, text in group), lambda text, split=split: split)

    def _documents(self, path: Path, advance: Advance) -> Iterator[Iterable[str]]:
        reads = _read(path, advance)
        if ".jsonl" in path.suffixes:
            yield from ([text] for text in _json_texts(path, split_texts(reads, "\n")))
        elif self.separator is not None:
            yield from ([text] for text in split_texts(reads, self.separator))
        else:
            yield cut_in_pieces(reads)


def split_pieces(
    training: TextFiles, validation: TextFiles | None, fraction: float, advance: Advance
) -> Iterator[Piece]:
    """Yield all documents with their splits: as the files say, or `fraction` of the only ones for validation."""
    if validation is not None:
        yield from training.pieces(lambda text: "train", advance)
        yield from validation.pieces(lambda text: "valid", advance)
    elif training.is_one_document and fraction:
        yield from training.last_fraction(fraction, advance)
    else:
        yield from training.pieces(hashed_split(fraction), advance)


def find_files(paths: Iterable[Path], without: Iterable[Path] = ()) -> list[Path]:
    """Return the text files among `paths` and, in a fixed order, below the directories among them, each once."""
    found = {path.resolve(): path for given in paths for path in _text_files(Path(given))}
    for path in without:
        found.pop(path.resolve(), None)
    if not found:
        raise ValueError(f"There must be a file that ends in one of {', '.join(SUFFIXES)}, but none was found.")
    return list(found.values())


def _text_files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.is_file() and file.name.endswith(SUFFIXES))
    if not path.is_file():
        raise ValueError(f"An input must be a file or a directory, but there is no {path}.")
    if not path.name.endswith(SUFFIXES):
        raise ValueError(f"An input must end in one of {', '.join(SUFFIXES)}, got {path}.")
    return [path]


def hashed_split(fraction: float) -> SplitOf:
    """Return a function that sends about `fraction` of all documents to `valid`, copies of one document together."""

    def split_of(text: str) -> str:
        digest = hashlib.blake2b(text[:4096].encode("utf-8", "replace"), digest_size=8).digest()
        return "valid" if int.from_bytes(digest) < fraction * 2**64 else "train"

    return split_of


def cut_in_pieces(reads: Iterable[str]) -> Iterator[str]:
    """Join `reads` and cut them again, into pieces whose tokens are together the tokens of the whole."""
    pending: list[str] = []
    for text in reads:
        cuts = [match.start() for match in CUT.finditer(text, max(0, len(text) - 4096))]
        if cuts:
            yield "".join([*pending, text[: cuts[-1]]])
            pending = [text[cuts[-1] :]]
        else:
            pending.append(text)
    if pending:
        yield "".join(pending)


def split_texts(reads: Iterable[str], separator: str) -> Iterator[str]:
    """Split the joined `reads` at every `separator`."""
    rest = ""
    for text in reads:
        *complete, rest = (rest + text).split(separator)
        yield from complete
    yield rest


def _document(texts: Iterable[str], split_of: SplitOf) -> Iterator[Piece]:
    """Yield the pieces of one document, the last of them marked, or nothing if it is blank."""
    texts, piece = iter(texts), ""
    while not piece.strip():
        text = next(texts, None)
        if text is None:
            return
        piece += text
    split = split_of(piece)
    for text in texts:
        yield Piece(split, piece, ends=False)
        piece = text
    yield Piece(split, piece, ends=True)


def _sides(reads: Iterable[str], first: int) -> Iterator[tuple[str, str]]:
    """Mark the `first` characters `train` and all others `valid`."""
    position = 0
    for text in reads:
        cut = max(0, first - position)
        position += len(text)
        yield from ((split, part) for split, part in (("train", text[:cut]), ("valid", text[cut:])) if part)


def _json_texts(path: Path, lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                text = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise ValueError(
                    f'Line {number} of {path} must be like {{"text": "..."}}, got {line[:80]!r}.'
                ) from error
            if not isinstance(text, str):
                raise ValueError(f"`text` on line {number} of {path} must be a string, got {text!r:.80}.")
            yield text


def _read(path: Path, advance: Advance) -> Iterator[str]:
    """Yield the text of a file in reads of moderate size, and tell `advance` how far the file on the disk was read."""
    compression = path.suffix if path.suffix in OPENERS else ""
    position = 0
    try:
        with path.open("rb") as raw, OPENERS[compression](raw) as plain:
            # No translation of line ends: the tokens are those of the file.
            reader = io.TextIOWrapper(plain, encoding="utf-8", newline="")
            while text := reader.read(READ_SIZE):
                advance(raw.tell() - position)
                position = raw.tell()
                yield text
    except (OSError, EOFError, lzma.LZMAError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be readable text in UTF-8, got: {error}.") from error
