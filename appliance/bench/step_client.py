"""Client: the worker's end of the engine's socket for a bench, with requests of a mix, always as many as wanted.

Owns its connection, its segments and the requests in them. It runs between two steps, on the same thread, so that the
engine's half is measured alone: sockets, packets and segments are the real ones, but nobody has to be woken.
"""

import itertools
import random
import socket
from collections.abc import Sequence
from pathlib import Path

from appliance.bench.runner import BenchError
from appliance.host.address import socket_address
from appliance.host.segments import SegmentAllocator, SegmentFile, SegmentRange
from appliance.host.wire import (
    MAX_PACKET_BYTES,
    Admitted,
    Advance,
    Attach,
    Finish,
    Refused,
    Submit,
    Welcome,
    WireSampling,
    decode_to_worker,
    encode,
)

LOGPROBS_EVERY = 8
"""One request of so many asks for log-probabilities."""
PENALTY_EVERY = 8
"""One request of so many asks for penalties."""
NUM_LOGPROBS = 5


class MixClient:
    """Keeps a number of requests in flight: whenever one has ended, the next of the mix is sent.

    Args:
        path: the engine's socket.
        segments: all of them are this client's.
        lengths: prompt and output ids of each request, in turn and again from the beginning.
        vocab: prompts are made of ids below it.
        in_flight: requests at a time, at most one a segment.
    """

    def __init__(
        self, path: Path, segments: SegmentFile, lengths: Sequence[tuple[int, int]], vocab: int, in_flight: int
    ) -> None:
        self._segments = segments
        self._free = SegmentAllocator(SegmentRange(0, segments.count))
        self._requests = enumerate(itertools.cycle(lengths))
        self._in_flight = in_flight
        self._vocab = vocab
        source = random.Random(0)  # noqa: S311 - a workload, not a secret
        longest = max(prompt for prompt, _ in lengths)
        self._ids = [source.randrange(vocab) for _ in range(longest)]
        self._epoch: int | None = None
        self._expected: dict[int, int] = {}
        self.finished = 0
        """Requests that ended as they should."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        with socket_address(path) as address:
            self._socket.connect(address)
        self._socket.setblocking(False)  # noqa: FBT003 - the only signature it has
        self._socket.send(encode(Attach(worker=0, pid=0, first_segment=0, num_segments=segments.count)))

    def turn(self) -> None:
        """Read what the engine has sent, and send requests in the place of those that ended.

        Raises:
            BenchError: a request was refused or ended otherwise than with all of its ids.
        """
        while (packet := self._packet()) is not None:
            message = decode_to_worker(packet)
            if isinstance(message, Welcome):
                self._epoch = message.epoch
            elif isinstance(message, Finish):
                self._ended(message)
            elif isinstance(message, Refused):
                raise BenchError(f"request {message.segment} was refused as {message.kind}: {message.message}")
            else:
                assert not isinstance(message, Admitted) or message.segment in self._expected, "an unknown request"
                assert not isinstance(message, Advance) or message.items, "an empty message"
        while self._epoch is not None and len(self._expected) < self._in_flight:
            self._send(self._epoch)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _packet(self) -> bytes | None:
        try:
            return self._socket.recv(MAX_PACKET_BYTES)
        except BlockingIOError:
            return None

    def _ended(self, message: Finish) -> None:
        wanted = self._expected.pop(message.segment)
        if (message.reason, message.completion_len) != ("length", wanted):
            raise BenchError(
                f"a request for {wanted} ids ended with {message.completion_len} by {message.reason} {message.error}"
            )
        self._free.give_back(message.segment)
        self.finished += 1

    def _send(self, epoch: int) -> None:
        number, (prompt, output) = next(self._requests)
        (segment,) = self._free.take(1)
        # no two begin alike, so that nothing is reused
        self._segments.write_prompt(segment, [number % self._vocab, *self._ids[: prompt - 1]], number, 0)
        self._expected[segment] = output
        penalised = number % PENALTY_EVERY == 1
        sampling = WireSampling(
            max_tokens=output,
            temperature=0.7,
            top_k=0,
            top_p=0.95,
            min_p=0.0,
            repetition_penalty=1.1 if penalised else 1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            logit_bias=(),
            seed=number,
            min_tokens=0,
            ignore_eos=False,
            stop_token_ids=(),
            top_logprobs=NUM_LOGPROBS if number % LOGPROBS_EVERY == 0 else -1,
        )
        submit = Submit(
            segments=(segment,),
            epoch=epoch,
            owner_pid=0,
            request_id=f"r{number}",
            tenant="bench",
            sampling=sampling,
            grammar_id=0,
            deadline_ns=0,
            traceparent="",
        )
        self._socket.send(encode(submit))
