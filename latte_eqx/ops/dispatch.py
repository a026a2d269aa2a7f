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


def chosen_passes(choices: Mapping[str, Choice], kernels: Mapping[str, Passes], otherwise: Passes) -> Passes:
    """Take kernels on the platforms whose choice is `"pallas"`, and `otherwise` on all others."""
    chosen = {name: passes for name, passes in kernels.items() if choices[name].implementation == "pallas"}
    return by_platform(**chosen, default=otherwise)
