"""Passes: how one program goes through a row's vocabulary, tile by tile.

Owns what a pass can bring home: the largest numbers and their ids, sums beside thresholds, and a copy of the few ids
that reach a number. Reads numbers through a function of ids; never knows what they mean. Sums are float32, lane by lane
and then over the lanes, whatever the row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int32

from pallas_kernels.access import Access
from pallas_kernels.sample.search import Enough, Thresholds, largest_threshold

State = TypeVar("State")

Numbers = Callable[[Array, Array], Array]
"""The numbers of ids, which exist where the second argument says so; minus infinity elsewhere."""

Lanes = tuple[Float[Array, " lanes"], Float[Array, " lanes"], Float[Array, " lanes"]]
"""A sum a lane, beside three thresholds."""

Weigh = Callable[[Array], Array]
"""The weights of numbers."""

_NOBODY = 2**31 - 1
"""No id, and larger than all."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes of a launch.

    A turn takes ``width`` ids; of the likeliest, ``wanted`` are asked for and ``few`` at most are copied; ``warps`` is
    Triton's. All but ``wanted`` are powers of two.
    """

    width: int
    few: int
    wanted: int
    warps: int


_NARROWEST, _WIDEST = 32, 8192
_FEW = 2048
_IDS_OF_A_THREAD = 16  # four loads of 16 bytes in flight; registers have room for no more


def tiling(vocab: int) -> Tiling:
    """The sizes for a vocabulary."""
    width = max(_NARROWEST, min(_WIDEST, pl.next_power_of_2(vocab)))
    few = min(width, _FEW)
    # of numbers in no order, the lanes have 1.11 times as many ids above the bound as there are lanes that reach it
    return Tiling(width, few, few * 3 // 4, max(4, width // _IDS_OF_A_THREAD // 32))


class Best(NamedTuple):
    """The largest number of each lane, and the first id that has it."""

    number: Float[Array, " lanes"]
    id: Int32[Array, " lanes"]

    def first(self) -> tuple[Float[Array, ""], Int32[Array, ""]]:
        """The largest of all lanes and the first id that has it."""
        most = self.number.max()
        return most, jnp.where(self.number == most, self.id, _NOBODY).min()


class Few(NamedTuple):
    """Some ids in ascending order with their numbers, minus infinity where there is none."""

    number: Float[Array, " few"]
    id: Int32[Array, " few"]
    count: Int32[Array, ""]
    """How many there are, which may be more than there is room for."""
    total: Float[Array, ""]
    """The sum of exponentials of all numbers of the vocabulary."""


@dataclass(frozen=True, slots=True)
class Passes:
    """A row of the launch and its vocabulary.

    ``barrier`` lets every thread of the program see what the others have stored.
    """

    row: Array
    vocab: int
    tile: Tiling
    access: Access
    barrier: Callable[[], None]
    few_ref: jax.Ref

    def over(self, turn: Callable[[Array, Array, State], State], state: State) -> State:
        """The state after a turn for each tile, which gets ids and which of them exist."""

        def one(index: Array, state: State) -> State:
            ids = index * self.tile.width + jnp.arange(self.tile.width, dtype=jnp.int32)
            return turn(ids, ids < self.vocab, state)

        return jax.lax.fori_loop(0, pl.cdiv(self.vocab, self.tile.width), one, state)

    def best(self, numbers: Numbers) -> Best:
        """The largest number of each lane."""

        def turn(ids: Array, valid: Array, best: Best) -> Best:
            number = numbers(ids, valid)
            better = number > best.number
            return Best(jnp.where(better, number, best.number), jnp.where(better, ids, best.id))

        lanes = jnp.arange(self.tile.width, dtype=jnp.int32)
        return self.over(turn, Best(jnp.full(lanes.shape, -jnp.inf, jnp.float32), lanes))

    def next(self, numbers: Numbers, before: tuple[Array, Array]) -> tuple[Array, Array]:
        """The largest number that comes after ``before``, a number and an id, and the first id that has it."""

        def turn(ids: Array, valid: Array, best: Best) -> Best:
            number = numbers(ids, valid)
            better = valid & _after(number, ids, before) & ((number > best.number) | (best.id == _NOBODY))
            return Best(jnp.where(better, number, best.number), jnp.where(better, ids, best.id))

        width = (self.tile.width,)
        start = Best(jnp.full(width, -jnp.inf, jnp.float32), jnp.full(width, _NOBODY, jnp.int32))
        return self.over(turn, start).first()

    def sums(self, numbers: Numbers, thresholds: Thresholds, weigh: Weigh) -> Thresholds:
        """The sums of the weights of the numbers that reach each threshold, larger than minus infinity."""

        def turn(ids: Array, valid: Array, sums: Lanes) -> Lanes:
            return _weights(numbers(ids, valid), thresholds, weigh, sums)

        nothing = jnp.zeros((self.tile.width,), jnp.float32)
        low, middle, high = self.over(turn, (nothing, nothing, nothing))
        return low.sum(), middle.sum(), high.sum()

    def copy(self, numbers: Numbers, least: Array, peak: Array) -> Few:
        """The ids whose number reaches ``least``, as far as there is room; exponentials are relative to ``peak``."""
        room, access = self.tile.few, self.access

        def turn(ids: Array, valid: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            count, total = state
            number = numbers(ids, valid)
            taken = valid & (number >= least)
            ones = taken.astype(jnp.int32)
            place = count + jnp.cumsum(ones) - ones
            access.store(self.few_ref, (self.row, place), ids, taken & (place < room))
            return count + ones.sum(), total + jnp.exp(number - peak)

        self.barrier()
        count, total = self.over(turn, (jnp.int32(0), jnp.zeros((self.tile.width,), jnp.float32)))
        self.barrier()
        place = jnp.arange(room, dtype=jnp.int32)
        there = place < count
        ids = access.load(self.few_ref, (self.row, place), there)
        return Few(numbers(ids, there), jnp.where(there, ids, _NOBODY), count, total.sum())


def next_of(few: Few, before: tuple[Array, Array]) -> tuple[Array, Array]:
    """The largest of a few numbers that comes after ``before``, a number and an id, and the first id that has it."""
    left = _after(few.number, few.id, before)
    return Best(jnp.where(left, few.number, -jnp.inf), jnp.where(left, few.id, _NOBODY)).first()


def _after(number: Array, ids: Array, before: tuple[Array, Array]) -> Array:
    return (number < before[0]) | ((number == before[0]) & (ids > before[1]))


def reached(numbers: Array, most: Array, weigh: Weigh, wanted: Array) -> Float[Array, ""]:
    """The largest threshold up to that of image ``most`` whose numbers, of one tile, weigh ``wanted``."""

    def enough(thresholds: Thresholds) -> Enough:
        nothing = jnp.zeros(numbers.shape, jnp.float32)
        sums = _weights(numbers, thresholds, weigh, (nothing, nothing, nothing))
        low, middle, high = sums
        return low.sum() >= wanted, middle.sum() >= wanted, high.sum() >= wanted

    return largest_threshold(most, enough)


def _weights(number: Array, thresholds: Thresholds, weigh: Weigh, sums: Lanes) -> Lanes:
    """The sums with the weights of the numbers that reach each threshold."""
    weight = weigh(number)
    low, middle, high = (
        lanes + jnp.where(number >= threshold, weight, 0.0) for lanes, threshold in zip(sums, thresholds, strict=True)
    )
    return low, middle, high
