"""The worker's half of the seam between HTTP and the engine: implements ``api.ports.Generator`` over packets.

Owns the connection to the engine, this worker's segments and the requests in flight. Reads ids from segments and never
from packets; never imports jax.

A request's life: take one segment a choice, write the prompt, send ``Submit``, wait for ``Admitted`` or ``Refused``,
follow ``Advance`` until ``Finish``. A segment is free again after its ``Finish``, its ``Refused``, or the ``Welcome``
of a new connection, which the engine sends only when nothing it runs still writes to this worker's segments. When the
connection ends or the engine falls silent, every open choice ends at once with a typed error and the worker reconnects.
"""

import asyncio
import secrets
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from api.errors import ApiError, BadRequestError, ContextLengthError, NotReadyError, OverloadedError
from api.ports import EngineStatus, GenerationRequest
from appliance.assignment import read_cause
from appliance.generation import ChoiceProgress, WorkerGeneration
from appliance.host.channel import Channel, ChannelError, connect
from appliance.host.segments import SegmentAllocator, SegmentFile, SegmentRange, SegmentsExhaustedError
from appliance.host.wire import (
    Admitted,
    Advance,
    Attach,
    Cancel,
    Finish,
    Progress,
    Refused,
    Status,
    Submit,
    ToWorker,
    Welcome,
    WireError,
    WireSampling,
)

_SEED_MASK = 0xFFFF_FFFF_FFFF_FFFF
_STATES = frozenset({"starting", "ready", "draining", "lost"})


LOST_AFTER_S = 10.0
"""Longest silence of a running engine, which reports twice a second between its steps."""


def lost_after_s(step_timeout_s: float) -> float:
    """The longest silence on a host whose steps may take ``step_timeout_s``: a sixth of that where it is longer."""
    return max(LOST_AFTER_S, step_timeout_s / 6)


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """How a worker holds its connection; durations in seconds.

    ``lost_after_s`` is the longest silence of a running engine, which otherwise reports twice a second;
    ``request_timeout_s`` is the deadline of a request that names none, 0 = none.
    """

    worker: int
    pid: int
    socket: Path
    owned: SegmentRange
    lost_after_s: float = LOST_AFTER_S
    request_timeout_s: float = 0.0
    retry_first_s: float = 0.05
    retry_most_s: float = 1.0
    tick_s: float = 0.25


class WorkerGateway:
    """Runs requests of one worker process; see ``api.ports.Generator``. Lives on one event loop."""

    def __init__(
        self, settings: LinkSettings, segments: SegmentFile, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        """Prepare; ``start`` connects. ``clock_ns`` is the clock that the engine uses too."""
        self._settings = settings
        self._segments = segments
        self._clock_ns = clock_ns
        self._allocator = SegmentAllocator(settings.owned)
        self._channel: Channel | None = None
        self._ended = asyncio.Event()
        self._epoch: int | None = None
        self._was_welcome = False
        self._heard_ns = 0
        self._status: Status | None = None
        self._cause = "the engine has not answered yet"
        self._before = ""
        self._choices: dict[int, ChoiceProgress] = {}
        self._awaited: dict[int, asyncio.Future[None]] = {}
        self._task: asyncio.Task[None] | None = None
        self._submitted = 0
        self.refused = 0
        """Requests that found no free segment."""
        self._draining = ""

    @property
    def outstanding(self) -> int:
        """Choices whose end is not yet known."""
        return sum(not choice.is_finished for choice in self._choices.values())

    @property
    def free_segments(self) -> int:
        """Segments that no request holds."""
        return self._allocator.free

    def start(self) -> None:
        """Begin to connect, and to reconnect for as long as the gateway is open."""
        self._task = asyncio.get_running_loop().create_task(self._keep_connected(), name="engine-link")

    async def close(self) -> None:
        """End every open choice with an error and close the connection."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._channel is not None:
            self._channel.close()
        self._fail_all("the worker closed its gateway")

    def drain(self, reason: str) -> None:
        """Refuse new requests from now on; running ones go on."""
        self._draining = reason

    def give_up(self, cause: str) -> None:
        """Cancel every open choice, here at once and then in the engine."""
        running = [choice for choice in self._choices.values() if not choice.is_finished]
        self._cancel(running)
        for choice in running:
            choice.fail(cause, "cancelled")
        self._refuse_awaited(cause)

    def status(self) -> EngineStatus:
        """What is known of the engine now."""
        now = self._clock_ns()
        if self._draining:
            return EngineStatus(state="draining", reason=self._draining)
        if self._epoch is None or self._status is None:
            return EngineStatus(state="lost" if self._was_welcome else "starting", reason=self._cause)
        status = self._status
        state, reason = status.state, status.reason
        if self._is_silent(now):
            state, reason = "lost", self._silence(now)
        elif state == "starting" and self._before:
            reason = f"{reason}; {self._before}"
        elif state not in _STATES:
            state, reason = "lost", reason or f"the engine reports the state {state!r}"
        return EngineStatus(
            state=state,  # pyright: ignore[reportArgumentType] - narrowed by _STATES
            reason=reason,
            running=status.running,
            waiting=status.waiting,
            free_pages=status.free_pages,
            total_pages=status.total_pages,
            cached_pages=status.cached_pages,
            hit_rate=status.hit_rate,
            last_step_age_s=max(0.0, (now - status.last_step_ns) / 1e9) if status.last_step_ns else 0.0,
        )

    async def submit(self, request: GenerationRequest) -> WorkerGeneration:
        """Hand a request to the engine; returns once it is in the engine's queue.

        Raises:
            OverloadedError: this worker's segments or the engine's queue are full.
            NotReadyError: the engine is starting, draining, silent or gone.
            ContextLengthError: the prompt can never fit.
            BadRequestError: the request is too large for a packet, or the engine found it invalid.
        """
        status = self.status()
        if status.state != "ready" or self._channel is None or self._epoch is None:
            raise NotReadyError(f"the engine is {status.state}: {status.reason or 'no reason given'}")
        try:
            taken = self._allocator.take(request.num_choices)
        except SegmentsExhaustedError as error:
            self.refused += 1
            raise OverloadedError(str(error), retry_after_s=1.0) from error
        generation = self._prepare(request, taken)
        first = taken[0]
        admitted = asyncio.get_running_loop().create_future()
        self._awaited[first] = admitted
        try:
            self._channel.send(self._message(request, taken, self._epoch))
            await admitted
        except WireError as error:
            self._release(taken)
            raise BadRequestError(f"the request's parameters do not fit: {error}") from error
        except ChannelError as error:
            for choice in generation.choices:
                choice.fail(str(error))
            raise NotReadyError(f"the engine is lost: {error}") from error
        except asyncio.CancelledError:
            generation.cancel()
            raise
        finally:
            self._awaited.pop(first, None)
        return generation

    def _prepare(self, request: GenerationRequest, taken: Sequence[int]) -> WorkerGeneration:
        given = request.prompt_ids
        ids = given if isinstance(given, array) else array("i", given)
        wake = asyncio.Event()
        now = self._clock_ns()
        choices: list[ChoiceProgress] = []
        for index, segment in enumerate(taken):
            self._submitted += 1
            context_id = (self._settings.worker << 48) | (self._submitted & 0xFFFF_FFFF_FFFF)
            self._segments.write_prompt(segment, ids, context_id, now)
            choice = ChoiceProgress(index, tuple(taken), len(ids), request.sampling.top_logprobs, wake)
            choices.append(choice)
            self._choices[segment] = choice
        return WorkerGeneration(choices, self._segments, wake, self._cancel)

    def _message(self, request: GenerationRequest, taken: tuple[int, ...], epoch: int) -> Submit:
        sampling = request.sampling
        limit_s = request.deadline_s if request.deadline_s is not None else self._settings.request_timeout_s
        return Submit(
            segments=taken,
            epoch=epoch,
            owner_pid=self._settings.pid,
            request_id=request.request_id,
            tenant=request.tenant,
            sampling=WireSampling(
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                repetition_penalty=sampling.repetition_penalty,
                presence_penalty=sampling.presence_penalty,
                frequency_penalty=sampling.frequency_penalty,
                logit_bias=sampling.logit_bias,
                seed=secrets.randbits(64) if sampling.seed is None else sampling.seed & _SEED_MASK,
                min_tokens=sampling.min_tokens,
                ignore_eos=sampling.ignore_eos,
                stop_token_ids=sampling.stop_token_ids,
                top_logprobs=-1 if sampling.top_logprobs is None else sampling.top_logprobs,
            ),
            grammar_id=0,
            deadline_ns=self._clock_ns() + int(limit_s * 1e9) if limit_s > 0 else 0,
            traceparent=request.traceparent or "",
            whole=request.whole,
            precious=request.keep_prefix,
        )

    def _cancel(self, choices: Sequence[ChoiceProgress]) -> None:
        held = tuple(choice.segment for choice in choices if self._choices.get(choice.segment) is choice)
        if held and self._channel is not None and self._channel.is_open:
            try:
                self._channel.send(Cancel(segments=held))
            except ChannelError:
                return  # the loss has already ended every open choice

    def _release(self, segments: Sequence[int]) -> None:
        for segment in segments:
            del self._choices[segment]
            self._allocator.give_back(segment)

    async def _keep_connected(self) -> None:
        pause_s = self._settings.retry_first_s
        while True:
            try:
                peer = connect(self._settings.socket)
            except ChannelError as error:
                self._cause = read_cause(self._settings.socket) or str(error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, self._settings.retry_most_s)
                continue
            pause_s = self._settings.retry_first_s
            self._before = read_cause(self._settings.socket)
            self._ended.clear()
            self._heard_ns = self._clock_ns()
            owned = self._settings.owned
            channel = Channel(peer, self._received, self._lost, max_queued=4 * owned.count + 16)
            self._channel = channel
            try:
                channel.send(Attach(self._settings.worker, self._settings.pid, owned.first, owned.count))
                await self._watch(channel)
            except ChannelError as error:
                self._cause = str(error)
            await asyncio.sleep(pause_s)

    async def _watch(self, channel: Channel) -> None:
        """Return when the connection has ended; end it when the engine falls silent."""
        while channel.is_open:
            try:
                await asyncio.wait_for(self._ended.wait(), self._settings.tick_s)
            except TimeoutError:
                now = self._clock_ns()
                if self._is_silent(now):
                    channel.close()
                    self._lost(self._silence(now))

    def _is_silent(self, now_ns: int) -> bool:
        """Whether a running engine has been silent too long; one that loads may take its time."""
        running = self._epoch is not None and self._status is not None and self._status.state != "starting"
        return running and now_ns - self._heard_ns > self._settings.lost_after_s * 1e9

    def _silence(self, now_ns: int) -> str:
        return (
            f"no sign of life for {(now_ns - self._heard_ns) / 1e9:.1f} s,"
            f" the bound is {self._settings.lost_after_s:g} s"
        )

    def _lost(self, cause: str) -> None:
        self._epoch = None
        self._status = None
        self._cause = cause
        self._fail_all(f"engine lost: {cause}; send the request again")
        self._ended.set()

    def _fail_all(self, cause: str) -> None:
        for choice in self._choices.values():
            choice.fail(cause)
        self._refuse_awaited(cause)

    def _refuse_awaited(self, cause: str) -> None:
        for admitted in self._awaited.values():
            if not admitted.done():
                admitted.set_exception(NotReadyError(cause))

    def _received(self, message: ToWorker) -> None:
        self._heard_ns = self._clock_ns()
        match message:
            case Advance(items=items):
                for item in items:
                    self._advanced(item)
            case Finish():
                self._finished(message)
            case Admitted(segment=segment):
                admitted = self._awaited.get(segment)
                if admitted is not None and not admitted.done():
                    admitted.set_result(None)
            case Refused():
                self._refused(message)
            case Status():
                self._status = message
            case Welcome(epoch=epoch):
                self._release(tuple(self._choices))
                self._epoch = epoch
                self._was_welcome = True

    def _advanced(self, item: Progress) -> None:
        choice = self._choices.get(item.segment)
        if choice is not None:
            choice.advance(item)

    def _finished(self, message: Finish) -> None:
        choice = self._choices.get(message.segment)
        if choice is not None:
            choice.finish(message, self._segments)
            self._release((message.segment,))

    def _refused(self, message: Refused) -> None:
        first = self._choices.get(message.segment)
        if first is None:
            return
        error = _refusal(message)
        for segment in first.siblings:
            self._choices[segment].fail(str(error))
        self._release(first.siblings)
        admitted = self._awaited.get(message.segment)
        if admitted is not None and not admitted.done():
            admitted.set_exception(error)


def _refusal(message: Refused) -> ApiError:
    match message.kind:
        case "overloaded":
            return OverloadedError(message.message, retry_after_s=message.retry_after_s)
        case "too_long":
            return ContextLengthError(message.message)
        case "invalid":
            return BadRequestError(message.message)
        case _:
            return NotReadyError(message.message)
