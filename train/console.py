"""What a person sees of a run, on its first process: a live display on a terminal, plain lines elsewhere."""

import linecache
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

ROOT = Path(__file__).parents[1]


class Display:
    """A progress bar with the latest numbers; without a terminal, a line for each of them."""

    def __init__(self, *, steps: int, first_step: int, is_main: bool):
        self.console = Console(quiet=not is_main, highlight=False)
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=self.console, disable=not self.console.is_terminal or not is_main)
        self._task = self._progress.add_task("", total=steps, completed=first_step, numbers="compiling")
        self._steps, self._first_step, self._start = steps, first_step, time.monotonic()

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, message: str) -> None:
        """Print a line above the bar."""
        self.console.print(message, markup=False, soft_wrap=True)

    def show(self, step: int, numbers: str) -> None:
        """Move the bar, or print the line that stands for it."""
        if self.console.is_terminal:
            self._progress.update(self._task, completed=step, numbers=numbers)
        else:
            done = step - self._first_step
            left = (time.monotonic() - self._start) / max(done, 1) * (self._steps - step)
            self.say(f"step {step}/{self._steps}  {numbers}  left {_clock(left)}")

    def advance(self, step: int) -> None:
        """Move the bar between two lines of the log."""
        self._progress.update(self._task, completed=step)


def _clock(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"


@contextmanager
def plain_errors() -> Iterator[None]:
    """End the program with the message alone where code of this project raised it: it says what must hold.

    What other code raises, and what nobody raised, is a fault that needs its traceback.
    """
    try:
        yield
    except Exception as error:
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        path = Path(frame.f_code.co_filename)
        is_ours = any(path.is_relative_to(ROOT / folder) for folder in ("train", "data", "latte_eqx", "configs"))
        if is_ours and linecache.getline(str(path), line).strip().startswith("raise "):
            sys.exit(f"error: {error}")
        raise
