"""Bodies that come as files, by the private socket's application; who else sends the header gets nothing for it."""

import asyncio
import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from api.body import read_body
from api.body_file import HandedOver, _mapped
from api.errors import HandoffError
from api.ports import Tenant
from api.settings import ApiSettings
from tests.support.api_rig import CHAT, COUNT, MESSAGES, TEXT, Rig, chat, message, prompt

NAMED = {"x-zccp-body": "/bodies/0000000001"}


class Files:
    """Opens one file whatever it is called, and keeps a second descriptor to look at it afterwards."""

    def __init__(self, folder: Path, content: bytes) -> None:
        path = folder / "body"
        path.write_bytes(content)
        self.kept = os.open(path, os.O_RDONLY)
        self.path = path
        self.named: list[bytes] = []

    def take(self, named: bytes) -> int:
        self.named.append(named)
        descriptor = os.open(self.path, os.O_RDWR)
        self.path.unlink()
        return descriptor

    def size(self) -> int:
        return os.fstat(self.kept).st_size


@pytest.fixture
def files(tmp_path: Path) -> Iterator[list[Files]]:
    made: list[Files] = []
    yield made
    for one in made:
        os.close(one.kept)


def handed(rig: Rig, files: list[Files], tmp_path: Path, content: bytes) -> Files:
    """Make the rig one whose bodies are files, the next of which holds ``content``."""
    source = Files(tmp_path, content)
    files.append(source)
    rig.app = HandedOver(rig.app, source.take, rig.settings)
    return source


BODIES = [
    b"",
    b"{",
    b"[1]",
    b"\xff\xfe",
    b'{"model": "tiny", "messages": [], "odd": 1}',
    b'{"model": "tiny", "prompt": "hi", "user": "\xff"}',
    b'{"model": "tiny", "prompt": "\\ud800"}',
    b'{"model": "tiny", "prompt": "h\xc3\xa9"}',
    b'{"model": "tiny", "prompt": "hi"}' + b" " * 300_000,
    b'{"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "metadata": null}',
]


@pytest.mark.parametrize("path", [CHAT, TEXT, MESSAGES, COUNT])
@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_a_file_gives_the_answer_that_the_body_gives(
    files: list[Files], tmp_path: Path, path: str, body: bytes
) -> None:
    headers = {"x-request-id": "one", "content-type": "application/json"}
    direct, through = Rig(), Rig()
    source = handed(through, files, tmp_path, body)
    expected, answer = direct.post(path, body, headers), through.post(path, b"", {**headers, **NAMED})
    assert answer.status == expected.status
    if answer.status != 200:
        assert answer.body == expected.body
        assert answer.headers == expected.headers
    assert [r.prompt_ids for r in through.engine.requests] == [r.prompt_ids for r in direct.engine.requests]
    assert source.named == [NAMED["x-zccp-body"].encode()]
    assert not source.path.exists()
    assert source.size() == 0  # nobody refers to the mapping any more


def test_a_field_that_stays_raw_keeps_its_bytes(files: list[Files], tmp_path: Path) -> None:
    class Kept(msgspec.Struct):
        field: msgspec.Raw

    source = Files(tmp_path, b'{"field": [1, 2, 3]}' + b" " * 100_000)
    files.append(source)
    kept = msgspec.json.decode(_mapped(source.take(b""), ApiSettings()), type=Kept)
    gc.collect()
    assert source.size() > 0
    assert bytes(kept.field) == b"[1, 2, 3]"
    del kept
    assert source.size() == 0


def test_the_memory_of_a_body_is_free_while_the_answer_is_made(files: list[Files], tmp_path: Path) -> None:
    rig = Rig()
    source = handed(rig, files, tmp_path, b'{"model": "tiny", "prompt": "hi", "stream": true}' + b" " * 100_000)
    sizes: list[int] = []

    async def look(_caller: object, _chunk: bytes) -> None:
        sizes.append(source.size())

    asyncio.run(rig.call("POST", TEXT, b"", NAMED, on_chunk=look))
    assert len(sizes) > 2
    assert set(sizes) == {0}


def test_what_the_decoder_gets_is_the_mapping_itself(files: list[Files], tmp_path: Path, monkeypatch) -> None:
    got: list[object] = []

    async def spy(exchange, settings):
        body = await read_body(exchange, settings)
        got.append(type(body).__name__)
        return body

    monkeypatch.setattr("api.routes.flow.read_body", spy)
    rig = Rig()
    handed(rig, files, tmp_path, b'{"model": "tiny", "prompt": "hi"}')
    assert rig.post(TEXT, b"", NAMED).status == 200
    assert got == ["mmap"]


def test_a_file_over_the_bound_is_refused_unmapped_in_the_words_of_a_body(files: list[Files], tmp_path: Path) -> None:
    direct, through = (Rig(settings=ApiSettings(max_body_bytes=1000)) for _ in range(2))
    source = handed(through, files, tmp_path, b" " * 1001)
    expected = direct.post(CHAT, b" " * 1001, {"x-request-id": "one"})
    answer = through.post(CHAT, b"", {**NAMED, "x-request-id": "one"})
    assert (answer.status, answer.body) == (expected.status, expected.body)
    assert answer.status == 413
    assert not source.path.exists()
    assert source.size() == 1001  # closed as it was


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/models", 200), ("POST", "/nowhere", 404)])
def test_a_file_that_nobody_reads_is_removed(
    files: list[Files], tmp_path: Path, method: str, path: str, status: int
) -> None:
    rig = Rig()
    source = handed(rig, files, tmp_path, b"unwanted")
    assert asyncio.run(rig.call(method, path, b"", NAMED)).status == status
    assert not source.path.exists()


def test_a_request_without_a_key_gets_no_file_read(files: list[Files], tmp_path: Path) -> None:
    rig = Rig(keys={b"good": Tenant(name="a", key_id="a")})
    source = handed(rig, files, tmp_path, b'{"model": "tiny", "prompt": "hi"}')
    assert rig.post(TEXT, b"", NAMED).status == 401
    assert not source.path.exists()
    assert source.size() > 0


@pytest.mark.parametrize("body", [message(), chat()])
def test_a_refused_file_is_a_typed_error_that_the_log_knows(caplog: pytest.LogCaptureFixture, body: dict) -> None:
    def refuse(named: bytes) -> int:
        raise HandoffError("the body is gone; send the request again")

    rig = Rig()
    rig.app = HandedOver(rig.app, refuse, rig.settings)
    anthropic = "max_tokens" in body
    with caplog.at_level(logging.WARNING):
        answer = rig.post(MESSAGES if anthropic else CHAT, body, {**NAMED, "x-request-id": "lost"})
    assert answer.status == 500
    error = answer.json()["error"]
    assert error["message"] == "the body is gone; send the request again"
    assert error["type"] == ("api_error" if anthropic else "server_error")
    assert answer.json()["request_id"] == "lost"
    assert rig.observer.records[0].error == "handoff_failed"
    (line,) = [record for record in caplog.records if record.name == "api.body_file"]
    assert (line.getMessage(), line.request_id) == (f"body refused: {error['message']}", "lost")  # type: ignore[attr-defined]


def test_two_names_are_handed_on_as_one_that_no_file_has(files: list[Files], tmp_path: Path) -> None:
    rig = Rig()
    source = handed(rig, files, tmp_path, b"x")
    scope_headers = [(b"x-zccp-body", b"/a"), (b"x-zccp-body", b"/b")]

    async def ask() -> None:
        async def receive() -> dict:
            return {"type": "http.disconnect"}

        async def send(_message: dict) -> None: ...

        scope = {
            "type": "http", "http_version": "1.1", "method": "GET", "scheme": "http", "path": "/health/live",
            "raw_path": b"/health/live", "query_string": b"", "root_path": "", "headers": scope_headers,
            "client": ("", "0"), "server": ("/socket", "0"), "asgi": {"version": "3.0"},
        }  # fmt: skip
        await rig.app(scope, receive, send)

    asyncio.run(ask())
    assert source.named == [b"/a,/b"]


def test_the_header_means_nothing_without_the_wrapper() -> None:
    rig = Rig()
    answer = rig.post(TEXT, prompt("hi"), NAMED)
    assert answer.status == 200
    assert rig.engine.requests[0].prompt_ids[-2:] == [*b"hi"]
