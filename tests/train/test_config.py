import dataclasses
import json
from pathlib import Path

import pytest

from latte_eqx import PAPER_ROWS, ModelConfig
from train.config import Config, DataConfig, MeshConfig, OptimConfig, from_dict, load_config, smoke, to_dict
from train.main import main, parse

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.py"))


def test_the_eight_rows_of_the_paper_have_their_files():
    rows = {f"owt_{name}" for name in PAPER_ROWS}
    assert rows == {path.stem for path in CONFIGS if path.stem.startswith("owt_")}
    for path in CONFIGS:
        if path.stem.startswith("owt_"):
            config = load_config(path)
            assert config.model == PAPER_ROWS[path.stem.removeprefix("owt_")]
            assert (config.steps, config.data.batch_size, config.data.seq) == (122_070, 64, 1024)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_docstrings_tell_what_a_run_is(path):
    text = path.read_text().split('"""')[1]
    for word in ("Parameters:", f"--config configs/{path.name}", "Cost:"):
        assert word in text
    # Runs of the paper give its number.
    assert ("Paper: perplexity" in text) == path.stem.startswith("owt_")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_smoke_copies_keep_the_kind_of_model(path):
    config = load_config(path)
    small = smoke(config, directory=Path("data"))
    for name in ("mixer", "feed", "style", "positions", "latent_proj", "rotary_base"):
        assert getattr(small.model, name) == getattr(config.model, name)
    assert small.steps <= 300
    assert small.model.dim <= 128


def test_json_and_back():
    config = Config(data=DataConfig(directory=Path("a/b")), mesh=MeshConfig(data=2), spike_factor=2.0)
    assert from_dict(Config, json.loads(json.dumps(to_dict(config)))) == config
    assert from_dict(Config, json.loads(json.dumps(to_dict(Config())))) == Config()


def test_the_command_line_goes_over_the_file(tmp_path):
    file = CONFIGS[0]
    command = parse(["--config", str(file), "--optim.peak-lr", "1e-3", "--model.dim", "96", "--data.pack", "documents"])
    want = load_config(file)
    want = dataclasses.replace(
        want,
        optim=dataclasses.replace(want.optim, peak_lr=1e-3),
        model=dataclasses.replace(want.model, dim=96),
        data=dataclasses.replace(want.data, pack="documents"),
    )
    assert command.run == want
    assert command.workdir == Path("runs") / file.stem
    smoked = parse(["--config", str(file), "--smoke"])
    assert smoked.workdir == Path("runs") / f"{file.stem}_smoke"
    assert smoked.run.data.directory == Path.cwd() / "runs" / f"{file.stem}_smoke" / "data"
    assert parse(["--config", str(file), "--data.directory", "mine"]).run.data.directory == Path.cwd() / "mine"


def test_help_shows_every_field_with_its_default(capsys):
    with pytest.raises(SystemExit) as stop:
        parse(["--config", str(CONFIGS[0]), "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for kind, prefix in ((Config, ""), (OptimConfig, "optim."), (DataConfig, "data."), (ModelConfig, "model.")):
        for field in dataclasses.fields(kind):
            if field.name not in ("model", "data", "optim", "mesh", "checkpoint"):
                assert f"--{prefix}{field.name.replace('_', '-')}" in text
    assert "122" in text or "8000000000" in text


def test_unknown_fields_suggest_the_right_one(capsys):
    with pytest.raises(SystemExit) as stop:
        parse(["--config", str(CONFIGS[0]), "--optim.peek-lr", "1e-3"])
    assert stop.value.code != 0
    captured = capsys.readouterr()
    assert "--optim.peak-lr" in captured.out + captured.err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(tokens=0), "`tokens` must be positive, got tokens=0"),
        (dict(data=DataConfig(batch_size=0)), r"`data.batch_size` must be positive, got 0"),
        (dict(optim=OptimConfig(accumulate=3)), "`optim.accumulate` must be positive and divide"),
        (dict(mesh=MeshConfig(seq=2)), "`mesh.seq` must be 1"),
        (dict(model=PAPER_ROWS["transformer_pp"], data=DataConfig(seq=2048)), "`data.seq` must be at most"),
    ],
)
def test_impossible_runs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Config(**changes)


def test_files_that_are_no_configs_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="must name a file"):
        load_config(tmp_path / "nothing.py")
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(ValueError, match="must define `get_config"):
        load_config(tmp_path / "empty.py")


def test_without_data_two_ways_on_are_named(tmp_path):
    with pytest.raises(SystemExit) as stop:
        main(["--config", str(CONFIGS[0]), "--workdir", str(tmp_path / "run")])
    assert "python -m data.prepare openwebtext" in str(stop.value)
    assert "--smoke" in str(stop.value)


def test_without_a_config_the_command_says_so():
    with pytest.raises(SystemExit, match="`--config` must name a file"):
        main([])
