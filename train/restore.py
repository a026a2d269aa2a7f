"""Open a run to look at what it has learned."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from data.prepared import read_manifest
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


def _open(path: Path, change: Callable[[Config], Config] | None) -> tuple[Config, Trainer, Checkpoints, str]:
    workdir = WorkDirectory(path, None)
    values = workdir.read_config()
    if values is None:
        raise FileNotFoundError(f"`workdir` must hold a run, got {path}, which has no config.json.")
    config = from_dict(Config, values)
    if change is not None:
        config = change(config)
    if config.data.directory is None:
        raise ValueError(f"The run in {path} must name its data, got no `data.directory`.")
    checkpoints = Checkpoints(workdir.checkpoints, every=config.checkpoint.every, read_only=True)
    tokenizer = read_manifest(config.data.directory).tokenizer
    return config, make_trainer(config, make_mesh(config.mesh)), checkpoints, tokenizer
