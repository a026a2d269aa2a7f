"""What a run is: frozen dataclasses, made by `get_config()` in a file of `configs/`, changed on the command line."""

import dataclasses
import inspect
import runpy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from latte_eqx import ModelConfig


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which text, in which pieces."""

    directory: Path | None = None
    """What `python -m data.prepare` wrote; none is an error unless the run is a smoke run."""
    seq: int = 1024
    """Tokens in a row."""
    batch_size: int = 64
    """Rows in a batch, over all devices."""
    pack: Literal["concat", "documents"] = "concat"
    """Cut the stream of documents into rows, or fill rows with whole documents that do not see one another."""
    num_workers: int = 0
    """Processes that read ahead; with none a thread does."""


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What is to be said of a row."""

    kind: Literal["next_token", "classify", "classify_pairs"] = "next_token"
    """A token for each position; or the class of an example, or of a pair."""
    num_classes: int = 2
    """Classes to choose from."""
    is_numeric: bool = False
    """Whether inputs to classify are numbers instead of tokens."""
    groups: tuple[int, ...] = ()
    """Numbers at which validation splits positions into groups, to be measured apart: by their place in the row; of
    examples with targets of their own, by how far back the answer stands."""


@dataclass(frozen=True, kw_only=True)
class PretrainedConfig:
    """A model to begin from. Where `model.mixer` is "macchiato", its attention becomes the window, and only the latents
    are trained; where it is "attention", all of the model is trained on.
    """

    path: Path | None = None
    """What `latte_eqx.pretrained.load` reads; none to train all of a fresh model."""
    window_share: float = 0.95
    """How much of the attention the window has at first."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW with warm-up and decay."""

    peak_lr: float = 5e-4
    """Learning rate after the warm-up."""
    end_lr: float = 1e-5
    """Learning rate of the last step."""
    warmup_steps: int = 4000
    """Steps from zero to the peak."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """How the learning rate falls from its peak to its end."""
    weight_decay: float = 0.01
    """Decoupled decay of matrices; norms, biases and the RG-LRU's decays have none."""
    b1: float = 0.9
    """Memory of the mean of the gradients."""
    b2: float = 0.999
    """Memory of their squares."""
    eps: float = 1e-8
    """Added to the root of the squares."""
    clip_norm: float = 1.0
    """Largest norm of all gradients together."""
    accumulate: int = 1
    """Pieces in which a batch goes through the devices, one after another; the gradient is that of the whole."""


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How devices are laid out; their product is the number of devices, and one size may be -1, for what is left."""

    data: int = 1
    """Replicas of the parameters."""
    fsdp: int = -1
    """Shards of the parameters; they split the batch too."""
    seq: int = 1
    """Shards of the sequence; 1 is the only size yet."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save, and what to keep."""

    every: int = 1000
    """Steps from one checkpoint to the next."""
    keep: int = 2
    """How many of the latest to keep."""
    keep_best: bool = True
    """Keep as well the one with the lowest validation loss, of those that were validated when they were saved."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run. The defaults are those of the paper's OpenWebText table."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    pretrained: PretrainedConfig = field(default_factory=PretrainedConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tokens: int = 8_000_000_000
    """Tokens to train on; with the size of a batch they give the number of steps."""
    seed: int = 0
    """Decides weights, order of the rows, and dropout."""
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the matrix products; parameters and optimizer are float32."""
    remat: Literal["full", "dots", "none"] = "full"
    """What the backward pass computes again: all of a layer, all but its matrix products, or nothing but the gather."""
    eval_every: int = 1000
    """Steps from one validation to the next."""
    eval_batches: int = 50
    """Batches of a validation during training; `python -m train.evaluate` takes all."""
    log_every: int = 10
    """Steps from one line of the log to the next."""
    max_skips: int = 10
    """Bad steps in a row (loss or gradient not finite) after which the run goes back to its last checkpoint."""
    spike_factor: float | None = None
    """Count a step as bad, too, whose loss is this many times the running mean of the losses."""
    prompt: str = "The "
    """What the sample at the end continues."""

    def __post_init__(self):
        for name in ("tokens", "eval_every", "eval_batches", "log_every", "max_skips"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be positive, got {name}={getattr(self, name)}.")
        for name in ("seq", "batch_size"):
            if getattr(self.data, name) < 1:
                raise ValueError(f"`data.{name}` must be positive, got {getattr(self.data, name)}.")
        if self.optim.accumulate < 1 or self.data.batch_size % self.optim.accumulate:
            got = f"data.batch_size={self.data.batch_size}, optim.accumulate={self.optim.accumulate}"
            raise ValueError(f"`optim.accumulate` must be positive and divide `data.batch_size`, got {got}.")
        if list(self.task.groups) != sorted(set(self.task.groups)):
            raise ValueError(f"`task.groups` must increase, got {self.task.groups}.")
        fits = self.model.mixer == "attention" or (
            self.model.mixer == "macchiato" and self.model.window_bias is not None
        )
        if self.pretrained.path is not None and not fits:
            got = f"model.mixer={self.model.mixer!r}, model.window_bias={self.model.window_bias}"
            what = "stay 'attention' or become a 'macchiato' with a `model.window_bias`"
            raise ValueError(f"A pretrained model must {what}, got {got}.")
        if self.mesh.seq != 1:
            raise ValueError(f"`mesh.seq` must be 1: sequences are not sharded yet, got mesh.seq={self.mesh.seq}.")
        if self.model.mixer == "attention" and self.data.seq > self.model.max_length:
            got = f"data.seq={self.data.seq}, model.max_length={self.model.max_length}"
            raise ValueError(f"`data.seq` must be at most `model.max_length` for attention, got {got}.")

    @property
    def steps(self) -> int:
        """The number of steps."""
        return max(self.tokens // (self.data.batch_size * self.data.seq), 1)


def smoke(config: Config, *, directory: Path) -> Config:
    """Return a copy of a config for text that a CPU trains in minutes, on bytes of the corpus in `directory`."""
    if config.task != TaskConfig():
        raise ValueError("`--smoke` must be for a config of text; one of a task has small variants, see its file.")
    replace = dataclasses.replace
    seq, batch_size, steps = 256, 8, 200
    model = replace(
        config.model,
        vocab_size=257,
        num_layers=3,
        dim=128,
        num_heads=4,
        num_kv_heads=None,
        head_dim=None,
        attention_scale=None,
        mlp_dim=384,
        num_latents=64,
        window=32,
        max_length=1024,
    )
    return replace(
        config,
        model=model,
        pretrained=PretrainedConfig(),
        data=replace(config.data, directory=directory, seq=seq, batch_size=batch_size, num_workers=0),
        optim=replace(config.optim, peak_lr=3e-3, end_lr=3e-4, warmup_steps=20, accumulate=1),
        checkpoint=replace(config.checkpoint, every=50),
        tokens=steps * batch_size * seq,
        compute_dtype="float32",
        eval_every=50,
        eval_batches=8,
        log_every=10,
        prompt="ROMEO:",
    )


def load_config(path: Path) -> Config:
    """Return what `get_config()` of a file gives, or `get_config(variant)` for FILE:VARIANT."""
    file, _, variant = str(path).partition(":")
    if not Path(file).is_file():
        raise FileNotFoundError(f"`--config` must name a file with a function `get_config`, got {file}.")
    get_config = runpy.run_path(file).get("get_config")
    if get_config is None:
        raise ValueError(f"{file} must define `get_config() -> Config`, and does not.")
    if variant and not inspect.signature(get_config).parameters:
        raise ValueError(f"{file} must be named without a variant, since it has none, got {variant!r}.")
    return get_config(variant) if variant else get_config()


def config_name(path: Path) -> str:
    """Return what a run of FILE or FILE:VARIANT is called."""
    file, _, variant = str(path).partition(":")
    return "_".join([Path(file).stem, *([variant] if variant else [])])


def choose(variants: Mapping[str, Any], name: str) -> Any:
    """Return the variant of that name."""
    if name not in variants:
        raise ValueError(f"The variant must be one of {', '.join(variants)}, got {name!r}.")
    return variants[name]


def to_dict(config: Any) -> Any:
    """Return a config as JSON can hold it."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: to_dict(getattr(config, f.name)) for f in dataclasses.fields(config)}
    return str(config) if isinstance(config, Path) else config


def from_dict(kind: Any, values: dict[str, Any]) -> Any:
    """Return the config that `to_dict` made a dictionary of."""
    hints = get_type_hints(kind)

    def restore(name, value):
        if dataclasses.is_dataclass(hints[name]):
            return from_dict(hints[name], value)
        if isinstance(value, list):
            return tuple(value)
        return Path(value) if value is not None and Path in (hints[name], *get_args(hints[name])) else value

    return kind(**{name: restore(name, value) for name, value in values.items()})
