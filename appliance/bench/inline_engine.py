"""The engine in this process, without a server: a plan's programs, the loop, and a gateway that keeps what comes out.

Owns nothing of the engine but the place of its HTTP side. For benches that ask what an engine answers.
"""

from collections.abc import Callable, Sequence

from appliance.bench.runner import BenchError
from appliance.engine import Engine
from appliance.engine_ports import Arrival, Cancellation, Emission, EngineReport
from planner.sequence import FinishReason, Sampling
from planner.sequence import Sequence as Stream


class KeepingGateway:
    """Gives out the requests it was made with, once, and keeps what comes back."""

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self._inbox: list[Arrival | Cancellation] = list(arrivals)
        self.ids: dict[int, list[int]] = {arrival.sequences[0].key: [] for arrival in arrivals}
        self.problems: list[str] = []
        self.finished = 0

    def receive(self, timeout_s: float) -> list[Arrival | Cancellation]:
        """Everything, at the first call."""
        del timeout_s
        inbox, self._inbox = self._inbox, []
        return inbox

    def admitted(self, key: int) -> None:
        """Nothing to tell anybody."""

    def refused(self, key: int, kind: str, message: str, retry_after_s: float) -> None:
        """Keep the refusal."""
        del retry_after_s
        self.problems.append(f"request {key} was refused as {kind}: {message}")

    def publish(self, emissions: list[Emission]) -> None:
        """Keep the ids."""
        for emission in emissions:
            self.ids[emission.key] += emission.ids
            self.finished += emission.finish is not None
            if emission.finish is not None and emission.finish.reason is not FinishReason.LENGTH:
                self.problems.append(
                    f"request {emission.key} ended by {emission.finish.reason}: {emission.finish.error}"
                )

    def report(self, report: EngineReport) -> None:
        """Nothing to tell anybody."""


def greedy_gateway(prompts: Sequence[Sequence[int]], new_tokens: int) -> KeepingGateway:
    """A gateway that asks for ``new_tokens`` greedy ids after each prompt; request i has key i."""
    sampling = Sampling(max_tokens=new_tokens, temperature=0.0)
    streams = [
        Stream(key, f"r{key}", "bench", list(prompt), len(prompt), sampling, arrival_s=0.0)
        for key, prompt in enumerate(prompts)
    ]
    return KeepingGateway([Arrival((stream,)) for stream in streams])


def run_to_end(
    engine: Engine, gateway: KeepingGateway, progress: Callable[[int, int], None] = lambda _done, _total: None
) -> list[list[int]]:
    """Step an engine until it has answered everything; the ids of each request in order.

    Args:
        engine: fresh, on the gateway.
        gateway: holds the requests.
        progress: called with (answered, asked) after every step.

    Raises:
        BenchError: a request was refused or ended early.
    """
    engine.step()
    while not engine.idle:
        engine.step()
        progress(gateway.finished, len(gateway.ids))
    if gateway.problems:
        raise BenchError("; ".join(gateway.problems[:3]))
    return [gateway.ids[key] for key in sorted(gateway.ids)]
