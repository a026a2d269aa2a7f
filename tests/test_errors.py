"""Bad inputs raise errors that name the argument and the value that came.

Users run without the checker of annotations, which would speak first under pytest. So one plain process tries all.
"""

import json
import os
import subprocess
import sys
from functools import cache

import pytest

SETUP = """
import json
import jax, jax.numpy as jnp
from latte_eqx import *
from latte_eqx.layers import BlockLinear
from latte_eqx.ops import *

key = jax.random.key(0)
tiny = dict(vocab_size=20, dim=16, num_heads=2, mlp_dim=0, num_latents=8, window=4, max_length=8, feed=None)
tokens, x = jnp.arange(6), jnp.ones((6, 16))
weights = keys = jnp.ones((2, 6, 4))
values = heads = jnp.ones((2, 6, 8))
state = LatteState.empty(2, latents=4, dim=8)
falling = jnp.array([0, 0, 1, 1, 0, 0])
latte = lambda **changed: latte_causal(**(dict(weights=weights, keys=keys, values=values) | changed))
undirected = lambda **changed: linear_attention(**(dict(queries=weights, keys=keys, values=values) | changed))
both_ways = lambda **changed: latte_bidirectional(**(dict(weights=weights, keys=keys, values=values) | changed))
attend = lambda **changed: window_attention(**(dict(queries=heads, keys=heads, values=heads, window=3) | changed))
config = lambda **changed: ModelConfig(**(tiny | changed))
model = lambda **changed: LanguageModel(config(**changed), key=key)
swa = lambda **changed: SWA(**(dict(dim=16, num_heads=2, window=4, key=key) | changed))
macchiato_sizes = dict(dim=16, num_latents=8, num_heads=2, window=4, feed=None, key=key)
macchiato = lambda **changed: Macchiato(**(macchiato_sizes | changed))

def attempt(code):
    try:
        eval(code)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", "no error"

print(json.dumps({code: attempt(code) for code in json.loads(input())}))
"""

# What is tried, the error, and what its message must hold: first the name of the argument, then the value that came.
CASES = [
    # Sizes.
    ("LatteCausal(16, 8, 3, key=key)", "ValueError", ["`num_heads`", "num_heads=3", "dim=16"]),
    ("LatteCausal(16, 7, 2, key=key)", "ValueError", ["`num_latents`", "num_latents=7"]),
    ("LatteCausal(16, 0, 2, key=key)", "ValueError", ["`num_latents`", "num_latents=0"]),
    ("LatteCausal(16, 8, 0, key=key)", "ValueError", ["`num_heads`", "num_heads=0"]),
    ("LatteBidir(16, 8, 3, key=key)", "ValueError", ["`num_heads`", "num_heads=3"]),
    ("macchiato(num_heads=3)", "ValueError", ["`num_heads`", "num_heads=3"]),
    ("macchiato(window=-1)", "ValueError", ["`window`", "window=-1"]),
    ("swa(num_heads=3)", "ValueError", ["`num_heads`", "num_heads=3", "dim=16"]),
    ("swa(num_heads=0)", "ValueError", ["`num_heads`", "num_heads=0"]),
    ("swa(window=-1)", "ValueError", ["`window`", "window=-1"]),
    ("swa(num_heads=4, num_kv_heads=3)", "ValueError", ["`num_kv_heads`", "num_kv_heads=3", "num_heads=4"]),
    ("swa(num_heads=16)", "ValueError", ["otary", "even", "1"]),
    ("RSWA(16, 2, -1, key=key)", "ValueError", ["`window`", "window=-1"]),
    ("RSWA(16, 3, 4, key=key)", "ValueError", ["3", "16"]),
    ("FullAttention(16, 2, 0, key=key)", "ValueError", ["`max_length`", "max_length=0"]),
    ("RGLRU(16, 3, key=key)", "ValueError", ["`num_blocks`", "num_blocks=3"]),
    ("RGLRU(16, 0, key=key)", "ValueError", ["`num_blocks`", "num_blocks=0"]),
    ("BlockLinear(3, 16, 16, key=key)", "ValueError", ["`num_blocks`", "num_blocks=3", "in_features=16"]),
    ("CausalConv(16, 0, key=key)", "ValueError", ["`width`", "width=0"]),
    ("MacchiatoBlock(swa(), 16, -1, key=key)", "ValueError", ["`mlp_dim`", "mlp_dim=-1"]),
    ("SequenceClassifier(config(), 1, key=key)", "ValueError", ["`num_classes`", "num_classes=1"]),
    ("PairClassifier(config(), 0, key=key)", "ValueError", ["`num_classes`", "num_classes=0"]),
    *(
        (f"config({name}=0)", "ValueError", [f"`{name}`", f"{name}=0"])
        for name in ("vocab_size", "num_layers", "dim", "num_heads", "max_length")
    ),
    ("config(dim=15, positions='sinusoidal')", "ValueError", ["`dim`", "dim=15"]),
    ("model(num_heads=3)", "ValueError", ["`num_heads`", "num_heads=3"]),
    ("model(window=-2)", "ValueError", ["`window`", "window=-2"]),
    # Choices.
    ("LatteCausal(16, 8, 2, feed='cnn', key=key)", "ValueError", ["`feed`", "'cnn'", "'conv'", "'rglru'"]),
    ("macchiato(feed='cnn')", "ValueError", ["`feed`", "'cnn'"]),
    ("macchiato(latent_proj='sparse')", "ValueError", ["`latent_proj`", "'sparse'", "'per_head'"]),
    ("macchiato(feed=None, norm_feed=True)", "ValueError", ["`norm_feed`", "norm_feed=True"]),
    ("LatteBidir(16, 8, 2, feed='conv', key=key)", "ValueError", ["`feed`", "feed='conv'"]),
    ("RGLRU(16, 2, ring_on='b', key=key)", "ValueError", ["`ring_on`", "'b'", "'a_pow_c'"]),
    ("MacchiatoBlock(swa(), 16, 8, style='++', key=key)", "ValueError", ["`style`", "'++'", "'plus_plus'"]),
    ("config(mixer='mamba')", "ValueError", ["`mixer`", "'mamba'", "'macchiato'"]),
    ("config(positions='learned')", "ValueError", ["`positions`", "'learned'", "'sinusoidal'"]),
    ("config(init='zeros')", "ValueError", ["`init`", "'zeros'", "'lecun'"]),
    ("model(style='++')", "ValueError", ["`style`", "'++'"]),
    ("config(mixer='r_swa', causal=False)", "ValueError", ["`causal`", "'r_swa'"]),
    ("model(causal=False)", "ValueError", ["`causal`", "causal=False"]),
    ("model(dropout=1.0)", "ValueError", ["`dropout`", "dropout=1.0"]),
    ("model(dropout=-0.1)", "ValueError", ["`dropout`", "dropout=-0.1"]),
    # Arguments of mixers and models.
    ("model(mixer='attention')(jnp.arange(9))", "ValueError", ["max_length=8", "9"]),
    ("FullAttention(16, 2, 5, key=key)(x)", "ValueError", ["max_length=5", "6"]),
    ("macchiato()(x, falling)", "ValueError", ["`segment_ids`", "decrease"]),
    ("RGLRU(16, 2, key=key)(x, jnp.zeros(5, int))", "ValueError", ["`segment_ids`", "5"]),
    ("CausalConv(16, key=key)(x, jnp.zeros(5, int))", "ValueError", ["`segment_ids`", "5"]),
    ("macchiato()(x, jnp.zeros(5, int))", "ValueError", ["`segment_ids`", "5"]),
    ("swa()(x, jnp.zeros(5, int))", "ValueError", ["`segment_ids`", "(5,)"]),
    ("LatteCausal(16, 8, 2, key=key)(x, jnp.zeros(6))", "TypeError", ["`segment_ids`", "float32"]),
    ("SequenceClassifier(config(), 2, key=key)(jnp.ones(6))", "TypeError", ["`inputs`", "float32"]),
    ("SequenceClassifier(config(), 2, num_features=1, key=key)(tokens)", "TypeError", ["`inputs`", "int32"]),
    ("generate(model(), [1.5, 2.0], max_new_tokens=2, key=key)", "TypeError", ["prompt", "float64"]),
    ("generate(model(), [[[1, 2]]], max_new_tokens=2, key=key)", "ValueError", ["prompt", "(1, 2)"]),
    ("generate(model(), [], max_new_tokens=2, key=key)", "ValueError", ["prompt", "(0,)"]),
    ("generate(model(), [20], max_new_tokens=2, key=key)", "ValueError", ["okens", "20"]),
    # Ops.
    ("latte(implementation='magic')", "ValueError", ["`implementation`", "'magic'", "'chunked'"]),
    ("latte(weights=weights.astype(int))", "TypeError", ["`weights`", "int32"]),
    ("latte(keys=keys.astype(int))", "TypeError", ["`keys`", "int32"]),
    ("latte(values=values.astype(int))", "TypeError", ["`values`", "int32"]),
    ("latte(weights=weights[0])", "ValueError", ["`weights`", "(6, 4)"]),
    ("latte(weights=weights[0, 0], keys=keys[0, 0])", "ValueError", ["`keys`", "(4,)"]),
    ("latte(values=values[:, :5])", "ValueError", ["`values`", "(2, 5, 8)"]),
    ("latte(segment_ids=falling)", "ValueError", ["`segment_ids`", "decrease"]),
    ("latte(segment_ids=jnp.zeros((3, 6), int))", "ValueError", ["`segment_ids`", "(3, 6)"]),
    ("latte(segment_ids=jnp.zeros((1, 1, 6), int))", "ValueError", ["`segment_ids`", "(1, 1, 6)"]),
    ("latte(segment_ids=jnp.zeros(6))", "TypeError", ["`segment_ids`", "float32"]),
    ("latte(state=LatteState.empty(2, latents=4, dim=7))", "ValueError", ["`state.average`", "(2, 4, 7)"]),
    ("undirected(implementation='magic')", "ValueError", ["`implementation`", "'magic'"]),
    ("undirected(queries=weights.astype(int))", "TypeError", ["`queries`", "int32"]),
    ("undirected(queries=weights[0])", "ValueError", ["`queries`", "(6, 4)"]),
    ("undirected(keys=keys.astype(int))", "TypeError", ["`keys`", "int32"]),
    ("undirected(segment_ids=falling)", "ValueError", ["`segment_ids`", "decrease"]),
    ("both_ways(weights=weights[..., :3])", "ValueError", ["`weights`", "(2, 6, 3)"]),
    ("both_ways(values=values.astype(int))", "TypeError", ["`values`", "int32"]),
    ("both_ways(segment_ids=falling)", "ValueError", ["`segment_ids`", "decrease"]),
    ("both_ways(mask=jnp.ones(5, bool))", "ValueError", ["`mask`", "(5,)"]),
    ("both_ways(mask=jnp.ones(6))", "TypeError", ["`mask`", "float32"]),
    ("linear_scan(values.astype(int), values)", "TypeError", ["`log_decay`", "int32"]),
    ("linear_scan(values[0], values)", "ValueError", ["`log_decay`", "(6, 8)"]),
    ("linear_scan(values, values, state=values)", "ValueError", ["`state`", "(2, 6, 8)"]),
    ("linear_scan(values, values, implementation='magic')", "ValueError", ["`implementation`", "'magic'"]),
    ("attend(window=-1)", "ValueError", ["`window`", "window=-1"]),
    ("attend(window=1.5)", "TypeError", ["`window`", "window=1.5"]),
    ("attend(soft_cap=0.0)", "ValueError", ["`soft_cap`", "soft_cap=0.0"]),
    ("attend(past=2)", "ValueError", ["past", "past=2"]),
    ("attend(past=2, causal=False)", "ValueError", ["`past`", "past=2"]),
    ("attend(queries=heads.astype(int))", "TypeError", ["`queries`", "int32"]),
    ("attend(queries=heads[0])", "ValueError", ["queries (6, 8)"]),
    ("attend(queries=jnp.ones((3, 6, 8)))", "ValueError", ["heads", "heads=3"]),
    ("attend(segment_ids=jnp.zeros(5, int))", "ValueError", ["`segment_ids`", "(5,)"]),
    ("attend(segment_ids=jnp.zeros(6))", "TypeError", ["`segment_ids`", "float32"]),
    ("attend(segment_ids=falling)", "ValueError", ["`segment_ids`", "decrease"]),
    ("attend(key_mask=jnp.ones(5, bool))", "ValueError", ["`key_mask`", "(5,)"]),
    ("attend(implementation='scan')", "ValueError", ["`implementation`", "'scan'"]),
]


@cache
def outcomes():
    """Try all cases in one process and return, for each, the error's type and message."""
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", SETUP],
        input=json.dumps([code for code, _, _ in CASES]),
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


@pytest.mark.parametrize(("code", "error", "words"), CASES, ids=[code for code, _, _ in CASES])
def test_bad_input(code, error, words):
    name, message = outcomes()[code]
    assert name == error, message
    for word in words:
        assert word in message
