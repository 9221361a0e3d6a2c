"""The packed arrays, column by column."""

import numpy as np
import pytest

from planner.batch import NUM_FLOATS, NUM_INTS, NUM_SUPPRESSED, PROMPT_COUNT, Float, Int, SlotTable, slot_state
from planner.buckets import Bucket, Phase
from planner.sequence import Chunk, Sampling, Sequence

UNUSED = 50


def running(slot: int, ids: list[int], pages: list[int], computed: int, **sampling: object) -> Sequence:
    sequence = Sequence(slot, f"r{slot}", "t", ids, len(ids), Sampling(max_tokens=9, **sampling), 0.0)  # type: ignore[arg-type]
    sequence.slot, sequence.pages, sequence.computed, sequence.in_flight = slot, pages, computed, 1
    return sequence


def int_row(*pages: int, width: int = 4, **columns: int) -> list[int]:
    row = [0] * NUM_INTS
    row[Int.TOP_LOGPROBS] = -1
    row[Int.SUPPRESSED :] = [-1] * NUM_SUPPRESSED
    for name, value in columns.items():
        row[Int[name]] = value
    return [*row, *pages, *[UNUSED] * (width - len(pages))]


BLANK = int_row()
BLANK_FLOATS = [0.0, 1.0, 0.0, 1.0, 0.0, 0.0]


def test_columns_do_not_overlap():
    assert list(Int) == list(range(len(Int)))
    assert len(Int) - 1 + NUM_SUPPRESSED == NUM_INTS
    assert NUM_FLOATS == len(Float) == len(BLANK_FLOATS)


def test_decode_rows_are_slots():
    table = SlotTable(4, 4, UNUSED)
    first = running(
        2,
        [5] * 17,
        [7, 3],
        18,
        temperature=0.5,
        top_k=40,
        top_p=0.25,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=0.75,
        frequency_penalty=-2.0,
        seed=(1 << 63) + (1 << 31) + 1,
        top_logprobs=5,
        logit_bias=((1, 2.0),),
    )
    second = running(0, [6] * 3, [9], 4, temperature=0.0, seed=3)
    table.enter(first)
    table.enter(second)
    ints, floats = table.pack_decode(Bucket(Phase.DECODE, 3, 1, 4), [first, second])
    assert (ints.dtype, floats.dtype) == (np.int32, np.float32)
    assert ints.tolist() == [
        int_row(9, LENGTH=1, START=3, SLOT=0, SAMPLE=1, SEED_LOW=3),
        BLANK,
        int_row(
            7,
            3,
            LENGTH=1,
            START=17,
            SLOT=2,
            SAMPLE=1,
            TOP_K=40,
            SEED_LOW=-(1 << 31) + 1,
            SEED_HIGH=-(1 << 31),
            PENALISED=1,
            BIASED=1,
            TOP_LOGPROBS=5,
        ),
    ]
    assert floats.tolist() == [BLANK_FLOATS, BLANK_FLOATS, [0.5, 0.25, 0.125, 1.5, 0.75, -2.0]]


def test_prefill_packs_chunks_back_to_back():
    table = SlotTable(4, 4, UNUSED)
    long = running(3, list(range(100, 150)), [1, 2, 4, 8], 32, temperature=1.0)
    short = running(1, [7, 8, 9], [5], 3, temperature=0.25, top_logprobs=0)
    table.enter(long)
    table.enter(short)
    chunks = [Chunk(long, 16, 16, samples=False), Chunk(short, 0, 3, samples=True)]
    tokens, ints, floats = table.pack_prefill(Bucket(Phase.PREFILL, 4, 32, 2), chunks)
    assert (tokens.dtype, ints.dtype, floats.dtype) == (np.int32, np.int32, np.float32)
    assert tokens.tolist() == [*range(116, 132), 7, 8, 9, *[0] * 13]
    assert ints.tolist() == [
        int_row(1, 2, width=2, LENGTH=16, START=16, OFFSET=0, SLOT=3, SAMPLE=0),
        int_row(5, width=2, LENGTH=3, START=0, OFFSET=16, SLOT=1, SAMPLE=1, TOP_LOGPROBS=0),
        int_row(width=2, OFFSET=19),
        int_row(width=2, OFFSET=19),
    ]
    assert floats.tolist() == [[1.0, *BLANK_FLOATS[1:]], [0.25, *BLANK_FLOATS[1:]], BLANK_FLOATS, BLANK_FLOATS]


def test_packing_leaves_the_last_arrays_alone():
    table = SlotTable(2, 4, UNUSED)
    sequence = running(0, [1] * 16, [3], 17)
    table.enter(sequence)
    bucket = Bucket(Phase.DECODE, 1, 1, 4)
    earlier, _ = table.pack_decode(bucket, [sequence])
    copy = earlier.copy()
    sequence.pages.append(6)
    sequence.computed += 1
    table.grow(sequence)
    later, _ = table.pack_decode(bucket, [sequence])
    assert (earlier == copy).all()
    assert later.tolist() == [int_row(3, 6, LENGTH=1, START=17, SLOT=0, SAMPLE=1)]


def test_a_slot_forgets_its_last_sequence():
    table = SlotTable(1, 4, UNUSED)
    table.enter(running(0, [1] * 40, [1, 2, 3], 41, top_k=9, stop_ids=frozenset({4}), min_tokens=5))
    sequence = running(0, [2], [8], 2)
    table.enter(sequence)
    ints, _ = table.pack_decode(Bucket(Phase.DECODE, 1, 1, 4), [sequence])
    assert ints.tolist() == [int_row(8, LENGTH=1, START=1, SLOT=0, SAMPLE=1)]


@pytest.mark.parametrize("min_tokens", [1, 2, 3])
def test_stop_ids_are_suppressed_while_the_completion_is_short(min_tokens: int):
    table = SlotTable(1, 4, UNUSED)
    sequence = running(0, [1, 2, 3], [8], 3, stop_ids=frozenset({30, 10, 20}), min_tokens=min_tokens)
    table.enter(sequence)
    seen = []
    _, ints, _ = table.pack_prefill(Bucket(Phase.PREFILL, 1, 16, 4), [Chunk(sequence, 0, 3, samples=True)])
    seen.append(ints[0, Int.SUPPRESSED : NUM_INTS].tolist())
    for _ in range(3):
        sequence.computed += 1
        sequence.in_flight += 1
        ints, _ = table.pack_decode(Bucket(Phase.DECODE, 1, 1, 4), [sequence])
        seen.append(ints[0, Int.SUPPRESSED : NUM_INTS].tolist())
    on, off = [10, 20, 30, -1, -1, -1, -1, -1], [-1] * 8
    assert seen == [on if completion < min_tokens else off for completion in range(4)]


def test_slot_state_counts_the_completion_and_marks_the_prompt():
    sequence = running(0, [3, 3, 5], [0], 3, logit_bias=((2, -100.0), (5, 0.5)))
    sequence.ids += [5, 1, 1, 1]
    counts, bias = slot_state(sequence, 6)
    assert (counts.dtype, bias.dtype) == (np.int32, np.float32)
    assert counts.tolist() == [0, 3, 0, PROMPT_COUNT, 0, PROMPT_COUNT + 1]
    assert bias.tolist() == [0, 0, -100, 0, 0, 0.5]
