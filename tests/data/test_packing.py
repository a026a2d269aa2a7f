"""Every pair of a token and its successor is in exactly one row, and rows are what the plan says."""

import numpy as np
import pytest

from data.packing import NOTHING, ConcatPacking, best_fit, pack_documents

SEQ = 8
CASES = {
    "one": [5],
    "exactly": [SEQ],
    "one more": [SEQ + 1],
    "two more": [SEQ + 2],
    "twice": [2 * SEQ + 1],
    "empty and short": [1, 2, 1, 3, 1, 1],
    "many": np.random.default_rng(0).integers(1, 40, 300).tolist(),
    "short": np.random.default_rng(1).integers(1, 4, 300).tolist(),
    "long": np.random.default_rng(2).integers(30, 90, 50).tolist(),
}


def tokens_and_offsets(lengths):
    # Every token is its own position, so that a pair tells where it is from.
    return np.arange(sum(lengths)), np.concatenate([[0], np.cumsum(lengths)])


@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES.keys())
def test_documents_keep_every_pair_once(lengths):
    tokens, offsets = tokens_and_offsets(lengths)
    packing = pack_documents(offsets, SEQ)
    rows = [packing.element(tokens, row) for row in range(len(packing))]
    seen = [row["inputs"][row["targets"] != NOTHING] for row in rows]
    expected = np.setdiff1d(tokens, offsets[1:] - 1)
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)), expected)


@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES.keys())
def test_rows_of_documents(lengths):
    tokens, offsets = tokens_and_offsets(lengths)
    document_of = np.searchsorted(offsets, tokens, side="right") - 1
    packing = pack_documents(offsets, SEQ)
    for row in range(len(packing)):
        element = packing.element(tokens, row)
        assert {name: (array.shape, array.dtype) for name, array in element.items()} == {
            name: ((SEQ,), np.int32) for name in ("inputs", "targets", "segment_ids")
        }
        inputs, targets, segment_ids = element["inputs"], element["targets"], element["segment_ids"]
        real = targets != NOTHING
        # Padding is the end of the row and one segment more; segments are numbered from 0 without gaps.
        assert not np.any(np.diff(real.astype(int)) > 0)
        assert real[0]
        assert set(segment_ids[~real]) <= {segment_ids[real].max() + 1}
        np.testing.assert_array_equal(np.unique(segment_ids), np.arange(segment_ids.max() + 1))
        assert np.all(np.diff(segment_ids) >= 0)
        np.testing.assert_array_equal(targets[real], inputs[real] + 1)
        # A segment is a run of one document; the next segment begins elsewhere.
        for segment in np.unique(segment_ids[real]):
            run = inputs[real & (segment_ids == segment)]
            np.testing.assert_array_equal(run, run[0] + np.arange(len(run)))
            assert len(set(document_of[[*run, run[-1] + 1]])) == 1


def test_pieces_of_a_long_document():
    tokens, offsets = tokens_and_offsets([2 * SEQ + 4])
    packing = pack_documents(offsets, SEQ)
    rows = [packing.element(tokens, row) for row in range(len(packing))]
    assert [row["inputs"][0] for row in rows] == [0, SEQ, 2 * SEQ]
    assert [(row["targets"] != NOTHING).sum() for row in rows] == [SEQ, SEQ, 3]
    # The last target of a piece is the first input of the next.
    assert [row["targets"][-1] for row in rows[:2]] == [SEQ, 2 * SEQ]


def test_documents_of_one_token_make_no_row():
    assert len(pack_documents(np.arange(6), SEQ)) == 0
    assert len(pack_documents(np.array([0]), SEQ)) == 0


def best_fit_oracle(lengths, seq):
    """Piece after piece, the longest first, into the fullest row that has room; returns the rooms left."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else seq) - length)
    return sorted(rooms)


@pytest.mark.parametrize("seed", range(20))
def test_best_fit_against_one_piece_at_a_time(seed):
    generator = np.random.default_rng(seed)
    seq = int(generator.integers(1, 60))
    lengths = generator.integers(1, seq + 1, generator.integers(1, 400))
    rows, num_rows = best_fit(lengths, seq)
    used = np.bincount(rows, weights=lengths, minlength=num_rows)
    assert sorted(seq - used) == best_fit_oracle(lengths.tolist(), seq)
    # Rows are numbered by their first pieces.
    first = [np.flatnonzero(rows == row)[0] for row in range(num_rows)]
    assert first == sorted(first)


def test_rows_longer_than_sixteen_bits():
    lengths = np.array([70_000, 5, 65_540, 4_460])
    rows, num_rows = best_fit(lengths, 70_000)
    assert (rows.tolist(), num_rows) == ([0, 1, 2, 2], 3)


@pytest.mark.parametrize("num_tokens", [0, 1, SEQ, SEQ + 1, 3 * SEQ, 3 * SEQ + 1, 100])
def test_concat_keeps_every_target_but_the_tail(num_tokens):
    tokens = np.arange(num_tokens).astype(np.uint16)
    packing = ConcatPacking(num_tokens, SEQ)
    rows = [packing.element(tokens, row) for row in range(len(packing))]
    assert num_tokens - 1 - len(rows) * SEQ < SEQ
    flat = {name: np.array([row[name] for row in rows]).reshape(-1) for name in ("inputs", "targets")}
    np.testing.assert_array_equal(flat["inputs"], np.arange(len(rows) * SEQ))
    np.testing.assert_array_equal(flat["targets"], np.arange(len(rows) * SEQ) + 1)
    for row in rows:
        assert {name: (array.shape, array.dtype) for name, array in row.items()} == {
            name: ((SEQ,), np.int32) for name in ("inputs", "targets")
        }
