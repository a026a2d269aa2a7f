"""Files of all kinds give the same documents, whole and in order, however they are read."""

import gzip
import json
import lzma

import numpy as np
import pytest

from data import CORPUS, sources
from data.sources import TextFiles, cut_in_pieces, find_files, hashed_split, split_texts
from data.tokenizer import load_tokenizer

TRICKY = (
    "one  two\n\nthree\n\n\n  four \x1c five\u00a0six \u2003 seven\r\n\r\neight 'tis 日本 語\n語 12 3\t4 . \n\n é è\n"
)


def ignore(size):
    pass


def documents(files, split_of=lambda text: "train"):
    found, current = [], ""
    for piece in files.pieces(split_of, ignore):
        current += piece.text
        if piece.ends:
            found.append((piece.split, current))
            current = ""
    assert not current
    return found


def chop(text, size):
    return [text[i : i + size] for i in range(0, len(text), size)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 21, 1000])
@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_pieces_have_the_tokens_of_the_whole(size, name):
    tokenizer = load_tokenizer(name)
    text = TRICKY * 3 + CORPUS.read_text()[:3000]
    pieces = list(cut_in_pieces(chop(text, size)))
    np.testing.assert_array_equal(np.concatenate(tokenizer.encode_batch(pieces)), tokenizer.encode(text))
    # A place to cut is looked for inside one read.
    assert size == 1 or len(pieces) > len(text) / max(size, 10) / 10


def test_text_without_a_place_to_cut_stays_whole():
    assert list(cut_in_pieces(["日本", "  ", "\n"])) == ["日本  \n"]
    assert list(cut_in_pieces([])) == []


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_separators_across_reads(size):
    text = "a--b--\n---c--"
    assert list(split_texts(chop(text, size), "--")) == text.split("--")


def write(path, texts, separator="\n%%\n"):
    openers = {".gz": gzip.open, ".xz": lzma.open}
    text = "".join(json.dumps({"text": x}) + "\n" for x in texts) if ".jsonl" in path.name else separator.join(texts)
    with openers.get(path.suffix, open)(path, "wb") as file:
        file.write(text.encode())
    return path


@pytest.mark.parametrize("suffix", sources.SUFFIXES)
def test_every_kind_of_file_gives_the_same(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(sources, "READ_SIZE", 16)
    texts = [TRICKY, "", "second\r\nline ends stay", " \n", "\n\n third after a blank line", "é" * 40]
    path = write(tmp_path / f"name.with.dots{suffix}", texts)
    assert [text for _, text in documents(TextFiles([path], "\n%%\n"))] == [text for text in texts if text.strip()]


def test_a_file_is_one_document_without_a_separator(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "READ_SIZE", 16)
    paths = [write(tmp_path / f"{i}.txt", [text]) for i, text in enumerate([TRICKY, " \n ", "\n\n x\n"])]
    assert documents(TextFiles(paths)) == [("train", TRICKY), ("train", "\n\n x\n")]
    assert len(list(TextFiles(paths[:1]).pieces(lambda text: "train", ignore))) > 3


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.93])
def test_the_last_fraction(tmp_path, fraction, monkeypatch):
    monkeypatch.setattr(sources, "READ_SIZE", 16)
    path = write(tmp_path / "one.txt.xz", [TRICKY])
    parts = {"train": "", "valid": ""}
    for split, text, _ in TextFiles([path]).last_fraction(fraction, ignore):
        parts[split] += text
    cut = int(len(TRICKY) * (1 - fraction))
    assert parts == {"train": TRICKY[:cut], "valid": TRICKY[cut:]}


def test_progress_adds_up_to_the_size(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "READ_SIZE", 100)
    files = TextFiles([write(tmp_path / "a.txt", [TRICKY * 50]), write(tmp_path / "b.txt.gz", [TRICKY * 5000])], "%%")
    told = []
    for _ in files.pieces(lambda text: "train", told.append):
        pass
    assert len(told) > 50
    # A compressed file may end with bytes that hold no text.
    assert files.size - 16 <= sum(told) <= files.size


def test_documents_are_split_by_hash():
    split_of = hashed_split(0.2)
    splits = [split_of(f"document {i}") for i in range(1000)]
    assert splits == [split_of(f"document {i}") for i in range(1000)]
    assert 150 < splits.count("valid") < 250
    assert {hashed_split(0.0)(f"document {i}") for i in range(100)} == {"train"}
    # More validation data keep those that were there.
    wider = [hashed_split(0.4)(f"document {i}") for i in range(1000)]
    assert all(b == "valid" for a, b in zip(splits, wider, strict=True) if a == "valid")


def test_directories_are_searched_in_order(tmp_path):
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "a.jsonl.gz", "deep/c.txt", "notes.md"):
        (tmp_path / name).write_bytes(b"")
    found = [str(path.relative_to(tmp_path)) for path in find_files([tmp_path / "deep", tmp_path])]
    assert found == ["deep/c.txt", "a.jsonl.gz", "b.txt"]
    assert len(find_files([tmp_path / "b.txt", tmp_path / "deep" / ".." / "b.txt"])) == 1
    left = find_files([tmp_path], without=[tmp_path / "deep" / ".." / "b.txt"])
    assert [path.name for path in left] == ["a.jsonl.gz", "c.txt"]
    with pytest.raises(ValueError, match="none was found"):
        find_files([tmp_path / "b.txt"], without=[tmp_path / "b.txt"])


def test_inputs_that_are_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"there is no .*nothing.txt"):
        find_files([tmp_path / "nothing.txt"])
    with pytest.raises(ValueError, match=r"one of .txt, .txt.gz, .txt.xz, .jsonl, .* none was found"):
        find_files([tmp_path])
    (tmp_path / "notes.md").write_text("x")
    with pytest.raises(ValueError, match=r"must end in one of .*notes\.md"):
        find_files([tmp_path / "notes.md"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"caf\xe9 au lait", "a.txt must be readable text in UTF-8"),
        ("a.txt.gz", gzip.compress(b"x" * 10**5)[:-20], "a.txt.gz must be readable"),
        ("a.txt.gz", b"no gzip at all", "a.txt.gz must be readable"),
        ("a.txt.xz", lzma.compress(b"x" * 10**5)[:40], "a.txt.xz must be readable"),
        ("a.txt.xz", b"no xz at all", "a.txt.xz must be readable"),
        ("a.jsonl", b'{"text": "fine"}\n\n{"text": 3}\n', "on line 3 of .*a.jsonl must be a string, got 3"),
        ("a.jsonl", b'{"text": "fine"}\n{"words": 3}\n', "Line 2 of .*a.jsonl"),
        ("a.jsonl", b'{"text": "fine"}\n[]\n', "Line 2 of .*a.jsonl"),
        ("a.jsonl", b'{"text": "cut of', "Line 1 of .*a.jsonl"),
    ],
)
def test_unreadable_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        documents(TextFiles([tmp_path / name]))


def test_a_document_that_comes_twice_stays_in_one_split(tmp_path):
    texts = [f"text {i % 50}" for i in range(100)]
    found = documents(TextFiles([write(tmp_path / "a.jsonl", texts)]), hashed_split(0.5))
    assert found[:50] == found[50:]
    assert {split for split, _ in found} == {"train", "valid"}
