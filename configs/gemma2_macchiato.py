"""Gemma 2 2B with a window and latents in all layers: only the latents are trained, as the paper extends it.

    python -m data.prepare text SLIMPAJAMA... --tokenizer gemma-2-2b/tokenizer.json --out prepared/slimpajama
    python -m train.main --config configs/gemma2_macchiato.py --pretrained.path gemma-2-2b \\
        --data.directory prepared/slimpajama
    python -m train.compile --config configs/gemma2_macchiato.py --pretrained.path gemma-2-2b --topology a100:4

`gemma-2-2b` is the directory of the pretrained model, not of the instructed one. Settings are the paper's: 100,000
steps of 4 x 4096 tokens, one day on four A100. Its perplexities on SlimPajama at 4096 / 8192 / 16384 tokens: 10.14 /
9.99 / 10.27. Where it is silent: the window begins with 95 % of the attention.
Parameters: 2,664.8M, of which 50.5M are trained. Tokens: 1.6 billion. Cost: 2.6e19 FLOPs (`train.flops`, which counts
gradients of frozen weights too).
"""

from latte_eqx import ModelConfig
from train.config import Config, DataConfig, OptimConfig


def get_config() -> Config:
    """Return the run."""
    return Config(
        model=ModelConfig(
            mixer="macchiato",
            vocab_size=256_000,
            num_layers=26,
            dim=2304,
            num_heads=8,
            num_kv_heads=4,
            head_dim=256,
            mlp_dim=9216,
            gate="gelu",
            num_latents=128,
            window=128,
            window_bias=0.0,
            attention_scale=256**-0.5,
            attention_cap=50.0,
            global_every=2,
            norm_after=True,
            scale_embedding=True,
            logit_cap=30.0,
            max_length=8192,
        ),
        data=DataConfig(seq=4096, batch_size=4),
        optim=OptimConfig(peak_lr=6e-4, end_lr=0.0, warmup_steps=2000, schedule="cosine"),
        tokens=100_000 * 4 * 4096,
    )
