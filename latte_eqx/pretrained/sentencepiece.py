"""Tokenizers as SentencePiece makes them: byte pairs that are joined in the order of their scores."""

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6
"""Kinds of pieces; others are ordinary."""
BYTE_PAIRS = 2
"""The kind of models that is read."""
SPACE = "▁"
"""How pieces write a space."""


class Piece(NamedTuple):
    """A piece of text; of two pieces to join, the one with the larger score comes first."""

    text: str
    score: float
    kind: int = 1


def make_tokenizer(pieces: Sequence[Piece], *, begin: int | None, has_prefix: bool, space: str = SPACE) -> Any:
    """Return a `tokenizers.Tokenizer`. What no piece writes is written as bytes.

    `begin` is the piece that every text begins with; `has_prefix` says whether a space is put before a text.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    vocabulary = {piece.text: index for index, piece in enumerate(pieces)}
    unknown = next((piece.text for piece in pieces if piece.kind == UNKNOWN), "<unk>")
    model = models.BPE(vocabulary, _merges(pieces, vocabulary), unk_token=unknown, byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens([piece.text for piece in pieces if piece.kind in (UNKNOWN, CONTROL)])
    tokenizer.add_tokens(
        [AddedToken(piece.text, normalized=False) for piece in pieces if piece.kind == USER_DEFINED and piece.text]
    )
    spaces = [] if space == " " else [normalizers.Replace(" ", space)]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(space)] * has_prefix + spaces)
    back = [] if space == " " else [decoders.Replace(space, " ")]
    strip = [decoders.Strip(" ", 1, 0)] * has_prefix
    tokenizer.decoder = decoders.Sequence([*back, decoders.ByteFallback(), decoders.Fuse(), *strip])
    if begin is not None:
        first = pieces[begin].text
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{first} $A", special_tokens=[(first, begin)])
    return tokenizer


def read_model(path: Path) -> Any:
    """Return the tokenizer of a file like `tokenizer.model`."""
    content = path.read_bytes()
    pieces, kind, begin, has_prefix = [], 1, 1, True
    try:
        for field, value in _fields(content):
            if field == 1:
                parts = dict(_fields(value))
                score = struct.unpack("<f", parts[2])[0] if 2 in parts else 0.0
                pieces.append(Piece(parts[1].decode(), score, parts.get(3, 1)))
            elif field == 2:
                trainer = dict(_fields(value))
                kind, begin = trainer.get(3, kind), trainer.get(41, begin)
            elif field == 3:
                has_prefix = bool(dict(_fields(value)).get(3, has_prefix))
    except (IndexError, KeyError, UnicodeDecodeError, struct.error) as error:
        raise ValueError(f"{path} must be a model of SentencePiece, got something else: {error!r}") from error
    if kind != BYTE_PAIRS or not pieces:
        raise ValueError(f"{path} must hold byte pairs (kind {BYTE_PAIRS}), got {len(pieces)} pieces of kind {kind}.")
    return make_tokenizer(pieces, begin=begin if 0 <= begin < len(pieces) else None, has_prefix=has_prefix)


def _merges(pieces: Sequence[Piece], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that make up a third, in the order in which they are joined."""
    merges = []
    for piece in pieces:
        if piece.kind in (UNKNOWN, CONTROL, UNUSED, BYTE):
            continue
        # What a user has defined comes before all else, the longest first.
        rank = (0.0, -len(piece.text)) if piece.kind == USER_DEFINED else (1.0, -piece.score)
        for cut in range(1, len(piece.text)):
            left, right = piece.text[:cut], piece.text[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((rank, vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


def _fields(content: bytes) -> Iterator[tuple[int, Any]]:
    """Yield numbers and values of the fields of a protocol buffer: whole numbers, or bytes."""
    place = 0

    def number():
        nonlocal place
        value = shift = 0
        while True:
            byte = content[place]
            value, shift, place = value | (byte & 127) << shift, shift + 7, place + 1
            if byte < 128:
                return value

    while place < len(content):
        key = number()
        if key & 7 == 0:
            yield key >> 3, number()
            continue
        size = {1: lambda: 8, 2: number, 5: lambda: 4}[key & 7]()
        if place + size > len(content):
            raise IndexError("it ends too early")
        yield key >> 3, content[place : place + size]
        place += size
