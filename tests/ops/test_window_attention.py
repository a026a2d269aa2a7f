import importlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, PartitionSpec

from latte_eqx.ops.window_attention import IMPLEMENTATIONS, check_arrays, window_attention

# The package attributes of these names are the functions.
chunked = importlib.import_module("latte_eqx.ops.window_attention.chunked")
pallas_gpu = importlib.import_module("latte_eqx.ops.window_attention.pallas_gpu")
pallas_tpu = importlib.import_module("latte_eqx.ops.window_attention.pallas_tpu")

WINDOW = 40
BLOCK = 40
LENGTHS = [1, WINDOW, WINDOW + 1, BLOCK - 1, BLOCK + 1, 3 * BLOCK + 5]
SMALL = {"batch": (2,), "heads": 2, "kv_heads": 1, "head_dim": 4, "value_dim": 6}


COMPILED = ["reference", "chunked", "chunked, many steps"]


def prepare(implementation, monkeypatch, interpret=True):
    if "many steps" in implementation:
        # Two blocks in a step for the small windows below, one for the others.
        monkeypatch.setattr(chunked, "LOGITS_PER_STEP", 2500)
    # Narrow blocks, so that short sequences have several, and windows reach over one or more of them.
    if implementation == "pallas, GPU":
        cut = pallas_gpu.Cut(16, warps=4)
        monkeypatch.setattr(pallas_gpu, "PLANS", dict.fromkeys(pallas_gpu.PLANS, pallas_gpu.Plan(cut, cut)))
        # And pieces of one or more of them.
        monkeypatch.setattr(pallas_gpu, "ENOUGH_PROGRAMS", 6)
        monkeypatch.setitem(IMPLEMENTATIONS, "pallas", partial(pallas_gpu.pallas_gpu, interpret=interpret))
    if implementation == "pallas, TPU":
        monkeypatch.setattr(pallas_tpu, "LANES", 16)
        monkeypatch.setattr(pallas_tpu, "BLOCKS", (32,))
        monkeypatch.setitem(IMPLEMENTATIONS, "pallas", partial(pallas_tpu.pallas_tpu, interpret=interpret))
    return implementation.split(",")[0]


@pytest.fixture(params=[*COMPILED, "pallas, TPU", "pallas, GPU"])
def implementation(request, monkeypatch):
    return prepare(request.param, monkeypatch)


@pytest.fixture(params=[*COMPILED, "pallas, TPU", pytest.param("pallas, GPU", marks=pytest.mark.slow)])
def any_implementation(request, monkeypatch):
    """Interpret the GPU's kernels, which takes longest, only where there is time."""
    return prepare(request.param, monkeypatch)


@pytest.fixture(params=COMPILED)
def compiled_implementation(request, monkeypatch):
    """Leave out the kernels, which take seconds to be interpreted, where other tests see the same of them."""
    return prepare(request.param, monkeypatch)


def draw(key, seq, past=0, batch=(2,), heads=8, kv_heads=2, head_dim=16, value_dim=12, dtype=jnp.float32):
    """Queries, keys, values and a cotangent; keys and queries large enough for a sharp softmax."""
    shapes = [
        (*batch, heads, seq, head_dim),
        (*batch, kv_heads, past + seq, head_dim),
        (*batch, kv_heads, past + seq, value_dim),
        (*batch, heads, seq, value_dim),
    ]
    generator = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    return [
        jnp.asarray(size * generator.standard_normal(s), dtype) for size, s in zip((2, 1, 1, 1), shapes, strict=True)
    ]


def oracle(queries, keys, values, cotangent, sees, soft_cap=None):
    """Outputs and the three gradients by the definition, in float64, one query at a time."""
    queries, keys, values, cotangent = (np.asarray(x, np.float64) for x in (queries, keys, values, cotangent))
    *batch, heads, seq, head_dim = queries.shape
    group, scale = heads // keys.shape[-3], 1 / np.sqrt(head_dim)
    output, grads = np.zeros(cotangent.shape), [np.zeros(x.shape) for x in (queries, keys, values)]
    for row in np.ndindex(*batch):
        for head in range(heads):
            for t in range(seq):
                query_at, key_at = (*row, head, t), (*row, head // group)
                seen = [s for s in range(keys.shape[-2]) if sees(row, t, s)]
                if not seen:
                    continue
                near, near_values = keys[key_at][seen], values[key_at][seen]
                logits = scale * near @ queries[query_at]
                slope = 1.0
                if soft_cap is not None:
                    slope = 1 - np.tanh(logits / soft_cap) ** 2
                    logits = soft_cap * np.tanh(logits / soft_cap)
                weights = np.exp(logits - logits.max())
                weights /= weights.sum()
                output[query_at] = weights @ near_values
                weights_grad = near_values @ cotangent[query_at]
                logits_grad = slope * scale * weights * (weights_grad - weights @ weights_grad)
                grads[0][query_at] = logits_grad @ near
                grads[1][key_at][seen] += np.outer(logits_grad, queries[query_at])
                grads[2][key_at][seen] += np.outer(weights, cotangent[query_at])
    return output, grads


def value_and_grads(queries, keys, values, cotangent, **settings):
    @jax.jit
    def run(queries, keys, values, cotangent):
        output, pullback = jax.vjp(partial(window_attention, **settings), queries, keys, values)
        return output, pullback(cotangent)

    return run(queries, keys, values, cotangent)


def check(actual, expected, values, value_tolerance=5e-6, grad_tolerance=1e-4):
    (output, grads), (expected_output, expected_grads) = actual, expected
    largest = np.max(np.abs(values), initial=0).astype(np.float64)
    np.testing.assert_allclose(np.asarray(output, np.float64), expected_output, rtol=0, atol=value_tolerance * largest)
    largest = max(np.max(np.abs(grad)) for grad in expected_grads)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(np.asarray(grad, np.float64), expected_grad, rtol=0, atol=grad_tolerance * largest)


def in_window(window, causal=True, past=0):
    return lambda row, t, s: -(0 if causal else window) <= t + past - s <= window


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seq", LENGTHS)
def test_matches_definition(key, any_implementation, causal, seq):
    arrays = draw(key, seq)
    actual = value_and_grads(*arrays, window=WINDOW, causal=causal, implementation=any_implementation)
    check(actual, oracle(*arrays, in_window(WINDOW, causal)), arrays[2])


@pytest.mark.parametrize("window", [0, 1, 7, 64, 100])
def test_any_window(key, any_implementation, window):
    arrays = draw(key, 150, **SMALL)
    actual = value_and_grads(*arrays, window=window, implementation=any_implementation)
    check(actual, oracle(*arrays, in_window(window)), arrays[2])


def test_heads_in_several_sets(key, implementation):
    """The kernels take two heads at a time of these."""
    arrays = draw(key, 70, batch=(1,), heads=4, kv_heads=4, head_dim=8, value_dim=8)
    actual = value_and_grads(*arrays, window=40, implementation=implementation)
    check(actual, oracle(*arrays, in_window(40)), arrays[2])


def test_bfloat16(key, implementation):
    arrays = draw(key, 3 * BLOCK + 5, dtype=jnp.bfloat16)
    output, grads = value_and_grads(*arrays, window=WINDOW, implementation=implementation)
    assert {output.dtype, *(grad.dtype for grad in grads)} == {jnp.dtype(jnp.bfloat16)}
    check((output, grads), oracle(*arrays, in_window(WINDOW)), arrays[2], 2e-2, 2e-2)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_equal_values_come_back(key, implementation, dtype):
    queries, keys, values, _ = draw(key, 90, dtype=dtype)
    output = window_attention(queries, keys, jnp.full_like(values, 1.75), window=WINDOW, implementation=implementation)
    np.testing.assert_allclose(output.astype(jnp.float32), 1.75, rtol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_soft_cap(key, implementation, causal):
    arrays = draw(key, 70, **SMALL)
    actual = value_and_grads(*arrays, window=WINDOW, causal=causal, soft_cap=1.5, implementation=implementation)
    check(actual, oracle(*arrays, in_window(WINDOW, causal), soft_cap=1.5), arrays[2])


def test_scale_multiplies_the_logits(key):
    queries, keys, values, _ = draw(key, 70, **SMALL)
    scaled = window_attention(queries, keys, values, window=WINDOW, scale=1.5)
    np.testing.assert_allclose(scaled, window_attention(3 * queries, keys, values, window=WINDOW), rtol=0, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 3, 50])
def test_counts_window_past_keys_and_itself(key, implementation, causal, window):
    seq = 200
    queries, keys, _, _ = draw(key, seq, **SMALL)
    values = jnp.broadcast_to(jnp.eye(seq), (2, 1, seq, seq))
    seen = window_attention(queries, keys, values, window=window, causal=causal, implementation=implementation) > 0
    t, s = np.indices((seq, seq))
    np.testing.assert_array_equal(
        seen, np.broadcast_to((-window * (not causal) <= t - s) & (t - s <= window), seen.shape)
    )
    assert int(seen[0, 0, window].sum()) == (window + 1 if causal else 2 * window + 1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [299, 300, 10**9])
def test_window_beyond_sequence_is_full_attention(key, compiled_implementation, causal, window):
    queries, keys, values, _ = draw(key, 300, heads=4, kv_heads=2, value_dim=16)
    output = window_attention(
        queries, keys, values, window=window, causal=causal, implementation=compiled_implementation
    )
    swapped = (jnp.swapaxes(x, -2, -3) for x in (queries, keys, values))
    full = jnp.swapaxes(jax.nn.dot_product_attention(*swapped, is_causal=causal), -2, -3)
    np.testing.assert_allclose(output, full, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("causal", [True, False])
def test_packed_equals_separate(key, compiled_implementation, causal):
    # The id 3 comes back: still another document.
    lengths, ids = [1, 33, 62, 45, 9], [3, 5, 3, 4, 5]
    arrays = draw(key, sum(lengths), **SMALL)
    segment_ids = jnp.asarray(np.repeat(ids, lengths))
    settings = {"window": WINDOW, "causal": causal, "implementation": compiled_implementation}
    output, grads = value_and_grads(*arrays, segment_ids=segment_ids, **settings)
    pieces = [np.split(x, np.cumsum(lengths)[:-1], axis=-2) for x in arrays]
    separate = [value_and_grads(*map(jnp.asarray, piece), **settings) for piece in zip(*pieces, strict=True)]
    for whole, *parts in zip((output, *grads), *((output, *grads) for output, grads in separate), strict=True):
        atol = 1e-6 * np.max(np.abs(whole))
        np.testing.assert_allclose(whole, np.concatenate(parts, axis=-2), rtol=0, atol=atol)


@pytest.mark.parametrize("causal", [True, False])
def test_documents_do_not_touch(key, any_implementation, causal):
    arrays = draw(key, 130, **SMALL)
    mine = np.arange(130)[:, None] // 30 == 2
    others_changed = [jnp.where(jnp.expand_dims(mine, (0, 1)), x, 100 * x) for x in arrays]
    settings = {"window": WINDOW, "causal": causal, "implementation": any_implementation}
    run = partial(value_and_grads, segment_ids=jnp.arange(130) // 30, **settings)
    for before, after in zip(jax.tree.leaves(run(*arrays)), jax.tree.leaves(run(*others_changed)), strict=True):
        np.testing.assert_array_equal(before[..., mine[:, 0], :], after[..., mine[:, 0], :])


def test_segment_ids_of_each_row(key):
    queries, keys, values, _ = draw(key, 90, **(SMALL | {"batch": (3, 2)}))
    segment_ids = jnp.sort(jax.random.randint(key, (3, 2, 90), 0, 4), axis=-1)
    attend = partial(window_attention, window=WINDOW)
    output = attend(queries, keys, values, segment_ids=segment_ids)
    for row in np.ndindex(3, 2):
        expected = attend(queries[row], keys[row], values[row], segment_ids=segment_ids[row])
        np.testing.assert_allclose(output[row], expected, rtol=1e-6, atol=1e-6)
    shared = attend(queries, keys, values, segment_ids=segment_ids[:1, :1])
    np.testing.assert_array_equal(shared, attend(queries, keys, values, segment_ids=segment_ids[0, 0]))
    np.testing.assert_allclose(shared[0, 0], output[0, 0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("split", [1, 20, WINDOW, WINDOW + 1, 100, 129])
def test_pieces_equal_whole(key, compiled_implementation, split):
    queries, keys, values, cotangent = draw(key, 130, **SMALL)
    settings = {"window": WINDOW, "implementation": compiled_implementation}

    @jax.jit
    def in_pieces(queries, keys, values):
        past = min(WINDOW, split)
        first = (x[..., :split, :] for x in (queries, keys, values))
        second = (queries[..., split:, :], keys[..., split - past :, :], values[..., split - past :, :])
        pieces = [window_attention(*first, **settings), window_attention(*second, past=past, **settings)]
        return jnp.concatenate(pieces, axis=-2)

    output, pullback = jax.vjp(in_pieces, queries, keys, values)
    check((output, pullback(cotangent)), value_and_grads(queries, keys, values, cotangent, **settings), values)


@pytest.mark.parametrize(("seq", "past"), [(1, 5), (1, WINDOW), (1, 90), (3, 10), (100, 7), (100, WINDOW), (100, 70)])
def test_past_and_key_mask(key, any_implementation, seq, past):
    arrays = draw(key, seq, past, **SMALL)
    key_mask = jax.random.bernoulli(key, 0.6, (2, past + seq)).at[0].set(jnp.arange(past + seq) >= past)
    sees = in_window(WINDOW, past=past)
    actual = value_and_grads(*arrays, window=WINDOW, past=past, key_mask=key_mask, implementation=any_implementation)
    mask = np.asarray(key_mask)
    check(actual, oracle(*arrays, lambda row, t, s: sees(row, t, s) and mask[(*row, s)]), arrays[2])


@pytest.mark.parametrize("causal", [True, False])
def test_key_mask_with_segments(key, implementation, causal):
    arrays = draw(key, 130, **SMALL)
    mask = np.asarray(jax.random.bernoulli(key, 0.7, (130,)))
    ids = np.repeat([0, 1], [50, 80])
    settings = {"window": WINDOW, "causal": causal, "implementation": implementation}
    actual = value_and_grads(*arrays, segment_ids=jnp.asarray(ids), key_mask=jnp.asarray(mask), **settings)
    sees = in_window(WINDOW, causal)
    check(actual, oracle(*arrays, lambda row, t, s: sees(row, t, s) and mask[s] and ids[t] == ids[s]), arrays[2])


def test_query_without_keys_gives_zero(key, implementation):
    arrays = draw(key, 100, **SMALL)
    # The first row has no key at all, in the second the sequence begins with padding.
    key_mask = jnp.stack([jnp.zeros(100, bool), jnp.arange(100) >= 60])
    output, grads = value_and_grads(*arrays, window=WINDOW, key_mask=key_mask, implementation=implementation)
    assert not jnp.any(output[0])
    assert not jnp.any(output[1, :, :60])
    assert jnp.all(jnp.any(output[1, :, 60:] != 0, axis=-1))
    for grad in grads:
        assert not jnp.any(grad[0])
        assert not jnp.any(grad[1, :, :60])
        assert jnp.all(jnp.isfinite(grad))


@pytest.mark.parametrize("soft_cap", [None, 50.0])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_wild_inputs_stay_finite(key, any_implementation, soft_cap, dtype):
    arrays = draw(key, 130, **SMALL, dtype=dtype)
    wild = [1e4 * jnp.sign(x) for x in arrays[:2]]
    key_mask = jnp.arange(130) >= 50
    settings = {"window": WINDOW, "key_mask": key_mask, "soft_cap": soft_cap, "implementation": any_implementation}
    output, grads = value_and_grads(*wild, *arrays[2:], **settings)
    for array in (output, *grads):
        assert jnp.all(jnp.isfinite(array))
    assert jnp.max(jnp.abs(output)) <= jnp.max(jnp.abs(arrays[2]))


def test_equal_peaks_share(key, implementation):
    """Beside logits of 1e8, the logarithm of how many there are would be lost."""
    queries, keys, values, cotangent = draw(key, 53, 21, **SMALL)
    arrays = 1e4 * jnp.sign(queries), 1e4 * jnp.sign(keys), values, cotangent
    actual = value_and_grads(*arrays, window=WINDOW, past=21, implementation=implementation)
    check(actual, oracle(*arrays, in_window(WINDOW, past=21)), values)


def shapes_in(jaxpr):
    """Shapes of all that a computation makes, its loops and calls included."""
    for equation in jaxpr.eqns:
        yield from (variable.aval.shape for variable in equation.outvars if hasattr(variable.aval, "shape"))
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from shapes_in(inner)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [64, 4096])
def test_no_array_is_quadratic(causal, window):
    seq = 4096
    arrays = [jax.ShapeDtypeStruct((1, seq, 8), jnp.float32)] * 4

    def shapes(implementation):
        run = partial(value_and_grads, window=window, causal=causal, implementation=implementation)
        return list(shapes_in(jax.make_jaxpr(run)(*arrays).jaxpr))

    assert max(map(np.prod, shapes("reference"))) == seq * seq
    found = shapes("chunked")
    # At least the keys of two steps were looked at, so the walk went inside.
    assert len(found) > 100
    assert max(map(np.prod, found)) <= 65 * seq


@pytest.mark.parametrize("window", [128, 8192])
def test_backward_pass_keeps_no_logits(window):
    arrays = [jax.ShapeDtypeStruct((1, 8192, 8), jnp.float32)] * 4
    compiled = jax.jit(partial(value_and_grads, window=window)).lower(*arrays).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 8192 * 8192 / 10


def test_decoding_takes_no_loop_and_no_padding():
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 1, 16), (2, 129, 16), (2, 129, 16))]
    jaxpr = jax.make_jaxpr(partial(window_attention, window=128, past=128))(*arrays)
    assert "scan" not in str(jaxpr)
    assert max(map(np.prod, shapes_in(jaxpr.jaxpr))) <= 2 * 129 * 16


@pytest.mark.parametrize("past", [0, 5])
def test_no_tokens(key, implementation, past):
    arrays = draw(key, 0, past)
    output, grads = value_and_grads(*arrays, window=WINDOW, past=past, implementation=implementation)
    assert output.shape == arrays[3].shape
    assert [grad.shape for grad in grads] == [x.shape for x in arrays[:3]]


def test_vmap_equals_batch(key, any_implementation):
    arrays = draw(key, 130, **(SMALL | {"batch": (3,)}))
    segment_ids = jnp.sort(jax.random.randint(key, (3, 130), 0, 4), axis=-1)

    def run(*arrays_and_ids):
        *arrays, segment_ids = arrays_and_ids
        return value_and_grads(*arrays, window=WINDOW, segment_ids=segment_ids, implementation=any_implementation)

    batched, mapped = run(*arrays, segment_ids), jax.vmap(run)(*arrays, segment_ids)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), batched, mapped)


def test_sharded_batch(key, compiled_implementation):
    arrays = draw(key, 130, **(SMALL | {"batch": (8,)}))
    segment_ids = jnp.sort(jax.random.randint(key, (8, 130), 0, 4), axis=-1)
    mesh, spec = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,)), PartitionSpec("data")

    for ids in ((), (segment_ids,)):

        def run(queries, keys, values, cotangent, segment_ids=None):
            settings = {"window": WINDOW, "segment_ids": segment_ids, "implementation": compiled_implementation}
            return value_and_grads(queries, keys, values, cotangent, **settings)

        sharded = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec))(*arrays, *ids)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), sharded, run(*arrays, *ids))


def test_kernels_inside_shard_map(key, monkeypatch):
    # The kernels' types, which the plain interpreter does not know, are what is new here: keys of all devices are one.
    queries, keys, values, cotangent = draw(key, 40, **(SMALL | {"batch": (2,)}))
    mesh, spec = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,)), PartitionSpec("data")
    prepare("pallas, TPU", monkeypatch, pltpu.InterpretParams())

    def run(implementation):
        def gradients(queries, keys, values, cotangent):
            attend = partial(window_attention, window=20, implementation=implementation)
            output, pullback = jax.vjp(attend, queries, keys, values)
            return output, *pullback(cotangent)

        specs = {"in_specs": (spec, PartitionSpec(), spec, spec), "out_specs": (spec, spec, PartitionSpec(), spec)}
        return jax.jit(jax.shard_map(gradients, mesh=mesh, **specs))(queries, keys[:1], values, cotangent)

    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), run("pallas"), run("chunked"))


def test_chosen_implementation_is_chunked_on_cpu(key):
    # Long enough for a choice, which differs from `chunked` in what is kept for the backward pass.
    arrays = draw(key, 300, **SMALL)
    segment_ids = jnp.arange(300) // 70
    run = partial(value_and_grads, *arrays, window=WINDOW, segment_ids=segment_ids)
    jax.tree.map(np.testing.assert_array_equal, run(implementation=None), run(implementation="chunked"))


def test_kernels_do_not_run_on_cpu(key):
    queries, keys, values, _ = draw(key, 6)
    with pytest.raises(ValueError, match="Only interpret mode is supported on CPU"):
        window_attention(queries, keys, values, window=4, implementation="pallas")


@pytest.mark.parametrize(
    ("dtype", "window", "message"),
    [
        (jnp.float16, 4, "must be float32 or bfloat16, got float16, float16, float16"),
        (jnp.float32, 20_000, "must fit on the chip, got window=20000, head_dim=16, value_dim=12 and 4 query heads"),
    ],
)
def test_kernels_say_what_they_cannot_do(dtype, window, message):
    arrays = [jax.ShapeDtypeStruct((heads, 30_000, dim), dtype) for heads, dim in ((8, 16), (2, 16), (2, 12))]
    run = lambda implementation: partial(window_attention, window=window, implementation=implementation)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(run("pallas"), *arrays)
    # Left to choose, the op does it all the same.
    assert jax.eval_shape(run(None), *arrays).shape == (8, 30_000, 12)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"window": -1}, ValueError, "`window` must not be negative, got window=-1"),
        ({"window": True}, TypeError, "`window` must be an int, got window=True"),
        ({"past": -1}, ValueError, "`past` must not be negative"),
        ({"past": 2, "causal": False}, ValueError, "`past` must be 0 with causal=False, got past=2"),
        ({"past": 2}, ValueError, "must have past \\+ seq positions, got source=6, past=2, seq=6"),
        ({"soft_cap": 0.0}, ValueError, "`soft_cap` must be positive, got soft_cap=0.0"),
        ({"implementation": "scan"}, ValueError, "must be None or one of 'reference', 'chunked', 'pallas', got 'scan'"),
    ],
)
def test_bad_settings(key, settings, error, message):
    queries, keys, values, _ = draw(key, 6)
    with pytest.raises(error, match=message):
        window_attention(queries, keys, values, **({"window": 4} | settings))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"queries": jnp.zeros((2, 8, 6, 16), jnp.int32)}, TypeError, "must be floating, .* got queries int32"),
        ({"queries": jnp.zeros((2, 8, 6, 16), jnp.bfloat16)}, TypeError, "the first two alike, got queries bfloat16"),
        ({"queries": jnp.zeros((6, 16))}, ValueError, "must have the axes"),
        ({"values": jnp.zeros((2, 2, 5, 16))}, ValueError, "must have the axes"),
        ({"queries": jnp.zeros((3, 8, 6, 16))}, ValueError, "same batch axes and head_dim"),
        ({"queries": jnp.zeros((2, 8, 6, 8))}, ValueError, "same batch axes and head_dim"),
        ({"queries": jnp.zeros((2, 7, 6, 16))}, ValueError, "must divide .* got kv_heads=2, heads=7"),
        ({"queries": jnp.zeros((2, 8, 4, 16))}, ValueError, "got source=6, past=0, seq=4"),
        (
            {"queries": jnp.zeros((2, 8, 4, 16)), "past": 2, "segment_ids": jnp.zeros(4, int)},
            ValueError,
            "`segment_ids` must be None with past > 0",
        ),
        ({"segment_ids": jnp.zeros(5, int)}, ValueError, "`segment_ids` must broadcast to"),
        ({"segment_ids": jnp.zeros((3, 6), int)}, ValueError, "`segment_ids` must broadcast to"),
        ({"segment_ids": jnp.zeros((1, 2, 6), int)}, ValueError, "`segment_ids` must broadcast to"),
        ({"key_mask": jnp.ones((2, 1), bool)}, ValueError, "`key_mask` must broadcast to"),
    ],
)
def test_bad_arrays(changes, error, message):
    arrays = {
        "queries": jnp.zeros((2, 8, 6, 16)),
        "keys": jnp.zeros((2, 2, 6, 16)),
        "values": jnp.zeros((2, 2, 6, 12)),
        "segment_ids": None,
        "key_mask": None,
        "past": 0,
    }
    with pytest.raises(error, match=message):
        check_arrays(**(arrays | changes))
