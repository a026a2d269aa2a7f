"""Let a trained model write.

python -m train.generate --workdir runs/owt_latte_r_swa_smoke --prompt "ROMEO:"
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import equinox as eqx
import jax
import tyro

from data.tokenizer import load_tokenizer
from latte_eqx import LanguageModel, generate
from train.console import plain_errors
from train.restore import restore_run


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Let a trained model continue a text."""

    workdir: Path
    """The work directory of the run."""
    prompt: str | None = None
    """What to continue; by default the config's."""
    max_new_tokens: int = 400
    """How many tokens to write at most."""
    temperature: float = 0.8
    """0 always takes the likeliest token."""
    top_k: int | None = None
    """Choose among this many of the likeliest tokens."""
    top_p: float | None = 0.95
    """Choose among the likeliest tokens that together have this probability."""
    step: int | None = None
    """The checkpoint to use; by default the newest."""
    seed: int = 0
    """Decides what is drawn."""


def write_sample(
    model: LanguageModel,
    tokenizer_name: str,
    prompt: str,
    *,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = 0.95,
    seed: int = 0,
    path: Path | None = None,
) -> str:
    """Print how the model continues the prompt, token by token; return it, and append it to a file."""
    tokenizer = load_tokenizer(tokenizer_name)
    ids = tokenizer.encode(prompt).tolist() or [tokenizer.end_of_text]
    stream, text = tokenizer.stream(), [prompt]

    def show(piece: str) -> None:
        text.append(piece)
        print(piece, end="", flush=True)

    print(f"\n{prompt}", end="", flush=True)
    # The model may be spread over devices; one of them is enough to write.
    arrays, static = eqx.partition(model, eqx.is_array)
    model = eqx.combine(jax.device_put(arrays, jax.local_devices()[0]), static)
    generate(
        model,
        ids,
        max_new_tokens=max_new_tokens,
        key=jax.random.key(seed),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop_token=tokenizer.end_of_text,
        on_token=lambda token: show(stream(int(token))),
    )
    show(stream(None))
    print()
    if path is not None:
        with path.open("a") as file:
            file.write("".join(text) + "\n\n")
    return "".join(text)


def main(arguments: Arguments) -> None:
    """Restore a run and let it write."""
    run = restore_run(arguments.workdir, step=arguments.step)
    print(f"step {run.step} of {arguments.workdir}", file=sys.stderr)
    write_sample(
        run.trainer.language_model(run.state),
        run.tokenizer,
        run.config.prompt if arguments.prompt is None else arguments.prompt,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )


if __name__ == "__main__":
    with plain_errors():
        main(tyro.cli(Arguments, description=__doc__))
