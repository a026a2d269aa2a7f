"""How ops behave under `vmap` and inside `shard_map`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree


def leading_vmap(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make `vmap` of `function` one call with one more leading axis.

    The plain rule would turn a `lax.cond` inside into a select that runs both branches. For functions that are not
    differentiated themselves: the passes of a `custom_vjp`.
    """
    batched_function = jax.custom_batching.custom_vmap(function)

    @batched_function.def_vmap
    def rule(axis_size: int, is_batched: Any, *args: Any):
        def lead(x, batched):
            return x if batched else jnp.broadcast_to(x[None], (axis_size, *x.shape))

        out = batched_function(*jax.tree.map(lead, args, tuple(is_batched)))
        return out, jax.tree.map(lambda _: True, out)

    return batched_function


def output_like(x: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> jax.ShapeDtypeStruct:
    """Say what a kernel returns, which inside `shard_map` differs between devices as its input `x` does."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type)


def vary_alike(tree: PyTree) -> PyTree:
    """Give all arrays one type inside `shard_map`: a replicated state could not be carried beside sharded inputs."""
    varying = [jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(tree)]
    axes = frozenset().union(*varying)

    def vary(x):
        missing = tuple(axes - jax.typeof(x).manual_axis_type.varying)
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree) if axes else tree
