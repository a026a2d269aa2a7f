"""Batches are a function of (seed, step), whatever the processes, the workers and the interruptions."""

import json
import pickle

import grain
import numpy as np
import pytest

from data.loader import make_batches, open_rows, sequential_batches, state_at
from data.packing import NOTHING
from data.prepared import CorruptData
from tests.data.made import draw_documents, write

SEQ = 16
PACKS = ["concat", "documents"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("made")
    lengths = np.random.default_rng(0).integers(0, 60, 40).tolist()
    write(path, train=draw_documents(lengths), valid=draw_documents([100, 20, 30]))
    return path


def take(rows, count, *, state=None, **arguments):
    batches = make_batches(rows, **{"batch_size": 6, "seed": 3} | arguments)
    if state is not None:
        batches.set_state(state)
    taken = [next(batches) for _ in range(count)]
    batches.close()
    return taken


def assert_equal(actual, expected):
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert a.keys() == b.keys()
        for name in b:
            np.testing.assert_array_equal(a[name], b[name], strict=True)


def shard(index, count):
    return grain.sharding.ShardOptions(shard_index=index, shard_count=count)


@pytest.mark.parametrize("pack", PACKS)
def test_shapes(directory, pack):
    batch = take(open_rows(directory, "train", seq=SEQ, pack=pack), 1)[0]
    names = ["inputs", "targets", *(["segment_ids"] if pack == "documents" else [])]
    assert {name: (x.shape, x.dtype) for name, x in batch.items()} == {
        **{name: ((6, SEQ), np.int32) for name in names},
        "index": ((6,), np.uint32),
    }


@pytest.mark.parametrize("pack", PACKS)
def test_an_epoch_has_every_row_once_and_the_next_has_another_order(directory, pack):
    rows = open_rows(directory, "train", seq=SEQ, pack=pack)
    taken = take(rows, 2 * len(rows), batch_size=1)
    number = {row["inputs"].tobytes(): i for i, row in enumerate(rows[i] for i in range(len(rows)))}
    order = [number[batch["inputs"][0].tobytes()] for batch in taken]
    assert len(number) == len(rows)
    assert sorted(order[: len(rows)]) == sorted(order[len(rows) :]) == list(range(len(rows)))
    assert order[: len(rows)] != order[len(rows) :]
    assert [int(batch["index"][0]) for batch in taken] == list(range(2 * len(rows)))


def test_the_order_of_a_seed_does_not_change(directory):
    rows = open_rows(directory, "train", seq=SEQ, pack="concat")
    number = {rows[i]["inputs"].tobytes(): i for i in range(len(rows))}
    order = lambda **arguments: [number[x.tobytes()] for x in take(rows, 1, **arguments)[0]["inputs"]]
    assert len(rows) == 74
    assert order() == [29, 30, 31, 7, 26, 66]
    assert order(seed=4) != order()
    assert order(shuffle=False) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("pack", PACKS)
def test_resumed_equals_uninterrupted(directory, pack):
    rows = open_rows(directory, "train", seq=SEQ, pack=pack)
    batches = make_batches(rows, batch_size=6, seed=3)
    states, taken = [], []
    for _ in range(30):
        states.append(json.loads(json.dumps(batches.get_state())))
        taken.append(next(batches))
    assert 2 * len(rows) < 30 * 6
    assert states == [state_at(step, 6) for step in range(30)]
    for step in range(0, 28, 3):
        assert_equal(take(rows, 2, state=states[step]), taken[step : step + 2])
    # The same iterator can be sent back.
    batches.set_state(states[7])
    assert_equal([next(batches), next(batches)], taken[7:9])
    batches.close()


@pytest.mark.parametrize("count", [2, 3, 6])
def test_shards_together_are_the_whole(directory, count):
    rows = open_rows(directory, "train", seq=SEQ, pack="documents")
    whole = take(rows, 8)
    parts = [take(rows, 8, shard=shard(i, count)) for i in range(count)]
    joined = [
        {name: np.stack([part[step][name] for part in parts], axis=1).reshape(x.shape) for name, x in batch.items()}
        for step, batch in enumerate(whole)
    ]
    assert_equal(joined, whole)


def test_workers_change_nothing(directory):
    rows = open_rows(directory, "train", seq=SEQ, pack="documents")
    expected = take(rows, 9)
    batches = make_batches(rows, batch_size=6, seed=3, num_workers=2)
    batches.set_state(state_at(2, 6))
    assert_equal([next(batches) for _ in range(7)], expected[2:])
    state = batches.get_state()
    batches.close()
    assert state == state_at(9, 6)


def test_the_index_wraps_at_32_bits(directory):
    rows = open_rows(directory, "train", seq=SEQ, pack="concat")
    batch = take(rows, 1, batch_size=4, state=state_at(2**30 - 1, 4) | {"global_next_index": 2**32 - 2})[0]
    assert batch["index"].tolist() == [2**32 - 2, 2**32 - 1, 0, 1]


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("batch_size", [2, 4, 100])
def test_sequential_batches_have_every_row_once(directory, pack, count, batch_size):
    rows = open_rows(directory, "valid", seq=SEQ, pack=pack)
    parts = [list(sequential_batches(rows, batch_size=batch_size, shard=shard(i, count))) for i in range(count)]
    assert {len(part) for part in parts} == {-(-len(rows) // batch_size)}
    assert all(batch["inputs"].shape == (batch_size // count, SEQ) for part in parts for batch in part)
    found = {}
    for batch in (batch for part in parts for batch in part):
        for i, index in enumerate(batch["index"].tolist()):
            assert index not in found
            found[index] = {name: x[i] for name, x in batch.items() if name != "index"}
    assert_equal([found[i] for i in range(len(rows))], [rows[i] for i in range(len(rows))])
    assert all(np.all(found[i]["targets"] == NOTHING) for i in range(len(rows), len(found)))
    assert {name: x.dtype for name, x in found[len(found) - 1].items()} == {n: x.dtype for n, x in rows[0].items()}


def test_sequential_batches_look_like_those_of_training(directory):
    rows = open_rows(directory, "train", seq=SEQ, pack="documents")
    kinds = [{name: (x.shape, x.dtype) for name, x in batch.items()} for batch in take(rows, 1)]
    kinds += [{name: (x.shape, x.dtype) for name, x in b.items()} for b in sequential_batches(rows, batch_size=6)]
    assert all(kind == kinds[0] for kind in kinds)


@pytest.mark.parametrize("pack", PACKS)
def test_rows_travel_without_their_tokens(directory, pack):
    rows = open_rows(directory, "train", seq=SEQ, pack=pack)
    before = len(pickle.dumps(rows))
    assert_equal([pickle.loads(pickle.dumps(rows))[5]], [rows[5]])
    assert len(pickle.dumps(rows)) == before
    assert rows[len(rows) - 1]["inputs"].shape == (SEQ,)


def test_data_that_change_during_a_run_are_noticed(tmp_path):
    write(tmp_path, train=draw_documents([100]))
    travelled = pickle.dumps(open_rows(tmp_path, "train", seq=SEQ, pack="concat"))
    write(tmp_path, overwrite=True, train=draw_documents([100], seed=1))
    with pytest.raises(CorruptData, match="must not change during a run"):
        pickle.loads(travelled)[0]


def test_fewer_rows_than_a_batch(tmp_path):
    write(tmp_path, train=draw_documents([SEQ]))
    rows = open_rows(tmp_path, "train", seq=SEQ, pack="concat")
    assert len(rows) == 1
    np.testing.assert_array_equal(take(rows, 2)[1]["inputs"], np.tile(rows[0]["inputs"], (6, 1)))


def test_errors(directory, tmp_path):
    write(tmp_path, train=draw_documents([0, 0, SEQ - 3]))
    with pytest.raises(ValueError, match=r"at least one row, but its 16 tokens in 3 documents.*seq=16, pack='concat'"):
        open_rows(tmp_path, "train", seq=SEQ, pack="concat")
    write(tmp_path, overwrite=True, train=draw_documents([0, 0]))
    with pytest.raises(ValueError, match="at least one row, but its 2 tokens"):
        open_rows(tmp_path, "train", seq=1, pack="documents")
    with pytest.raises(ValueError, match="`seq` must be positive, got seq=0"):
        open_rows(directory, "train", seq=0, pack="concat")
    rows = open_rows(directory, "train", seq=SEQ, pack="concat")
    for make in (lambda **a: make_batches(rows, seed=0, **a), lambda **a: next(sequential_batches(rows, **a))):
        with pytest.raises(ValueError, match="multiple of the number of processes, got batch_size=5 with 2"):
            make(batch_size=5, shard=shard(0, 2))
        with pytest.raises(ValueError, match="multiple of the number of processes, got batch_size=0 with 1"):
            make(batch_size=0)
