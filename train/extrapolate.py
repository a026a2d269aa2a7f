"""How do trained language models read rows that are longer than any they were trained on?

    python -m train.extrapolate --workdirs runs/ablation/latte_r_swa_0 runs/ablation/transformer_pp_0 --out runs/longer

Each model reads the validation text in rows of the trained length, and of 2, 4 and 8 times as many tokens, and its loss
is measured apart for nearer and farther positions. Full attention with rotary positions is measured as it is, and with
its rotation stretched by YaRN to the longer rows. Writes `results.md`, `results.json` and `results.png`.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import matplotlib.pyplot as plt
import tyro

from train.config import Config
from train.console import plain_errors
from train.evaluate import evaluate_stream
from train.restore import Run, restore_run


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Measure trained language models on rows longer than those they were trained on."""

    workdirs: tuple[Path, ...]
    """The work directories of the runs."""
    out: Path
    """Where the results go."""
    factors: tuple[int, ...] = (1, 2, 4, 8)
    """How many times the trained length the rows have."""
    split: str = "valid"
    """Which part of the runs' data."""

    def __post_init__(self):
        if not self.workdirs:
            raise ValueError("`workdirs` must name at least one run, got none.")
        if not self.factors or min(self.factors) < 1:
            raise ValueError(f"`factors` must be positive whole numbers, got {self.factors}.")


def bucket_edges(trained: int, seq: int) -> tuple[int, ...]:
    """Return where positions are split: at the trained length, at its halves down to an eighth, and at its doubles."""
    edges = {trained // 8, trained // 4, trained // 2, *(trained * 2**power for power in range(seq.bit_length()))}
    return tuple(sorted(edge for edge in edges if 0 < edge < seq))


def longer(config: Config, *, factor: int, with_yarn: bool) -> Config:
    """Return a run's config for rows `factor` times as long, about as many tokens in a batch."""
    trained = config.data.seq
    seq, batch_size = factor * trained, max(config.data.batch_size // factor, jax.device_count())
    model = replace(config.model, rotary_scale=float(factor), rotary_length=trained) if with_yarn else config.model
    return replace(
        config,
        model=replace(model, max_length=max(model.max_length, seq)),
        data=replace(config.data, seq=seq, batch_size=batch_size),
        task=replace(config.task, groups=bucket_edges(trained, seq)),
        optim=replace(config.optim, accumulate=1),
    )


def measure(arguments: Arguments) -> Iterator[dict[str, Any]]:
    """Yield a record for each run and length, and of full attention one more with YaRN."""
    for workdir in arguments.workdirs:
        for factor in arguments.factors:
            run = restore_run(workdir, change=partial(longer, factor=factor, with_yarn=False))
            if run.config.task.kind != "next_token":
                raise ValueError(f"`workdirs` must be of language models, got {workdir}, {run.config.task.kind}.")
            yield _measure(run, workdir.name, factor, arguments.split)
            model = run.config.model
            if factor > 1 and model.mixer == "attention" and model.rotary_base is not None:
                run = restore_run(workdir, change=partial(longer, factor=factor, with_yarn=True))
                yield _measure(run, f"{workdir.name} with YaRN", factor, arguments.split)


def _measure(run: Run, name: str, factor: int, split: str) -> dict[str, Any]:
    data = run.config.data
    print(f"{name}: rows of {data.seq}", file=sys.stderr)
    assert data.directory is not None
    scores = evaluate_stream(run, data.directory, split)
    # Without edges there is a single group, which is all.
    buckets = scores.pop("groups", [{"from": 0, "to": None, "loss": scores["loss"], "targets": scores["tokens"]}])
    buckets[-1]["to"] = data.seq
    return {"model": name, "seq": data.seq, "trained": data.seq // factor, **scores, "buckets": buckets}


def report(records: Sequence[dict[str, Any]], arguments: Arguments) -> None:
    """Write the numbers, two tables and a figure."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "results.json").write_text(json.dumps(list(records), indent=2) + "\n")
    names = list(dict.fromkeys(record["model"] for record in records))
    of = lambda name: [record for record in records if record["model"] == name]
    lengths = sorted({record["seq"] for record in records})
    lines = [
        f"Perplexity on rows of so many tokens; jax {jax.__version__}, {jax.devices()[0].device_kind}.",
        "",
        f"| model | trained on | {' | '.join(map(str, lengths))} |",
        f"| --- | --- {'| --- ' * len(lengths)}|",
    ]
    for name in names:
        found = {record["seq"]: f"{record['perplexity']:.3f}" for record in of(name)}
        cells = " | ".join(found.get(seq, "") for seq in lengths)
        lines.append(f"| {name} | {of(name)[0]['trained']} | {cells} |")
    lines += ["", "Loss (nats per token) by position, in the longest rows.", ""]
    for number, name in enumerate(names):
        buckets = max(of(name), key=lambda record: record["seq"])["buckets"]
        if not number:
            lines += ["| model |" + "".join(f" to {bucket['to']} |" for bucket in buckets)]
            lines += [f"| --- {'| --- ' * len(buckets)}|"]
        lines.append(f"| {name} |" + "".join(f" {bucket['loss']:.4f} |" for bucket in buckets))
    (arguments.out / "results.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    _draw({name: of(name) for name in names}, arguments.out / "results.png")


def _draw(records: dict[str, list[dict[str, Any]]], path: Path) -> None:
    plt.switch_backend("agg")  # It needs no display.
    figure, (by_length, by_position) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, found in records.items():
        by_length.plot([record["seq"] for record in found], [record["loss"] for record in found], "o-", label=name)
        buckets = max(found, key=lambda record: record["seq"])["buckets"]
        edges = [bucket["from"] for bucket in buckets] + [buckets[-1]["to"]]
        by_position.stairs([bucket["loss"] for bucket in buckets], edges, baseline=None, label=name)
    trained = next(iter(records.values()))[0]["trained"]
    by_position.axvline(trained, color="grey", linestyle=":", label="trained length")
    by_length.set(xlabel="tokens in a row", ylabel="loss, nats per token", xscale="log")
    by_position.set(xlabel="position in the longest rows", xscale="symlog")
    by_length.legend()
    by_position.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: Arguments) -> None:
    """Measure and report."""
    report(list(measure(arguments)), arguments)
    print(f"\nwrote {arguments.out / 'results.md'}, results.json and results.png beside it")


if __name__ == "__main__":
    with plain_errors():
        main(tyro.cli(Arguments, description=__doc__))
