"""The recurrence against a float64 loop, and the properties every implementation keeps."""

from functools import partial
from itertools import pairwise, product
from unittest import mock

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from latte_eqx.ops.dispatch import Passes
from latte_eqx.ops.linear_scan import IMPLEMENTATIONS, linear_scan, pallas_gpu, pallas_tpu
from latte_eqx.ops.linear_scan.chunked import CHUNK, linear_scan_chunked, linear_scan_in_passes
from tests.aot import lowering


def in_chunks(*args, **kwargs):
    """Cut the sequence at `CHUNK` as on an accelerator; compiled for a CPU, the public function does not cut."""
    with mock.patch.dict(IMPLEMENTATIONS, chunked=lambda *arrays: linear_scan_chunked(*arrays, CHUNK)):
        return linear_scan(*args, **kwargs, implementation="chunked")


# Kernels cut at `CHUNK`, too; and small groups are interpreted faster.
BLOCKS = {
    pallas_tpu: {"POSITIONS": CHUNK, "CHANNELS": 128},
    pallas_gpu: {"SHORTEST_PIECE": CHUNK, "POSITIONS": 2, "CHANNELS": 4},
}


def interpreted(kernels, *args, interpret=True, **kwargs):
    """Run kernels without their hardware."""

    def run_pass(run, *arrays, **settings):
        # The backward pass is traced long after the forward pass.
        with mock.patch.multiple(kernels, **BLOCKS[kernels]):
            return run(*arrays, **settings, interpret=interpret)

    passes = Passes(*(partial(run_pass, run) for run in (kernels.forward, kernels.backward)))
    with mock.patch.dict(IMPLEMENTATIONS, pallas=lambda *arrays: linear_scan_in_passes(*arrays, passes)):
        return linear_scan(*args, **kwargs, implementation="pallas")


TABLE = {
    **{name: partial(linear_scan, implementation=name) for name in IMPLEMENTATIONS if name != "pallas"},
    "in_chunks": in_chunks,
    "tpu_kernels": partial(interpreted, pallas_tpu),
    "gpu_kernels": partial(interpreted, pallas_gpu),
}
KERNELS = ("tpu_kernels", "gpu_kernels")
every_implementation = pytest.mark.parametrize("implementation", TABLE)


def every_implementation_with(argument, cases, of_kernels):
    """Kernels are slow to interpret: they run `of_kernels`, a part of the cases."""
    pairs = [(name, case) for name in TABLE for case in (of_kernels if name in KERNELS else cases)]
    return pytest.mark.parametrize(("implementation", argument), pairs, ids=lambda x: str(x).replace(" ", ""))


DECAYS = ("ordinary", "zero", "one", "mixture", "tiny")


def draw_log_decay(generator, kind, shape):
    ordinary = generator.uniform(0.02, 1.0, shape) * np.log(generator.uniform(0.9, 0.999, shape[-1]))
    dice = generator.uniform(size=shape)
    wide = np.where(dice < 0.6, -generator.exponential(1.0, shape), ordinary)
    return {
        "ordinary": ordinary,
        "zero": np.full(shape, -np.inf),
        "one": np.zeros(shape),
        "mixture": np.where(dice < 0.1, -np.inf, np.where(dice < 0.3, 0.0, wide)),
        "tiny": generator.uniform(-100.0, -20.0, shape),
    }[kind]


def draw(length, dtype=jnp.float32, dim=2, seed=0):
    """log_decay, inputs, state and the cotangents of both outputs; the batch axis runs over `DECAYS`."""
    generator = np.random.default_rng([seed, length])
    log_decay = np.stack([draw_log_decay(generator, kind, (length, dim)) for kind in DECAYS])
    inputs, h_cotangent = generator.normal(size=(2, len(DECAYS), length, dim))
    state, last_cotangent = jnp.asarray(generator.normal(size=(2, len(DECAYS), dim)), jnp.float32)
    log_decay, inputs, h_cotangent = (jnp.asarray(x, dtype) for x in (log_decay, inputs, h_cotangent))
    return log_decay, inputs, state, h_cotangent, last_cotangent


def oracle(log_decay, inputs, state, h_cotangent, last_cotangent):
    """h, its last value, and the gradients of log_decay, inputs and state: two loops in float64."""
    arrays = (log_decay, inputs, state, h_cotangent, last_cotangent)
    log_decay, inputs, state, h_cotangent, last_cotangent = (np.asarray(x).astype(np.float64) for x in arrays)
    decay, length = np.exp(log_decay), inputs.shape[-2]
    states = [state]
    for t in range(length):
        states.append(decay[..., t, :] * states[-1] + inputs[..., t, :])
    gradient = last_cotangent
    log_decay_grad, inputs_grad = np.zeros_like(inputs), np.zeros_like(inputs)
    for t in reversed(range(length)):
        gradient = gradient + h_cotangent[..., t, :]
        inputs_grad[..., t, :] = gradient
        log_decay_grad[..., t, :] = gradient * states[t] * decay[..., t, :]
        gradient = gradient * decay[..., t, :]
    return np.stack(states[1:], axis=-2), states[-1], log_decay_grad, inputs_grad, gradient


@partial(jax.jit, static_argnums=0)
def run(implementation, log_decay, inputs, state, h_cotangent, last_cotangent):
    """What `oracle` returns."""

    def function(log_decay, inputs, state):
        return TABLE[implementation](log_decay, inputs, state=state)

    outputs, pullback = jax.vjp(function, log_decay, inputs, state)
    return *outputs, *pullback((h_cotangent, last_cotangent))


def assert_near(actual, expected, tolerance, name=""):
    """Every error is at most `tolerance` times the largest value expected, for each entry of the batch by itself."""
    assert actual.shape == expected.shape, name
    actual, expected = (np.asarray(x).astype(np.float64).reshape(x.shape[0], -1) for x in (actual, expected))
    error, scale = np.abs(actual - expected).max(axis=-1), np.abs(expected).max(axis=-1)
    assert (error <= tolerance * scale).all(), f"{name}: errors {error} of {scale}"


def assert_all_near(actual, expected, tolerance=1e-5):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=tolerance, atol=tolerance)


@every_implementation_with(
    "setting",
    list(product([1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 131, 1024], ["float32", "bfloat16"], [True, False])),
    [*product([1, CHUNK - 1, CHUNK, CHUNK + 1, 131], ["float32"], [True]), (131, "bfloat16", False)],
)
def test_values_and_gradients(implementation, setting):
    length, dtype, with_state = setting
    dtype = jnp.dtype(dtype)
    log_decay, inputs, state, *cotangents = draw(length, dtype)
    expected = oracle(log_decay, inputs, state if with_state else jnp.zeros_like(state), *cotangents)
    actual = run(implementation, log_decay, inputs, state if with_state else None, *cotangents)
    names = ("h", "h_last", "log_decay", "inputs", "state")
    dtypes = (dtype, jnp.float32, dtype, dtype, jnp.float32)
    for name, x, y, expected_dtype in zip(names, actual, expected, dtypes, strict=True):
        if x is None:
            continue
        assert x.dtype == expected_dtype, name
        tolerance = 5e-6 if name.startswith("h") else 2e-5
        assert_near(x, y, 2e-2 if dtype == jnp.bfloat16 else tolerance, name)


@every_implementation
def test_float32_decay_of_bfloat16_inputs(implementation):
    """The sum is float32 and so is the kept h: only what is returned in bfloat16 is rounded."""
    log_decay, inputs, state, h_cotangent, last_cotangent = draw(CHUNK + 3)
    arrays = log_decay, inputs.astype(jnp.bfloat16), state, h_cotangent.astype(jnp.bfloat16), last_cotangent
    actual, expected = run(implementation, *arrays), oracle(*arrays)
    assert [x.dtype for x in actual] == [jnp.bfloat16, jnp.float32, jnp.float32, jnp.bfloat16, jnp.float32]
    for x, y in zip(actual, expected, strict=True):
        assert_near(x, y, 2**-8 if x.dtype == jnp.bfloat16 else 2e-5)


def test_state_of_another_dtype():
    log_decay, inputs, state, *cotangents = draw(5)
    _, last, *_, state_grad = run("chunked", log_decay, inputs, state.astype(jnp.bfloat16), *cotangents)
    assert last.dtype == jnp.float32
    assert state_grad.dtype == jnp.bfloat16


@every_implementation_with("split", [0, 1, CHUNK, CHUNK + 1, 130, 131], [CHUNK + 1])
def test_pieces_equal_the_whole(implementation, split):
    """The gradient, too, flows through the carried state. Empty pieces are pieces."""
    function = TABLE[implementation]

    def in_pieces(log_decay, inputs, state):
        first, state = function(log_decay[:, :split], inputs[:, :split], state=state)
        second, state = function(log_decay[:, split:], inputs[:, split:], state=state)
        return jnp.concatenate([first, second], axis=1), state

    *arrays, h_cotangent, last_cotangent = draw(131)
    outputs, pullback = jax.vjp(in_pieces, *arrays)
    actual = *outputs, *pullback((h_cotangent, last_cotangent))
    for x, y in zip(actual, run(implementation, *arrays, h_cotangent, last_cotangent), strict=True):
        assert_near(x, y, 5e-6)


@pytest.mark.parametrize("implementation", [name for name in TABLE if name not in KERNELS])
def test_resets_separate_documents(implementation):
    log_decay, inputs, state, h_cotangent, last_cotangent = draw(150)
    bounds = [0, 1, 40, CHUNK, 2 * CHUNK + 5, 150]
    log_decay = log_decay.at[:, jnp.array(bounds[1:-1])].set(-jnp.inf)
    packed = run(implementation, log_decay, inputs, state, h_cotangent, last_cotangent)

    alone = []
    for begin, end in pairwise(bounds):
        start = state if begin == 0 else jnp.zeros_like(state)
        seed = last_cotangent if end == bounds[-1] else jnp.zeros_like(last_cotangent)
        piece = slice(begin, end)
        alone.append(run(implementation, log_decay[:, piece], inputs[:, piece], start, h_cotangent[:, piece], seed))
    hs, lasts, *gradients, state_grads = zip(*alone, strict=True)
    h, *gradients = (np.concatenate(x, axis=1) for x in (hs, *gradients))
    for x, y in zip(packed, (h, lasts[-1], *gradients, state_grads[0]), strict=True):
        assert_near(x, y, 5e-6)
    np.testing.assert_array_equal(packed[2][:, jnp.array(bounds[1:-1])], 0.0)


@pytest.mark.parametrize("log_decay", [0.0, -1e-30, -1e4, -3e38, -np.inf])
@every_implementation
def test_no_nan(implementation, log_decay):
    arrays = draw(CHUNK + 2)
    alternating = jnp.where(jnp.arange(CHUNK + 2) % 3 == 0, log_decay, arrays[0][..., 0])[..., None]
    wild = jnp.broadcast_to(alternating, arrays[0].shape), 1e15 * arrays[1], *arrays[2:]
    assert all(jnp.isfinite(x).all() for x in run(implementation, *wild))


@every_implementation_with("mapped", ["all", "log_decay", "inputs", "state"], ["state"])
def test_vmap_equals_batch(implementation, mapped):
    names = ("log_decay", "inputs", "state", "h_cotangent", "last_cotangent")
    arrays = draw(CHUNK + 1)
    axes = [0 if mapped in ("all", name) else None for name in names]
    arguments = [x if axis == 0 else x[0] for x, axis in zip(arrays, axes, strict=True)]
    batch = [x if axis == 0 else jnp.broadcast_to(x[0], x.shape) for x, axis in zip(arrays, axes, strict=True)]
    assert_all_near(jax.vmap(partial(run, implementation), in_axes=axes)(*arguments), run(implementation, *batch))


@every_implementation_with("leading", [(), (5,), (1, 5, 1), (5, 1, 1, 1)], [(1, 5, 1)])
def test_any_leading_axes(implementation, leading):
    arrays = draw(CHUNK + 1) if leading else tuple(x[3] for x in draw(CHUNK + 1))
    reshaped = tuple(x.reshape(*leading, *x.shape[bool(leading) :]) for x in arrays)
    actual = run(implementation, *reshaped)
    assert actual[0].shape == reshaped[1].shape
    assert_all_near(tuple(x.reshape(y.shape) for x, y in zip(actual, oracle(*arrays), strict=True)), oracle(*arrays))


@pytest.mark.parametrize("implementation", [name for name in TABLE if name != "gpu_kernels"])
@pytest.mark.usefixtures("optimized")
def test_layers_scanned_and_rematerialised(implementation):
    """`vmap` of `grad` of a `lax.scan` over checkpointed layers, as models use it, against layers written out."""
    log_decay, inputs, state, *_ = draw(CHUNK + 1)
    scales = jnp.linspace(0.5, 1.5, 3)

    def layer(implementation, x, scale, log_decay, state):
        h, last = TABLE[implementation](log_decay, scale * x, state=state)
        return jnp.tanh(h), last

    def scanned(scales, log_decay, x, state):
        step = jax.checkpoint(lambda x, scale: layer(implementation, x, scale, log_decay, state))
        x, lasts = jax.lax.scan(step, x, scales)
        return jnp.sum(jnp.sin(x)) + jnp.sum(lasts)

    def written_out(scales, log_decay, x, state):
        total = 0.0
        for scale in scales:
            x, last = layer("scan", x, scale, log_decay, state)
            total += jnp.sum(last)
        return jnp.sum(jnp.sin(x)) + total

    actual, expected = (
        jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1, 2, 3)), in_axes=(None, 0, 0, 0)))(
            scales, log_decay, inputs, state
        )
        for loss in (scanned, written_out)
    )
    for x, y in zip(actual, expected, strict=True):
        assert_near(x, y, 5e-6)


@every_implementation_with("state_is_sharded", [True, False, None], [False])
def test_sharded_batch(implementation, state_is_sharded):
    """A replicated state serves every row, and its gradient is the sum over all devices."""
    function = TABLE[implementation]
    if implementation == "tpu_kernels":
        function = partial(function, interpret=pltpu.InterpretParams())
    if implementation == "gpu_kernels":
        # They cannot be interpreted here, but they are traced where the platform is not known yet.
        function = linear_scan
    log_decay, inputs, state, h_cotangent, last_cotangent = (
        jnp.concatenate([a, b[:3]]) for a, b in zip(draw(CHUNK + 1), draw(CHUNK + 1, seed=1), strict=True)
    )
    if state_is_sharded is False:
        state = state[0]

    def loss(arrays, cotangents):
        log_decay, inputs, state = arrays
        if state_is_sharded is False:
            h, last = jax.vmap(lambda a, x: function(a, x, state=state))(log_decay, inputs)
        else:
            h, last = function(log_decay, inputs, state=state)
        return jnp.sum(h * cotangents[0]) + jnp.sum(last * cotangents[1]), (h, last)

    def value_and_gradient(arrays, cotangents):
        (_, outputs), gradients = jax.value_and_grad(loss, has_aux=True)(arrays, cotangents)
        return outputs, gradients

    arrays = log_decay, inputs, None if state_is_sharded is None else state
    cotangents = h_cotangent, last_cotangent
    rows = PartitionSpec("data")
    specs = rows, rows, {True: rows, False: PartitionSpec(), None: None}[state_is_sharded]
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(value_and_gradient, mesh=mesh, in_specs=(specs, rows), out_specs=((rows, rows), specs))
    assert_all_near(jax.jit(sharded)(arrays, cotangents), jax.jit(value_and_gradient)(arrays, cotangents))


@pytest.mark.parametrize(("kernels", "dim"), [("tpu_kernels", 130), ("gpu_kernels", 6)])
def test_channels_in_several_blocks(kernels, dim):
    arrays = draw(CHUNK + 1, dim=dim)
    for x, y in zip(run(kernels, *arrays), oracle(*arrays), strict=True):
        assert_near(x, y, 2e-5)


@pytest.mark.parametrize("length", [1, 3])
def test_platform_chooses_the_kernels(length):
    """A single token is left to the compiler everywhere."""
    log_decay, inputs, *_ = draw(length)
    gradient = jax.grad(lambda *arrays: jnp.sum(linear_scan(*arrays)[0]), argnums=(0, 1))
    for platform, kernel in {"tpu": "tpu_custom_call", "cuda": "triton", "cpu": None}.items():
        with lowering(platform):
            text = jax.jit(gradient).trace(log_decay, inputs).lower(lowering_platforms=(platform,)).as_text()
        assert text.count("custom_call @") == (2 if kernel and length > 1 else 0)
        assert text.count(f"custom_call @{kernel}") + text.count(f"xla.gpu.{kernel}") == text.count("custom_call @")


def test_no_kernels_for_a_cpu():
    log_decay, inputs, *_ = draw(3)
    function = partial(linear_scan, implementation="pallas")
    for run in (function, jax.jit(function), jax.grad(lambda *arrays: jnp.sum(function(*arrays)[0]))):
        with pytest.raises(ValueError, match="Only interpret mode is supported on CPU"):
            run(log_decay, inputs)


def test_platform_chooses_the_chunks():
    """Compiled for an accelerator the sequence is cut, compiled for a CPU it is not."""
    log_decay, inputs, *_ = draw(3 * CHUNK)
    traced = jax.jit(partial(linear_scan, implementation="chunked")).trace(log_decay, inputs)
    cut = f"tensor<{len(DECAYS)}x3x{CHUNK}x2xf32>"
    assert cut in traced.lower(lowering_platforms=("tpu",)).as_text()
    assert cut in traced.lower(lowering_platforms=("cuda",)).as_text()
    assert cut not in traced.lower(lowering_platforms=("cpu",)).as_text()


@pytest.mark.parametrize("implementation", ["chunked", "in_chunks"])
def test_backward_pass_keeps_only_h(implementation):
    arrays = draw(16 * CHUNK, dim=32)
    memory = run.lower(implementation, *arrays).compile().memory_analysis()
    # Nothing as long as the sequence besides arguments and outputs, of which h is one.
    assert memory.temp_size_in_bytes < 0.5 * arrays[1].nbytes


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (
            {"log_decay": np.zeros((2, 4, 3), np.int32)},
            TypeError,
            "`log_decay` must have a floating-point dtype, got int32",
        ),
        ({"inputs": np.zeros((2, 4, 3), bool)}, TypeError, "`inputs` must have a floating-point dtype, got bool"),
        ({"state": np.zeros((2, 3), np.int32)}, TypeError, "`state` must have a floating-point dtype, got int32"),
        (
            {"log_decay": np.zeros((2, 5, 3))},
            ValueError,
            r"`log_decay` must have the shape \(2, 4, 3\), .*, got \(2, 5",
        ),
        ({"log_decay": np.zeros((4, 3))}, ValueError, r"`log_decay` must have the shape \(2, 4, 3\), .*, got \(4, 3\)"),
        (
            {"inputs": np.zeros(3), "log_decay": np.zeros(3)},
            ValueError,
            r"`inputs` must have the axes .*got shape \(3,",
        ),
        ({"state": np.zeros((2, 4, 3))}, ValueError, r"`state` must have the shape \(2, 3\), .*, got \(2, 4, 3\)"),
        ({"state": np.zeros(3)}, ValueError, r"`state` must have the shape \(2, 3\), .*, got \(3,\)"),
        (
            {"implementation": "magic"},
            ValueError,
            "must be None or one of 'reference', 'scan', 'chunked', 'pallas', got 'magic'",
        ),
    ],
)
def test_bad_arguments(changed, error, message):
    arguments = {"log_decay": np.zeros((2, 4, 3)), "inputs": np.zeros((2, 4, 3)), "state": np.zeros((2, 3))} | changed
    arguments = {k: x if isinstance(x, str) else jnp.asarray(x, jnp.result_type(x)) for k, x in arguments.items()}
    # Users run without the checker of annotations, which would speak first.
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(error, match=message):
            linear_scan(**arguments)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
