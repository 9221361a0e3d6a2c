"""What the ops mean, stated once more in float64 NumPy, position by position and without any shortcut."""

import numpy as np

Array = np.ndarray


def attend(query: Array, keys: Array, values: Array, scale: float, softcap: float) -> Array:
    """One query [d] over keys and values [n, d]."""
    scores = keys.astype(np.float64) @ query.astype(np.float64) * scale
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    weights = np.exp(scores - scores.max())
    return weights @ values.astype(np.float64) / weights.sum()


def stored(pages: Array, layer: int, table: Array, length: int, kv_head: int) -> tuple[Array, Array]:
    """Keys and values [length, d] of one sequence, read from the pool a position at a time."""
    page_size = pages.shape[4]
    places = [(table[position // page_size], position % page_size) for position in range(length)]
    rows = [pages[layer, page, kv_head, :, offset] for page, offset in places]
    both = np.stack(rows) if rows else np.empty((0, 2, pages.shape[5]), pages.dtype)
    return both[:, 0], both[:, 1]


def decode_attention(
    q: Array, k: Array, v: Array, pages: Array, layer: int, table: Array, lengths: Array, window: int,
    *, scale: float, softcap: float = 0.0,
) -> Array:  # fmt: skip
    """See ``paged_decode.op``."""
    slots, q_heads, _ = q.shape
    group = q_heads // k.shape[1]
    out = np.empty(q.shape, np.float64)
    for slot in range(slots):
        for kv_head in range(k.shape[1]):
            keys, values = stored(pages, layer, table[slot], lengths[slot], kv_head)
            keys = np.concatenate([keys, k[slot, kv_head][None].astype(keys.dtype)])
            values = np.concatenate([values, v[slot, kv_head][None].astype(values.dtype)])
            first = max(0, len(keys) - window) if window else 0
            for head in range(kv_head * group, (kv_head + 1) * group):
                out[slot, head] = attend(q[slot, head], keys[first:], values[first:], scale, softcap)
    return out


def prefill_attention(
    q: Array, k: Array, v: Array, pages: Array, layer: int, table: Array, starts: Array, lengths: Array,
    offsets: Array, window: int, *, scale: float, softcap: float = 0.0,
) -> Array:  # fmt: skip
    """See ``paged_prefill.op``; NaN where a token belongs to no row."""
    group = q.shape[1] // k.shape[1]
    out = np.full(q.shape, np.nan)
    for row, (start, length, offset) in enumerate(zip(starts, lengths, offsets, strict=True)):
        for kv_head in range(k.shape[1] if length else 0):
            keys, values = stored(pages, layer, table[row], start, kv_head)
            own = slice(offset, offset + length)
            keys = np.concatenate([keys.astype(np.float64), k[own, kv_head].astype(np.float64)])
            values = np.concatenate([values.astype(np.float64), v[own, kv_head].astype(np.float64)])
            for index in range(length):
                last = start + index + 1
                first = max(0, last - window) if window else 0
                for head in range(kv_head * group, (kv_head + 1) * group):
                    query = q[offset + index, head]
                    out[offset + index, head] = attend(query, keys[first:last], values[first:last], scale, softcap)
    return out


def page_write(pages: Array, k: Array, v: Array, page_ids: Array, offsets: Array) -> Array:
    """See ``page_write.op``."""
    out = pages.copy()
    for token, (page, offset) in enumerate(zip(page_ids, offsets, strict=True)):
        if 0 <= page < pages.shape[1]:
            out[:, page, :, 0, offset] = k[:, token]
            out[:, page, :, 1, offset] = v[:, token]
    return out


def adjusted_logits(
    logits: Array, bias: Array, counts: Array, suppressed: Array, repetition: float, presence: float, frequency: float
) -> Array:
    """One row [vocab] after bias, penalties and suppression; ``counts`` as the slots hold them."""
    out = logits.astype(np.float64) + bias
    in_prompt, in_output = counts // 65536 > 0, counts % 65536
    for token_id in np.flatnonzero(in_prompt | (in_output > 0)):
        out[token_id] = out[token_id] / repetition if out[token_id] > 0 else out[token_id] * repetition
    out = out - presence * (in_output > 0) - frequency * in_output
    out[[token_id for token_id in suppressed if token_id >= 0]] = -np.inf
    return out


def kept_ids(adjusted: Array, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The ids that may be drawn: top-k, then top-p over what it left, then min-p; ties with the last kept id stay."""
    with np.errstate(over="ignore"):
        z = (adjusted - adjusted.max()) / temperature
    order = np.argsort(-z, kind="stable")
    if top_k > 0:
        order = [i for i in order if z[i] >= z[order[min(top_k, len(order)) - 1]]]
    weights = np.exp(z[order])
    if top_p < 1:
        before = np.cumsum(weights) - weights
        inside = max(int(np.sum(before < top_p * weights.sum())), 1)
        order = [i for i in order if z[i] >= z[order[inside - 1]]]
    return {int(i) for i in order if np.exp(z[i]) >= min_p}
