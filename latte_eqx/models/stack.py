"""Layers of one kind, stacked and scanned, so that compile time does not grow with depth."""

import math
from collections.abc import Callable

import equinox as eqx
import jax
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from latte_eqx.blocks import MacchiatoBlock, make_norm
from latte_eqx.layers import INIT_STD, BlockLinear
from latte_eqx.models.config import ModelConfig, make_block

LayerWrapper = Callable[[Callable], Callable]


class Stack(eqx.Module):
    """`num_layers` blocks and a last norm. Every array of `blocks` has the layers as its first axis."""

    blocks: MacchiatoBlock
    norm: eqx.nn.LayerNorm | eqx.nn.RMSNorm

    def __init__(self, config: ModelConfig, *, key: PRNGKeyArray):
        keys = jax.random.split(key, config.num_layers)
        self.blocks = eqx.filter_vmap(lambda key: _rescale(make_block(config, key=key), config))(keys)
        self.norm = make_norm(config.style, config.dim, config.norm_eps)

    def __call__(
        self,
        x: Float[Array, "seq dim"],
        segment_ids: Int[Array, " seq"] | None = None,
        *,
        key: PRNGKeyArray | None = None,
        wrap: LayerWrapper | None = None,
        **mixer_arguments: Array | None,
    ) -> Float[Array, "seq dim"]:
        """Run a whole sequence through all layers.

        `wrap` may change how a layer `(x, (arrays, inputs)) -> (y, outputs)` runs: `jax.checkpoint` it, or gather its
        arrays from the devices that hold them.
        """
        num_layers = jax.tree.leaves(eqx.filter(self.blocks, eqx.is_array))[0].shape[0]
        keys = None if key is None else jax.random.split(key, num_layers)

        def run(block, x, key):
            return block(x, segment_ids, key=key, **mixer_arguments), None

        return jax.vmap(self.norm)(self._scan(run, x, keys, wrap)[0])

    def layer_inputs(
        self, x: Float[Array, "seq dim"], segment_ids: Int[Array, " seq"] | None = None
    ) -> Float[Array, "layers seq dim"]:
        """Return what each layer is given."""
        return self._scan(lambda block, x, _: (block(x, segment_ids), x), x, None)[1]

    def init_state(self) -> PyTree:
        """Return the states of all layers before the first token."""
        return eqx.filter_vmap(lambda block: block.init_state())(self.blocks)

    def extend(self, x: Float[Array, "seq dim"], state: PyTree) -> tuple[Float[Array, "seq dim"], PyTree]:
        """Run further tokens through all layers."""
        x, state = self._scan(lambda block, x, state: block.extend(x, state), x, state)
        return jax.vmap(self.norm)(x), state

    def _scan(self, run: Callable, x, inputs, wrap: LayerWrapper | None = None):
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        def layer(x, layer_inputs):
            layer_arrays, inputs = layer_inputs
            y, outputs = run(eqx.combine(layer_arrays, static), x, inputs)
            return y.astype(x.dtype), outputs

        return lax.scan(layer if wrap is None else wrap(layer), x, (arrays, inputs))


def _rescale(block: MacchiatoBlock, config: ModelConfig) -> MacchiatoBlock:
    """Rescale the matrices of a fresh block.

    What is added to the residual stream is scaled down by sqrt(2 num_layers), since so many terms add up. `"lecun"`
    instead gives every matrix a variance of one over its inputs.
    """
    # Of the block-diagonal layers, those with a bias are gates and keep the start that suits them.
    is_linear = lambda x: isinstance(x, eqx.nn.Linear) or (isinstance(x, BlockLinear) and x.bias is None)
    if config.init == "lecun":

        def to_lecun(x):
            if not is_linear(x):
                return x
            scale = 1 / (INIT_STD * math.sqrt(x.weight.shape[1]))
            return eqx.tree_at(lambda x: x.weight, x, scale * x.weight)

        return jax.tree.map(to_lecun, block, is_leaf=is_linear)
    scale = 1 / math.sqrt(2 * config.num_layers)
    outputs = lambda block: [x.to_out.weight for x in _output_layers(block)]
    return eqx.tree_at(outputs, block, [scale * weight for weight in outputs(block)])


def _output_layers(block):
    has_output = lambda x: hasattr(x, "to_out")
    return [x for x in jax.tree.leaves(block, is_leaf=has_output) if has_output(x)]
