"""A node for the bench ingest: real server, worker, segments and socket, between a codec and an engine that do nothing.

Owns the two ends. The codec gives ids of a text without looking at it, so that no tokeniser is in what is timed. The
engine puts the prompt of each request into a device array, straight from its segment, and answers with the moment at
which it lay there: the digits of its monotonic clock in ns, one id a digit. That clock is the same for all processes of
a host, so whoever asked knows how long the way took. Imports jax in the engine's process only.

Run as ``python -m appliance.bench.ingest_node node --config FILE``; the worker and the engine are started by it.
"""

import os
import signal
import sys
import time
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from api.ports import ChatMessage, ModelCard
from appliance import worker
from appliance.assignment import Assignment, Notice, read_assignment, send_notice
from appliance.config import load
from appliance.host.process import die_with_parent
from appliance.host.segments import SEGMENT_TOKENS, SegmentFile
from appliance.lifecycle import Commands, serve
from appliance.telemetry import configure_logging

if TYPE_CHECKING:
    from appliance.engine_ports import Emission
    from planner.sequence import Sequence as Stream

MODEL = "ingest"
NUM_DIGITS = 19
"""Ids of an answer: as many digits as a clock in ns has for 300 years."""
ID_CHARS = 4
"""Characters of text that count as one id."""
PROMPT_IDS = SEGMENT_TOKENS - NUM_DIGITS
"""Most ids of a prompt; a longer text counts as so many."""
VOCAB = 1 << 17

_POLL_S = 0.25


class LengthCodec:
    """Ids that depend on a text's length alone; id n is written as the last digit of n."""

    def __init__(self) -> None:
        self._ids = array("i", range(PROMPT_IDS))

    def encode(self, text: str, *, parse_special: bool, tenant: str = "") -> "array[int]":
        """One id for every few characters."""
        del parse_special, tenant
        return self._ids[: max(1, len(text) // ID_CHARS)]

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        continue_last: bool = False,
        template_args: Mapping[str, Any] | None = None,
        tenant: str = "",
    ) -> "array[int]":
        """The same of all messages together."""
        del tools, continue_last, template_args
        return self.encode("".join(message.content for message in messages), parse_special=False, tenant=tenant)

    def decoder(self, prompt_ids: Sequence[int] = ()) -> "LengthCodec":
        """Nothing is held back, so this is its own decoder."""
        del prompt_ids
        return self

    def push(self, token_id: int) -> str:
        """A digit."""
        return str(token_id % 10)

    def flush(self) -> str:
        """Nothing."""
        return ""

    def token_bytes(self, token_id: int) -> bytes:
        """A digit."""
        return self.push(token_id).encode()

    def token_text(self, token_id: int) -> str:
        """A digit."""
        return self.push(token_id)


def load_text(_assignment: Assignment) -> tuple[LengthCodec, ModelCard]:
    """The codec and a card with the longest context that there is."""
    return LengthCodec(), ModelCard(name=MODEL, context=SEGMENT_TOKENS, vocab=VOCAB, has_chat_template=True)


def run_engine(assignment: Assignment) -> int:
    """Answer every request with the moment at which its prompt lay in a device array, until SIGTERM."""
    import jax  # noqa: PLC0415 - neither the node nor its worker may reach it

    from appliance.engine_ports import Arrival, EngineReport  # noqa: PLC0415
    from appliance.gateway_engine import EngineGateway  # noqa: PLC0415
    from appliance.submission import ModelLimits  # noqa: PLC0415
    from planner.prefixes import ReuseCounts  # noqa: PLC0415

    die_with_parent(assignment.parent_pid)
    stops: list[int] = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, _frame: stops.append(number))
    configure_logging(assignment.config.log.level, assignment.name)
    device = jax.devices()[0]
    count = assignment.config.num_segments
    segments = SegmentFile.attach(Path(assignment.segments_file), count, assignment.stride_bytes)
    gateway = EngineGateway(Path(assignment.socket), segments, assignment.epoch)
    gateway.open(ModelLimits(vocab=VOCAB, context=SEGMENT_TOKENS, eos_ids=frozenset()))
    send_notice(assignment.notify_fd, Notice(state="ready"))
    while not stops:
        for message in gateway.receive(_POLL_S):
            if isinstance(message, Arrival):
                gateway.admitted(message.sequences[0].key)
                gateway.publish([_answered(stream, segments, device) for stream in message.sequences])
        gateway.report(EngineReport("ready", "", 0, 0, 0, 1, 1, 0, ReuseCounts(), time.monotonic()))
    gateway.close()
    return 0


def _answered(stream: "Stream", segments: SegmentFile, device: Any) -> "Emission":
    """Put a prompt into a device array and give the time; the array goes at once."""
    import jax  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415

    from appliance.engine_ports import Emission, Finished  # noqa: PLC0415
    from planner.sequence import FinishReason  # noqa: PLC0415

    ids = np.frombuffer(segments.tokens(stream.key), np.int32, stream.prompt_len)
    jax.block_until_ready(jax.device_put(ids, device))
    digits = tuple(map(int, f"{time.monotonic_ns():0{NUM_DIGITS}d}"))
    for digit in digits:
        stream.ids.append(digit)
    finish = Finished(FinishReason.LENGTH, None, "", stream.prompt_len, 0, 0, 0.0, 0.0, 0.0)
    return Emission(stream.key, len(digits), digits, finish=finish)


def main(argv: Sequence[str]) -> int:
    """Run one of the roles: ``node --config FILE``, ``worker FILE`` or ``engine FILE``."""
    role, *_, file = argv
    if role == "worker":
        return worker.main(["", file], load_text)
    if role == "engine":
        return run_engine(read_assignment(Path(file)))
    itself = (sys.executable, "-m", "appliance.bench.ingest_node")
    return serve(load(Path(file)), Path(MODEL), Commands(worker=(*itself, "worker"), engine=(*itself, "engine")))


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as the worker does: the server's own threads need no orderly end
