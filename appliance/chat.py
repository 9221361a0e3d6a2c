"""A terminal conversation with a running appliance, over its HTTP API like any other client.

Owns the prompt, the commands and the printing of a stream. Knows the OpenAI form of the API only; keeps the
conversation in memory and writes nothing to disk.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

import httpx

HELP = "/help shows this, /clear forgets the conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer."


class ChatError(RuntimeError):
    """The appliance cannot be reached or refused; the message is its own where there is one."""


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """How to ask. ``model`` empty takes the served one."""

    url: str
    model: str = ""
    key: str | None = None
    system: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    timeout_s: float = 300.0


@dataclass(slots=True)
class Answer:
    """One answer as it arrived; ``stopped`` when the person stopped it."""

    text: str = ""
    finish_reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict[str, Any])
    stopped: bool = False


class Conversation:
    """The messages so far and the connection they are sent over."""

    def __init__(self, settings: ChatSettings, client: httpx.Client | None = None) -> None:
        """Prepare; nothing is sent yet."""
        headers = {"authorization": f"Bearer {settings.key}"} if settings.key else {}
        self._settings = settings
        self._client = client or httpx.Client(
            base_url=settings.url, headers=headers, timeout=httpx.Timeout(settings.timeout_s, connect=5.0)
        )
        self._model = settings.model
        self._messages: list[dict[str, str]] = []
        self.clear()

    def clear(self) -> None:
        """Forget everything but the system message."""
        system = self._settings.system
        self._messages = [{"role": "system", "content": system}] if system else []

    def model(self) -> str:
        """The model's name, asked for once.

        Raises:
            ChatError: the appliance cannot be reached, or serves nothing.
        """
        if not self._model:
            try:
                response = self._client.get("/v1/models")
            except httpx.HTTPError as error:
                raise ChatError(_unreachable(self._settings.url, error)) from error
            _check(response, response.content)
            try:
                self._model = str(response.json()["data"][0]["id"])
            except (ValueError, LookupError, TypeError) as error:
                raise ChatError(f"{self._settings.url} names no model; is it an appliance's address?") from error
        return self._model

    def ask(self, text: str, answer: Answer) -> Iterator[str]:
        """Send a message and yield the answer's pieces; both become part of the conversation.

        A ``KeyboardInterrupt`` raised while the caller prints leaves what has arrived in ``answer``.

        Raises:
            ChatError: it was refused, or broke off.
        """
        model = self.model()
        body: dict[str, Any] = {
            "model": model,
            "messages": [*self._messages, {"role": "user", "content": text}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._settings.max_tokens is not None:
            body["max_tokens"] = self._settings.max_tokens
        if self._settings.temperature is not None:
            body["temperature"] = self._settings.temperature
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    _check(response, response.read())
                yield from self._pieces(response, answer)
        except httpx.HTTPError as error:
            raise ChatError(_unreachable(self._settings.url, error)) from error
        self.keep(text, answer)

    def keep(self, text: str, answer: Answer) -> None:
        """Make a question and what came of its answer part of the conversation."""
        if answer.text:
            self._messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer.text}]

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _pieces(self, response: httpx.Response, answer: Answer) -> Iterator[str]:
        for line in response.iter_lines():
            if not line.startswith("data:"):
                continue
            data = line[5:].strip()
            if data == "[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise ChatError(str(event["error"].get("message", "the appliance gave no reason")))
            answer.usage = event.get("usage") or answer.usage
            for choice in event.get("choices", ()):
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
                piece = choice.get("delta", {}).get("content") or ""
                if piece:
                    answer.text += piece
                    yield piece
        raise ChatError("the answer broke off before its end")


def talk(conversation: Conversation, lines: Iterator[str], out: TextIO, notes: TextIO) -> None:
    """Hold a conversation: a line a message, until the lines end or ``/exit``.

    Args:
        conversation: whom to talk with.
        lines: what the person types; ``KeyboardInterrupt`` from it is an empty line.
        out: where answers go.
        notes: where everything else goes.
    """
    notes.write(f"{conversation.model()} · {HELP}\n")
    while True:
        try:
            text = next(lines).strip()
        except StopIteration:
            return
        except KeyboardInterrupt:
            notes.write("\n")
            continue
        if text == "/exit":
            return
        if text == "/clear":
            conversation.clear()
            notes.write("The conversation is forgotten.\n")
        elif text.startswith("/"):
            notes.write(("" if text == "/help" else f"There is no command {text}. ") + HELP + "\n")
        elif text:
            try:
                say(conversation, text, out, notes)
            except ChatError as error:
                notes.write(f"{error}\n")


def say(conversation: Conversation, text: str, out: TextIO, notes: TextIO) -> Answer:
    """One question, its answer printed as it comes; Ctrl-C stops the answer and not the conversation.

    Raises:
        ChatError: it was refused, or broke off.
    """
    answer = Answer()
    pieces = conversation.ask(text, answer)
    try:
        for piece in pieces:
            out.write(piece)
            out.flush()
    except KeyboardInterrupt:
        answer.stopped = True
        conversation.keep(text, answer)
        notes.write("\n(stopped)")
    finally:
        pieces.close()  # type: ignore[attr-defined]
    out.write("\n")
    out.flush()
    return answer


def _check(response: httpx.Response, content: bytes) -> None:
    if response.status_code == 200:
        return
    try:
        message = str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = content[:200].decode("utf-8", "replace")
    raise ChatError(f"{response.status_code}: {message}")


def _unreachable(url: str, error: Exception) -> str:
    return f"no answer from {url}: {error or type(error).__name__}; is `zccp serve` running there?"
