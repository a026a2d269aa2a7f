"""The README's example runs, and shows what it says."""

import re
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

README = Path(__file__).parents[1] / "README.md"


CODE = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def run(code):
    names = {}
    exec(code, names)
    return names


def test_example_runs():
    names = run(CODE[0])
    whole, pieces = names["mixer"](names["x"]), jnp.concatenate([names["first"], names["second"]])
    np.testing.assert_allclose(pieces, whole, atol=1e-6)
    assert names["tokens"].shape == (20,)
    alone = names["mixer"](names["x"][40:80])
    np.testing.assert_allclose(names["y"][40:80], alone, atol=1e-6)


def test_a_pretrained_model_tells_a_story(monkeypatch, capsys):
    monkeypatch.chdir(README.parent)
    names = run(CODE[1])
    assert len(capsys.readouterr().out.split()) > 10
    new, old = (jax.tree.leaves(eqx.filter(names[name], eqx.is_array)) for name in ("to_train", "to_keep"))
    assert sum(x.size for x in old) == 260_032
    assert 0 < sum(x.size for x in new) < 60_000
