"""Pictures of a run: its losses, and which latents its tokens choose.

python -m train.plot --workdir runs/owt_latte_r_swa_smoke
"""

from dataclasses import dataclass
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import tyro
from jaxtyping import Array, Float, Int
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize

from data.loader import open_rows
from data.tokenizer import load_tokenizer
from latte_eqx import LanguageModel
from train.console import plain_errors
from train.metrics import read_metrics
from train.restore import Run, restore_run

# A latent is dead if it gets less than this share of the attention.
DEAD = 0.01


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Draw the losses of a run and the latents that tokens of its validation text choose."""

    workdir: Path
    """The work directory of the run."""
    step: int | None = None
    """The checkpoint whose latents to draw; by default the newest."""
    tokens: int = 25
    """How many tokens a map shows."""
    heads: int = 4
    """How many heads of a layer have a map."""


def plot_losses(metrics: Path, picture: Path) -> None:
    """Draw training and validation loss."""
    records = list(read_metrics(metrics))
    training = [(record["step"], record["loss"]) for record in records if record.get("loss") is not None]
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


def latent_shares(model: LanguageModel, tokens: Int[Array, " seq"]) -> Float[Array, "layers heads seq states"]:
    """Return p(l|t) of every layer and head; with a window, it is state 0."""

    def shares(block, x):
        return block.mixer.shares(jax.vmap(block.mixer_norm)(x))

    return eqx.filter_vmap(shares)(model.stack.blocks, model.layer_inputs(tokens))


def latent_sources(model: LanguageModel, tokens: Int[Array, " seq"]) -> Float[Array, "layers heads latents seq"]:
    """Return p(s|l,t) of every layer and head at the last token t."""

    def sources(block, x):
        _, keys, _ = block.mixer.latents(jax.vmap(block.mixer_norm)(x))
        return jax.nn.softmax(keys.swapaxes(-1, -2))

    return eqx.filter_vmap(sources)(model.stack.blocks, model.layer_inputs(tokens))


def latent_numbers(
    shares: Float[Array, "layers heads seq states"],
    sources: Float[Array, "layers heads latents seq"],
    *,
    has_window: bool,
) -> list[dict[str, float]]:
    """Return for each layer, averaged over its heads, how evenly the states are used, and what latents average.

    `used_states` is exp of the entropy of the mean share, between 1 and the number of states; `states_per_token` is exp
    of a token's own entropy; `dead` counts the states of all heads that get less than 1 % of the attention;
    `tokens_per_latent` is exp of the entropy of p(s|l,t), over how many tokens a latent spreads.
    """
    mean = shares.mean(axis=2)
    entropy = lambda p: -jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1)), 0).sum(axis=-1)
    columns = {
        "used_states": jnp.exp(entropy(mean)).mean(axis=-1),
        "states_per_token": jnp.exp(entropy(shares).mean(axis=-1)).mean(axis=-1),
        "dead": (mean < DEAD).sum(axis=(-2, -1)),
        "tokens_per_latent": jnp.exp(entropy(sources).mean(axis=(-2, -1))),
    }
    if has_window:
        columns["window_share"] = mean[..., 0].mean(axis=-1)
    return [{name: float(column[layer]) for name, column in columns.items()} for layer in range(shares.shape[0])]


def plot_latents(run: Run, picture: Path, *, num_tokens: int, num_heads: int) -> None:
    """Draw p(l|t) for some tokens of the validation text, layer by layer, and write the numbers behind it beside it."""
    kind = run.config.data
    assert kind.directory is not None
    tokens = jnp.asarray(open_rows(kind.directory, "valid", seq=kind.seq, pack="concat")[0]["inputs"])
    has_window = run.config.model.mixer == "macchiato"
    model = run.trainer.language_model(run.state)
    shares, sources = (eqx.filter_jit(look)(model, tokens) for look in (latent_shares, latent_sources))
    layers = latent_numbers(shares, sources, has_window=has_window)
    lines = [
        f"{shares.shape[-1]} states for each of {shares.shape[1]} heads, over {shares.shape[2]} tokens.",
        "",
        f"| layer | {' | '.join(layers[0])} |",
        f"| --- {'| --- ' * len(layers[0])}|",
        *(f"| {i} | {' | '.join(f'{x:.3g}' for x in numbers.values())} |" for i, numbers in enumerate(layers)),
    ]
    picture.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))

    tokenizer = load_tokenizer(run.tokenizer)
    labels = [repr(tokenizer.decode([int(token)]))[1:-1] for token in tokens[-num_tokens:]]
    maps = np.asarray(shares[:, :num_heads, -num_tokens:])
    plt.switch_backend("agg")
    figure, axes = plt.subplots(
        *maps.shape[:2], figsize=(3 * maps.shape[1], 4 * maps.shape[0]), layout="constrained", squeeze=False
    )
    colors = ScalarMappable(Normalize(0, 1), "YlOrBr")
    for (layer, head), panel in np.ndenumerate(axes):
        panel.imshow(maps[layer, head], cmap=colors.cmap, norm=colors.norm, aspect="auto")
        panel.set(title=f"layer {layer}, head {head}", xlabel="l (0 is the window)" if has_window else "l")
        panel.set_yticks(range(len(labels)), labels if head == 0 else [""] * len(labels), fontsize=6)
    figure.colorbar(colors, ax=axes, label="p(l|t)", shrink=0.4)
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def main(arguments: Arguments) -> None:
    """Draw into the work directory."""
    plot_losses(arguments.workdir / "metrics.jsonl", arguments.workdir / "loss.png")
    print(f"wrote {arguments.workdir / 'loss.png'}")
    run = restore_run(arguments.workdir, step=arguments.step)
    if run.config.model.mixer not in ("macchiato", "latte"):
        print(f"no latents to draw: the mixer is {run.config.model.mixer}")
        return
    picture = arguments.workdir / "latents.png"
    plot_latents(run, picture, num_tokens=arguments.tokens, num_heads=arguments.heads)
    print(f"wrote {picture}")


if __name__ == "__main__":
    with plain_errors():
        main(tyro.cli(Arguments, description=__doc__))
