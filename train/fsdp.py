"""Fully sharded data parallelism: all that the trainer knows of devices is here.

Devices form a mesh with the axes `data` (replicas), `fsdp` (shards of the parameters) and `seq` (shards of a sequence).
Rows of a batch are split over `data` and `fsdp`. Every parameter lives, in float32, cut along one of its axes over
`fsdp`; its optimizer state lives beside it. Inside one `jax.shard_map` a device runs

    for each layer:  gather the layer's parameters over `fsdp`, in the compute dtype; run the layer; drop them
    backwards:       gather them once more; the transpose of the gather sums the gradients and leaves each device
                     its own shard, in float32

`jax.shard_map(check_vma=True)` tracks over which axes a value differs between devices. A loss is written as the local
sum over the global count, and no gradient is ever summed by hand: where a parameter is the same on several devices,
the transpose of the `pcast` that declares it different is that sum.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, PyTree

from train.config import MeshConfig

AXES = ("data", "fsdp", "seq")
ROWS = PartitionSpec(("data", "fsdp"))
TOKENS = PartitionSpec(("data", "fsdp"), "seq")
# Of smaller arrays every device holds the whole: gathering them would cost more than it saves.
MIN_SHARDED_SIZE = 512
# The decays of the RG-LRU lie so close to one that bfloat16 would change how long it remembers.
ALWAYS_FLOAT32 = ("decay_logit",)


def make_mesh(config: MeshConfig, devices: list[Any] | None = None) -> Mesh:
    """Lay out the devices."""
    devices = jax.devices() if devices is None else devices
    sizes = [config.data, config.fsdp, config.seq]
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ValueError(f"Sizes of the mesh must be positive, at most one of them -1, got {config}.")
    known = int(np.prod([size for size in sizes if size != -1]))
    sizes = [len(devices) // known if size == -1 else size for size in sizes]
    if int(np.prod(sizes)) != len(devices):
        raise ValueError(f"The sizes of the mesh must multiply to {len(devices)} devices, got {config}.")
    return jax.make_mesh(tuple(sizes), AXES, (AxisType.Auto,) * 3, devices=devices)


def is_stacked(path: tuple[Any, ...]) -> bool:
    """Tell whether an array has the layers as its first axis."""
    return any(getattr(entry, "name", None) == "blocks" for entry in path)


def parameter_specs(params: PyTree, mesh: Mesh) -> PyTree[PartitionSpec]:
    """Choose for each parameter the axis along which it is cut: the longest that the shards divide."""
    num_shards = mesh.shape["fsdp"]

    def spec(path, leaf):
        first = int(is_stacked(path))
        candidates = [axis for axis in range(first, leaf.ndim) if leaf.shape[axis] % num_shards == 0]
        if not candidates or int(np.prod(leaf.shape[first:])) < MIN_SHARDED_SIZE:
            return PartitionSpec()
        return PartitionSpec(*[None] * max(candidates, key=lambda axis: leaf.shape[axis]), "fsdp")

    return jax.tree_util.tree_map_with_path(spec, params)


def shardings(specs: PyTree[PartitionSpec], mesh: Mesh) -> PyTree[NamedSharding]:
    """Turn specs into shardings."""
    return jax.tree.map(partial(NamedSharding, mesh), specs)


def total(tree: PyTree[Array]) -> PyTree[Array]:
    """Sum what devices have counted, over the axes along which they differ."""
    differs = lambda x: tuple(axis for axis in AXES if axis in jax.typeof(x).manual_axis_type.varying)
    return jax.tree.map(lambda x: lax.psum(x, differs(x)) if differs(x) else x, tree)


def gather(params: PyTree, specs: PyTree[PartitionSpec], dtype: Any, *, num_skipped_axes: int = 0) -> PyTree:
    """Return whole parameters in the compute dtype from the shards of this device.

    `num_skipped_axes` is 1 inside the scan over layers, which has taken the first axis of its arrays away.
    """

    def whole(path, x, spec):
        name = getattr(path[-1], "name", None) if path else None
        kept = jnp.float32 if name in ALWAYS_FLOAT32 else dtype
        # Declared different on all devices while it is float32, so that gradients are summed in float32.
        missing = tuple(axis for axis in AXES if axis not in jax.typeof(x).manual_axis_type.varying)
        x = lax.pcast(x, missing, to="varying") if missing else x
        if "fsdp" not in spec:
            return x.astype(kept)
        return _gather(x, tuple(spec).index("fsdp") - num_skipped_axes, kept)

    return jax.tree_util.tree_map_with_path(whole, params, specs)


def gather_unstacked(params: PyTree, specs: PyTree[PartitionSpec], dtype: Any) -> PyTree:
    """Gather all parameters but those of layers, which stay as they are."""
    is_outer = jax.tree_util.tree_map_with_path(lambda path, _: not is_stacked(path), params)
    outer, layers = eqx.partition(params, is_outer)
    return eqx.combine(gather(outer, eqx.filter(specs, is_outer), dtype), layers)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: Float[Array, "..."], axis: int, dtype: Any) -> Float[Array, "..."]:
    """Gather in `dtype`; the gradient comes back in float32."""
    return lax.all_gather(x.astype(dtype), "fsdp", axis=axis, tiled=True)


def _gather_forward(x, axis, dtype):
    return _gather(x, axis, dtype), None


def _gather_backward(axis, dtype, _, gradient):
    return (lax.psum_scatter(gradient.astype(jnp.float32), "fsdp", scatter_dimension=axis, tiled=True),)


_gather.defvjp(_gather_forward, _gather_backward)


def gathered_layers(
    specs: PyTree[PartitionSpec], dtype: Any, remat: Literal["full", "dots", "none"]
) -> Callable[[Callable], Callable]:
    """Return the `wrap` of `Stack`: gather a layer's parameters, run it, and keep for the backward pass what is asked.

    Gathered parameters are never kept.
    """
    policy = {
        "full": None,
        "dots": jax.checkpoint_policies.dots_saveable,
        "none": lambda primitive, *_, **__: primitive.name != "all_gather",
    }[remat]

    def wrap(layer):
        def run(x, inputs):
            arrays, rest = inputs
            return layer(x, (gather(arrays, specs, dtype, num_skipped_axes=1), rest))

        return jax.checkpoint(run, prevent_cse=False, policy=policy)

    return wrap
