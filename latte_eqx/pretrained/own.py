"""Our own models, Macchiato ones above all: settings that say all, and tensors named by their places."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array

from latte_eqx.models import LanguageModel, ModelConfig
from latte_eqx.pretrained.tensors import Shardings, Tensor, abstract_model, check_names, fill

KIND = "latte_eqx"


def read_settings(settings: Mapping[str, Any]) -> ModelConfig:
    """Turn a `config.json` into a config."""
    known, values = {field.name for field in fields(ModelConfig)}, settings.get("config", {})
    if not set(values) <= known:
        raise ValueError(f"`config` must have the fields of ModelConfig, got {', '.join(sorted(set(values) - known))}.")
    return ModelConfig(**values)


def write_settings(config: ModelConfig) -> dict[str, Any]:
    """Undo `read_settings`."""
    return {"model_type": KIND, "config": asdict(config)}


def from_tensors(config: ModelConfig, tensors: Mapping[str, Tensor], shardings: Shardings | None) -> LanguageModel:
    """Put tensors in their places; all places are filled, and no tensor is left over."""
    model = abstract_model(config)
    wanted = _named(model)
    check_names(set(wanted), set(tensors))
    for name, x in wanted.items():
        if tensors[name].shape != x.shape:
            raise ValueError(f"`{name}` must have the shape {x.shape}, got {tensors[name].shape}.")
    return fill(
        model, {name: (lambda tree, name=name: _named(tree)[name], tensors[name]) for name in wanted}, shardings
    )


def to_tensors(model: LanguageModel) -> dict[str, Array]:
    """Undo `from_tensors`."""
    return _named(model)


def _named(model: LanguageModel) -> dict[str, Any]:
    """Return the arrays of a model, or what stands in their places, under names like `stack.norm.weight`."""
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=eqx.is_array)
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
    return {name(path): x for path, x in leaves if not isinstance(x, float | bool)}
