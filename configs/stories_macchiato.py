"""stories15M (Llama, 15 million parameters, trained on 256 tokens) with a window and latents: only these are trained.

    python -m train.main --config configs/stories_macchiato.py --pretrained.path stories15M \\
        --data.directory prepared/stories

docs/results.md has all commands, from the file of llama2.c on. The model tells the stories that its latents are trained
on; any others will do as well. The window is a sixteenth of the rows that the model was trained on (the paper's is a
32nd). The learning rate is five times that of the paper's extension of Gemma 2, whose training is 4000 times as long.
Parameters: 15.7M, of which 0.51M are trained. Tokens: 0.4 million, 200 steps of 4 x 512.
Cost: 4e13 FLOPs (`train.flops`, which counts gradients of frozen weights too), 6 minutes on one core.
"""

from latte_eqx import ModelConfig
from train.config import CheckpointConfig, Config, DataConfig, OptimConfig

SEQ, BATCH, STEPS = 512, 4, 200


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
            window=16,
            window_bias=0.0,
            norm_eps=1e-5,
        ),
        data=DataConfig(seq=SEQ, batch_size=BATCH),
        optim=OptimConfig(peak_lr=3e-3, end_lr=0.0, warmup_steps=15, schedule="cosine"),
        checkpoint=CheckpointConfig(every=50),
        tokens=STEPS * BATCH * SEQ,
        compute_dtype="float32",
        remat="none",
        eval_every=50,
        eval_batches=8,
        prompt="Once upon a time",
    )
