"""Pictures of a run.

python -m train.plot --workdir runs/owt_latte_r_swa_smoke
"""

from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import tyro

from train.metrics import read_metrics


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Draw the losses of a run."""

    workdir: Path
    """The work directory of the run."""


def plot_losses(metrics: Path, picture: Path) -> None:
    """Draw training and validation loss over the tokens seen."""
    records = list(read_metrics(metrics))
    training = [(record["step"], record["loss"]) for record in records if "loss" in record]
    validation = [(record["step"], record["valid_loss"]) for record in records if "valid_loss" in record]
    plt.switch_backend("agg")  # It needs no display.
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(*zip(*training, strict=True), color="#b07d4f", linewidth=0.8, alpha=0.7, label="training")
    if validation:
        axes.plot(*zip(*validation, strict=True), "o-", color="#3d2b1f", markersize=4, label="validation")
    axes.set(xlabel="step", ylabel="loss, nats per token")
    axes.legend()
    figure.savefig(picture, dpi=150)
    plt.close(figure)


def main(arguments: Arguments) -> None:
    """Draw into the work directory."""
    picture = arguments.workdir / "loss.png"
    plot_losses(arguments.workdir / "metrics.jsonl", picture)
    print(f"wrote {picture}")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
