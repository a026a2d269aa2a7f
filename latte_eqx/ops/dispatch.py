"""The one place where an op's implementation is chosen."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

Implementation = Literal["reference", "scan", "chunked", "pallas"]


def select(op: str, implementations: Mapping[str, Callable[..., Any]], name: str | None) -> Callable[..., Any]:
    """Return the implementation called `name`; `None` means `"chunked"`, the fastest that runs on every platform.

    An op registers what it has in `implementations`. A name that is not there raises: there is no silent fallback.
    """
    name = "chunked" if name is None else name
    if name not in implementations:
        choices = ", ".join(map(repr, implementations))
        raise ValueError(f"`implementation` of `{op}` must be None or one of {choices}, got {name!r}.")
    return implementations[name]
