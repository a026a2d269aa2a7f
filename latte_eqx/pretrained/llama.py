"""Llama's architecture: its settings and the names of its tensors, as Hugging Face has them."""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from latte_eqx.models import LanguageModel, ModelConfig

Tensor = Shaped[np.ndarray, "..."] | Shaped[Array, "..."]

# Where each tensor has its place in the model, and in every layer of it.
OUTER = {
    "model.embed_tokens.weight": lambda model: model.embedding,
    "model.norm.weight": lambda model: model.stack.norm.weight,
}
LAYER = {
    "input_layernorm.weight": lambda block: block.mixer_norm.weight,
    "self_attn.q_proj.weight": lambda block: block.mixer.attention.attention.to_query.weight,
    "self_attn.k_proj.weight": lambda block: block.mixer.attention.attention.to_key.weight,
    "self_attn.v_proj.weight": lambda block: block.mixer.attention.to_value.weight,
    "self_attn.o_proj.weight": lambda block: block.mixer.attention.to_out.weight,
    "post_attention_layernorm.weight": lambda block: block.mlp_norm.weight,
    "mlp.gate_proj.weight": lambda block: block.mlp.to_gate.weight,
    "mlp.up_proj.weight": lambda block: block.mlp.to_hidden.weight,
    "mlp.down_proj.weight": lambda block: block.mlp.to_out.weight,
}
# What Hugging Face calls the settings of a model.
SETTINGS = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "intermediate_size": "mlp_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "rms_norm_eps": "norm_eps",
    "max_position_embeddings": "max_length",
}
# Settings that a model can have in one way only, and what is meant where one is not named.
FIXED = {
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_scaling": None,
}
UNNAMED = {"tie_word_embeddings": False, "num_key_value_heads": None, "rms_norm_eps": 1e-6}


def read_settings(settings: Mapping[str, Any]) -> ModelConfig:
    """Turn a `config.json` into a config."""
    if settings.get("model_type") != "llama":
        raise ValueError(f"`model_type` must be 'llama', got {settings.get('model_type')!r}.")
    for name, value in FIXED.items():
        got = settings.get(name, UNNAMED.get(name, value))
        if got != value:
            raise ValueError(f"`{name}` of a Llama model must be {value!r}, got {got!r}.")
    missing = [name for name in SETTINGS if name not in settings and name not in UNNAMED]
    if missing:
        raise ValueError(f"`config.json` must name {', '.join(missing)}, and does not.")
    sizes = {ours: settings.get(theirs, UNNAMED.get(theirs)) for theirs, ours in SETTINGS.items()}
    head_dim = settings.get("head_dim") or sizes["dim"] // sizes["num_heads"]
    if head_dim * sizes["num_heads"] != sizes["dim"]:
        got = f"head_dim={head_dim}, num_attention_heads={sizes['num_heads']}, hidden_size={sizes['dim']}"
        raise ValueError(f"The heads of a Llama model must make up its width, got {got}.")
    base = settings.get("rope_theta") or settings.get("rope_parameters", {}).get("rope_theta", 10_000.0)
    return ModelConfig(mixer="attention", rotary_base=float(base), **sizes)


def write_settings(config: ModelConfig) -> dict[str, Any]:
    """Undo `read_settings`."""
    sizes = {theirs: getattr(config, ours) for theirs, ours in SETTINGS.items()}
    sizes["num_key_value_heads"] = config.num_kv_heads or config.num_heads
    return (
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_theta": config.rotary_base} | sizes | FIXED
    )


def from_tensors(config: ModelConfig, tensors: Mapping[str, Tensor]) -> LanguageModel:
    """Put tensors in their places; all places are filled, and no tensor is left over."""
    model = eqx.filter_eval_shape(LanguageModel, config, key=jax.random.key(0))
    names = [*OUTER, *(name for layer in LAYER for name in _layer_names(layer, config))]
    # A tied output map is written out by some.
    missing, unused = set(names) - set(tensors), set(tensors) - {*names, "lm_head.weight"}
    if missing or unused:
        show = lambda names: ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        got = f"missing: {show(missing) or 'none'}; unused: {show(unused) or 'none'}"
        raise ValueError(f"The tensors must be those of the model, got {got}.")

    def fetch(name, shape):
        tensor = tensors[name]
        if tensor.shape != shape:
            raise ValueError(f"`{name}` must have the shape {shape}, got {tensor.shape}.")
        return jnp.asarray(tensor)

    for name, place in OUTER.items():
        model = eqx.tree_at(place, model, fetch(name, place(model).shape))
    for layer, place in LAYER.items():
        in_blocks = lambda model, place=place: place(model.stack.blocks)
        parts = [fetch(name, in_blocks(model).shape[1:]) for name in _layer_names(layer, config)]
        model = eqx.tree_at(in_blocks, model, jnp.stack(parts))
    return model


def to_tensors(model: LanguageModel) -> dict[str, Array]:
    """Undo `from_tensors`."""
    tensors = {name: place(model) for name, place in OUTER.items()}
    for layer, place in LAYER.items():
        stacked = place(model.stack.blocks)
        tensors |= {f"model.layers.{index}.{layer}": part for index, part in enumerate(stacked)}
    return tensors


def halves_from_pairs(weight: Tensor, num_heads: int) -> Tensor:
    """Reorder rows of queries or keys: those that rotate together are neighbours in files, half a head apart here."""
    rows, inputs = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, inputs)
    return pairs.swapaxes(1, 2).reshape(rows, inputs)


def _layer_names(layer: str, config: ModelConfig) -> list[str]:
    return [f"model.layers.{index}.{layer}" for index in range(config.num_layers)]
