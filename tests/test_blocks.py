"""The residual block: its equation, its styles, its dropout."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from latte_eqx import SWA, MacchiatoBlock
from tests.test_mixer_contract import assert_near, draw, moved

DIM, LENGTH = 16, 20
X = draw(LENGTH, DIM)
call = eqx.filter_jit(lambda block, x, *arguments, **keywords: block(x, *arguments, **keywords))


def build(mlp_dim=24, **options):
    mixer_key, block_key = jax.random.split(jax.random.key(0))
    mixer = SWA(DIM, 2, 6, key=mixer_key)
    return moved(MacchiatoBlock(mixer, DIM, mlp_dim, key=block_key, **options))


def norm_in_float64(style, norm, x):
    x = np.asarray(x, np.float64)
    if style == "plus_plus":
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * np.asarray(norm.weight)
    centred = x - x.mean(axis=-1, keepdims=True)
    centred /= np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-6)
    return centred * np.asarray(norm.weight) + np.asarray(norm.bias)


@pytest.mark.parametrize("mlp_dim", [0, 24])
@pytest.mark.parametrize("style", ["base", "plus_plus"])
def test_equation(style, mlp_dim):
    block = build(mlp_dim, style=style)
    norm = lambda norm, x: jnp.asarray(norm_in_float64(style, norm, x), jnp.float32)
    hidden = X + block.mixer(norm(block.mixer_norm, X))
    expected = hidden + jax.vmap(block.mlp)(norm(block.mlp_norm, hidden)) if mlp_dim else hidden
    assert_near(call(block, X), expected, 1e-5)


@pytest.mark.parametrize(("style", "biases"), [("base", 4), ("plus_plus", 0)])
def test_biases(style, biases):
    """Two norms and two layers of the MLP have biases in the base style; nothing has in the other."""
    leaves = jax.tree.leaves_with_path(eqx.filter(build(style=style), eqx.is_array))
    assert sum("bias" in jax.tree_util.keystr(path) for path, _ in leaves) == biases


@pytest.mark.parametrize("style", ["base", "plus_plus"])
def test_pieces_equal_the_whole(style):
    block = build(style=style)
    extend = eqx.filter_jit(lambda block, x, state: block.extend(x, state))
    first, state = extend(block, X[:10], block.init_state())
    second, _ = extend(block, X[10:], state)
    assert_near(jnp.concatenate([first, second]), call(block, X), 1e-5)


def test_dropout_acts_only_with_a_key(key):
    block, plain = build(dropout=0.5), build()
    np.testing.assert_array_equal(call(block, X), call(plain, X))
    np.testing.assert_array_equal(call(plain, X, key=key), call(plain, X))
    np.testing.assert_array_equal(call(block, X, key=key), call(block, X, key=key))
    other = jax.random.key(1)
    assert np.abs(call(block, X, key=key) - call(block, X)).max() > 1e-2
    assert np.abs(call(block, X, key=key) - call(block, X, key=other)).max() > 1e-2


def test_dropout_on_what_is_added(key):
    """What passes is scaled up so that the mean stays, and about half passes; the residual is never dropped."""
    block = build(0, dropout=0.5)
    added, dropped = call(block, X) - X, call(block, X, key=key) - X
    passed = dropped != 0
    assert 0.4 < passed.mean() < 0.6
    np.testing.assert_allclose(dropped[passed], 2 * added[passed], rtol=0, atol=1e-5)


def test_a_mask_reaches_the_mixer():
    mixer = moved(SWA(DIM, 2, 6, causal=False, key=jax.random.key(3)))
    block, mask = eqx.tree_at(lambda block: block.mixer, build(), mixer), jnp.arange(LENGTH) < 10
    changed = jnp.where(mask[:, None], X, draw(LENGTH, DIM, seed=1))
    assert_near(call(block, changed, mask=mask)[:10], call(block, X, mask=mask)[:10], 1e-6)
    assert np.abs(call(block, changed)[:10] - call(block, X)[:10]).max() > 1e-2


def test_segments_reach_the_mixer():
    block, segment_ids = build(), jnp.repeat(jnp.arange(2), LENGTH // 2)
    expected = jnp.concatenate([call(block, X[: LENGTH // 2]), call(block, X[LENGTH // 2 :])])
    assert_near(call(block, X, segment_ids), expected, 1e-5)
