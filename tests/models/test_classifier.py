"""Classifiers of sequences and of pairs: pooling, masks, inputs."""

from functools import cache

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from latte_eqx import ModelConfig, PairClassifier, SequenceClassifier
from tests.test_mixer_contract import assert_near, assert_same, draw, moved

VOCAB, FEATURES, CLASSES, LENGTH, VALID = 30, 3, 4, 40, 25
TINY = dict(vocab_size=VOCAB, num_layers=2, dim=16, num_heads=2, mlp_dim=32, num_latents=8, window=6, max_length=LENGTH)
CONFIGS = {
    "latte": ModelConfig(**TINY, mixer="latte", feed=None, causal=False),
    "latte_sinusoidal": ModelConfig(
        **TINY, mixer="latte", feed=None, causal=False, positions="sinusoidal", style="base"
    ),
    "macchiato": ModelConfig(**TINY, mixer="macchiato", feed="rglru", causal=False),
    "attention": ModelConfig(**TINY, mixer="attention", causal=False),
    "swa": ModelConfig(**TINY, mixer="swa", causal=False),
    "macchiato_causal": ModelConfig(**TINY, mixer="macchiato", feed="conv"),
}
every_config = pytest.mark.parametrize("name", CONFIGS)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(VOCAB, size=LENGTH), jnp.int32)
NUMBERS = draw(LENGTH, FEATURES)
MASK = jnp.arange(LENGTH) < VALID


@cache
def build(name, num_features=None, kind=SequenceClassifier):
    return moved(kind(CONFIGS[name], CLASSES, num_features=num_features, key=jax.random.key(0)))


@eqx.filter_jit
def run(model, *inputs):
    """The logits, and the gradients of a loss with respect to the parameters and those inputs that are numbers."""
    logits, pull_back = eqx.filter_vjp(lambda model, inputs: model(*inputs), model, inputs)
    return logits, pull_back(jnp.linspace(-1.5, 1.5, CLASSES))


@every_config
def test_padding_changes_nothing(name):
    model = build(name)
    expected = run(model, TOKENS[:VALID])
    padded = run(model, TOKENS, MASK)
    assert expected[0].shape == (CLASSES,)
    assert_same(padded, expected)
    assert_same(run(model, jnp.where(MASK, TOKENS, 0), MASK), expected)
    assert np.abs(run(model, TOKENS, jnp.ones(LENGTH, bool))[0] - expected[0]).max() > 1e-3


@pytest.mark.parametrize("name", ["latte_sinusoidal", "macchiato"])
def test_numbers_and_their_gradients(name):
    model = build(name, FEATURES)
    logits, (parameters, (numbers,)) = run(model, NUMBERS[:VALID])
    padded_logits, (padded_parameters, (padded_numbers, _)) = run(model, NUMBERS, MASK)
    expected = logits, (parameters, jnp.pad(numbers, [(0, LENGTH - VALID), (0, 0)]))
    assert_same((padded_logits, (padded_parameters, padded_numbers)), expected)
    np.testing.assert_array_equal(padded_numbers[VALID:], 0)


def test_the_encoder_averages():
    model = build("latte")
    outputs = model.encoder.stack(model.encoder.embedding[TOKENS])
    assert_near(model.encoder(TOKENS), outputs.mean(axis=0), 1e-5)
    assert_near(model(TOKENS), model.to_classes(outputs.mean(axis=0)), 1e-5)


def test_all_masked_is_finite():
    logits, gradients = run(build("macchiato"), TOKENS, jnp.zeros(LENGTH, bool))
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves((logits, gradients)))
    np.testing.assert_allclose(logits, build("macchiato").to_classes.bias, rtol=0, atol=1e-6)


def test_pair():
    model = build("latte", kind=PairClassifier)
    first, second = model.encoder(TOKENS), model.encoder(TOKENS[:VALID])
    hidden = model.to_hidden(jnp.concatenate([first, second, first - second, first * second]))
    logits = run(model, TOKENS, TOKENS[:VALID])[0]
    assert_near(logits, model.to_classes(jax.nn.gelu(hidden)), 1e-5)
    assert_near(run(model, TOKENS, TOKENS, None, MASK)[0], logits, 1e-5)
    assert_near(run(model, TOKENS, TOKENS, MASK, None)[0], run(model, TOKENS[:VALID], TOKENS)[0], 1e-5)
    assert np.abs(logits - run(model, TOKENS[:VALID], TOKENS)[0]).max() > 1e-3


def test_pair_of_numbers():
    model = build("swa", FEATURES, PairClassifier)
    assert_near(run(model, NUMBERS, NUMBERS, MASK)[0], run(model, NUMBERS[:VALID], NUMBERS)[0], 1e-5)


@pytest.mark.parametrize("kind", [SequenceClassifier, PairClassifier])
def test_dropout_acts_only_with_a_key(kind, key):
    config = ModelConfig(**TINY, mixer="swa", causal=False, dropout=0.3)
    dropping = moved(kind(config, CLASSES, key=jax.random.key(0)))
    inputs = (TOKENS,) * (2 if kind is PairClassifier else 1)
    call = eqx.filter_jit(lambda model, key: model(*inputs, key=key))
    np.testing.assert_array_equal(call(dropping, None), call(build("swa", kind=kind), None))
    assert np.abs(call(dropping, key) - call(dropping, None)).max() > 1e-3
    assert np.abs(call(dropping, key) - call(dropping, jax.random.key(1))).max() > 1e-3


def test_wrong_inputs():
    with pytest.raises(TypeError, match=r"`inputs` must be integer tokens.* got float32"):
        build("latte")(NUMBERS)
    with pytest.raises(TypeError, match=r"`inputs` must be floating.* got int32"):
        build("macchiato", FEATURES)(TOKENS)


@pytest.mark.parametrize(("mixer", "name"), [("latte", "LatteCausal"), ("r_swa", "RSWA")])
def test_a_mask_for_a_mixer_that_takes_none_is_refused(mixer, name):
    model = SequenceClassifier(ModelConfig(**TINY, mixer=mixer), CLASSES, key=jax.random.key(0))
    with pytest.raises(ValueError, match=f"`mask` must be None for a mixer that takes none, got a mask for {name}"):
        model(TOKENS, MASK)
    assert model(TOKENS).shape == (CLASSES,)
