"""Products of float32 factors are float32 products: accelerators would round the factors otherwise."""

from contextlib import AbstractContextManager, nullcontext

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def product_precision(dtype: DTypeLike) -> jax.lax.Precision | None:
    """Return the precision to ask for in a product of such factors."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def exact_products(dtype: DTypeLike) -> AbstractContextManager:
    """Ask for that precision in all products traced inside."""
    return jax.default_matmul_precision("highest") if dtype == jnp.float32 else nullcontext()
