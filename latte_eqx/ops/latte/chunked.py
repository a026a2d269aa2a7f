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

# A CPU's cache holds a chunk of about this many rows.
CACHED_ROWS = 32


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
    shape = _shape(chunk)

    @_in_cache
    @_as_steep_as(lambda weights, keys, values, segment_ids, state: (keys, segment_ids, state))
    def run(may_be_steep, weights, keys, values, segment_ids, state):
        def read(carry, index):
            state, y = carry
            chunk = _chunk(weights, keys, values, segment_ids, state, index, shape)
            new_y, after = chunk.choose(may_be_steep, lambda: _read_chunk(chunk), lambda: _read_tokens(chunk))
            return (after, _put(y, new_y, index)), state if keep else None

        steps = jnp.arange(keys.shape[-2] // (shape[0] * shape[1]))
        (state, y), states = lax.scan(read, (state, jnp.zeros_like(values)), steps)
        return y, state, jax.tree.map(lambda x: jnp.moveaxis(x, 0, keys.ndim - 2), states)

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
    shape = _shape(chunk)

    @_in_cache
    @_as_steep_as(lambda weights, keys, values, segment_ids, state, *_: (keys, segment_ids, state))
    def run(may_be_steep, weights, keys, values, segment_ids, state, last_state, states, dy, dstate):
        def unread(carry, step):
            dafter, after, gradients = carry
            index, before = step
            chunk = _chunk(weights, keys, values, segment_ids, before, index, shape)
            cotangents = _slice(dy, index, shape).astype(jnp.float32), dafter
            new, dbefore = chunk.choose(
                may_be_steep,
                lambda: _unread_chunk(chunk, after, *cotangents),
                lambda: _unread_tokens(chunk, *cotangents),
            )
            return (dbefore, before, tuple(map(_put, gradients, new, (index,) * 3))), None

        gradients = tuple(jnp.zeros_like(x) for x in (weights, keys, values))
        states = jax.tree.map(lambda x: jnp.moveaxis(x, keys.ndim - 2, 0), states)
        steps = jnp.arange(keys.shape[-2] // (shape[0] * shape[1])), states
        (dstate, _, gradients), _ = lax.scan(unread, (dstate, last_state, gradients), steps, reverse=True)
        dweights, dkeys, dvalues = gradients
        return dweights, dkeys, dvalues, dstate

    return run(weights, keys, values, segment_ids, state, last_state, states, dy, dstate)


PASSES = Passes(forward, backward)


def _shape(chunk: int) -> tuple[int, int]:
    """Return the tokens in a block, and the blocks.

    Blocks trade square products against sums per block; more blocks in a chunk make for fewer and larger operations.
    """
    block = min(BLOCK, chunk)
    return block, chunk // block


def _in_cache(run):
    """On a CPU, take the rows of the leading axis one after another while all together would not stay in cache."""

    def fitting(*arrays):
        batch = arrays[1].shape[:-2]
        if len(batch) < 2 or prod(batch) <= CACHED_ROWS:
            return run(*arrays)
        # Segment ids may be shared by all rows.
        arrays = jax.tree.map(lambda x: jnp.broadcast_to(x, (batch[0], *x.shape[1:])), arrays)
        row_by_row = lambda *arrays: lax.map(lambda row: fitting(*row), arrays)
        return lax.platform_dependent(*arrays, cpu=row_by_row, default=run)

    return fitting


def _as_steep_as(what_matters: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a pass twice, for keys that may be steep and for ones that are not, and take the one that the keys ask.

    No token sees less than the first of its document does. If that is never far below the largest key, none is steep.
    """

    def twice(run):
        def ask(*arrays):
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
            return lax.cond(may_be_steep, partial(run, True), partial(run, False), *arrays)

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


def _chunk(weights, keys, values, segment_ids, state, index, shape):
    block, blocks = shape
    weights, keys, values = (_slice(x, index, shape).astype(jnp.float32) for x in (weights, keys, values))
    sees = jnp.tril(jnp.ones((block, block), jnp.float32)).reshape((1,) * (keys.ndim - 2) + (block, block))
    joins = jnp.tril(jnp.ones((blocks + 1, blocks + 1), jnp.float32))
    continues = lasts = 1.0
    if segment_ids is not None:
        start = index * block * blocks
        before = lax.dynamic_slice_in_dim(segment_ids, jnp.maximum(start - 1, 0), 1, axis=-1)
        segment_ids = _slice(segment_ids[..., None], index, shape)[..., 0]
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


def _slice(x, index, shape):
    """Cut a chunk, with its blocks as the first axis."""
    block, blocks = shape
    x = lax.dynamic_slice_in_dim(x, index * block * blocks, block * blocks, axis=-2)
    return _cut(x, blocks)


def _put(x, new, index):
    return lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), index * new.shape[-2], axis=-2)


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
    """`sees @ x`; as one large product where all blocks share one `sees`. A sum of masses must be a float32 sum."""
    if sees.size == sees.shape[-1] ** 2:
        sees = sees.reshape(sees.shape[-2:])
        return jnp.einsum("ts,...sl->...tl", sees, x, precision=lax.Precision.HIGHEST)
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
