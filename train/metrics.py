"""What a run writes down: `metrics.jsonl`, one record per step, is the source of truth; other sinks are copies."""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class TensorBoardSink:
    """Scalars for TensorBoard, through tensorboardX."""

    def __init__(self, directory: Path):
        try:
            from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError("`--tensorboard` needs the package tensorboardX: pip install tensorboardX.") from error
        self._writer = SummaryWriter(str(directory))

    def write(self, step: int, values: dict[str, float | int]) -> None:
        """Write scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WandbSink:
    """Scalars for Weights & Biases."""

    def __init__(self, project: str, config: dict[str, Any]):
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError("`--wandb` needs the package wandb: pip install wandb.") from error
        self._run = wandb.init(project=project, config=config)

    def write(self, step: int, values: dict[str, float | int]) -> None:
        """Log scalars."""
        self._run.log(values, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


Sink = TensorBoardSink | WandbSink


class MetricsLog:
    """Append records to a file, and to further sinks.

    A run that goes on from step `step` takes back what an interrupted one wrote of later steps, so that the file reads
    as if there had been no interruption.
    """

    def __init__(self, path: Path, *, step: int, sinks: list[Sink] | None = None, is_main: bool = True):
        self._sinks, self._file = sinks or [], None
        if not is_main:
            return
        kept = [record for record in read_metrics(path) if record["step"] <= step] if path.exists() else []
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in kept))
        os.replace(temporary, path)
        self._file = path.open("a")

    def write(self, step: int, **values: float | int) -> None:
        """Write the numbers of a step; only the main process does."""
        if self._file is None:
            return
        # JSON has no word for numbers that are not finite.
        record = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **record}) + "\n")
        self._file.flush()
        for sink in self._sinks:
            sink.write(step, values)

    def close(self) -> None:
        """Close the file and the sinks."""
        if self._file is not None:
            self._file.close()
        for sink in self._sinks:
            sink.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file; a last line that was cut off is left out."""
    with path.open() as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)
