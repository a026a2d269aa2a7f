"""Logits agree with those of Hugging Face's transformers, read from files that it wrote and written for it to read."""

import jax.numpy as jnp
import numpy as np
import pytest

from latte_eqx.pretrained import load, save, to_macchiato

torch = pytest.importorskip("torch", reason="needs the extra `parity`")
transformers = pytest.importorskip("transformers", reason="needs the extra `parity`")

SIZES = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    attn_implementation="eager",
)
# Windows of 5 keys, the token's own among them; heads that do not make up the width; layers that do not fill a round.
GEMMA = dict(head_dim=12, query_pre_attn_scalar=9, sliding_window=5, **SIZES)
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(num_hidden_layers=3, tie_word_embeddings=True, **SIZES),
    "untied_llama": lambda: transformers.LlamaConfig(num_hidden_layers=2, rope_theta=500.0, head_dim=12, **SIZES),
    "gemma2": lambda: transformers.Gemma2Config(
        num_hidden_layers=5, attn_logit_softcapping=2.0, final_logit_softcapping=3.0, **GEMMA
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(num_hidden_layers=8, **GEMMA),
}
TOKENS = np.random.default_rng(0).integers(0, 61, 40)


@pytest.fixture(params=CONFIGS)
def theirs(request):
    """A model with random weights, norms among them, in float32."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[request.param]()).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "llama" in request.param and "norm" in name else 0.0, 0.3)
    return model


def their_logits(model):
    with torch.no_grad():
        return model(torch.tensor(TOKENS)[None]).logits[0].numpy()


def test_logits_agree_both_ways(theirs, tmp_path):
    theirs.save_pretrained(tmp_path / "theirs")
    ours, want = load(tmp_path / "theirs"), their_logits(theirs)
    tokens = jnp.asarray(TOKENS)
    np.testing.assert_allclose(ours.model(tokens), want, rtol=0, atol=1e-4)
    save(tmp_path / "ours", ours)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    np.testing.assert_allclose(their_logits(again), want, rtol=0, atol=1e-4)
    assert load(tmp_path / "ours").config == ours.config

    logits, state = ours.model.extend(tokens[:17], ours.model.init_state())
    rest, _ = ours.model.extend(tokens[17:], state)
    np.testing.assert_allclose(jnp.concatenate([logits, rest]), want, rtol=0, atol=1e-4)


def test_local_layers_keep_a_cache_of_their_window(theirs, tmp_path):
    theirs.save_pretrained(tmp_path / "theirs")
    model, config, _ = load(tmp_path / "theirs")
    lengths = [state.keys.shape[2] for state in model.stack.init_state()]
    assert lengths == [5] * (config.global_every - 1) + [64]


def test_all_to_the_window_is_the_model_in_a_window(theirs, tmp_path):
    """Theirs, with a mask that lets every layer see 6 keys; each layer keeps its own rotation."""
    theirs.save_pretrained(tmp_path / "theirs")
    pretrained, tokens = load(tmp_path / "theirs"), jnp.asarray(TOKENS)
    position = torch.arange(len(TOKENS))
    distance = position[:, None] - position[None]
    mask = torch.where((distance >= 0) & (distance <= 5), 0.0, torch.finfo(torch.float32).min)[None, None]
    if theirs.config.model_type != "llama":
        mask = {"full_attention": mask, "sliding_attention": mask}
    with torch.no_grad():
        want = theirs(torch.tensor(TOKENS)[None], attention_mask=mask).logits[0].numpy()
    assert np.abs(want - their_logits(theirs)).max() > 1e-2
    model = to_macchiato(pretrained.model, window=5, num_latents=8, p0=1)
    np.testing.assert_allclose(model(tokens), want, rtol=0, atol=1e-4)
    save(tmp_path / "macchiato", pretrained._replace(model=model))
    assert jnp.array_equal(load(tmp_path / "macchiato").model(tokens), model(tokens))
