"""Launches of paged_prefill over quantised pools for tests, and the float64 statement of what they must give."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pallas_kernels.model_shapes import HeadShape
from tests.support.exact import prefill_attention
from tests.support.quantised import QuantisedHistory, quantised_history


@dataclass(frozen=True, slots=True)
class Launch:
    """Arguments of a launch; tokens behind the last row hold noise."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    history: QuantisedHistory
    lengths: np.ndarray
    offsets: np.ndarray

    @property
    def used(self) -> slice:
        """Tokens that belong to a row."""
        return slice(0, int(self.lengths.sum()))

    def wanted(self, layer: int, window: int, *, scale: float, softcap: float = 0.0) -> np.ndarray:
        """What every token that belongs to a row must get, float64."""
        history = self.history
        return prefill_attention(
            self.q, self.k, self.v, history.plain, layer, history.plain_table, history.lengths, self.lengths,
            self.offsets, window, scale=scale, softcap=softcap,
        )[self.used]  # fmt: skip


def launch(
    rng: np.random.Generator, kv_format: str, heads: HeadShape, chunks: Sequence[tuple[int, int]], tokens: int,
    *, page_size: int, width: int, **options: object,
) -> Launch:  # fmt: skip
    """A launch of chunks (positions before, tokens); options are those of ``quantised_history``."""
    starts, lengths = (np.array(column, np.int32) for column in zip(*chunks, strict=True))
    history = quantised_history(
        kv_format, rng, starts.tolist(), kv_heads=heads.kv_heads, head_dim=heads.head_dim, page_size=page_size,
        width=width, **options,
    )  # fmt: skip
    q = rng.standard_normal((tokens, heads.q_heads, heads.head_dim), dtype=np.float32)
    k, v = rng.standard_normal((2, tokens, heads.kv_heads, heads.head_dim), dtype=np.float32)
    offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int32)
    return Launch(q, k, v, history, lengths, offsets)
