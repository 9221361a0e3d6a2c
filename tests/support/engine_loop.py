"""A stand-in for the engine behind a real ``EngineGateway``: tests say what it emits, in the test's own thread."""

from collections.abc import Callable
from pathlib import Path

from appliance.engine_ports import Arrival, Cancellation, Emission, EngineReport, Finished
from appliance.gateway_engine import EngineGateway
from appliance.host.segments import SegmentFile
from appliance.submission import ModelLimits
from planner.prefixes import ReuseCounts
from planner.sequence import FinishReason, Sequence

LIMITS = ModelLimits(vocab=1000, context=4096, eos_ids=frozenset({2}))


class EngineLoop:
    """Admits everything; emits and finishes on demand."""

    def __init__(
        self,
        path: Path,
        segments: SegmentFile,
        epoch: int = 1,
        limits: ModelLimits = LIMITS,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Listen and report ready."""
        self.gateway = (
            EngineGateway(path, segments, epoch) if clock is None else EngineGateway(path, segments, epoch, clock)
        )
        self.gateway.open(limits)
        self.sequences: dict[int, Sequence] = {}
        self.cancelled: list[int] = []
        self.refuse: tuple[str, str, float] | None = None
        self.report("ready")

    def report(self, state: str, reason: str = "", **counts: int) -> None:
        """Tell workers a state."""
        self.gateway.report(
            EngineReport(
                state=state,  # type: ignore[arg-type]
                reason=reason,
                running=counts.get("running", 0),
                waiting=counts.get("waiting", 0),
                waiting_tokens=0,
                free_pages=counts.get("free_pages", 7),
                total_pages=10,
                cached_pages=counts.get("cached_pages", 0),
                reuse=ReuseCounts(counts.get("prompt_tokens", 0), counts.get("reused_tokens", 0)),
                last_step_s=1.0,
            )
        )

    def turn(self) -> None:
        """Take in what came: admit or refuse requests, finish what is cancelled."""
        for message in self.gateway.receive(0.0):
            if isinstance(message, Cancellation):
                self._cancel(message)
            else:
                self._arrive(message)

    def emit(self, key: int, ids: tuple[int, ...], logprobs: tuple = (), finish: str = "", **ending: object) -> None:
        """Publish new ids of one sequence, and its end."""
        sequence = self.sequences[key]
        for token_id in ids:
            sequence.ids.append(token_id)
        finished = None
        if finish:
            del self.sequences[key]
            finished = Finished(
                reason=FinishReason(finish),
                stop_id=ending.get("stop_id"),  # type: ignore[arg-type]
                error=str(ending.get("error", "")),
                prompt_len=sequence.prompt_len,
                cached_tokens=int(ending.get("cached_tokens", 0)),  # type: ignore[call-overload]
                created_tokens=int(ending.get("created_tokens", 0)),  # type: ignore[call-overload]
                queue_s=0.1,
                prefill_s=0.2,
                decode_s=0.3,
            )
        self.gateway.publish([Emission(key, sequence.completion_len, ids, logprobs, finished)])

    def _arrive(self, message: Arrival) -> None:
        key = message.sequences[0].key
        if self.refuse is not None:
            self.gateway.refused(key, *self.refuse)
            return
        for sequence in message.sequences:
            self.sequences[sequence.key] = sequence
        self.gateway.admitted(key)

    def _cancel(self, message: Cancellation) -> None:
        for key in message.keys:
            if key in self.sequences:
                self.cancelled.append(key)
                self.emit(key, (), finish="cancelled")
