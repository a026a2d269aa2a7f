"""Pairs of passages of books: are both of the same book?

A task like the Long Range Arena's retrieval, for where its papers are not to be had. No book is in two splits.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from data.prepared import Examples, Manifest
from data.preparing import Example, prepare_examples
from data.sources import TextFiles, find_files
from data.tokenizer import load_tokenizer
from data.writing import check_free

Book = UInt8[np.ndarray, " _"]
"""The bytes of a text, of any length."""


def prepare_same_book(
    out: Path,
    *,
    source: Sequence[Path],
    document_separator: str | None = None,
    min_book_length: int = 100_000,
    passage_length: int = 4000,
    num_train: int = 20_000,
    num_valid: int = 2_000,
    num_test: int = 2_000,
    seed: int = 0,
    overwrite: bool = False,
    quiet: bool = False,
) -> Manifest:
    r"""Prepare pairs of passages of books as bytes, to be classified: are both of the same book?

    A substitute for the Long Range Arena's retrieval. A tenth of the books, and two at least, is set apart to validate
    on, as many to test on. Half of the pairs are of one book, and do not overlap; which book does not depend on the
    class.

    Args:
        out: The directory to make.
        source: Files, and directories that are searched for such: .txt, plain or compressed (.gz, .xz), each a book
            unless a separator splits it, or .jsonl with a book on each line.
        document_separator: What stands between two books of a .txt file; \n and \t are understood.
        min_book_length: Shorter texts are left out, in bytes.
        passage_length: The length of a passage in bytes.
        num_train: Pairs to train on.
        num_valid: Pairs to validate on.
        num_test: Pairs to test on.
        seed: Decides how books are split, and which passages are drawn.
        overwrite: Replace prepared data that is there already.
        quiet: Show no progress.
    """
    check_free(out, overwrite=overwrite)
    if not 0 < 2 * passage_length <= min_book_length:
        raise ValueError(
            f"`passage_length` must be positive and at most half of `min_book_length`, got {passage_length=}, "
            f"{min_book_length=}."
        )
    separator = document_separator and document_separator.replace("\\n", "\n").replace("\\t", "\t")
    books, num_short = read_books(TextFiles(find_files(source), separator), min_book_length)
    split_books = _split(books, np.random.default_rng((seed, 0)))
    num_books = {split: len(found) for split, found in split_books.items()}
    if not quiet:
        print(f"{num_books} books; {num_short:,} texts of less than {min_book_length:,} bytes are left out.")
    num_pairs: dict[str, int] = {"train": num_train, "valid": num_valid, "test": num_test}
    return prepare_examples(
        _pairs(split_books, num_pairs, passage_length, seed),
        out,
        vocabulary=load_tokenizer("bytes"),
        kind=Examples(2, num_documents=2),
        splits=tuple(num_pairs),
        source={
            "kind": "same-book",
            "source": [str(path) for path in source],
            "document_separator": separator,
            "min_book_length": min_book_length,
            "num_books": num_books,
            "passage_length": passage_length,
            "seed": seed,
        },
        total=sum(num_pairs.values()),
        overwrite=overwrite,
        quiet=quiet,
    )


def read_books(files: TextFiles, min_length: int) -> tuple[list[Book], int]:
    """Return the bytes of all documents of at least `min_length`, and how many there are of less."""
    tokenizer, books, num_short, texts = load_tokenizer("bytes"), [], 0, []
    for piece in files.pieces(lambda text: "", lambda size: None):
        texts.append(piece.text)
        if piece.ends:
            book = tokenizer.encode("".join(texts)).astype(np.uint8)
            texts = []
            if len(book) >= min_length:
                books.append(book)
            else:
                num_short += 1
    return books, num_short


def draw_pair(books: Sequence[Book], length: int, label: int, generator: np.random.Generator) -> list[Book]:
    """Draw two passages, of one book if `label` is 1, of two books if it is 0."""
    if label:
        book = books[int(generator.integers(len(books)))]
        # Both lie anywhere in what is left of the book without one of them, which is then put back between them.
        first, second = sorted(generator.integers(0, len(book) - 2 * length + 1, 2).tolist())
        passages = [book[first : first + length], book[second + length : second + 2 * length]]
        return passages if generator.integers(2) else passages[::-1]
    chosen = [books[i] for i in generator.choice(len(books), 2, replace=False)]
    starts = [int(generator.integers(0, len(book) - length + 1)) for book in chosen]
    return [book[start : start + length] for book, start in zip(chosen, starts, strict=True)]


def _pairs(
    split_books: Mapping[str, Sequence[Book]], num_pairs: Mapping[str, int], length: int, seed: int
) -> Iterator[Example]:
    for number, (split, books) in enumerate(split_books.items(), 1):
        generator = np.random.default_rng((seed, number))
        for i in range(num_pairs[split]):
            yield Example(split, draw_pair(books, length, i % 2, generator), i % 2)


def _split(books: Sequence[Book], generator: np.random.Generator) -> dict[str, list[Book]]:
    if len(books) < 6:
        raise ValueError(f"`source` must hold 6 books, 2 for each split, of `min_book_length`, got {len(books)}.")
    order = [books[i] for i in generator.permutation(len(books))]
    held_out = max(2, round(0.1 * len(books)))
    return {"train": order[2 * held_out :], "valid": order[held_out : 2 * held_out], "test": order[:held_out]}
