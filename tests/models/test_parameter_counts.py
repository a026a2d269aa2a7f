"""The sizes of the models in the paper's tables, counted without allocating them."""

from dataclasses import replace

import equinox as eqx
import jax
import pytest

from latte_eqx import PAPER_ROWS, LanguageModel


def count(config):
    model = eqx.filter_eval_shape(LanguageModel, config, key=jax.random.key(0))
    return sum(x.size for x in jax.tree.leaves(model) if isinstance(x, jax.ShapeDtypeStruct))


@pytest.mark.parametrize(
    ("row", "latent_proj", "millions"),
    [
        ("latte", "dense", 111.83),
        ("latte_pp", "dense", 140.07),
        ("latte_conv", "dense", 140.11),
        ("latte_conv_swa", "dense", 154.27),
        ("latte_r", "dense", 141.87),
        ("latte_r", "per_head", 139.81),
        ("latte_r_swa", "dense", 156.03),
        ("latte_r_swa", "per_head", 153.96),
        ("transformer_pp", "dense", 151.87),
        ("r_swa", "dense", 141.29),
    ],
)
def test_parameters(row, latent_proj, millions):
    config = replace(PAPER_ROWS[row], latent_proj=latent_proj)
    parameters = count(config)
    if config.mixer == "macchiato":
        # The table counts without the query of state 0, the window's.
        inputs = config.dim if latent_proj == "dense" else config.dim // config.num_heads
        parameters -= config.num_layers * config.num_heads * inputs
    assert round(parameters / 1e6, 2) == millions


def test_every_row_is_counted():
    assert len(PAPER_ROWS) == 8


def test_the_embedding_is_used_twice():
    """No output matrix of its own: another thousand tokens cost a thousand vectors."""
    config = PAPER_ROWS["latte_r_swa"]
    assert count(replace(config, vocab_size=config.vocab_size + 1000)) - count(config) == 1000 * config.dim
