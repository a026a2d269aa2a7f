"""Let a model write many texts, as data for its own latents where what it was trained on cannot be had.

    python -m train.write_texts --model stories15M.bin --num-texts 2048 --out stories.jsonl

Each text begins from nothing, and ends where the model ends it or after `--max-tokens`. The file has a {"text": "..."}
in each line, as `python -m data.prepare text` reads them. Batches are written as they are done, and the same command
goes on where it was left.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import jax
import tyro
from rich.progress import Progress

from latte_eqx import generate
from train.console import plain_errors
from train.restore import TrainedModel, load_model


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Let a model write many texts."""

    out: Path
    """The file to write, such as texts.jsonl."""
    workdir: Path | None = None
    """The work directory of a run."""
    model: Path | None = None
    """Or a pretrained model: a directory, or a file, that `latte_eqx.pretrained.load` reads."""
    num_texts: int = 2048
    """How many texts."""
    max_tokens: int = 256
    """How many tokens a text has at most."""
    batch_size: int = 128
    """How many are written at once."""
    temperature: float = 1.0
    """1 draws as the model would have it."""
    top_p: float | None = None
    """Choose among the likeliest tokens that together have this probability."""
    seed: int = 0
    """Decides what is drawn."""

    def __post_init__(self):
        for name in ("num_texts", "max_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be positive, got {getattr(self, name)}.")
        if self.out.suffix != ".jsonl":
            raise ValueError(f"`out` must end in .jsonl, got {self.out}.")


def write_batch(trained: TrainedModel, number: int, arguments: Arguments) -> Iterator[str]:
    """Yield the texts of a batch."""
    tokenizer = trained.tokenizer
    first = list(map(int, tokenizer.encode(""))) or [tokenizer.end_of_text]
    rows = generate(
        trained.model,
        [first] * arguments.batch_size,
        max_new_tokens=arguments.max_tokens,
        key=jax.random.fold_in(jax.random.key(arguments.seed), number),
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        stop_token=tokenizer.end_of_text,
    )
    for row in rows.tolist():
        end = row.index(tokenizer.end_of_text) if tokenizer.end_of_text in row else len(row)
        yield tokenizer.decode(row[:end])


def main(arguments: Arguments) -> None:
    """Write the texts that are not there yet."""
    # Before anything is written: a model that cannot be read leaves nothing behind.
    trained = load_model(arguments.model, arguments.workdir)
    settings = {name: str(value) for name, value in vars(arguments).items() if name not in ("out", "num_texts")}
    record = arguments.out.with_suffix(".json")
    if record.exists() and json.loads(record.read_text()) != settings:
        raise ValueError(f"{arguments.out} must be of the same arguments to go on with, got others than in {record}.")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(settings, indent=2) + "\n")
    lines = arguments.out.read_text().splitlines(keepends=True) if arguments.out.exists() else []
    # What was cut off in the middle of a batch is written again.
    num_batches = len(lines) // arguments.batch_size
    lines = lines[: num_batches * arguments.batch_size]
    arguments.out.write_text("".join(lines))
    with Progress() as progress, arguments.out.open("a") as file:
        task = progress.add_task("texts", total=arguments.num_texts, completed=len(lines))
        for number in range(num_batches, -(-arguments.num_texts // arguments.batch_size)):
            num_missing = arguments.num_texts - number * arguments.batch_size
            texts = islice(write_batch(trained, number, arguments), num_missing)
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
            file.flush()
            progress.update(task, completed=min((number + 1) * arguments.batch_size, arguments.num_texts))
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    with plain_errors():
        main(tyro.cli(Arguments, description=__doc__))
