"""Buckets: which sizes a lattice has, and that rounding up finds the smallest of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.buckets import Bucket, BucketError, Lattice, Phase, make_lattice, round_up

SIZES = {"slots": 64, "prefill_chunk": 1024, "prefill_slots": 8, "context": 131072, "page_size": 64}


def lattice_of(**changes: object) -> Lattice:
    return make_lattice(**{**SIZES, "gpu": True, "one_width": False, **changes})


def test_a_gpu_has_few_small_sizes_and_dense_large_ones():
    lattice = lattice_of()
    assert lattice.decode_slots == (1, 4, 16, 32, 48, 64)
    assert lattice.prefill_chunks == (128, 256, 512, 768, 1024)
    assert lattice.widths == (512, 1024, 2048)
    assert len(list(lattice.buckets())) == 33
    assert lattice_of(slots=100, prefill_chunk=2000).decode_slots[-4:] == (48, 64, 96, 100)
    assert lattice_of(slots=100, prefill_chunk=2000).prefill_chunks[-4:] == (768, 1024, 1536, 2000)
    assert (lattice_of(slots=1).decode_slots, lattice_of(slots=3).decode_slots) == ((1,), (1, 3))


def test_a_cpu_has_doublings():
    lattice = lattice_of(gpu=False, slots=16, prefill_chunk=512, context=8192)
    assert lattice == Lattice((1, 2, 4, 8, 16), (32, 64, 128, 256, 512), 8, (128,))


@pytest.mark.parametrize(
    ("context", "page_size", "widths"),
    [
        (8192, 64, (128,)),
        (32768, 64, (512,)),
        (40960, 64, (640,)),  # close to 32K, which is left out
        (49152, 64, (512, 768)),
        (65536, 128, (256, 512)),
        (70_000, 64, (512, 1094)),
        (131_072, 128, (256, 512, 1024)),
        (262_144, 128, (256, 512, 1024, 2048)),
    ],
)
def test_widths_double_from_32k_to_the_context(context, page_size, widths):
    assert lattice_of(context=context, page_size=page_size).widths == widths
    assert lattice_of(context=context, page_size=page_size, one_width=True).widths == widths[-1:]


settings = st.fixed_dictionaries(
    {
        "slots": st.integers(1, 300),
        "prefill_chunk": st.integers(32, 4096),
        "prefill_slots": st.integers(1, 32),
        "context": st.integers(1, 300_000),
        "page_size": st.sampled_from([16, 64, 512]),
        "gpu": st.booleans(),
        "one_width": st.booleans(),
    }
)


@given(settings, st.data())
def test_rounding_up_finds_the_smallest_bucket(asked, data):
    lattice = lattice_of(**asked)
    phase = data.draw(st.sampled_from([Phase.DECODE, Phase.PREFILL]))
    pages = data.draw(st.integers(1, lattice.widths[-1]))
    rows = data.draw(st.integers(1, lattice.decode_slots[-1] if phase is Phase.DECODE else lattice.prefill_slots))
    tokens = data.draw(st.integers(rows, max(rows, lattice.prefill_chunks[-1])))
    if phase is Phase.PREFILL and tokens > lattice.prefill_chunks[-1]:
        return
    bucket = round_up(lattice, phase, rows, tokens, pages)
    all_of_them = [b for b in lattice.buckets() if b.phase is phase]
    assert bucket in all_of_them
    size = bucket.slots if phase is Phase.DECODE else bucket.chunk
    wanted = rows if phase is Phase.DECODE else tokens
    assert bucket.slots >= rows
    assert size >= wanted
    assert bucket.width >= pages
    fitting = [b for b in all_of_them if (b.slots if phase is Phase.DECODE else b.chunk) >= wanted and b.width >= pages]
    assert bucket == min(fitting, key=lambda b: (b.slots, b.chunk, b.width))


@given(settings)
def test_a_lattice_ends_at_what_was_asked_for_and_is_small(asked):
    lattice = lattice_of(**asked)
    assert lattice.decode_slots[-1] == asked["slots"]
    assert lattice.prefill_chunks[-1] == asked["prefill_chunk"]
    assert lattice.widths[-1] == -(-asked["context"] // asked["page_size"])
    assert len(set(lattice.buckets())) == len(list(lattice.buckets()))
    assert len(lattice.decode_slots) <= 14
    assert len(lattice.prefill_chunks) <= 11
    assert len(lattice.widths) <= 4


@given(st.integers(16, 1024), st.integers(128, 8192))
def test_a_large_gpu_batch_pads_a_third_at_most_and_a_large_chunk_half(rows, tokens):
    lattice = lattice_of(slots=1024, prefill_chunk=8192)
    assert round_up(lattice, Phase.DECODE, rows, rows, 1).slots <= (1.5 if rows >= 32 else 2) * rows
    bucket = round_up(lattice, Phase.PREFILL, 1, tokens, 1)
    assert bucket.chunk <= (1.5 if tokens > 512 else 2) * tokens


def test_what_passes_the_lattice_is_refused_with_both_numbers():
    lattice = lattice_of()
    with pytest.raises(BucketError, match="65 decode rows pass the largest bucket of 64"):
        round_up(lattice, Phase.DECODE, 65, 65, 1)
    with pytest.raises(BucketError, match="1025 prefill ids pass the largest bucket of 1024"):
        round_up(lattice, Phase.PREFILL, 1, 1025, 1)
    with pytest.raises(BucketError, match="2049 pages of a row pass the largest bucket of 2048"):
        round_up(lattice, Phase.PREFILL, 1, 1, 2049)
    with pytest.raises(BucketError, match="9 prompt chunks for 8 rows"):
        round_up(lattice, Phase.PREFILL, 9, 100, 1)
    with pytest.raises(BucketError, match=r"widths is \(3, 2\); it must be ascending"):
        Lattice((1,), (32,), 1, (3, 2))
    assert round_up(lattice, Phase.DECODE, 1, 1, 1) == Bucket(Phase.DECODE, 1, 1, 512)
