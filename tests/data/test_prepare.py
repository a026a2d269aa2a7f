"""The command line: from files to a prepared directory, interrupted or not."""

import gzip
import itertools
import json
import signal
import subprocess
import sys
import time

import pytest

from data import CORPUS, prepare
from data.prepare import main, prepare_openwebtext, prepare_text
from data.prepared import MANIFEST, NotPrepared, fingerprint, open_split, verify
from data.tokenizer import load_tokenizer


def texts_of(directory, split):
    prepared = open_split(directory, split, verify=True)
    tokenizer, offsets = load_tokenizer(prepared.manifest.tokenizer), prepared.offsets
    assert all(prepared.tokens[offsets[1:] - 1] == tokenizer.end_of_text)
    return [tokenizer.decode(prepared.tokens[a : b - 1]) for a, b in itertools.pairwise(offsets)]


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_the_corpus(tmp_path):
    manifest = prepare_text([CORPUS], tmp_path / "out", quiet=True)
    text = CORPUS.read_text()
    # The usual split of this text.
    assert [manifest.splits[split].num_tokens - 1 for split in ("train", "valid")] == [1_003_854, 111_540]
    assert texts_of(tmp_path / "out", "valid") == [text[1_003_854:]]
    assert (manifest.tokenizer, manifest.vocab_size, manifest.source["paths"]) == ("bytes", 257, [str(CORPUS)])


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
def test_documents_round_trip(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(prepare, "BATCH_CHARACTERS", 500)
    texts = [f"Document {i}: “quotes” <|endoftext|> 日本語\n" + "words " * (i % 17) for i in range(200)]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    prepare_text([path], tmp_path / "out", tokenizer=tokenizer, valid_fraction=0.2, quiet=True)
    train, valid = texts_of(tmp_path / "out", "train"), texts_of(tmp_path / "out", "valid")
    assert sorted(train + valid) == sorted(texts)
    assert 20 < len(valid) < 60


def test_validation_files_and_separators(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("one\n==\ntwo\n==\n")
    (tmp_path / "in" / "b.txt.gz").write_bytes(gzip.compress(b"three"))
    (tmp_path / "in" / "v.txt").write_text("four\n==\nfive")
    out = tmp_path / "out"
    command = ["text", str(tmp_path / "in"), "--out", str(out), "--valid", str(tmp_path / "in" / "v.txt")]
    main([*command, "--document-separator", r"\n==\n"])
    assert (texts_of(out, "train"), texts_of(out, "valid")) == (["one", "two", "three"], ["four", "five"])
    assert "train: 3 documents, 14 tokens; valid: 2 documents, 10 tokens" in capsys.readouterr().out


def test_no_validation_data_when_none_are_wanted(tmp_path):
    prepare_text([CORPUS], tmp_path / "out", valid_fraction=0.0, quiet=True)
    assert texts_of(tmp_path / "out", "train") == [CORPUS.read_text()]
    with pytest.raises(ValueError, match="one of train in"):
        open_split(tmp_path / "out", "valid")


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("", [], "'train' has none"),
        (" \n", [], "'train' has none"),
        ("some text", ["--valid-fraction", "1.5"], r"`valid_fraction` must be in \[0, 1\), got 1.5"),
        ("some text", ["--document-separator", ""], "`document_separator` must not be empty"),
        ("some text", ["--document-separator", "=="], "'valid' has none"),
    ],
)
def test_errors_of_the_command_line(tmp_path, content, options, message):
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(SystemExit, match=f"^error: .*{message}"):
        main(["text", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out"), "--quiet", *options])
    assert not list(tmp_path.glob("out/*"))


def test_finished_data_is_kept(tmp_path):
    prepare_text([CORPUS], tmp_path, quiet=True)
    before = fingerprint(tmp_path)
    command = ["text", str(CORPUS), "--out", str(tmp_path), "--valid-fraction", "0.2", "--quiet"]
    with pytest.raises(SystemExit, match="pass --overwrite"):
        main(command)
    assert fingerprint(tmp_path) == before
    main([*command, "--overwrite"])
    assert fingerprint(tmp_path) != before


@pytest.mark.parametrize(("command", "words"), [("text", "--document-separator"), ("openwebtext", "8,013,769")])
def test_help(command, words, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert words in capsys.readouterr().out


def test_killed_and_run_again(tmp_path):
    text = CORPUS.read_text() * 40
    (tmp_path / "a.txt").write_text(text)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "data.prepare", "text", str(tmp_path / "a.txt"), "--out", str(out)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    partial = out / "train.tokens.partial"
    while process.poll() is None and not (partial.exists() and partial.stat().st_size):
        time.sleep(0.001)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert partial.stat().st_size
    assert not (out / MANIFEST).exists()
    with pytest.raises(NotPrepared):
        open_split(out, "train")
    subprocess.run(command, check=True, capture_output=True)
    assert verify(out).splits["train"].num_tokens == int(len(text) * 0.9) + 1
    assert len(list(out.iterdir())) == 5


def test_interrupted_from_the_keyboard(tmp_path):
    (tmp_path / "a.txt").write_text(CORPUS.read_text() * 40)
    out = tmp_path / "out"
    # A process that was started in the background may have inherited that it ignores the signal.
    program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    program += f"from data.prepare import main; main(['text', {str(tmp_path / 'a.txt')!r}, '--out', {str(out)!r}])"
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not (out / "train.tokens.partial").exists():
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    assert "interrupted: nothing was finished" in process.communicate()[1]
    assert process.returncode == 1
    assert not list(out.iterdir())


def test_no_room_on_the_disk(tmp_path):
    """A limit on the size of files fails in the same place as a full disk."""
    program = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))\n"
    program += f"from data.prepare import main; main(['text', {str(CORPUS)!r}, '--out', {str(tmp_path / 'out')!r}])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 1
    assert "error:" in result.stderr
    assert f"Nothing was finished in {tmp_path / 'out'}" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "directory"])
@pytest.mark.filterwarnings("default")
def test_openwebtext_from_local_files(tmp_path, monkeypatch, kind):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    texts = [f"Document {i} of the web.\n\nIt ends here." for i in range(3999)]
    source = tmp_path / "source"
    source.mkdir()
    if kind == "jsonl":
        write_jsonl(source / "part.jsonl", [*texts, " "])
    else:
        datasets.Dataset.from_dict({"text": [*texts, " "]}).to_parquet(source / "part.parquet")
    path = source if kind == "directory" else source / f"part.{kind}"
    manifest = prepare_openwebtext(tmp_path / "out", source=str(path), quiet=True)
    train, valid = texts_of(tmp_path / "out", "train"), texts_of(tmp_path / "out", "valid")
    assert sorted(train + valid) == sorted(texts)
    assert (len(valid), manifest.tokenizer) == (2, "gpt2")
    parts = datasets.Dataset.from_dict({"text": [*texts, " "]}).train_test_split(0.0005, seed=2357, shuffle=True)
    assert valid == parts["test"]["text"][:]


@pytest.mark.filterwarnings("default")
def test_openwebtext_needs_a_column_of_text(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "a.jsonl").write_text('{"words": "x"}\n')
    with pytest.raises(ValueError, match="column `text`, got words"):
        prepare_openwebtext(tmp_path / "out", source=str(tmp_path / "a.jsonl"), quiet=True)


def test_openwebtext_is_not_fetched_for_nothing(tmp_path):
    prepare_text([CORPUS], tmp_path, quiet=True)
    with pytest.raises(SystemExit, match="pass --overwrite"):
        main(["openwebtext", "--out", str(tmp_path), "--source", str(tmp_path / "nowhere.parquet")])


def test_openwebtext_without_its_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SystemExit, match=r"pip install 'latte-eqx\[openwebtext\]'"):
        main(["openwebtext", "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
