"""GGUF files of Llama and Gemma models, by way of the package `gguf`: quantised tensors become float32."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from latte_eqx.models import ModelConfig
from latte_eqx.pretrained.architectures import read_settings
from latte_eqx.pretrained.sentencepiece import CONTROL, Piece, make_tokenizer
from latte_eqx.pretrained.tensors import Tensor, plus, turned

OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LLAMA_LAYER = LAYER | {"ffn_norm": "post_attention_layernorm"}
GEMMA_LAYER = LAYER | {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
KINDS = {"llama": "llama", "gemma2": "gemma2", "gemma3": "gemma3_text"}
# What Gemma's files leave unsaid.
GEMMA3_LOCAL_BASE, GEMMA3_GLOBAL_EVERY = 10_000.0, 6


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
    names = {tensor.name for tensor in reader.tensors}
    config = _settings(fields, is_tied="output.weight" not in names)
    kind = fields["general.architecture"]
    tensors = {}
    for part in reader.tensors:
        read = lambda index, part=part: dequantize(part.data, part.tensor_type)[index]
        tensor = Tensor(tuple(int(size) for size in reversed(part.shape)), read)
        heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(part.name.split(".")[-2])
        if heads is not None and kind == "llama":
            tensor = turned(tensor, heads)
        if kind != "llama" and part.name.endswith("norm.weight"):
            # Norms are written with the one that Gemma adds to them.
            tensor = plus(tensor, -1.0)
        tensors[_name(part.name, LLAMA_LAYER if kind == "llama" else GEMMA_LAYER)] = tensor
    return config, tensors, _tokenizer(fields)


def _settings(fields: Mapping[str, Any], *, is_tied: bool) -> ModelConfig:
    """Return the settings, by way of what Hugging Face calls them."""
    kind = fields.get("general.architecture")
    if kind not in KINDS:
        raise ValueError(f"The architecture must be one of {', '.join(KINDS)}, got {kind!r}.")
    get = lambda name, unnamed=None: fields.get(f"{kind}.{name}", unnamed)
    num_heads, dim = get("attention.head_count"), get("embedding_length")
    head_dim = get("attention.key_length", dim // num_heads)
    settings = {
        "model_type": KINDS[kind],
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": dim,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": get("attention.head_count_kv", num_heads),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": get("context_length"),
        "tie_word_embeddings": is_tied,
        "head_dim": head_dim,
        "rope_theta": get("rope.freq_base", 1_000_000.0 if kind == "gemma3" else 10_000.0),
    }
    if kind != "llama":
        settings |= {
            "query_pre_attn_scalar": head_dim,
            "sliding_window": get("attention.sliding_window"),
            "attn_logit_softcapping": get("attn_logit_softcapping"),
            "final_logit_softcapping": get("final_logit_softcapping"),
        }
    if kind == "gemma3":
        settings |= {"rope_local_base_freq": GEMMA3_LOCAL_BASE, "sliding_window_pattern": GEMMA3_GLOBAL_EVERY}
    return read_settings(settings)


def _name(name: str, layer: Mapping[str, str]) -> str:
    """Return what Hugging Face calls a tensor; a name that it does not know stays, and is then refused."""
    if name in OUTER:
        return OUTER[name]
    block, _, rest = name.partition(".")[2].partition(".")
    part = rest.removesuffix(".weight")
    return f"model.layers.{block}.{layer[part]}.weight" if part in layer else name


def _tokenizer(fields: Mapping[str, Any]) -> Any:
    """Return the tokenizer of the file: SentencePiece's, or SmolLM2's; other kinds are not known, and give none."""
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields.get("tokenizer.ggml.token_type", ())
    kind = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "default")
    if kind == ("llama", "default"):
        pieces = [Piece(*piece) for piece in zip(tokens, fields["tokenizer.ggml.scores"], kinds, strict=True)]
        begin = fields.get("tokenizer.ggml.bos_token_id") if fields.get("tokenizer.ggml.add_bos_token", True) else None
        return make_tokenizer(pieces, begin=begin, has_prefix=fields.get("tokenizer.ggml.add_space_prefix", True))
    if kind == ("gpt2", "smollm"):
        return _smollm2(tokens, fields["tokenizer.ggml.merges"], kinds)
    return None


def _smollm2(tokens: Sequence[str], merges: Sequence[str], kinds: Sequence[int]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=False) if kind == CONTROL])
    return tokenizer
