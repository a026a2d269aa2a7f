"""What do the ops cost on accelerators that are not here? Compiled, not timed.

    python benchmarks/aot.py [--targets v5e:1x1 a100:1] [--lengths 1024 16384] [--figure aot.png]

Every implementation is compiled for every target, in bfloat16 and with the paper's heads: 8 of 16 latents and 96 dims.
The text of the compiled program tells what it reads from and writes to main memory; the ideal is to read each argument
once and write each result once. FLOPs are those of matrix products, counted in the traced program along the ordinary
path; a float32 product counts as six of bfloat16. What only steep keys take is left out: of their kernels on a GPU, all
others read no more than a flag.

The second table bounds a layer's mixing from below: no program takes less than its FLOPs at the peak rate, nor than its
bytes at the memory's. Full attention counts as the best possible: each array moved once, half of the square left out.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import tyro
from harness import print_table
from jax.extend.core import jaxprs_in_params
from jax.sharding import SingleDeviceSharding

from latte_eqx.ops import latte_causal, linear_scan, window_attention
from latte_eqx.ops.dispatch import DEFAULTS
from latte_eqx.ops.latte.passes import TOKEN_BY_TOKEN
from train.hardware import GpuKernel, Target, target
from train.hlo import Program

TOKENS, HEADS, LATENTS, DIM, WINDOW = 16384, 8, 16, 96, 128
WIDTH = HEADS * DIM


@dataclass(frozen=True)
class Arguments:
    """Compile the ops for accelerators, and count what they move and compute."""

    targets: tuple[str, ...] = ("v5e:1x1", "v6e:1x1", "a100:1", "h100:1")
    """Devices to compile for."""
    lengths: tuple[int, ...] = (1024, 16384)
    """Tokens in a row; a batch has 16384 tokens or one row."""
    bounds: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
    """Lengths in the table of bounds."""
    figure: Path | None = None
    """Where to write the bounds as a PNG."""


def heads_apart(x):
    """From (batch, seq, heads x width), as projections give it, to (batch, heads, seq, width)."""
    return x.reshape(*x.shape[:2], HEADS, -1).swapaxes(1, 2)


def heads_together(x):
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)


def latte(weights, keys, values, *, implementation):
    y, _ = latte_causal(*map(heads_apart, (weights, keys, values)), implementation=implementation)
    return heads_together(y)


def scan(log_decay, inputs, *, implementation):
    return linear_scan(log_decay, inputs, implementation=implementation)[0]


def window(queries, keys, values, *, implementation):
    arrays = map(heads_apart, (queries, keys, values))
    return heads_together(window_attention(*arrays, window=WINDOW, implementation=implementation))


# The op, the widths of its arguments, and the implementations to compare.
OPS: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[str, ...]]] = {
    "latte_causal": (latte, (HEADS * LATENTS, HEADS * LATENTS, WIDTH), ("pallas", "chunked", "scan")),
    "linear_scan": (scan, (WIDTH, WIDTH), ("pallas", "chunked", "scan")),
    "window_attention": (window, (WIDTH, WIDTH, WIDTH), ("pallas", "chunked")),
}


@dataclass(frozen=True)
class Cost:
    """What a program takes: bytes moved, and of arguments and results alone; FLOPs; memory on the chip; kernels."""

    moved: int
    ideal: int
    flops: float
    temporary: int
    on_chip: int | None
    kernels: tuple[GpuKernel, ...]

    @property
    def ratio(self) -> float:
        return self.moved / self.ideal

    def seconds(self, where: Target) -> float:
        """What it takes at least."""
        device = where.accelerator
        return max(self.flops / device.peak_flops, self.moved / device.memory_bandwidth)


def costs(op: str, seq: int, implementation: str, where: Target) -> tuple[Cost, Cost]:
    """Compile both passes."""
    function, widths, _ = OPS[op]
    function = partial(function, implementation=implementation)
    batch = max(1, TOKENS // seq)
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(where.devices[0]))
    arrays = [place(jax.ShapeDtypeStruct((batch, seq, width), jnp.bfloat16)) for width in widths]
    y = place(jax.eval_shape(function, *arrays))

    def both(*arrays):
        y, pull_back = jax.vjp(function, *arrays[:-1])
        return y, pull_back(arrays[-1])

    size = lambda *arrays: sum(x.size * x.dtype.itemsize for x in arrays)
    forward = cost(jax.jit(function), arrays, size(*arrays, y), where)
    whole = cost(jax.jit(both), (*arrays, y), size(*arrays, y, *arrays), where)
    # The backward pass is what it adds to a program that has both: alone, it would find what was kept in a layout that
    # nobody has chosen for it.
    return forward, replace(whole, moved=whole.moved - forward.moved, flops=whole.flops - forward.flops)


def cost(function: Any, arguments: Any, ideal: int, where: Target) -> Cost:
    kernels = []
    if where.platform == "cuda":
        compiled, kernels = where.compile_kernels(function, *arguments)
    else:
        compiled = where.compile(function, *arguments)
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None
    assert memory is not None
    flops = product_flops(function.trace(*arguments).jaxpr.jaxpr, where.platform)
    used = re.findall(r'used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"', text)
    on_chip = max([*map(int, used), *(kernel.shared_memory for kernel in kernels)], default=None)
    moved = Program(text, without=TOKEN_BY_TOKEN).memory_traffic()
    return Cost(moved, ideal, flops, memory.temp_size_in_bytes, on_chip, tuple(kernels))


def product_flops(jaxpr: Any, platform: str) -> float:
    """Count the products of a traced program, but for those of steep keys; of a branch the heavier side counts."""
    total, count = 0.0, partial(product_flops, platform=platform)
    for equation in jaxpr.eqns:
        parameters = equation.params
        if TOKEN_BY_TOKEN in str(equation.source_info.name_stack):
            continue
        match equation.primitive.name:
            case "dot_general":
                (contracted, _), _ = parameters["dimension_numbers"]
                left, (result,) = equation.invars[0].aval, equation.outvars
                factor = 6 if left.dtype == jnp.float32 else 1
                total += factor * 2 * result.aval.size * math.prod(left.shape[axis] for axis in contracted)
            case "cond":
                of_platforms = parameters.get("branches_platforms") or [None] * len(parameters["branches"])
                pairs = zip(parameters["branches"], of_platforms, strict=True)
                named = [branch for branch, names in pairs if platform in (names or ())]
                total += max(count(branch.jaxpr) for branch in named or parameters["branches"])
            case "pallas_call":
                total += math.prod(parameters["grid_mapping"].grid) * count(parameters["jaxpr"])
            case "scan":
                total += parameters["length"] * count(parameters["jaxpr"].jaxpr)
            case _:
                total += sum(map(count, jaxprs_in_params(parameters)))
    return total


def attention_seconds(seq: int, where: Target) -> tuple[float, float]:
    """Bound full causal attention: two products forwards, five backwards, of half a square."""
    device, batch = where.accelerator, max(1, TOKENS // seq)
    square = batch * HEADS * 2 * DIM * seq * seq / 2
    array = 2 * batch * seq * WIDTH
    bound = lambda products, arrays: max(
        products * square / device.peak_flops, arrays * array / device.memory_bandwidth
    )
    return bound(2, 4), bound(5, 7)


def compare_implementations(arguments: Arguments) -> None:
    for name in arguments.targets:
        where, rows, kernels = target(name), [], {}
        for op, (_, _, implementations) in OPS.items():
            for seq in arguments.lengths:
                for implementation in implementations:
                    if implementation == "pallas" != DEFAULTS[op][where.platform].implementation:
                        continue  # There is no kernel.
                    forward, backward = costs(op, seq, implementation, where)
                    if implementation == "pallas":
                        ours = [x for x in backward.kernels if x.name.startswith(op.removesuffix("_causal"))]
                        kernels |= {(op, seq, kernel.name): kernel for kernel in ours}
                    rows.append((
                        op, str(seq), implementation,
                        f"{forward.moved / 1e6:.1f} MB, {forward.ratio:.2f}x",
                        f"{backward.moved / 1e6:.1f} MB, {backward.ratio:.2f}x",
                        f"{forward.flops / 1e9:.1f}", f"{backward.flops / 1e9:.1f}",
                        f"{backward.temporary / 1e6:.1f} MB",
                        f"{backward.on_chip / 1e3:.0f} kB" if backward.on_chip else "-",
                    ))  # fmt: skip
        header = (
            "op", "tokens", "implementation", "forward moves, x ideal", "backward moves, x ideal",
            "GFLOPs", "backward", "temporary", "on chip",
        )  # fmt: skip
        print_table(f"{name}: compiled, not timed", header, rows)
        if kernels:
            print_kernels(name, kernels)


def print_kernels(name: str, kernels: dict[tuple[str, int, str], GpuKernel]) -> None:
    """Say what the kernels take of a multiprocessor: what their block sizes were chosen by."""
    rows = [
        (op, str(seq), kernel.name, str(kernel.registers), f"{kernel.shared_memory / 1e3:.1f} kB", str(kernel.spilled))
        for (op, seq, _), kernel in kernels.items()
    ]
    header = ("op", "tokens", "kernel", "registers of a thread", "shared memory", "bytes spilled")
    print_table(f"{name}: kernels; those called exact run for steep keys alone", header, rows)


def bound_layers(arguments: Arguments) -> dict[str, list[tuple[float, float]]]:
    """Return, for each target and length, the least milliseconds of Latte-R-SWA++'s mixing and of full attention's."""
    bounds = {}
    for name in arguments.targets:
        where, rows = target(name), []
        for seq in arguments.bounds:
            ours = sum(
                cost.seconds(where)
                for op in OPS
                for cost in costs(op, seq, DEFAULTS[op][where.platform].implementation, where)
            )
            full = sum(attention_seconds(seq, where))
            bounds.setdefault(name, []).append((1e3 * ours, 1e3 * full))
            batch = max(1, TOKENS // seq)
            rows.append((f"{batch} x {seq}", f"{1e3 * ours:.3f}", f"{1e3 * full:.3f}", f"{full / ours:.2f}x"))
        header = ("batch x tokens", "Latte-R-SWA++ ms", "full attention ms", "ratio")
        print_table(f"{name}: bounds of a layer's mixing, both passes; compiled, not timed", header, rows)
    return bounds


def draw(bounds: dict[str, list[tuple[float, float]]], lengths: tuple[int, ...], path: Path) -> None:
    figure, axes = plt.subplots(1, len(bounds), figsize=(4 * len(bounds), 3.5), sharey=True, squeeze=False)
    for axis, (name, pairs) in zip(axes[0], bounds.items(), strict=True):
        ours, full = zip(*pairs, strict=True)
        axis.loglog(lengths, full, "o-", base=2, label="full attention")
        axis.loglog(lengths, ours, "s-", base=2, label="Latte-R-SWA++")
        axis.set(title=name, xlabel="tokens in a row")
    axes[0][0].set_ylabel("ms, at least")
    axes[0][0].legend()
    figure.suptitle("Mixing of one layer, forward and backward: lower bounds, compiled, not timed")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"\nwrote {path}")


def main(arguments: Arguments) -> None:
    jax.config.update("jax_platforms", "cpu")
    print(f"jax {jax.__version__}: compiled, not timed")
    compare_implementations(arguments)
    bounds = bound_layers(arguments)
    if arguments.figure is not None:
        draw(bounds, arguments.bounds, arguments.figure)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
