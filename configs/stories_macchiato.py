"""stories15M (Llama, 15 million parameters, trained on 256 tokens) with a window and latents: only these are trained.

    python -c "from latte_eqx.pretrained import load, save; save('stories15M', load('stories15M.bin'))"
    python -m data.prepare text STORIES... --tokenizer stories15M/tokenizer.json --out prepared/stories
    python -m train.main --config configs/stories_macchiato.py --pretrained.path stories15M \\
        --data.directory prepared/stories

The file is one of llama2.c, with tokenizer.bin beside it. Learning rate, warm-up and decay are those of the paper's
extension of Gemma 2. Parameters: 15.7M, of which 0.51M are trained. Tokens: 4.1 million, 1000 steps of 4 x 1024.
Cost: 4e14 FLOPs (`train.flops`, which counts gradients of frozen weights too).
"""

from latte_eqx import ModelConfig
from train.config import Config, DataConfig, OptimConfig


def get_config() -> Config:
    """Return the run."""
    return Config(
        model=ModelConfig(
            mixer="macchiato",
            vocab_size=32_000,
            num_layers=6,
            dim=288,
            num_heads=6,
            num_kv_heads=6,
            mlp_dim=768,
            num_latents=96,
            window=64,
            window_bias=0.0,
            norm_eps=1e-5,
        ),
        data=DataConfig(seq=1024, batch_size=4),
        optim=OptimConfig(peak_lr=6e-4, end_lr=0.0, warmup_steps=100, schedule="cosine"),
        tokens=1000 * 4 * 1024,
        compute_dtype="float32",
        eval_every=250,
        prompt="Once upon a time",
    )
