"""Every implementation of causal Latte against the float64 oracle, and the properties that the op promises."""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, PartitionSpec

from latte_eqx.ops import (
    LatteState,
    latte_bidirectional,
    latte_causal,
    linear_attention,
    linear_attention_bidirectional,
)
from latte_eqx.ops.dispatch import Passes
from latte_eqx.ops.latte import causal, chunked, pallas_gpu, pallas_tpu, passes
from tests.ops import latte_oracle as oracle

BLOCK, CHUNK = passes.BLOCK, passes.CHUNK
LATENTS, DIM = 4, 5
PLAIN = ["reference", "scan", "chunked"]
KERNELS = {"tpu kernel": pallas_tpu, "gpu kernel": pallas_gpu}
# What takes long to interpret.
SLOW_KERNELS = [pytest.param(name, marks=pytest.mark.slow) for name in KERNELS]
KEYS = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "wide": lambda rng, shape: 60 * rng.normal(size=shape),
    "jumps": lambda rng, shape: rng.normal(size=shape) + 1e4 * rng.choice([-1, 0, 1], size=shape, p=[0.1, 0.8, 0.1]),
    "rising": lambda rng, shape: 7.0 * np.arange(shape[-2])[:, None] + rng.normal(size=shape),
    "falling": lambda rng, shape: -7.0 * np.arange(shape[-2])[:, None] + rng.normal(size=shape),
    "equal": lambda rng, shape: np.full(shape, 3.0),
    "padded": lambda rng, shape: np.where(_is_padded(shape[-2])[:, None], -np.inf, rng.normal(size=shape)),
    "all padded": lambda rng, shape: np.full(shape, -np.inf),
}


def _is_padded(seq):
    """A padded prefix, and padding inside."""
    position = np.arange(seq)
    return (position < seq // 3) | (position % 7 == 3)


def _inputs(kind, seq, batch=(2,), seed=0):
    rng = np.random.default_rng(seed)
    weights = rng.random((*batch, seq, LATENTS))
    weights /= 1.25 * weights.sum(-1, keepdims=True)
    arrays = weights, KEYS[kind](rng, (*batch, seq, LATENTS)), rng.normal(size=(*batch, seq, DIM))
    return tuple(jnp.asarray(x, jnp.float32) for x in arrays)


def _start(batch=(2,), seed=1):
    rng = np.random.default_rng(seed)
    shape = (*batch, LATENTS)
    arrays = rng.normal(size=(*shape, DIM)), rng.normal(size=shape), rng.uniform(1, 9, size=shape)
    return LatteState(*(jnp.asarray(x, jnp.float32) for x in arrays))


def _segments(seq, batch=(2,)):
    """Documents of one token, of three, of a block, of a chunk; another cut for each row."""
    cuts = np.array([0, 1, 4, 5, 5 + BLOCK, 5 + BLOCK + CHUNK, 2 * CHUNK, 2 * CHUNK + 1])
    rows = [np.searchsorted(cuts + row, np.arange(seq), side="right") for row in range(int(np.prod(batch)))]
    return jnp.asarray(np.stack(rows).reshape(*batch, seq), jnp.int32)


def _cotangents(seq, batch=(2,), seed=2):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=(*batch, *shape)), jnp.float32)
    return draw(seq, DIM), LatteState(draw(LATENTS, DIM), jnp.zeros((*batch, LATENTS)), draw(LATENTS))


@pytest.fixture(params=[*PLAIN, "chunked in groups", *KERNELS])
def implementation(request, monkeypatch):
    """The name of an implementation; the kernels of one platform stand in for `"pallas"`, interpreted."""
    if request.param in PLAIN:
        return request.param
    if request.param not in KERNELS:
        # From 257 tokens on: each of two rows is a group, and steps take two or three chunks.
        monkeypatch.setattr(chunked, "GROUPS", 2)
        monkeypatch.setattr(chunked, "CACHED_TOKENS", 1200)
        return "chunked"
    interpreted = partial(passes.latte_causal, passes=_interpreted(KERNELS[request.param]), shortest=BLOCK)
    monkeypatch.setitem(causal.IMPLEMENTATIONS, "pallas", interpreted)
    return "pallas"


def _interpreted(kernels, how=True):
    return Passes(partial(kernels.forward, interpret=how), partial(kernels.backward, interpret=how))


def _runner(implementation, has_segments):
    """Compiled values and cotangents of one implementation."""

    def run(arrays, segment_ids, start, cotangents):
        op = lambda arrays, start: latte_causal(
            *arrays, segment_ids=segment_ids if has_segments else None, state=start, implementation=implementation
        )
        outputs, pull_back = jax.vjp(op, arrays, start)
        return outputs, pull_back(cotangents)

    return jax.jit(run)


def _check_against_oracle(run, arrays, segment_ids, start, cotangents, value_error, gradient_error):
    dy, dlast = cotangents
    (y, last), (darrays, dstart) = run(arrays, segment_ids, start, cotangents)
    for row in range(arrays[0].shape[0]):
        inputs = [np.asarray(x[row], np.float64) for x in arrays]
        begins = np.diff(segment_ids[row], prepend=segment_ids[row, 0]) != 0
        state = oracle.Start(*(np.asarray(x[row], np.float64) for x in (start.average, start.peak, start.mass)))
        scale = max(np.abs(inputs[2]).max(), np.abs(state.average).max())
        want_y, averages, peaks, masses = oracle.forward(*inputs, begins, state)
        np.testing.assert_allclose(y[row], want_y, rtol=0, atol=value_error * scale)
        np.testing.assert_allclose(last.average[row], averages[-1], rtol=0, atol=value_error * scale)
        np.testing.assert_allclose(last.mass[row], masses[-1], rtol=1e-5)
        seen = masses[-1] > 0
        np.testing.assert_array_equal(last.peak[row][seen], peaks[-1].astype(np.float32)[seen])

        want = oracle.backward(*inputs, begins, state, dy[row], dlast.average[row], dlast.mass[row])
        # The peak of an empty start is arbitrary, and with it the unit of its mass.
        has_start = state.mass > 0
        got = [x[row] for x in (*darrays, dstart.average)] + [np.where(has_start, dstart.mass[row], 0)]
        assert np.isfinite(dstart.mass).all()
        largest = max(np.abs(x).max() for x in want)
        for name, g, w in zip(("weights", "keys", "values", "average", "mass"), got, want, strict=True):
            assert np.isfinite(g).all(), name
            np.testing.assert_allclose(g, w, rtol=0, atol=gradient_error * largest, err_msg=name)


@pytest.mark.parametrize("has_segments", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("seq", [1, BLOCK - 1, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3])
def test_parity(implementation, seq, has_segments):
    """Values and every cotangent, all kinds of keys, from the empty state and from a given one."""
    if implementation == "pallas" and seq not in (BLOCK + 1, 2 * CHUNK + 3):
        pytest.skip("slow to interpret")
    run = _runner(implementation, has_segments)
    segment_ids = _segments(seq) if has_segments else jnp.zeros((2, seq), jnp.int32)
    empty = LatteState.empty(2, latents=LATENTS, dim=DIM)
    for kind in KEYS:
        for start in (empty, _start()):
            gradient_error = 2e-3 if kind == "jumps" else 2e-5
            arrays = _inputs(kind, seq)
            _check_against_oracle(run, arrays, segment_ids, start, _cotangents(seq), 5e-6, gradient_error)


@pytest.mark.parametrize(("seq", "value_error"), [(1024, 5e-6), (4096, 2e-5)])
@pytest.mark.parametrize("implementation", ["scan", "chunked", *SLOW_KERNELS], indirect=True)
def test_long_sequences(implementation, seq, value_error):
    run = jax.jit(partial(latte_causal, implementation=implementation))
    for kind in KEYS:
        arrays = _inputs(kind, seq, batch=())
        y, _ = run(*arrays)
        some = np.arange(0, seq, 37)
        want, *_ = oracle.forward(*arrays, np.zeros(seq, bool), oracle.empty_start(LATENTS, DIM), some)
        error = value_error * np.abs(arrays[2]).max()
        np.testing.assert_allclose(y[some], want[some], rtol=0, atol=error, err_msg=kind)


@pytest.mark.parametrize("implementation", ["scan", "chunked", *SLOW_KERNELS], indirect=True)
def test_long_gradients(implementation):
    seq = 1024
    run = _runner(implementation, False)
    segment_ids, empty = jnp.zeros((1, seq), jnp.int32), LatteState.empty(1, latents=LATENTS, dim=DIM)
    for kind in ("normal", "wide", "jumps"):
        arrays = _inputs(kind, seq, batch=(1,))
        _check_against_oracle(run, arrays, segment_ids, empty, _cotangents(seq, batch=(1,)), 5e-6, 2e-3)


def test_bfloat16_inputs(implementation):
    """The sums are float32: only the inputs and the output are rounded."""
    seq = 2 * CHUNK + 3
    run = jax.jit(partial(latte_causal, implementation=implementation))
    gradient = jax.jit(jax.grad(lambda *x: run(*x)[0].astype(jnp.float32).sum(), (0, 1, 2)))
    for kind in KEYS:
        arrays = tuple(x.astype(jnp.bfloat16) for x in _inputs(kind, seq, batch=()))
        y, state = run(*arrays)
        assert y.dtype == jnp.bfloat16
        assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype(jnp.float32)}
        exact = [np.asarray(x.astype(jnp.float32)) for x in arrays]
        want, *_ = oracle.forward(*exact, np.zeros(seq, bool), oracle.empty_start(LATENTS, DIM))
        np.testing.assert_allclose(y.astype(jnp.float32), want, rtol=0, atol=2e-2, err_msg=kind)
        assert all(g.dtype == jnp.bfloat16 and np.isfinite(g.astype(jnp.float32)).all() for g in gradient(*arrays))


@pytest.mark.parametrize("implementation", PLAIN, indirect=True)
@pytest.mark.usefixtures("optimized")
def test_packed_equals_separate(implementation):
    """Up to rounding, for documents of 1, 2, chunk and chunk + 7 tokens, values and gradients."""
    lengths = [1, 2, CHUNK, CHUNK + 7]
    seq = sum(lengths)
    segment_ids = jnp.repeat(jnp.array([0, 3, 4, 9]), jnp.array(lengths), total_repeat_length=seq)
    arrays, (dy, _) = _inputs("wide", seq, batch=()), _cotangents(seq, batch=())

    def run(arrays, dy, segment_ids=None):
        op = lambda *arrays: latte_causal(*arrays, segment_ids=segment_ids, implementation=implementation)[0]
        y, pull_back = jax.vjp(op, *arrays)
        return y, *pull_back(dy)

    packed = jax.jit(run)(arrays, dy, segment_ids)
    # A gradient is a difference of sums that may be as large as any of them.
    largest = max(np.abs(x).max() for x in packed)
    edges = np.cumsum([0, *lengths])
    for first, end in pairwise(edges):
        alone = jax.jit(run)(tuple(x[first:end] for x in arrays), dy[first:end])
        for got, want in zip(packed, alone, strict=True):
            np.testing.assert_allclose(got[first:end], want, rtol=0, atol=1e-6 * largest)


@pytest.mark.parametrize("split", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 20])
def test_pieces_equal_whole(implementation, split):
    """The state carries values and gradients from piece to piece."""
    if implementation == "pallas" and split != CHUNK:
        pytest.skip("slow to interpret")
    arrays, cotangents = _inputs("normal", CHUNK + 20), _cotangents(CHUNK + 20)
    op = partial(latte_causal, implementation=implementation)

    def pieces(*arrays):
        first, state = op(*(x[:, :split] for x in arrays))
        second, state = op(*(x[:, split:] for x in arrays), state=state)
        return jnp.concatenate([first, second], axis=1), state

    whole_outputs, whole_gradients = jax.jit(lambda: _vjp(op, arrays, cotangents))()
    piece_outputs, piece_gradients = jax.jit(lambda: _vjp(pieces, arrays, cotangents))()
    for got, want in zip(jax.tree.leaves(piece_outputs), jax.tree.leaves(whole_outputs), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)
    for got, want in zip(piece_gradients, whole_gradients, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def _vjp(function, arguments, cotangents):
    outputs, pull_back = jax.vjp(function, *arguments)
    return outputs, pull_back(cotangents)


def test_start_peak_has_its_own_derivative(implementation):
    """Raising the start's peak by a small number is the same as multiplying its mass by one plus that number."""
    arrays, start = _inputs("normal", 9), _start()
    loss = lambda state: latte_causal(*arrays, state=state, implementation=implementation)[0].sum()
    gradient = jax.jit(jax.grad(loss))(start)
    np.testing.assert_allclose(gradient.peak, gradient.mass * start.mass, rtol=1e-4, atol=1e-6)


def test_constant_values_come_back():
    weights, keys, values = _inputs("wide", 100)
    weights = weights / weights.sum(-1, keepdims=True)
    y, _ = jax.jit(latte_causal)(weights, keys, jnp.full_like(values, 2.5))
    np.testing.assert_allclose(y, 2.5, rtol=1e-6)


def test_empty_sequence_keeps_the_state():
    start = _start()
    arrays = _inputs("normal", 0)
    for implementation in causal.IMPLEMENTATIONS:
        y, state = latte_causal(*arrays, state=start, implementation=implementation)
        assert y.shape == (2, 0, DIM)
        jax.tree.map(np.testing.assert_array_equal, state, start)


@pytest.mark.parametrize("cached_rows", [5, 6])
def test_vmap_does_not_run_both_branches(monkeypatch, cached_rows):
    """A batch by `vmap` is the batch as a leading axis: the same values, and a true branch rather than a select."""
    monkeypatch.setattr(chunked, "CACHED_TOKENS", cached_rows * CHUNK)
    arrays = _inputs("jumps", CHUNK, batch=(3, 2))
    loss = lambda *arrays: (latte_causal(*arrays)[0] ** 2).sum()
    batched = lambda *arrays: jax.vmap(jax.grad(loss, (0, 1, 2)))(*arrays)
    got, want = jax.jit(batched)(*arrays), jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=1e-6 * np.abs(w).max())
    lowered = jax.jit(batched).lower(*arrays).as_text()
    # Two in each pass, and two in each that ask for the platform. With too many rows, two more of each ask once more.
    assert lowered.count("stablehlo.case") == (8 if cached_rows == 6 else 12)


def test_many_rows_are_each_as_alone(monkeypatch):
    """Rows read one after another, on two levels, with documents that some of them share."""
    batch, seq = (2, 3, 2), BLOCK + 3
    monkeypatch.setattr(chunked, "CACHED_TOKENS", 2 * 2 * BLOCK)
    arrays, (dy, _) = _inputs("wide", seq, batch=batch), _cotangents(seq, batch=batch)
    segment_ids = _segments(seq, batch=(2, 1, 1))

    def run(arrays, dy, segment_ids):
        y, pull_back = jax.vjp(lambda *arrays: latte_causal(*arrays, segment_ids=segment_ids)[0], *arrays)
        return y, *pull_back(dy)

    together = jax.jit(run)(arrays, dy, segment_ids)
    for row in np.ndindex(batch):
        alone = jax.jit(run)(tuple(x[row] for x in arrays), dy[row], segment_ids[row[0], 0, 0])
        for got, want in zip(together, alone, strict=True):
            np.testing.assert_allclose(got[row], want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", ["normal", "jumps"])
def test_cotangents_may_be_more_than_rows(kind):
    """The backward pass alone is mapped, as in a Jacobian: it finds the states of the forward pass all the same."""
    arrays = _inputs(kind, 4 * CHUNK, batch=(8,))
    cotangents = jnp.stack([_cotangents(4 * CHUNK, batch=(8,), seed=seed)[0] for seed in (2, 3)])

    @jax.jit
    def run(cotangents, *arrays):
        _, pull_back = jax.vjp(lambda *arrays: latte_causal(*arrays, implementation="chunked")[0], *arrays)
        return jax.vmap(pull_back)(cotangents), [pull_back(dy) for dy in cotangents]

    together, one_by_one = run(cotangents, *arrays)
    for got, *want in zip(together, *one_by_one, strict=True):
        np.testing.assert_allclose(got, jnp.stack(want), rtol=0, atol=1e-6 * np.abs(want).max())


@pytest.mark.parametrize("seq", [CHUNK, 2 * CHUNK, 3 * CHUNK])
def test_heads_in_groups_share_documents(seq):
    """As a CPU takes a whole layer: groups of heads and several chunks in a step, ids for all heads at once."""
    arrays, (dy, _) = _inputs("normal", seq, batch=(4, 4)), _cotangents(seq, batch=(4, 4))
    segment_ids = _segments(seq, batch=(4, 1))

    def run(arrays, dy, segment_ids, implementation):
        op = lambda *arrays: latte_causal(*arrays, segment_ids=segment_ids, implementation=implementation)[0]
        y, pull_back = jax.vjp(op, *arrays)
        return y, *pull_back(dy)

    run = jax.jit(run, static_argnums=3)
    for got, want in zip(run(arrays, dy, segment_ids, "chunked"), run(arrays, dy, segment_ids, "scan"), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_ordinary_keys_take_the_fast_branch(monkeypatch):
    """Falling back is for keys that rise by fifty and more inside a chunk, and only for their chunks."""
    calls = []
    read_tokens = chunked._read_tokens

    def counting(*arguments):
        jax.debug.callback(lambda: calls.append(1))
        return read_tokens(*arguments)

    monkeypatch.setattr(chunked, "_read_tokens", counting)
    jax.block_until_ready(jax.jit(lambda *x: latte_causal(*x)[0])(*_inputs("normal", 4 * CHUNK)))
    jax.effects_barrier()
    assert not calls
    weights, keys, values = _inputs("normal", 4 * CHUNK)
    keys = keys.at[:, CHUNK + 5 :].add(80.0)
    jax.block_until_ready(jax.jit(lambda *x: latte_causal(*x)[0])(weights, keys, values))
    jax.effects_barrier()
    assert len(calls) == 1


def test_ordinary_keys_are_not_asked_chunk_by_chunk(monkeypatch):
    """One glance at all keys is enough, be they padded anywhere, cut into documents, or after a state."""
    asked = []
    choose = chunked._Chunk.choose

    def counting(chunk, may_be_steep, *ways):
        if may_be_steep:
            jax.debug.callback(lambda: asked.append(1))
        return choose(chunk, may_be_steep, *ways)

    monkeypatch.setattr(chunked._Chunk, "choose", counting)
    seq = 2 * CHUNK
    weights, keys, values = _inputs("normal", seq)
    run = jax.jit(lambda keys, state: latte_causal(weights, keys, values, segment_ids=_segments(seq), state=state)[0])
    padded = keys.at[:, 7:90].set(-jnp.inf).at[:, -50:].set(-jnp.inf).at[:, 0].set(-jnp.inf)
    empty, after = LatteState.empty(2, latents=LATENTS, dim=DIM), latte_causal(weights, keys, values)[1]
    for ordinary, state in ((keys, empty), (padded, empty), (keys, after), (padded, after)):
        jax.block_until_ready(run(ordinary, state))
    jax.effects_barrier()
    assert not asked
    late = padded.at[:, 90:].add(-60.0)
    jax.block_until_ready(run(late, empty))
    jax.effects_barrier()
    assert len(asked) == 2


def test_residuals_are_chunk_boundaries_only():
    """Beyond its inputs, the forward pass keeps one state per chunk, the start state and the last one."""
    seq = 8 * CHUNK
    arrays = _inputs("normal", seq)
    _, pull_back = jax.vjp(lambda *x: latte_causal(*x)[0], *arrays)
    kept = sum(x.size for x in jax.tree.leaves(pull_back))
    inputs, state = sum(x.size for x in arrays), 2 * LATENTS * (DIM + 2)
    assert kept <= inputs + (seq // CHUNK + 2) * state + 8  # A few scalars.


def test_inside_shard_map_checkpoint_and_layer_scan():
    """As the trainer uses it: vmapped and checkpointed in a scan over layers, batch sharded over eight devices."""
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
    arrays = _inputs("normal", CHUNK + 6, batch=(8,))
    scales = jnp.array([1.0, 0.5, 2.0])

    def loss(scales, weights, keys, values):
        def layer(values, scale):
            y, _ = jax.vmap(latte_causal)(weights, scale * keys, values)
            return y, None

        y, _ = jax.lax.scan(jax.checkpoint(layer), values, scales)
        return (y**2).sum()

    gradient = jax.grad(loss, (0, 1, 2, 3))
    shard = PartitionSpec("data")
    sharded = jax.shard_map(
        gradient, mesh=mesh, in_specs=(PartitionSpec(), shard, shard, shard), out_specs=(PartitionSpec(), *[shard] * 3)
    )
    for got, want in zip(jax.jit(sharded)(scales, *arrays), jax.jit(gradient)(scales, *arrays), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("documents", [None, (2, 1), (2, 4), (1, 1)], ids=["one", "a row's", "a head's", "all's"])
def test_kernels_of_many_heads(kernels, documents):
    """Heads that share a tile and heads that do not: 4 heads of 64 latents are two tiles."""
    rng, seq = np.random.default_rng(0), 2 * BLOCK
    draw = lambda *shape: jnp.asarray(rng.normal(size=(2, 4, *shape)), jnp.float32)
    arrays = jax.nn.softmax(draw(seq, 64)), 30 * draw(seq, 64), draw(seq, 128)
    cotangents = draw(seq, 128), LatteState(draw(64, 128), jnp.zeros((2, 4, 64)), draw(64))
    segment_ids = None if documents is None else _segments(seq, documents)
    start = LatteState(draw(64, 128), draw(64), jnp.exp(draw(64)))

    def run(which, arrays, start, cotangents):
        op = partial(passes.latte_causal, passes=which)
        outputs, pull_back = jax.vjp(lambda arrays, start: op(*arrays, segment_ids, start), arrays, start)
        return outputs, pull_back(cotangents)

    got, want = (jax.jit(partial(run, x))(arrays, start, cotangents) for x in (_interpreted(kernels), chunked.PASSES))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=5e-6 * np.abs(w).max())


def test_kernels_inside_shard_map(monkeypatch):
    """Vmapped, the batch sharded over devices, and a state that is not; GPU kernels cannot be interpreted there."""
    monkeypatch.setattr(causal, "CHOSEN_PASSES", _interpreted(pallas_tpu, pltpu.InterpretParams()))
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    arrays, start = _inputs("wide", BLOCK + 6, batch=(4,)), jax.tree.map(lambda x: x[0], _start())

    def loss(start, *arrays):
        return (jax.vmap(lambda *arrays: latte_causal(*arrays, state=start)[0])(*arrays) ** 2).sum()

    gradient = jax.grad(loss, (0, 1, 2, 3))
    shard, whole = PartitionSpec("data"), PartitionSpec()
    sharded = jax.shard_map(gradient, mesh=mesh, in_specs=(whole, *[shard] * 3), out_specs=(whole, *[shard] * 3))
    got = jax.jit(sharded)(start, *arrays)
    monkeypatch.setattr(causal, "CHOSEN_PASSES", chunked.PASSES)
    want = jax.jit(gradient)(start, *arrays)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=1e-5 * np.abs(w).max())


def test_state_made_outside_shard_map_can_be_carried():
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
    arrays = _inputs("normal", 7, batch=(8,))
    op = lambda *arrays: latte_causal(*arrays, state=LatteState.empty(1, latents=LATENTS, dim=DIM))[0]
    sharded = jax.shard_map(op, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"))
    np.testing.assert_allclose(jax.jit(sharded)(*arrays), jax.jit(latte_causal)(*arrays)[0], atol=1e-6)


@pytest.mark.parametrize("kind", ["normal", "wide", "jumps", "equal", "padded", "all padded"])
def test_bidirectional_is_causal_at_the_last_token(kind):
    arrays = _inputs(kind, 50)
    want, _ = latte_causal(*arrays, implementation="reference")
    got = jax.jit(latte_bidirectional)(*arrays)
    np.testing.assert_allclose(got[:, -1], want[:, -1], atol=5e-6)
    gradients = jax.jit(jax.grad(lambda *x: latte_bidirectional(*x).sum(), (0, 1, 2)))(*arrays)
    assert all(np.isfinite(g).all() for g in gradients)


def test_bidirectional_mask_and_documents():
    """Masked positions change nothing for the others; packed documents are as they are alone, gradients included."""
    weights, keys, values = arrays = _inputs("wide", 30, batch=())
    alone = [jax.jit(latte_bidirectional)(*(x[part] for x in arrays)) for part in (np.s_[:1], np.s_[1:12], np.s_[12:])]
    segment_ids = jnp.repeat(jnp.array([2, 5, 6]), jnp.array([1, 11, 18]), total_repeat_length=30)
    packed = jax.jit(latte_bidirectional)(*arrays, segment_ids=segment_ids)
    np.testing.assert_allclose(packed, jnp.concatenate(alone), rtol=0, atol=5e-6)
    gradient = lambda **how: jax.jit(jax.grad(lambda *x: (latte_bidirectional(*x, **how)[12:] ** 2).sum(), (0, 1, 2)))
    own = jax.jit(jax.grad(lambda *x: (latte_bidirectional(*x) ** 2).sum(), (0, 1, 2)))(*(x[12:] for x in arrays))
    for how in ({"segment_ids": segment_ids}, {"mask": jnp.arange(30) >= 12}):
        for got, want in zip(gradient(**how)(weights, keys, values), own, strict=True):
            np.testing.assert_allclose(got[12:], want, rtol=0, atol=1e-5 * np.abs(want).max())
            np.testing.assert_array_equal(got[:12], 0)


@pytest.mark.parametrize("kind", ["normal", "jumps", "padded", "equal"])
def test_linear_attention_is_the_normalised_sum(kind):
    """Against the quotient of sums, in float64, packed and from a start state."""
    queries = 2 * _inputs("normal", 70, seed=5)[1]
    _, keys, values = _inputs(kind, 70)
    segment_ids = jnp.repeat(jnp.arange(3), jnp.array([1, 20, 49]), total_repeat_length=70)
    y, _ = jax.jit(linear_attention)(queries, keys, values, segment_ids=segment_ids)
    for row in range(2):
        for t in range(70):
            first = [0, 1, 21][int(segment_ids[t])]
            logits = np.asarray(queries[row, t][None], np.float64) + np.asarray(keys[row, first : t + 1], np.float64)
            logits -= max(logits.max(), -1e300)
            weights = np.exp(logits).sum(1)
            want = weights @ np.asarray(values[row, first : t + 1], np.float64) / max(weights.sum(), 1e-300)
            np.testing.assert_allclose(y[row, t], want, rtol=0, atol=5e-6 * np.abs(values).max(), err_msg=f"{t}")
    first, state = linear_attention(queries[:, :30], keys[:, :30], values[:, :30])
    second, _ = linear_attention(queries[:, 30:], keys[:, 30:], values[:, 30:], state=state)
    whole, _ = linear_attention(queries, keys, values)
    np.testing.assert_allclose(jnp.concatenate([first, second], axis=1), whole, atol=5e-6)
    gradients = jax.jit(jax.grad(lambda *x: linear_attention(*x)[0].sum(), (0, 1, 2)))(queries, keys, values)
    assert all(np.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize("kind", ["normal", "jumps", "padded", "equal"])
def test_bidirectional_linear_attention_is_the_normalised_sum(kind):
    """Against the quotient of sums, in float64, with a mask."""
    queries = 2 * _inputs("normal", 40, seed=5)[1]
    _, keys, values = _inputs(kind, 40)
    mask = jnp.arange(40) % 7 != 3
    y = jax.jit(linear_attention_bidirectional)(queries, keys, values, mask=mask)
    float64 = lambda x: np.asarray(x, np.float64)
    logits = float64(queries)[:, :, None] + float64(keys)[:, None, mask]
    weights = np.exp(logits - logits.max(axis=(2, 3), keepdims=True)).sum(axis=3)
    want = weights @ float64(values)[:, mask] / weights.sum(axis=2, keepdims=True)
    np.testing.assert_allclose(y, want, rtol=0, atol=5e-6 * np.abs(values).max())
    nothing = linear_attention_bidirectional(queries, keys, values, mask=jnp.zeros(40, bool))
    np.testing.assert_array_equal(nothing, 0)
    loss = lambda *x: linear_attention_bidirectional(*x, mask=mask).sum()
    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(queries, keys, values)
    assert all(np.isfinite(g).all() for g in gradients)
