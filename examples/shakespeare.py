"""Train a small Latte-R-SWA++ on Shakespeare's bytes, then let it write.

    python examples/shakespeare.py [--steps 300] [--prompt "ROMEO:"]

About two minutes on two cores. A text this short teaches spelling and layout, not sense.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from latte_eqx import LanguageModel, ModelConfig, generate

CORPUS = Path(__file__).parents[1] / "data" / "corpus" / "tinyshakespeare.txt"


@dataclass(frozen=True)
class Arguments:
    """Train on Shakespeare, then generate."""

    steps: int = 300
    """How many batches to train on."""
    batch: int = 8
    """Rows in a batch."""
    length: int = 256
    """Bytes in a row."""
    learning_rate: float = 3e-3
    """The peak of the schedule."""
    prompt: str = "ROMEO:"
    """What the model is to continue."""
    new_tokens: int = 400
    """How many bytes to write."""
    seed: int = 0
    """Decides weights, batches and samples."""


def loss(model: LanguageModel, rows: jax.Array) -> jax.Array:
    """Return the mean nats per byte."""
    logits = jax.vmap(model)(rows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()


def main(arguments: Arguments) -> None:
    """Train, showing the loss; then write, byte by byte."""
    text = np.frombuffer(CORPUS.read_bytes(), np.uint8)
    train_text, valid_text = text[: int(0.9 * len(text))], text[int(0.9 * len(text)) :]
    config = ModelConfig(vocab_size=256, num_layers=3, dim=128, num_heads=4, mlp_dim=384, num_latents=64, window=32)
    model_key, sample_key = jax.random.split(jax.random.key(arguments.seed))
    model = LanguageModel(config, key=model_key)
    schedule = optax.warmup_cosine_decay_schedule(0.0, arguments.learning_rate, 20, arguments.steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    optimizer_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @partial(eqx.filter_jit, donate="all")
    def step(rows, model, optimizer_state):
        value, gradients = eqx.filter_value_and_grad(loss)(model, rows)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, eqx.filter(model, eqx.is_inexact_array))
        return value, eqx.apply_updates(model, updates), optimizer_state

    rng = np.random.default_rng(arguments.seed)
    columns = (TextColumn("training"), BarColumn(), TextColumn("{task.fields[status]}"), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("", total=arguments.steps, status="compiling")
        for index in range(arguments.steps):
            rows = _rows(train_text, rng, arguments.batch, arguments.length)
            value, model, optimizer_state = step(rows, model, optimizer_state)
            progress.update(task, advance=1, status=f"step {index + 1}: {float(value):.2f} nats per byte")
    rows = _rows(valid_text, np.random.default_rng(1), 64, arguments.length)
    held_out = eqx.filter_jit(lambda model, rows: jax.lax.map(lambda row: loss(model, row[None]), rows).mean())
    print(f"held-out text: {float(held_out(model, rows)):.2f} nats per byte\n\n{arguments.prompt}", end="", flush=True)

    def show(token):
        print(chr(token), end="", flush=True)

    prompt = list(arguments.prompt.encode())
    generate(
        model, prompt, max_new_tokens=arguments.new_tokens, key=sample_key, temperature=0.8, top_p=0.95, on_token=show
    )
    print()


def _rows(text, rng, batch, length):
    starts = rng.integers(0, len(text) - length, size=batch)
    return jnp.asarray(np.stack([text[start : start + length + 1] for start in starts]), jnp.int32)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
