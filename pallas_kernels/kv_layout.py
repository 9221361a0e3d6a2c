"""KvLayout: where each number lies in a page of a quantised format, and what a page takes. Never imports jax.

Owns the word layouts of the formats int8, bmq4 and bmq2. All three hold a page of one key/value head as int32 words:
arrays of words pass 2^31 bytes safely where arrays of bytes would not, and the whole pool is one argument of a program.

int8, ``page_size`` positions. A position's scale words and codes need nobody else's, so that a page can be of any size:

1. keys ``[page_size, head_dim / 4]`` words: byte i (from the lowest) of word j of a position is the code of channel
   ``i * head_dim / 4 + j``, two's complement;
2. values, the same;
3. scales ``[page_size]`` words: the lower half is the bf16 scale of the position's key, the upper of its value.

bmq4 and bmq2, blocks of 128 positions. ``b`` is ``base_bits`` (4 or 2) and ``P = 8 / b``:

1. ``key_low [head_dim / P, 32]`` words: bits ``b * n`` and following of word (c, t), with ``n = 4 * i + g``, are the
   low code of channel ``i * head_dim / P + c`` at position ``32 * g + t``;
2. ``key_high [lanes, 8]`` words: bits ``2 * n`` and following of word (lane, w) are the two upper bits of that lane's
   channel at position ``16 * w + n``;
3. ``values [32, head_dim / 2]`` words: bits ``4 * n`` and following of word (t, c), with ``n = 4 * h + g``, are the
   code of rotated channel ``h * head_dim / 2 + c`` at position ``32 * g + t``;
4. ``key_affine [head_dim]`` words: the lower half is a channel's bf16 scale, the upper half its bf16 minimum;
5. ``value_scale [64]`` words: the lower half of word w is the bf16 scale of position w, the upper of position w + 64;
6. ``mask [8]`` words: bit ``d % 32`` of word ``d / 32`` says that channel d has two upper bits; its lane is the number
   of such bits below. Exactly ``lanes`` bits are set.

Every section of a block begins at a sector of 32 bytes, as long as blocks do.
"""

from dataclasses import dataclass

BLOCK = 128
"""Positions that the bitmask formats quantise together."""

SINKS = 16
"""First positions of a sequence, which the bitmask formats keep in bf16 for ever."""

RECENT = SINKS + BLOCK
"""Positions of a slot that the bitmask formats keep in bf16: the first ones, and a block that is not full."""

STRETCH = 32 * 1024
"""Positions of each row that a prefill on a GPU unpacks at a time, which bounds its workspace."""

BITMASK_HEAD_DIMS = (8, 16, 32, 64, 80, 96, 128, 256)
"""Head dims whose rotation is defined and whose mask fits its words."""

BASE_BITS = {"bmq4": 4, "bmq2": 2}
"""Bits of every key channel in the bitmask formats, by name."""

VALUE_BITS = 4
HIGH_BITS = 2
MASK_WORDS = 8
_WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class BitmaskLayout:
    """The sections of a block, in words. ``base_bits`` is 4 or 2, the bits of every key channel."""

    head_dim: int
    base_bits: int

    @property
    def parts(self) -> int:
        """Channel groups that share the words of ``key_low``."""
        return 8 // self.base_bits

    @property
    def lanes(self) -> int:
        """Key channels with two more bits: a quarter of them beside 4 bits, half beside 2."""
        return self.head_dim // (4 if self.base_bits == VALUE_BITS else 2)

    @property
    def starts(self) -> tuple[int, int, int, int, int, int]:
        """First word of each section, in order."""
        sizes = (
            self.head_dim // self.parts * 32,
            self.lanes * 8,
            32 * self.head_dim // 2,
            self.head_dim,
            BLOCK // 2,
        )
        return (0, *(sum(sizes[: index + 1]) for index in range(5)))  # pyright: ignore[reportReturnType]

    @property
    def words(self) -> int:
        """Words of a block of one key/value head."""
        return self.starts[5] + MASK_WORDS

    @property
    def bits_per_element(self) -> float:
        """Bits of a full block for each of its numbers, scales and mask counted."""
        return self.words * 32 / (2 * BLOCK * self.head_dim)


def int8_page_words(page_size: int, head_dim: int) -> int:
    """Words of an int8 page of one key/value head."""
    return page_size * (head_dim // 2 + 1)


def int8_page_size(page_words: int, head_dim: int) -> int:
    """Positions of an int8 page of that many words."""
    return page_words // (head_dim // 2 + 1)


def bitmask_page_bytes(page_size: int, head_dim: int, base_bits: int) -> int:
    """Bytes of a page of one key/value head."""
    return page_size // BLOCK * BitmaskLayout(head_dim, base_bits).words * _WORD_BYTES


def int8_page_bytes(page_size: int, head_dim: int) -> int:
    """Bytes of a page of one key/value head."""
    return int8_page_words(page_size, head_dim) * _WORD_BYTES


def recent_bytes(head_dim: int) -> int:
    """Bytes that a slot of one key/value head keeps in bf16 beside its pages, in the bitmask formats."""
    return 2 * RECENT * head_dim * 2
