"""Log-likelihoods of continuations, in batches, with what they share read once."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from latte_eqx import FullAttention, LanguageModel
from latte_eqx.decoding import PIECE

GRAIN = 16
"""The shortest length that is compiled for; the others are doubles of it, up to `PIECE`."""
MAX_LOGITS = 2**26
"""So many logits are held at once: a batch has fewer rows where the vocabulary is large or the rows are long."""
MAX_STATE_BYTES = 2**24
"""Contexts are shared where a state is no larger. Full attention over thousands of tokens has one of hundreds of
megabytes, whatever it has read, and a batch of them would fill the memory."""

Tokens = tuple[int, ...]
Advance = Callable[[int], None]


class Pair(NamedTuple):
    """A context of at least one token, and what is to follow it."""

    context: Tokens
    continuation: Tokens


class Score(NamedTuple):
    """The log-likelihood of a continuation, and whether each of its tokens was the likeliest."""

    log_likelihood: float
    is_greedy: bool


class _Row(NamedTuple):
    """A pair, its place among all, and how much of its context is in which of the states."""

    pair: Pair
    place: int
    num_read: int = 0
    origin: int = 0

    @property
    def rest(self) -> Tokens:
        """What is not in the state."""
        return self.pair.context[self.num_read :] + self.pair.continuation


class Scorer:
    """Log-likelihoods of continuations, in batches.

    Rows are padded on the right, which no earlier position sees. Padding would enter a state, though: so contexts that
    several continuations share are read once up to a multiple of `GRAIN` tokens, and the few tokens left are read with
    each continuation.
    """

    def __init__(self, model: LanguageModel, *, batch_size: int = 32, share_contexts: bool | None = None):
        if batch_size < 1:
            raise ValueError(f"`batch_size` must be positive, got {batch_size=}.")
        self.model, self.batch_size = model, batch_size
        self.vocab_size = model.embedding.shape[0]
        self.max_length = max_length(model)
        self.share_contexts = _state_bytes(model) <= MAX_STATE_BYTES if share_contexts is None else share_contexts

    def __call__(self, pairs: Sequence[Pair], advance: Advance = lambda _: None) -> list[Score]:
        """Return the score of each pair; `advance` is told how many more are done."""
        members = defaultdict(list)
        for place, pair in enumerate(pairs):
            pair = self._cut(pair)
            members[pair.context].append(_Row(pair, place))
        # The last token of a context is not read before: what follows is predicted there.
        num_read = lambda context: (len(context) - 1) // GRAIN * GRAIN
        is_shared = lambda context: self.share_contexts and len(members[context]) > 1 and num_read(context) > 0
        scores = {}
        for contexts in batched(sorted(filter(is_shared, members), key=len), self.batch_size):
            states = self._read([context[: num_read(context)] for context in contexts])
            rows = [
                row._replace(num_read=num_read(context), origin=origin)
                for origin, context in enumerate(contexts)
                for row in members.pop(context)
            ]
            scores |= self._score(rows, states, advance)
        scores |= self._score([row for rows in members.values() for row in rows], None, advance)
        return [scores[place] for place in range(len(pairs))]

    def _cut(self, pair: Pair) -> Pair:
        """Cut a context on the left to what the model can read."""
        if not pair.context or not pair.continuation:
            raise ValueError(f"Context and continuation must hold a token each, got {pair}.")
        largest = max(max(pair.context), max(pair.continuation))
        if largest >= self.vocab_size:
            raise ValueError(f"Tokens must lie in [0, {self.vocab_size}), the model's vocabulary, got {largest}.")
        if self.max_length is None:
            return pair
        # The last token is predicted and not read.
        room = self.max_length + 1 - len(pair.continuation)
        if room < 1:
            raise ValueError(
                f"A continuation must have at most {self.max_length} tokens, which is what the model can read, "
                f"got {len(pair.continuation)}."
            )
        return Pair(pair.context[-room:], pair.continuation)

    def _read(self, contexts: Sequence[Tokens]) -> PyTree:
        """Return the states after contexts whose lengths are multiples of `GRAIN`.

        All are read together, in pieces whose lengths are powers of two; a row that is at its end keeps its state.
        """
        num_rows = _num_rows(len(contexts), self.batch_size)
        lengths = np.array([*map(len, contexts), *[0] * (num_rows - len(contexts))])
        longest = int(lengths.max())
        tokens = _padded(contexts, num_rows, longest)
        state, start = _init(self.model, num_rows), 0
        while start < longest:
            room = int(lengths[lengths > start].min()) - start
            size = min(PIECE, 1 << (room.bit_length() - 1))
            state = _extend(self.model, tokens[:, start : start + size], lengths > start, state)
            start += size
        return state

    def _score(self, rows: Sequence[_Row], states: PyTree | None, advance: Advance) -> dict[int, Score]:
        """Return the scores of rows by their places. Long ones come first, so that few batches are left unfilled."""
        rows, scores = sorted(rows, key=lambda row: len(row.rest), reverse=True), {}
        while rows:
            bucket = _bucket(len(rows[0].rest) - 1)
            max_rows = max(1, min(self.batch_size, MAX_LOGITS // (self.vocab_size * min(bucket, PIECE))))
            batch, rows = rows[:max_rows], rows[max_rows:]
            num_rows, state = _num_rows(len(batch), max_rows), None
            if states is not None:
                origins = [row.origin for row in batch]
                state = _take(states, np.array(origins + [0] * (num_rows - len(batch))))
            found = self._score_batch(batch, num_rows, bucket, state)
            scores |= {row.place: score for row, score in zip(batch, found, strict=False)}
            advance(len(batch))
        return scores

    def _score_batch(self, batch: Sequence[_Row], num_rows: int, bucket: int, state: PyTree | None) -> Iterator[Score]:
        if state is None and bucket > PIECE:
            state = _init(self.model, num_rows)
        # A sequence that is read at once must not be longer than the model allows, not even by padding.
        if state is None and self.max_length is not None:
            bucket = min(bucket, self.max_length)
        tokens = _padded([row.rest for row in batch], num_rows, bucket + 1)
        is_asked = np.zeros((num_rows, bucket), bool)
        for number, row in enumerate(batch):
            end = len(row.rest) - 1
            is_asked[number, end - len(row.pair.continuation) : end] = True
        # A float32 sum over a long text would be off by more than its addends are.
        totals, is_greedy = np.zeros(num_rows, np.float64), np.ones(num_rows, bool)
        for start in range(0, bucket, PIECE):
            end = min(start + PIECE, bucket)
            read, predicted = tokens[:, start:end], tokens[:, start + 1 : end + 1]
            asked = is_asked[:, start:end]
            found, is_likeliest, state = _predict(self.model, read, predicted, state)
            totals += np.where(asked, found, 0).sum(axis=-1, dtype=np.float64)
            is_greedy &= (np.asarray(is_likeliest) | ~asked).all(axis=-1)
        return map(Score, totals.tolist(), is_greedy.tolist())


def max_length(model: LanguageModel) -> int | None:
    """Return how many tokens a model with full attention reads at most; others have no limit."""
    is_full = lambda node: isinstance(node, FullAttention)
    return min((node.max_length for node in jax.tree.leaves(model, is_leaf=is_full) if is_full(node)), default=None)


@eqx.filter_jit
def _init(model, num_rows):
    return jax.tree.map(lambda x: jnp.repeat(x[None], num_rows, axis=0), model.init_state())


@eqx.filter_jit
def _take(states, rows):
    return jax.tree.map(lambda x: x[rows], states)


@eqx.filter_jit
def _extend(model, tokens, goes_on, state):
    """Return the states after further tokens of the rows that go on; the others stay as they are."""
    _, new = jax.vmap(model.extend)(tokens, state)
    return jax.tree.map(lambda new, old: jnp.where(jnp.expand_dims(goes_on, range(1, new.ndim)), new, old), new, state)


@eqx.filter_jit
def _predict(model, read, predicted, state):
    """Return the log-probabilities of tokens after others, whether these are the largest, and the states then."""
    if state is None:
        logits = jax.vmap(model)(read)
    else:
        logits, state = jax.vmap(model.extend)(read, state)
    log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32))
    found = jnp.take_along_axis(log_probabilities, predicted[..., None], axis=-1)[..., 0]
    return found, jnp.argmax(logits, axis=-1).astype(predicted.dtype) == predicted, state


def _state_bytes(model: LanguageModel) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(model.init_state)))


def _bucket(length: int) -> int:
    """Round a length up: to a double of `GRAIN`, or to a multiple of `PIECE`."""
    return max(GRAIN, 1 << (length - 1).bit_length()) if length <= PIECE else -(-length // PIECE) * PIECE


def _num_rows(num_rows: int, max_rows: int) -> int:
    """Round the rows of a batch up to a few sizes, so that the last batches need few programs of their own."""
    return next(size for size in (max_rows // 16, max_rows // 4, max_rows) if size >= num_rows)


def _padded(rows: Sequence[Tokens], num_rows: int, length: int) -> np.ndarray:
    tokens = np.zeros((num_rows, length), np.int32)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = row
    return tokens


def batched(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """Yield so many items at a time."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
