"""The one place where an op's implementation is chosen."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

from jax import lax

Implementation = Literal["reference", "scan", "chunked", "pallas"]


class Choice(NamedTuple):
    """What runs on a platform if nobody names an implementation, and why."""

    implementation: Implementation
    reason: str


# For each op and platform; any other platform is treated as a CPU. The numbers are those of `benchmarks/aot.py`.
NO_KERNELS = Choice("chunked", "kernels are for accelerators")
DEFAULTS: dict[str, dict[str, Choice]] = {
    "latte_causal": {
        "cpu": NO_KERNELS,
        "tpu": Choice("pallas", "moves each array once, 'chunked' 3 to 10 times; fewer than 32 tokens: 'chunked'"),
        "cuda": Choice(
            "pallas", "moves each array 1 to 1.8 times, 'chunked' 10 times; fewer than 32 tokens: 'chunked'"
        ),
    },
    "linear_scan": {
        "cpu": NO_KERNELS,
        "tpu": Choice("pallas", "moves each array once, 'chunked' 3 to 27 times; a single token: 'chunked'"),
        "cuda": Choice("pallas", "moves each array 1 to 1.7 times, 'chunked' 7 times; a single token: 'chunked'"),
    },
    "window_attention": {
        "cpu": NO_KERNELS,
        "tpu": Choice(
            "pallas",
            "moves each array once; below 128 queries: 'chunked' "
            "(splash attention fails inside a checked shard_map, and rounds float32)",
        ),
        "cuda": Choice(
            "pallas",
            "moves each array once, 'chunked' 13 to 20 times; below 128 queries: 'chunked' "
            "(cuDNN's attention can be traced only where the library is, and takes no float32)",
        ),
    },
}


class Passes(NamedTuple):
    """The forward and the backward pass of an implementation.

    What an op keeps between them is the same for all of its implementations, so that the passes of one can be exchanged
    for those of another when a program is compiled.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]


def select(op: str, implementations: Mapping[str, Callable[..., Any]], name: str) -> Callable[..., Any]:
    """Return the implementation called `name`; a name that is not there raises, there is no silent fallback."""
    if name not in implementations:
        choices = ", ".join(map(repr, implementations))
        raise ValueError(f"`implementation` of `{op}` must be None or one of {choices}, got {name!r}.")
    return implementations[name]


def by_platform(**platforms: Passes) -> Passes:
    """Take the passes of the platform that a program is compiled for; `default` names those of all others."""

    def choose(which: str) -> Callable[..., Any]:
        def run(*arrays: Any, **settings: Any) -> Any:
            passes = {name: partial(getattr(passes, which), **settings) for name, passes in platforms.items()}
            return lax.platform_dependent(*arrays, **passes)

        return run

    return Passes(choose("forward"), choose("backward"))


def kernels_only(**kernels: Passes) -> Passes:
    """Take the kernels of the platform; on one that has none, Pallas says so when the program is compiled."""
    return by_platform(**kernels, default=next(iter(kernels.values())))


def chosen_passes(op: str, kernels: Mapping[str, Passes], otherwise: Passes) -> Passes:
    """Take kernels on the platforms where they are the default, and `otherwise` on all others."""
    chosen = {name: passes for name, passes in kernels.items() if DEFAULTS[op][name].implementation == "pallas"}
    return by_platform(**chosen, default=otherwise)


def describe() -> None:
    """Print which implementation of each op runs on which platform, and why."""
    for op, choices in DEFAULTS.items():
        print(op)
        for platform, choice in choices.items():
            print(f"  {platform:5} {choice.implementation:8} {choice.reason}")
