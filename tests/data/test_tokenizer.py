"""Tokenizers against a byte-pair encoding written out, round trips, and text that comes token by token."""

import itertools
import json
import re

import numpy as np
import pytest

from data import CORPUS
from data.tokenizer import ASSETS, load_tokenizer

TEXTS = [
    "",
    "Hello world",
    "I'll say we've DON'T it's 'twas o'clock",
    "  two  spaces,   three\n\n\nlines \n mixed\t\ttabs   ",
    "1234567 3.14159 1,000 x2y 10th",
    "naïve façade — “quotes” … Ελληνικά русский 日本語テキスト עברית",
    "🙂👩‍👩‍👧 e\u0301 \u00a0\u2003\u200b\x00\x7f",
    "<|endoftext|> in a text <|endoftext|>",
    "def f(x):\n    return x ** 2  # ok\r\n",
]


def gpt2_oracle(text: str) -> list[int]:
    """Words by a regular expression, then the best-ranked merge again and again."""
    vocabulary = json.loads((ASSETS / "gpt2" / "encoder.json").read_text(encoding="utf-8"))
    lines = (ASSETS / "gpt2" / "vocab.bpe").read_text(encoding="utf-8").splitlines()[1:]
    ranks = {tuple(line.split(" ")): rank for rank, line in enumerate(lines)}
    letter, number = r"[^\W\d_]", r"\d"
    words = re.findall(rf"'(?:s|t|re|ve|m|ll|d)| ?{letter}+| ?{number}+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+", text)
    # In this vocabulary the characters of a byte that is not printable are numbered from U+0100 on.
    hidden = [i for i in range(256) if not (0x21 <= i <= 0x7E or (0xA1 <= i <= 0xFF and i != 0xAD))]
    ids = []
    for word in words:
        parts = [chr(256 + hidden.index(i)) if i in hidden else chr(i) for i in word.encode()]
        while pairs := [pair for pair in itertools.pairwise(parts) if pair in ranks]:
            best, i = min(pairs, key=ranks.__getitem__), 0
            while i < len(parts) - 1:
                if (parts[i], parts[i + 1]) == best:
                    parts[i : i + 2] = [parts[i] + parts[i + 1]]
                i += 1
        ids += [vocabulary[part] for part in parts]
    return ids


def test_sizes_and_known_ids():
    bytes_, gpt2 = load_tokenizer("bytes"), load_tokenizer("gpt2")
    assert (bytes_.vocab_size, bytes_.end_of_text) == (257, 256)
    assert (gpt2.vocab_size, gpt2.end_of_text) == (50257, 50256)
    assert gpt2.encode("Hello world").tolist() == [15496, 995]
    assert bytes_.encode("Hé").tolist() == [72, 195, 169]


# A combining mark is no letter for GPT-2 and part of a word for Python, so the oracle does not read that text.
@pytest.mark.parametrize("text", [text for text in TEXTS if "\u0301" not in text])
def test_gpt2_against_merges_written_out(text):
    assert load_tokenizer("gpt2").encode(text).tolist() == gpt2_oracle(text)


def test_gpt2_against_merges_written_out_on_the_corpus():
    text = CORPUS.read_text()[100_000:104_000]
    assert load_tokenizer("gpt2").encode(text).tolist() == gpt2_oracle(text)


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_round_trip(name):
    tokenizer = load_tokenizer(name)
    texts = [*TEXTS, CORPUS.read_text()[:30_000]]
    for text, tokens in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert tokens.dtype == np.uint16
        assert tokenizer.end_of_text not in tokens
        np.testing.assert_array_equal(tokens, tokenizer.encode(text))
        assert tokenizer.decode(tokens) == text
        assert tokenizer.decode(tokens.tolist()) == text


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
@pytest.mark.parametrize("text", TEXTS)
def test_stream_gives_whole_characters(name, text):
    tokenizer = load_tokenizer(name)
    show = tokenizer.stream()
    shown = [show(token) for token in tokenizer.encode(text).tolist()]
    assert not any("\ufffd" in part for part in shown)
    assert "".join(shown) + show(None) == text


def test_bytes_that_are_not_text():
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.decode([72, 195]) == "H\ufffd"
    show = tokenizer.stream()
    assert (show(195), show(72), show(195), show(None)) == ("", "\ufffdH", "", "\ufffd")
    assert tokenizer.decode([72, tokenizer.end_of_text]) == "H<|endoftext|>"


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_half_a_surrogate_pair_becomes_a_question_mark(name):
    tokenizer = load_tokenizer(name)
    assert tokenizer.decode(tokenizer.encode("a\ud83db")) == "a?b"


def test_errors():
    with pytest.raises(ValueError, match="one of bytes, gpt2, got 'words'"):
        load_tokenizer("words")
    for token in (-1, 257):
        with pytest.raises(ValueError, match=rf"in \[0, 257\), got {token}"):
            load_tokenizer("bytes").decode([token])
