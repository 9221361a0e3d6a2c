"""Codec: text to ids and back for one model, tokenizer and chat templates together.

Owns the implementation of ``api.ports.TextCodec``. Reads a model's text assets; never imports jax or numpy.
"""

import json
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from api.ports import ChatMessage, TokenDecoder
from appliance.model.chat_template import ChatTemplates
from appliance.model.record import read_text_assets
from appliance.model.tokenizer import TextAssets, Tokenizer


class Codec:
    """One model's ``TextCodec``. Thread-safe."""

    def __init__(self, assets: TextAssets, *, known_bytes: int = 0) -> None:
        """Load the tokenizer and compile the templates.

        Args:
            assets: what the model's folder says of its text.
            known_bytes: memory for ids of long texts, from which they are not made again; 0 = none.

        Raises:
            TokenizerError: the tokenizer cannot be used.
            ChatTemplateError: a template is no Jinja template.
        """
        self._tokenizer = Tokenizer(assets, known_bytes=known_bytes)
        self._templates = ChatTemplates(assets.templates, assets.special_texts, self._tokenizer.control_texts)
        self.eos_ids = assets.eos_ids
        self.has_chat_template = self._templates.available

    @classmethod
    def load(cls, folder: Path, *, known_bytes: int = 0) -> "Codec":
        """The codec of a stored model.

        Raises:
            ModelRecordError: the folder holds no model or a damaged one.
            TokenizerError: the tokenizer cannot be used.
            ChatTemplateError: a template is no Jinja template.
        """
        return cls(read_text_assets(folder), known_bytes=known_bytes)

    def encode(self, text: str, *, parse_special: bool, tenant: str = "") -> "array[int]":
        """Ids of raw text; see ``api.ports.TextCodec``."""
        return self._tokenizer.encode(text, parse_special=parse_special, tenant=tenant)

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        continue_last: bool = False,
        template_args: Mapping[str, Any] | None = None,
        tenant: str = "",
    ) -> "array[int]":
        """Ids of a conversation; see ``api.ports.TextCodec``.

        Raises:
            ChatTemplateError: no template, a template error, or its time or size bound was passed.
        """
        rendered = self._templates.render(
            [_shown(message) for message in messages],
            tools=tools,
            continue_last=continue_last,
            template_args=template_args,
        )
        return self._tokenizer.encode_scaffold(rendered.text, rendered.mark, tenant)

    def decoder(self, prompt_ids: Sequence[int] = ()) -> TokenDecoder:
        """A fresh decoder for a completion of ``prompt_ids``; see ``api.ports.TextCodec``."""
        return self._tokenizer.decoder(prompt_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes of one token (its literal text for control tokens)."""
        return self._tokenizer.table.raw(token_id)

    def token_text(self, token_id: int) -> str:
        """The token as clients see it in log-probabilities; undecodable bytes become U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")


def _shown(message: ChatMessage) -> dict[str, Any]:
    """A message as templates expect it: absent fields absent, tool-call arguments as values and not as JSON text."""
    shown: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        shown["name"] = message.name
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        shown["tool_calls"] = [_with_argument_values(call) for call in message.tool_calls]
    return shown


def _with_argument_values(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}
