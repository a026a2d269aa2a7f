"""What every mixer promises: exact packing, causality, pieces that equal the whole, no NaN, and any transformation."""

from functools import cache, partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from latte_eqx import RGLRU, RSWA, SWA, CausalConv, FullAttention, LatteBidir, LatteCausal, Macchiato

DIM, HEADS, LATENTS, WINDOW, LENGTH = 16, 2, 8, 6, 72

CAUSAL = {
    "latte": partial(LatteCausal, DIM, LATENTS, HEADS),
    "latte_conv": partial(LatteCausal, DIM, LATENTS, HEADS, feed="conv"),
    "latte_rglru_per_head": partial(
        LatteCausal, DIM, LATENTS, HEADS, feed="rglru", latent_proj="per_head", norm_feed=True
    ),
    "latte_undirected": partial(LatteCausal, DIM, LATENTS, HEADS, directed=False),
    "macchiato": partial(Macchiato, DIM, LATENTS, HEADS, WINDOW, feed=None),
    "macchiato_conv": partial(Macchiato, DIM, LATENTS, HEADS, WINDOW, feed="conv"),
    "macchiato_rglru_biased": partial(Macchiato, DIM, LATENTS, HEADS, WINDOW, feed="rglru", window_bias=1.0),
    "macchiato_per_head": partial(Macchiato, DIM, LATENTS, HEADS, WINDOW, feed="rglru", latent_proj="per_head"),
    "macchiato_grouped": partial(Macchiato, DIM, 8, 4, WINDOW, feed="conv", num_kv_heads=2),
    "swa": partial(SWA, DIM, HEADS, WINDOW),
    "swa_one_key_head": partial(SWA, DIM, HEADS, WINDOW, num_kv_heads=1),
    "swa_grouped": partial(SWA, DIM, 4, WINDOW, num_kv_heads=2),
    "swa_soft_cap": partial(SWA, DIM, HEADS, WINDOW, soft_cap=2.0),
    "swa_without_rotation": partial(SWA, DIM, HEADS, WINDOW, rotary_base=None),
    "swa_of_itself_only": partial(SWA, DIM, HEADS, 0),
    "attention": partial(FullAttention, DIM, HEADS, LENGTH + 10),
    "r_swa": partial(RSWA, DIM, HEADS, WINDOW),
    "conv": partial(CausalConv, DIM),
    "rglru": partial(RGLRU, DIM, HEADS),
}
BIDIRECTIONAL = {
    "both_ways_latte": partial(LatteBidir, DIM, LATENTS, HEADS),
    "both_ways_latte_rglru_per_head": partial(
        LatteBidir, DIM, LATENTS, HEADS, feed="rglru", latent_proj="per_head", norm_feed=True
    ),
    "both_ways_macchiato": partial(Macchiato, DIM, LATENTS, HEADS, WINDOW, feed=None, causal=False),
    "both_ways_macchiato_rglru": partial(Macchiato, DIM, LATENTS, HEADS, WINDOW, feed="rglru", causal=False),
    "both_ways_macchiato_grouped": partial(Macchiato, DIM, 8, 4, WINDOW, feed=None, num_kv_heads=2, causal=False),
    "both_ways_swa": partial(SWA, DIM, HEADS, WINDOW, causal=False),
    "both_ways_attention": partial(FullAttention, DIM, HEADS, LENGTH, causal=False),
    "both_ways_attention_without_rotation": partial(FullAttention, DIM, HEADS, LENGTH, causal=False, rotary_base=None),
}

TABLE = CAUSAL | BIDIRECTIONAL
every_causal = pytest.mark.parametrize("name", CAUSAL)
every_mixer = pytest.mark.parametrize("name", TABLE)


def moved(module):
    """Move all parameters: fresh ones are so small, or so round, that errors could hide."""
    generator = np.random.default_rng(7)

    def move(x):
        return x + jnp.asarray(0.2 * generator.normal(size=x.shape), x.dtype) if eqx.is_inexact_array(x) else x

    return jax.tree.map(move, module)


@cache
def build(name):
    return moved(TABLE[name](key=jax.random.key(0)))


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), jnp.float32)


X, COTANGENT, OTHER = draw(LENGTH, DIM), draw(LENGTH, DIM, seed=1), 30 * draw(LENGTH, DIM, seed=2)


@eqx.filter_jit
def run(function, mixer, x, cotangent, *arguments):
    """The value of `function(mixer, x)`, and its gradients with respect to the parameters and x."""
    y, pull_back = eqx.filter_vjp(lambda mixer, x: function(mixer, x, *arguments), mixer, x)
    return y, pull_back(cotangent)


def whole(mixer, x):
    return mixer(x)


def packed(mixer, x, segment_ids):
    return mixer(x, segment_ids)


def masked(mixer, x, mask):
    return jnp.where(mask[:, None], mixer(x, mask=mask), 0)


def run_alone(name, places):
    """What `run` should give if no token but those in `places` existed, with zeros for the others.

    Behind a causal mixer's tokens others may follow, which spares us another compilation.
    """
    order = places if name in BIDIRECTIONAL else np.concatenate([places, np.setdiff1d(np.arange(LENGTH), places)])
    counts = np.isin(order, places)[:, None]
    y, (parameters, x) = run(whole, build(name), X[order], jnp.where(counts, COTANGENT[order], 0))

    def put_back(rows):
        return jnp.zeros_like(X).at[order].set(jnp.where(counts, rows, 0))

    return put_back(y), (parameters, put_back(x))


def add(trees):
    return jax.tree.map(lambda *parts: sum(parts), *trees)


def assert_near(actual, expected, tolerance, scale=1.0):
    """No error above `tolerance` times the largest number expected, or times `scale` if that is larger."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * max(scale, np.abs(expected).max(initial=0)))


def assert_same(actual, expected):
    """Values within 1e-5, and the gradients of every parameter and of x within 1e-4 of the largest."""
    assert_near(actual[0], expected[0], 1e-5)
    gradients, expected_gradients = jax.tree.leaves(actual[1]), jax.tree.leaves(expected[1])
    # Where a gradient ought to be zero, the others tell what is small.
    scale = 1e-2 * max(np.abs(gradient).max() for gradient in expected_gradients)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert_near(gradient, expected_gradient, 1e-4, scale)


def assert_finite(tree):
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(tree))


DOCUMENTS = (35, 1, 35, 1)
SEGMENT_IDS = jnp.asarray(np.repeat(np.arange(4), DOCUMENTS), jnp.int32)


@every_mixer
def test_packed_documents_equal_separate_ones(name):
    documents = np.split(np.arange(LENGTH), np.cumsum(DOCUMENTS)[:-1])
    expected = add([run_alone(name, document) for document in documents])
    assert_same(run(packed, build(name), X, COTANGENT, SEGMENT_IDS), expected)


@pytest.mark.parametrize("seen", [1, WINDOW + 2, 66])
@every_causal
def test_the_future_does_not_leak(name, seen):
    past, mixer = np.arange(LENGTH)[:, None] < seen, build(name)
    cotangent = jnp.where(past, COTANGENT, 0)
    y, (parameters, gradient) = run(whole, mixer, X, cotangent)
    changed_y, (changed_parameters, changed_gradient) = run(whole, mixer, jnp.where(past, X, OTHER), cotangent)
    assert_near(changed_y[:seen], y[:seen], 1e-6)
    assert_same((changed_y[:seen], (changed_parameters, changed_gradient)), (y[:seen], (parameters, gradient)))
    np.testing.assert_array_equal(gradient[seen:], 0)
    np.testing.assert_array_equal(changed_gradient[seen:], 0)


extend = eqx.filter_jit(lambda mixer, x, state: mixer.extend(x, state))


@pytest.mark.parametrize(
    "sizes",
    [(0, 64, 0, 8, 0), (8, 64), (1, 64, *[1] * 7), (*[1] * WINDOW, 64, 1, 1), (8, 1) * 8, (1,) * LENGTH],
    ids=lambda sizes: "_".join(map(str, sizes[:8])),
)
@every_causal
def test_pieces_equal_the_whole(name, sizes):
    mixer, outputs = build(name), []
    state = mixer.init_state()
    for piece in np.split(np.arange(LENGTH), np.cumsum(sizes)[:-1]):
        y, state = extend(mixer, X[piece], state)
        outputs.append(y)
    assert_near(jnp.concatenate(outputs), run(whole, mixer, X, COTANGENT)[0], 1e-5)


def in_scanned_pieces(mixer, x):
    def step(state, piece):
        y, state = mixer.extend(piece, state)
        return state, y

    return jax.lax.scan(step, mixer.init_state(), x.reshape(-1, 8, DIM))[1].reshape(x.shape)


@every_causal
def test_gradients_flow_through_the_state(name):
    expected = run(whole, build(name), X, COTANGENT)
    assert_same(run(in_scanned_pieces, build(name), X, COTANGENT), expected)


def cast(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, tree)


@every_mixer
def test_bfloat16(name):
    y, _ = run(whole, build(name), X, COTANGENT)
    half = eqx.filter_jit(whole)(cast(build(name), jnp.bfloat16), X.astype(jnp.bfloat16))
    assert y.dtype == jnp.float32
    assert half.dtype == jnp.bfloat16
    assert_near(half.astype(jnp.float32), y, 5e-2)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@every_causal
def test_the_state_keeps_its_type(name, dtype):
    mixer = cast(build(name), dtype)
    before = eqx.filter_eval_shape(mixer.init_state)
    for seq in (0, 1, LENGTH):
        y, after = eqx.filter_eval_shape(mixer.extend, jax.ShapeDtypeStruct((seq, DIM), dtype), before)
        assert (y.shape, y.dtype) == ((seq, DIM), dtype)
        assert jax.tree.structure(after) == jax.tree.structure(before)
        assert [(x.shape, x.dtype) for x in jax.tree.leaves(after)] == [
            (x.shape, x.dtype) for x in jax.tree.leaves(before)
        ]


@pytest.mark.parametrize("kind", ["large", "rising", "zero", "equal"])
@every_mixer
def test_no_nan(name, kind):
    x = {
        "large": 1e4 * X,
        "rising": jnp.linspace(0, 1e4, LENGTH)[:, None] * X[:1],
        "zero": jnp.zeros((LENGTH, DIM)),
        "equal": jnp.ones((LENGTH, DIM)),
    }[kind]
    assert_finite(run(whole, build(name), x, COTANGENT))
    assert_finite(run(packed, build(name), x, COTANGENT, SEGMENT_IDS))


@every_causal
def test_one_token(name):
    y = eqx.filter_jit(whole)(build(name), X[:1])
    assert_near(y, run(whole, build(name), X, COTANGENT)[0][:1], 1e-5)


def scanned_layers(mixer, x):
    """Two layers with the same parameters."""
    arrays, static = eqx.partition(mixer, eqx.is_array)

    @jax.checkpoint
    def layer(x, arrays):
        return jax.vmap(eqx.combine(arrays, static))(x), None

    return jax.lax.scan(layer, x, jax.tree.map(lambda x: jnp.stack([x, x]), arrays))[0]


@every_mixer
def test_rows_sharded_and_layers_scanned(name):
    """As models use it: rows under `vmap`, layers rematerialised under `scan`, the batch over eight devices.

    The parameters are replicated, so their gradient is summed over all rows.
    """
    mixer, x, cotangent = build(name), draw(16, LENGTH, DIM), draw(16, LENGTH, DIM, seed=1)
    rows = []
    for x_row, cotangent_row in zip(x, cotangent, strict=True):
        between, _ = run(whole, mixer, x_row, cotangent_row)
        y, (second_parameters, between_gradient) = run(whole, mixer, between, cotangent_row)
        _, (first_parameters, gradient) = run(whole, mixer, x_row, between_gradient)
        rows.append((y, (add([first_parameters, second_parameters]), gradient)))
    y, gradient = (jnp.stack(parts) for parts in zip(*((y, gradient) for y, (_, gradient) in rows), strict=True))
    expected = y, (add([parameters for _, (parameters, _) in rows]), gradient)

    arrays, static = eqx.partition(mixer, eqx.is_inexact_array)
    shard, copy = PartitionSpec("data"), PartitionSpec()

    def gradients(arrays, x, cotangent):
        y, pull_back = jax.vjp(lambda arrays, x: scanned_layers(eqx.combine(arrays, static), x), arrays, x)
        return y, pull_back(cotangent)

    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(
        gradients, mesh=mesh, in_specs=(copy, shard, shard), out_specs=(shard, (copy, shard)), check_vma=True
    )
    assert_same(jax.jit(sharded)(arrays, x, cotangent), expected)


MASKABLE = (*BIDIRECTIONAL, "macchiato_conv", "macchiato_per_head", "swa", "attention")
PADDED = (np.arange(LENGTH) >= 9) & (np.arange(LENGTH) < 9 + 35)
HOLES = np.isin(np.arange(LENGTH), np.random.default_rng(3).permutation(LENGTH)[:35])


@pytest.mark.parametrize("name", MASKABLE)
def test_padding_on_both_sides_changes_nothing(name):
    expected = run_alone(name, np.flatnonzero(PADDED))
    assert_same(run(masked, build(name), X, COTANGENT, jnp.asarray(PADDED)), expected)


@pytest.mark.parametrize("name", MASKABLE)
def test_masked_tokens_are_not_seen(name):
    holes = jnp.asarray(HOLES)
    expected = run(masked, build(name), X, COTANGENT, holes)
    changed = jnp.where(HOLES[:, None], X, OTHER)
    assert_same(run(masked, build(name), changed, COTANGENT, holes), expected)
    np.testing.assert_array_equal(expected[1][1][~HOLES], 0)


@pytest.mark.parametrize("name", ["both_ways_latte", "both_ways_attention_without_rotation"])
def test_tokens_around_a_hole_see_each_other(name):
    """Without positions a masked token might as well not be there."""
    expected = run_alone(name, np.flatnonzero(HOLES))
    assert_same(run(masked, build(name), X, COTANGENT, jnp.asarray(HOLES)), expected)
