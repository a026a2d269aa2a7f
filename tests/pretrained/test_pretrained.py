"""Real weights, read as they were published; and their attention turned into Macchiato."""

import dataclasses
import json
import shutil
from pathlib import Path

import equinox as eqx
import gguf
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.flax import load_file, save_file
from tokenizers import pre_tokenizers

from latte_eqx import generate
from latte_eqx.pretrained import gguf_file, is_new, load, save, to_macchiato
from latte_eqx.pretrained.tensors import to_tensors
from tests.pretrained import llama_oracle

STORIES = Path(__file__).parents[2] / "data" / "models" / "stories260K" / "stories260K.bin"
TEXT = "Once upon a time, there was a little girl. She had a dog named Spot.\nOne day, they went to the park."
WINDOW = 7


@pytest.fixture(scope="module")
def stories():
    return load(STORIES)


@pytest.fixture(scope="module")
def tokens(stories):
    return jnp.asarray(stories.tokenizer.encode(TEXT).ids)


@pytest.fixture(scope="module")
def directory(stories, tmp_path_factory):
    path = tmp_path_factory.mktemp("stories") / "model"
    save(path, stories)
    return path


def spoil(directory, path, change):
    """Copy a model, with other tensors."""
    shutil.copytree(directory, path)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    return path


def test_logits_are_those_of_the_float64_oracle(stories, tokens):
    want = llama_oracle.logits(STORIES, np.asarray(tokens))
    np.testing.assert_allclose(stories.model(tokens), want, rtol=0, atol=1e-4)
    # It has learned to tell stories: of 512 tokens, chance would be 6.2.
    losses = optax.softmax_cross_entropy_with_integer_labels(stories.model(tokens)[:-1], tokens[1:])
    assert float(losses.mean()) < 1.5


def test_it_goes_on_with_a_story(stories):
    prompt = stories.tokenizer.encode("Once upon a time, there was a little girl").ids
    new = generate(stories.model, prompt, max_new_tokens=12, key=jax.random.key(0), temperature=0)
    assert stories.tokenizer.decode(new.tolist()).startswith("named Lily. She loved to play")


@pytest.mark.parametrize("text", ["Once upon a time", "a\nb  c", "café ☕ 日本", ""])
def test_tokens_say_what_the_text_says(stories, text):
    """What the vocabulary lacks is written as bytes."""
    encoded = stories.tokenizer.encode(text)
    assert encoded.ids[0] == 1
    assert encoded.ids.count(0) == 0
    assert stories.tokenizer.decode(encoded.ids[1:]) == text


def test_known_tokens(stories):
    assert stories.tokenizer.encode("Once upon a time").ids == [1, 403, 407, 261, 378]


def test_a_directory_holds_the_same_model(stories, directory, tokens):
    again = load(directory)
    assert again.config == stories.config
    assert again.tokenizer.encode(TEXT).ids == stories.tokenizer.encode(TEXT).ids
    assert jnp.array_equal(again.model(tokens), stories.model(tokens))
    with pytest.raises(FileExistsError):
        save(directory, stories)


def test_shards_are_put_together(directory, tmp_path, stories, tokens):
    path = tmp_path / "sharded"
    shutil.copytree(directory, path)
    tensors = load_file(path / "model.safetensors")
    names = sorted(tensors)
    shards = {"first.safetensors": names[:20], "second.safetensors": names[20:]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, path / file)
    (path / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert jnp.array_equal(load(path).model(tokens), stories.model(tokens))
    for name in ("../model.safetensors", "/model.safetensors", "sub/x.safetensors", ".."):
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {names[0]: name}}))
        with pytest.raises(ValueError, match="must be a file of the directory itself"):
            load(path)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {names[0]: "gone.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=r"must hold gone\.safetensors"):
        load(path)


def write_gguf(path, stories, *, architecture="llama", leave_out=()):
    """Write the model with a tokenizer of bytes and one pair; rows of queries and keys that rotate together adjoin."""
    config, writer = stories.config, gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_length)
    writer.add_embedding_length(config.dim)
    writer.add_feed_forward_length(config.mlp_dim)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "th", "<|end|>"]
    tokens += [f"<unused {index}>" for index in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token == "<|end|>" else 1 for token in tokens])
    writer.add_token_merges(["t h"])
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    theirs = {ours: name for name, ours in gguf_file.LLAMA_LAYER.items()}
    outer = {ours: name for name, ours in gguf_file.OUTER.items()}
    for name, tensor in to_tensors(stories.model).items():
        array = np.asarray(tensor)
        if name not in outer:
            _, _, layer, part = name.removesuffix(".weight").split(".", 3)
            name, count = f"blk.{layer}.{theirs[part]}.weight", heads.get(theirs[part])
            if count is not None:
                rows = array.reshape(count, 2, -1, array.shape[-1])
                array = np.ascontiguousarray(rows.swapaxes(1, 2).reshape(array.shape))
        name = outer.get(name, name)
        if name not in leave_out:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_files_hold_the_same_model(stories, tokens, tmp_path):
    model, config, tokenizer = load(write_gguf(tmp_path / "stories.gguf", stories))
    assert dataclasses.replace(config, norm_eps=stories.config.norm_eps) == stories.config
    np.testing.assert_allclose(model(tokens), stories.model(tokens), rtol=0, atol=1e-5)
    assert tokenizer.encode("the 10").tokens == ["th", "e", "Ġ", "1", "0"]
    assert tokenizer.encode("a<|end|>").tokens == ["a", "<|end|>"]
    assert tokenizer.decode(tokenizer.encode("café ☕\n").ids) == "café ☕\n"


def test_gguf_files_must_be_of_known_architectures(stories, tmp_path):
    with pytest.raises(ValueError, match="The architecture must be one of llama, gemma2, gemma3, got 'mamba'"):
        load(write_gguf(tmp_path / "other.gguf", stories, architecture="mamba"))
    with pytest.raises(ValueError, match=r"missing: model\.layers\.2\.mlp\.up_proj\.weight; unused: none"):
        load(write_gguf(tmp_path / "less.gguf", stories, leave_out=["blk.2.ffn_up.weight"]))
    (tmp_path / "not.gguf").write_bytes(bytes(100))
    with pytest.raises(ValueError, match=r"not\.gguf must be a GGUF file"):
        load(tmp_path / "not.gguf")


def test_tensors_must_be_those_of_the_model(directory, tmp_path):
    norm, query = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"
    with pytest.raises(ValueError, match=r"missing: model\.norm\.weight; unused: none"):
        load(spoil(directory, tmp_path / "missing", lambda tensors: tensors.pop(norm)))
    with pytest.raises(ValueError, match=r"missing: none; unused: model\.more\.weight"):
        load(spoil(directory, tmp_path / "more", lambda tensors: tensors.update({"model.more.weight": jnp.zeros(3)})))
    with pytest.raises(ValueError, match=rf"`{query}` must have the shape \(64, 64\), got \(64, 32\)"):
        load(spoil(directory, tmp_path / "shape", lambda tensors: tensors.update({query: tensors[query][:, :32]})))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "`model_type` must be one of llama, gemma2, gemma3_text, got 'gpt2'"),
        ({"tie_word_embeddings": False}, r"missing: lm_head\.weight; unused: none"),
        ({"rope_scaling": {"factor": 2}}, "`rope_scaling` of a llama model must be None"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "`rope_type` must be 'default', got 'llama3'"),
        ({"hidden_size": None}, "must name hidden_size"),
        ({"head_dim": 16}, r"q_proj.weight` must have the shape \(128, 64\), got \(64, 64\)"),
        ({"model_type": "gemma2", "hidden_act": None, "head_dim": None}, "must name head_dim"),
    ],
)
def test_settings_must_be_the_models(directory, tmp_path, changes, message):
    settings = json.loads((directory / "config.json").read_text()) | changes
    shutil.copy(directory / "model.safetensors", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_files_must_be_whole(tmp_path):
    content = STORIES.read_bytes()
    for size, message in ((20, "28 bytes of sizes, got 20"), (len(content) - 4, "must have the 1")):
        path = tmp_path / f"{size}.bin"
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match=message):
            load(path)
    with pytest.raises(FileNotFoundError, match=r"must be a directory with config\.json, a \.gguf or a \.bin file"):
        load(tmp_path / "nothing")
    shutil.copy(STORIES, tmp_path / "whole.bin")
    assert load(tmp_path / "whole.bin").tokenizer is None
    (tmp_path / "tok.bin").write_bytes(STORIES.with_name("tok512.bin").read_bytes()[:300])
    with pytest.raises(ValueError, match="must hold 512 tokens, got"):
        load(tmp_path / "whole.bin")


def test_all_to_the_window_is_the_model_in_a_window(stories, tokens):
    """The float64 oracle again, which sees so many tokens back."""
    windowed = to_macchiato(stories.model, window=WINDOW, num_latents=32, p0=1)
    want = llama_oracle.logits(STORIES, np.asarray(tokens), window=WINDOW)
    np.testing.assert_allclose(windowed(tokens), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("feed", ["rglru", "conv", None])
def test_a_share_of_it_goes_to_the_latents(stories, tokens, feed):
    model = to_macchiato(stories.model, window=WINDOW, num_latents=32, feed=feed, p0=0.9)
    first = jax.tree.map(lambda x: x[0] if eqx.is_array(x) else x, model.stack.blocks)
    shares = first.mixer.shares(jax.vmap(first.mixer_norm)(model.embedding[tokens]))
    assert shares.shape == (8, len(tokens), 5)
    np.testing.assert_allclose(shares[..., 0], 0.9, rtol=1e-5)
    np.testing.assert_allclose(shares[..., 1:], 0.025, rtol=1e-4)
    # Nearly the same model; and in pieces the same.
    distance = jnp.abs(jax.nn.softmax(model(tokens)) - jax.nn.softmax(stories.model(tokens))).sum(axis=-1)
    assert float(distance.mean()) < 0.5
    start, state = model.extend(tokens[:9], model.init_state())
    rest, _ = model.extend(tokens[9:], state)
    np.testing.assert_allclose(jnp.concatenate([start, rest]), model(tokens), rtol=0, atol=1e-4)


def test_new_weights_learn_and_old_ones_stay(stories, tokens):
    model = to_macchiato(stories.model, window=WINDOW, num_latents=32)
    new, old = eqx.partition(model, is_new(model))
    count = lambda tree: sum(x.size for x in jax.tree.leaves(eqx.filter(tree, eqx.is_array)))
    assert count(old) == 260_032
    layer = 64 * (32 + 8) + 64 * 32 + 2 * (64 * 8 + 64) + 64 + 8
    assert count(new) == 5 * layer
    optimizer = optax.adam(1e-2)

    @eqx.filter_jit
    def step(new, state):
        def loss(new):
            logits = eqx.combine(new, old)(tokens)
            return optax.softmax_cross_entropy_with_integer_labels(logits[:-1], tokens[1:]).mean()

        value, gradient = eqx.filter_value_and_grad(loss)(new)
        # Optax counts on implicit promotion.
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(gradient, state)
        return value, eqx.apply_updates(new, updates), state

    state, losses = optimizer.init(eqx.filter(new, eqx.is_array)), []
    before = new
    for _ in range(10):
        value, new, state = step(new, state)
        losses.append(float(value))
    assert losses[-1] < losses[0] - 0.05
    changed = jax.tree.map(
        lambda x, y: bool(jnp.any(x != y)), eqx.filter(before, eqx.is_array), eqx.filter(new, eqx.is_array)
    )
    assert all(jax.tree.leaves(changed))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            dict(num_latents=30),
            ValueError,
            "`num_latents` must be a multiple of the heads, got num_latents=30, heads=8",
        ),
        (dict(p0=0), ValueError, r"`p0` must lie in \(0, 1\], got p0=0"),
        (dict(window=-1), ValueError, "`window` must not be negative"),
    ],
)
def test_surgery_is_refused(stories, arguments, error, message):
    with pytest.raises(error, match=message):
        to_macchiato(stories.model, **arguments)


def test_only_full_attention_is_replaced(stories):
    with pytest.raises(TypeError, match="The layers must attend fully, got the mixer 'macchiato'"):
        to_macchiato(to_macchiato(stories.model, window=WINDOW))


def test_macchiatos_are_written_as_our_own(stories, tokens, tmp_path):
    model = to_macchiato(stories.model, window=WINDOW, num_latents=32)
    save(tmp_path / "model", stories._replace(model=model))
    settings = json.loads((tmp_path / "model" / "config.json").read_text())
    assert settings["model_type"] == "latte_eqx"
    again = load(tmp_path / "model")
    assert again.config == model.stack.config
    assert jnp.array_equal(again.model(tokens), model(tokens))
    spoil(tmp_path / "model", tmp_path / "less", lambda tensors: tensors.pop("embedding"))
    with pytest.raises(ValueError, match="missing: embedding; unused: none"):
        load(tmp_path / "less")
    settings["config"]["num_wheels"] = 3
    (tmp_path / "model" / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="must have the fields of ModelConfig, got num_wheels"):
        load(tmp_path / "model")


def test_every_device_reads_its_own_part(stories, directory):
    mesh = jax.make_mesh((8,), ("fsdp",), (jax.sharding.AxisType.Auto,))
    cut = lambda x: jax.sharding.PartitionSpec(*[None] * (x.ndim - 1), "fsdp" if x.shape[-1] % 8 == 0 else None)
    sharding = lambda x: jax.sharding.NamedSharding(mesh, cut(x)) if hasattr(x, "shape") else x
    shardings = lambda model: jax.tree.map(sharding, model)
    for path in (directory, STORIES):
        model = load(path, shardings=shardings).model
        query = model.stack.blocks.mixer.attention.attention.to_query.weight
        assert [shard.data.shape for shard in query.addressable_shards] == [(5, 64, 8)] * 8
        assert jax.tree.all(
            jax.tree.map(lambda x, y: bool(np.all(np.asarray(x) == np.asarray(y))), model, stories.model)
        )
