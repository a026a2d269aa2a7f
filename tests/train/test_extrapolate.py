"""Trained models on rows longer than those they were trained on."""

import json

import pytest

from tests.train.test_main import ROWS, SEQ, arguments
from train import extrapolate
from train.config import TaskConfig
from train.evaluate import evaluate_stream
from train.main import main
from train.restore import restore_run


@pytest.fixture(scope="module")
def workdirs(tmp_path_factory):
    found = []
    for config in ("owt_latte_r_swa", "owt_transformer_pp"):
        found.append(tmp_path_factory.mktemp("runs") / config)
        main(arguments(found[-1], config=config, steps=4))
    return tuple(found)


def test_rows_of_every_length(workdirs, tmp_path):
    extrapolate.main(extrapolate.Arguments(workdirs=workdirs, out=tmp_path, factors=(1, 4)))
    records = {(r["model"], r["seq"]): r for r in json.loads((tmp_path / "results.json").read_text())}
    latte, full = (path.name for path in workdirs)
    assert set(records) == {
        (latte, SEQ),
        (latte, 4 * SEQ),
        (full, SEQ),
        (full, 4 * SEQ),
        (f"{full} with YaRN", 4 * SEQ),
    }
    for record in records.values():
        buckets = record["buckets"]
        assert sum(bucket["targets"] for bucket in buckets) == record["tokens"]
        mean = sum(bucket["targets"] * bucket["loss"] for bucket in buckets) / record["tokens"]
        assert mean == pytest.approx(record["loss"], rel=1e-5)
        assert [bucket["from"] for bucket in buckets] == [0, *extrapolate.bucket_edges(SEQ, record["seq"])]
    assert records[full, 4 * SEQ]["loss"] != records[f"{full} with YaRN", 4 * SEQ]["loss"]
    table = (tmp_path / "results.md").read_text()
    assert all(f"{record['perplexity']:.3f}" in table for record in records.values())
    assert (tmp_path / "results.png").stat().st_size > 1000

    run = restore_run(workdirs[0])
    assert run.config.data.directory is not None
    trained = evaluate_stream(run, run.config.data.directory, "valid")
    assert trained["loss"] == pytest.approx(records[latte, SEQ]["loss"], rel=1e-5)


def test_longer_rows_keep_the_tokens_of_a_batch(workdirs):
    config = restore_run(workdirs[1]).config
    changed = extrapolate.longer(config, seq=2 * SEQ, edges=(3,), yarn_from=SEQ)
    assert (changed.data.seq, changed.data.batch_size) == (2 * SEQ, max(ROWS // 2, 8))
    assert (changed.model.rotary_scale, changed.model.rotary_length) == (2, SEQ)
    assert changed.task == TaskConfig(groups=(3,))


def test_bucket_edges():
    assert extrapolate.bucket_edges(512, 512) == (64, 128, 256)
    assert extrapolate.bucket_edges(512, 4096) == (64, 128, 256, 512, 1024, 2048)
    assert extrapolate.bucket_edges(4, 12) == (1, 2, 4, 8)


@pytest.mark.parametrize("wrong", [{"factors": ()}, {"factors": (0, 1)}, {"workdirs": ()}, {"trained": 0}])
def test_bad_arguments(wrong, tmp_path):
    with pytest.raises(ValueError, match=f"`{next(iter(wrong))}` must"):
        extrapolate.Arguments(**{"workdirs": (tmp_path,), "out": tmp_path} | wrong)
