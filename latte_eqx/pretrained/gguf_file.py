"""GGUF files of Llama models, by way of the package `gguf`: quantised tensors become float32."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from latte_eqx.models import ModelConfig
from latte_eqx.pretrained.llama import Tensor, halves_from_pairs

OUTER = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# The kind of tokens that are never found in a text, but stand for themselves.
CONTROL = 3


def read(path: Path) -> tuple[ModelConfig, dict[str, Tensor], Any]:
    """Return the settings of a model, its tensors, named as Hugging Face does, and its tokenizer."""
    try:
        from gguf import GGUFReader
        from gguf.quants import dequantize
    except ImportError as error:
        raise ImportError("To read GGUF files there must be their package: pip install 'latte-eqx[gguf]'.") from error
    try:
        reader = GGUFReader(path)
    except ValueError as error:
        raise ValueError(f"{path} must be a GGUF file, got something else: {error}") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _settings(fields)
    tensors = {}
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type)
        name = _name(tensor.name)
        heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(tensor.name.split(".")[-2])
        tensors[name] = array if heads is None else halves_from_pairs(array, heads)
    return config, tensors, _tokenizer(fields)


def _settings(fields: Mapping[str, Any]) -> ModelConfig:
    kind = fields.get("general.architecture")
    if kind != "llama":
        raise ValueError(f"The architecture must be 'llama', got {kind!r}.")
    num_heads = fields["llama.attention.head_count"]
    return ModelConfig(
        mixer="attention",
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        num_layers=fields["llama.block_count"],
        dim=fields["llama.embedding_length"],
        num_heads=num_heads,
        num_kv_heads=fields.get("llama.attention.head_count_kv", num_heads),
        mlp_dim=fields["llama.feed_forward_length"],
        norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
        rotary_base=fields.get("llama.rope.freq_base", 10_000.0),
        max_length=fields["llama.context_length"],
    )


def _name(name: str) -> str:
    """Return what Hugging Face calls a tensor; a name that it does not know stays, and is then refused."""
    if name in OUTER:
        return OUTER[name]
    block, _, rest = name.partition(".")[2].partition(".")
    part = rest.removesuffix(".weight")
    return f"model.layers.{block}.{LAYER[part]}.weight" if part in LAYER else name


def _tokenizer(fields: Mapping[str, Any]) -> Any:
    """Return the byte pairs of the file as a tokenizer; other kinds than SmolLM2's are not known, and give none."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    if (fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")) != ("gpt2", "smollm"):
        return None
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields.get("tokenizer.ggml.token_type", ())
    tokenizer.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=False) if kind == CONTROL])
    return tokenizer
