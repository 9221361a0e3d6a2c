"""One worker gateway and one engine loop on a real socket, with a clock that tests move."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from api.ports import Finished, GenerationRequest, SamplingParams, Tokens
from appliance.gateway_worker import LinkSettings, WorkerGateway
from appliance.host.segments import SegmentFile, SegmentRange
from tests.support.engine_loop import EngineLoop

STRIDE = 528_384


@dataclass
class Clock:
    """A clock that tests move."""

    ns: int = 1_000_000_000

    def __call__(self) -> int:
        return self.ns

    def seconds(self) -> float:
        return self.ns / 1e9


@dataclass
class Pair:
    """One worker gateway and one engine loop on a real socket."""

    path: Path
    segments: SegmentFile
    clock: Clock
    worker: WorkerGateway
    engine: EngineLoop | None = None
    events: dict[int, list[Tokens | Finished]] = field(default_factory=dict)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let both sides run until the condition holds."""
        for _ in range(2000):
            if self.engine is not None:
                self.engine.turn()
            if condition():
                return
            await asyncio.sleep(0.001)
        raise AssertionError("the condition never came true")

    async def together(self, awaitable: Awaitable[object]) -> object:
        """The result of something that needs the engine to run."""
        task = asyncio.ensure_future(awaitable)
        await self.until(task.done)
        return task.result()


@asynccontextmanager
async def pair(tmp_path: Path, *, count: int = 8, connect: bool = True, **settings: float) -> AsyncIterator[Pair]:
    path, clock = tmp_path / "engine.sock", Clock()
    with SegmentFile.create("pair", count, STRIDE, tmp_path) as segments:
        link = LinkSettings(
            worker=0, pid=os.getpid(), socket=path, owned=SegmentRange(0, count),
            retry_first_s=0.001, retry_most_s=0.002, tick_s=0.002, **settings,
        )  # fmt: skip
        both = Pair(path, segments, clock, WorkerGateway(link, segments, clock))
        both.worker.start()
        if connect:
            both.engine = EngineLoop(path, segments, epoch=1, clock=clock.seconds)
            await both.until(lambda: both.worker.status().state == "ready")
        try:
            yield both
        finally:
            await both.worker.close()
            if both.engine is not None:
                both.engine.gateway.close(flush_s=0.0)


def request(*prompt: int, choices: int = 1, whole: bool = False, **sampling: object) -> GenerationRequest:
    params = SamplingParams(**{"max_tokens": 100, "seed": 5, **sampling})  # type: ignore[arg-type]
    return GenerationRequest(
        request_id="r1", model="m", tenant="t", prompt_ids=list(prompt), sampling=params, num_choices=choices,
        whole=whole,
    )  # fmt: skip


async def rest(generation: object) -> list[Tokens | Finished]:
    return [event async for event in generation]  # type: ignore[attr-defined]


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())
