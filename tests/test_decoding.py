"""Generation equals the repeated forward pass; samplers keep their promises; one step is compiled once."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from latte_eqx import LanguageModel, ModelConfig, generate, prefill
from latte_eqx.decoding import PIECE, Sampler, init_rows
from tests.test_mixer_contract import assert_near, moved

VOCAB = 40
CONFIG = ModelConfig(
    vocab_size=VOCAB, num_layers=2, dim=16, num_heads=2, mlp_dim=32, num_latents=8, window=6, positions="sinusoidal"
)
forward = eqx.filter_jit(lambda model, tokens: model(tokens))
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3], [5, 8, 9, 7, 9, 3, 2], [3], list(range(20))]


@pytest.fixture(scope="module")
def model():
    return moved(LanguageModel(CONFIG, key=jax.random.key(0)))


def continue_greedily(model, prompt, max_new_tokens):
    """Take the likeliest token of the whole forward pass, over and over. What stands behind a token does not matter."""
    tokens = np.zeros(32, np.int32)
    tokens[: len(prompt)] = prompt
    for end in range(len(prompt), len(prompt) + max_new_tokens):
        tokens[end] = np.argmax(forward(model, jnp.asarray(tokens))[end - 1])
    return tokens[len(prompt) : len(prompt) + max_new_tokens]


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_greedy_takes_the_likeliest(model, prompt, key):
    expected = continue_greedily(model, prompt, 10)
    actual = generate(model, prompt, max_new_tokens=10, key=key, temperature=0.0)
    np.testing.assert_array_equal(actual, expected)
    assert len(set(expected.tolist())) > 1
    as_array = generate(model, jnp.asarray(prompt), max_new_tokens=10, key=key, top_k=1)
    np.testing.assert_array_equal(as_array, expected)


def test_prompts_of_different_lengths(model, key):
    batch = generate(model, PROMPTS, max_new_tokens=8, key=key, temperature=0.0)
    assert batch.shape == (len(PROMPTS), 8)
    for prompt, row in zip(PROMPTS, batch, strict=True):
        np.testing.assert_array_equal(row, continue_greedily(model, prompt, 8))


def test_a_row_draws_the_same_whatever_the_others(model, key):
    draw = lambda prompts: generate(model, prompts, max_new_tokens=8, key=key, temperature=1.5)
    batch, other = draw(PROMPTS[:3]), draw([PROMPTS[0], PROMPTS[4], PROMPTS[2], PROMPTS[1]])
    np.testing.assert_array_equal(batch[0], other[0])
    np.testing.assert_array_equal(batch[2], other[2])
    twins = draw([PROMPTS[0], PROMPTS[0]])
    np.testing.assert_array_equal(twins[0], batch[0])
    assert (twins[0] != twins[1]).any()


def test_the_key_decides(model, key):
    draw = lambda key: generate(model, PROMPTS[0], max_new_tokens=12, key=key, temperature=1.5)
    np.testing.assert_array_equal(draw(key), draw(key))
    assert (draw(key) != draw(jax.random.key(1))).any()


def test_every_step_draws_anew(model, key):
    """So hot that all tokens are equally likely, one draw for all steps would repeat itself."""
    tokens = generate(model, PROMPTS[0], max_new_tokens=30, key=key, temperature=1e6)
    assert len(set(tokens.tolist())) > 12


PROBABILITIES = np.array([0.4, 0.05, 0.25, 0.1, 0.2])


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 1}, [0]),
        ({"top_k": 3}, [0, 2, 4]),
        ({"top_k": 9}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.3}, [0]),
        ({"top_p": 0.5}, [0, 2]),
        ({"top_p": 0.7}, [0, 2, 4]),
        ({"top_p": 1.0}, [0, 1, 2, 3, 4]),
        ({"top_k": 3, "top_p": 0.7}, [0, 2]),
        ({"temperature": 0.5}, [0, 1, 2, 3, 4]),
        ({"temperature": 2.0, "top_k": 2}, [0, 2]),
        ({"temperature": 0.0}, [0]),
    ],
    ids=str,
)
def test_frequencies(options, allowed, key):
    """Only the allowed tokens, as often as their share says, within four standard deviations."""
    draws = 4000
    sampler, logits = Sampler(**options), jnp.asarray(np.log(PROBABILITIES) + 3, jnp.float32)
    tokens = jax.jit(jax.vmap(lambda key: sampler(logits, key=key)))(jax.random.split(key, draws))
    counts = np.bincount(tokens, minlength=5)
    expected = np.zeros(5)
    expected[allowed] = PROBABILITIES[allowed] ** (1 / (options.get("temperature", 1) or 1))
    expected /= expected.sum()
    assert (np.abs(counts - draws * expected) <= 4 * np.sqrt(draws * expected * (1 - expected))).all()


def test_stop_token(model, key):
    free = generate(model, PROMPTS, max_new_tokens=12, key=key, temperature=1.5)
    stop_token = int(free[0, 4])
    seen = []
    stopped = generate(
        model, PROMPTS, max_new_tokens=12, key=key, temperature=1.5, stop_token=stop_token, on_token=seen.append
    )
    for free_row, row in zip(free, stopped, strict=True):
        ends = np.flatnonzero(free_row == stop_token)
        end = ends[0] if len(ends) else 12
        np.testing.assert_array_equal(row[:end], free_row[:end])
        np.testing.assert_array_equal(row[end:], stop_token)
    np.testing.assert_array_equal(np.stack(seen, axis=1), stopped[:, : len(seen)])


def test_generation_ends_when_all_rows_are_done(model, key):
    likeliest = int(generate(model, PROMPTS[0], max_new_tokens=1, key=key, temperature=0.0)[0])
    seen = []
    tokens = generate(
        model, PROMPTS[0], max_new_tokens=9, key=key, temperature=0.0, stop_token=likeliest, on_token=seen.append
    )
    np.testing.assert_array_equal(tokens, np.full(9, likeliest))
    assert [int(token) for token in seen] == [likeliest]


def test_tokens_are_handed_over_in_order(model, key):
    seen, seen_rows = [], []
    tokens = generate(model, PROMPTS[0], max_new_tokens=7, key=key, on_token=seen.append)
    np.testing.assert_array_equal(np.array(seen), tokens)
    rows = generate(model, PROMPTS[:2], max_new_tokens=7, key=key, on_token=seen_rows.append)
    np.testing.assert_array_equal(np.stack(seen_rows, axis=1), rows)


def test_no_new_tokens(model, key):
    assert generate(model, PROMPTS[0], max_new_tokens=0, key=key).shape == (0,)
    assert generate(model, PROMPTS[:2], max_new_tokens=0, key=key).shape == (2, 0)


def test_prefill_of_a_long_prompt(model):
    """The prompt is longer than a piece, and the caller's tokens are still there afterwards."""
    assert PIECE < 1500
    tokens = jnp.asarray(np.random.default_rng(0).integers(VOCAB, size=(2, 1500)), jnp.int32)
    logits, state = prefill(model, tokens)
    assert_near(logits, jax.jit(jax.vmap(lambda row: model(row)[-1]))(tokens), 1e-4)
    np.testing.assert_array_equal(state.position, [1500, 1500])


def test_caches_are_as_long_as_what_comes(key):
    """Up to their last place: 50 tokens and 14 more, which is all there is room for."""
    model = moved(LanguageModel(replace(CONFIG, mixer="attention", max_length=300), key=key))
    places = [init_rows(model, 2, max_tokens).layers[0].keys.shape[-2] for max_tokens in (None, 10, 64, 65, 1000)]
    assert places == [300, 64, 64, 128, 300]
    prompts = [np.random.default_rng(length).integers(VOCAB, size=length, dtype=np.int32) for length in (50, 37, 1)]
    rows = generate(model, prompts, max_new_tokens=14, key=key, temperature=0.0)
    for prompt, row in zip(prompts, rows, strict=True):
        logits = forward(model, jnp.asarray([*prompt, *row[:-1]], jnp.int32))
        np.testing.assert_array_equal(jnp.argmax(logits[len(prompt) - 1 :], axis=-1), row)


def test_prefill_does_not_take_the_tokens_away(model):
    tokens = jnp.arange(16, dtype=jnp.int32).reshape(2, 8)
    first, second = prefill(model, tokens)[0], prefill(model, tokens)[0]
    np.testing.assert_array_equal(first, second)


def test_a_step_is_compiled_once(monkeypatch, key):
    """A length is traced once, and the steps share the program of the prompt's last token."""
    lengths = []
    original = LanguageModel.extend

    def counted(self, tokens, state):
        lengths.append(tokens.shape[0])
        return original(self, tokens, state)

    monkeypatch.setattr(LanguageModel, "extend", counted)
    fresh = LanguageModel(replace(CONFIG, vocab_size=VOCAB + 1), key=key)
    generate(fresh, PROMPTS[0], max_new_tokens=20, key=key)
    assert lengths == [4, 2, 1]
    generate(fresh, PROMPTS[2], max_new_tokens=30, key=jax.random.key(1))
    assert lengths == [4, 2, 1]


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ([], {}, ValueError, r"at least one token, got .*\(0,\)"),
        ([[1, 2], []], {}, ValueError, r"at least one token, got .*\(0,\)"),
        ([1, VOCAB], {}, ValueError, rf"must lie in \[0, {VOCAB}\), got 1 to {VOCAB}"),
        ([-1, 2], {}, ValueError, rf"must lie in \[0, {VOCAB}\), got -1 to 2"),
        ([1], {"temperature": -0.5}, ValueError, "`temperature` must not be negative, got .*-0.5"),
        ([1], {"temperature": float("nan")}, ValueError, "`temperature` must not be negative, got .*nan"),
        ([1], {"top_k": 0}, ValueError, "`top_k` must be positive, got .*0"),
        ([1], {"top_p": 0.0}, ValueError, r"`top_p` must lie in \(0, 1\], got .*0.0"),
        ([1], {"top_p": 1.5}, ValueError, r"`top_p` must lie in \(0, 1\], got .*1.5"),
        ([1], {"max_new_tokens": -1}, ValueError, "`max_new_tokens` must not be negative, got .*-1"),
    ],
)
def test_bad_arguments(model, key, prompt, options, error, message):
    with pytest.raises(error, match=message):
        generate(model, prompt, **({"max_new_tokens": 2, "key": key} | options))


def test_prefill_of_nothing(model):
    with pytest.raises(ValueError, match="at least one token"):
        prefill(model, jnp.zeros((2, 0), jnp.int32))
