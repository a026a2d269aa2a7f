import gc
import json
import logging
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from train.checkpoint import (
    CheckpointMismatch,
    CheckpointNotWritten,
    Checkpoints,
    DamagedCheckpoint,
    NoIntactCheckpoint,
)
from train.digest import _digest_all, digest, parameter_hash

# A load that fails leaves reads behind, which find their event loop closed.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True, scope="module")
def _collect_abandoned_reads():
    """Find them here: later, they would be errors of whichever test runs then. Nor may a log keep what they raised."""
    log = logging.getLogger("asyncio")
    log.disabled = True
    yield
    gc.collect()
    log.disabled = False


class State(eqx.Module):
    model: eqx.nn.MLP
    optimizer: optax.OptState
    noise: jax.Array
    half: jax.Array
    mask: jax.Array
    key: jax.Array
    step: jax.Array


def make_state(seed: int = 0) -> State:
    key = jax.random.key(seed)
    model = eqx.filter(eqx.nn.MLP(8, 8, 32, 2, key=key), eqx.is_array)
    optimizer = optax.adamw(1e-3).init(model)
    # Bits that do not compress, so that one flipped on disk is one flipped in memory.
    noise = jax.random.bits(key, (64, 256), jnp.uint32)
    half = jnp.array([[1.5, -0.0, jnp.nan, jnp.inf]] * 4, jnp.bfloat16)
    return State(model, optimizer, noise, half, noise > 2**30, jax.random.split(key, 4), jnp.int32(seed))


def make_mesh(*shape: int) -> jax.sharding.Mesh:
    names = ("data", "fsdp")[: len(shape)]
    return jax.make_mesh(shape, names, (AxisType.Auto,) * len(shape), devices=jax.devices()[: np.prod(shape)])


def shardings(state, mesh):
    def sharding(leaf):
        axes = [name if size % mesh.shape[name] == 0 else None for name, size in zip(mesh.axis_names, leaf.shape)]  # noqa: B905
        return NamedSharding(mesh, PartitionSpec(*axes))

    return jax.tree.map(sharding, state)


def place(state, mesh):
    return jax.device_put(state, shardings(state, mesh))


def abstract(state, mesh):
    describe = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return jax.tree.map(describe, state, shardings(state, mesh))


def save_steps(directory, *steps, **options):
    checkpoints = Checkpoints(directory, every=1, **options)
    for step in steps:
        checkpoints.save(step, make_state(step), {"step": step})
    checkpoints.close()


def files(step: Path) -> list[Path]:
    return sorted(path for path in step.rglob("*") if path.is_file())


def largest(step: Path) -> Path:
    return max(files(step), key=lambda path: path.stat().st_size)


def truncate(path: Path):
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


# The digest.


@pytest.mark.parametrize("shape", [(1,), (2,), (8,), (2, 2), (2, 4)])
def test_digest_does_not_depend_on_sharding(shape):
    state = make_state()
    assert digest(place(state, make_mesh(*shape))) == digest(state)
    assert parameter_hash(place(state, make_mesh(*shape))) == parameter_hash(state)


@pytest.mark.parametrize("dtype", [np.float32, np.int32, jnp.bfloat16, np.float16, np.int8, np.bool_])
def test_digest_sees_every_single_bit(dtype):
    raw = np.random.default_rng(0).bytes(6 * np.dtype(dtype).itemsize)
    bits = np.frombuffer(raw, np.uint8) & (1 if dtype == np.bool_ else 255)
    seen = {parameter_hash(jnp.asarray(bits.view(dtype).reshape(2, 3)))}
    places = [(byte, bit) for byte in range(bits.size) for bit in range(1 if dtype == np.bool_ else 8)]
    for byte, bit in places:
        other = bits.copy()
        other[byte] ^= 1 << bit
        seen.add(parameter_hash(jnp.asarray(other.view(dtype).reshape(2, 3))))
    assert len(seen) == len(places) + 1


def test_digest_sees_swaps_pairs_of_signs_and_keys():
    values = jnp.array([1.0, -1.0, 2.0, 0.0, jnp.nan, 3.0])
    others = [
        values[jnp.array([1, 0, 2, 3, 4, 5])],
        values * jnp.array([1.0, 1.0, -1.0, 1.0, 1.0, -1.0]),
        values.reshape(2, 3),
        values.astype(jnp.bfloat16),
        values.view(jnp.int32),
        jax.random.key(0),
        jax.random.key(1),
        jax.random.key_data(jax.random.key(0)),
    ]
    assert len({parameter_hash(value) for value in [values, *others]}) == 9
    assert parameter_hash({"a": values}) != parameter_hash({"b": values})


def test_digest_compiles_once_and_gathers_nothing():
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **_: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    columns = NamedSharding(make_mesh(8), PartitionSpec(None, "data"))
    states = [{"a": jax.device_put(jnp.full((16, 48), value), columns)} for value in (1.0, 2.0, 3.0)]
    digest(states[0])
    compiled.clear()
    assert digest(states[1]) != digest(states[2])
    assert compiled == []
    replicated = NamedSharding(make_mesh(8), PartitionSpec())
    program = _digest_all(replicated).lower([states[0]["a"]]).compile().as_text() or ""
    exchanged = re.findall(r"= \w+\[([\d,]*)\]\S* (?:all-gather|all-to-all|collective-permute)\(", program)
    assert exchanged
    assert all(np.prod([int(size) for size in shape.split(",") if size]) <= 8 for shape in exchanged)


def test_leaves_that_cannot_be_checked_are_refused():
    with pytest.raises(TypeError, match=r"got complex64"):
        digest(jnp.ones(2, jnp.complex64))
    with pytest.raises(TypeError, match=r"got int4"):
        digest(jnp.ones(2, jnp.int4))
    with pytest.raises(TypeError, match=r"arrays only, got float at \['rate'\]"):
        digest({"rate": 0.1})


# Round trips.


@pytest.mark.parametrize("shape", [(8,), (2, 2), (1,)])
def test_round_trip_onto_other_devices(tmp_path, shape):
    state = make_state(3)
    checkpoints = Checkpoints(tmp_path, every=10)
    meta = {"step": 10, "data": {"global_next_index": 320}, "config": {"optim": {"peak_lr": 5e-4}, "none": None}}
    checkpoints.save(10, place(state, make_mesh(8)), meta)
    restored = checkpoints.restore(abstract(state, make_mesh(*shape)))
    checkpoints.close()
    assert restored is not None
    found, found_meta = restored
    assert isinstance(found, State)
    assert parameter_hash(found) == parameter_hash(state)
    assert found_meta == meta
    for leaf, saved, sharding in zip(
        *map(jax.tree.leaves, (found, state, shardings(state, make_mesh(*shape)))), strict=True
    ):
        assert raw(leaf) == raw(saved)
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def raw(leaf: jax.Array) -> tuple:
    data = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    return leaf.dtype, leaf.shape, np.asarray(data).tobytes()


def test_donation_right_after_save_changes_nothing(tmp_path):
    advance = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)
    state = place({"a": jnp.arange(2**22, dtype=jnp.int32), "b": jnp.ones((8, 1000))}, make_mesh(8))
    shape = abstract(state, make_mesh(8))
    advance(jax.tree.map(jnp.copy, state))
    before = parameter_hash(state)
    checkpoints = Checkpoints(tmp_path, every=1)
    checkpoints.save(1, state, {})
    for _ in range(3):
        state = advance(state)
    jax.block_until_ready(state)
    restored = checkpoints.restore(shape)
    checkpoints.close()
    assert restored is not None
    assert parameter_hash(restored[0]) == before != parameter_hash(state)


def test_which_steps_are_due_and_kept(tmp_path):
    state, form = {"a": jnp.arange(3.0)}, {"a": jax.ShapeDtypeStruct((3,), jnp.float32)}
    losses = {10: float("nan"), 20: 1.0, 30: 2.0, 40: None, 50: 3.0}
    checkpoints = Checkpoints(tmp_path, every=10)
    assert checkpoints.restore(form) is None
    assert [step for step in range(1, 31) if checkpoints.due(step)] == [10, 20, 30]
    for step, loss in losses.items():
        checkpoints.save(step + 3, state, {})
        checkpoints.save(step, state, {"first": True}, loss=loss)
        assert not checkpoints.due(step)
        checkpoints.save(step, state, {"first": False}, force=True)
    checkpoints.close()
    assert checkpoints.steps() == [20, 40, 50]

    # The best is known after a restart too, until a better one comes; what was forced counts as any other.
    checkpoints = Checkpoints(tmp_path, every=10)
    checkpoints.save(57, state, {}, loss=1.5, force=True)
    checkpoints.save(60, state, {})
    checkpoints.wait()
    assert checkpoints.steps() == [20, 57, 60]
    checkpoints.save(70, state, {}, loss=0.5)
    checkpoints.close()
    assert checkpoints.steps() == [60, 70]
    assert sorted(os.listdir(tmp_path)) == ["60", "70"]


def test_existing_step_is_left_alone(tmp_path):
    checkpoints = Checkpoints(tmp_path, every=1)
    for value in (1.0, 2.0):
        checkpoints.save(5, {"a": jnp.full(3, value)}, {"value": value}, force=True)
    assert checkpoints.restore_step(5, abstract({"a": jnp.ones(3)}, make_mesh(1)))[1] == {"value": 1.0}
    checkpoints.close()


@pytest.mark.parametrize("options", [{"every": 0}, {"every": 1, "keep": 0}])
def test_counts_must_be_positive(tmp_path, options):
    with pytest.raises(ValueError, match="must be positive"):
        Checkpoints(tmp_path, **options)


# Damage.


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    directory = tmp_path_factory.mktemp("two_steps") / "checkpoints"
    save_steps(directory, 1, 2)
    return directory


@pytest.fixture
def copied(two_steps, tmp_path):
    return Path(shutil.copytree(two_steps, tmp_path / "checkpoints"))


def restore(directory, **options):
    checkpoints = Checkpoints(directory, every=1, **options)
    restored = checkpoints.restore(abstract(make_state(), make_mesh(2, 2)))
    checkpoints.close()
    assert restored is not None
    state, meta = restored
    assert parameter_hash(state) == parameter_hash(make_state(meta["step"]))
    return meta["step"]


def remove_metadata(step: Path):
    (step / "state" / "_METADATA").unlink()


def remove_contents(step: Path):
    shutil.rmtree(step)
    step.mkdir()


DAMAGES = {
    "data truncated": (lambda step: truncate(largest(step)), "DATA_LOSS|OUT_OF_RANGE|truncated|FAILED"),
    "data missing": (lambda step: largest(step).unlink(), "Existing shard has size of 0 bytes"),
    "data flipped": (lambda step: flip(largest(step)), r"not what was saved: \.noise\."),
    "metadata missing": (remove_metadata, "_METADATA"),
    "meta flipped": (lambda step: flip(step / "meta" / "data.json"), "description of the step is not|JSONDecodeError"),
    "all missing": (remove_contents, "meta"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_step_falls_back_loudly_and_can_be_saved_again(copied, caplog, damage):
    inflict, reason = DAMAGES[damage]
    inflict(copied / "2")
    checkpoints = Checkpoints(copied, every=1)
    restored = checkpoints.restore(abstract(make_state(), make_mesh(8)))
    assert restored is not None
    assert restored[1] == {"step": 1}
    assert parameter_hash(restored[0]) == parameter_hash(make_state(1))
    messages = [record.getMessage() for record in caplog.records if record.name == "train.checkpoint"]
    assert re.search(r"step 2 in .* is damaged(.|\n)*Trying the step before", messages[0])
    assert re.search(reason, messages[0])
    assert "aside to" in messages[1]
    assert sorted(os.listdir(copied)) == ["1", "2.damaged"]

    assert checkpoints.due(2)
    checkpoints.save(2, make_state(2), {"step": 2})
    checkpoints.close()
    assert restore(copied) == 2


def test_damage_to_any_file_is_survived(two_steps, tmp_path):
    """Whatever happens to one file, the newest step comes back as it was, or the one before does."""
    outcomes = set()
    for file in [path.relative_to(two_steps) for path in files(two_steps / "2")]:
        for damage in (truncate, flip, Path.unlink):
            directory = tmp_path / "checkpoints"
            shutil.copytree(two_steps, directory)
            damage(directory / file)
            outcomes.add(restore(directory, read_only=True))
            shutil.rmtree(directory)
    assert outcomes == {1, 2}


def test_all_damaged_is_an_error_and_changes_nothing(copied):
    for step in ("1", "2"):
        truncate(largest(copied / step))
    with pytest.raises(NoIntactCheckpoint, match=r"steps \[1, 2\]"):
        restore(copied)
    assert sorted(os.listdir(copied)) == ["1", "2"]


def test_second_damage_to_a_step_finds_another_name(copied):
    for _ in range(2):
        truncate(largest(copied / "2"))
        assert restore(copied) == 1
        save_steps(copied, 2)
    assert sorted(os.listdir(copied)) == ["1", "2", "2.damaged", "2.damaged-2"]


def test_exact_step_or_an_error(copied):
    checkpoints = Checkpoints(copied, every=1, read_only=True)
    form = abstract(make_state(), make_mesh(1))
    assert checkpoints.restore_step(1, form)[1] == {"step": 1}
    truncate(largest(copied / "2"))
    with pytest.raises(DamagedCheckpoint, match="step 2"):
        checkpoints.restore_step(2, form)
    with pytest.raises(DamagedCheckpoint, match="step 3"):
        checkpoints.restore_step(3, form)


def test_other_leaves_are_named_and_are_not_damage(copied):
    other = eqx.tree_at(lambda state: state.noise, make_state(), jnp.ones((64, 128)))
    other = eqx.tree_at(lambda state: state.half, other, other.half.astype(jnp.float32))
    other = eqx.tree_at(lambda state: state.mask, other, None)
    with pytest.raises(CheckpointMismatch) as error:
        Checkpoints(copied, every=1).restore(abstract(other, make_mesh(8)))
    assert ".noise: uint32[64, 256] saved, float32[64, 128] wanted" in str(error.value)
    assert ".half: bfloat16[4, 4] saved, float32[4, 4] wanted" in str(error.value)
    assert ".mask: bool[64, 256] saved, nothing wanted" in str(error.value)
    assert ".key" not in str(error.value)
    assert sorted(os.listdir(copied)) == ["1", "2"]


def test_reader_sees_which_steps_are_there_now(copied):
    reader = Checkpoints(copied, every=1, read_only=True)
    save_steps(copied, 3)
    restored = reader.restore(abstract(make_state(), make_mesh(1)))
    assert restored is not None
    assert restored[1] == {"step": 3}
    assert reader.steps() == [2, 3]


def test_reading_leaves_a_writer_alone(copied, tmp_path):
    unfinished = copied / "3.orbax-checkpoint-tmp"
    unfinished.mkdir()
    truncate(largest(copied / "2"))
    assert restore(copied, read_only=True) == 1
    assert sorted(os.listdir(copied)) == ["1", "2", unfinished.name]
    with pytest.raises(CheckpointNotWritten, match="opened to be read"):
        Checkpoints(copied, every=1, read_only=True).save(4, make_state(), {})
    with pytest.raises(FileNotFoundError, match="must exist"):
        Checkpoints(tmp_path / "nowhere", every=1, read_only=True)


# Disks that fail, and processes that die.


def test_full_disk_is_reported_and_earlier_steps_stay(copied):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpoints = Checkpoints(copied, every=1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        checkpoints.save(3, make_state(3), {"step": 3})
        with pytest.raises(CheckpointNotWritten, match=r"(?s)step 3 .* GiB are free:.*File too large.*there: \[1, 2\]"):
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoints.steps() == [1, 2]
    checkpoints.save(3, make_state(3), {"step": 3})
    checkpoints.close()
    assert restore(copied) == 3


def test_failure_in_the_background_surfaces_in_the_next_save(copied):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpoints = Checkpoints(copied, every=1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        checkpoints.save(3, make_state(3), {"step": 3})
        with pytest.raises(CheckpointNotWritten, match="step 3 could not be written"):
            checkpoints.save(4, make_state(4), {"step": 4})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    checkpoints.close()
    assert restore(copied) == 2


@pytest.fixture
def as_nobody():
    """A directory of which this process, even if started by root, is not the owner until the function is called."""
    directory = Path(tempfile.mkdtemp())
    user = os.geteuid()
    # What is compiled as nobody could not be kept, and jax warns of that.
    least_seconds = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", float("inf"))

    def drop():
        directory.chmod(0o555)
        if user == 0:
            os.seteuid(65534)

    yield directory, drop
    os.seteuid(user)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least_seconds)
    shutil.rmtree(directory)


def test_read_only_directory_is_refused_at_once(as_nobody):
    directory, drop = as_nobody
    drop()
    for path in (directory, directory / "checkpoints"):
        with pytest.raises(CheckpointNotWritten, match="must be writable"):
            Checkpoints(path, every=1)


def test_directory_that_becomes_read_only(as_nobody):
    directory, drop = as_nobody
    state, form = {"a": jnp.arange(3.0)}, abstract({"a": jnp.arange(3.0)}, make_mesh(1))
    checkpoints = Checkpoints(directory, every=1)
    checkpoints.save(1, state, {"step": 1})
    checkpoints.wait()
    drop()
    with pytest.raises(CheckpointNotWritten, match=r"(?s)step 2 could not be written.*Permission denied"):  # noqa: PT012
        checkpoints.save(2, state, {"step": 2})
        checkpoints.wait()
    restored = checkpoints.restore(form)
    assert restored is not None
    assert restored[1] == {"step": 1}

    os.seteuid(os.getuid())
    directory.chmod(0o755)
    checkpoints.save(2, state, {"step": 2})
    checkpoints.close()
    assert checkpoints.restore_step(2, form)[1] == {"step": 2}


HEAD = """
import sys
import jax
import jax.numpy as jnp
from pathlib import Path
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
"""

KILLED = """
from train.checkpoint import Checkpoints
from train.digest import parameter_hash
checkpoints = Checkpoints(Path(sys.argv[1]), every=1)
for step in (1, 2):
    state = {"a": jax.random.bits(jax.random.key(step), (25_000_000,), jnp.uint32)}
    checkpoints.save(step, state, {"hash": parameter_hash(state)})
    print(step, flush=True)
    if step == 1:
        checkpoints.wait()
checkpoints.wait()
print("written", flush=True)
"""


def script(text: str, *arguments) -> subprocess.Popen:
    command = [sys.executable, "-c", HEAD + text, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, stderr=subprocess.PIPE)


def test_kill_while_writing_leaves_the_step_before(tmp_path):
    process = script(KILLED, tmp_path)
    assert process.stdout is not None
    while process.stdout.readline() not in ("2\n", ""):
        pass
    process.send_signal(signal.SIGKILL)
    assert process.communicate()[0] == ""
    assert process.returncode == -signal.SIGKILL
    assert any(name.startswith("2.") for name in os.listdir(tmp_path))

    checkpoints = Checkpoints(tmp_path, every=1)
    restored = checkpoints.restore(abstract({"a": jnp.zeros(25_000_000, jnp.uint32)}, make_mesh(1)))
    assert restored is not None
    assert checkpoints.steps() == [1]
    assert parameter_hash(restored[0]) == restored[1]["hash"]
    checkpoints.save(3, {"a": jnp.arange(3)}, {})
    checkpoints.close()
    assert sorted(os.listdir(tmp_path)) == ["1", "3"]


TOGETHER = """
import os
jax.distributed.initialize(sys.argv[2], num_processes=2, process_id=int(sys.argv[3]))
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from train.checkpoint import Checkpoints
from train.digest import parameter_hash
mesh = jax.make_mesh((4,), ("fsdp",), (jax.sharding.AxisType.Auto,))
sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
make = jax.jit(lambda key: jax.random.bits(key, (4, 50_000), jnp.uint32), out_shardings=sharding)
checkpoints = Checkpoints(Path(sys.argv[1]), every=1)
for step in (1, 2):
    state = {"a": make(jax.random.key(step))}
    checkpoints.save(step, state, {"step": step, "hash": parameter_hash(state)})
checkpoints.wait()
if jax.process_index() == 0:
    data = Path(sys.argv[1], "2", "state", "ocdbt.process_1", "d")
    os.truncate(max(data.iterdir(), key=lambda path: path.stat().st_size), 1000)
multihost_utils.sync_global_devices("damaged")
state, meta = checkpoints.restore({"a": jax.ShapeDtypeStruct((4, 50_000), jnp.uint32, sharding=sharding)})
assert parameter_hash(state) == meta["hash"]
checkpoints.save(2, state, {})
checkpoints.close()
print("restored", meta["step"], checkpoints.steps(), flush=True)
os._exit(0)
"""


def test_processes_agree_on_the_step(tmp_path):
    """Only the second process reads the damaged file, and both go back."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes = [script(TOGETHER, tmp_path / "checkpoints", address, index) for index in (0, 1)]
    try:
        results = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for output, errors in results:
        assert "restored 1 [1, 2]" in output, errors
    assert "could not be read by process 1" in results[0][1]
    assert "DATA_LOSS" in results[1][1] or "truncated" in results[1][1] or "OUT_OF_RANGE" in results[1][1]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["1", "2", "2.damaged"]

    # What two processes wrote, one can read.
    checkpoints = Checkpoints(tmp_path / "checkpoints", every=1, read_only=True)
    state, meta = checkpoints.restore_step(1, abstract({"a": jnp.zeros((4, 50_000), jnp.uint32)}, make_mesh(2)))
    assert json.dumps(meta["step"]) == "1"
    assert np.array_equal(state["a"], jax.random.bits(jax.random.key(1), (4, 50_000), jnp.uint32))
