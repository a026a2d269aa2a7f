"""Compile a run for devices that are not here, and say whether it fits and how fast it could be at best.

    python -m train.compile --config configs/owt_latte_r_swa.py --topology v5e:16x16
    python -m train.compile --config configs/scale_2b.py --topology a100:4 --optim.accumulate 16

What is compiled is the step that `train.main` runs, by the compiler that would compile it there; nothing is allocated.
It takes a minute or two. The exit code is 1 if the step does not fit into the memory of the devices.
"""

import argparse
import math
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from rich.console import Console
from rich.table import Table

from train import main as training
from train.config import Config
from train.console import plain_errors
from train.flops import forward_flops_per_token, train_flops_per_token
from train.fsdp import make_mesh
from train.hardware import CompilerMissing, Target, UnknownTopology, target
from train.hlo import Program, read_arrays
from train.step import batch_specs, make_trainer, which_are_trained


class Collectives(NamedTuple):
    """What one device exchanges with others in a step, by kind and type."""

    arrays: Counter[tuple[str, str]]
    """How many arrays."""
    moved: Counter[tuple[str, str]]
    """How many bytes it sends, and receives, in a ring."""
    num_unknown_loops: int
    """Loops around them whose length could not be read; they are counted once."""


@dataclass(frozen=True)
class Report:
    """What the compiler says of a step, and what follows from it. Sizes in bytes, times in seconds."""

    config: Config
    target: Target
    mesh: dict[str, int]
    num_parameters: int
    num_trained: int
    """How many of them are trained: only these are float32, with two moments each."""
    arguments: int
    """State and batch of a device."""
    temporaries: int
    needed: int
    """Arguments, temporaries, and results that do not take the place of arguments: what a device must have free."""
    peak: int
    """The most of it that is in use at any moment."""
    collectives: Collectives
    compile_seconds: float

    @property
    def num_tokens(self) -> int:
        """The tokens of a batch."""
        return self.config.data.batch_size * self.config.data.seq

    @property
    def model_flops(self) -> float:
        """What the mathematics of a step asks of all devices."""
        return self.num_tokens * train_flops_per_token(self.config.model, self.config.data.seq, self.config.task)

    @property
    def recomputed_flops(self) -> float:
        """What the backward pass computes again: the logits at any rate, and the layers if nothing of them is kept."""
        model = self.config.model
        if self.config.remat == "full":
            return self.num_tokens * forward_flops_per_token(model, self.config.data.seq, self.config.task)
        return self.num_tokens * 2.0 * model.vocab_size * model.dim

    @property
    def bounds(self) -> dict[str, float]:
        """What a step takes at least, for each of the things that may hold it up."""
        device = self.target.accelerator
        flops = (self.model_flops + self.recomputed_flops) / len(self.target.devices)
        return {
            "arithmetic": flops / device.peak_flops,
            "memory": 2 * self.arguments / device.memory_bandwidth,
            "links": sum(self.collectives.moved.values()) / device.link_bandwidth,
        }

    @property
    def step_seconds(self) -> float:
        """What a step takes at least, if all of it overlaps."""
        return max(self.bounds.values())

    @property
    def utilisation(self) -> float:
        """The largest possible share of the devices' peak that goes into what the mathematics asks for."""
        peak = len(self.target.devices) * self.target.accelerator.peak_flops
        return self.model_flops / (self.step_seconds * peak)


class Unsuitable(ValueError):
    """A config that the devices cannot run."""


class DoesNotFit(Exception):
    """The compiler refuses, since a device would need more bytes than there are."""

    def __init__(self, needed: float, available: float):
        super().__init__(f"The step must fit into {_size(available)}, and needs {_size(needed)}.")
        self.needed, self.available = needed, available


def compile_step(config: Config, target: Target) -> Report:
    """Compile the training step of a config for a target."""
    try:
        mesh = make_mesh(config.mesh, list(target.devices))
        trainer = make_trainer(config, mesh)
    except ValueError as error:
        raise Unsuitable(f"{error}{_other_batches(config, len(target.devices))}") from error
    start = time.monotonic()
    try:
        compiled = target.compile(trainer.train_step, trainer.abstract_state, abstract_batch(config, mesh))
    except jax.errors.JaxRuntimeError as error:
        # What it calls temporaries are the arguments as well. Its G are 2**30.
        sizes = re.search(r"temporaries \(([\d.]+)G\) exceeds available HBM \(([\d.]+)G\)", str(error))
        if sizes is None:
            raise
        raise DoesNotFit(float(sizes[1]) * 2**30, float(sizes[2]) * 2**30) from error
    seconds = time.monotonic() - start
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert text is not None
    params, count = trainer.abstract_state.params, lambda tree: sum(x.size for x in jax.tree.leaves(tree))
    new_results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Report(
        config,
        target,
        dict(mesh.shape),
        count(params),
        count(eqx.filter(params, which_are_trained(config, params))),
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.argument_size_in_bytes + memory.temp_size_in_bytes + new_results,
        memory.peak_memory_in_bytes,
        read_collectives(text, len(target.devices)),
        seconds,
    )


def abstract_batch(config: Config, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Describe a batch as the data give it."""
    rows, seq, task = config.data.batch_size, config.data.seq, config.task
    tokens = jax.ShapeDtypeStruct((rows, seq), jnp.int32)
    batch = {"inputs": tokens, "index": jax.ShapeDtypeStruct((rows,), jnp.uint32)}
    if task.kind == "next_token":
        batch |= {"targets": tokens} | ({"segment_ids": tokens} if config.data.pack == "documents" else {})
    else:
        sequence = jax.ShapeDtypeStruct((rows, seq, 1), jnp.float32) if task.is_numeric else tokens
        mask = jax.ShapeDtypeStruct((rows, seq), jnp.bool)
        pair = {"others": sequence, "other_mask": mask} if task.kind == "classify_pairs" else {}
        batch |= {"inputs": sequence, "mask": mask, **pair, "targets": jax.ShapeDtypeStruct((rows,), jnp.int32)}
    specs = batch_specs(batch)
    place = lambda name, x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, specs[name]))
    return {name: place(name, x) for name, x in batch.items()}


def _other_batches(config: Config, num_devices: int) -> str:
    """Say which batches the devices could share, if it is the batch that they cannot."""
    rows, accumulate = config.data.batch_size, config.optim.accumulate
    share = num_devices * accumulate
    if rows % share == 0:
        return ""
    fewer = "" if rows % num_devices else f", or --optim.accumulate {math.gcd(accumulate, rows // num_devices)}"
    return f" Try --data.batch-size {math.ceil(rows / share) * share}{fewer}."


# What a device sends and receives in a ring of n, for each byte that it puts in.
RING_TRAFFIC = {
    "all-gather": lambda n: n - 1,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}


# The attributes by which an instruction names the computations that it runs.
CALLS = ("calls", "to_apply", "body", "branch_computations", "true_computation", "false_computation")


def read_collectives(text: str, num_devices: int) -> Collectives:
    """Count what a compiled program, given as HLO text, moves between devices, loops as often as they run."""
    program = Program(text)
    callers: dict[str, list[str]] = defaultdict(list)
    for caller, computation in program.computations.items():
        for instruction in computation.values():
            for called in instruction.called(*CALLS):
                callers[called].append(caller)
    unknown = set()

    @cache
    def num_runs(name: str) -> int:
        length = program.loop_lengths.get(name, 1)
        if length is None:
            unknown.add(name)
        num_calls = sum(map(num_runs, callers[name])) if callers[name] else 1
        return num_calls if length is None else num_calls * length

    arrays, moved, chains = Counter(), Counter(), set()
    for name, computation in program.computations.items():
        for instruction in computation.values():
            kind = instruction.operation.removesuffix("-start")
            chain = re.search(r'chain_id="(\d+)"', instruction.line)
            # The TPU compiler cuts a collective into a chain of pieces, computes between them, and repeats it in each.
            if kind not in RING_TRAFFIC or (chain and chain[1] in chains):
                continue
            if chain:
                chains.add(chain[1])
            traffic = RING_TRAFFIC[kind](_group_size(instruction.line, num_devices))
            for operand in instruction.operands:
                for array in read_arrays(computation[operand].shape):
                    arrays[kind, array.dtype] += num_runs(name)
                    moved[kind, array.dtype] += num_runs(name) * round(traffic * array.size)
    return Collectives(arrays, moved, len(unknown))


def _group_size(line: str, num_devices: int) -> int:
    """Return how many devices take part in a collective together, from any of the notations."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return listed[1].count(",") + 1
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(counted[1])
    if named := re.search(r"replica_groups=mesh\[([^]]*)\] \{([^}]*)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", named[2]))
    return num_devices


def show(report: Report, console: Console) -> None:
    """Print a report."""
    device, config, collectives = report.target.accelerator, report.config, report.collectives
    pieces = config.optim.accumulate
    rows = config.data.batch_size // (report.mesh["data"] * report.mesh["fsdp"] * pieces)
    mesh = ", ".join(f"{axis} {size}" for axis, size in report.mesh.items())
    table = Table("", "", "", box=None, show_header=False, pad_edge=False)
    table.columns[0].style, table.columns[1].justify = "bold", "right"

    def section(title: str, *lines: tuple[str, str]) -> None:
        for number, line in enumerate(lines):
            table.add_row("" if number else title, *line)

    section("devices", (f"{len(report.target.devices)}", device.kind), ("", f"mesh: {mesh}"))
    num_frozen = report.num_parameters - report.num_trained
    frozen = [(f"{num_frozen / 1e6:,.1f}M", f"{config.compute_dtype}, not trained")] if num_frozen else []
    section("parameters", (f"{report.num_trained / 1e6:,.1f}M", "float32, each with two moments"), *frozen)
    section(
        "batch",
        (f"{report.num_tokens:,}", f"tokens: {config.data.batch_size} rows of {config.data.seq}"),
        (f"{rows}", f"rows at a time on a device, pieces: {pieces}"),
    )
    section(
        "memory of a device",
        (_size(report.arguments), "arguments: state and batch"),
        (_size(report.temporaries), f"temporaries, remat {config.remat}"),
        (_size(report.needed), f"in all, {report.needed / device.memory:.0%} of {_size(device.memory)}"),
        (_size(report.peak), "of it in use at the peak"),
    )
    section(
        "arithmetic of a step",
        (f"{report.model_flops:.2e}", "FLOPs of the mathematics (train.flops)"),
        (f"{report.recomputed_flops:.2e}", f"FLOPs done twice, remat {config.remat}"),
    )
    kinds = collectives.moved.most_common()
    section(
        "sent by a device",
        *[
            (_size(moved), f"{kind} {dtype}, arrays: {collectives.arrays[kind, dtype]:,}")
            for (kind, dtype), moved in kinds
        ],
    )
    if collectives.num_unknown_loops:
        section("", (f"{collectives.num_unknown_loops}", "loops of unknown length around them, counted once"))
    reasons = {
        "arithmetic": "all FLOPs at the peak rate",
        "memory": "state read and written once",
        "links": "sending over the fast links",
    }
    times = [(f"{report.bounds[name]:.4f} s", reason) for name, reason in reasons.items()]
    section("a step takes at least", *times)
    rate = report.num_tokens / report.step_seconds
    section("at best", (f"{rate:,.0f}", "tokens per second"), (f"{report.utilisation:.0%}", "model FLOPs utilisation"))
    section("compiled in", (f"{report.compile_seconds:.0f} s", ""))
    console.print(table)


def advice(config: Config, target: Target) -> list[str]:
    """List what would make a step smaller."""
    mesh = make_mesh(config.mesh, list(target.devices)).shape
    rows = config.data.batch_size // (mesh["data"] * mesh["fsdp"])
    ways = []
    if config.optim.accumulate < rows:
        ways.append(f"--optim.accumulate {rows}: one row at a time on each device")
    if config.remat != "full":
        ways.append("--remat full: keep nothing of a layer for the backward pass")
    if mesh["data"] > 1:
        ways.append("--mesh.data 1 --mesh.fsdp -1: more shards instead of replicas")
    ways.append("more devices, which share the state; --data.seq, shorter rows; --model.vocab-size, fewer logits")
    return ways


def _size(size: float | int) -> str:
    scale, unit = next((x for x in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if size >= x[0]), (1, "B"))
    return f"{size / scale:.4g} {unit}"


def parse(arguments: Sequence[str]) -> tuple[str, Config]:
    """Read the command line: the name of the topology, and the config as `train.main` reads it."""
    parser = argparse.ArgumentParser(
        prog="python -m train.compile",
        description=__doc__,
        epilog="All other options, --config and --data.batch-size among them, are those of python -m train.main.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--topology", required=True, help="the devices: v5e:16x16, v5p:4x4x8, a100:8, h100:2x8, ...")
    own, others = parser.parse_known_args(arguments)
    command = training.parse(others)
    if command.config is None:
        parser.error("--config must name a file, such as configs/owt_latte_r_swa.py")
    return own.topology, command.run


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile, and show what came of it."""
    # Devices that happen to be here are none of this, and some plugins fail where there are none.
    jax.config.update("jax_platforms", "cpu")
    topology, config = parse(sys.argv[1:] if arguments is None else arguments)
    console = Console(highlight=False)
    try:
        devices = target(topology)
        needed, available = _compile_and_show(config, devices, console)
    except (UnknownTopology, CompilerMissing, Unsuitable) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    if needed > available:
        sizes = f"a device needs {_size(needed)} and has {_size(available)}"
        console.print(f"Does not fit: {sizes}, {_size(needed - available)} too little. What would help:")
        for way in advice(config, devices):
            console.print(f"  {way}", soft_wrap=True)
        sys.exit(1)


def _compile_and_show(config: Config, devices: Target, console: Console) -> tuple[float | int, float]:
    """Return the bytes that a device needs, and has."""
    console.print(f"compiling for {devices.name}: this takes a minute or two")
    try:
        with console.status("compiling"):
            report = compile_step(config, devices)
    except DoesNotFit as error:
        return error.needed, error.available
    show(report, console)
    return report.needed, devices.accelerator.memory


if __name__ == "__main__":
    with plain_errors():
        main()
