"""Tokenizers of SentencePiece: written by hand, and by SentencePiece itself where it is installed."""

import struct
from pathlib import Path

import pytest

from latte_eqx.pretrained.sentencepiece import BYTE, CONTROL, USER_DEFINED, Piece, make_tokenizer, read_model

CORPUS = Path(__file__).parents[2] / "data" / "corpus" / "tinyshakespeare.txt"
BYTES = [Piece(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
PIECES = [
    Piece("<unk>", 0.0, 2),
    Piece("<s>", 0.0, CONTROL),
    *BYTES,
    Piece("<sep>", 0.0, USER_DEFINED),
    *(Piece(text, float(-index)) for index, text in enumerate(("ab", "▁ab", "bc", "▁a", "▁", "a", "b", "c"))),
]


def number(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + number(value >> 7)


def field(index: int, value: int | float | bytes) -> bytes:
    if isinstance(value, bytes):
        return number(index << 3 | 2) + number(len(value)) + value
    if isinstance(value, float):
        return number(index << 3 | 5) + struct.pack("<f", value)
    return number(index << 3) + number(value)


def write_model(path, *, kind=2, has_prefix=1):
    pieces = [field(1, piece.text.encode()) + field(2, piece.score) + field(3, piece.kind) for piece in PIECES]
    trainer, normalizer = field(3, kind) + field(41, 1), field(1, b"identity") + field(3, has_prefix)
    path.write_bytes(b"".join(field(1, piece) for piece in pieces) + field(2, trainer) + field(3, normalizer))
    return path


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("abc", ["<s>", "▁ab", "c"]),
        ("a bc", ["<s>", "▁a", "▁", "bc"]),
        ("bé", ["<s>", "▁", "b", "<0xC3>", "<0xA9>"]),
        ("a<sep>", ["<s>", "▁a", "<sep>"]),
        ("", ["<s>"]),
    ],
)
def test_the_best_pairs_are_joined_first(tmp_path, text, tokens):
    tokenizer = read_model(write_model(tmp_path / "tokenizer.model"))
    encoded = tokenizer.encode(text)
    assert encoded.tokens == tokens
    assert tokenizer.decode(encoded.ids) == text


def test_without_a_prefix_and_a_first_token(tmp_path):
    assert read_model(write_model(tmp_path / "model", has_prefix=0)).encode("ab").tokens == ["<s>", "ab"]
    assert make_tokenizer(PIECES, begin=None, has_prefix=False).encode("ab c").tokens == ["ab", "▁", "c"]


def test_other_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must hold byte pairs \(kind 2\), got 267 pieces of kind 1"):
        read_model(write_model(tmp_path / "unigram", kind=1))
    whole = write_model(tmp_path / "whole").read_bytes()
    for name, content in (("cut", whole[:-3]), ("text", b"To be, or not to be"), ("empty", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match="must "):
            read_model(tmp_path / name)


def test_tokens_are_those_of_sentencepiece(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece", reason="needs the extra `parity`")
    text = CORPUS.read_text()
    (tmp_path / "text").write_text(text[:200_000])
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=800,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    theirs = sentencepiece.SentencePieceProcessor(str(tmp_path / "tokenizer.model"))
    ours = read_model(tmp_path / "tokenizer.model")
    for sample in (text[200_000:205_000], "two  spaces, café ☕", ""):
        assert ours.encode(sample).ids == [1, *theirs.encode(sample)]
        assert ours.decode(ours.encode(sample).ids) == sample
