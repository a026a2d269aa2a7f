"""Layers, stacked and scanned, so that compile time does not grow with depth."""

import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from latte_eqx.blocks import MacchiatoBlock, Norm, make_norm
from latte_eqx.layers import INIT_STD, BlockLinear
from latte_eqx.models.config import ModelConfig, make_block

LayerWrapper = Callable[[Callable], Callable]


class Stack(eqx.Module):
    """`num_layers` blocks and a last norm. Every array of `blocks` has the layers as its first axis.

    Local and global layers have the same arrays, and differ in what they do with them: `config.layers` says which kinds
    come again and again. What there is for each layer beside its arrays, as its state while decoding, is held apart for
    each place in that order: a tuple of trees, whose arrays have the layers at that place as their first axis.
    """

    blocks: MacchiatoBlock
    norm: Norm
    config: ModelConfig = eqx.field(static=True)

    def __init__(self, config: ModelConfig, *, key: PRNGKeyArray):
        self.config = config
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
        keys, places = None, len(self.config.layers)
        if key is not None:
            keys = jax.random.split(key, self.config.num_layers)
            keys = tuple(keys[place::places] for place in range(places))

        def run(block, x, key):
            return block(x, segment_ids, key=key, **mixer_arguments), None

        return jax.vmap(self.norm)(self._scan(run, x, keys, wrap)[0])

    def layer_inputs(
        self, x: Float[Array, "seq dim"], segment_ids: Int[Array, " seq"] | None = None
    ) -> Float[Array, "layers seq dim"]:
        """Return what each layer is given."""
        inputs = self._scan(lambda block, x, _: (block(x, segment_ids), x), x, None)[1]
        places = len(inputs)
        return jnp.stack([inputs[layer % places][layer // places] for layer in range(self.config.num_layers)])

    def init_state(self) -> PyTree:
        """Return the states of all layers before the first token."""
        first = jax.tree.map(lambda x: x[0] if eqx.is_array(x) else x, self.blocks)
        states = [kind(first).init_state() for kind in self._kinds()]
        counts = [len(range(place, self.config.num_layers, len(states))) for place in range(len(states))]
        repeat = lambda state, count: jax.tree.map(lambda x: jnp.repeat(x[None], count, axis=0), state)
        return tuple(map(repeat, states, counts))

    def extend(self, x: Float[Array, "seq dim"], state: PyTree) -> tuple[Float[Array, "seq dim"], PyTree]:
        """Run further tokens through all layers."""
        x, state = self._scan(lambda block, x, state: block.extend(x, state), x, state)
        return jax.vmap(self.norm)(x), state

    def _kinds(self) -> list[Callable[[MacchiatoBlock], MacchiatoBlock]]:
        """Return, for each kind of layer, what makes a block of that kind of the arrays of a block."""

        def read_as(config):
            template = eqx.filter_eval_shape(make_block, config, key=jax.random.key(0))
            return lambda block: jax.tree.unflatten(jax.tree.structure(template), jax.tree.leaves(block))

        *local, _ = self.config.layers
        return [read_as(config) for config in local] + [lambda block: block]

    def _scan(self, run: Callable, x, inputs: tuple[PyTree, ...] | None, wrap: LayerWrapper | None = None):
        """Run all layers; `inputs`, and the outputs that come back, are split by place."""
        arrays, static = eqx.partition(self.blocks, eqx.is_array)
        rounds, rest = divmod(self.config.num_layers, len(self.config.layers))

        def make_layer(kind):
            def layer(x, layer_inputs):
                layer_arrays, inputs = layer_inputs
                y, outputs = run(kind(eqx.combine(layer_arrays, static)), x, inputs)
                return y.astype(x.dtype), outputs

            return layer if wrap is None else wrap(layer)

        layers = [make_layer(kind) for kind in self._kinds()]

        def run_round(x, round_inputs):
            arrays, inputs = round_inputs
            outputs = []
            for place, layer_inputs in enumerate(inputs):
                x, output = layers[place](x, (jax.tree.map(lambda x, place=place: x[place], arrays), layer_inputs))
                outputs.append(output)
            return x, tuple(outputs)

        inputs = (None,) * len(layers) if inputs is None else inputs
        whole = rounds * len(layers)
        in_rounds = jax.tree.map(lambda x: x[:whole].reshape(rounds, len(layers), *x.shape[1:]), arrays)
        x, outputs = lax.scan(run_round, x, (in_rounds, jax.tree.map(lambda x: x[:rounds], inputs)))
        if rest:
            # The last round is cut short.
            left = jax.tree.map(lambda x: x[whole:], arrays), jax.tree.map(lambda x: x[rounds], inputs[:rest])
            x, last = run_round(x, left)
            outputs = (
                *jax.tree.map(lambda x, y: jnp.concatenate([x, y[None]]), outputs[:rest], last),
                *outputs[rest:],
            )
        return x, outputs


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
