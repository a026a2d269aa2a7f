"""Text to token ids and back: plain bytes, the byte-pair encoding of GPT-2, or what a pretrained model came with.

In the first two an id stands for some bytes, so decoding is the same for both. The last id is the end of text, which no
text encodes to.
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
from tokenizers.decoders import DecodeStream
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

END_OF_TEXT = "<|endoftext|>"
ENDS_OF_TEXT = "</s>", "<|im_end|>", END_OF_TEXT, "<eos>", "<s>"
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


@dataclass(frozen=True)
class PretrainedTokenizer:
    """The tokenizer of a pretrained model."""

    name: str
    encoder: Encoder

    @property
    def vocab_size(self) -> int:
        """How many ids there are."""
        return self.encoder.get_vocab_size()

    @property
    def end_of_text(self) -> int:
        """The id that follows every document."""
        special = {token.content: index for index, token in self.encoder.get_added_tokens_decoder().items()}
        try:
            return next(special[name] for name in ENDS_OF_TEXT if name in special)
        except StopIteration:
            raise ValueError(f"{self.name} must have one of {', '.join(ENDS_OF_TEXT)}, and has none.") from None

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode texts, without what a model expects before the first of them."""
        encodings = self.encoder.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.min_scalar_type(self.vocab_size - 1)) for encoding in encodings]

    def encode(self, text: str) -> np.ndarray:
        """Encode a text to be continued, with what the model expects before it."""
        return np.array(self.encoder.encode(text).ids, np.int32)

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Return the text of `ids`."""
        return self.encoder.decode([int(token) for token in ids])

    def stream(self) -> Callable[[int | None], str]:
        """Return a function from the next id to the characters it completes; `None` gives what is left at the end."""
        decoder = DecodeStream(skip_special_tokens=True)
        return lambda token: "" if token is None else decoder.step(self.encoder, token) or ""


AnyTokenizer = Tokenizer | PretrainedTokenizer


def load_tokenizer(name: str) -> AnyTokenizer:
    """Return the tokenizer called `name`: `"bytes"`, `"gpt2"`, or a file `tokenizer.json`."""
    if name.endswith(".json") and Path(name).is_file():
        return PretrainedTokenizer(str(Path(name).resolve()), Encoder.from_file(name))
    if name not in TOKENIZERS:
        raise ValueError(f"`tokenizer` must be a file tokenizer.json or one of {', '.join(TOKENIZERS)}, got {name!r}.")
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
