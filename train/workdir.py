"""The work directory of a run: where its files are, and the lock that keeps a second run out."""

import fcntl
import json
import os
import socket
from pathlib import Path
from typing import Any


class WorkDirectoryError(RuntimeError):
    """The work directory cannot be used as asked."""


class WorkDirectory:
    """Files of a run in one directory, whose lock the main process holds until `close`, or until it dies, however."""

    def __init__(self, path: Path, lock: int | None):
        self.path = path
        self.config = path / "config.json"
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.loss_curve = path / "loss.png"
        self.samples = path / "samples.txt"
        self._lock = lock

    def holds_a_run(self) -> bool:
        """Whether a run has left anything that a fresh one would overwrite."""
        steps = self.checkpoints.is_dir() and any(self.checkpoints.iterdir())
        return steps or self.config.exists() or self.metrics.exists()

    def write_config(self, config: dict[str, Any]) -> None:
        """Write the config, whole or not at all; only the main process does."""
        if self._lock is None:
            return
        new = self.config.with_suffix(".json.new")
        with open(new, "w") as file:
            json.dump(config, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self.config)

    def read_config(self) -> dict[str, Any] | None:
        """The config that was written last, `None` if there is none."""
        if not self.config.exists():
            return None
        try:
            return json.loads(self.config.read_text())
        except ValueError as error:
            raise WorkDirectoryError(f"{self.config} must be JSON, got: {error}.") from error

    def close(self) -> None:
        """Let go of the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> "WorkDirectory":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_workdir(
    path: Path | str, *, fresh: bool = False, overwrite: bool = False, is_main: bool = True
) -> WorkDirectory:
    """Open `path` for the one run that may write there.

    `fresh` demands that no run is in it; with `overwrite`, one that is there is moved to `<path>.old-<n>`. Processes
    other than the main one only get the paths, and must not use them before the main one has returned from here.
    """
    if overwrite and not fresh:
        raise ValueError("`overwrite` must come with `fresh`, got overwrite=True, fresh=False.")
    path = Path(path).absolute()
    if not is_main:
        return WorkDirectory(path, None)
    workdir = WorkDirectory(path, _lock(path))
    if not (fresh and workdir.holds_a_run()):
        return workdir
    with workdir:
        aside = _free_name(path)
        if not overwrite:
            raise WorkDirectoryError(
                f"A fresh run must have a work directory without a run, got {path}. Leave out `fresh` to go on with "
                f"the run that is there, or add `overwrite` to move it to {aside}."
            )
        path.rename(aside)
        return WorkDirectory(path, _lock(path))


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What differs between two nested configs, a line for each value: `optim.peak_lr: 0.0005 -> 0.001`."""
    before, after = _flat(json.loads(json.dumps(old))), _flat(json.loads(json.dumps(new)))
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return [f"{name}: {before.get(name, 'nothing')} -> {after.get(name, 'nothing')}" for name in names]


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Values as Python writes them, by dotted name; an empty section counts as a value."""
    flat: dict[str, str] = {}
    for name, value in config.items():
        nested = isinstance(value, dict) and value
        flat.update(_flat(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": repr(value)})
    return flat


def _free_name(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.old-{number}")).exists():
        number += 1
    return aside


def _lock(path: Path) -> int:
    """The descriptor that holds the lock of `path`; the kernel frees it with the process, whatever ends that."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise WorkDirectoryError(f"The work directory must be writable, got {path}: {error}.") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between the opening and the locking, another run may have moved the directory aside, lock and all.
        if not os.path.samestat(os.fstat(lock), os.stat(path / "lock")):
            raise BlockingIOError
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    except BlockingIOError:
        holder = os.pread(lock, 256, 0).decode(errors="replace") or "a process that has just started"
        os.close(lock)
        raise WorkDirectoryError(f"One run may write to {path} at a time, got a second one beside {holder}.") from None
    except OSError as error:
        os.close(lock)
        raise WorkDirectoryError(f"The work directory must be writable, got {path}: {error}.") from error
    return lock
