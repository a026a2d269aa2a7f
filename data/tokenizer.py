"""Text to token ids and back: plain bytes, or the byte-pair encoding of GPT-2.

In both an id stands for some bytes, so decoding is the same for both. The last id is the end of text, which no text
encodes to.
"""

import codecs
import functools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt16
from tokenizers import Tokenizer as Encoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

END_OF_TEXT = "<|endoftext|>"
ASSETS = Path(__file__).parent / "tokenizers"


@dataclass(frozen=True)
class Vocabulary:
    """Ids that stand for no text."""

    name: str
    vocab_size: int
    """How many ids there are, the end of a document included."""

    @property
    def end_of_text(self) -> int:
        """The id that follows every document."""
        return self.vocab_size - 1


@dataclass(frozen=True)
class Tokenizer:
    """What each id stands for, and how texts become ids."""

    name: str
    pieces: tuple[bytes, ...]
    """The bytes of each id."""
    encode_batch: Callable[[Sequence[str]], list[np.ndarray]]
    """Encode texts, in parallel where that helps. No end of text is added."""

    @property
    def vocab_size(self) -> int:
        """How many ids there are, the end of text included."""
        return len(self.pieces)

    @property
    def end_of_text(self) -> int:
        """The id that follows every document."""
        return len(self.pieces) - 1

    def encode(self, text: str) -> UInt16[np.ndarray, " tokens"]:
        """Encode one text. Special text in it is text like any other."""
        return self.encode_batch([text])[0]

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Return the text of `ids`, with U+FFFD for bytes that are not UTF-8."""
        return b"".join(self._bytes(ids)).decode("utf-8", "replace")

    def stream(self) -> Callable[[int | None], str]:
        """Return a function from the next id to the characters it completes; `None` gives what is left at the end."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")

        def show(token: int | None) -> str:
            return decoder.decode(b"", final=True) if token is None else decoder.decode(self._bytes([token])[0])

        return show

    def _bytes(self, ids: Iterable[int] | np.ndarray) -> list[bytes]:
        tokens = np.fromiter(ids, np.int64)
        for token in tokens[(tokens < 0) | (tokens >= self.vocab_size)]:
            raise ValueError(f"A token of {self.name!r} must be in [0, {self.vocab_size}), got {token}.")
        return [self.pieces[token] for token in tokens.tolist()]


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer called `name`: `"bytes"` or `"gpt2"`."""
    if name not in TOKENIZERS:
        raise ValueError(f"`tokenizer` must be one of {', '.join(TOKENIZERS)}, got {name!r}.")
    return TOKENIZERS[name]()


def _encodable(text: str) -> bytes:
    # JSON may hold halves of surrogate pairs, which are no characters: they become question marks.
    return text.encode("utf-8", "replace")


@functools.cache
def _bytes() -> Tokenizer:
    def encode_batch(texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(_encodable(text), np.uint8).astype(np.uint16) for text in texts]

    return Tokenizer("bytes", (*(bytes([i]) for i in range(256)), END_OF_TEXT.encode()), encode_batch)


@functools.cache
def _gpt2() -> Tokenizer:
    vocabulary, merges = ASSETS / "gpt2" / "encoder.json", ASSETS / "gpt2" / "vocab.bpe"
    encoder = Encoder(BPE.from_file(str(vocabulary), str(merges)))
    encoder.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=True)

    def encode_batch(texts: Sequence[str]) -> list[np.ndarray]:
        encodings = encoder.encode_batch_fast([_encodable(text).decode() for text in texts], add_special_tokens=False)
        return [np.array(encoding.ids, np.uint16) for encoding in encodings]

    ids = json.loads(vocabulary.read_text(encoding="utf-8"))
    alphabet = _alphabet()
    pieces = (bytes(alphabet[character] for character in piece) for piece in sorted(ids, key=ids.__getitem__))
    return Tokenizer("gpt2", tuple(pieces), encode_batch)


def _alphabet() -> dict[str, int]:
    """The byte that each character of GPT-2's vocabulary stands for: itself if printable, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {"bytes": _bytes, "gpt2": _gpt2}
