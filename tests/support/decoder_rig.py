"""The decoder over a small page pool, driven by hand: whole forward passes, and steps with any rows in any slots."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.rows import Rows
from pallas_kernels.sample.op import Sampled
from planner.architecture import ModelArchitecture
from planner.batch import NUM_FLOATS, NUM_INTS, NUM_SUPPRESSED, Float, Int
from planner.decoder import (
    Decoder,
    DeviceState,
    Numerics,
    PrefillContext,
    decode_step,
    logits_of,
    parameters,
    prefill_step,
)
from planner.formats import KvFormat, WeightForm
from planner.program import pool_shapes
from tests.support.quick import quick_jit

_NAN = {"float32": np.nan, "uint16": 0x7FC0, "int32": 0x7FC07FC0}
FLOAT32 = Numerics(WeightForm.FLOAT32, "xla", "xla")


def whole_logits(
    architecture: ModelArchitecture, weights: Mapping[str, Any], ids: Sequence[int], numerics: Numerics = FLOAT32
) -> np.ndarray:
    """Logits [ids, vocab] of one fresh row, computed in one forward pass without any page."""

    def forward(weights: Mapping[str, Any], ids: Any) -> Any:
        length = ids.shape[0]
        one = functools.partial(jnp.full, (1,), dtype=jnp.int32)
        pages = jnp.zeros((architecture.layers, 1, architecture.kv_heads, 2, 16, architecture.head_dim))
        context = PrefillContext(pages, Rows(jnp.zeros((1, 1), jnp.int32), one(0), one(0), one(length), one(0)))
        decoder = Decoder(architecture, numerics)
        hidden, _ = decoder.apply(parameters(weights), ids, jnp.arange(length), context)
        return logits_of(architecture, numerics, weights, hidden)

    arrays = {name: jnp.asarray(array) for name, array in weights.items()}
    return np.asarray(quick_jit(forward)(arrays, jnp.asarray(ids, jnp.int32)))


@dataclass(frozen=True, slots=True)
class Row:
    """Ids of one sequence in one step: its slot, its pages, where the ids start; ``fields`` sets further columns."""

    slot: int
    pages: Sequence[int]
    start: int
    ids: Sequence[int] = (0,)
    sample: bool = True
    fields: Mapping[Int | Float, float] = field(default_factory=dict[Int | Float, float])


@dataclass(slots=True)
class DecoderRig:
    """One device state and the compiled steps over it; shapes compile on first use."""

    architecture: ModelArchitecture
    weights: Mapping[str, Any]
    num_pages: int = 24
    page_size: int = 16
    width: int = 6
    slots: int = 4
    numerics: Numerics = FLOAT32
    kv_format: KvFormat = KvFormat.FLOAT32
    state: DeviceState = field(init=False)
    _prefill: Callable[..., Any] = field(init=False)
    _decode: Callable[..., Any] = field(init=False)

    def __post_init__(self) -> None:
        self.weights = {name: jnp.asarray(array) for name, array in self.weights.items()}
        self._prefill = quick_jit(functools.partial(prefill_step, self.architecture, self.numerics))
        self._decode = quick_jit(functools.partial(decode_step, self.architecture, self.numerics))
        self.reset()

    def reset(self) -> None:
        """A pool of NaN, in the words of every format, and no ids: whatever is read unwritten shows."""
        arch, slots = self.architecture, self.slots
        shapes = pool_shapes(self.kv_format, arch, self.num_pages, self.page_size, slots)
        self.state = DeviceState(
            jax.tree.map(lambda part: jnp.full(part.shape, _NAN[part.dtype.name], part.dtype), shapes),
            jnp.zeros(slots, jnp.int32),
            jnp.zeros((slots, arch.vocab), jnp.int32),
            jnp.zeros((slots, arch.vocab)),
        )

    def prefill(self, rows: Sequence[Row], chunk: int, num_rows: int = 4) -> Sampled:
        """Prompt chunks back to back in a launch of ``chunk`` ids and ``num_rows`` rows."""
        tokens = np.zeros(chunk, np.int32)
        ints, floats = self._columns(num_rows)
        offset = 0
        for index, row in enumerate(rows):
            self._fill(ints, floats, index, row)
            ints[index, [Int.LENGTH, Int.OFFSET]] = len(row.ids), offset
            tokens[offset : offset + len(row.ids)] = row.ids
            offset += len(row.ids)
        ints[len(rows) :, Int.OFFSET] = offset
        self.state, out = self._prefill(self.weights, self.state, tokens, ints, floats)
        return jax.tree.map(np.asarray, out)

    def decode(self, rows: Sequence[Row]) -> Sampled:
        """One step of all slots; a row's last id is fed to its slot first."""
        ints, floats = self._columns(self.slots)
        last = np.array(self.state.last_ids)
        for row in rows:
            self._fill(ints, floats, row.slot, row)
            ints[row.slot, Int.LENGTH] = 1
            last[row.slot] = row.ids[-1]
        self.state = self.state._replace(last_ids=jnp.asarray(last))
        self.state, out = self._decode(self.weights, self.state, ints, floats)
        return jax.tree.map(np.asarray, out)

    def _columns(self, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
        ints = np.zeros((num_rows, NUM_INTS + self.width), np.int32)
        ints[:, Int.SUPPRESSED : Int.SUPPRESSED + NUM_SUPPRESSED] = -1
        ints[:, NUM_INTS:] = self.num_pages
        floats = np.zeros((num_rows, NUM_FLOATS), np.float32)
        floats[:, [Float.TOP_P, Float.REPETITION]] = 1.0
        return ints, floats

    def _fill(self, ints: np.ndarray, floats: np.ndarray, index: int, row: Row) -> None:
        ints[index, [Int.START, Int.SLOT, Int.SAMPLE, Int.TOP_LOGPROBS]] = row.start, row.slot, row.sample, 20
        ints[index, NUM_INTS : NUM_INTS + len(row.pages)] = row.pages
        for column, value in row.fields.items():
            (ints if isinstance(column, Int) else floats)[index, column] = value
