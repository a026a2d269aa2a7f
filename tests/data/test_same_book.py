"""Pairs of passages of books."""

import lzma

import numpy as np
import pytest

from data.loader import open_rows
from data.prepare import main
from data.prepared import Examples, fingerprint, verify
from data.same_book import draw_pair, prepare_same_book
from data.tokenizer import load_tokenizer

LENGTH = 40
WORDS = [f"{number:02d}" for number in range(30)]


def text_of_book(word):
    """A book whose every passage tells which book it is of, and where in it."""
    return "".join(f"{word}:{i:04d} " for i in range(100))


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "books.txt.xz"
    texts = [text for word in WORDS for text in (text_of_book(word), "A chapter.")]
    path.write_bytes(lzma.compress("\n\n".join(texts).encode()))
    return path


def prepare(source, out, **options):
    options = {"min_book_length": 800, "num_train": 300, "num_valid": 40, "num_test": 40, **options}
    return prepare_same_book(
        out, source=[source], document_separator=r"\n\n", passage_length=LENGTH, quiet=True, **options
    )


def pairs_of(directory, split):
    tokenizer, rows = load_tokenizer("bytes"), open_rows(directory, split, seq=LENGTH, pack="concat")
    for i in range(len(rows)):
        row = rows[i]
        assert row["mask"].all()
        assert row["other_mask"].all()
        yield tokenizer.decode(row["inputs"]), tokenizer.decode(row["others"]), int(row["targets"])


def books_of(passage):
    return {passage[i - 2 : i] for i in range(2, LENGTH) if passage[i] == ":"}


def test_labels_and_splits(source, tmp_path):
    manifest = prepare(source, tmp_path / "out")
    assert verify(tmp_path / "out").examples == Examples(2, num_documents=2)
    assert manifest.source["num_books"] == {"train": 24, "valid": 3, "test": 3}
    books = {}
    for split, count in (("train", 300), ("valid", 40), ("test", 40)):
        pairs = list(pairs_of(tmp_path / "out", split))
        assert [sum(label == kind for *_, label in pairs) for kind in (0, 1)] == [count // 2] * 2
        for first, second, label in pairs:
            (a,), (b,) = books_of(first), books_of(second)
            assert (a == b) == bool(label)
        books[split] = {book for first, second, _ in pairs for book in books_of(first) | books_of(second)}
    assert {split: len(found) for split, found in books.items()} == manifest.source["num_books"]
    assert len(set.union(*books.values())) == 30


def test_passages_of_a_pair_do_not_overlap():
    book = np.arange(100, dtype=np.uint8)
    generator = np.random.default_rng(0)
    starts = []
    for _ in range(2000):
        first, second = draw_pair([book], LENGTH, 1, generator)
        assert len({*first.tolist(), *second.tolist()}) == 2 * LENGTH
        starts.append((int(first[0]), int(second[0])))
    assert {min(pair) for pair in starts} == set(range(21))
    assert {max(pair) for pair in starts} == set(range(40, 61))
    assert 0.4 < np.mean([first < second for first, second in starts]) < 0.6


def test_the_seed_decides(source, tmp_path):
    for name, options in (("a", {}), ("b", {}), ("c", {"seed": 1}), ("d", {"num_train": 10})):
        prepare(source, tmp_path / name, **options)
    a, b, c, _ = (fingerprint(tmp_path / name) for name in "abcd")
    assert a == b != c
    # More to train on does not change what is tested on.
    assert list(pairs_of(tmp_path / "a", "test")) == list(pairs_of(tmp_path / "d", "test"))


def test_files_are_books(tmp_path, capsys):
    (tmp_path / "books").mkdir()
    for word in WORDS[:8]:
        (tmp_path / "books" / f"{word}.txt").write_text(text_of_book(word))
    (tmp_path / "books" / "short.txt").write_text("A chapter.")
    counts = ["--num-train", "10", "--num-valid", "4", "--num-test", "4"]
    lengths = ["--passage-length", "40", "--min-book-length", "800"]
    main(["same-book", "--source", str(tmp_path / "books"), "--out", str(tmp_path / "out"), *counts, *lengths])
    assert "{'train': 4, 'valid': 2, 'test': 2} books; 1 texts of less than 800 bytes" in capsys.readouterr().out
    assert len(list(pairs_of(tmp_path / "out", "train"))) == 10


def test_too_few_books_or_too_long_passages(source, tmp_path):
    with pytest.raises(ValueError, match="must hold 6 books, 2 for each split, of `min_book_length`, got 0"):
        prepare(source, tmp_path / "out", min_book_length=10_000)
    with pytest.raises(
        ValueError, match="at most half of `min_book_length`, got passage_length=40, min_book_length=79"
    ):
        prepare(source, tmp_path / "out", min_book_length=79)
    assert not (tmp_path / "out").exists()
