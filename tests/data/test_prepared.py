"""What is written comes back, and what was damaged or never finished is refused."""

import json

import numpy as np
import pytest

from data.prepared import (
    MANIFEST,
    CorruptData,
    NotPrepared,
    content_digest,
    fingerprint,
    open_split,
    read_manifest,
    verify,
)
from data.tokenizer import Tokenizer, load_tokenizer
from data.writing import writing
from tests.data.made import draw_documents, write

LENGTHS = [5, 1, 0, 300, 17]


@pytest.fixture
def prepared(tmp_path):
    write(tmp_path / "made", train=draw_documents(LENGTHS), valid=draw_documents([40], seed=1))
    return tmp_path / "made"


@pytest.mark.parametrize("contents", [False, True])
def test_what_is_written_comes_back(prepared, contents):
    split = open_split(prepared, "train", verify=contents)
    assert isinstance(split.tokens, np.memmap)
    assert (split.tokens.dtype, split.offsets.dtype) == (np.uint16, np.int64)
    assert len(split.offsets) == len(LENGTHS) + 1
    for start, stop, document in zip(split.offsets, split.offsets[1:], draw_documents(LENGTHS), strict=False):
        np.testing.assert_array_equal(split.tokens[start:stop], [*document, 256])
    record = split.manifest.splits["train"]
    assert (record.num_documents, record.num_tokens) == (len(LENGTHS), sum(LENGTHS) + len(LENGTHS))
    assert verify(prepared) == split.manifest == read_manifest(prepared)
    assert sorted(path.name for path in prepared.iterdir()) == sorted([*split.manifest.files, MANIFEST])


def test_a_large_vocabulary_takes_four_bytes(tmp_path):
    tokenizer = Tokenizer("wide", (b"x",) * 70_000, lambda texts: [])
    with writing(tmp_path, tokenizer, splits=("train",)) as writer:
        writer.append("train", np.array([69_000, 3], np.uint32))
        writer.end_document("train")
        writer.finish({})
    assert open_split(tmp_path, "train").tokens.tolist() == [69_000, 3, 69_999]


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-2])


@pytest.mark.parametrize("name", ["train.tokens", "train.documents", "valid.tokens"])
@pytest.mark.parametrize(
    ("damage", "message"), [(flip, "sha256"), (truncate, "bytes, got"), (lambda path: path.unlink(), "missing")]
)
def test_a_damaged_file_is_refused(prepared, name, damage, message):
    damage(prepared / name)
    with pytest.raises(CorruptData, match=rf"(?s)made.*{name}.*{message}.*--overwrite"):
        verify(prepared)
    with pytest.raises(CorruptData, match=message):
        open_split(prepared, name.split(".")[0], verify=True)
    if damage is not flip:
        with pytest.raises(CorruptData, match=message):
            open_split(prepared, name.split(".")[0])


def test_every_flipped_bit_of_the_manifest_is_noticed(prepared):
    path = prepared / MANIFEST
    content = path.read_bytes()
    for position in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        if damaged.split() != content.split():
            with pytest.raises(CorruptData, match=MANIFEST):
                read_manifest(prepared)


def edit(directory, change):
    """Change a manifest, as another program might, with a digest that fits."""
    content = json.loads((directory / MANIFEST).read_text())
    change(content)
    content["digest"] = content_digest({name: value for name, value in content.items() if name != "digest"})
    (directory / MANIFEST).write_text(json.dumps(content))


def test_a_manifest_of_another_kind_is_refused(prepared):
    edit(prepared, lambda content: content.update(version=2))
    with pytest.raises(CorruptData, match="version 1, got 2"):
        read_manifest(prepared)
    for text in ("", "[]", "{}", '{"version": 1}'):
        (prepared / MANIFEST).write_text(text)
        with pytest.raises(CorruptData, match="must be a manifest"):
            read_manifest(prepared)


def test_counts_that_do_not_fit_are_refused(prepared):
    edit(prepared, lambda content: content["splits"]["train"].update(num_documents=4))
    with pytest.raises(CorruptData, match=r"num_documents=4.*got.*num_documents=5"):
        open_split(prepared, "train")


@pytest.mark.parametrize("change", [lambda content: content.pop("dtype"), lambda content: content.update(dtype="int8")])
def test_a_manifest_without_a_dtype_is_refused(prepared, change):
    edit(prepared, change)
    with pytest.raises(CorruptData, match="dtype"):
        read_manifest(prepared)


def test_what_is_not_there(prepared, tmp_path):
    with pytest.raises(NotPrepared, match=r"data\.prepare text"):
        open_split(tmp_path / "nowhere", "train")
    with pytest.raises(ValueError, match=r"one of train, valid in .* got 'test'"):
        open_split(prepared, "test")


def test_fingerprint_is_of_the_content(prepared, tmp_path):
    documents = draw_documents(LENGTHS)
    write(tmp_path / "same", train=documents, valid=draw_documents([40], seed=1))
    assert fingerprint(prepared) == fingerprint(tmp_path / "same")
    # The same tokens with one boundary elsewhere are other documents.
    moved = [*documents[:3], np.concatenate([documents[3], np.array([256], np.uint16), documents[4]])]
    write(tmp_path / "moved", train=moved, valid=draw_documents([40], seed=1))
    other, same = open_split(tmp_path / "moved", "train"), open_split(prepared, "train")
    np.testing.assert_array_equal(other.tokens, same.tokens)
    assert fingerprint(tmp_path / "moved") != fingerprint(prepared)


def test_a_failure_leaves_what_was_there(prepared):
    before = fingerprint(prepared)

    def documents():
        yield from draw_documents([100, 200])
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write(prepared, overwrite=True, train=documents())
    verify(prepared)
    assert fingerprint(prepared) == before
    assert not list(prepared.glob("*.partial"))


def test_a_failure_between_two_files_leaves_nothing_that_looks_finished(prepared):
    (prepared / "valid.tokens").unlink()
    (prepared / "valid.tokens").mkdir()
    with pytest.raises(OSError, match="Nothing was finished"):
        write(prepared, overwrite=True, train=draw_documents([3]), valid=draw_documents([3]))
    with pytest.raises(NotPrepared):
        read_manifest(prepared)


def test_finished_data_is_replaced_only_when_told(prepared):
    before = fingerprint(prepared)
    with pytest.raises(ValueError, match="pass --overwrite"):
        write(prepared, train=draw_documents([3]))
    assert fingerprint(prepared) == before
    manifest = write(prepared, overwrite=True, train=draw_documents([3]))
    assert verify(prepared) == manifest
    with pytest.raises(ValueError, match="one of train in"):
        open_split(prepared, "valid")


def test_leftovers_are_replaced(tmp_path):
    for name in ("train.tokens.partial", "test.documents.partial", "train.tokens"):
        (tmp_path / name).write_bytes(b"left over from before, and longer than what will be written")
    write(tmp_path, train=draw_documents([3]))
    verify(tmp_path)
    assert not list(tmp_path.glob("*.partial"))


def test_one_writer_at_a_time(tmp_path):
    with writing(tmp_path, load_tokenizer("bytes"), splits=("train",)) as writer:
        with pytest.raises(ValueError, match="one writer at a time"):
            write(tmp_path, train=draw_documents([3]))
        writer.append("train", draw_documents([9])[0])
        writer.end_document("train")
        writer.finish({})
    assert verify(tmp_path).splits["train"].num_tokens == 10


def test_a_split_without_documents_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="'valid' has none"):
        write(tmp_path, train=draw_documents([3]), valid=[])
    assert not list(tmp_path.iterdir())


def test_a_file_in_place_of_the_directory(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(ValueError, match="must be a directory"):
        write(tmp_path / "out", train=draw_documents([3]))
