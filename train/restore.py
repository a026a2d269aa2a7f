"""Open a run to look at what it has learned."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from data.prepared import read_manifest
from data.tokenizer import AnyTokenizer, PretrainedTokenizer, load_tokenizer
from latte_eqx import LanguageModel
from latte_eqx.pretrained import load
from train.checkpoint import Checkpoints
from train.config import Config, from_dict
from train.fsdp import make_mesh
from train.step import Trainer, TrainState, make_trainer
from train.workdir import WorkDirectory


class Run(NamedTuple):
    """A run as it stands at one of its checkpoints."""

    config: Config
    trainer: Trainer
    state: TrainState
    step: int
    tokenizer: str


def restore_run(path: Path, *, step: int | None = None, change: Callable[[Config], Config] | None = None) -> Run:
    """Restore a checkpoint of a work directory, by default the newest; a run may be writing there meanwhile.

    What `change` returns takes the place of the run's config; its arrays must stay what they are.
    """
    config, trainer, checkpoints, tokenizer = _open(path, change)
    if step is not None and step not in checkpoints.steps():
        raise ValueError(f"`step` must be one of {checkpoints.steps()}, the checkpoints in {path}, got {step}.")
    if step is None:
        restored = checkpoints.restore(trainer.abstract_state)
    else:
        restored = checkpoints.restore_step(step, trainer.abstract_state)
    if restored is None:
        raise FileNotFoundError(f"The run in {path} must have a checkpoint, got none yet.")
    checkpoints.close()
    state, meta = restored
    return Run(config, trainer, state, meta["step"], tokenizer)


def restore_every(path: Path) -> Iterator[Run]:
    """Yield a run as it stood at each of the checkpoints that were kept, oldest first."""
    config, trainer, checkpoints, tokenizer = _open(path, None)
    if not checkpoints.steps():
        raise FileNotFoundError(f"The run in {path} must have a checkpoint, got none yet.")
    for step in checkpoints.steps():
        state, meta = checkpoints.restore_step(step, trainer.abstract_state)
        yield Run(config, trainer, state, meta["step"], tokenizer)
    checkpoints.close()


class TrainedModel(NamedTuple):
    """A language model, what it reads and writes, and a text for it to continue."""

    model: LanguageModel
    tokenizer: AnyTokenizer
    prompt: str


def load_model(model: Path | None, workdir: Path | None, *, step: int | None = None) -> TrainedModel:
    """Read a pretrained model, or restore a run."""
    if (model is None) == (workdir is None):
        raise ValueError("Either `--workdir` or `--model` must be given, got both or neither.")
    if model is not None and step is not None:
        raise ValueError(f"`--step` must come with `--workdir`, got --model {model}.")
    if workdir is not None:
        run = restore_run(workdir, step=step)
        print(f"step {run.step} of {workdir}", file=sys.stderr)
        return TrainedModel(run.trainer.language_model(run.state), load_tokenizer(run.tokenizer), run.config.prompt)
    assert model is not None
    pretrained = load(model)
    if pretrained.tokenizer is None:
        raise ValueError(f"{model} must come with a tokenizer, got none.")
    return TrainedModel(pretrained.model, PretrainedTokenizer(str(model), pretrained.tokenizer), "")


def begin_run(config: Config) -> Run:
    """Return the run of a config before its first step: of a pretrained model, what it begins from."""
    trainer = make_trainer(config, make_mesh(config.mesh))
    return Run(config, trainer, trainer.init(), 0, _tokenizer(config))


def read_config(path: Path) -> Config:
    """Return the config of the run in a work directory."""
    values = WorkDirectory(path, None).read_config()
    if values is None:
        raise FileNotFoundError(f"`workdir` must hold a run, got {path}, which has no config.json.")
    return from_dict(Config, values)


def _open(path: Path, change: Callable[[Config], Config] | None) -> tuple[Config, Trainer, Checkpoints, str]:
    config = read_config(path)
    if change is not None:
        config = change(config)
    checkpoints = Checkpoints(WorkDirectory(path, None).checkpoints, every=config.checkpoint.every, read_only=True)
    return config, make_trainer(config, make_mesh(config.mesh)), checkpoints, _tokenizer(config)


def _tokenizer(config: Config) -> str:
    if config.data.directory is None:
        raise ValueError("A run must name its data, got no `data.directory`.")
    return read_manifest(config.data.directory).tokenizer
