"""Prefill, step, sampling."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from latte_eqx.mixers.attention import WindowState
from latte_eqx.models.language_model import LanguageModel

# Prompts are read in pieces of at most this many tokens, so that memory does not grow with their length.
PIECE = 1024
# Caches are shortened to no fewer tokens than these.
FEWEST_PLACES = 64

# Prompts of a batch have lengths of their own, so that the axis has no name.
Prompt = Sequence[int] | Int[Array, "_"] | Int[np.ndarray, "_"]


@dataclass(frozen=True)
class Sampler:
    """How a token is drawn from logits. Temperature 0 takes the likeliest.

    `top_k` keeps that many of the likeliest tokens; `top_p` keeps the fewest likeliest whose probabilities reach that
    sum.
    """

    temperature: float | int = 1.0
    top_k: int | None = None
    top_p: float | int | None = None

    def __post_init__(self):
        if not self.temperature >= 0:
            raise ValueError(f"`temperature` must not be negative, got {self.temperature}.")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"`top_k` must be positive, got {self.top_k}.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"`top_p` must lie in (0, 1], got {self.top_p}.")

    def __call__(self, logits: Float[Array, " vocab"], *, key: PRNGKeyArray) -> Int[Array, ""]:
        """Draw one token."""
        if self.temperature == 0:
            return jnp.argmax(logits)
        logits = logits / self.temperature
        if self.top_k is not None:
            least = lax.top_k(logits, min(self.top_k, logits.shape[0]))[0][-1]
            logits = jnp.where(logits < least, -jnp.inf, logits)
        if self.top_p is not None:
            descending = jnp.sort(logits, descending=True)
            probabilities = jax.nn.softmax(descending)
            # A token stays if the likelier ones together fall short of the sum.
            stays = jnp.cumsum(probabilities) - probabilities < self.top_p
            least = jnp.min(jnp.where(stays, descending, jnp.inf))
            logits = jnp.where(logits < least, -jnp.inf, logits)
        return jax.random.categorical(key, logits)


def prefill(model: LanguageModel, tokens: Int[Array, "batch seq"]) -> tuple[Float[Array, "batch vocab"], PyTree]:
    """Read prompts of one length; return the logits after them and the states, for `jax.vmap(model.extend)`."""
    logits, state = _read(model, tokens, init_rows(model, tokens.shape[0]))
    return logits, jax.tree.map(lambda x, axis: jnp.moveaxis(x, axis, 0), state, _row_axes(state))


def _read(model, tokens, state):
    """Read prompts in pieces whose lengths are powers of two, so that all lengths share a few compiled programs."""
    if tokens.shape[1] == 0:
        raise ValueError("A prompt must hold at least one token, got an empty one.")
    rest = tokens
    while True:
        size = min(PIECE, 1 << (rest.shape[1].bit_length() - 1))
        piece, rest = rest[:, :size], rest[:, size:]
        logits, state = _extend(model, (piece, state))
        if rest.shape[1] == 0:
            return logits, state


def generate(
    model: LanguageModel,
    prompt: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int,
    key: PRNGKeyArray,
    temperature: float | int = 1.0,
    top_k: int | None = None,
    top_p: float | int | None = None,
    stop_token: int | None = None,
    on_token: Callable[[np.ndarray], None] | None = None,
) -> Int[np.ndarray, " new"] | Int[np.ndarray, "batch new"]:
    """Continue a prompt, or several prompts of any lengths at once.

    **Arguments:**

    - `prompt`: token ids, or a list of such prompts.
    - `max_new_tokens`: how many tokens to add.
    - `key`: a row of a batch draws the same tokens whatever the other rows are.
    - `temperature`, `top_k`, `top_p`: see `Sampler`.
    - `stop_token`: a row is done once it has drawn this token, which then fills the rest of the row; when all rows are
        done, generation ends.
    - `on_token`: called with each new token, or for several prompts with the array of their new tokens, as they come.

    **Returns:** the new tokens, without the prompt: one row for one prompt, else a row for each.
    """
    if max_new_tokens < 0:
        raise ValueError(f"`max_new_tokens` must not be negative, got {max_new_tokens=}.")
    sampler = Sampler(temperature, top_k, top_p)
    prompts, is_single = _as_prompts(prompt, model.embedding.shape[0])
    logits, state = _prefill_all(model, prompts, max_new_tokens)
    keys = jax.random.split(key, len(prompts)) if not is_single else key[None]
    new = np.full((len(prompts), max_new_tokens), -1 if stop_token is None else stop_token, np.int32)
    is_done = np.zeros(len(prompts), bool)
    for step in range(max_new_tokens):
        tokens = _sample(logits, keys, jnp.asarray(step), sampler)
        # The next step is on its way before this one's tokens are looked at.
        if step + 1 < max_new_tokens:
            logits, state = _extend(model, (tokens[:, None], state))
        drawn = np.asarray(tokens)
        if stop_token is not None:
            drawn = np.where(is_done, stop_token, drawn)
            is_done |= drawn == stop_token
        new[:, step] = drawn
        if on_token is not None:
            on_token(drawn[0] if is_single else drawn)
        if is_done.all():
            break
    return new[0] if is_single else new


@partial(eqx.filter_jit, donate="all-except-first")
def _extend(model, tokens_and_state):
    """Return the logits after the last token of each row, and the states."""
    tokens, state = tokens_and_state
    axes = _row_axes(state)
    logits, state = jax.vmap(model.extend, (0, axes), (0, axes))(tokens, state)
    return logits[:, -1], state


@partial(jax.jit, static_argnames="sampler")
def _sample(logits, keys, step, sampler):
    keys = jax.vmap(jax.random.fold_in, (0, None))(keys, step)
    return jax.vmap(lambda logits, key: sampler(logits, key=key))(logits, keys).astype(jnp.int32)


def _row_axes(state):
    """Tell which axis the rows are: behind the layers, so that a scan over these need not transpose a state."""
    return eqx.tree_at(lambda state: state.position, jax.tree.map(lambda _: 1, state), 0)


def init_rows(model: LanguageModel, num_rows: int, max_tokens: int | None = None) -> PyTree:
    """Return the states of rows before their first tokens; of at most `max_tokens`, caches need not be longer."""
    state = model.init_state()
    if max_tokens is not None:
        # Powers of two, so that rows of all lengths share a few compiled programs.
        places = max(FEWEST_PLACES, 1 << (max_tokens - 1).bit_length())
        is_window = lambda x: isinstance(x, WindowState)
        arrays = lambda window: (window.keys, window.values)
        shorten = lambda x: eqx.tree_at(arrays, x, [y[..., :places, :] for y in arrays(x)]) if is_window(x) else x
        state = jax.tree.map(shorten, state, is_leaf=is_window)
    repeat = lambda x, axis: jnp.repeat(jnp.expand_dims(x, axis), num_rows, axis=axis)
    return jax.tree.map(repeat, state, _row_axes(state))


def _as_prompts(prompt, vocab_size):
    is_single = len(prompt) == 0 or np.ndim(prompt[0]) == 0
    prompts = [np.asarray(row) for row in ([prompt] if is_single else prompt)]
    for row in prompts:
        if row.ndim != 1 or row.size == 0:
            raise ValueError(f"A prompt must be a row of at least one token, got the shape {row.shape}.")
        if not np.issubdtype(row.dtype, np.integer):
            raise TypeError(f"A prompt must hold integers, got {row.dtype}.")
        if row.min() < 0 or row.max() >= vocab_size:
            raise ValueError(f"Tokens must lie in [0, {vocab_size}), got {row.min()} to {row.max()}.")
    return [row.astype(np.int32) for row in prompts], is_single


def _prefill_all(model, prompts, max_new_tokens):
    """Prefill prompts of equal length together, and put the rows back in order."""
    lengths = np.array([len(prompt) for prompt in prompts])
    max_tokens = int(lengths.max()) + max_new_tokens
    order, groups = [], []
    for length in np.unique(lengths):
        rows = np.flatnonzero(lengths == length)
        order.extend(rows)
        tokens = jnp.asarray(np.stack([prompts[row] for row in rows]))
        groups.append(_read(model, tokens, init_rows(model, len(rows), max_tokens)))
    back = np.argsort(np.array(order))
    join = lambda axis, *parts: jnp.concatenate(parts, axis).take(back, axis)
    return jax.tree.map(join, (0, _row_axes(groups[0][1])), *groups)
