"""Checkpoints that a run can trust: written in the background, committed whole, checked bit for bit when read."""

import contextlib
import json
import logging
import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree
from orbax.checkpoint import v1 as ocp

from train.digest import digest, leaf_forms, seal

log = logging.getLogger(__name__)
Result = TypeVar("Result")


class CheckpointError(RuntimeError):
    """What all errors of this file have in common."""


class CheckpointNotWritten(CheckpointError):
    """A step could not be written; the steps before it are as they were."""


class DamagedCheckpoint(CheckpointError):
    """A step cannot be read, or what it holds is not what was saved."""


class NoIntactCheckpoint(CheckpointError):
    """There are steps, and every one of them is damaged."""


class CheckpointMismatch(CheckpointError):
    """A step is whole, but holds other leaves than this run has."""


def _chain(error: BaseException | None) -> str:
    """Every error behind `error`, as Orbax's outermost ones name the wrong cause."""
    lines = []
    while error is not None:
        lines.append(f"  {type(error).__name__}: {' '.join(str(error).split())[:400]}")
        error = error.__cause__ or error.__context__
    return "\n".join(lines)


def _together(read: Callable[[], Result]) -> Result:
    """What `read` gives, or `DamagedCheckpoint` on all processes if it fails on one: none waits for another in vain."""
    result, error = None, None
    try:
        result = read()
    except Exception as caught:
        error = caught
    failed = np.atleast_1d(multihost_utils.process_allgather(np.array(error is not None)))
    if error is not None:
        raise DamagedCheckpoint(_chain(error)) from error
    if failed.any():
        raise DamagedCheckpoint(f"  It could not be read by process {', '.join(map(str, np.flatnonzero(failed)))}.")
    return result  # pyright: ignore[reportReturnType]


def _check_leaves(step: int, saved: dict[str, str], wanted: dict[str, str]) -> None:
    """Orbax casts to another dtype silently, and blames a leaf that is not there on its handlers."""
    names = [name for name in {**saved, **wanted} if saved.get(name) != wanted.get(name)]
    if names:
        lines = [
            f"  {name}: {saved.get(name, 'nothing')} saved, {wanted.get(name, 'nothing')} wanted" for name in names
        ]
        more = [f"  and {len(lines) - 20} more"] if len(lines) > 20 else []
        raise CheckpointMismatch(
            f"The run must have the leaves of the checkpoint of step {step}, got others:\n"
            + "\n".join(lines[:20] + more)
        )


class _Keep:
    """The newest steps and the best one. With Orbax's `BestN`, one damaged file of metrics stops all from opening."""

    def __init__(self, latest: int, losses: dict[int, float]):
        self.latest = latest
        self.losses = losses

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Called by Orbax with the steps that are there, oldest first."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        best = min(steps, key=lambda step: (self.losses.get(step, math.inf), -step), default=None)
        return [step in steps[-self.latest :] or (step == best and step in self.losses) for step in steps]


class Checkpoints:
    """Asynchronous, atomic checkpoints of a run; the newest that is whole is what a run goes on from.

    With `read_only`, nothing in the directory is touched, so that a run may be writing there.
    """

    def __init__(self, directory: Path, *, every: int, keep: int = 2, keep_best: bool = True, read_only: bool = False):
        if every < 1 or keep < 1:
            raise ValueError(f"`every` and `keep` must be positive, got {every=}, {keep=}.")
        self.directory = Path(directory).absolute()
        self.every = every
        self._read_only = read_only
        self._saving: int | None = None
        self._prepare_directory()
        self._losses: dict[int, float] = {}
        self._checkpointer = ocp.training.Checkpointer(
            str(self.directory),
            context=self._context(),
            preservation_policy=_Keep(keep, self._losses if keep_best else {}),
            cleanup_tmp_directories=not read_only,
        )
        for step in self.steps():
            # A step that cannot be read is not the best one; that it is damaged is said when it is to be restored.
            with contextlib.suppress(Exception):
                self._note_loss(step, self._record(step)["loss"])

    def _prepare_directory(self) -> None:
        if self._read_only:
            if not self.directory.is_dir():
                raise FileNotFoundError(f"The directory of checkpoints must exist to be read, got {self.directory}.")
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.directory).close()
        except OSError as error:
            raise CheckpointNotWritten(f"The directory of checkpoints must be writable, got {error}.") from error

    @staticmethod
    def _context(*, alone: bool = False) -> ocp.Context:
        """How Orbax is to work; `alone` without waiting for other processes, which may fail where this one does not.

        The priority of transfers and the memory for them must stay as they are: by default all arrays are on the host,
        or on a CPU pinned where they are, before `save` returns and the next step takes over their memory.
        """
        context = ocp.Context()
        # Numbers in a dictionary would otherwise become one array file each.
        context.checkpointables.registry = ocp.handlers.local_registry()
        context.checkpointables.registry.add(ocp.handlers.JsonHandler, checkpointable_name="meta")
        # In the background, a directory that cannot be made would leave threads that hold up the exit for minutes.
        context.asynchronous.create_directories_asynchronously = False
        if alone:
            context.multiprocessing.primary_host = jax.process_index()
            context.multiprocessing.active_processes = {jax.process_index()}
        return context

    def steps(self) -> list[int]:
        """All steps that are there, oldest first, the one now being written included."""
        return [checkpoint.step for checkpoint in self._checkpointer.checkpoints]

    def due(self, step: int) -> bool:
        """Whether `save` would save at this step."""
        return step % self.every == 0 and step not in self.steps()

    def save(
        self, step: int, state: PyTree, meta: dict[str, Any], *, loss: float | None = None, force: bool = False
    ) -> None:
        """Write `state` and `meta` in the background if this is due; `state` may be donated as soon as this returns.

        `meta` must be JSON. `loss` decides which step is kept as the best. `force` saves between the regular steps; a
        step that is there already is never written again.
        """
        if self._read_only:
            raise CheckpointNotWritten(f"Checkpoints opened to be read must not be written, got step {step}.")
        if not (force or self.due(step)):
            return
        self.wait()
        if step in self.steps():
            return
        # Through JSON and back, since the seal is checked on what JSON makes of it.
        record = json.loads(
            json.dumps({"meta": meta, "loss": loss, "forms": leaf_forms(state), "digest": digest(state)})
        )
        self._note_loss(step, loss)
        self._saving = step
        try:
            self._checkpointer.save_checkpointables_async(
                step, {"state": state, "meta": {"record": record, "seal": seal(record)}}, force=True
            )
        except Exception as error:
            self._fail(error)

    def restore(self, abstract: PyTree) -> tuple[PyTree, dict[str, Any]] | None:
        """State and meta of the newest step that is whole, placed as `abstract` says; `None` if there are no steps.

        Damaged steps newer than that are reported, and moved aside so that they can be saved anew.
        """
        self.wait()
        self._checkpointer.reload()
        damaged: list[int] = []
        for step in reversed(self._agreed_steps()):
            try:
                restored = self.restore_step(step, abstract)
            except DamagedCheckpoint as error:
                damaged.append(step)
                log.error("%s\nTrying the step before.", error)
                continue
            self._set_aside(damaged)
            return restored
        if damaged:
            raise NoIntactCheckpoint(
                f"One checkpoint in {self.directory} must be whole, got damaged ones only: steps {damaged[::-1]}. "
                "Nothing was changed. Bring one back from a copy, or start afresh."
            )
        return None

    def restore_step(self, step: int, abstract: PyTree) -> tuple[PyTree, dict[str, Any]]:
        """State and meta of exactly this step."""
        try:
            record = _together(lambda: self._record(step))
            _check_leaves(step, record["forms"], leaf_forms(abstract))
            state = _together(lambda: self._load(step, abstract))
            # A typed key may come back as plain numbers, so that equal bits are not enough.
            forms, bits = leaf_forms(state), digest(state)
            changed = [n for n in forms if (forms[n], bits[n]) != (record["forms"][n], record["digest"][n])]
            if changed:
                raise DamagedCheckpoint(f"  These leaves are not what was saved: {', '.join(changed)}.")
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(
                f"The checkpoint of step {step} in {self.directory} is damaged:\n{error}"
            ) from error
        return state, record["meta"]

    def wait(self) -> None:
        """Wait until all is written; an error of the writing is raised here, in the next `save`, or in `close`."""
        try:
            self._checkpointer.wait()
        except Exception as error:
            self._fail(error)
        self._saving = None

    def close(self) -> None:
        """Wait, and let go of the directory."""
        try:
            self.wait()
        finally:
            self._checkpointer.close()

    def _fail(self, error: Exception) -> None:
        step, self._saving = self._saving, None
        # Orbax has already forgotten the steps that it would have deleted after this one.
        self._checkpointer.reload()
        free = shutil.disk_usage(self.directory).free / 2**30
        raise CheckpointNotWritten(
            f"The checkpoint of step {step} could not be written to {self.directory}, where {free:.1f} GiB are free:\n"
            f"{_chain(error)}\nThese steps are still there: {self.steps()}."
        ) from error

    def _load(self, step: int, abstract: PyTree) -> PyTree:
        with self._context(alone=True):
            return ocp.load_checkpointables(str(self.directory / str(step)), {"state": abstract})["state"]

    def _record(self, step: int) -> dict[str, Any]:
        # Not through Orbax: it numbers its loads, and needs as many of them on every process.
        sealed = json.loads((self.directory / str(step) / "meta" / "data.json").read_text())
        if sealed["seal"] != seal(sealed["record"]):
            raise DamagedCheckpoint("The description of the step is not what was saved.")
        return sealed["record"]

    def _note_loss(self, step: int, loss: float | None) -> None:
        self._losses.pop(step, None)
        if loss is not None and math.isfinite(loss):
            self._losses[step] = loss

    def _agreed_steps(self) -> list[int]:
        """The steps that the first process sees, as a shared file system may be late on others."""
        steps = self.steps()
        count = int(multihost_utils.broadcast_one_to_all(np.int32(len(steps))))
        mine = np.resize(np.array(steps or [0], np.int32), count)
        return [int(step) for step in multihost_utils.broadcast_one_to_all(mine)]

    def _set_aside(self, damaged: list[int]) -> None:
        if not damaged or self._read_only:
            return
        if jax.process_index() == 0:
            for step in damaged:
                taken = len(list(self.directory.glob(f"{step}.damaged*")))
                aside = self.directory / f"{step}.damaged{f'-{taken + 1}' if taken else ''}"
                (self.directory / str(step)).rename(aside)
                log.error("Moved the damaged checkpoint of step %d aside to %s.", step, aside)
        multihost_utils.sync_global_devices("damaged checkpoints are moved aside")
        self._checkpointer.reload()
