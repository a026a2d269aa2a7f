"""How fast are the ops, and what do they need?

    python benchmarks/ops.py [--repeats 7] [--implementation chunked] [--figure ops.png]

Parity with the reference comes first; then ratios, each measured in one run. Batch 2, 8 heads, 32 latents and 64 dims
per head, float32. The yardstick `scan` is the paper's algorithm: one token at a time, unrolled 32 times. On a GPU or a
TPU, `--implementation pallas` times the kernels.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import tyro
from harness import best_times, machine, print_table

from latte_eqx.ops import LatteState, latte_causal, linear_scan, window_attention
from latte_eqx.ops.dispatch import Implementation
from latte_eqx.ops.latte.scan import latte_causal as scan_latte

BATCH, HEADS, LATENTS, DIM, WINDOW = 2, 8, 32, 64, 128
LENGTHS = (1024, 4096)


@dataclass(frozen=True)
class Arguments:
    """Time causal Latte, the linear scan and the window against scans of single tokens and against full attention."""

    repeats: int = 7
    """Rounds; the best one counts."""
    implementation: Implementation = "chunked"
    """The implementation to time."""
    figure: Path | None = None
    """Where to write the bars as a PNG."""


def inputs(seq: int, batch: int = BATCH) -> tuple[jax.Array, ...]:
    weights, keys, values, cotangent = jax.random.split(jax.random.key(seq), 4)
    shape = (batch, HEADS, seq)
    return (
        jax.nn.softmax(jax.random.normal(weights, (*shape, LATENTS))),
        jax.random.normal(keys, (*shape, LATENTS)),
        jax.random.normal(values, (*shape, DIM)),
        jax.random.normal(cotangent, (*shape, DIM)),
    )


def scan(weights, keys, values):
    """The yardstick."""
    state = LatteState.empty(*keys.shape[:2], latents=LATENTS, dim=DIM)
    return scan_latte(weights, keys, values, None, state, unroll=32)[0]


def softmax_attention(queries, keys, values):
    """Causal attention with the same heads; its queries and keys are as wide as its values."""
    to_heads_last = lambda x: x.swapaxes(1, 2)
    y = jax.nn.dot_product_attention(*map(to_heads_last, (queries, keys, values)), is_causal=True)
    return to_heads_last(y)


def forward(op):
    return jax.jit(lambda *arrays: op(*arrays[:-1]))


def forward_and_backward(op):
    def run(*arrays):
        y, pull_back = jax.vjp(op, *arrays[:-1])
        return y, pull_back(arrays[-1])

    return jax.jit(run)


def check_parity(op) -> None:
    """Raise unless values and gradients are those of the reference."""
    arrays = tuple(x[:1, :2] for x in inputs(200))
    got = forward_and_backward(op)(*arrays)
    want = forward_and_backward(lambda *x: latte_causal(*x, implementation="reference")[0])(*arrays)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if not float(jnp.abs(g - w).max()) <= 1e-5 * float(jnp.abs(w).max()):
            raise AssertionError("The implementation does not agree with the reference.")
    print("parity with the reference: values and gradients agree to 1e-5")


def temporary_bytes(compiled_function, arrays) -> int:
    return compiled_function.lower(*arrays).compile().memory_analysis().temp_size_in_bytes


def matmul_flops_per_second(repeats: int) -> float:
    """Measure a dense 2048^3 product."""
    x = jnp.ones((2048, 2048))
    run = jax.jit(lambda x: x @ x)
    return 2 * 2048**3 / best_times({"matmul": lambda: run(x)}, repeats)["matmul"]


def useful_flops(seq: int) -> int:
    """Count what the recurrence asks for: each token decays and feeds each latent's sum, and reads it."""
    return BATCH * HEADS * seq * LATENTS * DIM * 2 * 2


def compare_others(arguments: Arguments) -> list[tuple[str, str, str, float, str]]:
    """Time the linear scan against one token at a time, and the window against full attention."""
    rows = []
    scan_with = lambda name: lambda log_decay, x: linear_scan(log_decay, x, implementation=name)[0]
    in_window = lambda *arrays: window_attention(*arrays, window=WINDOW, implementation=arguments.implementation)
    for seq in LENGTHS:
        _, _, values, cotangent = inputs(seq)
        flat = lambda x, seq=seq: x.swapaxes(1, 2).reshape(BATCH, seq, HEADS * DIM)
        contests = {
            "linear_scan": (
                (scan_with(arguments.implementation), scan_with("scan"), "scan"),
                (-jnp.abs(flat(values)), flat(values), flat(cotangent)),
            ),
            "window_attention": (
                (in_window, softmax_attention, "full attention"),
                (values + 1, values - 1, values, cotangent),
            ),
        }
        for kind, compile_op in (("forward", forward), ("forward + backward", forward_and_backward)):
            for name, ((op, other, yardstick), arrays) in contests.items():
                runs = {"op": partial(compile_op(op), *arrays), "other": partial(compile_op(other), *arrays)}
                times = best_times(runs, arguments.repeats)
                ratio = times["other"] / times["op"]
                rows.append((f"{name}, {kind}, T={seq}", yardstick, f"{1e3 * times['op']:.1f} ms", ratio, ""))
    return rows


def main(arguments: Arguments) -> None:
    op = lambda *arrays: latte_causal(*arrays, implementation=arguments.implementation)[0]
    vmapped = lambda *arrays: jax.vmap(op)(*arrays)
    print(machine())
    check_parity(op)
    rows = []

    for kind, compile_op in (("forward", forward), ("forward + backward", forward_and_backward)):
        for seq in LENGTHS:
            arrays = inputs(seq)
            functions = {"scan": compile_op(scan), "op": compile_op(op), "vmapped": compile_op(vmapped)}
            runs = {name: partial(function, *arrays) for name, function in functions.items()}
            times = best_times(runs, arguments.repeats)
            target = {"forward": {1024: 1.6, 4096: 1.3}, "forward + backward": {1024: 15, 4096: 9}}[kind][seq]
            for name, note in (("op", ""), ("vmapped", " (vmapped)")):
                ratio = times["scan"] / times[name]
                rows.append((f"{kind}{note}, T={seq}", "scan", f"{1e3 * times[name]:.1f} ms", ratio, f">= {target}x"))
            if kind != "forward":
                memory = {name: temporary_bytes(functions[name], arrays) for name in ("scan", "op")}
                ratio = memory["scan"] / memory["op"]
                rows.append((f"temporary memory, T={seq}", "scan", f"{memory['op'] / 2**20:.1f} MiB", ratio, ">= 12x"))

    arrays = inputs(4096)
    wide = arrays[2] + 1, arrays[2] - 1, *arrays[2:]
    attention, latte = forward_and_backward(softmax_attention), forward_and_backward(op)
    times = best_times({"attention": partial(attention, *wide), "op": partial(latte, *arrays)}, arguments.repeats)
    ratio = times["attention"] / times["op"]
    rows.append(("forward + backward, T=4096", "softmax attention", f"{1e3 * times['op']:.1f} ms", ratio, ">= 25x"))

    one, many = inputs(16 * 1024, batch=1), inputs(1024, batch=16)
    times = best_times({"one": partial(latte, *one), "many": partial(latte, *many)}, arguments.repeats)
    ratio = times["one"] / times["many"]
    rows.append(("1 row of 16K", "16 rows of 1K", f"{1e3 * times['one']:.1f} ms", ratio, "<= 1.15x"))

    rows += compare_others(arguments)
    run = forward(op)
    seconds = best_times({"op": partial(run, *arrays)}, arguments.repeats)["op"]
    share = useful_flops(4096) / seconds / matmul_flops_per_second(arguments.repeats)
    print_table(
        f"{arguments.implementation}; a ratio above 1 means faster, or smaller, than the yardstick",
        ("measure", "yardstick", "op", "ratio", "to reach"),
        [(measure, yardstick, value, f"{ratio:.2f}x", target) for measure, yardstick, value, ratio, target in rows],
    )
    print(f"\nforward at T=4096 does its useful work at {100 * share:.0f} % of the rate of a dense 2048^3 matmul")
    if arguments.figure is not None:
        plot(rows, arguments.figure)


def plot(rows, path: Path) -> None:
    """Draw the ratios, on a logarithmic axis, with what is to be reached as a mark."""
    figure, axes = plt.subplots(figsize=(9, 0.45 * len(rows) + 1), layout="constrained")
    labels = [f"{measure}\nvs {yardstick}" for measure, yardstick, *_ in rows]
    axes.barh(labels, [row[3] for row in rows], color="#b07d4f")
    goals = [(float(row[4].strip("<>= x")), label) for row, label in zip(rows, labels, strict=True) if row[4]]
    axes.plot(*zip(*goals, strict=True), "k|", markersize=16, label="to reach")
    axes.set(xscale="log", xlabel="ratio")
    axes.tick_params(axis="y", labelsize=7)
    axes.invert_yaxis()
    axes.legend()
    figure.savefig(path, dpi=150)
    print(f"wrote {path}")


if __name__ == "__main__":
    main(tyro.cli(Arguments))
