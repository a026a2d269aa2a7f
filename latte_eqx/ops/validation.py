"""Checks of array arguments, with errors that say what must hold and what came."""

import jax.numpy as jnp
from jaxtyping import Array


def check_floating(**arrays: Array) -> None:
    """Raise unless every array holds floating-point numbers."""
    for name, x in arrays.items():
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"`{name}` must have a floating-point dtype, got {x.dtype}.")


def check_shape(name: str, x: Array, shape: tuple[int | None, ...], meaning: str) -> None:
    """Raise unless `x` has this shape; `None` stands for any size."""
    if x.ndim != len(shape) or any(want not in (None, got) for want, got in zip(shape, x.shape, strict=True)):
        wanted = str(shape).replace("None", "any")
        raise ValueError(f"`{name}` must have the shape {wanted}, {meaning}, got {x.shape}.")
