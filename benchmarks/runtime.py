"""What does a longer sequence cost a whole model: forward, forward and backward, and token by token?

    python benchmarks/runtime.py [--size cpu] [--rounds 3] [--figure runtime.png]
    python benchmarks/runtime.py --size 400m --rounds 20 --figure runtime.png

A batch always has the same number of tokens, in ever fewer and longer rows: what is linear takes the same time for all
of them. The loss takes a fixed number of tokens at a time, so that the output map costs the same for every model and
length. Layers are computed again for the backward pass, as in training. Decoding goes on from a row that fills the
cache of attention. Compile times are those of an empty cache; memory is arguments, results and temporaries together.

Transformer++ is the library's attention, in blocks of queries; "plain" forms the whole square of logits, and
"cuDNN" is FlashAttention, on a GPU and for heads that are not too wide. With one query at a time they do not differ.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
import tyro
from harness import alternate, machine, print_table
from jax import lax
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from latte_eqx import PAPER_ROWS, LanguageModel, ModelConfig, prefill
from latte_eqx.models.language_model import next_token_logits

# Tokens whose logits exist at a time, and tokens that are decoded in one call.
HEAD_TOKENS, DECODED = 256, 16
# Dims of a head that cuDNN takes on every GPU.
WIDEST_FOR_CUDNN = 128


class Size(NamedTuple):
    """How large the models are, and what they read."""

    model: dict[str, int]
    dtype: Any
    tokens: int
    lengths: tuple[int, ...]


LONG = tuple(1024 * 2**power for power in range(6))
SIZES = {
    "cpu": Size(
        dict(vocab_size=512, num_layers=2, dim=256, num_heads=4, mlp_dim=1024),
        jnp.float32,
        8192,
        (512, 2048, 8192),
    ),
    "400m": Size(dict(num_layers=24, dim=1024, mlp_dim=4096), jnp.bfloat16, 32_768, LONG),
    "2.6b": Size(dict(vocab_size=256_000, num_layers=26, dim=2304, mlp_dim=9216), jnp.bfloat16, 32_768, LONG),
}


class Contestant(NamedTuple):
    """A row of the paper's table, and whose attention it uses if not the library's."""

    row: str
    attention: Literal["xla", "cudnn"] | None
    style: str


CONTESTANTS = {
    "Latte-Conv-SWA++": Contestant("latte_conv_swa", None, "o-C1"),
    "Latte-R-SWA++": Contestant("latte_r_swa", None, "s-C0"),
    "Transformer++": Contestant("transformer_pp", None, "^-k"),
    "Transformer++, plain": Contestant("transformer_pp", "xla", "^:k"),
    "Transformer++, cuDNN": Contestant("transformer_pp", "cudnn", "^--k"),
}


@dataclass(frozen=True)
class Arguments:
    """Time whole models against the length of their sequences."""

    size: Literal["cpu", "400m", "2.6b"] = "cpu"
    """How large the models are. Beyond `cpu` they compute in bfloat16 and want an accelerator."""
    rounds: int = 3
    """Rounds in which the models take turns; the best one counts."""
    tokens: int | None = None
    """Tokens in a batch; by default 8192 for `cpu`, else 32768."""
    lengths: tuple[int, ...] | None = None
    """Tokens in a row; by default 512, 2048 and 8192 for `cpu`, else the powers of two from 1024 to 32768."""
    figure: Path | None = None
    """Where to write the curves as a PNG."""


class Program(NamedTuple):
    """A compiled program, bound to its arguments, and what it took to compile and takes to run."""

    run: Callable[[], Any]
    compile_seconds: float
    memory: int


class Measurement(NamedTuple):
    """What one model took at one length: seconds for each token in each round."""

    name: str
    seq: int
    seconds: list[float]
    compile_seconds: float
    memory: int


def build(row: str, seq: int, size: Size) -> LanguageModel:
    config = replace(PAPER_ROWS[row], **size.model, max_length=seq)
    return eqx.filter_jit(make_model)(config, size.dtype)


def make_model(config: ModelConfig, dtype: Any) -> LanguageModel:
    model = LanguageModel(config, key=jax.random.key(0))
    return jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, model)


def mean_loss(model: LanguageModel, tokens: jax.Array) -> jax.Array:
    # Loops keep the recomputed apart from the first time by themselves.
    again = partial(jax.checkpoint, prevent_cse=False)
    features = jax.vmap(lambda row: model.features(row, wrap=again))(tokens)

    @again
    def loss(part):
        features, targets = part
        logits = next_token_logits(features, model.embedding)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    parts = features.reshape(-1, HEAD_TOKENS, features.shape[-1]), jnp.roll(tokens, -1).reshape(-1, HEAD_TOKENS)
    return lax.map(loss, parts).mean()


def decode(model: LanguageModel, token: jax.Array, state: Any) -> jax.Array:
    """Return the last of some tokens, each the likeliest after the one before."""

    def step(carry, _):
        logits, state = model.extend(*carry)
        return (jnp.argmax(logits, axis=-1).astype(jnp.int32), state), None

    return lax.scan(step, (token, state), length=DECODED)[0][0]


PASSES: dict[str, Callable[..., Any]] = {
    "forward": mean_loss,
    "forward and backward": eqx.filter_value_and_grad(mean_loss),
    "decoding": decode,
}


def use_attention(implementation: Literal["xla", "cudnn"] | None) -> AbstractContextManager[Any]:
    """While a model is traced, let JAX's attention over everything stand in for the library's."""
    if implementation is None:
        return nullcontext()

    def attend(queries, keys, values, **_):
        arrays = (x.swapaxes(0, 1) for x in (queries, keys, values))
        return jax.nn.dot_product_attention(*arrays, is_causal=True, implementation=implementation).swapaxes(0, 1)

    return patch("latte_eqx.mixers.attention.window_attention", attend)


def make_program(function: Callable[..., Any], model: LanguageModel, *inputs: Any) -> Program:
    arrays, static = eqx.partition(model, eqx.is_array)
    start = time.perf_counter()
    # A new function for each program: JAX would find the trace of another attention.
    compiled = jax.jit(lambda arrays, *inputs: function(eqx.combine(arrays, static), *inputs))
    compiled = compiled.lower(arrays, *inputs).compile()
    seconds = time.perf_counter() - start
    sizes = compiled.memory_analysis()
    assert sizes is not None
    memory = sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes
    return Program(partial(compiled, arrays, *inputs), seconds, memory)


def measure(seq: int, size: Size, rounds: int) -> dict[str, list[Measurement]]:
    """Time every pass at one length; the models do not outlive it."""
    models = {row: build(row, seq, size) for row in {contestant.row for contestant in CONTESTANTS.values()}}
    return {kind: compete(kind, seq, size, models, rounds) for kind in PASSES}


def compete(kind: str, seq: int, size: Size, models: Mapping[str, LanguageModel], rounds: int) -> list[Measurement]:
    """Time one pass of all models. Who does not fit into memory is left out."""
    programs = {}
    for name, contestant in CONTESTANTS.items():
        if not takes_part(contestant, kind, size):
            continue
        say(f"T={seq}, {kind}: {name}")
        model = models[contestant.row]
        try:
            inputs = make_inputs(kind, model, seq, size)
            with use_attention(contestant.attention):
                program = make_program(PASSES[kind], model, *inputs)
            jax.block_until_ready(program.run())
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            say("  does not fit into memory")
        else:
            programs[name] = program
    say(f"T={seq}, {kind}: {rounds} rounds")
    seconds = alternate({name: program.run for name, program in programs.items()}, rounds)
    count = DECODED if kind == "decoding" else size.tokens
    return [
        Measurement(name, seq, [x / count for x in seconds[name]], program.compile_seconds, program.memory)
        for name, program in programs.items()
    ]


def takes_part(contestant: Contestant, kind: str, size: Size) -> bool:
    if contestant.attention != "cudnn":
        return contestant.attention is None or kind != "decoding"
    config = replace(PAPER_ROWS[contestant.row], **size.model)
    is_narrow = config.dim // config.num_heads <= WIDEST_FOR_CUDNN
    return kind != "decoding" and jax.default_backend() == "gpu" and size.dtype == jnp.bfloat16 and is_narrow


def make_inputs(kind: str, model: LanguageModel, seq: int, size: Size) -> tuple[Any, ...]:
    """Return a batch, or for decoding a token and the state after one row."""
    tokens = jax.random.randint(jax.random.key(seq), (size.tokens // seq, seq), 0, model.embedding.shape[0])
    if kind != "decoding":
        return (tokens,)
    _, states = prefill(model, tokens[:1])
    return tokens[0, :1], jax.tree.map(lambda x: x[0], states)


def say(message: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {message}", file=sys.stderr, flush=True)


def cells(measurement: Measurement, size: Size, kind: str) -> tuple[str, ...]:
    """Show a measurement as a row of the table: milliseconds are those of a batch, or of a token."""
    name, seq, seconds, compile_seconds, memory = measurement
    count = 1 if kind == "decoding" else size.tokens
    best, average, spread = (1e3 * count * x for x in (min(seconds), mean(seconds), stdev(seconds)))
    return (
        name,
        str(seq),
        f"{best:.4g}",
        f"{average:.4g} ± {spread:.2g}",
        f"{1 / min(seconds):,.0f}",
        f"{memory / 2**20:,.0f}",
        f"{compile_seconds:.1f}",
    )


def check(arguments: Arguments) -> Size:
    size = SIZES[arguments.size]
    size = size._replace(tokens=arguments.tokens or size.tokens, lengths=arguments.lengths or size.lengths)
    if arguments.rounds < 2:
        raise ValueError(f"`rounds` must be at least 2, for a spread, got {arguments.rounds}.")
    if any(size.tokens % unit for unit in (*size.lengths, HEAD_TOKENS)):
        got = f"tokens={size.tokens}, lengths={size.lengths}"
        raise ValueError(f"`tokens` must be a multiple of {HEAD_TOKENS} and of each of the `lengths`, got {got}.")
    return size


def main(arguments: Arguments) -> None:
    size = check(arguments)
    # What a compilation takes is part of the answer.
    jax.config.update("jax_enable_compilation_cache", False)
    print(f"{machine()}; size {arguments.size}, {jnp.dtype(size.dtype).name}, {size.tokens} tokens in a batch")
    by_length = [measure(seq, size, arguments.rounds) for seq in size.lengths]
    results = {kind: [x for passes in by_length for x in passes[kind]] for kind in PASSES}
    for kind, measurements in results.items():
        unit = "one token of one row, after T" if kind == "decoding" else f"a batch of {size.tokens} tokens"
        print_table(
            f"{kind}: {unit}; best, mean and spread of {arguments.rounds} rounds",
            ("model", "T", "best ms", "mean ms", "tokens/s", "memory MiB", "compile s"),
            [cells(measurement, size, kind) for measurement in measurements],
        )
    if arguments.figure is not None:
        plot(results, size.lengths, arguments.figure)


def plot(results: Mapping[str, Sequence[Measurement]], lengths: Sequence[int], path: Path) -> None:
    """Draw the best time of a token against the length, all axes logarithmic."""
    figure, panels = plt.subplots(1, len(results), figsize=(12, 4.2), layout="constrained")
    for axes, (kind, measurements) in zip(panels, results.items(), strict=True):
        for name, contestant in CONTESTANTS.items():
            curve = [(x.seq, 1e6 * min(x.seconds)) for x in measurements if x.name == name]
            if curve:
                axes.plot(*zip(*curve, strict=True), contestant.style, label=name)
        x_label = "tokens before" if kind == "decoding" else "tokens in a row"
        axes.set(xscale="log", yscale="log", title=kind, xlabel=x_label)
        axes.set_xticks(lengths, [f"{seq // 1024}K" if seq % 1024 == 0 else str(seq) for seq in lengths])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("microseconds per token")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=150)
    print(f"wrote {path}")


if __name__ == "__main__":
    main(tyro.cli(Arguments))
