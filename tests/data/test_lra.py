"""Tasks of the Long Range Arena from small files of the released forms."""

import json

import numpy as np
import pytest

from data.loader import open_rows
from data.lra import prepare_cifar, prepare_reviews
from data.prepare import main
from data.prepared import fingerprint, verify
from data.tokenizer import load_tokenizer

SPLITS = "train", "valid", "test"


def rows_of(directory, seq):
    verify(directory)
    rows = {split: open_rows(directory, split, seq=seq, pack="concat") for split in SPLITS}
    return {split: [found[i] for i in range(len(found))] for split, found in rows.items()}


def text_of(row, inputs="inputs", mask="mask"):
    return load_tokenizer("bytes").decode(row[inputs][row[mask]])


def examples_of(directory):
    return {
        split: {(text_of(row), int(row["targets"])) for row in rows} for split, rows in rows_of(directory, 99).items()
    }


def refused(command, message):
    with pytest.raises(SystemExit, match=f"^error: .*{message}"):
        main([*map(str, command), "--quiet"])


REVIEWS = {
    split: [(f"{split} {i}: “{'good' if label else 'bad'}”<br />\n", label) for i in range(20) for label in (0, 1)]
    for split in ("train", "test")
}


def write_acl_imdb(source):
    for split, reviews in REVIEWS.items():
        for label, name in enumerate(("neg", "pos")):
            (source / split / name).mkdir(parents=True)
            for i, (text, its_label) in enumerate(reviews):
                if its_label == label:
                    (source / split / name / f"{i}_7.txt").write_text(text, encoding="utf-8")
    (source / "train" / "unsup").mkdir()
    (source / "train" / "unsup" / "0_0.txt").write_text("of no class")


def write_tables(source):
    source.mkdir()
    for split, reviews in REVIEWS.items():
        lines = [json.dumps({"text": text, "label": label}) + "\n" for text, label in reviews]
        (source / f"{split}.jsonl").write_text("".join(lines))


def test_reviews(tmp_path):
    write_acl_imdb(tmp_path / "aclImdb")
    write_tables(tmp_path / "tables")
    for name in ("aclImdb", "tables"):
        main(["lra-text", "--source", str(tmp_path / name), "--out", str(tmp_path / f"of {name}"), "--quiet"])
    found = examples_of(tmp_path / "of aclImdb")
    assert found == examples_of(tmp_path / "of tables")
    assert found["test"] == set(REVIEWS["test"])
    assert found["train"] | found["valid"] == set(REVIEWS["train"])
    assert len(found["train"]) == 36
    assert sorted(label for _, label in found["valid"]) == [0, 0, 1, 1]


def test_any_part_of_the_reviews_has_both_classes(tmp_path):
    write_acl_imdb(tmp_path / "source")
    prepare_reviews(tmp_path / "out", source=tmp_path / "source", valid_fraction=0.5, quiet=True)
    for split, rows in rows_of(tmp_path / "out", 64).items():
        labels = [int(row["targets"]) for row in rows]
        assert {sum(labels[:10]), sum(labels[-10:])} <= set(range(2, 9)), split


def test_the_seed_decides_what_validates(tmp_path):
    write_tables(tmp_path / "source")
    for name, seed in (("a", 0), ("b", 0), ("c", -1)):
        prepare_reviews(tmp_path / name, source=tmp_path / "source", valid_fraction=0.3, seed=seed, quiet=True)
    assert fingerprint(tmp_path / "a") == fingerprint(tmp_path / "b")
    a, c = (examples_of(tmp_path / name) for name in "ac")
    assert a["test"] == c["test"]
    assert a["valid"] != c["valid"]
    assert [sum(label for _, label in x["valid"]) for x in (a, c)] == [6, 6]


def test_reviews_that_are_missing_or_damaged(tmp_path):
    command = ["lra-text", "--source", tmp_path, "--out", tmp_path / "out"]
    refused(command, r"must hold train.jsonl, or train/pos/\*.txt .* holds nothing; .*train is no directory")
    (tmp_path / "train.jsonl").write_text('{"text": "a", "label": 1}\n{"text": "b", "label": 2}\n')
    refused(command, 'Line 2 of .*train.jsonl must be like .* got b\'{"text": "b", "label": 2}\'')
    (tmp_path / "train.jsonl").write_text('{"text": null, "label": 1}\n')
    refused(command, "Line 1 of .*train.jsonl must be like")
    write_acl_imdb(tmp_path / "whole")
    command[2] = tmp_path / "whole"
    refused([*command, "--valid-fraction", 1.0], "`valid_fraction` must be between 0 and 1, got 1.0")
    assert not (tmp_path / "out").exists()


def draw_pictures(count):
    generator = np.random.default_rng(0)
    return generator.integers(0, 256, (count, 32, 32, 3), np.uint8), (np.arange(count) % 10).astype(np.uint8)


def write_batch(path, pictures, labels):
    path.write_bytes(np.concatenate([labels[:, None], pictures.transpose(0, 3, 1, 2).reshape(-1, 3072)], 1).tobytes())


def test_pictures_in_grey(tmp_path):
    pictures, labels = draw_pictures(120)
    pictures[100] = 255
    for i in range(5):
        write_batch(tmp_path / f"data_batch_{i + 1}.bin", pictures[20 * i :][:20], labels[20 * i :][:20])
    write_batch(tmp_path / "test_batch.bin", pictures[100:], labels[100:])
    main(["lra-image", "--source", str(tmp_path), "--out", str(tmp_path / "out"), "--quiet"])
    rows = rows_of(tmp_path / "out", 1024)
    assert [len(rows[split]) for split in SPLITS] == [90, 10, 20]
    assert sorted(int(row["targets"]) for row in rows["valid"]) == list(range(10))
    assert all(row["mask"].all() for split in SPLITS for row in rows[split])
    # White is not quite 255, because the weights do not quite add up to 1.
    assert (rows["test"][0]["inputs"] == 254).all()
    for row, picture, label in zip(rows["test"][1:], pictures[101:], labels[101:], strict=True):
        exact = picture.astype(np.float64) @ [0.2989, 0.5870, 0.1140]
        assert ((row["inputs"].reshape(32, 32) + 1 > exact) & (row["inputs"].reshape(32, 32) < exact + 1e-9)).all()
        assert row["targets"] == label


def test_pictures_of_both_forms_are_the_same(tmp_path):
    pictures, labels = draw_pictures(120)
    for i in range(5):
        write_batch(tmp_path / f"data_batch_{i + 1}.bin", pictures[20 * i :][:20], labels[20 * i :][:20])
    write_batch(tmp_path / "test_batch.bin", pictures[100:], labels[100:])
    prepare_cifar(tmp_path / "a", source=tmp_path, quiet=True)
    (tmp_path / "npz").mkdir()
    parts = {"train_x": pictures[:100], "train_y": labels[:100], "test_x": pictures[100:], "test_y": labels[100:]}
    np.savez(tmp_path / "npz" / "cifar10.npz", **parts)
    prepare_cifar(tmp_path / "b", source=tmp_path / "npz", quiet=True)
    assert fingerprint(tmp_path / "a") == fingerprint(tmp_path / "b")


def test_pictures_that_are_missing_or_damaged(tmp_path):
    command = ["lra-image", "--source", tmp_path, "--out", tmp_path / "out"]
    (tmp_path / "data_batch_1").touch()
    refused(command, "must hold data_batch_1.bin, .*, or cifar10.npz, but there is no .*: .* holds data_batch_1[.]$")
    pictures, labels = draw_pictures(10)
    for i in range(1, 6):
        write_batch(tmp_path / f"data_batch_{i}.bin", pictures, labels)
    write_batch(tmp_path / "test_batch.bin", pictures, labels + 1)
    refused(command, "A label in .*test_batch.bin must be one of 0 to 9, got 10")
    (tmp_path / "test_batch.bin").write_bytes(b"0" * 3074)
    refused(command, "test_batch.bin must hold .* got 3,074 bytes")
    (tmp_path / "cifar10.npz").write_bytes(b"no archive")
    refused(command, "cifar10.npz must hold the arrays train_x and train_y")
    np.savez(tmp_path / "cifar10.npz", train_x=pictures.astype(np.float32), train_y=labels)
    refused(command, "train_x in .* got float32")
    np.savez(tmp_path / "cifar10.npz", train_x=np.array([{}]), train_y=labels)
    refused(command, "train_x and train_y, got: Object arrays cannot be loaded")


def test_pairs(tmp_path, capsys):
    texts = ['the “first” "text', "another, long: " + "x" * 200, ""]
    for name in ("train", "eval", "test"):
        lines = [
            f"{label}\tP{i}\tQ{i}\t{name} {text}\t{text}\n" for label in ("1.0", "0.0") for i, text in enumerate(texts)
        ]
        (tmp_path / f"new_aan_pairs.{name}.tsv").write_text("".join(lines), encoding="utf-8")
    command = ["lra-retrieval", "--source", str(tmp_path), "--out", str(tmp_path / "out")]
    main(command)
    assert "train: 12 documents" in capsys.readouterr().out
    rows = rows_of(tmp_path / "out", 100)
    assert [len(rows[split]) for split in SPLITS] == [6, 6, 6]
    assert [int(row["targets"]) for row in rows["valid"]] == [1, 1, 1, 0, 0, 0]
    assert [text_of(row) for row in rows["valid"][:3]] == [f"eval {text}"[:100] for text in texts]
    assert [text_of(row, "others", "other_mask") for row in rows["valid"][:3]] == [text[:100] for text in texts]


def test_pairs_that_are_missing_or_damaged(tmp_path):
    command = ["lra-retrieval", "--source", tmp_path, "--out", tmp_path / "out"]
    refused(command, "there is no new_aan_pairs.train.tsv, new_aan_pairs.eval.tsv, new_aan_pairs.test.tsv")
    for name in ("train", "eval", "test"):
        (tmp_path / f"new_aan_pairs.{name}.tsv").write_text("1.0\tP\tQ\ta\tb\n")
    (tmp_path / "new_aan_pairs.eval.tsv").write_text("1.0\tP\tQ\ta\tb\n0.0\tP\tQ\ta\n")
    refused(command, "Line 2 of .*eval.tsv must be like 0.0 or 1.0, .* got b'0.0")


@pytest.mark.parametrize("name", ["lra-listops", "lra-text", "lra-image", "lra-retrieval"])
def test_help(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    assert "--source" in capsys.readouterr().out


def test_finished_data_is_kept_before_anything_is_read(tmp_path):
    (tmp_path / "manifest.json").touch()
    refused(["lra-text", "--source", tmp_path / "nowhere", "--out", tmp_path], "pass --overwrite")
