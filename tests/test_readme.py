"""The README's example runs, and shows what it says."""

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np

README = Path(__file__).parents[1] / "README.md"


def test_example_runs():
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names = {}
    exec(code, names)
    whole, pieces = names["mixer"](names["x"]), jnp.concatenate([names["first"], names["second"]])
    np.testing.assert_allclose(pieces, whole, atol=1e-6)
    assert names["tokens"].shape == (20,)
    alone = names["mixer"](names["x"][40:80])
    np.testing.assert_allclose(names["y"][40:80], alone, atol=1e-6)
