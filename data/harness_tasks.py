"""Write tasks for lm-eval from the files in which BLiMP, PIQA and LAMBADA were released.

    python -m data.harness_tasks --blimp BLiMP.zip --piqa DIR --lambada FILE --out TASKS
    python -m train.evaluate --harness blimp,piqa,lambada --tasks-dir TASKS --model MODEL

A task is a .yaml file, which asks as lm-eval's own task of that name does, and a .jsonl file of its examples. The first
names the second by its full path: a directory that was moved must be written again.
"""

import json
import re
import sys
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import tyro

PIQA_NAMES = "piqa_valid", "valid", "dev"
ACCURACY = {"metric": "acc", "aggregation": "mean", "higher_is_better": True}

Rows = list[dict[str, Any]]
Tasks = dict[str, tuple[dict[str, Any], Rows]]
"""Of each task, its settings and its examples."""


def write_tasks(
    out: Path,
    *,
    blimp: Path | None = None,
    piqa: Path | None = None,
    lambada: Path | None = None,
    overwrite: bool = False,
) -> None:
    """Write the tasks whose sources are given.

    Args:
        out: The directory to make.
        blimp: BLiMP.zip of the release, with data/*.jsonl. Each file is a task, and `blimp` is the group of them.
        piqa: A directory with piqa_valid.jsonl and piqa_valid-labels.lst (or valid.jsonl, dev.jsonl, and their labels).
        lambada: A .jsonl file, lines like {"text": "..."}. The last word of each text is to be predicted.
        overwrite: Replace tasks that are there already.
    """
    if blimp is None and piqa is None and lambada is None:
        raise ValueError("A source must be given, got none of --blimp, --piqa and --lambada.")
    # All is read before anything is written.
    tasks: Tasks = {}
    if blimp is not None:
        tasks |= read_blimp(blimp)
    if piqa is not None:
        tasks |= read_piqa(piqa)
    if lambada is not None:
        tasks |= read_lambada(lambada)
    if out.exists() and not out.is_dir():
        raise ValueError(f"`out` must be a directory, but {out} is a file.")
    there = [name for name in tasks if (out / f"{name}.yaml").exists()]
    if there and not overwrite:
        raise ValueError(f"`out` must not hold these tasks already, but it has {', '.join(there)}: pass --overwrite.")
    out.mkdir(parents=True, exist_ok=True)
    for name, (settings, rows) in tasks.items():
        _write_task(out.resolve(), name, settings, rows)
    if blimp is not None:
        group = {
            "group": "blimp",
            "task": [name for name in tasks if name.startswith("blimp_")],
            "aggregate_metric_list": [{"metric": "acc", "aggregation": "mean", "weight_by_size": False}],
        }
        _replace(out / "blimp.yaml", _yaml(group))
    print(f"{out}: {len(tasks)} tasks, {sum(len(rows) for _, rows in tasks.values()):,} examples.")


def read_blimp(path: Path) -> Tasks:
    """Read minimal pairs: which of two sentences is likelier?"""
    settings = {
        "output_type": "multiple_choice",
        "doc_to_text": "",
        "doc_to_target": 0,
        "doc_to_choice": "{{[sentence_good, sentence_bad]}}",
        "num_fewshot": 0,
        "metric_list": [ACCURACY],
    }
    tasks = {}
    try:
        with zipfile.ZipFile(path) as archive:
            # Beside the data are files of the same names, in which a Mac keeps its own notes.
            names = [name for name in sorted(archive.namelist()) if re.fullmatch(r"data/\w+\.jsonl", name)]
            for name in names:
                lines = archive.read(name).splitlines()
                rows = _read_lines(lines, f"{path}/{name}", '{"sentence_good": "...", "sentence_bad": "..."}', _pair)
                tasks[f"blimp_{PurePosixPath(name).stem}"] = settings, rows
    except FileNotFoundError as error:
        raise FileNotFoundError(f"`--blimp` must be the file BLiMP.zip, but there is no {path}.") from error
    except (zipfile.BadZipFile, IsADirectoryError) as error:
        raise ValueError(f"`--blimp` must be a zip file, got {path}: {error}.") from error
    if not tasks:
        raise ValueError(f"{path} must hold data/*.jsonl, and does not.")
    return tasks


def read_piqa(directory: Path) -> Tasks:
    """Read goals, each with two ways to reach it: which is likelier to follow?"""
    found = [name for name in PIQA_NAMES if (directory / f"{name}.jsonl").is_file()]
    if not found:
        names = ", ".join(f"{name}.jsonl" for name in PIQA_NAMES)
        raise FileNotFoundError(f"`--piqa` must be a directory with one of {names}, got {directory}.")
    examples, labels = directory / f"{found[0]}.jsonl", directory / f"{found[0]}-labels.lst"
    if not labels.is_file():
        raise FileNotFoundError(f"The answers to {examples} must be in {labels.name} beside it, which is missing.")
    form = '{"goal": "...", "sol1": "...", "sol2": "..."}'
    rows = _read_lines(examples.read_bytes().splitlines(), examples, form, _goal)
    answers = _read_lines(labels.read_bytes().splitlines(), labels, "0 or 1", _answer)
    if len(rows) != len(answers):
        raise ValueError(f"{labels} must have a line for each of {len(rows)} goals, got {len(answers)}.")
    settings = {
        "output_type": "multiple_choice",
        # Solved examples come from the same file; lm-eval leaves out the one that is asked.
        "fewshot_split": "validation",
        "doc_to_text": "Question: {{goal}}\nAnswer:",
        "doc_to_target": "label",
        "doc_to_choice": "{{[sol1, sol2]}}",
        "metric_list": [ACCURACY, {**ACCURACY, "metric": "acc_norm"}],
    }
    return {"piqa": (settings, [row | answer for row, answer in zip(rows, answers, strict=True)])}


def read_lambada(path: Path) -> Tasks:
    """Read passages whose last word is to be predicted."""
    if not path.is_file():
        raise FileNotFoundError(f"`--lambada` must be a .jsonl file, but there is no {path}.")
    rows = _read_lines(path.read_bytes().splitlines(), path, '{"text": "two words or more"}', _passage)
    settings = {
        "output_type": "loglikelihood",
        "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
        "doc_to_target": "{{' '+text.split(' ')[-1]}}",
        "metric_list": [{"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}, ACCURACY],
    }
    return {"lambada": (settings, rows)}


def _pair(line: bytes) -> dict[str, Any]:
    return _texts(line, "sentence_good", "sentence_bad")


def _goal(line: bytes) -> dict[str, Any]:
    return _texts(line, "goal", "sol1", "sol2")


def _answer(line: bytes) -> dict[str, Any]:
    return {"label": [b"0", b"1"].index(line.strip())}


def _passage(line: bytes) -> dict[str, Any]:
    row = _texts(line, "text")
    *before, last = row["text"].split(" ")
    if not "".join(before).strip() or not last.strip():
        raise ValueError("there is no last word")
    return row


def _texts(line: bytes, *names: str) -> dict[str, Any]:
    row = json.loads(line)
    for name in names:
        if not isinstance(row[name], str) or not row[name].strip():
            raise ValueError(f"{name} is no text")
    return {name: row[name] for name in names}


def _read_lines(
    lines: Iterable[bytes], source: Path | str, form: str, parse: Callable[[bytes], dict[str, Any]]
) -> Rows:
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(parse(line))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"Line {number} of {source} must be like {form}, got {line[:80]!r} ({error!r})."
            ) from error
    if not rows:
        raise ValueError(f"{source} must hold lines like {form}, got none.")
    return rows


def _write_task(directory: Path, name: str, settings: Mapping[str, Any], rows: Rows) -> None:
    examples = directory / f"{name}.jsonl"
    _replace(examples, "".join(json.dumps(row) + "\n" for row in rows))
    source = {
        "task": name,
        "dataset_path": "json",
        # What `datasets` makes of the examples stays beside them, and not in its cache for all.
        "dataset_kwargs": {"data_files": {"validation": str(examples)}, "cache_dir": str(directory / ".cache")},
        "validation_split": "validation",
    }
    # A task can be seen once its settings are there: they come last.
    _replace(directory / f"{name}.yaml", _yaml({**source, **settings, "metadata": {"version": 1.0}}))


def _yaml(settings: Mapping[str, Any]) -> str:
    """Write settings as lines of YAML, of which JSON is a part."""
    return "".join(f"{name}: {json.dumps(value, ensure_ascii=False)}\n" for name, value in settings.items())


def _replace(path: Path, content: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(content, encoding="utf-8")
    partial.replace(path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write tasks as the command line says."""
    try:
        tyro.cli(write_tasks, prog="python -m data.harness_tasks", description=__doc__, args=arguments)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
