"""Tensors that are read when they are asked for, and only the part that is asked for."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jaxtyping import Array, PyTree, Shaped

from latte_eqx.models import LanguageModel, ModelConfig
from latte_eqx.pretrained.architectures import (
    Place,
    architecture_of,
    is_norm,
    layer_name,
    layer_places,
    outer_places,
)

# Of a model whose arrays are abstract, what tells where each of them goes.
Shardings = Callable[[PyTree], PyTree]


class Tensor(NamedTuple):
    """A tensor in a file: its shape, and how to read a part of it."""

    shape: tuple[int, ...]
    read: Callable[[tuple[slice, ...]], Shaped[np.ndarray, "..."]]


def in_memory(array: Shaped[np.ndarray, "..."]) -> Tensor:
    """Return an array that is there already, or mapped to memory."""
    return Tensor(array.shape, lambda index: np.asarray(array[index]))


def turned(tensor: Tensor, num_heads: int) -> Tensor:
    """Reorder rows of queries or keys: those that rotate together are neighbours in files, half a head apart here."""
    rows, inputs = tensor.shape

    def read(index):
        pairs = tensor.read((slice(None), slice(None))).reshape(num_heads, rows // num_heads // 2, 2, inputs)
        return pairs.swapaxes(1, 2).reshape(rows, inputs)[index]

    return Tensor(tensor.shape, read)


def plus(tensor: Tensor, offset: float) -> Tensor:
    """Add a number to a tensor, in float32."""
    return Tensor(tensor.shape, lambda index: tensor.read(index).astype(np.float32) + np.float32(offset))


def stacked(tensors: list[Tensor]) -> Tensor:
    """Put tensors of one shape one upon another."""
    read = lambda index: np.stack([tensor.read(index[1:]) for tensor in tensors[index[0]]])
    return Tensor((len(tensors), *tensors[0].shape), read)


def from_tensors(
    config: ModelConfig, tensors: Mapping[str, Tensor], shardings: Shardings | None = None
) -> LanguageModel:
    """Put tensors in their places; all places are filled, and no tensor is left over.

    Each device is given its part of an array, and nobody else's is read for it.
    """
    model, places, found = abstract_model(config), {}, {}
    architecture = architecture_of(config)
    for name, place in outer_places(config).items():
        places[name], found[name] = place, [name]
    for layer, place in layer_places(architecture).items():
        places[layer], found[layer] = place, [layer_name(layer, index) for index in range(config.num_layers)]
    # A tied output map is written out by some.
    spare = {"lm_head.weight"} if config.tie_embedding else set()
    check_names({name for names in found.values() for name in names}, set(tensors) - spare)

    def fetch(key):
        shape = places[key](model).shape
        is_layer = key in architecture.layer
        for name in found[key]:
            if tensors[name].shape != shape[is_layer:]:
                raise ValueError(f"`{name}` must have the shape {shape[is_layer:]}, got {tensors[name].shape}.")
        tensor = stacked([tensors[name] for name in found[key]]) if is_layer else tensors[key]
        return plus(tensor, architecture.norm_offset) if architecture.norm_offset and is_norm(key) else tensor

    return fill(model, {key: (places[key], fetch(key)) for key in places}, shardings)


def abstract_model(config: ModelConfig) -> LanguageModel:
    """Return a model without its numbers."""
    return eqx.filter_eval_shape(LanguageModel, config, key=jax.random.key(0))


def fill(
    model: LanguageModel, tensors: Mapping[str, tuple[Place, Tensor]], shardings: Shardings | None
) -> LanguageModel:
    """Read the arrays of an abstract model, each straight to the devices that hold it."""
    targets = model if shardings is None else shardings(model)
    for place, tensor in tensors.values():
        target = place(targets)
        target = target if isinstance(target, Sharding) else SingleDeviceSharding(jax.devices()[0])
        read = lambda index, tensor=tensor: tensor.read(index)
        model = eqx.tree_at(place, model, jax.make_array_from_callback(tensor.shape, target, read))
    return model


def to_tensors(model: LanguageModel) -> dict[str, Array]:
    """Undo `from_tensors`."""
    config = model.stack.config
    architecture = architecture_of(config)
    lower = lambda name, x: x - jnp.asarray(architecture.norm_offset, x.dtype) if is_norm(name) else x
    tensors = {name: lower(name, place(model)) for name, place in outer_places(config).items()}
    for layer, place in layer_places(architecture).items():
        tensors |= {layer_name(layer, index): lower(layer, part) for index, part in enumerate(place(model))}
    return tensors


def check_names(wanted: set[str], got: set[str]) -> None:
    """Raise unless there is what is wanted, and nothing else."""
    missing, unused = wanted - got, got - wanted
    if missing or unused:
        show = lambda names: ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        found = f"missing: {show(missing) or 'none'}; unused: {show(unused) or 'none'}"
        raise ValueError(f"The tensors must be those of the model, got {found}.")
