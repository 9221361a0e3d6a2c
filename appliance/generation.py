"""A running request as an API worker sees it: what the engine has published and what the client has taken.

Owns the progress of each choice between a message from the engine and the consumer's next read. Ids stay in the segment
until they are read, so a slow consumer costs four bytes a token at most and never a queue of events. Never touches the
socket: cancelling goes through a callable that the gateway hands in.
"""

import asyncio
import struct
from collections.abc import Callable, Sequence
from typing import Literal, Self

from api.ports import Finished, TokenLogprob, Tokens
from appliance.host.segments import SegmentFile
from appliance.host.wire import Finish, Progress

MAX_EVENT_IDS = 512
"""Most ids in one event, so that a consumer that fell behind returns to its loop between pieces."""

_PAIR = struct.Struct("<if")
_REASONS = frozenset({"stop", "length", "cancelled", "error"})


class ChoiceProgress:
    """One choice: the segment it runs in, how far the engine is and how far the consumer is."""

    __slots__ = (
        "_available", "_finished", "_logprobs", "_muted", "_prompt_len", "_record_bytes", "_tail", "_tail_start",
        "_taken", "_wake", "index", "reported", "segment", "siblings",
    )  # fmt: skip

    def __init__(
        self, index: int, siblings: tuple[int, ...], prompt_len: int, top_logprobs: int | None, wake: asyncio.Event
    ) -> None:
        """Begin with nothing published.

        Args:
            index: which choice of the request this is.
            siblings: the segments of all its choices, in order.
            prompt_len: ids of the prompt.
            top_logprobs: alternatives a token, None without log-probabilities.
            wake: set whenever there is something new.
        """
        self.index = index
        self.siblings = siblings
        self.segment = siblings[index]
        self.reported = False
        self._prompt_len = prompt_len
        self._record_bytes = 0 if top_logprobs is None else _PAIR.size * (1 + top_logprobs)
        self._wake = wake
        self._available = 0
        self._taken = 0
        self._logprobs = bytearray()
        self._tail: list[int] | None = None
        self._tail_start = 0
        self._muted = False
        self._finished: Finished | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the end is known, delivered or not."""
        return self._finished is not None

    def unread(self, segments: SegmentFile) -> int:
        """Ids that the engine has published and nobody has taken, heard of or not; 0 once muted."""
        if self._muted:
            return 0
        made = self._available if self._finished is not None else segments.completion_len(self.segment)
        return max(made, self._available) - self._taken

    def advance(self, progress: Progress) -> None:
        """Note what the engine has published; nothing once muted or finished."""
        if self._muted or self._finished is not None:
            return
        self._available = max(self._available, progress.completion_len)
        self._logprobs += progress.logprobs
        self._wake.set()

    def finish(self, message: Finish, segments: SegmentFile) -> None:
        """Note the end and copy what is unread, after which the segment may be used again."""
        if self._finished is not None:
            return
        if not self._muted:
            self._available = max(self._available, message.completion_len)
            start = self._prompt_len + self._taken
            self._tail = segments.read_ids(self.segment, start, self._prompt_len + self._available)
            self._tail_start = self._taken
        reason = message.reason if message.reason in _REASONS else "error"
        self._finished = Finished(
            choice=self.index,
            reason=reason,  # pyright: ignore[reportArgumentType] - narrowed by _REASONS
            stop_token_id=message.stop_token_id if message.stop_token_id >= 0 else None,
            cached_tokens=message.cached_tokens,
            created_tokens=message.created_tokens,
            error=message.error or (f"the engine gave reason {message.reason!r}" if reason != message.reason else ""),
            queue_s=message.queue_s,
            prefill_s=message.prefill_s,
            decode_s=message.decode_s,
        )
        self._wake.set()

    def fail(self, cause: str, reason: Literal["error", "cancelled"] = "error") -> None:
        """End now, with a cause for people; what is unread is dropped and later messages are ignored."""
        if self._finished is None:
            self.mute()
            self._finished = Finished(choice=self.index, reason=reason, error=cause)
            self._wake.set()

    def mute(self) -> None:
        """Deliver no more ids; the end is still delivered."""
        self._muted = True
        self._available = self._taken
        self._logprobs.clear()
        self._tail = None

    def take(self, segments: SegmentFile) -> Tokens | Finished | None:
        """The next event of this choice, or None when there is nothing new."""
        count = min(self._available - self._taken, MAX_EVENT_IDS)
        if self._record_bytes:
            count = min(count, len(self._logprobs) // self._record_bytes)
        if count > 0:
            return self._take_tokens(segments, count)
        if self._finished is not None and not self.reported:
            self.reported = True
            return self._finished
        return None

    def _take_tokens(self, segments: SegmentFile, count: int) -> Tokens:
        if self._tail is None:
            start = self._prompt_len + self._taken
            ids = segments.read_ids(self.segment, start, start + count)
        else:
            start = self._taken - self._tail_start
            ids = self._tail[start : start + count]
        self._taken += count
        logprobs: tuple[TokenLogprob, ...] = ()
        if self._record_bytes:
            used = count * self._record_bytes
            logprobs = decode_logprobs(bytes(self._logprobs[:used]), self._record_bytes // _PAIR.size)
            del self._logprobs[:used]
        return Tokens(choice=self.index, ids=tuple(ids), logprobs=logprobs)


class WorkerGeneration:
    """A submitted request; see ``api.ports.Generation``. Iterated by one consumer."""

    def __init__(
        self,
        choices: Sequence[ChoiceProgress],
        segments: SegmentFile,
        wake: asyncio.Event,
        cancel: Callable[[Sequence[ChoiceProgress]], None],
    ) -> None:
        """Follow ``choices``; ``cancel`` is called at most once a choice, with those that are still running."""
        self.choices = tuple(choices)
        self._segments = segments
        self._wake = wake
        self._cancel = cancel
        self._cancelled: set[int] = set()

    @property
    def unread(self) -> int:
        """Ids that the engine has published and nobody has taken; see ``api.ports.Generation``."""
        return sum(choice.unread(self._segments) for choice in self.choices)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Tokens | Finished:
        """The next event, choices in turn.

        Raises:
            StopAsyncIteration: every choice has delivered its ``Finished``.
        """
        while True:
            self._wake.clear()
            for _ in self.choices:
                choice = self.choices[0]
                self.choices = (*self.choices[1:], choice)
                event = choice.take(self._segments)
                if event is not None:
                    return event
            if all(choice.reported for choice in self.choices):
                raise StopAsyncIteration
            await self._wake.wait()

    def cancel(self, choice: int | None = None) -> None:
        """Give up one choice, or all; see ``api.ports.Generation.cancel``."""
        wanted = [
            progress
            for progress in self.choices
            if (choice is None or progress.index == choice)
            and not progress.is_finished
            and progress.index not in self._cancelled
        ]
        for progress in wanted:
            self._cancelled.add(progress.index)
            progress.mute()
        if wanted:
            self._cancel(wanted)


def decode_logprobs(packed: bytes, pairs: int) -> tuple[TokenLogprob, ...]:
    """Records of ``pairs`` pairs (id, log-probability), the chosen one first; see ``appliance.host.wire.Progress``."""
    flat = list(_PAIR.iter_unpack(packed))
    return tuple(
        TokenLogprob(flat[start][0], flat[start][1], tuple(flat[start + 1 : start + pairs]))
        for start in range(0, len(flat), pairs)
    )
