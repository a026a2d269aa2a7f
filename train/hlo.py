"""Compiled programs, read from the text that XLA gives of them."""

import math
import re
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

# They name or arrange arrays, or run others that are counted themselves.
FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
    *("while", "conditional", "call", "copy-done", "async-start", "async-done", "opt-barrier"),
}


class Instruction(NamedTuple):
    """One line of a program."""

    shape: str
    operation: str
    operands: list[str]
    line: str

    def called(self, *attributes: str) -> list[str]:
        """Name the computations that it runs, by the attributes that name them."""
        names = re.findall(rf"\b(?:{'|'.join(attributes)})=\{{?(%[\w.-]+(?:, %[\w.-]+)*)", self.line)
        return re.findall(r"%([\w.-]+)", " ".join(names))

    @property
    def constant(self) -> int | None:
        """The number that it stands for, if it does."""
        found = re.search(r" [su]32\[\]\S* constant\((-?\d+)\)", self.line)
        return int(found[1]) if found else None


Computation = dict[str, Instruction]


class Array(NamedTuple):
    """An array of a program; its bytes as it is, and as it lies in memory, the main one or one on the chip."""

    dtype: str
    size: int
    padded_size: int
    is_in_main_memory: bool


def read_arrays(shape: str) -> Iterator[Array]:
    """Yield the arrays of a shape."""
    for dtype, sides, layout in re.findall(r"\b(pred|[a-z]+\d\w*)\[([\d,]*)\](?:\{([^}]*)\})?", shape):
        bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
        lengths = [int(side) for side in sides.split(",") if side]
        order, _, tiling = layout.partition(":")
        tile = re.match(r"T\(([\d,]+)\)", tiling)
        padded = list(lengths)
        if tile and lengths:
            # The first numbers of the order are the axes that change fastest.
            axes = [int(axis) for axis in order.split(",")]
            for axis, side in zip(axes, reversed([int(side) for side in tile[1].split(",")]), strict=False):
                padded[axis] = math.ceil(padded[axis] / side) * side
        yield Array(dtype, math.prod(lengths) * bits // 8, math.prod(padded) * bits // 8, "S(1)" not in tiling)


class Program:
    """The computations of a program, and how often each runs.

    Of instructions whose names in the traced program contain `without`, nothing is counted.
    """

    def __init__(self, text: str, without: str | None = None):
        self._without = without
        self.computations: dict[str, Computation] = {}
        current: Computation = {}
        for line in text.splitlines():
            if opening := re.match(r"(ENTRY )?%([\w.-]+) \(.*\{$", line):
                current = self.computations.setdefault(opening[2], {})
                if opening[1]:
                    self.entry = opening[2]
            elif found := re.match(r"\s+(?:ROOT )?%([\w.-]+) = (.*?) ([a-z][a-z0-9-]*)\(([^)]*)\)", line):
                name, shape, operation, operands = found.groups()
                current[name] = Instruction(shape, operation, re.findall(r"%([\w.-]+)", operands), line)

    @cached_property
    def loop_lengths(self) -> dict[str, int | None]:
        """How often the body of each loop runs at a time; `None` where the text does not tell."""
        return {
            body: self._loop_length(instruction, computation)
            for computation in self.computations.values()
            for instruction in computation.values()
            for body in instruction.called("body")
        }

    def _loop_length(self, loop: Instruction, around: Computation) -> int | None:
        """Return what the compiler notes, or else where the counter begins and ends."""
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.line):
            return int(known[1])
        condition = self.computations[loop.called("condition")[0]].values()
        ends = [x.constant for x in condition if x.constant is not None]
        counters = [re.findall(r"index=(\d+)", x.line)[0] for x in condition if x.operation == "get-tuple-element"]
        if len(ends) != 1 or len(counters) != 1 or "direction=LT" not in "".join(x.line for x in condition):
            return None
        begin = around[loop.operands[0]]
        begin = around[begin.operands[int(counters[0])]] if begin.operation == "tuple" else begin
        while begin.operation == "copy":
            begin = around[begin.operands[0]]
        return None if begin.constant is None else ends[0] - begin.constant

    def memory_traffic(self, name: str | None = None) -> int:
        """Count the bytes that a computation reads from and writes to main memory, loops as often as they run.

        Of a branch the lighter side counts. What a loop of unknown length moves counts once.
        """
        computation = self.computations[self.entry if name is None else name]
        return sum(self._traffic_of(instruction, computation) for instruction in computation.values())

    def _traffic_of(self, instruction: Instruction, around: Computation) -> int:
        if self._without and re.search(rf'op_name="[^"]*{self._without}', instruction.line):
            return 0
        match instruction.operation:
            case "while":
                (body,) = instruction.called("body")
                return (self.loop_lengths[body] or 1) * self.memory_traffic(body)
            case "conditional":
                branches = instruction.called("branch_computations", "true_computation", "false_computation")
                return min(map(self.memory_traffic, branches))
            case "call" | "async-start":
                return sum(map(self.memory_traffic, instruction.called("to_apply", "calls", "called_computations")))
            case "fusion":
                return self._fusion_traffic(instruction, around)
            case "dynamic-slice":
                return 2 * _size(instruction.shape)
            case "dynamic-update-slice":
                return 2 * _size(around[instruction.operands[1]].shape)
            case operation if operation in FREE:
                return 0
        return _size(instruction.shape) + sum(_size(around[x].shape) for x in instruction.operands if x in around)

    def _fusion_traffic(self, fusion: Instruction, around: Computation) -> int:
        """Of arrays that are only sliced, and of ones that are updated in place, the slice counts."""
        (name,) = fusion.called("calls")
        inside = self.computations[name]

        def source(name: str) -> str:
            """Look through what only names an array differently."""
            while inside[name].operation == "bitcast":
                (name,) = inside[name].operands
            return name

        root = inside[source(next(name for name, x in inside.items() if x.line.lstrip().startswith("ROOT")))]
        if root.operation in ("tuple", "dynamic-update-slice"):
            results = [inside[source(x)] for x in root.operands] if root.operation == "tuple" else [root]
            updated = lambda x: inside[x.operands[1]] if x.operation == "dynamic-update-slice" else x
            total = sum(_size(updated(result).shape) for result in results)
        else:
            total = _size(fusion.shape)
        parameters = {int(re.findall(r"parameter\((\d+)\)", x.line)[0]): name
                      for name, x in inside.items() if x.operation == "parameter"}  # fmt: skip
        for index, operand in enumerate(fusion.operands):
            users = [
                (x, places)
                for x in inside.values()
                if x.operation != "bitcast"
                and (places := [i for i, y in enumerate(x.operands) if source(y) == parameters[index]])
            ]
            slices = [x for x, _ in users if x.operation == "dynamic-slice"]
            updates = [x for x, places in users if x.operation == "dynamic-update-slice" and places == [0]]
            if len(slices) + len(updates) < len(users):
                total += _size(around[operand].shape)
            elif _size(around[operand].shape):
                total += sum(_size(x.shape) for x in slices)
        return total


def _size(shape: str) -> int:
    """Return the bytes that the arrays of a shape take in main memory."""
    return sum(array.padded_size for array in read_arrays(shape) if array.is_in_main_memory)
