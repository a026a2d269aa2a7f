r"""Chunk by chunk with matrix products: fast, exact for any keys, and with little to keep for the backward pass.

Inside a chunk all masses are taken relative to one reference, the largest key $M$ that any of its tokens sees:

    E_s = exp(k_s - M)        the mass of token s                            exponents <= 0
    Z_t = sum_{s<=t} E_s + a  the mass seen by token t; a is the state's
    p_t = w_t / Z_t           so that y_t = sum_{s<=t} (p_t . E_s) v_s + p_t (a S)

A chunk is cut into blocks. The sum over the tokens of the own block is a product of small square matrices; the rest,
all earlier blocks and the state, is one sum per block that its tokens share. It is exact while every Z_t is far above
the smallest float. Where keys rise so steeply that one is not, the chunk is read token by token instead. A glance at
the keys tells whether any chunk can need that: ordinary keys do not even pay for the question, and no key breaks it.
The backward pass keeps the states between chunks and recomputes the rest.
"""

from collections.abc import Callable
from functools import partial
from math import log, prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from latte_eqx.ops.dispatch import Passes
from latte_eqx.ops.latte import scan
from latte_eqx.ops.latte.passes import BLOCK, TOKEN_BY_TOKEN
from latte_eqx.ops.latte.state import LOWEST, SMALLEST_MASS, LatteState, divide
from latte_eqx.ops.segments import segment_starts

# A CPU's cache holds about so many tokens of all rows, and its cores share out what this many groups of heads ask for.
CACHED_TOKENS, GROUPS = 8192, 4
# On a CPU a step has at most so many tokens of a row: more would have more to add up than to multiply.
LONGEST_STEP = 1024


def forward(
    weights: Float[Array, "*batch seq latents"],
    keys: Float[Array, "*batch seq latents"],
    values: Float[Array, "*batch seq dim"],
    segment_ids: Int[Array, "*#batch seq"] | None,
    state: LatteState,
    *,
    chunk: int,
    keep: bool,
) -> tuple[Float[Array, "*batch seq dim"], LatteState, LatteState | None]:
    """Read the chunks one after another."""

    @partial(_suit, chunk)
    @_as_steep_as(lambda weights, keys, values, segment_ids, state: (keys, segment_ids, state))
    def run(may_be_steep, steps, weights, keys, values, segment_ids, state):
        def read(carry, index):
            states, y = carry
            after = []
            for group, state in enumerate(states):
                place = _Place(steps, index, group)
                chunk = _chunk(weights, keys, values, segment_ids, state, place)
                new_y, state = chunk.choose(may_be_steep, partial(_read_chunk, chunk), partial(_read_tokens, chunk))
                y = place.put(y, new_y)
                after.append(state)
            return (after, y), states if keep else None

        (states, y), kept = lax.scan(read, (steps.split(state), jnp.zeros_like(values)), jnp.arange(steps.number))
        return y, steps.join(states), steps.as_chunks(kept) if keep else None

    return run(weights, keys, values, segment_ids, state)


def backward(
    weights: Float[Array, "*batch seq latents"],
    keys: Float[Array, "*batch seq latents"],
    values: Float[Array, "*batch seq dim"],
    segment_ids: Int[Array, "*#batch seq"] | None,
    state: LatteState,
    last_state: LatteState,
    states: LatteState,
    dy: Float[Array, "*batch seq dim"],
    dstate: LatteState,
    *,
    chunk: int,
) -> tuple[
    Float[Array, "*batch seq latents"], Float[Array, "*batch seq latents"], Float[Array, "*batch seq dim"], LatteState
]:
    """Go from the last chunk to the first."""

    @partial(_suit, chunk)
    @_as_steep_as(lambda weights, keys, values, segment_ids, state, *_: (keys, segment_ids, state))
    def run(may_be_steep, steps, weights, keys, values, segment_ids, state, last_state, states, dy, dstate):
        def unread(carry, step):
            dafter, after, gradients = carry
            index, before = step
            dbefore = []
            for group, dend in enumerate(dafter):
                place = _Place(steps, index, group)
                start, end = steps.part(before, group), steps.part(after, group)
                chunk = _chunk(weights, keys, values, segment_ids, start, place)
                cotangents = place.slice(dy).astype(jnp.float32), dend
                new, dstart = chunk.choose(
                    may_be_steep,
                    partial(_unread_chunk, chunk, end, *cotangents),
                    partial(_unread_tokens, chunk, *cotangents),
                )
                gradients = tuple(map(place.put, gradients, new))
                dbefore.append(dstart)
            return (dbefore, before, gradients), None

        gradients = tuple(jnp.zeros_like(x) for x in (weights, keys, values))
        inputs = jnp.arange(steps.number), steps.of_chunks(states)
        (dstates, _, gradients), _ = lax.scan(
            unread, (steps.split(dstate), last_state, gradients), inputs, reverse=True
        )
        dweights, dkeys, dvalues = gradients
        return dweights, dkeys, dvalues, steps.join(dstates)

    return run(weights, keys, values, segment_ids, state, last_state, states, dy, dstate)


PASSES = Passes(forward, backward)


class _Steps(NamedTuple):
    """How a pass goes along a sequence: in `number` steps of `chunks` chunks, each for one group of heads at a time.

    The heads are the last axis of the batch, `axis`. Blocks trade square products against sums per block; more blocks
    in a step make for fewer and larger operations, and more groups for more operations that do not wait for each other.
    """

    number: int
    chunks: int
    chunk: int
    groups: int
    axis: int

    @property
    def tokens(self):
        return self.chunks * self.chunk

    @property
    def blocks(self):
        return self.tokens // min(BLOCK, self.chunk)

    def split(self, tree):
        """Return a tree for each group."""
        return [self.part(tree, group) for group in range(self.groups)]

    def part(self, tree, group):
        """Return what belongs to a group; what all heads share belongs to each."""

        def cut(x):
            heads = x.shape[self.axis] // self.groups
            return lax.slice_in_dim(x, group * heads, (group + 1) * heads, axis=self.axis) if heads else x

        return tree if self.groups == 1 else jax.tree.map(cut, tree)

    def join(self, trees):
        """Undo `split`."""
        return self._join(trees, self.axis)

    def _join(self, trees, axis):
        return trees[0] if self.groups == 1 else jax.tree.map(lambda *x: jnp.concatenate(x, axis), *trees)

    def as_chunks(self, states):
        """Turn the states before each step into one for each chunk, with the chunks as the last axis of the batch.

        Only the first chunk of a step has its own: the backward pass takes the same steps.
        """
        spread = lambda x: jnp.repeat(jnp.moveaxis(x, 0, self.axis + 1), self.chunks, axis=self.axis + 1)
        return jax.tree.map(spread, self._join(states, self.axis + 1))

    def of_chunks(self, states):
        """Undo `as_chunks`, but for the groups."""
        own = lambda x: lax.slice_in_dim(x, 0, None, self.chunks, axis=self.axis + 1)
        return jax.tree.map(lambda x: jnp.moveaxis(own(x), self.axis + 1, 0), states)


class _Place(NamedTuple):
    """The tokens of one step, for one group of heads."""

    steps: _Steps
    step: Array
    group: int

    @property
    def start(self):
        return self.step * self.steps.tokens

    def slice(self, x):
        """Cut them out, with their blocks as the first axis."""
        x = lax.dynamic_slice_in_dim(self.steps.part(x, self.group), self.start, self.steps.tokens, axis=-2)
        return _cut(x, self.steps.blocks)

    def put(self, x, new):
        """Put what was computed for them into `x`."""
        starts = [0] * x.ndim
        starts[-2] = self.start
        if self.steps.groups > 1:
            starts[self.steps.axis] = self.group * new.shape[self.steps.axis]
        return lax.dynamic_update_slice(x, new.astype(x.dtype), starts)


def _suit(chunk, run):
    """Choose the steps: a chunk of all rows, or on a CPU what its cache holds and its cores can share."""

    def suited(*arrays):
        *batch, seq, _ = arrays[1].shape
        chunks, rows, axis = seq // chunk, prod(batch), len(batch) - 1
        # Not by the rows: there may be more of them in the backward pass, which needs the states before the same steps.
        together = max((n for n in range(1, LONGEST_STEP // chunk + 1) if chunks % n == 0), default=1)
        steps = _Steps(chunks // together, together, chunk, 1, axis)
        at_once = on_cpu = partial(run, _Steps(chunks, 1, chunk, 1, axis))
        if len(batch) > 1 and rows * steps.tokens > CACHED_TOKENS:
            # Segment ids may be shared by all rows.
            arrays = jax.tree.map(lambda x: jnp.broadcast_to(x, (batch[0], *x.shape[1:])), arrays)
            on_cpu = lambda *arrays: lax.map(lambda row: suited(*row), arrays)
        elif batch and batch[-1] % GROUPS == 0 and 2 * rows * steps.tokens > CACHED_TOKENS:
            # Groups of fewer tokens would have operations too small to be worth sharing.
            on_cpu = partial(run, steps._replace(groups=GROUPS))
        elif together > 1:
            on_cpu = partial(run, steps)
        return at_once(*arrays) if on_cpu is at_once else lax.platform_dependent(*arrays, cpu=on_cpu, default=at_once)

    return suited


def _as_steep_as(what_matters: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a pass twice, for keys that may be steep and for ones that are not, and take the one that the keys ask.

    No token sees less than the first of its document does. If that is never far below the largest key, none is steep.
    """

    def twice(run):
        def ask(steps, *arrays):
            keys, segment_ids, state = what_matters(*arrays)
            exists = keys > -jnp.inf
            # After a padded position, a key counts as a first one: there may have been none before.
            is_first = exists & ~jnp.concatenate([state.mass[..., None, :] > 0, exists[..., :-1, :]], axis=-2)
            if segment_ids is not None:
                is_first |= exists & segment_starts(segment_ids)[..., None]
            lowest_first = jnp.where(is_first, keys, jnp.inf).min(axis=-2).astype(jnp.float32)
            lowest_first = jnp.minimum(lowest_first, jnp.where(state.mass > 0, state.peak, jnp.inf))
            largest = jnp.maximum(keys.max(axis=-2).astype(jnp.float32), state.peak)
            may_be_steep = jnp.any(largest + log(SMALLEST_MASS) > lowest_first)
            in_chunks = steps._replace(number=steps.number * steps.chunks, chunks=1, groups=1)
            return lax.cond(may_be_steep, partial(run, True, in_chunks), partial(run, False, steps), *arrays)

        return ask

    return twice


class _Chunk(NamedTuple):
    """The tokens of a chunk in blocks, the state before them, who sees whom, and the masses relative to `reference`.

    Arrays of tokens have the axes (block, *batch, token, feature): what blocks have in common is then added up without
    moving anything. A token sees the earlier tokens of its own block one by one; of what was before the block it sees
    sums, in which the state counts as block 0.
    """

    weights: Array
    keys: Array
    values: Array
    segment_ids: Array | None
    state: LatteState
    sees: Array  # (block, *batch, target, source) is 1 where the source is not later and of the same document
    joins: Array  # (*batch, block + 1, source) is 1 where the source's last document goes on to the block's start
    continues: Array | float  # (block, *batch, token, 1) is 1 in the document that the block before ends in
    lasts: Array | float  # (block, *batch, token, 1) is 1 in the document that the block ends in
    reference: Array  # (*batch, latents)
    mass: Array  # (block, *batch, token, latents)
    state_mass: Array  # (*batch, latents)
    seen_mass: Array  # (block, *batch, token, latents)
    last_mass: Array  # (*batch, latents)

    def choose(self, may_be_steep, together, one_by_one):
        """Take the tokens together if every one that has seen a key has a mass far from underflow."""
        if not may_be_steep:
            return together()
        small = self.seen_mass < SMALLEST_MASS
        steep = jnp.any(small & (self.keys > -jnp.inf)) | jnp.any(small[0, ..., 0, :] & (self.state.mass > 0))
        return lax.cond(steep, one_by_one, together)

    def last_peak(self):
        """Return the largest key of the document that the chunk ends in."""
        if self.segment_ids is None:
            return self.reference
        lasts = (self.segment_ids == self.segment_ids[-1:, ..., -1:])[..., None]
        peak = jnp.where(lasts, self.keys, LOWEST).max(axis=(0, -2))
        return jnp.maximum(peak, jnp.where(self.joins[..., -1, :1] > 0, self.state.peak, LOWEST))

    def last_scale(self, peak):
        """Return what turns a mass relative to the reference into one relative to the last document's `peak`."""
        if self.segment_ids is None:
            return 1.0
        return jnp.exp(jnp.where(self.last_mass > 0, self.reference - peak, 0))


def _chunk(weights, keys, values, segment_ids, state, place):
    weights, keys, values = (place.slice(x).astype(jnp.float32) for x in (weights, keys, values))
    blocks, block = keys.shape[0], keys.shape[-2]
    sees = jnp.tril(jnp.ones((block, block), jnp.float32)).reshape((1,) * (keys.ndim - 2) + (block, block))
    joins = jnp.tril(jnp.ones((blocks + 1, blocks + 1), jnp.float32))
    continues = lasts = 1.0
    if segment_ids is not None:
        group_ids = place.steps.part(segment_ids, place.group)
        before = lax.dynamic_slice_in_dim(group_ids, jnp.maximum(place.start - 1, 0), 1, axis=-1)
        segment_ids = place.slice(segment_ids[..., None])[..., 0]
        ends = jnp.concatenate([before, jnp.moveaxis(segment_ids[..., -1], 0, -1)], axis=-1)
        sees *= (segment_ids[..., :, None] == segment_ids[..., None, :]).astype(jnp.float32)
        joins = joins.reshape((1,) * (ends.ndim - 1) + joins.shape)
        joins *= (ends[..., :, None] == ends[..., None, :]).astype(jnp.float32)
        earlier = jnp.moveaxis(ends[..., :-1], -1, 0)
        continues = (segment_ids == earlier[..., None])[..., None].astype(jnp.float32)
        lasts = (segment_ids == segment_ids[..., -1:])[..., None].astype(jnp.float32)
        # A first token that begins a document finds an empty state.
        kept = continues[0, ..., 0, :] > 0
        state = LatteState(state.average, jnp.where(kept, state.peak, LOWEST), jnp.where(kept, state.mass, 0))
    reference = jnp.maximum(keys.max(axis=(0, -2)), state.peak)
    mass = jnp.exp(keys - reference[None, ..., None, :])
    state_mass = state.mass * jnp.exp(state.peak - reference)
    block_mass = jnp.concatenate([state_mass[None], (lasts * mass).sum(axis=-2)])
    carried_mass = _join(joins, block_mass)
    seen_mass = _sum_block(sees, mass) + continues * carried_mass[:-1, ..., None, :]
    return _Chunk(
        weights,
        keys,
        values,
        segment_ids,
        state,
        sees,
        joins,
        continues,
        lasts,
        reference,
        mass,
        state_mass,
        seen_mass,
        carried_mass[-1],
    )


def _read_chunk(chunk: _Chunk):
    share = divide(chunk.weights, chunk.seen_mass)
    mixing = _outer(share, chunk.mass) * chunk.sees
    old = (chunk.state_mass[..., None] * chunk.state.average)[None]
    sums = jnp.concatenate([old, _transpose(chunk.lasts * chunk.mass) @ chunk.values])
    y = mixing @ chunk.values + (chunk.continues * share) @ _join(chunk.joins[..., :-1, :], sums)
    peak = chunk.last_peak()
    average = divide(1.0, chunk.last_mass)[..., None] * _join(chunk.joins[..., -1:, :], sums)[0]
    return _flatten(y), LatteState(average, peak, chunk.last_mass * chunk.last_scale(peak))


def _unread_chunk(chunk: _Chunk, after: LatteState, dy, dafter: LatteState):
    share = divide(chunk.weights, chunk.seen_mass)
    mixed = _outer(chunk.mass, share) * chunk.sees.swapaxes(-1, -2)
    values_across = _transpose(chunk.values)
    agreement = dy @ values_across * chunk.sees
    # Sums per block lie here as (dim, latents), as both products with them want it.
    old = (chunk.state_mass[..., None] * chunk.state.average).swapaxes(-1, -2)[None]
    token_sums = values_across @ (chunk.lasts * chunk.mass)
    sums = _join(chunk.joins[..., :-1, :], jnp.concatenate([old, token_sums]))

    dlast_sum = divide(1.0, chunk.last_mass)[..., None] * dafter.average
    dlast_mass = chunk.last_scale(after.peak) * dafter.mass
    dlast_mass -= divide((dafter.average * after.average).sum(axis=-1), chunk.last_mass)

    dshare = agreement @ chunk.mass + chunk.continues * (dy @ sums)
    dweights = divide(dshare, chunk.seen_mass)
    dseen_mass = -dweights * share
    dcarried_mass = jnp.concatenate([(chunk.continues * dseen_mass).sum(axis=-2), dlast_mass[None]])
    share_across = _transpose(share)
    dsums = jnp.concatenate([(_across(chunk.continues) * share_across) @ dy, dlast_sum[None]])
    backwards = chunk.joins.swapaxes(-1, -2)
    dblock_mass = _join(backwards, dcarried_mass)
    dold_sum, dtoken_sum = _join(backwards[..., :1, :], dsums)[0], _join(backwards[..., 1:, :], dsums)

    dmass = _sum_block(chunk.sees.swapaxes(-1, -2), dseen_mass) + chunk.lasts * dblock_mass[1:, ..., None, :]
    # As (latents, token), both products take their factors as they lie.
    dmass += (share_across @ agreement + _across(chunk.lasts) * (dtoken_sum @ values_across)).swapaxes(-1, -2)
    dvalues = mixed @ dy + (chunk.lasts * chunk.mass) @ dtoken_sum

    dstate_mass = dblock_mass[0] + (dold_sum * chunk.state.average).sum(axis=-1)
    dstate = LatteState(
        chunk.state_mass[..., None] * dold_sum,
        chunk.state_mass * dstate_mass,
        jnp.exp(chunk.state.peak - chunk.reference) * dstate_mass,
    )
    return tuple(map(_flatten, (dweights, dmass * chunk.mass, dvalues))), dstate


@jax.named_scope(TOKEN_BY_TOKEN)
def _read_tokens(chunk: _Chunk):
    """The slow way: token by token. Its own backward pass keeps the states inside one block at a time."""
    starts, ids = None, chunk.segment_ids
    if ids is not None:
        # The state has met the first token's document already.
        starts = _cut(segment_starts(_flatten(ids[..., None])[..., 0])[..., None], ids.shape[0])[..., 0]

    def read(state, block):
        weights, keys, values, starts = block
        y, state = scan.read_tokens(weights, keys, values, starts, state)
        return state, y

    state, y = lax.scan(jax.checkpoint(read), chunk.state, (chunk.weights, chunk.keys, chunk.values, starts))
    return _flatten(y), state


@jax.named_scope(TOKEN_BY_TOKEN)
def _unread_tokens(chunk: _Chunk, dy, dafter: LatteState):
    """The slow way: differentiate the token-by-token implementation."""

    def read(weights, keys, values, state):
        return _read_tokens(chunk._replace(weights=weights, keys=keys, values=values, state=state))

    _, pull_back = jax.vjp(read, chunk.weights, chunk.keys, chunk.values, chunk.state)
    *dtokens, dstate = pull_back((_flatten(dy), dafter))
    if isinstance(chunk.continues, Array):
        kept = chunk.continues[0, ..., 0, :]
        dstate = LatteState(kept[..., None] * dstate.average, kept * dstate.peak, kept * dstate.mass)
    return tuple(map(_flatten, dtokens)), dstate


def _cut(x, blocks):
    return jnp.moveaxis(x.reshape(*x.shape[:-2], blocks, x.shape[-2] // blocks, x.shape[-1]), -3, 0)


def _flatten(x):
    x = jnp.moveaxis(x, 0, -3)
    return x.reshape(*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1])


def _join(joins, sums):
    """Add up what the blocks have in common."""
    if joins.ndim == 2:
        return jnp.tensordot(joins, sums, 1, precision=lax.Precision.HIGHEST)
    flat = jnp.moveaxis(sums.reshape(*sums.shape[: joins.ndim - 1], -1), 0, -2)
    joined = jnp.moveaxis(jnp.matmul(joins, flat, precision=lax.Precision.HIGHEST), -2, 0)
    return joined.reshape(joins.shape[-2], *sums.shape[1:])


def _sum_block(sees, x):
    """`sees @ x`; a sum of masses must be a float32 sum."""
    return jnp.matmul(sees, x, precision=lax.Precision.HIGHEST)


def _outer(x, y):
    """The products of the tokens of `x` with those of `y`."""
    return jnp.einsum("...tf,...sf->...ts", x, y)


def _across(x):
    """Turn what there is for each token towards arrays whose last axis the tokens are."""
    return x.swapaxes(-1, -2) if isinstance(x, Array) else x


def _transpose(x):
    # Left alone, the transposition would be merged into the product that follows, which is slower on CPUs than a copy.
    return lax.optimization_barrier(x.swapaxes(-1, -2))
