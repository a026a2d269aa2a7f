"""How ops with free leading axes behave under `vmap`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


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
