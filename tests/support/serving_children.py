"""Children for tests of whole processes: a real worker over a byte codec, a real engine over the arithmetic model.

Run as ``python -m tests.support.serving_children ROLE [OPTION] assignment.json``. Roles: ``worker``; ``engine`` with a
delay in ms for each id; ``broken-engine`` with the reason why it cannot load; ``engine-unless`` with a file that holds
such a reason while there is one. SIGUSR2 lets the next step of an engine fail; a worker that is to encode ``HANG`` does
not come back from that. The codec maps id n to the character chr(32 + n), so that ids 0 to 94 are printable and every
text of a prompt can be sent.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from api.ports import ChatMessage, ModelCard
from appliance import engine_main, worker
from appliance.assignment import Assignment
from appliance.engine import Engine
from appliance.submission import ModelLimits
from tests.support.arithmetic_model import VOCAB, ArithmeticModel

CONTEXT = 1024
HANG = "hang here"


class ByteCodec:
    """Id n is chr(32 + n)."""

    def encode(self, text: str, *, parse_special: bool, tenant: str = "") -> list[int]:
        if text == HANG:
            time.sleep(1e6)
        return [max(0, min(ord(character) - 32, VOCAB - 1)) for character in text]

    def encode_chat(self, messages: Sequence[ChatMessage], **_: object) -> list[int]:
        return self.encode("\n".join(message.content for message in messages), parse_special=False)

    def decoder(self, prompt_ids: Sequence[int] = ()) -> "ByteCodec":
        return self

    def push(self, token_id: int) -> str:
        return chr(32 + token_id)

    def flush(self) -> str:
        return ""

    def token_bytes(self, token_id: int) -> bytes:
        return chr(32 + token_id).encode()

    def token_text(self, token_id: int) -> str:
        return chr(32 + token_id)


def load_text(assignment: Assignment) -> tuple[ByteCodec, ModelCard]:
    return ByteCodec(), ModelCard(name="arithmetic", context=CONTEXT, vocab=VOCAB, has_chat_template=True)


def build_with(delay_s: float, fail: str = ""):
    def build(assignment, gateway, observer, announce):
        from planner.buckets import Lattice
        from planner.pages import PagePool
        from planner.schedule import Scheduler
        from planner.schedule_values import SchedulerSettings

        announce("adding up")
        if fail:
            raise RuntimeError(fail)
        lattice = Lattice(decode_slots=(8,), prefill_chunks=(64,), prefill_slots=4, widths=(CONTEXT // 16,))
        model = ArithmeticModel(lattice, 256, 16, on_write=lambda _slot, _page: time.sleep(delay_s))
        signal.signal(signal.SIGUSR2, lambda *_: setattr(model, "fault", MemoryError("out of device memory")))
        scheduler = Scheduler(lattice, PagePool(256, 16), SchedulerSettings(prefill_budget=64))
        engine = Engine("weights", model.state(), model.programs(), scheduler, gateway, vocab=VOCAB, metrics=observer)
        return engine, ModelLimits(VOCAB, CONTEXT, frozenset())

    return build


if __name__ == "__main__":
    role, *options, _ = sys.argv[1:]
    if role == "worker":
        code = worker.main(["", sys.argv[-1]], load_text)
        sys.stderr.flush()
        os._exit(code)
    if role == "broken-engine":
        sys.exit(engine_main.main(["", sys.argv[-1]], build_with(0.0, options[0])))
    if role == "engine-unless":
        reason = Path(options[0])
        said = reason.read_text() if reason.exists() else ""
        sys.exit(engine_main.main(["", sys.argv[-1]], build_with(0.0, said)))
    sys.exit(engine_main.main(["", sys.argv[-1]], build_with(float(options[0]) / 1000)))
