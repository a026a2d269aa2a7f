"""A run, from the first step or from where it was left, to the last."""

import math
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from data.loader import make_batches, open_rows, sequential_batches, state_at
from data.prepared import fingerprint, verify
from train.checkpoint import Checkpoints
from train.config import Config, to_dict
from train.console import Display
from train.flops import peak_flops, train_flops_per_token
from train.fsdp import make_mesh
from train.metrics import MetricsLog, Sink
from train.objective import Scores
from train.step import Batch, Trainer, TrainState, make_trainer
from train.workdir import WorkDirectory

# How many steps pass before a profile begins, when everything is compiled, and how many it sees.
PROFILE_AFTER, PROFILED_STEPS = 10, 5


class BadSteps(RuntimeError):
    """Step after step has a loss or gradient that is not finite, and going back once did not help."""


class DataChanged(RuntimeError):
    """The data are not those that the run began with."""


@dataclass(frozen=True)
class Position:
    """Where a run is: the step to do next, the batch it takes, and how often it went back."""

    step: int = 0
    batch: int = 0
    num_rollbacks: int = 0


def train(
    config: Config, workdir: WorkDirectory, *, sinks: list[Sink] | None = None, profile: bool = False
) -> tuple[Trainer, TrainState, Position]:
    """Train to the end, or until the machine is wanted back; return what came of it."""
    directory, is_main = config.data.directory, jax.process_index() == 0
    if directory is None:
        raise ValueError("`data.directory` must name prepared data, got none.")
    verify(directory)
    data_fingerprint = fingerprint(directory)
    trainer = make_trainer(config, make_mesh(config.mesh))
    kind: dict[str, Any] = dict(seq=config.data.seq, pack=config.data.pack)
    rows, valid_rows = open_rows(directory, "train", **kind), open_rows(directory, "valid", **kind)
    rates = _Rates(config)
    with (
        closing(_open_checkpoints(config, workdir)) as checkpoints,
        closing(_make_batches(config, rows)) as batches,
        _Preemption() as preemption,
    ):
        state, position = _begin(trainer, checkpoints, data_fingerprint)
        # Only now is it the config of this run: one that does not fit must not replace the one that does.
        workdir.write_config(to_dict(config))
        batches.set_state(state_at(position.batch, config.data.batch_size))
        with (
            closing(MetricsLog(workdir.metrics, step=position.step, sinks=sinks, is_main=is_main)) as log,
            Display(steps=config.steps, first_step=position.step, is_main=is_main) as display,
        ):
            if position.step:
                display.say(f"goes on from step {position.step} of {config.steps}")
            profiler = _Profiler(position.step + PROFILE_AFTER if profile else None, workdir.path / "profile")
            unread: dict[str, jax.Array] | None = None
            last: dict[str, float] = {}
            valid_loss: float | None = None

            def read() -> None:
                """Take the numbers of the last step; done one step late, so that the devices need not wait for it."""
                nonlocal unread, last
                if unread is None:
                    return
                last, unread = {name: float(value) for name, value in jax.device_get(unread).items()}, None
                log.write(read_step, **last, **rates.numbers(read_step))
                if read_step % config.log_every == 0 or read_step == config.steps:
                    display.show(read_step, rates.describe(last, valid_loss))
                else:
                    display.advance(read_step)

            read_step = position.step
            while position.step < config.steps:
                batch = trainer.put_batch(next(batches))
                profiler.tick(position.step)
                state, metrics = trainer.train_step(state, batch)
                position = replace(position, step=position.step + 1, batch=position.batch + 1)
                read()
                unread, read_step = metrics, position.step
                rates.count_step()

                if last.get("num_skipped_in_a_row", 0) >= config.max_skips:
                    read()
                    state, position = _go_back(trainer, checkpoints, position, batch, workdir, display, config)
                    batches.set_state(state_at(position.batch, config.data.batch_size))
                    last = {}
                    continue
                is_last = position.step == config.steps
                is_evaluated = position.step % config.eval_every == 0 or is_last
                if is_evaluated:
                    read()
                    with rates.pause():
                        valid_batches = sequential_batches(valid_rows, batch_size=config.data.batch_size)
                        scores = trainer.measure(state, islice(valid_batches, config.eval_batches))
                    valid_loss = scores.loss
                    log.write(position.step, **_validation(scores))
                    display.say(f"step {position.step}: {_describe_validation(config, scores)}")
                is_preempted = preemption.is_due(position.step)
                if checkpoints.due(position.step) or is_last or is_preempted:
                    read()
                    # A state in trouble is nothing to go back to.
                    if last["is_skipped"] and not (is_last or is_preempted):
                        continue
                    with rates.pause():
                        meta = _meta(position, data_fingerprint, config)
                        loss = valid_loss if is_evaluated else None
                        checkpoints.save(position.step, state, meta, loss=loss, force=True)
                if is_preempted and not is_last:
                    display.say(f"asked to stop: saved step {position.step}")
                    break
            read()
            profiler.stop()
        checkpoints.wait()
    return trainer, state, position


def _validation(scores: Scores) -> dict[str, float]:
    """Return the numbers of a validation, those of groups too if there are several."""
    groups = enumerate(scores.by_group()) if len(scores.losses) > 1 else ()
    of_groups = {f"valid_{name}_{i}": group[name] for i, group in groups for name in ("loss", "accuracy")}
    return {"valid_loss": scores.loss, "valid_accuracy": scores.accuracy, **of_groups}


def _describe_validation(config: Config, scores: Scores) -> str:
    loss = f"validation loss {scores.loss:.4f} nats per {'token' if config.task.kind == 'next_token' else 'example'}"
    if config.task.kind == "next_token" and not config.task.groups:
        return loss
    groups = ", ".join(f"{group['accuracy']:.1%}" for group in scores.by_group())
    return f"{loss}, accuracy {scores.accuracy:.1%}" + (f" (by group {groups})" if config.task.groups else "")


def _open_checkpoints(config: Config, workdir: WorkDirectory) -> Checkpoints:
    how = config.checkpoint
    return Checkpoints(workdir.checkpoints, every=how.every, keep=how.keep, keep_best=how.keep_best)


def _make_batches(config: Config, rows: Any) -> Any:
    how = config.data
    return make_batches(rows, batch_size=how.batch_size, seed=config.seed, num_workers=how.num_workers)


def _meta(position: Position, data_fingerprint: str, config: Config) -> dict[str, Any]:
    return {**position.__dict__, "data": data_fingerprint, "config": to_dict(config)}


def _begin(trainer: Trainer, checkpoints: Checkpoints, data_fingerprint: str) -> tuple[TrainState, Position]:
    """Restore the newest checkpoint that is whole, or start."""
    restored = checkpoints.restore(trainer.abstract_state)
    if restored is None:
        return trainer.init(), Position()
    state, meta = restored
    if meta["data"] != data_fingerprint:
        raise DataChanged(
            f"The run began with the data {meta['data']}, but `data.directory` now holds {data_fingerprint}. "
            "Give it the old data, or begin anew with --fresh and another --workdir."
        )
    return state, Position(meta["step"], meta["batch"], meta["num_rollbacks"])


def _go_back(
    trainer: Trainer,
    checkpoints: Checkpoints,
    position: Position,
    batch: Batch,
    workdir: WorkDirectory,
    display: Display,
    config: Config,
) -> tuple[TrainState, Position]:
    """Return to the last checkpoint, past the bad batches; the second time, stop and leave what shows the fault."""
    bad = f"{config.max_skips} steps in a row up to step {position.step} had a loss or gradient that is not finite"
    if position.num_rollbacks:
        path = _write_reproducer(workdir.path, batch)
        raise BadSteps(
            f"{bad}, after going back once. The batch of step {position.step} is in {path}; "
            f"`python -m train.evaluate --workdir {workdir.path} --batch {path}` shows its loss row by row."
        )
    restored = checkpoints.restore(trainer.abstract_state)
    state, step = (trainer.init(), 0) if restored is None else (restored[0], restored[1]["step"])
    display.say(f"{bad}: going back to step {step}, and on with batch {position.batch}")
    return state, Position(step, position.batch, position.num_rollbacks + 1)


def _write_reproducer(directory: Path, batch: Batch) -> Path:
    path = directory / f"bad_batch_{jax.process_index()}.npz"
    rows = {name: np.concatenate([shard.data for shard in x.addressable_shards]) for name, x in batch.items()}
    np.savez(path, allow_pickle=False, **rows)
    return path


class _Profiler:
    """Trace a few steps from `first` on; none of them if it is `None`."""

    def __init__(self, first: int | None, directory: Path):
        self._first, self._directory, self._is_on = first, directory, False

    def tick(self, step: int) -> None:
        """Start or stop where it is time."""
        if step == self._first:
            jax.profiler.start_trace(self._directory)
            self._is_on = True
        elif self._first is not None and step == self._first + PROFILED_STEPS:
            self.stop()

    def stop(self) -> None:
        """Write the trace, if one is being taken."""
        if self._is_on:
            jax.profiler.stop_trace()
            self._is_on = False


class _Preemption:
    """Notice SIGTERM, on whichever process it arrives, at the same step on all."""

    def __enter__(self) -> "_Preemption":
        self._is_asked, self._is_alone = False, jax.process_count() == 1
        if self._is_alone:
            self._before = signal.signal(signal.SIGTERM, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_alone:
            signal.signal(signal.SIGTERM, self._before)

    def _ask(self, *_: object) -> None:
        self._is_asked = True

    def is_due(self, step: int) -> bool:
        """Tell whether to save and leave now."""
        return self._is_asked if self._is_alone else multihost_utils.reached_preemption_sync_point(step)


class _Rates:
    """How fast a run is, and what it does with its time."""

    def __init__(self, config: Config):
        self._tokens = config.data.batch_size * config.data.seq
        self._flops = self._tokens * train_flops_per_token(config.model, config.data.seq, config.task)
        peak = peak_flops(jax.devices()[0].device_kind)
        self._peak = None if peak is None else peak * jax.device_count()
        self._start = time.monotonic()
        self._laps: list[float] = []
        self._last: float | None = None
        self._training = self._paused = self._compiling = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self._compiling += duration_secs

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Count what happens inside as no training."""
        start = time.monotonic()
        yield
        self._paused += time.monotonic() - start

    def count_step(self) -> None:
        """Take the time since the last step; the first one compiles and does not count."""
        now = time.monotonic()
        if self._last is not None:
            lap = max(now - self._last - self._paused, 1e-9)
            self._laps = [*self._laps[-19:], lap]
            self._training += lap
        self._last, self._paused = now, 0.0

    def numbers(self, step: int) -> dict[str, float | int]:
        """Return tokens and model FLOPs per second over the last steps, and the rest that is worth keeping."""
        seconds = sum(self._laps) / len(self._laps) if self._laps else math.nan
        values = {
            "tokens": step * self._tokens,
            "tokens_per_second": self._tokens / seconds,
            "model_flops_per_second": self._flops / seconds,
            "compile_seconds": self._compiling,
            "goodput": self._training / (time.monotonic() - self._start),
            "memory_bytes": _memory_bytes(),
        }
        if self._peak is not None:
            values["model_flops_utilisation"] = values["model_flops_per_second"] / self._peak
        return {name: value for name, value in values.items() if math.isfinite(value)}

    def describe(self, last: dict[str, float], valid_loss: float | None) -> str:
        """Return the numbers that a person wants to see."""
        seconds = sum(self._laps) / len(self._laps) if self._laps else math.inf
        parts = [f"loss {last['loss']:.3f}", f"{self._tokens / seconds:,.0f} tokens/s"]
        if valid_loss is not None:
            parts.insert(1, f"valid {valid_loss:.3f}")
        if last["num_skipped"]:
            parts.append(f"skipped {last['num_skipped']:.0f}")
        return "  ".join(parts)


def _memory_bytes() -> float:
    """Return the most memory used so far: the device's, or the process's where devices keep no count."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return float(stats["peak_bytes_in_use"])
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
