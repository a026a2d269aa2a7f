"""Nested operations on lists of digits, such as [MAX 2 9 [MIN 4 7 X 0 X, whose value is a digit.

The operations are the minimum, the maximum, the median without its fraction, and the sum modulo 10. An expression
is a random tree: a node is an operation with probability 1/4, and a digit otherwise or at the greatest depth. Trees are
drawn many at a time, level by level. One that grows too long is given up before its next level.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int64, UInt8

from data.tokenizer import Vocabulary

OPERATIONS = "[MIN", "[MAX", "[MED", "[SM"
CLOSE = "X"
TOKENS = (*map(str, range(10)), *OPERATIONS, CLOSE)
"""The text of each id."""
IDS = {token: i for i, token in enumerate(TOKENS)}
VOCABULARY = Vocabulary("listops", len(TOKENS) + 1)

OPERATION_PROBABILITY = 0.25
TREES_AT_ONCE = 4096
PATIENCE = 100
"""So many draws in a row without anything new mean that nothing new is to be expected."""


@dataclass(frozen=True)
class Bounds:
    """Which expressions are wanted. Their lengths are counted in tokens."""

    min_length: int = 500
    """Every expression is longer than this."""
    max_length: int = 2000
    """Every expression is shorter than this."""
    max_depth: int = 10
    """Levels of an expression; the last one has digits only."""
    max_args: int = 10
    """Arguments of an operation at most; at least it has two."""

    def __post_init__(self):
        if not 0 <= self.min_length < self.max_length - 1:
            raise ValueError(
                "There must be a length above `min_length` and below `max_length`, "
                f"got min_length={self.min_length}, max_length={self.max_length}."
            )
        if self.max_depth < 1 or self.max_args < 2:
            raise ValueError(
                "`max_depth` must be at least 1 and `max_args` at least 2, "
                f"got max_depth={self.max_depth}, max_args={self.max_args}."
            )


@dataclass(frozen=True)
class _Level:
    """All nodes of a depth; children are in the order of their parents."""

    tokens: Int64[np.ndarray, " nodes"]
    num_children: Int64[np.ndarray, " nodes"]
    trees: Int64[np.ndarray, " nodes"]
    """The tree of each node."""

    def only(self, wanted: Bool[np.ndarray, " trees"]) -> "_Level":
        kept = wanted[self.trees]
        return _Level(self.tokens[kept], self.num_children[kept], self.trees[kept])


def draw_expressions(bounds: Bounds, seed: int) -> Iterator[tuple[UInt8[np.ndarray, " tokens"], int]]:
    """Yield different expressions and their values, as long as new ones can be found."""
    seen: set[bytes] = set()
    misses = 0
    for number in range(2**63):
        before = len(seen)
        for tokens, value in _draw(bounds, np.random.default_rng((seed, number))):
            # 100,000 expressions would take 100 MB, their hashes do not.
            digest = hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()
            if digest not in seen:
                seen.add(digest)
                yield tokens, value
        misses = misses + 1 if len(seen) == before else 0
        if misses == PATIENCE:
            raise ValueError(
                f"There must be enough different expressions within {bounds}, but after {len(seen):,} of them "
                f"{PATIENCE * TREES_AT_ONCE:,} trees gave no other. Ask for fewer, or widen the bounds."
            )


def _draw(bounds: Bounds, generator: np.random.Generator) -> list[tuple[np.ndarray, int]]:
    levels, lengths = _grow(bounds, generator)
    wanted = (bounds.min_length < lengths) & (lengths < bounds.max_length)
    # Trees that were given up have children missing: they must go before anything is computed from children.
    levels, lengths = [level.only(wanted) for level in levels], lengths[wanted]
    sizes, values = _evaluate(levels)
    ends = np.cumsum(lengths)
    tokens = _write(levels, sizes, ends - lengths, int(lengths.sum()))
    return list(zip(np.split(tokens, ends[:-1]), values.tolist(), strict=True)) if len(lengths) else []


def _grow(bounds: Bounds, generator: np.random.Generator) -> tuple[list[_Level], np.ndarray]:
    """Draw trees, and the length of each, which is only a part of it where the tree was given up."""
    levels, lengths = [], np.zeros(TREES_AT_ONCE, np.int64)
    trees = np.arange(TREES_AT_ONCE)
    for depth in range(1, bounds.max_depth + 1):
        is_operation = generator.random(len(trees)) < OPERATION_PROBABILITY * (depth < bounds.max_depth)
        operations, digits = generator.integers(10, 14, len(trees)), generator.integers(0, 10, len(trees))
        num_children = generator.integers(2, bounds.max_args + 1, len(trees)) * is_operation
        levels.append(_Level(np.where(is_operation, operations, digits), num_children, trees))
        lengths += np.bincount(trees, 1 + is_operation, TREES_AT_ONCE).astype(np.int64)
        trees = np.repeat(trees, num_children * (lengths < bounds.max_length)[trees])
    return levels, lengths


def _evaluate(levels: list[_Level]) -> tuple[list[np.ndarray], np.ndarray]:
    """Return how many tokens each node and all below it take, level by level, and the values of the roots."""
    sizes, values = [], np.zeros(0, np.int64)
    for level in reversed(levels):
        is_operation = level.num_children > 0
        size, value = np.ones_like(level.tokens), level.tokens.copy()
        if is_operation.any():
            num_children = level.num_children[is_operation]
            firsts = np.cumsum(num_children) - num_children
            size[is_operation] = 2 + np.add.reduceat(sizes[-1], firsts)
            value[is_operation] = _apply(level.tokens[is_operation], values, num_children, firsts)
        sizes.append(size)
        values = value
    return sizes[::-1], values


def _apply(operations: np.ndarray, values: np.ndarray, num_children: np.ndarray, firsts: np.ndarray) -> np.ndarray:
    """Apply each operation to its values, which begin at `firsts`."""
    parents = np.repeat(np.arange(len(operations)), num_children)
    ordered = values[np.lexsort((values, parents))]
    lower, upper = ordered[firsts + (num_children - 1) // 2], ordered[firsts + num_children // 2]
    smallest, largest = ordered[firsts], ordered[firsts + num_children - 1]
    return np.choose(operations - 10, [smallest, largest, (lower + upper) // 2, np.add.reduceat(values, firsts) % 10])


def _write(levels: list[_Level], sizes: list[np.ndarray], starts: np.ndarray, total: int) -> np.ndarray:
    """Put all tokens in their places, the trees one after the other."""
    tokens = np.empty(total, np.uint8)
    for level, size, below in zip(levels, sizes, [*sizes[1:], np.zeros(0, np.int64)], strict=True):
        is_operation = level.num_children > 0
        tokens[starts] = level.tokens
        tokens[(starts + size - 1)[is_operation]] = IDS[CLOSE]
        # A child begins after its operation and the children before it.
        parents, firsts = np.repeat(np.arange(len(size)), level.num_children), np.cumsum(level.num_children)
        before = np.cumsum(below) - below
        starts = starts[parents] + 1 + before - before[(firsts - level.num_children)[parents]]
    return tokens
