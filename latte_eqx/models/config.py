"""What a model is made of."""

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import jax
from jaxtyping import PRNGKeyArray

from latte_eqx.blocks import BlockStyle, MacchiatoBlock, Mixer
from latte_eqx.layers import Gate, YaRN
from latte_eqx.mixers import RSWA, SWA, FullAttention, LatteBidir, LatteCausal, Macchiato
from latte_eqx.mixers.latents import Feed, LatentProjection

MixerName = Literal["latte", "macchiato", "linear_attention", "attention", "swa", "r_swa"]
Positions = Literal["none", "sinusoidal"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The sizes and choices of a model. The defaults are Latte-R-SWA++ of the paper's language-model table.

    Which mixer looks at which field: all at `dim` and `num_heads`; `latte`, `linear_attention` and `macchiato` at
    `num_latents`, `feed`, `latent_proj` and `norm_feed`; `macchiato`, `swa` and `r_swa` at `window`; `attention` at
    `max_length`; those that attend at `num_kv_heads` (`None` for as many as heads, but one for `r_swa`), `rotary_base`
    (`None` for no rotation), `rotary_scale` and `rotary_length`, and, but for `r_swa`, at `head_dim`, `norm_heads`,
    `attention_scale` and `attention_cap`.

    A `rotary_scale` above 1 is YaRN: what was trained on sequences of `rotary_length` tokens then reads sequences that
    are so many times as long, with the same parameters.

    With `global_every` above 1, only every so-manyth layer is as the rest of the config says. The others are local:
    they see `local_window` past keys where these attend to everything, and rotate by `local_rotary_base`.
    """

    mixer: MixerName = "macchiato"
    vocab_size: int = 50_267
    num_layers: int = 12
    dim: int = 768
    num_heads: int = 8
    num_kv_heads: int | None = None
    head_dim: int | None = None
    mlp_dim: int = 3072
    gate: Gate = "silu"
    num_latents: int = 128
    window: int = 128
    feed: Feed | None = "rglru"
    latent_proj: LatentProjection = "dense"
    norm_feed: bool = False
    window_bias: float | None = None
    rotary_base: float | None = 10_000.0
    rotary_scale: float = 1.0
    rotary_length: int | None = None
    norm_heads: bool = False
    attention_scale: float | None = None
    attention_cap: float | None = None
    global_every: int = 1
    local_window: int | None = None
    local_rotary_base: float | None = None
    positions: Positions = "none"
    style: BlockStyle = "plus_plus"
    norm_eps: float = 1e-6
    norm_after: bool = False
    scale_embedding: bool = False
    tie_embedding: bool = True
    logit_cap: float | None = None
    max_length: int = 1024
    causal: bool = True
    dropout: float = 0.0
    init: Literal["normal", "lecun"] = "normal"

    def __post_init__(self):
        for name in ("vocab_size", "num_layers", "dim", "num_heads", "max_length", "global_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be positive, got {name}={getattr(self, name)}.")
        for name, choices in (("mixer", MixerName), ("positions", Positions)):
            if getattr(self, name) not in get_args(choices):
                raise ValueError(f"`{name}` must be one of {get_args(choices)}, got {getattr(self, name)!r}.")
        if self.init not in ("normal", "lecun"):
            raise ValueError(f"`init` must be 'normal' or 'lecun', got {self.init!r}.")
        if self.positions == "sinusoidal" and self.dim % 2:
            raise ValueError(f"Sinusoidal positions need an even `dim`, got dim={self.dim}.")
        if not self.rotary_scale >= 1:
            raise ValueError(f"`rotary_scale` must be at least 1, got rotary_scale={self.rotary_scale}.")
        if self.rotary_scale > 1 and (self.rotary_base is None or self.rotary_length is None):
            got = f"rotary_base={self.rotary_base}, rotary_length={self.rotary_length}"
            raise ValueError(f"`rotary_scale` above 1 must come with `rotary_base` and `rotary_length`, got {got}.")
        if self.global_every > 1 and self.mixer not in ("attention", "macchiato"):
            raise ValueError(f"`global_every` must be 1 for the mixer {self.mixer!r}, got {self.global_every}.")
        if (self.global_every > 1 and self.mixer == "attention") != (self.local_window is not None):
            got = f"mixer={self.mixer!r}, global_every={self.global_every}, local_window={self.local_window}"
            raise ValueError(
                f"`local_window` must be given for 'attention' with `global_every` above 1, only, got {got}."
            )
        if not self.causal and self.mixer == "r_swa":
            raise ValueError("`causal` must be true for the mixer 'r_swa', which only looks back.")

    @property
    def yarn(self) -> YaRN | None:
        """How the rotation is stretched; at `rotary_scale` 1 by nothing."""
        return None if self.rotary_length is None else YaRN(self.rotary_scale, self.rotary_length)

    @property
    def layers(self) -> tuple["ModelConfig", ...]:
        """What the layers are that come again and again: local ones, if there are some, and then one like this."""
        if self.global_every == 1:
            return (self,)
        local: dict[str, Any] = dict(global_every=1, local_window=None, local_rotary_base=None)
        if self.mixer == "attention":
            local |= dict(mixer="swa", window=self.local_window)
        if self.local_rotary_base is not None:
            local |= dict(rotary_base=self.local_rotary_base)
        return (replace(self, **local),) * (self.global_every - 1) + (self,)


def make_mixer(config: ModelConfig, *, key: PRNGKeyArray) -> Mixer:
    """Build the mixer that the config names."""
    sizes: dict[str, Any] = dict(dim=config.dim, num_heads=config.num_heads)
    latents: dict[str, Any] = dict(
        num_latents=config.num_latents,
        feed=config.feed,
        latent_proj=config.latent_proj,
        norm_feed=config.norm_feed,
    )
    heads: dict[str, Any] = dict(rotary_base=config.rotary_base, yarn=config.yarn)
    if config.num_kv_heads is not None:
        heads["num_kv_heads"] = config.num_kv_heads
    attention: dict[str, Any] = dict(
        head_dim=config.head_dim,
        causal=config.causal,
        scale=config.attention_scale,
        soft_cap=config.attention_cap,
        norm_eps=config.norm_eps if config.norm_heads else None,
        **heads,
    )
    match config.mixer:
        case "latte" if config.causal:
            return LatteCausal(**sizes, **latents, key=key)
        case "latte":
            return LatteBidir(**sizes, **latents, key=key)
        case "linear_attention":
            kind = LatteCausal if config.causal else LatteBidir
            return kind(**sizes, **latents, directed=False, key=key)
        case "macchiato":
            bias = config.window_bias
            return Macchiato(**sizes, **latents, **attention, window=config.window, window_bias=bias, key=key)
        case "swa":
            return SWA(**sizes, **attention, window=config.window, key=key)
        case "attention":
            return FullAttention(**sizes, **attention, max_length=config.max_length, key=key)
        case "r_swa":
            return RSWA(**sizes, **heads, window=config.window, key=key)


def make_block(config: ModelConfig, *, key: PRNGKeyArray) -> MacchiatoBlock:
    """Build one layer."""
    mixer_key, block_key = jax.random.split(key)
    mixer = make_mixer(config, key=mixer_key)
    return MacchiatoBlock(
        mixer,
        config.dim,
        config.mlp_dim,
        style=config.style,
        dropout=config.dropout,
        norm_eps=config.norm_eps,
        norm_after=config.norm_after,
        gate=config.gate,
        key=block_key,
    )
