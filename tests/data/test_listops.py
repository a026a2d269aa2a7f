"""ListOps: what is drawn, and the released files."""

import itertools
import re
import statistics

import numpy as np
import pytest

from data.listops import TOKENS, Bounds, draw_expressions
from data.loader import open_rows
from data.lra import Counts, prepare_listops
from data.prepare import main
from data.prepared import fingerprint, open_split, verify

LONG, SHORT = Bounds(), Bounds(min_length=5, max_length=100)
INNERMOST = re.compile(r"\[(MIN|MAX|MED|SM) ([0-9 ]+) X")
OPERATIONS = {
    "MIN": min,
    "MAX": max,
    "MED": lambda digits: int(statistics.median(digits)),
    "SM": lambda digits: sum(digits) % 10,
}


def value_of(text):
    """Replace operations on digits by their values until a digit is left."""
    while not text.isdigit():
        text, replaced = INNERMOST.subn(lambda found: str(OPERATIONS[found[1]](list(map(int, found[2].split())))), text)
        assert replaced
    return int(text)


def depth_of(tokens):
    """Return the levels of an expression whose innermost arguments are digits."""
    return 1 + max(itertools.accumulate((text[0] == "[") - (text == "X") for text in tokens))


def texts_of(tokens):
    return [TOKENS[token] for token in tokens.tolist()]


def draw(bounds, count, seed=0):
    return [(texts_of(tokens), value) for tokens, value in itertools.islice(draw_expressions(bounds, seed), count)]


def test_the_evaluator_of_this_test():
    assert value_of("[MAX 2 9 [MIN 4 7 X 0 X") == 9
    assert value_of("[SM 8 7 [MED 1 2 4 9 X X") == (8 + 7 + 3) % 10
    assert depth_of(["[MAX", "2", "[MIN", "4", "7", "X", "0", "X"]) == 3


@pytest.mark.parametrize(("bounds", "count"), [(LONG, 300), (SHORT, 3000), (Bounds(5, 100, 4, 3), 500)])
def test_values_and_bounds(bounds, count):
    drawn = draw(bounds, count)
    assert all(value == value_of(" ".join(texts)) for texts, value in drawn)
    assert all(bounds.min_length < len(texts) < bounds.max_length for texts, _ in drawn)
    assert all(depth_of(texts) <= bounds.max_depth for texts, _ in drawn)
    assert max(depth_of(texts) for texts, _ in drawn) == bounds.max_depth


def test_every_operation_has_its_arguments():
    for texts, _ in draw(SHORT, 2000):
        counts = []
        for text in texts:
            if text == "X":
                assert 2 <= counts.pop() <= SHORT.max_args
            elif counts:
                counts[-1] += 1
            if text[0] == "[":
                counts.append(0)
        assert not counts


def test_values_and_tokens_are_spread():
    drawn = draw(LONG, 2000)
    shares = np.bincount([value for _, value in drawn], minlength=10) / len(drawn)
    # The extremes are likely, as they are in the release.
    assert shares.min() > 0.04
    assert shares.max() < 0.22
    texts = list(itertools.chain.from_iterable(texts for texts, _ in drawn))
    kinds, counts = np.unique(texts, return_counts=True)
    by_kind = dict(zip(kinds.tolist(), counts.tolist(), strict=True))
    assert set(by_kind) == set(TOKENS)
    for group in ([str(i) for i in range(10)], TOKENS[10:14]):
        assert max(by_kind[kind] for kind in group) < 1.03 * min(by_kind[kind] for kind in group)


def test_trees_are_those_of_the_definition():
    """Trees of any length have the mean length that the probabilities say."""
    # With so many arguments hardly any expression is drawn twice, which would lengthen the mean.
    lengths = [len(texts) for texts, _ in draw(Bounds(1, 10**6, max_depth=4, max_args=30), 6000)]
    nodes = np.array([1, 16, 16 * 4, 16 * 4 * 4])
    operations = np.array([1, 4, 16, 0])
    assert np.mean(lengths) == pytest.approx(np.sum(nodes + operations), rel=0.02)


def test_the_seed_decides():
    assert draw(SHORT, 5000) == draw(SHORT, 5000)
    assert draw(SHORT, 50, seed=1) != draw(SHORT, 50)


def test_no_expression_comes_twice(tmp_path):
    prepare_listops(tmp_path, counts=Counts(1500, 200, 200), bounds=Bounds(3, 7), quiet=True)
    texts = []
    for split, count in (("train", 1500), ("valid", 200), ("test", 200)):
        found = open_split(tmp_path, split)
        assert len(found.offsets) == count + 1
        texts += [" ".join(texts_of(found.tokens[a : b - 1])) for a, b in itertools.pairwise(found.offsets)]
    assert len(set(texts)) == 1900


def test_what_is_tested_on_does_not_depend_on_the_rest(tmp_path):
    for name, num_train in (("a", 10), ("b", 500)):
        prepare_listops(tmp_path / name, counts=Counts(num_train, 20, 20), bounds=SHORT, quiet=True)
    a, b = ([open_split(tmp_path / name, split) for split in ("valid", "test")] for name in "ab")
    assert all(np.array_equal(x.tokens, y.tokens) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("bounds", [Bounds(3, 5), Bounds(500, 2000, 2, 10)])
def test_an_end_where_there_are_no_more(bounds):
    with pytest.raises(ValueError, match="enough different expressions within"):
        draw(bounds, 10_000)


@pytest.mark.parametrize("bounds", [(5, 6), (-1, 10), (5, 100, 0), (5, 100, 10, 1)])
def test_impossible_bounds(bounds):
    with pytest.raises(ValueError, match="must be"):
        Bounds(*bounds)


def released_form(texts):
    """The brackets of the release, which join an operation and its arguments one by one."""
    if not texts[0].startswith("["):
        return texts[0], texts[1:]
    joined, rest = texts[0], texts[1:]
    while rest[0] != "X":
        argument, rest = released_form(rest)
        joined = f"( {joined} {argument} )"
    return f"( {joined} ] )", rest[1:]


def test_released_files_give_the_same_tokens(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    drawn = draw(SHORT, 60)
    for name, rows in (("test", drawn[:10]), ("val", drawn[10:20]), ("train", drawn[20:])):
        lines = [f"{released_form(texts)[0]}\t{value}\n" for texts, value in rows]
        (source / f"basic_{name}.tsv").write_text("Source\tTarget\n" + "".join(lines))
    assert "( ( ( [" in (source / "basic_test.tsv").read_text()
    main(["lra-listops", "--out", str(out), "--source", str(source), "--quiet"])
    prepare_listops(tmp_path / "drawn", counts=Counts(40, 10, 10), bounds=SHORT, quiet=True)
    assert fingerprint(out) == fingerprint(tmp_path / "drawn")
    assert (verify(out).vocab_size, verify(out).source["source"]) == (16, str(source))
    row = open_rows(out, "valid", seq=100, pack="concat")[3]
    assert texts_of(row["inputs"][row["mask"]]) == drawn[13][0]
    assert row["targets"] == drawn[13][1]


@pytest.mark.parametrize(
    ("line", "message"),
    [("( [MIN 1 ) ] )\t10", "Line 3 of .*basic_val.tsv must be like"), ("( [AVG 1 ) ] )\t1", r"KeyError\('\[AVG'\)")],
)
def test_damaged_files(tmp_path, line, message):
    for name in ("train", "val", "test"):
        (tmp_path / f"basic_{name}.tsv").write_text("Source\tTarget\n( ( [MIN 1 ) 2 ) ] )\t1\n")
    with (tmp_path / "basic_val.tsv").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=message):
        prepare_listops(tmp_path / "out", source=tmp_path, quiet=True)


def test_missing_files(tmp_path):
    (tmp_path / "basic_train.tsv").touch()
    command = ["lra-listops", "--out", str(tmp_path / "out"), "--quiet", "--source", str(tmp_path)]
    with pytest.raises(SystemExit, match=r"but there is no basic_val.tsv, basic_test.tsv: .* holds basic_train.tsv"):
        main(command)
    with pytest.raises(SystemExit, match="`seed` must be left out with `source`"):
        main([*command, "--seed", "1"])
