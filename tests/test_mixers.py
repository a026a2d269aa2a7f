"""What the mixers compute, against sums written out in float64."""

from dataclasses import replace
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from latte_eqx import RSWA, SWA, FullAttention, LanguageModel, LatteBidir, LatteCausal, Macchiato, ModelConfig
from latte_eqx.layers import YaRN
from latte_eqx.mixers.latents import BothWays
from tests.test_mixer_contract import assert_near, draw, moved

DIM, HEADS, LATENTS, WINDOW, LENGTH = 16, 2, 8, 6, 40

MIXERS = {
    "latte": partial(LatteCausal, DIM, LATENTS, HEADS),
    "latte_undirected": partial(LatteCausal, DIM, LATENTS, HEADS, directed=False),
    "latte_both_ways": partial(LatteBidir, DIM, LATENTS, HEADS),
    "macchiato": partial(Macchiato, DIM, LATENTS, HEADS, WINDOW, feed=None, window_bias=1.0),
    "macchiato_conv": partial(Macchiato, DIM, LATENTS, HEADS, WINDOW, feed="conv"),
    "macchiato_both_ways": partial(Macchiato, DIM, LATENTS, HEADS, WINDOW, feed=None, causal=False),
    "swa": partial(SWA, DIM, HEADS, WINDOW),
}
X = draw(LENGTH, DIM)
call = eqx.filter_jit(lambda mixer, x, *arguments: mixer(x, *arguments))


def build(make):
    return moved(make(key=jax.random.key(0)))


def transplant(source, target):
    """Return `target` with the parameters of `source`."""
    return jax.tree.unflatten(jax.tree.structure(target), jax.tree.leaves(source))


def with_open_values(mixer):
    """Let every value be the last channel, which nothing else reads, and let the output be the mixed values."""
    last = jnp.zeros((DIM, DIM)).at[:, -1].set(1)
    mixer = eqx.tree_at(lambda mixer: (mixer.to_value.weight, mixer.to_out.weight), mixer, (last, jnp.eye(DIM)))
    readers = lambda mixer: [
        layer.weight
        for part in (getattr(mixer, name, None) for name in ("latents", "window", "attention"))
        if part is not None
        for layer in (part.to_query, part.to_key)
    ]
    return eqx.tree_at(readers, mixer, [weight.at[:, -1].set(0) for weight in readers(mixer)])


def attention_weights(mixer):
    """Return, for each head, how much each token's output holds of each token's value."""
    mixer = with_open_values(mixer)
    gradient = jax.jit(jax.jacobian(lambda values: mixer(X.at[:, -1].set(values))))(X[:, -1])
    # All channels of a head have the same weights.
    heads = gradient.reshape(LENGTH, HEADS, DIM // HEADS, LENGTH)
    np.testing.assert_allclose(heads, jnp.broadcast_to(heads[:, :, :1], heads.shape), rtol=0, atol=1e-6)
    return np.asarray(heads[:, :, 0]).swapaxes(0, 1)


def softmax(logits, axis=-1):
    powers = np.exp(logits - logits.max(axis=axis, keepdims=True))
    return powers / powers.sum(axis=axis, keepdims=True)


def project(weight, x):
    """Return float64 logits, heads first."""
    y = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    return y.reshape(len(x), HEADS, -1).swapaxes(0, 1)


PAST = np.tril(np.ones((LENGTH, LENGTH), bool))


def latent_weights(shares, keys, seen=PAST):
    """Return sum_l p(l|t) p(s|l,t)."""
    logits = np.where(seen[..., None], keys[:, None], -np.inf)
    return np.einsum("htl,htsl->hts", shares, softmax(logits, axis=2))


@pytest.mark.parametrize("name", MIXERS)
def test_equal_values_come_out_unchanged(name):
    mixer, x = with_open_values(build(MIXERS[name])), 5 * X
    y = call(mixer, x.at[:, -1].set(3.5))
    np.testing.assert_allclose(y, 3.5, rtol=1e-5)


@pytest.mark.parametrize("name", MIXERS)
def test_weights_sum_to_one(name):
    weights = attention_weights(build(MIXERS[name]))
    assert weights.min() >= -1e-7
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["macchiato", "macchiato_both_ways"])
def test_macchiato_written_out(name):
    mixer = build(partial(MIXERS[name], rotary_base=None))
    x = np.asarray(X.at[:, -1].set(0))
    queries, keys = project(mixer.latents.to_query.weight, x), project(mixer.latents.to_key.weight, x)
    if mixer.window_bias is not None:
        queries[..., 0] += np.asarray(mixer.window_bias)[:, None]
    shares = softmax(queries)
    seen = PAST if mixer.window.causal else np.ones_like(PAST)
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    near = seen & (np.abs(distance) <= WINDOW)
    logits = np.einsum("htd,hsd->hts", project(mixer.window.to_query.weight, x), project(mixer.window.to_key.weight, x))
    window = softmax(np.where(near, logits / np.sqrt(DIM // HEADS), -np.inf))
    expected = shares[..., :1] * window + latent_weights(shares[..., 1:], keys, seen)
    np.testing.assert_allclose(attention_weights(mixer), expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(mixer.shares(jnp.asarray(x)), shares, rtol=0, atol=1e-6)


def test_latte_written_out():
    mixer, x = build(MIXERS["latte"]), np.asarray(X.at[:, -1].set(0))
    queries, keys = project(mixer.latents.to_query.weight, x), project(mixer.latents.to_key.weight, x)
    expected = latent_weights(softmax(queries), keys)
    np.testing.assert_allclose(attention_weights(mixer), expected, rtol=0, atol=1e-5)


def test_undirected_latte_is_normalised_linear_attention():
    mixer, x = build(MIXERS["latte_undirected"]), np.asarray(X.at[:, -1].set(0))
    queries, keys = project(mixer.latents.to_query.weight, x), project(mixer.latents.to_key.weight, x)
    products = np.einsum("htl,hsl->hts", np.exp(queries), np.exp(keys)) * PAST
    expected = products / products.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(attention_weights(mixer), expected, rtol=0, atol=1e-5)
    directed = latent_weights(softmax(queries), keys)
    assert np.abs(directed - expected).max() > 1e-2


def test_one_latent_is_a_running_weighted_mean():
    mixer = build(partial(LatteCausal, DIM, HEADS, HEADS))
    keys = project(mixer.latents.to_key.weight, X)
    values = project(mixer.to_value.weight, X)
    means = np.cumsum(np.exp(keys) * values, axis=1) / np.cumsum(np.exp(keys), axis=1)
    expected = means.swapaxes(0, 1).reshape(LENGTH, DIM) @ np.asarray(mixer.to_out.weight).T
    assert_near(call(mixer, X), expected, 1e-5)


@pytest.mark.parametrize(("causal", "window"), [(True, 0), (True, 6), (True, LENGTH), (False, 6)])
def test_a_query_sees_the_window_and_itself(causal, window):
    weights = attention_weights(build(partial(SWA, DIM, HEADS, window, causal=causal)))
    t = np.arange(LENGTH)
    ahead = 0 if causal else np.minimum(window, LENGTH - 1 - t)
    expected = np.minimum(window, t) + 1 + ahead
    np.testing.assert_array_equal((weights > 0).sum(axis=-1), np.broadcast_to(expected, (HEADS, LENGTH)))
    if causal and window == 6:
        assert (expected[6:] == 7).all()


def test_order_does_not_matter_to_bidirectional_latte():
    mixer, order = build(MIXERS["latte_both_ways"]), np.random.default_rng(0).permutation(LENGTH)
    y = call(mixer, X)
    assert_near(call(mixer, X[order]), y[order], 1e-5)
    assert np.abs(call(build(MIXERS["latte"]), X[order]) - call(build(MIXERS["latte"]), X)[order]).max() > 1e-2


@pytest.mark.parametrize(("causal", "both_ways"), [("latte", "latte_both_ways"), ("macchiato", "macchiato_both_ways")])
def test_the_last_token_sees_the_same_both_ways(causal, both_ways):
    causal = build(MIXERS[causal])
    if both_ways.startswith("macchiato"):
        causal = eqx.tree_at(lambda mixer: mixer.window_bias, causal, None)
    both_ways = transplant(causal, build(MIXERS[both_ways]))
    assert_near(call(both_ways, X)[-1], call(causal, X)[-1], 1e-5)
    assert np.abs(call(both_ways, X)[0] - call(causal, X)[0]).max() > 1e-2


def biased(bias, window):
    mixer = build(partial(Macchiato, DIM, LATENTS, HEADS, window, feed=None, window_bias=0.0))
    return eqx.tree_at(lambda mixer: mixer.window_bias, mixer, jnp.full(HEADS, bias))


def test_macchiato_with_a_large_bias_is_attention():
    mixer = biased(1e4, LENGTH)
    attention = FullAttention(DIM, HEADS, LENGTH, key=jax.random.key(1))
    attention = transplant((mixer.window, mixer.to_value, mixer.to_out), attention)
    assert_near(call(mixer, X), call(attention, X), 1e-5)
    assert np.abs(call(biased(0.0, LENGTH), X) - call(attention, X)).max() > 1e-2


def test_macchiato_with_a_small_bias_is_latte():
    mixer = biased(-1e4, WINDOW)
    to_query = mixer.latents.to_query.weight.reshape(HEADS, -1, DIM)[:, 1:].reshape(LATENTS, DIM)
    arrays = to_query, mixer.latents.to_key, mixer.to_value, mixer.to_out
    latte = transplant(arrays, LatteCausal(DIM, LATENTS, HEADS, key=jax.random.key(1)))
    assert_near(call(mixer, X), call(latte, X), 1e-5)
    assert np.abs(call(biased(0.0, WINDOW), X) - call(latte, X)).max() > 1e-2


def test_window_and_latents_share_values_and_output():
    mixer = Macchiato(DIM, LATENTS, HEADS, WINDOW, feed=None, window_bias=0.5, key=jax.random.key(0))
    shapes = {jax.tree_util.keystr(path): x.shape for path, x in jax.tree.leaves_with_path(mixer)}
    assert shapes == {
        ".latents.to_query.weight": (LATENTS + HEADS, DIM),
        ".latents.to_key.weight": (LATENTS, DIM),
        ".window.to_query.weight": (DIM, DIM),
        ".window.to_key.weight": (DIM, DIM),
        ".to_value.weight": (DIM, DIM),
        ".to_out.weight": (DIM, DIM),
        ".window_bias": (HEADS,),
    }
    np.testing.assert_array_equal(mixer.window_bias, 0.5)


def test_per_head_latents_read_their_own_head():
    """The logits of the first head do not change with the channels of the second."""
    mixer = build(partial(Macchiato, DIM, LATENTS, HEADS, WINDOW, feed=None, latent_proj="per_head"))
    changed = X.at[:, DIM // 2 :].multiply(2)
    shares, changed_shares = mixer.shares(X), mixer.shares(changed)
    np.testing.assert_array_equal(shares[0], changed_shares[0])
    assert np.abs(shares[1] - changed_shares[1]).max() > 1e-2


def test_both_ways_is_the_average_of_two_recurrences():
    feed = build(partial(BothWays, DIM, HEADS))
    expected = (call(feed.forward, X) + call(feed.backward, X[::-1])[::-1]) / 2
    assert_near(call(feed, X), expected, 1e-6)


def test_soft_cap_bounds_the_logits():
    """Logits between -c and c leave no weight below e^(-2c) times the largest."""
    capped, free = (build(partial(SWA, DIM, HEADS, WINDOW, soft_cap=cap)) for cap in (0.5, None))
    scale = lambda mixer: eqx.tree_at(
        lambda mixer: mixer.attention.to_query.weight, mixer, 30 * mixer.attention.to_query.weight
    )
    ratios = []
    for mixer in (capped, free):
        weights = attention_weights(scale(mixer))[:, WINDOW:]
        seen = np.where(weights > 0, weights, np.inf)
        ratios.append(seen.min() / weights.max())
    assert ratios[0] >= np.exp(-1.0) / 7
    assert ratios[1] < np.exp(-1.0) / 7


ROTATED = {
    "swa": MIXERS["swa"],
    "swa_grouped": partial(SWA, DIM, 4, WINDOW, num_kv_heads=2, soft_cap=2.0),
    "attention": partial(FullAttention, DIM, HEADS, LENGTH),
    "macchiato": MIXERS["macchiato"],
    "r_swa": partial(RSWA, DIM, HEADS, WINDOW),
}
STRETCH = YaRN(scale=4.0, length=LENGTH // 4)


@pytest.mark.parametrize("sizes", [(1,) * (2 * WINDOW + 3), (4, WINDOW), (WINDOW + 1, 5), (0, 20)], ids=str)
def test_a_token_keeps_its_place_in_the_cache(sizes):
    """Token n is at n modulo the places, however it came there, so that one more token changes one place."""
    mixer, places, seen = build(MIXERS["swa"]), WINDOW + 1, sum(sizes)
    state = mixer.init_state()
    for piece in jnp.split(X[:seen], np.cumsum(sizes)[:-1]):
        _, state = mixer.extend(piece, state)
    np.testing.assert_array_equal(state.position, seen)
    written = np.arange(max(0, seen - places), seen)
    values = np.asarray(project(mixer.to_value.weight, np.asarray(X)))
    np.testing.assert_allclose(np.asarray(state.values)[:, written % places], values[:, written], rtol=0, atol=1e-5)
    _, after = mixer.extend(X[seen : seen + 1], state)
    changed = np.any(np.asarray(after.values) != np.asarray(state.values), axis=(0, 2))
    np.testing.assert_array_equal(np.flatnonzero(changed), [seen % places])


@pytest.mark.parametrize("name", ROTATED)
def test_a_stretch_takes_the_same_parameters(name):
    plain, unit, stretched = (build(partial(ROTATED[name], yarn=yarn)) for yarn in (None, YaRN(1.0, 10), STRETCH))
    for other in (unit, stretched):
        assert [path for path, _ in jax.tree.leaves_with_path(other)] == [
            path for path, _ in jax.tree.leaves_with_path(plain)
        ]
        jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(other), jax.tree.leaves(plain))
    np.testing.assert_array_equal(call(unit, X), call(plain, X))
    assert np.abs(call(stretched, X) - call(plain, X)).max() > 1e-3


@pytest.mark.parametrize("sizes", [(1,) * LENGTH, (7, 1, 32)], ids=("tokens", "pieces"))
@pytest.mark.parametrize("name", ROTATED)
def test_stretched_pieces_equal_the_whole(name, sizes):
    mixer, outputs = build(partial(ROTATED[name], yarn=STRETCH)), []
    extend, state = eqx.filter_jit(lambda mixer, x, state: mixer.extend(x, state)), mixer.init_state()
    for piece in jnp.split(X, np.cumsum(sizes)[:-1]):
        y, state = extend(mixer, piece, state)
        outputs.append(y)
    assert_near(jnp.concatenate(outputs), call(mixer, X), 1e-5)


def test_stretched_attention_written_out():
    mixer = build(partial(SWA, DIM, HEADS, LENGTH, yarn=STRETCH))
    x, half, distance = (
        np.asarray(X.at[:, -1].set(0)),
        DIM // HEADS // 2,
        np.arange(LENGTH)[:, None] - np.arange(LENGTH),
    )
    queries, keys = (
        y[..., :half] + 1j * y[..., half:]
        for y in (project(layer.weight, x) for layer in (mixer.attention.to_query, mixer.attention.to_key))
    )
    plain = 10_000.0 ** -(np.arange(half) / half)
    share = np.clip((STRETCH.length * plain / (2 * np.pi) - 1) / 31, 0, 1)
    frequencies = (1 - share) * plain / STRETCH.scale + share * plain
    turned = np.exp(1j * distance[..., None] * frequencies)
    logits = np.einsum("htp,hsp,tsp->hts", queries, keys.conj(), turned).real / np.sqrt(DIM // HEADS)
    logits *= (0.1 * np.log(STRETCH.scale) + 1) ** 2
    expected = softmax(np.where(PAST, logits, -np.inf))
    np.testing.assert_allclose(attention_weights(mixer), expected, rtol=0, atol=1e-5)


def test_a_trained_model_reads_longer_sequences():
    """The config of a trained model, with a stretch and a longer cache, takes its arrays as they are."""
    sizes = dict(vocab_size=20, num_layers=2, dim=DIM, num_heads=HEADS, mlp_dim=32)
    config = ModelConfig(mixer="attention", **sizes, max_length=LENGTH // 4)
    longer = replace(config, max_length=LENGTH, rotary_scale=4.0, rotary_length=config.max_length)
    trained = moved(LanguageModel(config, key=jax.random.key(0)))
    model = transplant(trained, LanguageModel(longer, key=jax.random.key(1)))
    assert model.stack.blocks.mixer.attention.attention.yarn == STRETCH
    tokens = jnp.arange(LENGTH) % 20
    assert np.isfinite(call(model, tokens)).all()
    with pytest.raises(ValueError, match="max_length=10"):
        trained(tokens)
    unit = transplant(trained, LanguageModel(replace(config, rotary_length=7), key=jax.random.key(1)))
    np.testing.assert_array_equal(call(unit, tokens[:10]), call(trained, tokens[:10]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(rotary_scale=0.5, rotary_length=10), "`rotary_scale` must be at least 1, got rotary_scale=0.5"),
        (dict(rotary_scale=2.0), "`rotary_scale` above 1 must come with .*rotary_length=None"),
        (dict(rotary_scale=2.0, rotary_length=10, rotary_base=None), "must come with .*rotary_base=None"),
    ],
)
def test_impossible_stretches_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**changes)


def test_nothing_is_stretched_without_rotation():
    with pytest.raises(ValueError, match="`yarn` must be None where nothing is rotated, got rotary_base=None"):
        SWA(DIM, HEADS, WINDOW, rotary_base=None, yarn=STRETCH, key=jax.random.key(0))
