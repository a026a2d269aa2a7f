"""Multi-query associative recall: pairs of a key and a value, then keys alone, of which the value is to be said.

A row begins with its pairs, k1 v1 k2 v2 ... Then each key comes once more, at an even place after the pairs that is the
likelier the nearer it is: slot i, from 0, has weight (i + 1) ** (POWER - 1). The target there is the key's value; all
other places hold the token 0 and have no target. Keys and values are distinct, and drawn from two halves of the tokens.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from data.packing import NOTHING
from data.prepared import Examples, Manifest
from data.preparing import Example, prepare_examples
from data.tokenizer import Vocabulary
from data.writing import check_free

POWER = 0.01
# So many rows are made together.
BLOCK = 1000


def make_rows(
    num_rows: int, *, seq: int, pairs: int, num_tokens: int = 8192, generator: np.random.Generator
) -> tuple[Integer[np.ndarray, "rows seq"], Integer[np.ndarray, "rows seq"]]:
    """Return the inputs and targets of some rows."""
    if pairs < 1 or 4 * pairs > seq or seq % 2:
        raise ValueError(f"`seq` must be even and at least 4 times `pairs`, got {seq=}, {pairs=}.")
    if num_tokens % 2 or pairs > num_tokens // 2 - 1:
        raise ValueError(f"`num_tokens` must be even with more than `pairs` in each half, got {num_tokens=}, {pairs=}.")
    keys = _draw_distinct(1, num_tokens // 2, (num_rows, pairs), generator)
    values = _draw_distinct(num_tokens // 2, num_tokens, (num_rows, pairs), generator)
    num_slots = (seq - 2 * pairs) // 2
    # The first to arrive, at rates of their weights, are draws one after another without putting back.
    arrival = generator.standard_exponential((num_rows, num_slots)) * (np.arange(num_slots) + 1) ** (1 - POWER)
    slots = np.argsort(arrival, axis=1)[:, :pairs]
    inputs, targets = np.zeros((num_rows, seq), np.int32), np.full((num_rows, seq), NOTHING, np.int32)
    inputs[:, 0 : 2 * pairs : 2], inputs[:, 1 : 2 * pairs : 2] = keys, values
    row, places = np.arange(num_rows)[:, None], 2 * pairs + 2 * slots
    inputs[row, places], targets[row, places] = keys, values
    return inputs, targets


def _draw_distinct(low: int, high: int, shape: tuple[int, int], generator: np.random.Generator) -> np.ndarray:
    """Draw rows without repetition, by drawing those again that have one."""
    found = generator.integers(low, high, shape)
    if 4 * shape[1] > high - low:
        # Too few would have none.
        return low + generator.permuted(np.tile(np.arange(high - low), (shape[0], 1)), axis=1)[:, : shape[1]]
    while len(again := np.flatnonzero((np.diff(np.sort(found, axis=1), axis=1) == 0).any(axis=1))):
        found[again] = generator.integers(low, high, (len(again), shape[1]))
    return found


def prepare_mqar(
    out: Path,
    *,
    seq: int = 256,
    pairs: int = 16,
    num_tokens: int = 8192,
    num_train: int = 100_000,
    num_valid: int = 3_000,
    num_test: int = 10_000,
    seed: int = 0,
    overwrite: bool = False,
    quiet: bool = False,
) -> Manifest:
    """Make rows of multi-query associative recall.

    Args:
        out: The directory to make.
        seq: Tokens in a row; even, and at least 4 times the pairs.
        pairs: Keys and values in a row.
        num_tokens: Kinds of tokens: half of them for keys, half for values.
        num_train: Rows to train on.
        num_valid: Rows to validate on.
        num_test: Rows to test on.
        seed: Decides all rows; each split has its own stream.
        overwrite: Replace prepared data that is there already.
        quiet: Show no progress.
    """
    check_free(Path(out), overwrite=overwrite)
    sizes = {"train": num_train, "valid": num_valid, "test": num_test}
    make_rows(1, seq=seq, pairs=pairs, num_tokens=num_tokens, generator=np.random.default_rng(seed))

    def examples() -> Iterator[Example]:
        for number, (split, size) in enumerate(sizes.items()):
            generator = np.random.default_rng([seed, number])
            for start in range(0, size, BLOCK):
                how_many = min(BLOCK, size - start)
                rows = make_rows(how_many, seq=seq, pairs=pairs, num_tokens=num_tokens, generator=generator)
                for inputs, targets in zip(*rows, strict=True):
                    yield Example(split, [inputs.astype(np.uint16)], targets)

    return prepare_examples(
        examples(),
        out,
        vocabulary=Vocabulary("mqar", num_tokens + 1),
        kind=Examples(num_classes=0),
        splits=tuple(sizes),
        source={"kind": "mqar", "seq": seq, "pairs": pairs, "num_tokens": num_tokens, "seed": seed},
        total=sum(sizes.values()),
        overwrite=overwrite,
        quiet=quiet,
    )
