"""Long texts: ids of one plain encode, made from blocks that are encoded on all cores or known already.

Owns the blocks, the threads and the order of both. Reads ``cuts`` for where a text may be divided; what an engine makes
of a block, and nothing else, decides about ids.

A block is the text between two cuts, at least ``BLOCK_CHARS`` long, counted from the start of its piece. Since a cut
changes no id (``cuts`` has the proof), the ids of a piece are those of its blocks one after the other, and the ids of a
block are a function of its text alone. So blocks may be encoded at the same time, and the ids of one may be kept for
every other text that has it, of which the same tenant's texts with the same beginning are the common case.
"""

import os
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from tokenizers import Tokenizer as Engine

from appliance.model.cuts import Cuts
from appliance.model.known_ids import Keys, KnownIds

BLOCK_CHARS = 8192
"""Shortest block. Less would be found again in more places, and would cost more to find."""
KEPT_CHARS = 64
"""Ids of shorter blocks are made as quickly as they are found."""


class Piece(NamedTuple):
    """A text, the number of the engine that encodes it, and the id of the control token behind it, if there is one."""

    way: int
    text: str
    then: int | None = None


class _Block(NamedTuple):
    """Part of a piece, from ``start`` to ``end``."""

    piece: Piece
    start: int
    end: int

    @property
    def text(self) -> str:
        return self.piece.text[self.start : self.end]

    @property
    def is_last(self) -> bool:
        return self.end == len(self.piece.text)


class LongText:
    """Encodes pieces of text over several engines that share one vocabulary. Thread-safe.

    Args:
        engines: the ways to encode; they differ in what they do at a text's start and with control tokens.
        cuts: where texts may be divided, valid for each of the engines.
        known: ids that are kept.
        threads: how many encode at the same time, the caller's own included; None = the cores of this process.
        block_chars: least length of a block. Texts below two of them are encoded at once, by who asks.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        cuts: Cuts,
        known: KnownIds,
        threads: int | None = None,
        block_chars: int = BLOCK_CHARS,
    ) -> None:
        self._engines = tuple(engines)
        self._cuts = cuts
        self._known = known
        self._helpers = (len(os.sched_getaffinity(0)) if threads is None else threads) - 1
        self._block_chars = block_chars
        self._pool = ThreadPoolExecutor(max(1, self._helpers), thread_name_prefix="encode")

    def encode(self, pieces: Sequence[Piece], tenant: str) -> "array[int]":
        """The ids of all pieces in order, each as its engine gives them in one call, with the control tokens between.

        Raises:
            Exception: what the engine raises for a text that is none (half a surrogate pair).
        """
        if sum(len(piece.text) for piece in pieces) < 2 * self._block_chars:
            blocks = [_Block(piece, 0, len(piece.text)) for piece in pieces]
            made = [self._ids(block) for block in blocks]
        else:
            blocks = [block for piece in pieces for block in self._blocks(piece)]
            made = self._through_known(blocks, tenant)
        whole = array("i")
        for block, ids in zip(blocks, made, strict=True):
            whole.extend(ids)
            if block.is_last and block.piece.then is not None:
                whole.append(block.piece.then)
        return whole

    def _blocks(self, piece: Piece) -> list[_Block]:
        """A piece, divided; each part is what has to be given to the engine."""
        cuts, length, least = self._cuts, len(piece.text), self._block_chars
        blocks: list[_Block] = []
        start, wanted = 0, least
        while cuts.known and wanted <= length - least:
            at = cuts.find(piece.text, wanted)
            if at is None:
                wanted += least
                continue
            blocks.append(_Block(piece, start, at))
            start = at + cuts.skipped
            wanted = at + least
        return [*blocks, _Block(piece, start, length)]

    def _through_known(self, blocks: Sequence[_Block], tenant: str) -> "list[array[int]]":
        """The ids of each block; those that are new are encoded and kept."""
        if not self._known.keeps:
            return self._encoded(blocks)
        keys = Keys(tenant)
        named = [
            keys.key(block.piece.way, block.text) if block.end - block.start >= KEPT_CHARS else None for block in blocks
        ]
        found = [None if key is None else self._known.get(key) for key in named]
        missing = [index for index, ids in enumerate(found) if ids is None]
        for index, ids in zip(missing, self._encoded([blocks[index] for index in missing]), strict=True):
            found[index] = ids
            key = named[index]
            if key is not None:
                self._known.put(key, ids)
        return [ids for ids in found if ids is not None]

    def _encoded(self, blocks: Sequence[_Block]) -> "list[array[int]]":
        """The ids of each block, encoded by this thread and by those of the pool that are free.

        Whoever is free takes the next block, so that a caller never waits for the texts of another.
        """
        made: list[array[int]] = [_NONE] * len(blocks)
        order = iter(range(len(blocks)))

        def work() -> None:
            for index in order:
                made[index] = self._ids(blocks[index])

        helping = [self._pool.submit(work) for _ in range(min(self._helpers, len(blocks) - 1))]
        try:
            work()
        finally:
            running = [helper for helper in helping if not helper.cancel()]
        for helper in running:
            helper.result()
        return made

    def _ids(self, block: _Block) -> "array[int]":
        if not block.text:
            return _NONE
        (encoding,) = self._engines[block.piece.way].encode_batch_fast([block.text], add_special_tokens=False)
        return array("i", encoding.ids)


_NONE: "array[int]" = array("i")
