"""The engine's half of the seam between HTTP and the engine: sequences in, published ids out, over packets.

Owns the listening socket, the workers' connections and what each of them has not been told yet. Runs on the engine's
thread, inside ``receive`` and ``publish``; never blocks longer than ``receive`` is told to, never starts a thread,
never trusts a packet. Completion ids are in their segments before it hears of them: a sequence appends them there.

A slow worker costs the engine nothing: what it has not been told yet is one number a sequence (and the
log-probabilities it asked for, up to a bound, past which its connection is closed). A worker that dies closes its
connection, and everything it was running is cancelled. Its successor in the same segments is welcomed only once all of
that has ended.
"""

import os
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from appliance.engine_ports import Arrival, Cancellation, Emission, EngineReport
from appliance.host.address import socket_address
from appliance.host.segments import SegmentError, SegmentFile, SegmentRange
from appliance.host.wire import (
    MAX_PACKET_BYTES,
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
    decode_to_engine,
    encode,
)
from appliance.submission import ModelLimits, SubmissionError, make_sequences

STATUS_INTERVAL_S = 0.4
MAX_UNSENT_LOGPROB_BYTES = 8 * 1024 * 1024
_ADVANCE_BUDGET_BYTES = 128 * 1024
_ITEM_BYTES = 24
_MAX_READS = 64
_PEERCRED = struct.Struct("3i")
_PAIR = struct.Struct("<if")

_log = structlog.get_logger("zccp.gateway")


@dataclass(slots=True, eq=False)
class _Stream:
    """One sequence as its worker sees it; ``peer`` None: the worker is gone and only the end is awaited."""

    key: int
    siblings: tuple[int, ...]
    peer: "_Peer | None"
    prompt_len: int
    record_bytes: int
    whole: bool
    written: int = 0
    told: int = 0
    logprobs: bytearray = field(default_factory=bytearray)
    finish: Finish | None = None


@dataclass(slots=True, eq=False)
class _Peer:
    """One worker's connection. ``owned`` is None before ``Attach``; ``welcome``: its segments are not quiet yet."""

    socket: socket.socket
    pid: int
    owned: SegmentRange | None = None
    worker: int = -1
    welcome: bool = False
    outbox: deque[bytes] = field(default_factory=deque[bytes])
    unsent: dict[int, _Stream] = field(default_factory=dict[int, _Stream])
    unsent_logprob_bytes: int = 0
    writing: bool = False


class GatewayError(RuntimeError):
    """The engine's socket cannot be opened; the message gives path and remedy."""


class EngineGateway:
    """Implements ``appliance.engine_ports.Gateway`` for the workers of this node."""

    def __init__(
        self,
        path: Path,
        segments: SegmentFile,
        epoch: int,
        clock: Callable[[], float] = time.monotonic,
        pulse: Callable[[], None] = lambda: None,
    ) -> None:
        """Listen at ``path``, mode 0600; an old socket file there is replaced.

        ``pulse`` is called with every status that ``receive`` sends, about twice a second while the engine turns.

        Raises:
            GatewayError: the path is too long for a socket or cannot be bound.
        """
        self._segments = segments
        self._epoch = epoch
        self._clock = clock
        self._pulse = pulse
        self._limits: ModelLimits | None = None
        self._path = path
        self._selector = selectors.DefaultSelector()
        self._listener = _listen(path)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._peers: list[_Peer] = []
        self._streams: dict[int, _Stream] = {}
        self._inbox: list[Arrival | Cancellation] = []
        self._buffer = bytearray(MAX_PACKET_BYTES + 1)
        self._view = memoryview(self._buffer)
        self._status = _starting(epoch, "loading")
        self._told_status_s = float("-inf")

    @property
    def memory(self) -> memoryview:
        """The memory of all segments."""
        return self._segments.memory

    @property
    def live_keys(self) -> frozenset[int]:
        """Segments that a sequence may still write to."""
        return frozenset(self._streams)

    def announce(self, reason: str) -> None:
        """Say what start-up is doing, and serve the connections meanwhile."""
        self._status = _starting(self._epoch, reason)
        self._tell_status()
        self._poll(0.0)

    def open(self, limits: ModelLimits) -> None:
        """Take requests from now on, checked against the limits of the loaded model."""
        self._limits = limits

    def receive(self, timeout_s: float) -> list[Arrival | Cancellation]:
        """Requests and cancellations since the last call; waits for the first at most ``timeout_s``."""
        self._poll(0.0 if self._inbox else min(timeout_s, STATUS_INTERVAL_S))
        if self._clock() - self._told_status_s >= STATUS_INTERVAL_S:
            self._tell_status()
            self._pulse()
        inbox, self._inbox = self._inbox, []
        return inbox

    def admitted(self, key: int) -> None:
        """The request whose first segment is ``key`` is in the queue."""
        stream = self._streams[key]
        if stream.peer is not None:
            self._post(stream.peer, Admitted(key))

    def refused(self, key: int, kind: str, message: str, retry_after_s: float) -> None:
        """The request whose first segment is ``key`` was not taken; its segments belong to the worker again."""
        stream = self._streams[key]
        for sibling in stream.siblings:
            self._forget(self._streams[sibling])
        if stream.peer is not None:
            self._post(stream.peer, Refused(key, kind, message, retry_after_s))

    def publish(self, emissions: list[Emission]) -> None:
        """Say how far each segment has got, in it and to its worker, once a worker; the ids are there already."""
        touched: dict[int, _Peer] = {}
        for emission in emissions:
            stream = self._streams[emission.key]
            peer = stream.peer
            if peer is None:
                if emission.finish is not None:
                    self._forget(stream)
                continue
            if self._write(stream, peer, emission):
                touched[id(peer)] = peer
        for peer in touched.values():
            if peer.unsent_logprob_bytes > MAX_UNSENT_LOGPROB_BYTES:
                self._drop(peer, f"{peer.unsent_logprob_bytes} bytes of log-probabilities unread")
            else:
                self._flush(peer)

    def report(self, report: EngineReport) -> None:
        """Note the engine's state; workers hear of a changed state at once and of counts with the next status."""
        changed = (report.state, report.reason) != (self._status.state, self._status.reason)
        self._status = Status(
            epoch=self._epoch,
            state=report.state,
            reason=report.reason,
            running=report.running,
            waiting=report.waiting,
            waiting_tokens=report.waiting_tokens,
            free_pages=report.free_pages,
            total_pages=report.total_pages,
            cached_pages=report.cached_pages,
            hit_rate=report.reuse.hit_rate,
            last_step_ns=int(report.last_step_s * 1e9) if report.last_step_s else 0,
        )
        if changed:
            self._tell_status()

    def close(self, flush_s: float = 1.0) -> None:
        """Send what is queued for at most ``flush_s``, then close every connection and remove the socket."""
        deadline_s = self._clock() + flush_s
        while any(peer.outbox or peer.unsent for peer in self._peers) and self._clock() < deadline_s:
            self._poll(0.05)
        for peer in list(self._peers):
            self._drop(peer, "the engine closes")
        self._selector.unregister(self._listener)
        self._listener.close()
        self._selector.close()
        self._path.unlink(missing_ok=True)

    def _poll(self, timeout_s: float) -> None:
        for key, events in self._selector.select(timeout_s):
            peer: _Peer | None = key.data
            if peer is None:
                self._accept()
                continue
            if events & selectors.EVENT_WRITE:
                self._flush(peer)
            if events & selectors.EVENT_READ and peer.socket.fileno() >= 0:
                self._read(peer)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError:
            return  # the peer left between the event and the call
        accepted.setblocking(False)  # noqa: FBT003 - the only signature it has
        pid, uid, _ = _PEERCRED.unpack(accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size))
        if uid != os.geteuid():
            _log.warning("refused a connection of another user", uid=uid, own_uid=os.geteuid())
            accepted.close()
            return
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_PACKET_BYTES)
        peer = _Peer(accepted, pid)
        self._peers.append(peer)
        self._selector.register(accepted, selectors.EVENT_READ, peer)

    def _read(self, peer: _Peer) -> None:
        for _ in range(_MAX_READS):
            try:
                length = peer.socket.recv_into(self._buffer)
            except BlockingIOError:
                return
            except OSError as error:
                self._drop(peer, f"reading failed: {error.strerror}")
                return
            if length == 0:
                self._drop(peer, "it closed the connection")
                return
            try:
                message = decode_to_engine(self._view[:length])
                self._handle(peer, message)
            except (WireError, SegmentError) as error:
                self._drop(peer, str(error))
            if peer.socket.fileno() < 0:
                return

    def _handle(self, peer: _Peer, message: Attach | Submit | Cancel) -> None:
        if isinstance(message, Attach):
            self._attach(peer, message)
        elif peer.owned is None:
            raise WireError(f"a {type(message).__name__} before Attach")
        elif isinstance(message, Submit):
            self._submit(peer, peer.owned, message)
        else:
            keys = [key for key in message.segments if key in self._streams and self._streams[key].peer is peer]
            if keys:
                self._inbox.append(Cancellation(keys=tuple(keys)))

    def _attach(self, peer: _Peer, message: Attach) -> None:
        owned = SegmentRange(message.first_segment, message.num_segments)
        inside = 0 <= owned.first < owned.first + owned.count <= self._segments.count
        if peer.owned is not None or not inside:
            raise WireError(f"Attach for segments [{owned.first}, +{owned.count}) of {self._segments.count}")
        for other in self._peers:
            if other.owned is not None and _overlap(other.owned, owned):
                raise WireError(f"segments [{owned.first}, +{owned.count}) still belong to process {other.pid}")
        peer.owned, peer.worker, peer.welcome = owned, message.worker, True
        self._welcome()

    def _welcome(self) -> None:
        """Welcome each attached worker in whose segments nothing of its predecessor runs any more."""
        for peer in list(self._peers):
            if peer.welcome and peer.owned is not None and not any(key in peer.owned for key in self._streams):
                peer.welcome = False
                self._post(peer, Welcome(self._epoch))
                self._post(peer, self._status)

    def _submit(self, peer: _Peer, owned: SegmentRange, message: Submit) -> None:
        keys = message.segments
        if not keys or len(set(keys)) != len(keys) or not all(key in owned for key in keys):
            raise WireError(f"Submit for segments {keys}; the worker owns [{owned.first}, +{owned.count})")
        if peer.welcome or any(key in self._streams for key in keys):
            raise WireError(f"Submit for segments {keys} before their last sequences have ended")
        if message.epoch != self._epoch:
            self._post(peer, Refused(keys[0], "stale", f"epoch {message.epoch} is over, now is {self._epoch}", 0.0))
            return
        if self._limits is None:
            self._post(peer, Refused(keys[0], "draining", f"the engine is starting: {self._status.reason}", 1.0))
            return
        try:
            sequences = make_sequences(message, self._segments, self._limits, self._clock())
        except SubmissionError as error:
            self._post(peer, Refused(keys[0], error.kind, str(error), 0.0))
            return
        top = message.sampling.top_logprobs
        for sequence in sequences:
            record_bytes = 0 if top < 0 else _PAIR.size * (1 + top)
            self._streams[sequence.key] = _Stream(
                sequence.key, keys, peer, sequence.prompt_len, record_bytes, whole=message.whole and not record_bytes
            )
        self._inbox.append(Arrival(sequences=sequences))

    def _write(self, stream: _Stream, peer: _Peer, emission: Emission) -> bool:
        """Note an emission in the segment and for the worker; whether there is something to tell it."""
        if emission.ids:
            stream.written += len(emission.ids)
            self._segments.publish_completion(stream.key, stream.written)
        if stream.record_bytes:
            pairs = stream.record_bytes // _PAIR.size
            for record in emission.logprobs:
                for token_id, logprob in record[:pairs]:
                    stream.logprobs += _PAIR.pack(token_id, logprob)
                    peer.unsent_logprob_bytes += _PAIR.size
        finished = emission.finish
        if finished is None and stream.whole:
            return False
        if finished is not None:
            stream.finish = Finish(
                segment=stream.key,
                completion_len=stream.written,
                reason=str(finished.reason),
                stop_token_id=-1 if finished.stop_id is None else finished.stop_id,
                error=finished.error,
                prompt_len=finished.prompt_len,
                cached_tokens=finished.cached_tokens,
                created_tokens=finished.created_tokens,
                queue_s=finished.queue_s,
                prefill_s=finished.prefill_s,
                decode_s=finished.decode_s,
            )
        peer.unsent[stream.key] = stream
        return True

    def _tell_status(self) -> None:
        self._told_status_s = self._clock()
        for peer in list(self._peers):
            if peer.owned is not None and not peer.outbox:
                self._post(peer, self._status)

    def _post(self, peer: _Peer, message: ToWorker) -> None:
        """Queue a message; a worker that leaves more unread than its segments can cause breaks the protocol."""
        if peer.socket.fileno() < 0:
            return
        bound = 4 * (peer.owned.count if peer.owned is not None else 0) + 16
        if len(peer.outbox) >= bound:
            self._drop(peer, f"{len(peer.outbox)} messages unread")
            return
        peer.outbox.append(encode(message))
        self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        """Send what the kernel takes; news of sequences is put into packets only when earlier packets are gone."""
        while True:
            while peer.outbox:
                try:
                    peer.socket.send(peer.outbox[0], socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    self._watch_writes(peer, wanted=True)
                    return
                except OSError as error:
                    self._drop(peer, f"sending failed: {error.strerror}")
                    return
                peer.outbox.popleft()
            if not peer.unsent:
                self._watch_writes(peer, wanted=False)
                return
            self._pack(peer)

    def _pack(self, peer: _Peer) -> None:
        """Move news into the outbox: one ``Advance`` within its budget, then ``Finish`` for those fully told."""
        items: list[Progress] = []
        told: list[int] = []
        ended: list[tuple[_Stream, Finish]] = []
        budget = _ADVANCE_BUDGET_BYTES
        for stream in peer.unsent.values():
            if budget < _ITEM_BYTES + stream.record_bytes:
                break
            if stream.record_bytes:
                budget -= _take_records(peer, stream, budget, items)
                if stream.told < stream.written:
                    continue
            elif stream.finish is None and stream.told < stream.written:
                items.append(Progress(stream.key, stream.written, b""))
                budget -= _ITEM_BYTES
                stream.told = stream.written
            told.append(stream.key)
            if stream.finish is not None:
                ended.append((stream, stream.finish))
        for key in told:
            del peer.unsent[key]
        if items:
            peer.outbox.append(encode(Advance(tuple(items))))
        for stream, finish in ended:
            peer.outbox.append(encode(finish))
            self._forget(stream)

    def _watch_writes(self, peer: _Peer, *, wanted: bool) -> None:
        if peer.writing != wanted:
            peer.writing = wanted
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0)
            self._selector.modify(peer.socket, events, peer)

    def _drop(self, peer: _Peer, cause: str) -> None:
        """Close a worker's connection and cancel all that it was running. Idempotent."""
        if peer.socket.fileno() < 0:
            return
        _log.info("worker connection ended", worker=peer.worker, worker_pid=peer.pid, cause=cause)
        self._selector.unregister(peer.socket)
        peer.socket.close()
        self._peers.remove(peer)
        mine = [stream for stream in self._streams.values() if stream.peer is peer]
        running = tuple(stream.key for stream in mine if stream.finish is None)
        for stream in mine:
            stream.peer = None
            stream.logprobs.clear()
            if stream.finish is not None:
                self._forget(stream)
        peer.unsent.clear()
        if running:
            self._inbox.append(Cancellation(keys=running))

    def _forget(self, stream: _Stream) -> None:
        if self._streams.pop(stream.key, None) is not None and stream.peer is None:
            self._welcome()


def _take_records(peer: _Peer, stream: _Stream, budget: int, items: list[Progress]) -> int:
    """Move what ``budget`` bytes hold of a stream's ids and log-probabilities into ``items``; the bytes it took."""
    count = min(stream.written - stream.told, (budget - _ITEM_BYTES) // stream.record_bytes)
    if not count:
        return 0
    used = count * stream.record_bytes
    stream.told += count
    items.append(Progress(stream.key, stream.told, bytes(stream.logprobs[:used])))
    del stream.logprobs[:used]
    peer.unsent_logprob_bytes -= used
    return _ITEM_BYTES + used


def _starting(epoch: int, reason: str) -> Status:
    return Status(epoch, "starting", reason, 0, 0, 0, 0, 0, 0, 0.0, 0)


def _overlap(one: SegmentRange, other: SegmentRange) -> bool:
    return one.first < other.first + other.count and other.first < one.first + one.count


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    listener.setblocking(False)  # noqa: FBT003 - the only signature it has
    try:
        path.unlink(missing_ok=True)
        with socket_address(path) as address:
            listener.bind(address)
        path.chmod(0o600)
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise GatewayError(f"engine socket {path}: {error.strerror or error}; choose another paths.run") from error
    return listener
