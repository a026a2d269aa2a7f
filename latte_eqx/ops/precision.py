"""How exact matrix products are."""

from contextlib import AbstractContextManager, nullcontext

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped


def products_like(x: Shaped[Array, "..."]) -> AbstractContextManager:
    """Trace products of float32 arrays as float32 products: accelerators would round their factors otherwise."""
    return jax.default_matmul_precision("highest") if x.dtype == jnp.float32 else nullcontext()
