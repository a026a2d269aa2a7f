"""Files of llama2.c: weights in a fixed order behind a header of seven numbers, and a tokenizer in another file."""

import struct
from pathlib import Path
from typing import Any

import numpy as np

from latte_eqx.models import ModelConfig
from latte_eqx.pretrained import sentencepiece
from latte_eqx.pretrained.architectures import layer_name
from latte_eqx.pretrained.tensors import Tensor, in_memory, turned

HEADER = struct.Struct("<7i")
FIRST_BYTE = 3
"""The id of the token that stands for the byte 0; before it are the unknown token, the first and the last of a text."""


def read_weights(path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Return the settings of a model and its tensors, named as Hugging Face does."""
    with path.open("rb") as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        raise ValueError(f"{path} must begin with {HEADER.size} bytes of sizes, got {len(header)} bytes in all.")
    dim, mlp_dim, num_layers, num_heads, num_kv_heads, vocab_size, max_length = HEADER.unpack(header)
    if min(dim, mlp_dim, num_layers, num_heads, num_kv_heads, max_length) < 1 or vocab_size == 0 or dim % num_heads:
        raise ValueError(f"{path} must begin with the sizes of a model, got {HEADER.unpack(header)}.")
    # A negative number says that there is an output map of its own, at the end.
    is_tied, vocab_size = vocab_size > 0, abs(vocab_size)
    head_dim = dim // num_heads
    config = ModelConfig(
        mixer="attention",
        vocab_size=vocab_size,
        num_layers=num_layers,
        dim=dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        mlp_dim=mlp_dim,
        norm_eps=1e-5,
        max_length=max_length,
        tie_embedding=is_tied,
    )
    shapes = {
        "embed_tokens": (vocab_size, dim),
        "input_layernorm": (num_layers, dim),
        "self_attn.q_proj": (num_layers, dim, dim),
        "self_attn.k_proj": (num_layers, num_kv_heads * head_dim, dim),
        "self_attn.v_proj": (num_layers, num_kv_heads * head_dim, dim),
        "self_attn.o_proj": (num_layers, dim, dim),
        "post_attention_layernorm": (num_layers, dim),
        "mlp.gate_proj": (num_layers, mlp_dim, dim),
        "mlp.down_proj": (num_layers, dim, mlp_dim),
        "mlp.up_proj": (num_layers, mlp_dim, dim),
        "norm": (dim,),
        # Cosines and sines that nobody reads any more.
        "rotation": (2, max_length, head_dim // 2),
        **({} if is_tied else {"head": (vocab_size, dim)}),
    }
    sizes = [int(np.prod(shape)) for shape in shapes.values()]
    expected = HEADER.size + 4 * sum(sizes)
    if path.stat().st_size != expected:
        raise ValueError(f"{path} must have the {expected} bytes of its sizes, got {path.stat().st_size}.")
    numbers = np.memmap(path, "<f4", "r", HEADER.size)
    parts = np.split(numbers, np.cumsum(sizes)[:-1])
    arrays = {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
    del arrays["rotation"]
    head = arrays.pop("head", None)
    tensors: dict[str, Tensor] = {}
    for name, array in arrays.items():
        if name in ("embed_tokens", "norm"):
            tensors[f"model.{name}.weight"] = in_memory(array)
            continue
        for layer, part in enumerate(map(in_memory, array)):
            heads = {"self_attn.q_proj": num_heads, "self_attn.k_proj": num_kv_heads}.get(name)
            tensors[layer_name(f"{name}.weight", layer)] = part if heads is None else turned(part, heads)
    if head is not None:
        tensors["lm_head.weight"] = in_memory(head)
    return config, tensors


def read_tokenizer(path: Path, vocab_size: int) -> Any:
    """Return the tokenizer of a file: pieces and their scores."""
    content, offset = path.read_bytes(), 4
    pieces = []
    for index in range(vocab_size):
        if len(content) < offset + 8:
            raise ValueError(f"{path} must hold {vocab_size} tokens, got {len(pieces)}.")
        score, length = struct.unpack_from("<fi", content, offset)
        offset += 8 + length
        text = content[offset - length : offset].decode()
        kind = sentencepiece.BYTE if FIRST_BYTE <= index < FIRST_BYTE + 256 else 1
        pieces.append(sentencepiece.Piece(text, score, kind))
    # Texts begin with <s>, and that of the next one ends the one before it: these models never saw </s>.
    first = ("<unk>", sentencepiece.UNKNOWN), ("<s>", sentencepiece.CONTROL), ("</s>", sentencepiece.UNUSED)
    pieces[:FIRST_BYTE] = [sentencepiece.Piece(text, 0.0, kind) for text, kind in first]
    return sentencepiece.make_tokenizer(pieces, begin=1, has_prefix=True, space=" ")
