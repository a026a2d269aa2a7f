"""docs/pretrained.md runs from top to bottom, and shows what it says."""

import os
import re
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp

ROOT = Path(__file__).parents[1]


def test_a_transformer_becomes_a_macchiato(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    os.symlink(ROOT / "data", "data")
    names = {}
    # As users have it: optax counts on implicit promotion.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for code in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "pretrained.md").read_text(), re.DOTALL):
            exec(code, names)
    shown = capsys.readouterr().out
    assert shown.count("Once upon a time") == 3
    model, windowed, trained = (names[name] for name in ("model", "windowed", "trained"))
    loss, valid = names["loss"], names["valid"]
    # The window costs something, and what is new learns.
    assert loss(model, valid) < loss(windowed, valid)
    assert names["losses"][-1] < names["losses"][0]
    inherited = jax.tree.leaves(eqx.filter(eqx.filter(trained, names["is_new"](trained), inverse=True), eqx.is_array))
    before = jax.tree.leaves(eqx.filter(names["old"], eqx.is_array))
    assert len(inherited) == len(before)
    assert all(jnp.array_equal(x, y) for x, y in zip(inherited, before, strict=True))
    assert jnp.array_equal(names["again"].model(valid[0]), trained(valid[0]))
    assert {path.name for path in tmp_path.iterdir()} == {"data", "macchiato", "transformer"}
