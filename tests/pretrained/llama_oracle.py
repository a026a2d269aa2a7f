"""Llama in float64, straight from a file of llama2.c, written without the library: pairs rotate as they lie there."""

import numpy as np


def read(path):
    """Return the sizes and the arrays of a file, by the letters of its own program."""
    numbers = np.fromfile(path, "<f4")
    dim, hidden, layers, heads, kv_heads, vocab, length = (int(x) for x in numbers[:7].view("<i4"))
    kv = dim // heads * kv_heads
    shapes = {
        "table": (vocab, dim),
        "norm_1": (layers, dim),
        "q": (layers, dim, dim),
        "k": (layers, kv, dim),
        "v": (layers, kv, dim),
        "o": (layers, dim, dim),
        "norm_2": (layers, dim),
        "w1": (layers, hidden, dim),
        "w2": (layers, dim, hidden),
        "w3": (layers, hidden, dim),
        "last_norm": (dim,),
    }
    place, arrays = 7, {}
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        arrays[name] = numbers[place : place + size].reshape(shape).astype(np.float64)
        place += size
    return (heads, kv_heads, length), arrays


def norm(x, weight):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * weight


def rotate(x, base=10_000.0):
    """Rotate the pairs (0, 1), (2, 3), ... of (seq, heads, head_dim), each as a complex number."""
    seq, _, head_dim = x.shape
    angle = np.arange(seq)[:, None] * base ** (-np.arange(0, head_dim, 2) / head_dim)
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)[:, None]
    return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


def logits(path, tokens, window=None):
    """Return the logits after each token; a query sees all tokens before it, or `window` of them, and itself."""
    (heads, kv_heads, _), w = read(path)
    x, seq = w["table"][tokens], len(tokens)
    distance = np.arange(seq)[:, None] - np.arange(seq)[None]
    hidden = (distance < 0) | (distance > (seq if window is None else window))
    for i in range(len(w["q"])):
        h = norm(x, w["norm_1"][i])
        q = rotate((h @ w["q"][i].T).reshape(seq, heads, -1))
        k = rotate((h @ w["k"][i].T).reshape(seq, kv_heads, -1)).repeat(heads // kv_heads, axis=1)
        v = (h @ w["v"][i].T).reshape(seq, kv_heads, -1).repeat(heads // kv_heads, axis=1)
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(q.shape[-1])
        scores[:, hidden] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        x = x + np.einsum("hts,shd->thd", weights, v).reshape(seq, -1) @ w["o"][i].T
        h = norm(x, w["norm_2"][i])
        gate = h @ w["w1"][i].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["w3"][i].T)) @ w["w2"][i].T
    return norm(x, w["last_norm"]) @ w["table"].T
