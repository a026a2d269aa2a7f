"""Llama, Gemma 2 and Gemma 3: their settings and the names of their tensors, as Hugging Face has them."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from latte_eqx.models import ModelConfig

Place = Callable[[Any], Any]


def _attention(mixer: Any) -> Any:
    """Return what projects queries and keys, of a layer that attends fully."""
    return mixer.attention.attention


# Where each tensor has its place in a layer.
LAYER: dict[str, Place] = {
    "input_layernorm.weight": lambda block: block.mixer_norm.weight,
    "self_attn.q_proj.weight": lambda block: _attention(block.mixer).to_query.weight,
    "self_attn.k_proj.weight": lambda block: _attention(block.mixer).to_key.weight,
    "self_attn.v_proj.weight": lambda block: block.mixer.attention.to_value.weight,
    "self_attn.o_proj.weight": lambda block: block.mixer.attention.to_out.weight,
    "mlp.gate_proj.weight": lambda block: block.mlp.to_gate.weight,
    "mlp.up_proj.weight": lambda block: block.mlp.to_hidden.weight,
    "mlp.down_proj.weight": lambda block: block.mlp.to_out.weight,
}
# The same name means different norms.
LLAMA_LAYER: dict[str, Place] = LAYER | {"post_attention_layernorm.weight": lambda block: block.mlp_norm.weight}
GEMMA2_LAYER: dict[str, Place] = LAYER | {
    "post_attention_layernorm.weight": lambda block: block.mixer_norm_after.weight,
    "pre_feedforward_layernorm.weight": lambda block: block.mlp_norm.weight,
    "post_feedforward_layernorm.weight": lambda block: block.mlp_norm_after.weight,
}
GEMMA3_LAYER: dict[str, Place] = GEMMA2_LAYER | {
    "self_attn.q_norm.weight": lambda block: _attention(block.mixer).query_norm.weight,
    "self_attn.k_norm.weight": lambda block: _attention(block.mixer).key_norm.weight,
}
# What Hugging Face calls the sizes of a model.
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "intermediate_size": "mlp_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "rms_norm_eps": "norm_eps",
    "max_position_embeddings": "max_length",
    "tie_word_embeddings": "tie_embedding",
}
GEMMA: dict[str, Any] = dict(gate="gelu", norm_after=True, scale_embedding=True)
GEMMA_FIXED: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "use_bidirectional_attention": False,
    "rope_scaling": None,
}


class Architecture(NamedTuple):
    """A family of models: what Hugging Face calls it and its tensors, and what all of its models have in common."""

    kind: str
    class_name: str
    layer: Mapping[str, Place]
    common: Mapping[str, Any]  # fields of `ModelConfig`
    fixed: Mapping[str, Any]  # settings that a model can have in one way only, which is meant where none is named
    unnamed: Mapping[str, Any]  # what is meant by other settings that are not named
    norm_offset: float = 0.0  # what is added to the weights of norms


ARCHITECTURES = {
    architecture.kind: architecture
    for architecture in (
        Architecture(
            "llama",
            "LlamaForCausalLM",
            LLAMA_LAYER,
            {},
            {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "rope_scaling": None},
            {"tie_word_embeddings": False, "num_key_value_heads": None, "rms_norm_eps": 1e-6},
        ),
        Architecture(
            "gemma2",
            "Gemma2ForCausalLM",
            GEMMA2_LAYER,
            GEMMA | dict(global_every=2),
            GEMMA_FIXED,
            {"tie_word_embeddings": True, "rms_norm_eps": 1e-6},
            norm_offset=1.0,
        ),
        Architecture(
            "gemma3_text",
            "Gemma3ForCausalLM",
            GEMMA3_LAYER,
            GEMMA | dict(norm_heads=True),
            GEMMA_FIXED,
            {"tie_word_embeddings": True, "rms_norm_eps": 1e-6},
            norm_offset=1.0,
        ),
    )
}


def architecture_of(config: ModelConfig) -> Architecture:
    """Return the family that a config is of: the one with the most in common."""
    fits = [
        architecture
        for architecture in ARCHITECTURES.values()
        if all(getattr(config, name) == value for name, value in architecture.common.items())
        and config.norm_heads == architecture.common.get("norm_heads", False)
    ]
    if config.mixer != "attention" or config.style != "plus_plus" or config.positions != "none" or not fits:
        kinds = ", ".join(ARCHITECTURES)
        raise TypeError(f"A model must be one of {kinds} to be written as such, got {config}.")
    return max(fits, key=lambda architecture: len(architecture.common))


def read_settings(settings: Mapping[str, Any]) -> ModelConfig:
    """Turn a `config.json` into a config."""
    kind = settings.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(f"`model_type` must be one of {', '.join(ARCHITECTURES)}, got {kind!r}.")
    architecture = ARCHITECTURES[kind]
    for name, value in architecture.fixed.items():
        got = settings.get(name, value)
        if got != value and (got or value):
            raise ValueError(f"`{name}` of a {kind} model must be {value!r}, got {got!r}.")
    missing = [name for name in SIZES if name not in settings and name not in architecture.unnamed]
    if missing:
        raise ValueError(f"`config.json` must name {', '.join(missing)}, and does not.")
    sizes = {ours: settings.get(theirs, architecture.unnamed.get(theirs)) for theirs, ours in SIZES.items()}
    read = _read_gemma if kind != "llama" else _read_llama
    return ModelConfig(mixer="attention", **sizes, **{**architecture.common, **read(settings, sizes)})


def _read_llama(settings: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    head_dim = settings.get("head_dim") or sizes["dim"] // sizes["num_heads"]
    is_usual = head_dim * sizes["num_heads"] == sizes["dim"]
    return dict(rotary_base=_rotary_base(settings, 10_000.0), head_dim=None if is_usual else head_dim)


def _read_gemma(settings: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    for name in ("head_dim", "query_pre_attn_scalar", "sliding_window"):
        if name not in settings:
            raise ValueError(f"`config.json` must name {name}, and does not.")
    read: dict[str, Any] = dict(
        head_dim=settings["head_dim"],
        attention_scale=settings["query_pre_attn_scalar"] ** -0.5,
        attention_cap=settings.get("attn_logit_softcapping"),
        logit_cap=settings.get("final_logit_softcapping"),
        # Theirs counts the token itself.
        local_window=settings["sliding_window"] - 1,
    )
    if settings["model_type"] == "gemma2":
        read |= dict(rotary_base=_rotary_base(settings, 10_000.0), global_every=2)
    else:
        local_base = settings.get("rope_local_base_freq") or _rotary_base(settings, 10_000.0, "sliding_attention")
        read |= dict(
            rotary_base=_rotary_base(settings, 1_000_000.0, "full_attention"),
            local_rotary_base=float(local_base),
            global_every=settings.get("sliding_window_pattern") or settings.get("_sliding_window_pattern") or 6,
        )
    pattern = ["sliding_attention"] * (read["global_every"] - 1) + ["full_attention"]
    wanted = [pattern[layer % len(pattern)] for layer in range(sizes["num_layers"])]
    if settings.get("layer_types", wanted) != wanted:
        got = ", ".join(settings["layer_types"])
        raise ValueError(f"Every layer number {len(pattern)} must attend fully and the others in a window, got {got}.")
    return read


def _rotary_base(settings: Mapping[str, Any], unnamed: float, layers: str | None = None) -> float:
    """Return the base of the rotation, which has been called different things in the course of time."""
    parameters = settings.get("rope_parameters") or {}
    if layers is not None and layers in parameters:
        parameters = parameters[layers]
    if parameters.get("rope_type", "default") != "default":
        raise ValueError(f"`rope_type` must be 'default', got {parameters['rope_type']!r}.")
    is_local = layers == "sliding_attention"
    return float(parameters.get("rope_theta") or (None if is_local else settings.get("rope_theta")) or unnamed)


def write_settings(config: ModelConfig) -> dict[str, Any]:
    """Undo `read_settings`."""
    architecture = architecture_of(config)
    written = {theirs: getattr(config, ours) for theirs, ours in SIZES.items()}
    written["num_key_value_heads"] = config.num_kv_heads or config.num_heads
    written["head_dim"] = config.head_dim or config.dim // config.num_heads
    written |= {"model_type": architecture.kind, "architectures": [architecture.class_name]} | dict(architecture.fixed)
    if architecture.kind == "llama":
        return written | {"rope_theta": config.rotary_base}
    assert config.attention_scale is not None
    assert config.local_window is not None
    written |= {
        "query_pre_attn_scalar": round(config.attention_scale**-2),
        "attn_logit_softcapping": config.attention_cap,
        "final_logit_softcapping": config.logit_cap,
        "sliding_window": config.local_window + 1,
        "rope_theta": config.rotary_base,
    }
    if architecture.kind == "gemma3_text":
        written |= {"rope_local_base_freq": config.local_rotary_base, "sliding_window_pattern": config.global_every}
    return written


def outer_places(config: ModelConfig) -> dict[str, Place]:
    """Say where the tensors that are not of a layer have their places in a model."""
    places: dict[str, Place] = {
        "model.embed_tokens.weight": lambda model: model.embedding,
        "model.norm.weight": lambda model: model.stack.norm.weight,
    }
    return places if config.tie_embedding else places | {"lm_head.weight": lambda model: model.head}


def layer_places(architecture: Architecture) -> dict[str, Place]:
    """Say where the tensors of layers have their places in a model, where all layers of one are stacked."""
    in_model = lambda place: lambda model: place(model.stack.blocks)
    return {name: in_model(place) for name, place in architecture.layer.items()}


def layer_name(layer: str, index: int) -> str:
    """Return the full name of a layer's tensor."""
    return f"model.layers.{index}.{layer}"


def is_norm(name: str) -> bool:
    """Tell the weights of norms from others."""
    return name.endswith("norm.weight")
