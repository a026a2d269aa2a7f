"""The gated recurrence against a float64 loop, and how it starts."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from latte_eqx import RGLRU

DIM, BLOCKS, LENGTH = 8, 2, 40


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def loop(rglru, x, segment_ids):
    """The equations of the docstring, token by token."""

    def gate(layer, token):
        blocks = token.reshape(BLOCKS, -1)
        rows = [
            block @ np.asarray(w, np.float64) + b for block, w, b in zip(blocks, layer.weight, layer.bias, strict=True)
        ]
        return sigmoid(np.concatenate(rows))

    rate = np.log1p(np.exp(np.asarray(rglru.decay_logit, np.float64)))
    outputs = []
    for t, token in enumerate(x.astype(np.float64)):
        entering = gate(rglru.to_input_gate, token) * token
        if t == 0 or segment_ids[t] != segment_ids[t - 1]:
            outputs.append(entering)
        else:
            decay = np.exp(-8 * rate * gate(rglru.to_recurrence_gate, token))
            outputs.append(decay * outputs[-1] + np.sqrt(1 - decay**2) * entering)
    return np.stack(outputs)


@pytest.mark.parametrize("bounds", [(), (1, 17, 18)])
def test_against_a_loop(bounds, key):
    rglru, x = RGLRU(DIM, BLOCKS, key=key), draw(LENGTH, DIM)
    biases = lambda rglru: (rglru.to_recurrence_gate.bias, rglru.to_input_gate.bias)
    rglru = eqx.tree_at(biases, rglru, tuple(map(jnp.asarray, draw(2, BLOCKS, DIM // BLOCKS))))
    segment_ids = np.searchsorted(bounds, np.arange(LENGTH), side="right").astype(np.int32)
    actual = eqx.filter_jit(rglru)(jnp.asarray(x), jnp.asarray(segment_ids) if bounds else None)
    np.testing.assert_allclose(actual, loop(rglru, x, segment_ids), rtol=0, atol=2e-6)


@eqx.filter_jit
def value_and_gradients(rglru, x):
    return eqx.filter_value_and_grad(lambda arguments: jnp.sum(arguments[0](arguments[1]) ** 2))((rglru, x))


@pytest.mark.parametrize("logit", [-100.0, -1e4, 100.0, 1e4])
def test_gradients_where_the_decay_is_one_or_zero(logit, key):
    rglru = eqx.tree_at(lambda rglru: rglru.decay_logit, RGLRU(DIM, BLOCKS, key=key), jnp.full(DIM, logit))
    x = jnp.asarray(draw(LENGTH, DIM))
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(value_and_gradients(rglru, x)))
    y = eqx.filter_jit(rglru)(x)
    entering = eqx.filter_jit(lambda rglru, x: jax.nn.sigmoid(rglru.to_input_gate(x)) * x)(rglru, x)
    # A decay of one keeps the first token for ever; a decay of zero keeps nothing.
    expected = jnp.broadcast_to(entering[:1], x.shape) if logit < 0 else entering
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("ring_on", "power"), [("a", 1), ("a_pow_c", 8)])
def test_initial_decays(ring_on, power, key):
    """The squared decays are uniform in [0.81, 0.998]: the Kolmogorov-Smirnov distance is what chance allows."""
    rglru = RGLRU(4096, 8, ring_on=ring_on, key=key)
    rate = np.log1p(np.exp(np.asarray(rglru.decay_logit, np.float64)))
    squared = np.sort(np.exp(-rate * power) ** 2)
    share = (squared - 0.9**2) / (0.999**2 - 0.9**2)
    assert np.abs(share - (np.arange(4096) + 0.5) / 4096).max() < 1.95 / np.sqrt(4096)


def test_initial_gates(key):
    rglru = RGLRU(256, 8, key=key)
    for gate in (rglru.to_recurrence_gate, rglru.to_input_gate):
        np.testing.assert_allclose(np.std(gate.weight), 1 / np.sqrt(256), rtol=0.05)
        np.testing.assert_array_equal(gate.bias, 0)


def test_number_of_parameters():
    shapes = eqx.filter_eval_shape(RGLRU, 768, 8, key=jax.random.key(0))
    assert sum(x.size for x in jax.tree.leaves(shapes)) == 149_760
