"""Batch arrays: how one step's rows are packed into the few arrays that a program takes.

Owns the column layout that the host packs and the decoder unpacks, so that both read one definition, and ``SlotTable``,
which keeps a packed row for every slot. Imports numpy, never jax. A program takes three host arrays whatever the phase:

- ``tokens`` int32 [chunk]: the prompt ids of all rows back to back (prefill only; decode feeds on the ids that the
  device sampled itself);
- ``ints`` int32 [slots, NUM_INTS + width]: one row a sequence, the columns of ``Int``, then its page table;
- ``floats`` float32 [slots, NUM_FLOATS]: the columns of ``Float``.

An unused place of a page table holds ``num_pages``, one past the last page: what is written there is dropped.
"""

from collections.abc import Sequence as Many
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from planner.buckets import Bucket
from planner.ids import IdBuffer
from planner.sequence import Chunk, Sequence

ALIGNED_BYTES = 64
"""Alignment of memory that a CPU program takes as it lies; less aligned memory is copied (measured)."""

NUM_SUPPRESSED = 8
"""Ids a row can forbid at a step: its end-of-sequence and stop ids while ``min_tokens`` is not reached."""

NUM_TOP_LOGPROBS = 20
"""Most alternatives a request may ask for, a token (the bound of the OpenAI API)."""


class Int(IntEnum):
    """Columns of ``ints``."""

    LENGTH = 0
    """Ids of this row in this step: 0 = the row is empty, 1 in decode."""
    START = 1
    """Position of the first of them, which is the number of ids whose keys and values are already in pages."""
    OFFSET = 2
    """Index of the first of them in ``tokens`` (prefill); an empty row has the number of all ids: it ascends."""
    SLOT = 3
    """The slot whose state (last id, penalty counts, bias) the row reads and writes; equals the row in decode."""
    SAMPLE = 4
    """1: the row's last position yields a new id; 0: an inner chunk of a prompt."""
    TOP_K = 5
    SEED_LOW = 6
    SEED_HIGH = 7
    PENALISED = 8
    """1: the slot's counts row is valid and the penalties apply."""
    BIASED = 9
    """1: the slot's bias row is valid and is added."""
    TOP_LOGPROBS = 10
    """-1: no log-probabilities wanted; the row then may hold anything there."""
    SUPPRESSED = 11
    """First of NUM_SUPPRESSED columns: ids that may not be sampled now, -1 = none."""


class Float(IntEnum):
    """Columns of ``floats``."""

    TEMPERATURE = 0
    """0 = greedy."""
    TOP_P = 1
    MIN_P = 2
    REPETITION = 3
    PRESENCE = 4
    FREQUENCY = 5


NUM_INTS = int(Int.SUPPRESSED) + NUM_SUPPRESSED
NUM_FLOATS = len(Float)

PROMPT_COUNT = 1 << 16
"""What a prompt's id adds to its count in a slot's counts row; the lower bits count the completion."""

_SUPPRESSED = list(range(Int.SUPPRESSED, NUM_INTS))
_BLANK_FLOATS = np.array([0.0, 1.0, 0.0, 1.0, 0.0, 0.0], np.float32)

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


class SlotTable:
    """One packed row a slot, kept from step to step, so that a step copies rows instead of building them.

    ``width`` is the longest page table of the lattice; ``unused`` is the page id that pads tables. Rows without a
    sequence are blank: no ids, no pages, greedy. The packed arrays are always new ones, since a program may still read
    the last ones while the next step is packed.
    """

    __slots__ = ("_blank", "_floats", "_forbidding", "_ints")

    def __init__(self, slots: int, width: int, unused: int) -> None:
        self._blank = np.zeros(NUM_INTS + width, np.int32)
        self._blank[[Int.TOP_LOGPROBS, *_SUPPRESSED]] = -1
        self._blank[NUM_INTS:] = unused
        self._ints = np.tile(self._blank, (slots, 1))
        self._floats = np.tile(_BLANK_FLOATS, (slots, 1))
        self._forbidding: set[int] = set()

    def enter(self, sequence: Sequence) -> None:
        """Write the row of a sequence that has just been given its slot and its pages."""
        sampling, slot = sequence.sampling, sequence.slot
        row = self._ints[slot]
        row[:] = self._blank
        row[Int.SLOT] = slot
        row[Int.TOP_K] = sampling.top_k
        row[Int.SEED_LOW] = _signed(sampling.seed)
        row[Int.SEED_HIGH] = _signed(sampling.seed >> 32)
        row[Int.PENALISED] = sampling.penalised
        row[Int.BIASED] = bool(sampling.logit_bias)
        row[Int.TOP_LOGPROBS] = sampling.top_logprobs
        row[NUM_INTS : NUM_INTS + len(sequence.pages)] = sequence.pages
        self._floats[slot] = (
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )
        self._forbidding.discard(slot)
        if sampling.min_tokens and sampling.stop_ids:
            self._forbidding.add(slot)
            stop_ids = sorted(sampling.stop_ids)
            row[Int.SUPPRESSED : Int.SUPPRESSED + len(stop_ids)] = stop_ids

    def grow(self, sequence: Sequence) -> None:
        """Add the newest page of a sequence to its row."""
        index = len(sequence.pages) - 1
        self._ints[sequence.slot, NUM_INTS + index] = sequence.pages[index]

    def pack_decode(self, bucket: Bucket, sequences: Many[Sequence]) -> tuple[Ints, Floats]:
        """The arrays of a decode launch; a row's number is its slot, rows of other slots are empty.

        Args:
            bucket: more slots than the highest slot of the sequences, at least as wide as their page tables.
            sequences: whose last id is fed; its position is already among the computed ones.

        Returns:
            ``ints`` int32 [slots, NUM_INTS + width] and ``floats`` float32 [slots, NUM_FLOATS].
        """
        rows, columns = bucket.slots, NUM_INTS + bucket.width
        slots = [s.slot for s in sequences]
        self._permit(sequences)
        # nearly all rows decode: copying all of them and blanking the others beats gathering
        ints, floats = self._ints[:rows, :columns].copy(), self._floats[:rows].copy()
        ints[:, Int.LENGTH] = 1
        ints[:, Int.SAMPLE] = 1
        ints[slots, Int.START] = [s.computed - 1 for s in sequences]
        if others := list(set(range(rows)).difference(slots)):
            ints[others] = self._blank[:columns]
            floats[others] = _BLANK_FLOATS
        return ints, floats

    def pack_prefill(self, bucket: Bucket, chunks: Many[Chunk]) -> tuple[Ints, Ints, Floats]:
        """The arrays of a prefill launch; a row's number is its chunk's place in ``chunks``.

        Args:
            bucket: at least as many slots as chunks, as many ids as they have, as wide as the longest reaches.
            chunks: parts of prompts; their positions are already among the computed ones.

        Returns:
            ``tokens`` int32 [chunk], ``ints`` int32 [slots, NUM_INTS + width] and ``floats`` float32 [slots,
            NUM_FLOATS]. What is behind the last id in ``tokens`` means nothing. The ids of a single chunk are a view of
            where they lie, if that is aligned as programs take it.
        """
        columns = NUM_INTS + bucket.width
        self._permit([chunk.sequence for chunk in chunks if chunk.samples])
        lying = _lying(chunks[0], bucket.chunk) if len(chunks) == 1 else None
        tokens = np.zeros(bucket.chunk, np.int32) if lying is None else lying
        ints = np.tile(self._blank[:columns], (bucket.slots, 1))
        floats = np.tile(_BLANK_FLOATS, (bucket.slots, 1))
        offset = 0
        for row, chunk in enumerate(chunks):
            slot = chunk.sequence.slot
            ints[row] = self._ints[slot, :columns]
            ints[row, [Int.LENGTH, Int.START, Int.OFFSET, Int.SAMPLE]] = chunk.count, chunk.start, offset, chunk.samples
            floats[row] = self._floats[slot]
            if lying is None:
                tokens[offset : offset + chunk.count] = chunk.sequence.ids[chunk.start : chunk.end]
            offset += chunk.count
        ints[len(chunks) :, Int.OFFSET] = offset
        return tokens, ints, floats

    def _permit(self, sequences: Many[Sequence]) -> None:
        """Lift the ban on stop ids from the rows whose next id is past ``min_tokens``."""
        if not self._forbidding:
            return
        for sequence in sequences:
            # The id about to be sampled is in flight already, hence the 1.
            earlier = sequence.scheduled_len - 1 - sequence.prompt_len
            if sequence.slot in self._forbidding and earlier >= sequence.sampling.min_tokens:
                self._forbidding.discard(sequence.slot)
                self._ints[sequence.slot, _SUPPRESSED] = -1


def _lying(chunk: Chunk, count: int) -> Ints | None:
    """A view of ``count`` places from a chunk's first id on, where its ids lie in aligned memory of that length."""
    ids = chunk.sequence.ids
    view = ids.padded(chunk.start, count) if isinstance(ids, IdBuffer) else None
    if view is None:
        return None
    tokens = np.frombuffer(view, np.int32)
    return None if tokens.ctypes.data % ALIGNED_BYTES else tokens


def slot_state(sequence: Sequence, vocab: int) -> tuple[Ints, Floats]:
    """The counts and the bias of a sequence that enters a slot, for penalties and ``logit_bias``.

    Args:
        sequence: all its ids are known (nothing is in flight).
        vocab: ids of the model.

    Returns:
        ``counts`` int32 [vocab]: how often the completion holds the id, plus ``PROMPT_COUNT`` where the prompt holds
        it; ``bias`` float32 [vocab]: what is added to the id's logit.
    """
    ids = np.asarray(sequence.ids[:], np.int64)
    counts = np.bincount(ids[sequence.prompt_len :], minlength=vocab).astype(np.int32)
    counts[ids[: sequence.prompt_len]] += PROMPT_COUNT  # once an id: fancy indexing does not add up
    bias = np.zeros(vocab, np.float32)
    for token_id, value in sequence.sampling.logit_bias:
        bias[token_id] = value
    return counts, bias


def _signed(bits: int) -> int:
    """The low 32 bits as an int32."""
    low = bits & 0xFFFFFFFF
    return low - (1 << 32) if low >> 31 else low
