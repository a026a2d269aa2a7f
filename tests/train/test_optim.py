import dataclasses

import equinox as eqx
import jax
import numpy as np
import pytest

from latte_eqx import PAPER_ROWS, LanguageModel
from train.config import OptimConfig
from train.optim import is_decayed, make_schedule

CONFIG = OptimConfig(peak_lr=1e-2, end_lr=1e-3, warmup_steps=10)


@pytest.mark.parametrize(
    ("schedule", "middle", "last"), [("linear", 5.5e-3, 1e-3), ("cosine", 5.5e-3, 1e-3), ("constant", 1e-2, 1e-2)]
)
def test_schedule(schedule, middle, last):
    """Up to the peak, then down to the end; half-way at the mean of both."""
    rate = make_schedule(dataclasses.replace(CONFIG, schedule=schedule), 110)
    with jax.numpy_dtype_promotion("standard"):
        got = [float(rate(step)) for step in (0, 5, 10, 60, 110, 200)]
    np.testing.assert_allclose(got, [0, 5e-3, 1e-2, middle, last, last], rtol=1e-5, atol=1e-9)


def test_quarter_of_a_cosine_is_above_the_line():
    with jax.numpy_dtype_promotion("standard"):
        rate = make_schedule(dataclasses.replace(CONFIG, schedule="cosine"), 110)(35)
    np.testing.assert_allclose(rate, 1e-3 + 9e-3 * (1 + np.cos(np.pi / 4)) / 2, rtol=1e-5)


@pytest.mark.parametrize("row", PAPER_ROWS)
def test_weight_decay_spares_norms_biases_and_decays(row):
    small = dataclasses.replace(PAPER_ROWS[row], vocab_size=11, num_layers=2, dim=16, mlp_dim=24, num_latents=16)
    small = dataclasses.replace(small, window_bias=0.0)
    params = eqx.filter_eval_shape(
        lambda: eqx.filter(LanguageModel(small, key=jax.random.key(0)), eqx.is_inexact_array)
    )
    for path, decays in jax.tree_util.tree_leaves_with_path(is_decayed(params)):
        name = jax.tree_util.keystr(path)
        assert decays == (not any(word in name for word in ("norm", "bias", "decay_logit"))), name
