"""Train a model, on text or for a task.

    python -m train.main --config configs/owt_latte_r_swa.py --smoke
    python -m train.main --config configs/owt_latte_r_swa.py --data.directory prepared/openwebtext

The same command goes on where a run was left. Every field of the config can be changed: `--optim.peak-lr 1e-3`.
"""

import argparse
import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro
from jax.experimental import multihost_utils

from data import CORPUS
from data.prepare import prepare_text
from data.prepared import Manifest, read_manifest
from data.tokenizer import load_tokenizer
from train.config import Config, config_name, load_config, smoke, to_dict
from train.console import plain_errors
from train.generate import write_sample
from train.loop import train
from train.metrics import Sink, TensorBoardSink, WandbSink
from train.plot import plot_losses
from train.workdir import WorkDirectory, differences, open_workdir

# Options of glibc's mallopt, as its malloc.h numbers them.
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """Train a model, or go on where a run was left."""

    config: Path | None = None
    """A file with a function `get_config() -> Config`; FILE:VARIANT where it takes a variant."""
    workdir: Path | None = None
    """Where checkpoints, metrics and samples go; by default runs/<name of the config>[_smoke]."""
    smoke: bool = False
    """Train a copy of the config that fits a CPU, on the corpus that comes with the code: minutes instead of days."""
    fresh: bool = False
    """Begin anew; refused where there is a run already."""
    overwrite: bool = False
    """With --fresh: move the run that is there aside."""
    tensorboard: bool = False
    """Copy the metrics to TensorBoard files in the work directory."""
    wandb: str | None = None
    """Copy the metrics to this project of Weights & Biases."""
    profile: bool = False
    """Write a trace of a few steps into the work directory, to look at with xprof."""
    distributed: bool = False
    """Be one of several processes, one for each machine. SLURM, Open MPI, GKE and TPU pods say the rest."""
    coordinator: str | None = None
    """Elsewhere, with --distributed: HOST:PORT at which the first process can be reached."""
    num_processes: int | None = None
    """Elsewhere, with --distributed: how many processes there are."""
    process_id: int | None = None
    """Elsewhere, with --distributed: which of them this is, from 0."""
    run: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def parse(arguments: Sequence[str]) -> CommandLine:
    """Read the command line; what it says goes over what the config file says."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path)
    first.add_argument("--smoke", action="store_true")
    first.add_argument("--workdir", type=Path)
    known, _ = first.parse_known_args(arguments)
    config = Config() if known.config is None else load_config(known.config)
    name = "run" if known.config is None else config_name(known.config)
    workdir = known.workdir or Path("runs") / (f"{name}_smoke" if known.smoke else name)
    if known.smoke:
        config = smoke(config, directory=workdir.absolute() / "data")
    default = CommandLine(config=known.config, workdir=workdir, smoke=known.smoke, run=config)
    command = tyro.cli(CommandLine, args=list(arguments), default=default, description=__doc__)
    if command.run.data.directory is None:
        return command
    # The run may be looked at from elsewhere.
    data = replace(command.run.data, directory=command.run.data.directory.absolute())
    return replace(command, run=replace(command.run, data=data))


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, then show what came of it."""
    arguments = sys.argv[1:] if arguments is None else arguments
    command = parse(arguments)
    if command.config is None:
        sys.exit("`--config` must name a file, such as configs/owt_latte_r_swa.py; --help lists what else there is.")
    config, path = command.run, command.workdir
    assert path is not None
    if command.distributed:
        # A lost process is noticed after this many seconds; the others then stop, and a restart goes on from disk.
        where = (command.coordinator, command.num_processes, command.process_id)
        jax.distributed.initialize(*where, heartbeat_timeout_seconds=30)
    is_main = jax.process_index() == 0
    _use_compilation_cache()
    if jax.default_backend() == "cpu":
        _keep_freed_memory()
    with open_workdir(path, fresh=command.fresh, overwrite=command.overwrite, is_main=is_main) as workdir:
        if command.smoke and is_main:
            _prepare_corpus(workdir.path / "data")
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("work directory")
        _check_data(config)
        _show_config(config, workdir.read_config())
        sinks = _sinks(command, config, workdir) if is_main else []
        trainer, state, position = train(config, workdir, sinks=sinks, profile=command.profile)
        if is_main:
            plot_losses(workdir.metrics, workdir.loss_curve)
            print(f"loss curve: {workdir.loss_curve}")
        assert config.data.directory is not None
        manifest = read_manifest(config.data.directory)
        if manifest.examples is None and jax.process_count() == 1 and position.step == config.steps:
            model, prompt = trainer.language_model(state), config.prompt
            write_sample(model, load_tokenizer(manifest.tokenizer), prompt, seed=config.seed, path=workdir.samples)
    if is_main:
        verb = "is complete; the same command shows it again" if position.step == config.steps else "can go on with"
        print(f"\nThis run {verb}:\n  python -m train.main {' '.join(arguments)}")


def _use_compilation_cache() -> None:
    """Keep compiled programs between runs, where JAX is not told otherwise."""
    if not jax.config.values["jax_compilation_cache_dir"]:
        jax.config.update("jax_compilation_cache_dir", str(Path.home() / ".cache" / "latte_eqx"))


def _keep_freed_memory() -> None:
    """Have glibc keep what a step frees for the next step, which on a CPU is then faster.

    By default it returns large arrays to the system, which has to map and clear their pages anew in every step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_ARENA_MAX, 1)):
            mallopt(option, value)


def _prepare_corpus(directory: Path) -> None:
    if not (directory / "manifest.json").exists():
        prepare_text([CORPUS], directory, tokenizer="bytes")


def _check_data(config: Config) -> None:
    if config.data.directory is None:
        sys.exit(
            "`data.directory` must name prepared data, got none. Two ways on:\n"
            "  python -m data.prepare openwebtext --out DIR, and then --data.directory DIR\n"
            "  --smoke, which trains a small copy on the corpus that comes with the code"
        )
    manifest = read_manifest(config.data.directory)
    _check_task(config, manifest)
    needed = manifest.vocab_size
    if config.model.vocab_size < needed:
        got = f"model.vocab_size={config.model.vocab_size}"
        sys.exit(f"`model.vocab_size` must be at least {needed}, that of {config.data.directory}, got {got}.")


def _check_task(config: Config, manifest: Manifest) -> None:
    """End unless the data are such as the task asks for."""
    examples, wanted = manifest.examples, {"kind": "next_token"}
    if examples is not None and examples.num_classes:
        kind = "classify" if examples.num_documents == 1 else "classify_pairs"
        wanted = {"kind": kind, "num_classes": examples.num_classes, "is_numeric": examples.is_numeric}
    for name, value in wanted.items():
        if getattr(config.task, name) != value:
            got = f"task.{name}={getattr(config.task, name)!r}"
            sys.exit(f"`task.{name}` must be {value!r} for the data in {config.data.directory}, got {got}.")


def _show_config(config: Config, last: dict[str, Any] | None) -> None:
    """Print the config, and what differs from the last time."""
    if jax.process_index() == 0:
        new = to_dict(config)
        print("\n".join(differences({}, new)).replace("nothing -> ", ""))
        for line in differences(last or new, new):
            print(f"differs from the last time: {line}")


def _sinks(command: CommandLine, config: Config, workdir: WorkDirectory) -> list[Sink]:
    sinks: list[Sink] = []
    if command.tensorboard:
        sinks.append(TensorBoardSink(workdir.path / "tensorboard"))
    if command.wandb is not None:
        sinks.append(WandbSink(command.wandb, to_dict(config)))
    return sinks


if __name__ == "__main__":
    with plain_errors():
        main()
