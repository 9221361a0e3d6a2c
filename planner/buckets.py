"""Bucket: the static shape of a program, and the one pure function that rounds a batch up to it.

Owns the lattice that build time enumerates and run time looks up, and the choice of its sizes. Reads nothing; never
imports jax.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

NARROWEST = 32 * 1024
"""Token positions of the narrowest page table where there are several widths; each of the others is twice as wide."""

_SMALLEST_CHUNK = 32
_NEAR = 1.5  # a width that the context passes by less is left out


class Phase(StrEnum):
    """Which computation a program does."""

    PREFILL = "prefill"
    DECODE = "decode"
    SET_SLOT = "set_slot"
    """No step of a model: writes the penalty state of a sequence that enters a slot."""
    EMPTY = "empty"
    """No step of a model: makes the state that all others are given and give back."""
    READ_PAGES = "read_pages"
    """No step of a model: copies whole pages out of the pool."""
    WRITE_PAGES = "write_pages"
    """No step of a model: puts whole pages into the pool."""


class BucketError(ValueError):
    """A batch is larger than the lattice; the message gives the value, the bound and what to change."""


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """Static sizes of one program.

    ``slots`` is the number of rows (sequences, or pages where pages are moved), ``chunk`` the number of prompt ids of
    the whole launch (1 a row and so 1 for decode), ``width`` the page-table length of a row, in pages.
    """

    phase: Phase
    slots: int
    chunk: int
    width: int

    @property
    def name(self) -> str:
        """The bucket as it appears in file names and logs."""
        return f"{self.phase}-s{self.slots}-c{self.chunk}-w{self.width}"


@dataclass(frozen=True, slots=True)
class Lattice:
    """All buckets of a plan; each tuple is ascending.

    ``prefill_slots`` is the most prompt chunks that one prefill launch may hold.
    """

    decode_slots: tuple[int, ...]
    prefill_chunks: tuple[int, ...]
    prefill_slots: int
    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("decode_slots", "prefill_chunks", "widths"):
            values = getattr(self, name)
            if not values or list(values) != sorted(set(values)) or values[0] <= 0:
                raise BucketError(f"{name} is {values}; it must be ascending whole numbers above 0")
        if self.prefill_slots <= 0:
            raise BucketError(f"prefill_slots is {self.prefill_slots}; it must be above 0")

    def buckets(self) -> Iterator[Bucket]:
        """Every bucket, decode first."""
        for width in self.widths:
            for slots in self.decode_slots:
                yield Bucket(Phase.DECODE, slots, 1, width)
            for chunk in self.prefill_chunks:
                yield Bucket(Phase.PREFILL, min(self.prefill_slots, chunk), chunk, width)


def make_lattice(
    *, slots: int, prefill_chunk: int, prefill_slots: int, context: int, page_size: int, gpu: bool, one_width: bool
) -> Lattice:
    """Choose the sizes of a lattice.

    A GPU reads its weights for one row or a hundred in about the same time, so that it has few small sizes: 1 and 4
    rows, whose contexts it cuts finer than those of many, and 16. Large sizes come in steps of a half or a third, since
    there padding is computed. On a CPU sizes double from the smallest on.

    Args:
        slots: most sequences decoded at once.
        prefill_chunk: most prompt ids of a launch.
        prefill_slots: most prompt chunks of a launch.
        context: positions of the longest sequence.
        page_size: token positions a page.
        gpu: whether programs are for a GPU.
        one_width: whether the width of page tables costs nothing, so that they are all as wide as the context.
    """
    pages = tuple(-(-width // page_size) for width in ([context] if one_width else _widths(context)))
    if not gpu:
        return Lattice(_doublings(1, slots), _doublings(_SMALLEST_CHUNK, prefill_chunk), prefill_slots, pages)
    decode = _steps(slots, lambda size: size in (1, 4) or size >= 16, lambda size: size >= 48)
    chunks = _steps(prefill_chunk, lambda size: size >= 128, lambda size: size >= 768)
    return Lattice(decode, chunks, prefill_slots, pages)


def _widths(context: int) -> list[int]:
    """Positions of page tables: doublings from the narrowest one, and the context."""
    widths, width = [context], NARROWEST
    while width * _NEAR <= context:
        widths.insert(-1, width)
        width *= 2
    return widths


def _doublings(smallest: int, largest: int) -> tuple[int, ...]:
    sizes = [largest]
    while sizes[0] > smallest:
        sizes.insert(0, max(smallest, -(-sizes[0] // 2)))
    return tuple(sizes)


def _steps(largest: int, power: Callable[[int], bool], between: Callable[[int], bool]) -> tuple[int, ...]:
    """Powers of two below ``largest`` and the numbers half-way between two of them, as chosen, and itself."""
    exponents = range(largest.bit_length())
    sizes = {2**n for n in exponents if power(2**n)} | {3 * 2**n for n in exponents if between(3 * 2**n)}
    return (*sorted(size for size in sizes if size < largest), largest)


def round_up(lattice: Lattice, phase: Phase, rows: int, tokens: int, pages: int) -> Bucket:
    """The smallest bucket that holds a batch.

    Args:
        lattice: the buckets there are.
        phase: prefill or decode.
        rows: rows that must fit (decode: the highest slot in use plus one).
        tokens: ids of all chunks together; ignored for decode.
        pages: the longest page table among the rows.

    Raises:
        BucketError: no bucket is large enough.
    """
    width = _at_least(lattice.widths, pages, "pages of a row")
    if phase is Phase.DECODE:
        return Bucket(phase, _at_least(lattice.decode_slots, rows, "decode rows"), 1, width)
    chunk = _at_least(lattice.prefill_chunks, max(tokens, rows), "prefill ids")
    slots = min(lattice.prefill_slots, chunk)
    if rows > slots:
        raise BucketError(f"{rows} prompt chunks for {slots} rows; the scheduler must give at most prefill_slots")
    return Bucket(phase, slots, chunk, width)


def _at_least(sizes: tuple[int, ...], wanted: int, what: str) -> int:
    for size in sizes:
        if size >= wanted:
            return size
    raise BucketError(f"{wanted} {what} pass the largest bucket of {sizes[-1]}; raise the plan's lattice")
