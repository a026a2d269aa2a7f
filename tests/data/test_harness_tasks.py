"""Tasks for lm-eval from small files of the released forms."""

import json
import zipfile

import pytest

from data.harness_tasks import main

PAIRS = {
    "wh_island": [("Who did she see?", "Who did she see him?"), ("What is it?", "What it is?")],
    "passive_1": [("It was “seen”.", "It was been."), ("He ran.", "He run.")],
}
GOALS = [
    ("To open a jar", "twist the lid", "eat the lid", 0),
    ("dresser", "cut it", "use a pin ", 1),
    ("To be happy", "play with a friend in the park", "qwx", 0),
]
PASSAGES = ["The dog ran to the park", "She said yes", "They were very happy", "He had a xylophone"]


def write_blimp(path, files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def blimp(path, pairs=PAIRS):
    more = {"UID": "x", "pairID": "0"}
    made = {
        f"data/{name}.jsonl": lines({"sentence_good": good, "sentence_bad": bad, **more} for good, bad in rows)
        for name, rows in pairs.items()
    }
    notes = {"__MACOSX/data/._wh_island.jsonl": b"\x00\x05\x16\x07", "data/.DS_Store": b"\x00", "data/": b""}
    return write_blimp(path, made | notes)


def piqa(directory, name="piqa_valid"):
    directory.mkdir(exist_ok=True)
    rows = ({"goal": goal, "sol1": first, "sol2": second} for goal, first, second, _ in GOALS)
    (directory / f"{name}.jsonl").write_text(lines(rows))
    (directory / f"{name}-labels.lst").write_text("".join(f"{label}\n" for *_, label in GOALS))
    return directory


def lambada(path):
    path.write_text(lines({"text": text} for text in PASSAGES))
    return path


def write_all(directory):
    """Write small sources, and the tasks of all three; return where the tasks are."""
    sources = ["--blimp", blimp(directory / "BLiMP.zip"), "--piqa", piqa(directory / "piqa")]
    sources += ["--lambada", lambada(directory / "lambada.jsonl")]
    main([*map(str, sources), "--out", str(directory / "tasks")])
    return directory / "tasks"


def settings_of(path):
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def refused(arguments, message):
    with pytest.raises(SystemExit, match=f"^error: .*{message}"):
        main([*map(str, arguments)])


def test_all_that_was_released_is_there(tmp_path, capsys):
    out = write_all(tmp_path)
    assert "4 tasks, 11 examples" in capsys.readouterr().out
    names = ["blimp_passive_1", "blimp_wh_island", "lambada", "piqa"]
    assert sorted(path.name for path in out.glob("*.jsonl")) == [f"{name}.jsonl" for name in names]
    for name, pairs in PAIRS.items():
        rows = rows_of(out / f"blimp_{name}.jsonl")
        assert [(row["sentence_good"], row["sentence_bad"]) for row in rows] == pairs
    rows = rows_of(out / "piqa.jsonl")
    assert [(row["goal"], row["sol1"], row["sol2"], row["label"]) for row in rows] == GOALS
    assert [row["text"] for row in rows_of(out / "lambada.jsonl")] == PASSAGES
    assert not list(out.glob("*.partial"))


def test_settings_are_yaml_and_name_the_examples(tmp_path):
    out = write_all(tmp_path)
    for name in ("blimp_passive_1", "piqa", "lambada"):
        settings = settings_of(out / f"{name}.yaml")
        assert settings["task"] == name
        assert settings["dataset_path"] == "json"
        assert settings["dataset_kwargs"]["data_files"] == {"validation": str((out / f"{name}.jsonl").resolve())}
    group = settings_of(out / "blimp.yaml")
    assert group["group"] == "blimp"
    assert group["task"] == ["blimp_passive_1", "blimp_wh_island"]
    assert settings_of(out / "piqa.yaml")["doc_to_text"] == "Question: {{goal}}\nAnswer:"


@pytest.mark.parametrize("name", ["valid", "dev"])
def test_piqa_has_had_other_names(tmp_path, name):
    main(["--piqa", str(piqa(tmp_path / "piqa", name)), "--out", str(tmp_path / "tasks")])
    assert len(rows_of(tmp_path / "tasks" / "piqa.jsonl")) == len(GOALS)


def test_tasks_are_replaced_only_if_asked(tmp_path):
    out = write_all(tmp_path)
    again = ["--lambada", tmp_path / "lambada.jsonl", "--out", out]
    (tmp_path / "lambada.jsonl").write_text(lines([{"text": "another one"}]))
    refused(again, "must not hold these tasks already, but it has lambada: pass --overwrite")
    assert len(rows_of(out / "lambada.jsonl")) == len(PASSAGES)
    main([*map(str, again), "--overwrite"])
    assert rows_of(out / "lambada.jsonl") == [{"text": "another one"}]
    # What was not asked for stays.
    assert len(rows_of(out / "piqa.jsonl")) == len(GOALS)


def test_what_is_missing_is_named(tmp_path):
    out = ["--out", tmp_path / "tasks"]
    refused(out, "A source must be given")
    refused(["--blimp", tmp_path / "no.zip", *out], r"must be the file BLiMP\.zip, but there is no .*no\.zip")
    refused(["--piqa", tmp_path, *out], r"must be a directory with one of piqa_valid\.jsonl, valid\.jsonl")
    refused(["--lambada", tmp_path / "no.jsonl", *out], r"must be a \.jsonl file, but there is no .*no\.jsonl")
    (piqa(tmp_path / "piqa") / "piqa_valid-labels.lst").unlink()
    refused(["--piqa", tmp_path / "piqa", *out], r"must be in piqa_valid-labels\.lst beside it, which is missing")
    (tmp_path / "file").write_text("")
    source = ["--lambada", lambada(tmp_path / "lambada.jsonl")]
    refused([*source, "--out", tmp_path / "file"], "`out` must be a directory, but .*file is a file")
    assert not (tmp_path / "tasks").exists()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"must hold data/\*\.jsonl, and does not"),
        ({"data/a.jsonl": ""}, "must hold lines like .*sentence_good.*, got none"),
        (
            {"data/a.jsonl": '{"sentence_good": "a", "sentence_bad": "b"}\nnonsense\n'},
            r"Line 2 of .*a\.jsonl must be like",
        ),
        ({"data/a.jsonl": '{"sentence_good": "a"}\n'}, r"Line 1 of .* must be like .*KeyError\('sentence_bad'\)"),
        ({"data/a.jsonl": '{"sentence_good": "a", "sentence_bad": 3}\n'}, "sentence_bad is no text"),
        ({"data/a.jsonl": "[1, 2]\n"}, "Line 1 of .* must be like .*TypeError"),
    ],
)
def test_malformed_pairs_are_refused(tmp_path, files, message):
    path = write_blimp(tmp_path / "BLiMP.zip", files)
    refused(["--blimp", path, "--out", tmp_path / "tasks"], message)
    assert not (tmp_path / "tasks").exists()


def test_a_file_that_is_no_archive_is_refused(tmp_path):
    (tmp_path / "BLiMP.zip").write_text("not found")
    refused(["--blimp", tmp_path / "BLiMP.zip", "--out", tmp_path / "tasks"], "must be a zip file, got .*BLiMP.zip")
    refused(["--blimp", tmp_path, "--out", tmp_path / "tasks"], "must be a zip file, got ")


def test_answers_must_fit_the_goals(tmp_path):
    labels = piqa(tmp_path / "piqa") / "piqa_valid-labels.lst"
    arguments = ["--piqa", tmp_path / "piqa", "--out", tmp_path / "tasks"]
    labels.write_text("0\n")
    refused(arguments, "must have a line for each of 3 goals, got 1")
    labels.write_text("0\n2\n")
    refused(arguments, "Line 2 of .* must be like 0 or 1, got b'2'")


@pytest.mark.parametrize("text", ["word", "a word ", " word", "   ", 7])
def test_a_passage_must_have_a_last_word(tmp_path, text):
    path = tmp_path / "lambada.jsonl"
    path.write_text(lines([{"text": "all is well"}, {"text": text}]))
    refused(["--lambada", path, "--out", tmp_path / "tasks"], "Line 2 of .* must be like .*two words or more")
