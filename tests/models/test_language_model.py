"""The paper's language models at a tiny size: pieces, packing, initialisation, depth, dropout."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from latte_eqx import PAPER_ROWS, LanguageModel, ModelConfig
from tests.test_mixer_contract import assert_near, moved

VOCAB, LENGTH = 50, 72
TINY = dict(vocab_size=VOCAB, num_layers=2, dim=16, num_heads=2, mlp_dim=32, num_latents=8, window=6, max_length=80)
CONFIGS = {row: replace(config, **TINY) for row, config in PAPER_ROWS.items()} | {
    "linear_attention": ModelConfig(**TINY, mixer="linear_attention"),
    "swa": ModelConfig(**TINY, mixer="swa"),
    "latte_r_swa_per_head": ModelConfig(**TINY, latent_proj="per_head", norm_feed=True, window_bias=0.5),
}
every_row = pytest.mark.parametrize("row", CONFIGS)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(VOCAB, size=LENGTH), jnp.int32)

forward = eqx.filter_jit(lambda model, tokens, segment_ids=None, key=None: model(tokens, segment_ids, key=key))
extend = eqx.filter_jit(lambda model, tokens, state: model.extend(tokens, state))


@cache
def build(row):
    return moved(LanguageModel(CONFIGS[row], key=jax.random.key(0)))


@pytest.mark.parametrize("sizes", [(64, 8), (8, 64), (1, 1, 64, 1, 1, 1, 1, 1, 1), (8,) * 9, (1,) * LENGTH], ids=str)
@every_row
def test_pieces_equal_the_whole(row, sizes):
    model, outputs = build(row), []
    state = model.init_state()
    for piece in jnp.split(TOKENS, np.cumsum(sizes)[:-1]):
        logits, state = extend(model, piece, state)
        outputs.append(logits)
    assert_near(jnp.concatenate(outputs), forward(model, TOKENS), 1e-4)


@every_row
def test_packed_documents_equal_separate_ones(row):
    """Positions, too, begin anew. Behind a document other tokens may follow, which spares us compilations."""
    model, bounds = build(row), (0, 35, 36, LENGTH)
    segment_ids = jnp.asarray(np.searchsorted(bounds[1:-1], np.arange(LENGTH), side="right"), jnp.int32)
    packed = forward(model, TOKENS, segment_ids)
    for begin, end in pairwise(bounds):
        alone = forward(model, jnp.roll(TOKENS, -begin))
        assert_near(packed[begin:end], alone[: end - begin], 1e-4)


@every_row
def test_logits_are_float32_and_use_the_embedding(row):
    model = build(row)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x, model)
    half_logits, logits = forward(half, TOKENS), forward(model, TOKENS)
    assert half_logits.dtype == logits.dtype == jnp.float32
    assert logits.shape == (LENGTH, VOCAB)
    np.testing.assert_allclose(half_logits, logits, rtol=0, atol=5e-2 * np.abs(logits).max())


def test_initial_scales():
    """What is added to the residual stream starts smaller by sqrt(2 num_layers), everything else at 0.02."""
    for num_layers in (2, 8):
        config = replace(CONFIGS["latte_r_swa"], num_layers=num_layers, dim=64, mlp_dim=128, num_latents=32)
        model = LanguageModel(config, key=jax.random.key(0))
        outputs = 0
        for path, x in jax.tree.leaves_with_path(eqx.filter(model, eqx.is_array)):
            name = jax.tree_util.keystr(path)
            if "feed" in name or "norm" in name:
                continue
            is_output = "to_out" in name
            expected = 0.02 / np.sqrt(2 * num_layers) if is_output else 0.02
            np.testing.assert_allclose(np.std(x), expected, rtol=0.06, err_msg=name)
            outputs += is_output
        assert outputs == 2


@pytest.mark.parametrize("latent_proj", ["dense", "per_head"])
def test_lecun_init(latent_proj):
    config = replace(CONFIGS["latte_r_swa"], dim=64, mlp_dim=128, num_latents=64, latent_proj=latent_proj, init="lecun")
    blocks = LanguageModel(config, key=jax.random.key(0)).stack.blocks
    for path, x in jax.tree.leaves_with_path(eqx.filter((blocks.mixer, blocks.mlp), eqx.is_array)):
        name = jax.tree_util.keystr(path)
        if "feed" not in name:
            # A linear layer has (layers, outputs, inputs), one in blocks (layers, blocks, inputs, outputs).
            inputs = x.shape[-1] if x.ndim == 3 else x.shape[-2]
            np.testing.assert_allclose(np.std(x), 1 / np.sqrt(inputs), rtol=0.06, err_msg=name)


def test_layers_start_differently():
    blocks = LanguageModel(CONFIGS["latte_r_swa"], key=jax.random.key(0)).stack.blocks
    for x in (blocks.mixer.to_value.weight, blocks.mlp.to_gate.weight, blocks.mixer.latents.feed.decay_logit):
        assert np.abs(x[0] - x[1]).max() > 1e-3


def count_lines(function, model):
    """Return the length of the program before it is compiled."""
    arrays, static = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    lowered = jax.jit(lambda arrays: function(eqx.combine(arrays, static))).lower(arrays)
    return len(lowered.as_text().splitlines())


def gradient(model):
    return eqx.filter_grad(lambda model: model(TOKENS).sum())(model)


def decode(model):
    return model.extend(TOKENS[:8], model.init_state())


@pytest.mark.parametrize("function", [gradient, decode])
@every_row
def test_depth_does_not_make_the_program_longer(row, function):
    configs = [replace(CONFIGS[row], num_layers=num_layers) for num_layers in (2, 24)]
    models = [eqx.filter_eval_shape(LanguageModel, config, key=jax.random.key(0)) for config in configs]
    shallow, deep = (count_lines(function, model) for model in models)
    assert shallow == deep > 100


def test_dropout_acts_only_with_a_key(key):
    plain = build("latte_r_swa")
    dropping = moved(LanguageModel(replace(CONFIGS["latte_r_swa"], dropout=0.3), key=jax.random.key(0)))
    logits = forward(plain, TOKENS)
    np.testing.assert_array_equal(forward(dropping, TOKENS), logits)
    dropped, again, other = (forward(dropping, TOKENS, None, k) for k in (key, key, jax.random.key(1)))
    np.testing.assert_array_equal(dropped, again)
    assert np.abs(dropped - logits).max() > 0.1
    assert np.abs(dropped - other).max() > 0.1


def test_every_layer_drops_other_things(key):
    """With the same parameters in both layers, and nothing but what they add, their noise must differ."""
    config = replace(CONFIGS["swa"], dropout=0.5, mlp_dim=0)
    stack = LanguageModel(config, key=jax.random.key(0)).stack
    x = jnp.asarray(np.random.default_rng(0).normal(size=(LENGTH, 16)), jnp.float32)
    layer_keys = jax.random.split(key, 2)
    blocks = [jax.tree.map(lambda x, i=i: x[i] if eqx.is_array(x) else x, stack.blocks) for i in range(2)]
    expected = blocks[1](blocks[0](x, key=layer_keys[0]), key=layer_keys[1])
    actual = eqx.filter_jit(stack)(x, key=key)
    assert_near(actual, jax.vmap(stack.norm)(expected), 1e-5)
    same = blocks[1](blocks[0](x, key=layer_keys[0]), key=layer_keys[0])
    assert np.abs(actual - jax.vmap(stack.norm)(same)).max() > 1e-3


def test_sinusoidal_positions_matter():
    """The same token over and over: only positions can make a difference."""
    same = jnp.full(LENGTH, 7, jnp.int32)
    for row, has_positions in {"latte": True, "latte_pp": True, "latte_conv_swa": False, "latte_r": False}.items():
        logits = forward(build(row), same)
        assert (np.abs(logits[40] - logits[50]).max() > 1e-2) == has_positions, row
