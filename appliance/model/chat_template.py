"""Chat templates: a conversation to the text the model was trained on, and which characters of it are the client's.

Owns the rendering of a model's own Jinja templates and the marking of control-token text in what clients send. There is
no template of our own: a model without one cannot chat.

How client text is kept from becoming control tokens: before rendering, every text a client sent is searched for the
text of a control token, and where one stands a mark (a private-use character that occurs nowhere else) is put behind
its first character. Templates may still trim, compare, split and join the text. After rendering, only unmarked
control-token text is the template's own and becomes control tokens; the marks then vanish and what is between is
encoded as plain text. The search ignores case, as a template may change it.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import TemplateError

from api.ports import ChatTemplateError
from appliance.model.meter import monotonic_meter
from appliance.model.sandbox import Render, Sandbox, local_now


@dataclass(frozen=True, slots=True)
class RenderBounds:
    """Most that one render may take: seconds, and characters of text."""

    seconds: float = 2.0
    max_chars: int = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered conversation; ``mark`` breaks control-token text that clients sent (empty: there is none)."""

    text: str
    mark: str


class ChatTemplates:
    """A model's templates, compiled once. Thread-safe."""

    def __init__(
        self,
        sources: Mapping[str, str],
        special_texts: Mapping[str, str],
        control_texts: Sequence[str],
        *,
        now: Callable[[], datetime] = local_now,
        bounds: RenderBounds = RenderBounds(),
    ) -> None:
        """Compile.

        Args:
            sources: template name to Jinja source; ``tool_use`` serves requests with tools, ``default`` all others.
            special_texts: variables such as ``bos_token`` and their texts.
            control_texts: the text of every control token.
            now: local time, for templates that write the date.
            bounds: what a render may take.

        Raises:
            ChatTemplateError: a source is no Jinja template.
        """
        self._sources = dict(sources)
        self._special_texts = dict(special_texts)
        self._bounds = bounds
        self._control = re.compile("|".join(map(re.escape, control_texts)), re.IGNORECASE) if control_texts else None
        sandbox = Sandbox(now)
        self._renders: dict[str, Render] = {}
        for name, source in sources.items():
            try:
                self._renders[name] = sandbox.metered_template(source)
            except (TemplateError, RecursionError) as error:
                raise ChatTemplateError(f"the model's chat template {name!r} is no Jinja template: {error}") from error

    @property
    def available(self) -> bool:
        """Whether the model has a template at all."""
        return bool(self._renders)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        continue_last: bool = False,
        template_args: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Render a conversation up to the assistant's header, or up to the end of an unfinished assistant message.

        Args:
            messages: role, content and tool fields of each message.
            tools: function descriptions in the OpenAI shape.
            continue_last: the last message is the assistant's and goes on.
            template_args: further template variables; those named like ours do not replace ours.

        Raises:
            ChatTemplateError: no template, the template's own refusal, a failure, or a bound passed.
        """
        name = "tool_use" if tools and "tool_use" in self._renders else "default"
        if name not in self._renders:
            raise ChatTemplateError(
                "this model has no chat template; use /v1/completions with a prompt in the format the model expects"
            )
        mark, (shown, shown_tools, shown_args) = self._marked(name, (messages, tools, template_args or {}))
        last_content = ""
        if continue_last:
            last_content = str(shown[-1].get("content") or "")
            shown = [*shown[:-1], {**shown[-1], "content": f"{last_content}{_CONTINUE_HERE} "}]
        variables = {
            **shown_args,
            **self._special_texts,
            "messages": shown,
            "tools": shown_tools or None,
            "documents": None,
            "add_generation_prompt": not continue_last,
        }
        text = self._text(name, variables)
        if mark:
            text = text.replace(json.dumps(mark)[1:-1], mark)
        return Rendered(_cut_open(text, last_content) if continue_last else text, mark)

    def _text(self, name: str, variables: Mapping[str, Any]) -> str:
        meter = monotonic_meter(self._bounds.seconds, self._bounds.max_chars)
        try:
            return self._renders[name](variables, meter)
        except TemplateError as error:
            raise ChatTemplateError(error.message or "the chat template refused the conversation") from error
        except RecursionError as error:
            raise ChatTemplateError("the chat template nests too deeply") from error
        except MemoryError as error:
            raise ChatTemplateError("the chat template needs more memory than there is") from error
        except Exception as error:
            raise ChatTemplateError(f"the chat template cannot render this conversation: {error}") from error

    def _marked(self, name: str, given: Sequence[Any]) -> tuple[str, Sequence[Any]]:
        """The client's values with control-token text broken by a mark, and the mark (empty where none was needed)."""
        control = self._control
        texts = list(_texts(given))
        if control is None or not any(map(control.search, texts)):
            return "", _mapped(given, lambda text: text)
        mark = _unused_character([self._sources[name], *texts])

        def broken(text: str) -> str:
            while control.search(text):  # again, as control tokens may overlap
                text = control.sub(lambda match: match.group()[:1] + mark + match.group()[1:], text)
            return text

        return mark, _mapped(given, broken)


_PRIVATE_USE = range(0xE000, 0xF900)
_PRIVATE_USE_CODE = re.compile(r"(?=([ef][0-9a-f]{3}))")
_CONTINUE_HERE = "CONTINUE_THE_LAST_MESSAGE_HERE"


def _cut_open(text: str, content: str) -> str:
    """The text up to the continuation sign; what the template trimmed after the message is trimmed here too."""
    at = text.rfind(_CONTINUE_HERE)
    if at < 0 or content.strip() not in text[:at]:
        raise ChatTemplateError("the chat template does not show the last message in full, so it cannot be continued")
    kept = text[at + len(_CONTINUE_HERE) :].startswith(" ")
    return text[:at] if kept else text[:at].rstrip()


def _texts(value: Any) -> Iterator[str]:
    """Every text inside a JSON-like value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A copy in plain lists and dicts with every text in it changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(key)): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return value


def _unused_character(texts: Sequence[str]) -> str:
    """A private-use character that occurs in none of the texts, raw or as a JSON escape."""
    used = "".join(texts).lower()
    characters, escapes = set(used), set(_PRIVATE_USE_CODE.findall(used))
    for code in _PRIVATE_USE:
        if chr(code) not in characters and f"{code:04x}" not in escapes:
            return chr(code)
    raise ChatTemplateError("the conversation uses every private-use character there is; remove some of them")
