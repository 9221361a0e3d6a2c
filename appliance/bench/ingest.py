"""ingest: what a long body costs on its way from the socket to the engine, and what its text costs to tokenise.

Owns the requests and what is made of their times. The way is timed through real processes (``ingest_node``), from the
first byte that a client writes to the moment at which the prompt's ids lie in a device array of the engine; the codec
there gives ids at once, so the tokeniser is not in it. The tokeniser of the configured model is timed apart, in this
process, against one plain encode of the same text. Contestants take turns in every round.
"""

import gc
import json
import os
import pydoc_data.topics
import socket
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import click
import msgspec
from tokenizers import Tokenizer as Engine

from appliance.bench.ingest_node import ID_CHARS, MODEL, NUM_DIGITS
from appliance.bench.report import Findings, Result, measured
from appliance.bench.runner import BenchContext, BenchError
from appliance.bench.served import Served, serving
from appliance.bench.statistics import paired_ratios, quantile, slope
from appliance.config import encode_as_workers_do
from appliance.model.library import ModelLibrary
from appliance.model.record import read_text_assets
from appliance.model.tokenizer import Tokenizer

OPTIONS: Sequence[click.Parameter] = [
    click.Option(
        ["--requests"], type=click.IntRange(20, 100_000), default=300, show_default=True, help="Bodies of 512 KB."
    ),
    click.Option(["--rounds"], type=click.IntRange(3, 1000), default=9, show_default=True, help="Rounds of the rest."),
]

BODY_BYTES = 512 * 1024
SIZES_MB = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
PEAK_BYTES = 8 * 1024 * 1024
NODES = 3
"""Nodes that are started; the memory of each is measured once, as the first long body finds it."""
KNOWN_BYTES = 64 * 1024 * 1024

_MB = 1024 * 1024
_WARM_UP = 10
_NODE = ("appliance.bench.ingest_node", "node")
_OVERRIDES = {"server": {"max_body_mb": 17.0, "workers": 1}, "shared_memory": {"segment_count": 8}}
_CLEAR_PEAK = "5"
"""What resets the greatest resident size of a process, written to its ``clear_refs``; see proc(5)."""


def run(context: BenchContext, *, requests: int, rounds: int) -> Findings:
    """Measure the way, then the tokeniser.

    Raises:
        BenchError: the node does not start or answers wrongly, or ids differ from those of one plain encode.
    """
    load = os.getloadavg()[0]
    text = prose(int(max(SIZES_MB) * _MB))
    added_ms: list[float] = []
    peaks: list[float] = []
    slopes: list[tuple[float, float]] = []
    for node in range(NODES):
        context.progress("starting a node", node, NODES)
        with serving(context.config, _OVERRIDES, module=_NODE) as served, _Client(served) as client:
            peaks.append(_peak_over_body(served, client, text))
            small = body(text, BODY_BYTES)
            for _ in range(_WARM_UP):
                client.ask(small)
            added_ms += [client.ask(small) for _ in range(-(-requests // NODES))]
            slopes += [_slopes(client, text) for _ in range(-(-rounds // NODES))]
            context.progress("timing bodies", node + 1, NODES)
    way = (
        "the way: from the first byte written to a connection that is open, to the ids in a device array; the codec"
        f" gives {BODY_BYTES // ID_CHARS} ids of {BODY_BYTES} characters at once"
    )
    return Findings(
        (
            *added_results(added_ms),
            measured("ingest_slope_vs_decode", [way / alone for way, alone in slopes], "ratio", 2.0, "<="),
            measured("ingest_slope_ms_mb", [way for way, _ in slopes], "ms/MB"),
            measured("ingest_peak_over_body", peaks, "bodies", 3.0, "<="),
            *_tokenise(context, text[:BODY_BYTES], rounds),
        ),
        (
            way,
            "the text is the documentation that comes with Python (pydoc_data.topics, PSF licence)",
            f"load average before the run: {load:.2f}",
        ),
        samples={"way of a 512 KB body, ms": added_ms},
    )


def prose(num_bytes: int) -> str:
    """ASCII text of so many bytes, from the start again where it ends."""
    text = "\n\n".join(pydoc_data.topics.topics.values()).encode("ascii", "ignore").decode()
    return (text * -(-num_bytes // len(text)))[:num_bytes]


def body(text: str, num_bytes: int) -> bytes:
    """A request whose JSON has ``num_bytes`` bytes, with as much of the text as fits."""
    frame = {"model": MODEL, "max_tokens": NUM_DIGITS, "temperature": 0, "prompt": ""}
    room = num_bytes - len(json.dumps(frame))
    escaped = json.dumps(text[:room])[1:-1][:room]
    prompt = json.loads(f'"{escaped.rstrip(chr(92))}"')
    short = num_bytes - len(json.dumps({**frame, "prompt": prompt}))
    return json.dumps({**frame, "prompt": prompt + "." * short}).encode()


def added_results(added_ms: Sequence[float]) -> tuple[Result, Result]:
    """Median and 99th percentile of the way of a body; the spread is that of thirds of the run."""
    size = -(-len(added_ms) // 3)
    parts = [added_ms[first : first + size] for first in range(0, len(added_ms), size)]
    found: list[Result] = []
    for name, share, target in (("p50", 0.5, 3.0), ("p99", 0.99, 6.0)):
        each = [quantile(part, share) for part in parts]
        ends = min(each), max(each)
        value = quantile(added_ms, share)
        found.append(Result(f"ingest_added_{name}_ms", value, "ms", len(added_ms), ends, target, "<="))
    return found[0], found[1]


def _slopes(client: "_Client", text: str) -> tuple[float, float]:
    """Milliseconds a MB of the way and of JSON decoding alone, from one round over all sizes."""
    way_ms: list[float] = []
    alone_ms: list[float] = []
    for size in SIZES_MB:
        sent = body(text, int(size * _MB))
        way_ms.append(min(client.ask(sent) for _ in range(2)))
        alone_ms.append(min(_timed(lambda sent=sent: msgspec.json.decode(sent)) for _ in range(2)))
    return slope(SIZES_MB, way_ms), slope(SIZES_MB, alone_ms)


def _peak_over_body(served: Served, client: "_Client", text: str) -> float:
    """By how many bodies the worker grows when the first long one comes."""
    worker = _worker_of(served.pid)
    sent = body(text, PEAK_BYTES)
    for _ in range(_WARM_UP):
        client.ask(body(text, 1000))
    (worker / "clear_refs").write_text(_CLEAR_PEAK)
    before = _status_kb(worker, "VmRSS")
    client.ask(sent)
    return (_status_kb(worker, "VmHWM") - before) * 1024 / len(sent)


def _worker_of(node: int) -> Path:
    """The folder of /proc of a node's only worker.

    Raises:
        BenchError: there is none.
    """
    children = Path(f"/proc/{node}/task/{node}/children").read_text().split()
    for child in children:
        folder = Path("/proc") / child
        if b"\0worker\0" in (folder / "cmdline").read_bytes():
            return folder
    raise BenchError(f"process {node} has no worker among its children {children}")


def _status_kb(process: Path, name: str) -> int:
    for line in (process / "status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise BenchError(f"{process}/status has no {name}; the bench needs Linux")


class _Client:
    """One connection that is kept open."""

    def __init__(self, served: Served) -> None:
        host, _, port = served.url.removeprefix("http://").partition(":")
        self._host = host
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = self._socket.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._received.close()
        self._socket.close()

    def ask(self, sent: bytes) -> float:
        """Milliseconds from the first byte written to the prompt in a device array.

        Raises:
            BenchError: the answer is no time.
        """
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(sent)}\r\n\r\n"
        )
        began_ns = time.monotonic_ns()
        self._socket.sendall(head.encode())
        self._socket.sendall(sent)
        answer = self._answer()
        try:
            there_ns = int(answer["choices"][0]["text"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise BenchError(f"a body of {len(sent)} bytes was answered with {answer!r:.300}") from error
        return (there_ns - began_ns) / 1e6

    def _answer(self) -> Any:
        length = 0
        while (line := self._received.readline().strip()) != b"":
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        return json.loads(self._received.read(length) or b"null")


# ---------------------------------------------------------------------- tokeniser


def _tokenise(context: BenchContext, text: str, rounds: int) -> tuple[Result, ...]:
    """How much quicker a long text is tokenised than by one plain encode, when it is new and when it comes again.

    Raises:
        BenchError: the ids differ.
    """
    encode_as_workers_do()
    folder = ModelLibrary(context.config.home).ensure(context.config.model.reference, context.progress)
    assets = read_text_assets(folder)
    engine = Engine.from_str(assets.tokenizer_json)
    ours = Tokenizer(assets, known_bytes=KNOWN_BYTES)

    def plain() -> list[int]:
        return engine.encode(text, add_special_tokens=False).ids

    if ours.encode(text, parse_special=True) != ours.with_bos(array("i", plain())):
        raise BenchError("the ids of the long text differ from those of one plain encode")
    plain_ms: list[float] = []
    cold_ms: list[float] = []
    again_ms: list[float] = []
    for number in range(rounds):
        context.progress("timing the tokeniser", number, rounds)
        gc.collect()
        tenant = f"tenant {number}"  # to whom nothing is known yet
        plain_ms.append(_timed(plain))
        cold_ms.append(_timed(lambda tenant=tenant: ours.encode(text, parse_special=True, tenant=tenant)))
        again_ms.append(_timed(lambda tenant=tenant: ours.encode(text, parse_special=True, tenant=tenant)))
    return (
        measured("cold_tokenise_ratio", paired_ratios(plain_ms, cold_ms), "ratio", 1.7, ">="),
        measured("repeat_tokenise_ratio", paired_ratios(plain_ms, again_ms), "ratio", 20.0, ">="),
        measured("plain_tokenise_ms", plain_ms, "ms"),
    )


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - began)
