"""What preparations share: progress while they write, and a line at the end that says what came of it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from data.prepared import Examples, Manifest
from data.tokenizer import AnyTokenizer, Vocabulary
from data.writing import writing


class Example(NamedTuple):
    """The documents of an example and what is to be said of it: a class, or a target for each position."""

    split: str
    documents: Sequence[np.ndarray]
    label: np.ndarray | int


def prepare_examples(
    examples: Iterable[Example],
    out: Path,
    *,
    vocabulary: AnyTokenizer | Vocabulary,
    kind: Examples,
    splits: tuple[str, ...],
    source: Mapping[str, Any],
    total: int,
    overwrite: bool,
    quiet: bool,
) -> Manifest:
    """Write all examples, of which there are `total`."""
    with writing(Path(out), vocabulary, splits=splits, examples=kind, overwrite=overwrite) as writer:
        with progress(total, quiet) as advance:
            for example in examples:
                writer.append_example(*example)
                advance(1)
        manifest = writer.finish(source)
    say_what_was_made(out, manifest, quiet)
    return manifest


def say_what_was_made(out: Path, manifest: Manifest, quiet: bool) -> None:
    """Print a line, unless told to be quiet."""
    if quiet:
        return
    counts = (f"{name}: {x.num_documents:,} documents, {x.num_tokens:,} tokens" for name, x in manifest.splits.items())
    print(f"{out}: {manifest.tokenizer} tokens. {'; '.join(counts)}.")


@contextmanager
def progress(total: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar, and give a function that moves it on."""
    columns = TextColumn("{task.description}"), BarColumn(None), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as bar:
        task = bar.add_task("preparing", total=total)
        yield lambda amount: bar.advance(task, amount)
