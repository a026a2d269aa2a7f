import dataclasses
import json
from pathlib import Path

import pytest

from latte_eqx import PAPER_ROWS, ModelConfig
from train.config import (
    Config,
    DataConfig,
    MeshConfig,
    OptimConfig,
    TaskConfig,
    from_dict,
    load_config,
    smoke,
    to_dict,
)
from train.main import main, parse

stem = lambda path: path.stem
CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.py"))


def test_the_eight_rows_of_the_paper_have_their_files():
    rows = {f"owt_{name}" for name in PAPER_ROWS}
    assert rows == {path.stem for path in CONFIGS if path.stem.startswith("owt_")}
    for path in CONFIGS:
        if path.stem.startswith("owt_"):
            config = load_config(path)
            assert config.model == PAPER_ROWS[path.stem.removeprefix("owt_")]
            assert (config.steps, config.data.batch_size, config.data.seq) == (122_070, 64, 1024)


@pytest.mark.parametrize("path", CONFIGS, ids=stem)
def test_docstrings_tell_what_a_run_is(path):
    text = path.read_text().split('"""')[1]
    for word in ("Parameters:", f"--config configs/{path.name}", "Cost:"):
        assert word in text
    # Runs of the paper give its number.
    assert ("Paper: perplexity" in text) == path.stem.startswith("owt_")


@pytest.mark.parametrize("path", [path for path in CONFIGS if load_config(path).task == TaskConfig()], ids=stem)
def test_smoke_copies_keep_the_kind_of_model(path):
    config = load_config(path)
    small = smoke(config, directory=Path("data"))
    for name in ("mixer", "feed", "style", "positions", "latent_proj", "rotary_base"):
        assert getattr(small.model, name) == getattr(config.model, name)
    assert small.steps <= 300
    assert small.model.dim <= 128


def test_variants_are_named_with_the_file():
    lra = CONFIGS[0].with_name("lra.py")
    text, image = (load_config(Path(f"{lra}:{name}")) for name in ("text_latte_cpu", "image_latte_r_swa"))
    assert (text.task.kind, text.model.mixer, text.model.causal, text.data.seq) == ("classify", "latte", False, 512)
    assert (image.task.num_classes, image.model.rotary_base, image.optim.weight_decay) == (10, None, 0.05)
    assert parse(["--config", f"{lra}:text_latte_cpu"]).workdir == Path("runs/lra_text_latte_cpu")
    with pytest.raises(ValueError, match=r"variant must be one of listops_latte, .*, got 'poetry_latte'"):
        load_config(Path(f"{lra}:poetry_latte"))
    with pytest.raises(ValueError, match=r"owt_latte.py must be named without a variant, since it has none, got 'big'"):
        load_config(Path(f"{CONFIGS[0].with_name('owt_latte.py')}:big"))
    with pytest.raises(ValueError, match="`--smoke` must be for a config of text"):
        smoke(text, directory=Path("data"))


def test_tasks_have_the_sizes_of_the_paper():
    """Layers, heads, latents, width, learning rate, rows, decay, dropout: the paper's table of hyperparameters."""
    table = {
        "listops": (6, 4, 40, 128, 1e-3, 64, 0.01, 0.1, 2048),
        "text": (6, 4, 256, 256, 1e-3, 32, 0.05, 0.1, 4000),
        "retrieval": (6, 4, 40, 128, 1e-4, 32, 0.01, 0.1, 4000),
        "image": (6, 4, 40, 512, 1e-3, 32, 0.05, 0.1, 1024),
        "pathfinder": (6, 4, 256, 256, 1e-3, 64, 0.03, 0.2, 1024),
    }
    for task, want in table.items():
        config = load_config(Path(f"{CONFIGS[0].with_name('lra.py')}:{task}_latte_r_swa"))
        model, optim = config.model, config.optim
        sizes = model.num_layers, model.num_heads, model.num_latents, model.dim
        training = optim.peak_lr, config.data.batch_size, optim.weight_decay, model.dropout, config.data.seq
        assert (*sizes, *training) == want


def test_json_and_back():
    config = Config(data=DataConfig(directory=Path("a/b")), mesh=MeshConfig(data=2), spike_factor=2.0)
    config = dataclasses.replace(config, task=TaskConfig(groups=(3, 17)))
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
        parse(["--config", str(CONFIGS[0].with_name("owt_latte.py")), "--help"])
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
