"""A model that a person can compute: the next id is a sum over all ids so far, read through pages and page tables.

Owns programs with the calling convention of the real ones, over NumPy arrays. A wrong page table, a missing or a
misplaced write, a stale slot or a reused state changes the ids or raises.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from appliance.engine_ports import ProgramSet
from planner.batch import NUM_FLOATS, NUM_INTS, NUM_SUPPRESSED, NUM_TOP_LOGPROBS, PROMPT_COUNT, Float, Int
from planner.buckets import Bucket, Lattice, Phase
from planner.sequence import Sampling

VOCAB = 97
MOVED_PAGES = 2
_SUPPRESSED = slice(Int.SUPPRESSED, Int.SUPPRESSED + NUM_SUPPRESSED)


def next_id(
    ids: Sequence[int], sampling: Sampling, prompt_len: int, vocab: int = VOCAB
) -> int:  # the meaning, from ids alone
    """The id that follows ``ids``."""
    total = sum((token + 1) * _weight(position) for position, token in enumerate(ids))
    total += _mix(sampling.seed & 0xFFFFFFFF, sampling.seed >> 32, sampling.top_k, sampling.temperature, len(ids))
    if sampling.penalised:
        counts = [0] * vocab
        for token in ids[prompt_len:]:
            counts[token] += 1
        for token in set(ids[:prompt_len]):
            counts[token] += PROMPT_COUNT
        total += sum(count * (token + 1) for token, count in enumerate(counts))
    total += sum(int(value) * (token + 1) for token, value in sampling.logit_bias)
    chosen = total % vocab
    while len(ids) - prompt_len < sampling.min_tokens and chosen in sampling.stop_ids:
        chosen = (chosen + 1) % vocab
    return chosen


def continuation(prompt: Sequence[int], sampling: Sampling, limit: int | None = None) -> list[int]:
    """The completion of a prompt, without the stop id; ``limit`` bounds prompt and completion together."""
    ids = list(prompt)
    while len(ids) - len(prompt) < sampling.max_tokens and (limit is None or len(ids) < limit):
        chosen = next_id(ids, sampling, len(prompt))
        if chosen in sampling.stop_ids:
            break
        ids.append(chosen)
    return ids[len(prompt) :]


def _weight(position: int) -> int:
    return position * position + 3 * position + 1


def _mix(low: int, high: int, top_k: int, temperature: float, position: int) -> int:
    return low * 31 + high * 37 + top_k * 41 + round(float(temperature) * 1000) + position * 17


class Deferred:
    """An array whose reading is noted, like one that is still being computed."""

    def __init__(self, array: np.ndarray, read: Callable[[], None]) -> None:
        self._array = array
        self._read = read

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        self._read()
        return self._array


@dataclass
class Output:
    ids: Deferred
    logprob: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


class PageOut:
    """A copy of a page as programs give it, on its way to the host."""

    def __init__(self, content: np.ndarray) -> None:
        self._content = content
        self._begun = False

    def copy_to_host_async(self) -> None:
        self._begun = True

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        assert self._begun, "it is not waited for before it is asked for"
        return self._content


@dataclass
class State:
    """What lives on the device; ``alive`` turns false when a program takes it."""

    page_ids: np.ndarray
    page_positions: np.ndarray
    last_ids: np.ndarray
    counts: np.ndarray
    bias: np.ndarray
    alive: bool = True

    def take(self) -> "State":
        assert self.alive, "a donated state is used again"
        self.alive = False
        return State(self.page_ids, self.page_positions, self.last_ids, self.counts, self.bias)


@dataclass
class ArithmeticModel:
    """Programs for every bucket of a lattice and what they were called with.

    ``events`` holds ("launch", n) and ("read", n); ``fault`` is raised by the next program when set; ``on_write`` hears
    of every slot and page that a program writes.
    """

    lattice: Lattice
    num_pages: int
    page_size: int
    align: int = 16
    events: list[tuple[str, int]] = field(default_factory=list)
    buckets: list[Bucket] = field(default_factory=list)
    fault: Exception | None = None
    on_write: Callable[[int, int], None] = lambda _slot, _page: None
    launches: int = 0

    def state(self) -> State:
        slots = self.lattice.decode_slots[-1]
        shape = self.num_pages, self.page_size
        return State(
            np.full(shape, 10**6, np.int64),
            np.full(shape, 10**6, np.int64),
            np.full(slots, -1, np.int64),
            np.full((slots, VOCAB), -1, np.int64),
            np.full((slots, VOCAB), -1, np.int64),
        )

    def programs(self) -> ProgramSet:
        buckets = list(self.lattice.buckets())
        return ProgramSet(
            decode={b: self._decode(b) for b in buckets if b.phase is Phase.DECODE},
            prefill={b: self._prefill(b) for b in buckets if b.phase is Phase.PREFILL},
            set_slot=self._set_slot,
            read_pages=self._read_pages,
            write_pages=self._write_pages,
            moved_pages=MOVED_PAGES,
        )

    def _read_pages(self, state: State, ids: np.ndarray) -> tuple[State, list["PageOut"]]:
        assert (ids.shape, ids.dtype) == ((MOVED_PAGES,), np.int32)
        state = state.take()
        return state, [PageOut(np.stack([state.page_ids[page], state.page_positions[page]])) for page in ids]

    def _write_pages(self, state: State, ids: np.ndarray, *contents: np.ndarray) -> State:
        assert (ids.shape, ids.dtype) == ((MOVED_PAGES,), np.int32)
        assert len(contents) == MOVED_PAGES
        state = state.take()
        for page, content in zip(ids, contents, strict=True):
            state.page_ids[page], state.page_positions[page] = content
        return state

    def _set_slot(self, state: State, slot: np.ndarray, counts: np.ndarray, bias: np.ndarray) -> State:
        assert slot.dtype == counts.dtype == np.int32
        assert bias.dtype == np.float32
        assert counts.shape == bias.shape == (VOCAB,)
        state = state.take()
        state.counts[int(slot)] = counts
        state.bias[int(slot)] = bias
        return state

    def _decode(self, bucket: Bucket) -> Callable[..., tuple[State, Output]]:
        def program(weights: object, state: State, ints: np.ndarray, floats: np.ndarray) -> tuple[State, Output]:
            state = self._begin(bucket, weights, state, ints, floats)
            sampled = np.full(bucket.slots, -7, np.int32)
            for slot, row in enumerate(ints):
                if row[Int.LENGTH]:
                    assert row[Int.SLOT] == slot
                    assert row[Int.SAMPLE] == 1
                    self._write(state, row, int(row[Int.START]), [int(state.last_ids[slot])])
                    sampled[slot] = self._sample(state, row, floats[slot])
                else:
                    self._check_blank(row, floats[slot])
            return state, self._end(sampled)

        return program

    def _prefill(self, bucket: Bucket) -> Callable[..., tuple[State, Output]]:
        def program(
            weights: object, state: State, tokens: np.ndarray, ints: np.ndarray, floats: np.ndarray
        ) -> tuple[State, Output]:
            state = self._begin(bucket, weights, state, ints, floats)
            assert (tokens.shape, tokens.dtype) == ((bucket.chunk,), np.int32)
            sampled = np.full(bucket.slots, -7, np.int32)
            ends = ints[:, Int.OFFSET] + ints[:, Int.LENGTH]
            assert list(ints[1:, Int.OFFSET]) == list(ends[:-1]), "chunks stand back to back"
            for row in ints:  # all writes before all reads, as in a real launch
                start, length, offset = int(row[Int.START]), int(row[Int.LENGTH]), int(row[Int.OFFSET])
                assert start % self.align == 0
                self._write(state, row, start, tokens[offset : offset + length].tolist())
            for index, row in enumerate(ints):
                if not row[Int.LENGTH]:
                    self._check_blank(row, floats[index])
                elif row[Int.SAMPLE]:
                    sampled[index] = self._sample(state, row, floats[index])
            return state, self._end(sampled)

        return program

    def _begin(self, bucket: Bucket, weights: object, state: State, ints: np.ndarray, floats: np.ndarray) -> State:
        assert weights == "weights"
        assert (ints.shape, ints.dtype) == ((bucket.slots, NUM_INTS + bucket.width), np.int32)
        assert (floats.shape, floats.dtype) == ((bucket.slots, NUM_FLOATS), np.float32)
        if self.fault is not None:
            raise self.fault
        self.events.append(("launch", self.launches))
        self.buckets.append(bucket)
        self.launches += 1
        return state.take()

    def _write(self, state: State, row: np.ndarray, start: int, ids: list[int]) -> None:
        for position, token in enumerate(ids, start):
            page = int(row[NUM_INTS + position // self.page_size])
            assert 0 <= page < self.num_pages, f"position {position} has no page"
            state.page_ids[page, position % self.page_size] = token
            state.page_positions[page, position % self.page_size] = position
            self.on_write(int(row[Int.SLOT]), page)

    def _sample(self, state: State, row: np.ndarray, floats: np.ndarray) -> int:
        slot, length = int(row[Int.SLOT]), int(row[Int.START] + row[Int.LENGTH])
        positions = np.arange(length)
        pages = row[NUM_INTS + positions // self.page_size]
        ids = state.page_ids[pages, positions % self.page_size]
        stored = state.page_positions[pages, positions % self.page_size]
        total = int(np.sum((ids + 1) * (stored * stored + 3 * stored + 1)))
        low, high = int(row[Int.SEED_LOW]) & 0xFFFFFFFF, int(row[Int.SEED_HIGH]) & 0xFFFFFFFF
        total += _mix(low, high, int(row[Int.TOP_K]), floats[Float.TEMPERATURE], length)
        if row[Int.PENALISED]:
            total += int(np.sum(state.counts[slot] * np.arange(1, VOCAB + 1)))
        if row[Int.BIASED]:
            total += int(np.sum(state.bias[slot] * np.arange(1, VOCAB + 1)))
        chosen = total % VOCAB
        while chosen in row[_SUPPRESSED]:
            chosen = (chosen + 1) % VOCAB
        state.last_ids[slot] = chosen
        state.counts[slot, chosen] += 1
        return chosen

    def _check_blank(self, row: np.ndarray, floats: np.ndarray) -> None:
        assert row[Int.SAMPLE] == 0
        assert row[Int.TOP_LOGPROBS] == -1
        assert set(row[NUM_INTS:]) <= {self.num_pages}
        assert floats[Float.TEMPERATURE] == 0

    def _end(self, sampled: np.ndarray) -> Output:
        number, rows = self.launches - 1, len(sampled)
        ranks = np.arange(NUM_TOP_LOGPROBS)
        return Output(
            Deferred(sampled, lambda: self.events.append(("read", number))),
            -(sampled / 8).astype(np.float32),
            (sampled[:, None] + ranks).astype(np.int32),
            np.broadcast_to(-(ranks / 4).astype(np.float32), (rows, NUM_TOP_LOGPROBS)),
        )
