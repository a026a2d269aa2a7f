"""How fast are the ops, and what do they need?

    python benchmarks/ops.py [--repeats 7] [--implementation chunked] [--figure ops.png]

Parity with the reference comes first; then ratios, each measured in one run. Batch 2, 8 heads, 32 latents and 64 dims
per head, float32. Two yardsticks read one token at a time, unrolled 32 times: `paper`, the algorithm as the paper lists
it, and `scan`, our own, which carries averages instead of sums and is faster. On a GPU or a TPU, `--implementation
pallas` times the kernels.
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
    """Our own token by token."""
    state = LatteState.empty(*keys.shape[:2], latents=LATENTS, dim=DIM)
    return scan_latte(weights, keys, values, None, state, unroll=32)[0]


def paper(weights, keys, values):
    """The paper's: sums of values and of masses relative to the running maximum, which is found beforehand."""

    def read(carry, token):
        total, mass, old_peak = carry
        weight, key, value, peak = token
        kept, added = jnp.exp(old_peak - peak), jnp.exp(key - peak)
        mass = mass * kept + added
        total = total * kept[..., None] + added[..., None] * value[..., None, :]
        return (total, mass, peak), jnp.einsum("...l,...ld->...d", weight / mass, total)

    tokens = tuple(jnp.moveaxis(x, 2, 0) for x in (weights, keys, values, jax.lax.cummax(keys, axis=2)))
    empty = jnp.zeros((*keys.shape[:2], LATENTS, DIM)), jnp.zeros((*keys.shape[:2], LATENTS)), tokens[1][0]
    return jnp.moveaxis(jax.lax.scan(read, empty, tokens, unroll=32)[1], 0, 2)


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
            raise AssertionError("An implementation does not agree with the reference.")


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
    for contestant in (paper, scan, op):
        check_parity(contestant)
    print("parity with the reference: values and gradients agree to 1e-5")
    rows = []

    for kind, compile_op in (("forward", forward), ("forward + backward", forward_and_backward)):
        for seq in LENGTHS:
            arrays = inputs(seq)
            contestants = {"paper": paper, "scan": scan, "op": op, "vmapped": vmapped}
            functions = {name: compile_op(function) for name, function in contestants.items()}
            runs = {name: partial(function, *arrays) for name, function in functions.items()}
            times = best_times(runs, arguments.repeats)
            target = {"forward": {1024: 1.6, 4096: 1.3}, "forward + backward": {1024: 15, 4096: 9}}[kind][seq]
            for yardstick in ("paper", "scan"):
                for name, note in (("op", ""), ("vmapped", " (vmapped)")):
                    ratio = times[yardstick] / times[name]
                    value = f"{1e3 * times[name]:.1f} ms"
                    rows.append((f"{kind}{note}, T={seq}", yardstick, value, ratio, f">= {target}x"))
            if kind != "forward":
                memory = {name: temporary_bytes(functions[name], arrays) for name in ("paper", "scan", "op")}
                for yardstick in ("paper", "scan"):
                    value, ratio = f"{memory['op'] / 2**20:.1f} MiB", memory[yardstick] / memory["op"]
                    rows.append((f"temporary memory, T={seq}", yardstick, value, ratio, ">= 12x"))

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
