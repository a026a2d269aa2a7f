import numpy as np
import pytest

from data.examples import distances
from data.loader import make_batches, open_rows
from data.mqar import make_rows, prepare_mqar


def test_a_row_asks_for_each_value_once():
    inputs, targets = make_rows(50, seq=64, pairs=6, num_tokens=40, generator=np.random.default_rng(0))
    for row, wanted in zip(inputs, targets, strict=True):
        values = dict(zip(row[0:12:2].tolist(), row[1:12:2].tolist(), strict=True))
        assert len(values) == len(set(values.values())) == 6
        assert all(1 <= key < 20 <= value < 40 for key, value in values.items())
        places = np.flatnonzero(wanted >= 0)
        assert sorted(row[places]) == sorted(values)
        assert (places >= 12).all()
        assert (places % 2 == 0).all()
        assert all(wanted[place] == values[row[place]] for place in places)
        assert not row[12:][wanted[12:] < 0].any()


@pytest.mark.parametrize(("seq", "pairs", "share"), [(256, 16, 0.817), (512, 64, 0.369)])
def test_distances_are_those_of_the_power_law(seq, pairs, share):
    inputs, targets = make_rows(2000, seq=seq, pairs=pairs, generator=np.random.default_rng(1))
    found = np.concatenate([distances(row)[wanted >= 0] for row, wanted in zip(inputs, targets, strict=True)])
    # The spread of so many draws is below half a percent.
    assert np.mean(found <= 128) == pytest.approx(share, abs=0.01)


def test_draws_without_putting_back_have_their_weights():
    """The chance of each first slot, against the weights themselves."""
    inputs, _ = make_rows(40_000, seq=24, pairs=1, num_tokens=16, generator=np.random.default_rng(2))
    slot = (np.argmax(inputs[:, 2:] > 0, axis=1)) // 2
    weights = (np.arange(11) + 1.0) ** -0.99
    np.testing.assert_allclose(np.bincount(slot, minlength=11) / 40_000, weights / weights.sum(), atol=0.01)


def test_distance_is_to_what_followed():
    np.testing.assert_array_equal(distances(np.array([5, 9, 7, 5, 5, 9])), [0, 0, 0, 2, 0, 3])


def test_prepared_rows_are_those_made(tmp_path):
    prepare_mqar(tmp_path / "a", seq=32, pairs=4, num_train=8, num_valid=3, num_test=2, quiet=True)
    rows = open_rows(tmp_path / "a", "train", seq=32, pack="concat")
    inputs, targets = make_rows(8, seq=32, pairs=4, generator=np.random.default_rng([0, 0]))
    for index in range(8):
        np.testing.assert_array_equal(rows[index]["inputs"], inputs[index])
        np.testing.assert_array_equal(rows[index]["targets"], targets[index])
        np.testing.assert_array_equal(rows[index]["distance"], distances(inputs[index]))
    assert next(make_batches(rows, batch_size=4, seed=0))["distance"].shape == (4, 32)
    valid = open_rows(tmp_path / "a", "valid", seq=32, pack="concat")
    assert len(valid) == 3
    assert not np.array_equal(valid[0]["inputs"], inputs[0])
    with pytest.raises(ValueError, match="`seq` must be 32, the positions of each example, got seq=16"):
        open_rows(tmp_path / "a", "train", seq=16, pack="concat")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(seq=30, pairs=8), "even and at least 4 times `pairs`, got seq=30, pairs=8"),
        (dict(seq=33, pairs=4), "must be even"),
        (dict(seq=64, pairs=8, num_tokens=16), "more than `pairs` in each half, got num_tokens=16, pairs=8"),
    ],
)
def test_impossible_rows_are_refused(tmp_path, sizes, message):
    with pytest.raises(ValueError, match=message):
        prepare_mqar(tmp_path / "a", **sizes, quiet=True)
    assert not (tmp_path / "a").exists()
