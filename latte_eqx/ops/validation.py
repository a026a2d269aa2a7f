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


def check_broadcasts(name: str, x: Array, shape: tuple[int, ...]) -> None:
    """Raise unless `x` has the last axis of `shape`, `(*batch, seq)`, and batch axes that broadcast to its others."""
    pairs = zip(x.shape[-2::-1], shape[-2::-1], strict=False)
    fits = 1 <= x.ndim <= len(shape) and x.shape[-1] == shape[-1] and all(have in (1, want) for have, want in pairs)
    if not fits:
        raise ValueError(f"`{name}` must broadcast to the shape (*batch, seq) = {shape}, got {x.shape}.")


def check_mask(name: str, mask: Array, shape: tuple[int, ...]) -> None:
    """Raise unless `mask` holds truth values and broadcasts to `shape`."""
    if mask.dtype != jnp.bool_:
        raise TypeError(f"`{name}` must have the dtype bool, got {mask.dtype}.")
    check_broadcasts(name, mask, shape)
