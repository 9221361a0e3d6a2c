"""Volatile headers are left out where an operator named them, at the very beginning, and nowhere else."""

from collections.abc import Sequence

import pytest

from api.ports import ChatMessage
from appliance.reuse.masks import MaskPatternError
from appliance.reuse.volatile import MAX_HEADERS, StableHead
from tests.support.node import ask, node
from tests.support.serving_children import ByteCodec

HEADER = "x-anthropic-billing-header: cc_version=2.1.9.ab1; cc_entrypoint=cli; cch={:05x};"


class Seen(ByteCodec):
    """Keeps the conversations that it is asked to encode."""

    def __init__(self) -> None:
        self.conversations: list[list[ChatMessage]] = []

    def encode_chat(self, messages: Sequence[ChatMessage], **more: object) -> list[int]:
        self.conversations.append(list(messages))
        return super().encode_chat(messages, **more)


def system(text: str) -> list[ChatMessage]:
    return [ChatMessage(role="system", content=text), ChatMessage(role="user", content=HEADER.format(1))]


def test_requests_that_differ_in_their_header_alone_have_equal_ids() -> None:
    codec = StableHead(ByteCodec(), ["anthropic_billing"])
    texts = [system(f"{HEADER.format(number)}\nYou help.\nToday is Monday.") for number in (1, 2)]
    assert codec.encode_chat(texts[0]) == codec.encode_chat(texts[1])
    assert codec.encode_chat(texts[0]) == ByteCodec().encode_chat(system("You help.\nToday is Monday."))


def test_nothing_else_is_touched() -> None:
    seen = Seen()
    codec = StableHead(seen, ["anthropic_billing"])
    for text in (
        f"You help.\n{HEADER.format(1)}",
        f" {HEADER.format(1)}\nYou help.",
        "x-anthropic-billing: 1\nYou help.",
        "",
    ):
        codec.encode_chat(system(text))
        assert seen.conversations[-1] == system(text)
    codec.encode_chat([ChatMessage(role="user", content=HEADER.format(1))])
    assert seen.conversations[-1] == [ChatMessage(role="user", content=HEADER.format(1))]
    codec.encode_chat([])
    assert codec.encode(HEADER.format(1), parse_special=False) == ByteCodec().encode(
        HEADER.format(1), parse_special=False
    )
    assert codec.token_text(40) == "H"


def test_own_headers_in_any_order_up_to_a_bound() -> None:
    codec = StableHead(ByteCodec(), ["anthropic_billing", r"X-Session: [0-9a-f]+", r"Date: \d{4}-\d\d-\d\d"])
    assert codec.without(f"Date: 2026-11-30\r\n{HEADER.format(7)}\nX-Session: 9f\nStay.\nDate: 2026-11-30") == (
        "Stay.\nDate: 2026-11-30"
    )
    assert codec.without("Date: soon\nStay.") == "Date: soon\nStay."
    assert codec.without(f"{HEADER.format(7)}You help.\nStay.") == "You help.\nStay."
    assert codec.without("X-Session: 1\n" * (MAX_HEADERS + 2)) == "X-Session: 1\n" * 2
    assert codec.without("X-Session: 1") == ""


def test_a_header_that_cannot_be_used_is_named() -> None:
    with pytest.raises(MaskPatternError, match=r"'\(\?!x\)y' is no regular expression that RE2 takes"):
        StableHead(ByteCodec(), ["(?!x)y"])


def test_a_worker_leaves_them_out(tmp_path) -> None:
    import httpx

    def tokens(url: str, text: str) -> int:
        body = {"model": "arithmetic", "system": text, "messages": [{"role": "user", "content": "Hi"}]}
        answer = httpx.post(f"{url}/v1/messages/count_tokens", json=body, headers={"anthropic-version": "2023-06-01"})
        return answer.json()["input_tokens"]

    with node(tmp_path, cache={"volatile_headers": ["anthropic_billing"]}) as running:
        running.wait_ready()
        assert tokens(running.url, f"{HEADER.format(3)}\nYou help.") == tokens(running.url, "You help.")
        assert ask(running.url, "still raw text", 2).status_code == 200
        assert running.end() == 0
