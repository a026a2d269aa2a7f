"""SmolLM2 135M with a window and latents in all layers: only the latents are trained.

    python -c "from latte_eqx.pretrained import load, save; save('smollm2', load('SmolLM2-135M.gguf'))"
    python -m data.prepare text BOOKS... --tokenizer smollm2/tokenizer.json --out prepared/books
    python -m train.main --config configs/smollm2_macchiato.py --pretrained.path smollm2 --data.directory prepared/books

The directory may as well be the one that Hugging Face has. Learning rate, warm-up and decay are those of the paper's
extension of Gemma 2.
Parameters: 141.9M, of which 7.4M are trained. Tokens: 16 million, 2000 steps of 2 x 4096. Cost: 1.4e16 FLOPs
(`train.flops`, which counts gradients of frozen weights too).
"""

from latte_eqx import ModelConfig
from train.config import Config, DataConfig, OptimConfig


def get_config() -> Config:
    """Return the run."""
    return Config(
        model=ModelConfig(
            mixer="macchiato",
            vocab_size=49_152,
            num_layers=30,
            dim=576,
            num_heads=9,
            num_kv_heads=3,
            mlp_dim=1536,
            num_latents=144,
            window=128,
            window_bias=0.0,
            rotary_base=100_000.0,
            norm_eps=1e-5,
            max_length=8192,
        ),
        data=DataConfig(seq=4096, batch_size=2),
        optim=OptimConfig(peak_lr=6e-4, end_lr=0.0, warmup_steps=100, schedule="cosine"),
        tokens=2000 * 2 * 4096,
    )
