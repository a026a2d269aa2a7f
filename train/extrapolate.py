"""How do trained language models read rows that are longer than any they were trained on?

    python -m train.extrapolate --workdirs runs/ablation/latte_r_swa_0 runs/ablation/transformer_pp_0 --out runs/longer

Each model reads the validation text in rows of the trained length, and of 2, 4 and 8 times as many tokens, and its loss
is measured apart for nearer and farther positions. Full attention with rotary positions is measured as it is, and with
its rotation stretched by YaRN to the longer rows. Where a run gave latents to a pretrained transformer, this one is
measured too, as it was and with the window alone. Writes `results.md`, `results.json` and `results.png`.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import matplotlib.pyplot as plt
import tyro

from latte_eqx.pretrained import load
from train.config import Config
from train.console import plain_errors
from train.evaluate import evaluate_stream
from train.restore import begin_run, read_config, restore_run


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Measure trained language models on rows longer than those they were trained on."""

    workdirs: tuple[Path, ...]
    """The work directories of the runs."""
    out: Path
    """Where the results go."""
    factors: tuple[int, ...] = (1, 2, 4, 8)
    """How many times the trained length the rows have."""
    trained: int | None = None
    """The length to begin with; by default that of a run's rows, or of the rows that a pretrained model is made for."""
    split: str = "valid"
    """Which part of the runs' data."""

    def __post_init__(self):
        if self.trained is not None and self.trained < 1:
            raise ValueError(f"`trained` must be positive, got {self.trained}.")
        if not self.workdirs:
            raise ValueError("`workdirs` must name at least one run, got none.")
        if not self.factors or min(self.factors) < 1:
            raise ValueError(f"`factors` must be positive whole numbers, got {self.factors}.")


def bucket_edges(trained: int, seq: int) -> tuple[int, ...]:
    """Return where positions are split: at the trained length, at its halves down to an eighth, and at its doubles."""
    edges = {trained // 8, trained // 4, trained // 2, *(trained * 2**power for power in range(seq.bit_length()))}
    return tuple(sorted(edge for edge in edges if 0 < edge < seq))


class Contestant(NamedTuple):
    """A model to measure: one that a run has trained, or one that a run began from."""

    name: str
    config: Config
    trained: int
    """The length of rows it was trained on."""
    workdir: Path | None = None
    """Where its checkpoints are; none if it was not trained."""


def contestants(workdir: Path) -> Iterator[Contestant]:
    """Yield what a run has trained, and the transformer that it began from, if any: in the window alone, and whole."""
    config, name = read_config(workdir), workdir.name
    if config.task.kind != "next_token":
        raise ValueError(f"`workdirs` must be of language models, got {workdir}, {config.task.kind}.")
    yield Contestant(name, config, config.data.seq, workdir)
    if config.pretrained.path is not None and config.model.mixer == "macchiato":
        windowed = replace(config, pretrained=replace(config.pretrained, window_share=1.0))
        transformer = load(config.pretrained.path).config
        yield Contestant(f"{name}: the window alone", windowed, transformer.max_length)
        model = replace(transformer, max_length=max(transformer.max_length, config.data.seq))
        yield Contestant(f"{name}: the transformer", replace(config, model=model), transformer.max_length)


def longer(config: Config, *, seq: int, edges: tuple[int, ...], yarn_from: int | None = None) -> Config:
    """Return a run's config for rows of `seq` tokens, about as many tokens in a batch, with losses split at `edges`.

    With `yarn_from`, rotations that were trained on so many tokens are stretched.
    """
    model = replace(config.model, max_length=max(config.model.max_length, seq))
    if yarn_from is not None:
        model = replace(model, rotary_scale=seq / yarn_from, rotary_length=yarn_from)
    batch_size = max(config.data.batch_size * config.data.seq // seq, jax.device_count())
    return replace(
        config,
        model=model,
        data=replace(config.data, seq=seq, batch_size=batch_size // jax.device_count() * jax.device_count()),
        task=replace(config.task, groups=edges),
        optim=replace(config.optim, accumulate=1),
    )


def measure(arguments: Arguments) -> Iterator[dict[str, Any]]:
    """Yield a record for each model and length, and of full attention on longer rows one more with YaRN."""
    for workdir in arguments.workdirs:
        found = list(contestants(workdir))
        # The last one is what a run began from, if anything.
        first = arguments.trained or found[-1].trained
        for contestant in found:
            for seq in (first * factor for factor in arguments.factors):
                yield _measure(contestant, seq, first, arguments.split)
                model = contestant.config.model
                if seq > contestant.trained and model.mixer == "attention" and model.rotary_base is not None:
                    yield _measure(contestant, seq, first, arguments.split, with_yarn=True)


def _measure(contestant: Contestant, seq: int, first: int, split: str, *, with_yarn: bool = False) -> dict[str, Any]:
    name = f"{contestant.name} with YaRN" if with_yarn else contestant.name
    print(f"{name}: rows of {seq}", file=sys.stderr)
    yarn_from = contestant.trained if with_yarn else None
    config = longer(contestant.config, seq=seq, edges=bucket_edges(first, seq), yarn_from=yarn_from)
    workdir = contestant.workdir
    run = begin_run(config) if workdir is None else restore_run(workdir, change=lambda _: config)
    assert config.data.directory is not None
    scores = evaluate_stream(run, config.data.directory, split)
    # Without edges there is a single group, which is all.
    buckets = scores.pop("groups", [{"from": 0, "to": None, "loss": scores["loss"], "targets": scores["tokens"]}])
    buckets[-1]["to"] = seq
    return {"model": name, "seq": seq, "trained": contestant.trained, **scores, "buckets": buckets}


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
    figure, (by_length, by_position) = plt.subplots(1, 2, figsize=(10, 5), layout="constrained")
    for name, found in records.items():
        by_length.plot([record["seq"] for record in found], [record["loss"] for record in found], "o-", label=name)
        buckets = max(found, key=lambda record: record["seq"])["buckets"]
        edges = [bucket["from"] for bucket in buckets] + [buckets[-1]["to"]]
        by_position.stairs([bucket["loss"] for bucket in buckets], edges, baseline=None, label=name)
    trained = min(record["trained"] for found in records.values() for record in found)
    lengths = sorted({record["seq"] for found in records.values() for record in found})
    by_position.axvline(trained, color="grey", linestyle=":", label=f"{trained} tokens, the trained length")
    by_length.set(xlabel="tokens in a row", ylabel="loss, nats per token", xscale="log")
    by_length.set_xticks(lengths, [str(length) for length in lengths])
    by_length.minorticks_off()
    by_position.set(xlabel="position in the longest rows", xscale="symlog", xlim=(0, max(lengths)))
    figure.legend(*by_position.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: Arguments) -> None:
    """Measure and report."""
    report(list(measure(arguments)), arguments)
    print(f"\nwrote {arguments.out / 'results.md'}, results.json and results.png beside it")


if __name__ == "__main__":
    with plain_errors():
        main(tyro.cli(Arguments, description=__doc__))
