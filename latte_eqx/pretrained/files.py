"""Reading and writing models as files."""

import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from latte_eqx.models import LanguageModel, ModelConfig
from latte_eqx.pretrained import gguf_file, llama2c, own, sentencepiece
from latte_eqx.pretrained.architectures import read_settings, write_settings
from latte_eqx.pretrained.tensors import Shardings, Tensor, from_tensors, to_tensors

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class Pretrained(NamedTuple):
    """A model, its settings, and its tokenizer if one came with it: a `tokenizers.Tokenizer`."""

    model: LanguageModel
    config: ModelConfig
    tokenizer: Any


def load(path: str | Path, *, shardings: Shardings | None = None) -> Pretrained:
    """Read a Llama, Gemma 2 or Gemma 3 model: a directory as Hugging Face has it (`config.json` and safetensors), a
    `.gguf` file, or a `.bin` file of llama2.c; or a directory that `save` wrote.

    Names and shapes of all tensors are checked: missing ones and ones that nothing uses raise. `shardings` is given the
    model with abstract arrays and says where each of them goes: every device then reads its own part alone.
    """
    path = Path(path)
    if path.suffix == ".bin" and path.is_file():
        config, tensors = llama2c.read_weights(path)
        beside = [file for file in sorted(path.parent.glob("tok*.bin")) if file != path]
        tokenizer = llama2c.read_tokenizer(beside[0], config.vocab_size) if beside else None
    elif path.suffix == ".gguf" and path.is_file():
        config, tensors, tokenizer = gguf_file.read(path)
    elif (path / "config.json").is_file():
        settings = json.loads((path / "config.json").read_text())
        tensors, tokenizer = _read_safetensors(path), _read_tokenizer(path)
        if settings.get("model_type") == own.KIND:
            config = own.read_settings(settings)
            return Pretrained(own.from_tensors(config, tensors, shardings), config, tokenizer)
        config = read_settings(settings)
    else:
        raise FileNotFoundError(f"A model must be a directory with config.json, a .gguf or a .bin file, got {path}.")
    return Pretrained(from_tensors(config, tensors, shardings), config, tokenizer)


def save(path: str | Path, pretrained: Pretrained) -> None:
    """Write a model as a directory: such as Hugging Face's transformers reads if it is one of theirs, else of our own.

    The model's own config counts, not the one beside it.
    """
    from safetensors.flax import save_file

    model, path = pretrained.model, Path(path)
    theirs = model.stack.config.mixer == "attention"
    tensors, settings = (to_tensors, write_settings) if theirs else (own.to_tensors, own.write_settings)
    path.mkdir(parents=True, exist_ok=False)
    save_file(tensors(model), path / WEIGHTS, metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(settings(model.stack.config), indent=2) + "\n")
    if pretrained.tokenizer is not None:
        pretrained.tokenizer.save(str(path / "tokenizer.json"))


def _read_safetensors(directory: Path) -> dict[str, Tensor]:
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
        with safe_open(directory / name, framework="numpy") as file:
            for key in file.keys():  # noqa: SIM118
                tensors[key] = Tensor(
                    tuple(file.get_slice(key).get_shape()), partial(_read_part, directory / name, key)
                )
    return tensors


def _read_part(path: Path, name: str, index: tuple[slice, ...]) -> np.ndarray:
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        return file.get_slice(name)[index]


def _read_tokenizer(directory: Path) -> Any:
    if (directory / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(directory / "tokenizer.json"))
    return sentencepiece.read_model(path) if (path := directory / "tokenizer.model").is_file() else None
