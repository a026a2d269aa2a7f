"""The commands that prepare the tasks of the Long Range Arena."""

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro

from data import listops, pathfinder, released
from data.prepared import Examples, Manifest, open_split
from data.preparing import Example, prepare_examples
from data.tokenizer import AnyTokenizer, Vocabulary, load_tokenizer
from data.writing import check_free

SPLITS = "train", "valid", "test"
PIXELS = Vocabulary("pixels", 257)


@dataclass(frozen=True)
class Counts:
    """How many examples to draw."""

    num_train: int
    """Examples to train on."""
    num_valid: int
    """Examples to validate on."""
    num_test: int
    """Examples to test on."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.num_train + self.num_valid + self.num_test

    def splits(self) -> Iterator[str]:
        """Yield the split of each example. The rare ones come first: they stay the same when more train."""
        for split, count in (("test", self.num_test), ("valid", self.num_valid), ("train", self.num_train)):
            yield from itertools.repeat(split, count)


LISTOPS_COUNTS = Counts(96_000, 2_000, 2_000)
LISTOPS_BOUNDS = listops.Bounds()
PATHFINDER_COUNTS = Counts(160_000, 20_000, 20_000)


@tyro.conf.configure(tyro.conf.OmitArgPrefixes)
def prepare_listops(
    out: Path,
    *,
    source: Path | None = None,
    counts: Counts = LISTOPS_COUNTS,
    bounds: listops.Bounds = LISTOPS_BOUNDS,
    seed: int = 0,
    overwrite: bool = False,
    quiet: bool = False,
) -> Manifest:
    """Prepare ListOps: expressions such as [MAX 2 9 [MIN 4 7 X 0 X, to be classified by their values.

    They are drawn as those of the release were, and no two are equal; or the release is read. Both give the same 15
    kinds of tokens: 0 to 9, [MIN, [MAX, [MED, [SM, and X, which closes.

    Args:
        out: The directory to make.
        source: The directory with the released basic_train.tsv, basic_val.tsv and basic_test.tsv. Without it,
            expressions are drawn.
        counts: How many to draw.
        bounds: What to draw.
        seed: Decides what is drawn.
        overwrite: Replace prepared data that is there already.
        quiet: Show no progress.
    """
    check_free(out, overwrite=overwrite)
    if source is not None:
        _check_unused(counts=(counts, LISTOPS_COUNTS), bounds=(bounds, LISTOPS_BOUNDS), seed=(seed, 0))
        found, origin = released.read_listops(source), {"source": str(source)}
    else:
        expressions = zip(counts.splits(), listops.draw_expressions(bounds, seed), strict=False)
        found = released.Found(counts.total, (Example(split, [x], value) for split, (x, value) in expressions))
        origin = {**asdict(counts), **asdict(bounds), "seed": seed}
    return _prepare("lra-listops", found, out, origin, listops.VOCABULARY, Examples(10), overwrite, quiet)


def prepare_reviews(
    out: Path, *, source: Path, valid_fraction: float = 0.1, seed: int = 0, overwrite: bool = False, quiet: bool = False
) -> Manifest:
    """Prepare IMDb as bytes: 25,000 reviews to train and to validate on, 25,000 to test, good ones and bad ones.

    The release has no reviews to validate on: a part of each class is set apart from those to train on.

    Args:
        out: The directory to make.
        source: The directory aclImdb of the release, with train/pos/*.txt, train/neg/*.txt, test/pos/*.txt and
            test/neg/*.txt; or one with train.jsonl and test.jsonl, lines like {"text": "...", "label": 0 or 1}.
        valid_fraction: The part to validate on.
        seed: Decides which.
        overwrite: Replace prepared data that is there already.
        quiet: Show no progress.
    """
    check_free(out, overwrite=overwrite)
    found = released.read_reviews(source, valid_fraction, seed)
    origin = {"source": str(source), "valid_fraction": valid_fraction, "seed": seed}
    return _prepare("lra-text", found, out, origin, load_tokenizer("bytes"), Examples(2), overwrite, quiet)


def prepare_cifar(
    out: Path, *, source: Path, valid_fraction: float = 0.1, seed: int = 0, overwrite: bool = False, quiet: bool = False
) -> Manifest:
    """Prepare CIFAR-10 as pixels in grey, row by row: 50,000 pictures to train and to validate on, 10,000 to test.

    Args:
        out: The directory to make.
        source: The directory cifar-10-batches-bin of the release, with data_batch_1.bin to data_batch_5.bin and
            test_batch.bin; or one with cifar10.npz, arrays train_x and test_x of (pictures, 32, 32, 3) in 8 bits,
            train_y and test_y. The pickled version is not read, because reading it could run any program.
        valid_fraction: The part of each class to validate on.
        seed: Decides which.
        overwrite: Replace prepared data that is there already.
        quiet: Show no progress.
    """
    check_free(out, overwrite=overwrite)
    found = released.read_cifar(source, valid_fraction, seed)
    origin = {"source": str(source), "valid_fraction": valid_fraction, "seed": seed}
    return _prepare("lra-image", found, out, origin, PIXELS, Examples(10), overwrite, quiet)


@tyro.conf.configure(tyro.conf.OmitArgPrefixes)
def prepare_pathfinder(
    out: Path,
    *,
    source: Path | None = None,
    counts: Counts = PATHFINDER_COUNTS,
    seed: int = 0,
    contact_sheet: Path | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> Manifest:
    """Prepare Pathfinder: pictures of dashed curves as pixels, row by row. Are the two marked ends those of one curve?

    They are drawn after the description of the hard task on 32 x 32 pixels; or the release is read.

    Args:
        out: The directory to make.
        source: The directory with the released curv_contour_length_14, which holds metadata/*.npy and the pictures that
            these list. Empty files are left out and counted. Without it, pictures are drawn.
        counts: How many to draw.
        seed: Decides what is drawn.
        contact_sheet: A file, such as sheet.png, to show the first 64 examples in.
        overwrite: Replace prepared data that is there already.
        quiet: Show no progress.
    """
    check_free(out, overwrite=overwrite)
    if source is not None:
        _check_unused(counts=(counts, PATHFINDER_COUNTS), seed=(seed, 0))
        found, num_empty = released.read_pathfinder(source)
        origin = {"source": str(source), "empty_files_left_out": num_empty}
        if num_empty and not quiet:
            print(f"{num_empty:,} pictures are empty files, and are left out.")
    else:
        pictures = zip(counts.splits(), pathfinder.draw_pictures(seed), strict=False)
        found = released.Found(counts.total, (Example(split, [x], label) for split, (x, label) in pictures))
        origin = {**asdict(counts), "seed": seed}
    kind = Examples(2, is_numeric=True)
    manifest = _prepare("lra-pathfinder", found, out, origin, PIXELS, kind, overwrite, quiet)
    if contact_sheet is not None:
        draw_contact_sheet(out, contact_sheet)
    return manifest


def draw_contact_sheet(directory: Path, path: Path) -> None:
    """Show the first 64 training pictures of a prepared directory, with their classes."""
    # Slow to import, and needed for this alone.
    from matplotlib.figure import Figure

    prepared = open_split(directory, "train")
    assert prepared.labels is not None
    figure = Figure((12, 12.6))
    for axes, start, label in zip(figure.subplots(8, 8).flat, prepared.offsets, prepared.labels, strict=False):
        axes.imshow(prepared.tokens[start : start + 1024].reshape(32, 32), cmap="gray", vmin=0, vmax=255)
        axes.set_title(label, fontsize=8, pad=2)
    for axes in figure.axes:
        axes.axis("off")
    figure.subplots_adjust(0, 0, 1, 0.98, 0.03, 0.1)
    figure.savefig(path)


def prepare_retrieval(out: Path, *, source: Path, overwrite: bool = False, quiet: bool = False) -> Manifest:
    """Prepare pairs of papers of the ACL Anthology Network as bytes: does one cite the other?

    Args:
        out: The directory to make.
        source: The directory with the released new_aan_pairs.train.tsv, new_aan_pairs.eval.tsv and
            new_aan_pairs.test.tsv.
        overwrite: Replace prepared data that is there already.
        quiet: Show no progress.
    """
    check_free(out, overwrite=overwrite)
    found, origin = released.read_retrieval(source), {"source": str(source)}
    kind = Examples(2, num_documents=2)
    return _prepare("lra-retrieval", found, out, origin, load_tokenizer("bytes"), kind, overwrite, quiet)


def _prepare(
    name: str,
    found: released.Found,
    out: Path,
    origin: dict[str, Any],
    vocabulary: AnyTokenizer | Vocabulary,
    kind: Examples,
    overwrite: bool,
    quiet: bool,
) -> Manifest:
    return prepare_examples(
        found.examples,
        out,
        vocabulary=vocabulary,
        kind=kind,
        splits=SPLITS,
        source={"kind": name, **origin},
        total=found.total,
        overwrite=overwrite,
        quiet=quiet,
    )


def _check_unused(**options: tuple[Any, Any]) -> None:
    for name, (given, default) in options.items():
        if given != default:
            raise ValueError(f"`{name}` must be left out with `source`, because nothing is drawn then, got {given}.")
