"""Pictures of dashed curves: do two marked ends belong to the same curve?

Two curves begin near the middle and grow in turn, dash by dash. Each dash turns a little from the one before and keeps
its distance from all others. Short curves are added to distract. One disk marks the beginning of a long curve, another
one the end of the same (class 1) or of the other (class 0). The numbers are those of the hard task of the Long Range
Arena, whose pictures these resemble without being copies.

Points of the plane are complex numbers, x + iy, in pixels. Many pictures are drawn at once; those whose long curves
find no room are given up.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Complex64, Float32, Int, UInt8

SIZE, PADDING = 32, 1
DASH, MARGIN = 2.0, 1.0
"""The length of a dash, and its distance from the joints before and after it."""
STEP = MARGIN + DASH + MARGIN
"""From joint to joint."""
CLEARANCE = 2 * MARGIN
"""What a dash keeps from all others but its neighbours."""
NUM_DASHES, SEED_DISTANCE = 14, 7
NUM_DISTRACTORS, NUM_DISTRACTOR_DASHES = 5, 4
MARKER_RADIUS = 1.5

PICTURES_AT_ONCE = 1024
NUM_PLACES = 16
"""So many places are tried for the beginning of a curve that distracts."""

_PIXELS = np.arange(-STEP, STEP + 1) + 1j * np.arange(-STEP, STEP + 1)[:, None]
_CIRCLE = _PIXELS[np.round(np.abs(_PIXELS)) == MARGIN + DASH]
DIRECTIONS = np.exp(1j * np.sort(np.angle(_CIRCLE))).astype(np.complex64)
"""From a joint to each of the pixels around it where the next dash may end."""
TURNS = np.arange(-3, 4)
"""How many directions on a curve can turn; the next one would be a right angle or more."""


@dataclass(frozen=True)
class Dashes:
    """The joints that dashes come from, and their directions. Both are NaN where there is no dash."""

    joints: Complex64[np.ndarray, "*dashes"]
    directions: Complex64[np.ndarray, "*dashes"]

    def __getitem__(self, which: Any) -> "Dashes":
        return Dashes(self.joints[which], self.directions[which])

    def at(self, distance: float) -> Complex64[np.ndarray, "*dashes"]:
        """Return points at some distance from the joints."""
        return self.joints + self.directions * np.float32(distance)

    def squared_distances(self, points: Complex64[np.ndarray, "..."]) -> Float32[np.ndarray, "..."]:
        """Return the squares of the distances of points from dashes."""
        relative = self._turned(points)
        return np.maximum(np.abs(np.real(relative)) - DASH / 2, 0) ** 2 + np.imag(relative) ** 2

    def ink(self, points: Complex64[np.ndarray, "..."]) -> Float32[np.ndarray, "..."]:
        """Return the brightness, from 0 to 1, that dashes give to pixels around `points`."""
        relative = self._turned(points)
        # Dashes fade within a pixel to their sides, and in less at their ends: else the gaps would fill up.
        return np.clip(1 - np.abs(np.imag(relative)), 0, 1) * np.clip(DASH / 2 + 0.75 - np.abs(np.real(relative)), 0, 1)

    def _turned(self, points: np.ndarray) -> np.ndarray:
        """Points as seen by dashes that lie level around 0."""
        return (points - self.joints) * self.directions.conj() - np.float32(STEP / 2)


class Drawings(NamedTuple):
    """Pictures, their classes, and what they show."""

    pictures: UInt8[np.ndarray, "pictures height width"]
    labels: Int[np.ndarray, " pictures"]
    markers: Complex64[np.ndarray, "pictures 2"]
    dashes: Dashes
    """Those of the two long curves by turns; then the short curves, one after the other."""


def draw_pictures(seed: int) -> Iterator[tuple[UInt8[np.ndarray, " pixels"], int]]:
    """Yield pictures, row by row, and their classes, without end."""
    for number in range(2**63):
        drawings = draw(np.random.default_rng((seed, number)))
        yield from zip(drawings.pictures.reshape(-1, SIZE * SIZE), drawings.labels.tolist(), strict=True)


def draw(generator: np.random.Generator) -> Drawings:
    """Draw those of `PICTURES_AT_ONCE` pictures whose long curves find room."""
    dashes = _draw_curves(generator)
    _draw_distractors(dashes, generator)
    labels, markers = _mark(dashes, generator)
    return Drawings(_render(dashes, markers), labels, markers, dashes)


def _draw_curves(generator: np.random.Generator) -> Dashes:
    shape = PICTURES_AT_ONCE, 2 * NUM_DASHES + NUM_DISTRACTORS * NUM_DISTRACTOR_DASHES
    dashes = Dashes(*np.full((2, *shape), np.nan, np.complex64))
    x, y = generator.uniform(2 * SEED_DISTANCE, SIZE - 2 * SEED_DISTANCE, (2, len(dashes.joints)))
    away = np.exp(2j * np.pi * generator.random(len(dashes.joints)))
    dashes.joints[:, :2] = np.stack([x + 1j * y, x + 1j * y + SEED_DISTANCE * away], 1)
    dashes.directions[:, :2] = generator.choice(DIRECTIONS, (len(dashes.joints), 2))
    dashes = dashes[_has_room(dashes[:, :1], dashes[:, 1:2])[:, 0]]
    for number in range(2, 2 * NUM_DASHES):
        dashes = dashes[_extend(dashes, number, number - 2, generator)]
    return dashes


def _draw_distractors(dashes: Dashes, generator: np.random.Generator) -> None:
    rows, num_dashes = np.arange(len(dashes.joints)), dashes.joints.shape[1]
    for number in range(2 * NUM_DASHES, num_dashes):
        if (number - 2 * NUM_DASHES) % NUM_DISTRACTOR_DASHES:
            _extend(dashes, number, number - 1, generator)
        else:
            x, y = generator.uniform(0, SIZE, (2, len(rows), NUM_PLACES))
            joints = (x + 1j * y).astype(np.complex64)
            places = Dashes(joints, generator.choice(DIRECTIONS, joints.shape))
            has_room = _has_room(dashes[:, :number], places)
            _put(dashes, number, places[rows, has_room.argmax(1)], np.any(has_room, axis=1))


def _extend(dashes: Dashes, number: int, last: int, generator: np.random.Generator) -> Bool[np.ndarray, " pictures"]:
    """Draw a dash after the last one of its curve wherever there is room, and return where there was."""
    before = dashes[:, last]
    nearest = np.abs(DIRECTIONS - before.directions[:, None]).argmin(1)
    directions = DIRECTIONS[(nearest[:, None] + TURNS) % len(DIRECTIONS)]
    joints = np.broadcast_to(before.at(STEP)[:, None], directions.shape)
    others = dashes[:, [i for i in range(number) if i != last]]
    weights = np.maximum(np.real(directions * before.directions[:, None].conj()), 0) ** 2
    weights *= _has_room(others, Dashes(joints, directions))
    heaps = np.cumsum(weights, 1)
    chosen = (generator.random(len(heaps))[:, None] * heaps[:, -1:] < heaps).argmax(1)
    has_room = heaps[:, -1] > 0
    _put(dashes, number, Dashes(joints, directions)[np.arange(len(chosen)), chosen], has_room)
    return has_room


def _put(dashes: Dashes, number: int, new: Dashes, where: Bool[np.ndarray, " pictures"]) -> None:
    dashes.joints[where, number], dashes.directions[where, number] = new.joints[where], new.directions[where]


def _has_room(drawn: Dashes, candidates: Dashes) -> Bool[np.ndarray, "pictures candidates"]:
    """Return which of several dashes keep away from those drawn and from the border.

    So must the joints after them. Without this look ahead only a third as many pictures would find room.
    """
    points = np.stack([candidates.at(distance) for distance in np.arange(MARGIN, STEP + 1)], -1)
    x, y = np.real(points), np.imag(points)
    is_inside = (np.minimum(x, y) > PADDING) & (np.maximum(x, y) < SIZE - PADDING)
    # Dashes that do not exist are NaN, which is never near.
    is_near = drawn[:, None, None].squared_distances(points[..., None]) < CLEARANCE**2
    return np.all(is_inside, axis=-1) & ~np.any(is_near, axis=(-2, -1))


def _mark(dashes: Dashes, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw classes, and return them with the ends to mark."""
    labels, curves = generator.integers(0, 2, (2, len(dashes.joints)))
    rows = np.arange(len(labels))
    others = np.where(labels == 1, curves, 1 - curves)
    ends = dashes[rows, curves].at(MARGIN), dashes[rows, 2 * NUM_DASHES - 2 + others].at(MARGIN + DASH)
    return labels, np.stack(ends, 1)


def _render(dashes: Dashes, markers: Complex64[np.ndarray, "pictures 2"]) -> UInt8[np.ndarray, "pictures height width"]:
    """Draw dashes and disks with smooth edges."""
    centres = np.arange(SIZE, dtype=np.float32) + np.float32(0.5)
    points = (centres + 1j * centres[:, None]).astype(np.complex64)
    pictures = np.zeros((len(markers), SIZE, SIZE), np.float32)
    for number in range(dashes.joints.shape[1]):
        pictures = np.fmax(pictures, dashes[:, number, None, None].ink(points))
    for marker in markers.T:
        pictures = np.maximum(pictures, np.clip(MARKER_RADIUS + 0.5 - np.abs(points - marker[:, None, None]), 0, 1))
    return np.round(255 * pictures).astype(np.uint8)
