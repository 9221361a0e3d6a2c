"""Batch arrays: how one step's rows are packed into the few arrays that a program takes.

Owns the column layout that the host packs and the decoder unpacks, so that both read one definition. Imports numpy,
never jax. A program takes three host arrays whatever the phase:

- ``tokens`` int32 [chunk]: the prompt ids of all rows back to back (prefill only; decode feeds on the ids that the
  device sampled itself);
- ``ints`` int32 [slots, NUM_INTS + width]: one row a sequence, the columns of ``Int``, then its page table;
- ``floats`` float32 [slots, NUM_FLOATS]: the columns of ``Float``.
"""

from enum import IntEnum

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
    """Index of the first of them in ``tokens`` (prefill)."""
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
