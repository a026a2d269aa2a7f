"""Pathfinder: what is drawn, and the released files."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread, imsave

from data import pathfinder
from data.loader import open_rows
from data.lra import Counts, prepare_pathfinder
from data.pathfinder import DASH, MARGIN, NUM_DASHES, STEP, Dashes, draw, draw_pictures
from data.prepare import main
from data.prepared import Examples, fingerprint, open_split, verify


@pytest.fixture(scope="module")
def drawings():
    return draw(np.random.default_rng(0))


def follow(marker, dashes):
    """Go from dash to dash: the next one comes from the joint that this one points at. Return where the curve ends."""
    (number,) = np.flatnonzero(np.abs(dashes.at(MARGIN) - marker) < 1e-4)
    for count in itertools.count(1):
        following = np.flatnonzero(np.abs(dashes.joints - dashes.at(STEP)[number]) < 1e-4)
        if not len(following):
            return dashes.at(MARGIN + DASH)[number], count
        (number,) = following


def test_labels_by_following_the_curve(drawings):
    order = np.random.default_rng(0).permutation(drawings.dashes.joints.shape[1])
    assert len(drawings.labels) > 80
    for i, ((first, last), label) in enumerate(zip(drawings.markers, drawings.labels, strict=True)):
        end, num_dashes = follow(first, drawings.dashes[i, order])
        assert (abs(end - last) < 1e-4) == bool(label)
        assert num_dashes == NUM_DASHES


def test_the_marked_ends_of_class_0_belong_to_both_long_curves(drawings):
    ends = drawings.dashes[:, 2 * NUM_DASHES - 2 : 2 * NUM_DASHES].at(MARGIN + DASH)
    assert (np.abs(ends - drawings.markers[:, 1:]) < 1e-4).any(1).all()


def test_classes_are_balanced():
    labels = np.array([label for _, label in itertools.islice(draw_pictures(1), 1000)])
    assert abs(labels.mean() - 0.5) < 0.05


def test_dashes_keep_away_from_each_other_and_the_border(drawings):
    dashes = drawings.dashes
    points = np.stack([dashes.at(distance) for distance in np.linspace(MARGIN, MARGIN + DASH, 9)], -1)
    found = np.isfinite(points)
    assert (np.minimum(np.real(points), np.imag(points))[found] > 1).all()
    assert (np.maximum(np.real(points), np.imag(points))[found] < 31).all()
    for i in range(40):
        distances = np.abs(points[i][:, None, :, None] - points[i][None, :, None, :]).min((2, 3))
        neighbours = np.abs(dashes.joints[i][:, None] - dashes.at(STEP)[i]) < 1e-4
        near = np.where(neighbours | neighbours.T | np.eye(len(distances), dtype=bool), np.nan, distances)
        # Only some points of the new dash are asked how near they are; two dashes like a T come closest.
        assert np.nanmin(near) > 3**0.5 - 0.01


def test_distractors(drawings):
    others = np.isfinite(drawings.dashes.joints[:, 2 * NUM_DASHES :]).reshape(-1, 5, 4)
    assert np.isfinite(drawings.dashes.joints[:, : 2 * NUM_DASHES]).all()
    # Those without room for all their dashes are shorter, and have no gaps.
    assert (np.diff(others.astype(int), axis=-1) <= 0).all()
    assert 10 < others.sum((1, 2)).mean() < 18


def test_curves_turn_as_the_definition_says():
    """In an empty place a turn has the probability of its squared cosine."""
    directions = pathfinder.DIRECTIONS
    assert len(directions) == 16
    dashes = Dashes(*np.full((2, 40_000, 2), np.nan, np.complex64))
    dashes.joints[:, 0], dashes.directions[:, 0] = 12 + 16j, 1
    assert pathfinder._extend(dashes, 1, 0, np.random.default_rng(0)).all()
    weights = np.maximum(directions.real, 0) ** 2
    shares = [np.mean(np.abs(dashes.directions[:, 1] - direction) < 1e-5) for direction in directions]
    np.testing.assert_allclose(shares, weights / weights.sum(), atol=0.01)


def test_pictures_show_what_they_should(drawings):
    pictures = drawings.pictures
    assert (pictures.dtype, pictures.shape[1:]) == (np.uint8, (32, 32))
    rows = np.arange(len(pictures))
    for points, least in (
        *((marker, 190) for marker in drawings.markers.T),
        *((x, 70) for x in drawings.dashes.at(STEP / 2).T),
    ):
        present = np.isfinite(points)
        x, y = (np.floor(part[present]).astype(int) for part in (np.real(points), np.imag(points)))
        assert (pictures[rows[present], y, x] >= least).all()
    # Far from everything it is dark.
    centres = np.arange(32) + 0.5
    grid = (centres + 1j * centres[:, None]).astype(np.complex64)
    distances = np.fmin.reduce(drawings.dashes[..., None, None].squared_distances(grid), axis=1) ** 0.5
    far = (distances > 1.3) & (np.abs(drawings.markers[..., None, None] - grid).min(1) > 2)
    assert not pictures[far].any()
    assert 0.3 < far.mean() < 0.7


def test_the_seed_decides(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        prepare_pathfinder(tmp_path / name, counts=Counts(40, 10, 10), seed=seed, quiet=True)
    prints = [fingerprint(tmp_path / name) for name in "abc"]
    assert prints[0] == prints[1] != prints[2]


def test_rows_are_numbers(tmp_path):
    main([*f"lra-pathfinder --num-train 70 --num-valid 5 --num-test 5 --quiet --out {tmp_path / 'out'}".split(),
          "--contact-sheet", str(tmp_path / "sheet.png")])  # fmt: skip
    (pixels, label), *_ = itertools.islice(draw_pictures(0), 1)
    row = open_rows(tmp_path / "out", "test", seq=1024, pack="concat")[0]
    np.testing.assert_allclose(row["inputs"][:, 0], pixels / 127.5 - 1, atol=1e-6)
    assert (row["targets"], row["mask"].all()) == (label, True)
    assert verify(tmp_path / "out").examples == Examples(2, is_numeric=True)
    assert imread(tmp_path / "sheet.png").std() > 0.1


def write_release(source: Path, count: int) -> list[tuple[np.ndarray, int]]:
    directory = source / "curv_contour_length_14"
    (directory / "metadata").mkdir(parents=True)
    drawn = list(itertools.islice(draw_pictures(0), count))
    for i, (pixels, label) in enumerate(drawn):
        # Ten batches and more, whose names are not in the order of the alphabet.
        batch = i // 2
        (directory / "imgs" / str(batch)).mkdir(parents=True, exist_ok=True)
        write_grey(directory / "imgs" / str(batch) / f"sample_{i}.png", pixels.reshape(32, 32))
        with (directory / "metadata" / f"{batch}.npy").open("a") as file:
            file.write(f"imgs/{batch} sample_{i}.png {i} {label} 1.0 14 4 2 0.5 1 1\n")
    return drawn


def write_grey(path: Path, picture: np.ndarray) -> None:
    image = pytest.importorskip("PIL.Image")
    image.fromarray(picture).save(path)


def test_released_files(tmp_path, capsys):
    drawn = write_release(tmp_path, 30)
    for number in (5, 29):
        (tmp_path / f"curv_contour_length_14/imgs/{number // 2}/sample_{number}.png").write_bytes(b"")
    main(["lra-pathfinder", "--source", str(tmp_path), "--out", str(tmp_path / "out")])
    assert "2 pictures are empty files, and are left out." in capsys.readouterr().out
    assert verify(tmp_path / "out").source["empty_files_left_out"] == 2
    splits = {"train": [i for i in range(24) if i != 5], "valid": [24, 25, 26], "test": [27, 28]}
    for split, numbers in splits.items():
        found = open_split(tmp_path / "out", split)
        np.testing.assert_array_equal(found.labels, [drawn[i][1] for i in numbers])
        pixels = found.tokens.reshape(-1, 1025)[:, :1024]
        np.testing.assert_array_equal(pixels, [drawn[i][0] for i in numbers])


def test_released_files_that_are_missing_or_damaged(tmp_path):
    command = ["lra-pathfinder", "--source", str(tmp_path), "--out", str(tmp_path / "out"), "--quiet"]
    with pytest.raises(SystemExit, match=r"must hold curv_contour_length_14/metadata/\*.npy; .* is no directory"):
        main(command)
    write_release(tmp_path, 20)
    path = tmp_path / "curv_contour_length_14/imgs/3/sample_6.png"
    imsave(path, np.zeros((32, 32, 3)))
    with pytest.raises(SystemExit, match=r"sample_6.png must have 32 x 32 pixels in grey, got 32 x 32 x 4"):
        main(command)
    path.write_bytes(b"\x89PNG and no more")
    with pytest.raises(SystemExit, match=r"sample_6.png must be a PNG file, got"):
        main(command)
    path.unlink()
    with pytest.raises(SystemExit, match=r"sample_6.png must be a picture, since the metadata list it"):
        main(command)
    with (tmp_path / "curv_contour_length_14/metadata/9.npy").open("a") as file:
        file.write("imgs/9 sample_19.png 19\n")
    with pytest.raises(SystemExit, match=r"Line 3 of .*9.npy must be like"):
        main(command)
    with pytest.raises(SystemExit, match="`seed` must be left out with `source`"):
        main([*command, "--seed", "3"])
