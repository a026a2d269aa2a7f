"""Let a trained model write.

    python -m train.generate --workdir runs/owt_latte_r_swa_smoke --prompt "ROMEO:"
    python -m train.generate --model data/models/stories260K/stories260K.bin --prompt "Once upon a time"

Tokens are shown as they come, or with `--no-stream` when all are there; how fast they came, and what the model
remembers of the text, is said at the end.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import tyro

from data.tokenizer import AnyTokenizer
from latte_eqx import LanguageModel, generate
from latte_eqx.decoding import init_rows
from train.console import plain_errors
from train.restore import load_model


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Let a trained model continue a text."""

    workdir: Path | None = None
    """The work directory of a run."""
    model: Path | None = None
    """Or a pretrained model: a directory, or a file, that `latte_eqx.pretrained.load` reads."""
    prompt: str | None = None
    """What to continue; by default that of the run's config, or nothing."""
    prompt_file: Path | None = None
    """Or a file of text to continue. It is read in pieces: memory does not grow with its length."""
    max_new_tokens: int = 400
    """How many tokens to write at most."""
    temperature: float = 0.8
    """0 always takes the likeliest token."""
    top_k: int | None = None
    """Choose among this many of the likeliest tokens."""
    top_p: float | None = 0.95
    """Choose among the likeliest tokens that together have this probability."""
    stream: bool = True
    """Show tokens as they come, instead of all at the end."""
    step: int | None = None
    """The checkpoint of the run to use; by default the newest."""
    seed: int = 0
    """Decides what is drawn."""

    def __post_init__(self):
        if self.prompt is not None and self.prompt_file is not None:
            raise ValueError("Only one of `--prompt` and `--prompt-file` must be given, got both.")


def write_sample(
    model: LanguageModel,
    tokenizer: AnyTokenizer,
    prompt: str,
    *,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = 0.95,
    seed: int = 0,
    stream: bool = True,
    path: Path | None = None,
) -> str:
    """Print how the model continues the prompt, token by token or all at once; return it, and append it to a file."""
    ids = list(map(int, tokenizer.encode(prompt))) or [tokenizer.end_of_text]
    next_piece, text, times = tokenizer.stream(), [prompt], [time.perf_counter()]
    # A blank before the first new word depends on there being words before it.
    for token in ids[-8:]:
        next_piece(token)

    def show(piece: str) -> None:
        text.append(piece)
        if stream:
            print(piece, end="", flush=True)

    def take(token: Any) -> None:
        times.append(time.perf_counter())
        if token != tokenizer.end_of_text:
            show(next_piece(int(token)))

    # Of a long prompt the end will do.
    print(f"\n{prompt if len(prompt) < 2000 else '...' + prompt[-2000:]}", end="", flush=True)
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
        on_token=take,
    )
    show(next_piece(None))
    print("" if stream else "".join(text[1:]))
    _say_how_fast(model, len(ids), max_new_tokens, times)
    if path is not None:
        with path.open("a") as file:
            file.write("".join(text) + "\n\n")
    return "".join(text)


def _say_how_fast(model: LanguageModel, num_read: int, max_new_tokens: int, times: Sequence[float]) -> None:
    state = eqx.filter_eval_shape(init_rows, model, 1, num_read + max_new_tokens)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) / 2**20
    # The first tokens wait for what is compiled.
    later = times[3:]
    speed = f"{(len(later) - 1) / (later[-1] - later[0]):.0f} tokens a second, " if len(later) > 1 else ""
    first = f"{num_read} tokens read, the first written after {times[1] - times[0]:.1f} s; " if len(times) > 1 else ""
    print(f"{first}{speed}{size:.1f} MiB of state", file=sys.stderr)


def main(arguments: Arguments) -> None:
    """Restore a run, or read a pretrained model, and let it write."""
    model, tokenizer, prompt = load_model(arguments.model, arguments.workdir, step=arguments.step)
    if arguments.prompt_file is not None:
        prompt = arguments.prompt_file.read_text()
    write_sample(
        model,
        tokenizer,
        prompt if arguments.prompt is None else arguments.prompt,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        stream=arguments.stream,
    )


if __name__ == "__main__":
    with plain_errors():
        main(tyro.cli(Arguments, description=__doc__))
