"""Causal Latte and its derivatives in float64, from the definition: one target token at a time, nothing shared."""

from typing import NamedTuple

import numpy as np


class Start(NamedTuple):
    """A start state: it acts as one more token, of the given mass, whose value is the average of each latent."""

    average: np.ndarray
    peak: np.ndarray
    mass: np.ndarray


def empty_start(latents, dim):
    return Start(np.zeros((latents, dim)), np.full(latents, -1e300), np.zeros(latents))


def forward(weights, keys, values, starts, start, targets=None):
    """One sequence; `starts[t]` tells whether t begins a document. Returns y and per token average, peak and mass.

    Given `targets`, only theirs.
    """
    weights, keys, values = (np.asarray(x, np.float64) for x in (weights, keys, values))
    start = Start(*(np.asarray(x, np.float64) for x in start))
    seq, latents = keys.shape
    y = np.zeros((seq, values.shape[1]))
    averages = np.zeros((seq, latents, values.shape[1]))
    peaks, masses = np.zeros((seq, latents)), np.zeros((seq, latents))
    for t in range(seq) if targets is None else targets:
        pair_mass, start_mass, peak = _pair_masses(keys, starts, start, t)
        mass = pair_mass.sum(0) + start_mass
        total = np.einsum("sl,sd->ld", pair_mass, values) + start_mass[:, None] * start.average
        averages[t] = np.divide(total, mass[:, None], out=np.zeros_like(total), where=mass[:, None] > 0)
        peaks[t], masses[t] = peak, mass
        y[t] = weights[t] @ averages[t]
    return y, averages, peaks, masses


def backward(weights, keys, values, starts, start, dy, daverage, dmass):
    """Cotangents of weights, keys, values, and of the start's average and mass; of the last state as of the outputs."""
    weights, keys, values, dy, daverage, dmass = (
        np.asarray(x, np.float64) for x in (weights, keys, values, dy, daverage, dmass)
    )
    start = Start(*(np.asarray(x, np.float64) for x in start))
    _, averages, _, masses = forward(weights, keys, values, starts, start)
    seq = len(keys)
    dweights, dkeys, dvalues = np.zeros_like(weights), np.zeros_like(keys), np.zeros_like(values)
    dstart_average, dstart_mass = np.zeros_like(start.average), np.zeros_like(start.mass)
    for t in range(seq):
        pair_mass, start_mass, _ = _pair_masses(keys, starts, start, t)
        safe = np.where(masses[t] > 0, masses[t], 1)
        share, start_share = pair_mass / safe, start_mass / safe
        dweights[t] = averages[t] @ dy[t]
        # How much each latent's average of this token is asked to move.
        pull = weights[t][:, None] * dy[t][None] + (daverage if t == seq - 1 else 0)
        dvalues += np.einsum("sl,ld->sd", share, pull)
        dkeys += share * (values @ pull.T - np.einsum("ld,ld->l", averages[t], pull))
        dstart_average += start_share[:, None] * pull
        difference = np.einsum("ld,ld->l", start.average - averages[t], pull)
        per_mass = np.divide(start_share, start.mass, out=np.zeros_like(start_share), where=start.mass > 0)
        dstart_mass += per_mass * difference
        if t == seq - 1:
            dkeys += pair_mass * dmass
            dstart_mass += per_mass * masses[t] * dmass
    return dweights, dkeys, dvalues, dstart_average, dstart_mass


def _pair_masses(keys, starts, start, t):
    """Masses of the tokens, and of the start, that token t sees, relative to the largest key among them."""
    first = max((s for s in range(1, t + 1) if starts[s]), default=0)
    continues = first == 0
    seen = keys[first : t + 1]
    peak = seen.max(0)
    if continues:
        peak = np.maximum(peak, np.where(start.mass > 0, start.peak, -np.inf))
    finite_peak = np.where(np.isfinite(peak), peak, 0)
    pair_mass = np.zeros_like(keys)
    pair_mass[first : t + 1] = np.exp(seen - finite_peak)
    start_mass = np.zeros(keys.shape[1])
    if continues:
        start_mass = np.where(start.mass > 0, start.mass * np.exp(np.minimum(start.peak - finite_peak, 0)), 0)
    return pair_mass, start_mass, peak
