"""Reading and writing models as files."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from latte_eqx.mixers import FullAttention
from latte_eqx.models import LanguageModel, ModelConfig
from latte_eqx.pretrained import gguf_file, llama, llama2c

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class Pretrained(NamedTuple):
    """A model, its settings, and its tokenizer if one came with it: a `tokenizers.Tokenizer`."""

    model: LanguageModel
    config: ModelConfig
    tokenizer: Any


def load(path: str | Path) -> Pretrained:
    """Read a Llama model: a directory as Hugging Face has it (`config.json` and safetensors), a `.gguf` file, or a
    `.bin` file of llama2.c.

    Names and shapes of all tensors are checked: missing ones and ones that nothing uses raise.
    """
    path = Path(path)
    if path.suffix == ".bin" and path.is_file():
        config, tensors = llama2c.read_weights(path)
        beside = [file for file in sorted(path.parent.glob("tok*.bin")) if file != path]
        tokenizer = llama2c.read_tokenizer(beside[0], config.vocab_size) if beside else None
    elif path.suffix == ".gguf" and path.is_file():
        config, tensors, tokenizer = gguf_file.read(path)
    elif (path / "config.json").is_file():
        config = llama.read_settings(json.loads((path / "config.json").read_text()))
        tensors, tokenizer = _read_safetensors(path), _read_tokenizer(path / "tokenizer.json")
    else:
        raise FileNotFoundError(f"A model must be a directory with config.json, a .gguf or a .bin file, got {path}.")
    return Pretrained(llama.from_tensors(config, tensors), config, tokenizer)


def save(path: str | Path, pretrained: Pretrained) -> None:
    """Write a model as a directory that Hugging Face's transformers reads."""
    from safetensors.flax import save_file

    mixer = pretrained.model.stack.blocks.mixer
    if not isinstance(mixer, FullAttention):
        raise TypeError(f"A model must attend fully to be written as Llama, got {type(mixer).__name__}.")
    path = Path(path)
    path.mkdir(parents=True, exist_ok=False)
    save_file(llama.to_tensors(pretrained.model), path / WEIGHTS, metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(llama.write_settings(pretrained.config), indent=2) + "\n")
    if pretrained.tokenizer is not None:
        pretrained.tokenizer.save(str(path / "tokenizer.json"))


def _read_safetensors(directory: Path) -> dict[str, Array]:
    from safetensors import safe_open

    names = [WEIGHTS]
    if (directory / INDEX).is_file():
        names = sorted(set(json.loads((directory / INDEX).read_text())["weight_map"].values()))
    tensors = {}
    for name in names:
        # A name comes from a file that anybody may have written.
        if Path(name).name != name or name in (".", ".."):
            raise ValueError(f"A shard must be a file of the directory itself, got {name!r}.")
        if not (directory / name).is_file():
            raise FileNotFoundError(f"{directory} must hold {name}, and does not.")
        with safe_open(directory / name, framework="flax") as file:
            tensors |= {key: jnp.asarray(file.get_tensor(key)) for key in file.keys()}  # noqa: SIM118
    return tensors


def _read_tokenizer(path: Path) -> Any:
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))
