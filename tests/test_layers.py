"""The small parts against loops and dense matrices in float64."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from latte_eqx.layers import (
    INIT_STD,
    BlockLinear,
    CausalConv,
    GatedMLP,
    GeluMLP,
    YaRN,
    linear,
    rotary,
    sinusoidal,
)


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("width", [1, 3, 4])
def test_convolution_against_a_loop(width, key):
    x, bias = draw(10, 6), draw(6, seed=1)
    segment_ids = np.array([0, 0, 0, 0, 1, 2, 2, 2, 2, 2])
    conv = eqx.tree_at(lambda conv: conv.bias, CausalConv(6, width, key=key), jnp.asarray(bias))
    expected = np.zeros((10, 6))
    for t in range(10):
        expected[t] = bias
        for lag in range(width):
            if t >= lag and segment_ids[t - lag] == segment_ids[t]:
                expected[t] += np.asarray(conv.weight)[lag] * x[t - lag]
    actual = eqx.filter_jit(conv)(jnp.asarray(x), jnp.asarray(segment_ids))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


def test_convolution_keeps_the_variance(key):
    y = eqx.filter_jit(CausalConv(512, key=key))(jnp.asarray(draw(64, 512)))
    np.testing.assert_allclose(np.var(y[2:]), 1, atol=0.15)


def test_block_linear_against_a_dense_matrix(key):
    layer = BlockLinear(3, 12, 6, use_bias=True, key=key)
    layer = eqx.tree_at(lambda layer: layer.bias, layer, jnp.asarray(draw(3, 2)))
    dense = np.zeros((12, 6))
    for block in range(3):
        dense[4 * block : 4 * block + 4, 2 * block : 2 * block + 2] = layer.weight[block]
    x = draw(5, 12)
    expected = x @ dense + np.asarray(layer.bias).reshape(6)
    np.testing.assert_allclose(layer(jnp.asarray(x)), expected, rtol=0, atol=1e-6)


def test_initial_matrices(key):
    layer = linear(200, 300, use_bias=True, key=key)
    assert layer.weight.shape == (300, 200)
    np.testing.assert_allclose([np.std(layer.weight), np.mean(layer.weight)], [INIT_STD, 0], atol=5e-4)
    np.testing.assert_array_equal(layer.bias, 0)
    assert linear(2, 3, key=key).bias is None
    np.testing.assert_allclose(np.std(BlockLinear(4, 200, 400, key=key).weight), INIT_STD, atol=5e-4)


@jax.jit
def rotate(x, positions):
    return rotary(x, positions, 10_000.0)


def rotate_in_float64(x, positions):
    half = x.shape[-1] // 2
    turned = positions[:, None] * 10_000.0 ** -(np.arange(half) / half)
    pairs = x[..., :half].astype(np.float64) + 1j * x[..., half:]
    pairs = pairs * np.exp(1j * turned)
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


STARTS = [0, 1000, 1_000_000, 2**30 - 40]


@pytest.mark.parametrize("start", STARTS)
def test_rotation_against_float64(start):
    x, positions = draw(2, 32, 16), start + np.arange(32)
    actual = rotate(jnp.asarray(x), jnp.asarray(positions, jnp.int32))
    expected = rotate_in_float64(x, positions)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("start", STARTS[1:])
def test_rotated_products_depend_on_the_distance_only(start):
    queries, keys = draw(2, 32, 16), draw(2, 32, 16, seed=1)

    def products(start):
        positions = jnp.asarray(start + np.arange(32), jnp.int32)
        q, k = rotate(jnp.asarray(queries), positions), rotate(jnp.asarray(keys), positions)
        return np.einsum("htd,hsd->hts", q, k)

    np.testing.assert_allclose(products(start), products(0), rtol=0, atol=1e-2)
    assert np.abs(products(0) - np.einsum("htd,hsd->hts", queries, keys)).max() > 1


def yarn_in_float64(head_dim, scale, length):
    """Return the frequencies and the factor of the logits, pair by pair as the paper writes them."""
    frequencies = []
    for pair in range(head_dim // 2):
        plain = 10_000.0 ** (-2 * pair / head_dim)
        turns = length * plain / (2 * np.pi)
        share = 0.0 if turns < 1 else 1.0 if turns > 32 else (turns - 1) / 31
        frequencies.append((1 - share) * plain / scale + share * plain)
    return np.array(frequencies), (0.1 * np.log(scale) + 1) ** 2


@pytest.mark.parametrize(("scale", "length"), [(1.0, 100), (2.0, 1024), (3.2, 5120), (16.0, 1)])
def test_stretched_frequencies_against_the_formulas(scale, length):
    plain = 10_000.0 ** -(np.arange(32) / 32)
    expected, growth = yarn_in_float64(64, scale, length)
    yarn = YaRN(scale, length)
    np.testing.assert_allclose(yarn.stretch(plain), expected, rtol=1e-14)
    np.testing.assert_allclose(yarn.gain**2, growth, rtol=1e-14)
    turns = length * plain / (2 * np.pi)
    np.testing.assert_array_equal(yarn.stretch(plain)[turns >= 32], plain[turns >= 32])
    np.testing.assert_allclose(yarn.stretch(plain)[turns <= 1], plain[turns <= 1] / scale, rtol=1e-15)
    # A pair that never turned whole meets no new angle at the longest sequence.
    assert (scale * length * yarn.stretch(plain)[turns <= 1] <= 2 * np.pi * (1 + 1e-12)).all()


@pytest.mark.parametrize("length", [1, 100, 1024, 5120, 10**6])
def test_a_stretch_of_one_is_none_to_the_bit(length):
    plain = 10_000.0 ** -(np.arange(64) / 64)
    np.testing.assert_array_equal(YaRN(1.0, length).stretch(plain), plain)
    x, positions = jnp.asarray(draw(2, 32, 16)), 1000 + jnp.arange(32)
    for run in (jax.jit, lambda function: function):
        stretched = run(lambda x: rotary(x, positions, 10_000.0, YaRN(1.0, length)))(x)
        np.testing.assert_array_equal(stretched, run(lambda x: rotary(x, positions, 10_000.0))(x))


@pytest.mark.parametrize("start", STARTS)
def test_stretched_products_against_float64(start):
    """Whatever the start: they depend on the distance only."""
    queries, keys, distance = draw(2, 32, 16), draw(2, 32, 16, seed=1), np.arange(32)[:, None] - np.arange(32)
    positions = jnp.asarray(start + np.arange(32), jnp.int32)
    turn = jax.jit(lambda x: rotary(x, positions, 10_000.0, YaRN(4.0, 64)))
    actual = np.einsum("htd,hsd->hts", turn(jnp.asarray(queries)), turn(jnp.asarray(keys)))
    frequencies, growth = yarn_in_float64(16, 4.0, 64)
    pairs = lambda x: x[..., :8].astype(np.float64) + 1j * x[..., 8:]
    turned = np.exp(1j * distance[..., None] * frequencies)
    expected = growth * np.einsum("htp,hsp,tsp->hts", pairs(queries), pairs(keys).conj(), turned).real
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-2)
    if start == 0:
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("scale", "length", "message"),
    [
        (0.5, 100, "`scale` must be at least 1 and finite, got scale=0.5"),
        (float("nan"), 100, "`scale` must be at least 1 and finite, got scale=nan"),
        (float("inf"), 100, "`scale` must be at least 1 and finite, got scale=inf"),
        (2.0, 0, "`length` must be positive, got length=0"),
    ],
)
def test_impossible_stretches_are_refused(scale, length, message):
    with pytest.raises(ValueError, match=message):
        YaRN(scale, length)


@pytest.mark.parametrize("start", STARTS)
def test_sinusoids_against_float64(start):
    positions = start + np.arange(20)
    turned = positions[:, None] * 10_000.0 ** -(np.arange(8) / 8)
    expected = np.concatenate([np.sin(turned), np.cos(turned)], axis=-1)
    np.testing.assert_allclose(sinusoidal(jnp.asarray(positions, jnp.int32), 16), expected, rtol=0, atol=1e-3)


def test_gated_mlp(key):
    mlp = GatedMLP(6, 10, key=key)
    x = draw(6)
    gate, hidden = (np.asarray(layer.weight, np.float64) @ x for layer in (mlp.to_gate, mlp.to_hidden))
    expected = mlp.to_out.weight @ (gate / (1 + np.exp(-gate)) * hidden)
    np.testing.assert_allclose(mlp(jnp.asarray(x)), expected, rtol=1e-4)
    assert [x.shape for x in jax.tree.leaves(mlp)] == [(10, 6), (10, 6), (6, 10)]


def test_gelu_mlp(key):
    mlp = GeluMLP(6, 10, key=key)
    mlp = eqx.tree_at(lambda mlp: (mlp.to_hidden.bias, mlp.to_out.bias), mlp, (jnp.ones(10), jnp.full(6, 2.0)))
    x = draw(6)
    hidden = np.asarray(mlp.to_hidden.weight, np.float64) @ x + 1
    gelu = 0.5 * hidden * (1 + np.tanh(np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)))
    np.testing.assert_allclose(mlp(jnp.asarray(x)), mlp.to_out.weight @ gelu + 2, rtol=1e-5)
    assert [x.shape for x in jax.tree.leaves(mlp)] == [(10, 6), (10,), (6, 10), (6,)]
