"""Volatile headers: what clients put before a system prompt for a provider's own use, and the model can do without.

Owns the headers that have a name, and their removal. Such a header is another one with every request, and as the first
thing of a prompt it leaves nothing that requests share. Only an operator turns this on, by naming the headers; left out
is only what a system prompt begins with, and no more than a line of it. No other word of a request is ever touched.
Patterns are run by RE2, as masks are. Never imports numpy or jax.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from api.ports import ChatMessage, TextCodec
from appliance.reuse.masks import Match, compiled

HEADERS: Mapping[str, str] = {"anthropic_billing": r"x-anthropic-billing-header:(?: ?[a-z_]+=[\w.:-]*;)+"}
"""Headers that have a name. Source: what command-line clients of the Messages API send as the first block of a system
prompt: their version and a checksum of the request, as ``name=value;``. Blocks join without a separator, so that the
end of such a header is the end of its pairs and not that of a line."""

MAX_HEADERS = 8
"""Headers of one prompt that are left out."""


class StableHead:
    """A ``TextCodec`` that leaves volatile headers out of conversations; raw text it takes as it is."""

    __slots__ = ("_codec", "_patterns", "decoder", "encode", "token_bytes", "token_text")

    def __init__(self, codec: TextCodec, headers: Sequence[str]) -> None:
        """Encode with ``codec``; ``headers`` are names from ``HEADERS`` and regular expressions.

        Raises:
            MaskPatternError: one cannot be used.
        """
        self._codec = codec
        self._patterns = tuple(compiled(header, HEADERS) for header in headers)
        self.encode = codec.encode
        self.decoder = codec.decoder
        self.token_bytes = codec.token_bytes
        self.token_text = codec.token_text

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        continue_last: bool = False,
        template_args: Mapping[str, Any] | None = None,
        tenant: str = "",
    ) -> Sequence[int]:
        """See ``api.ports.TextCodec``."""
        if messages and messages[0].role == "system":
            first = messages[0]
            messages = [msgspec.structs.replace(first, content=self.without(first.content)), *messages[1:]]
        return self._codec.encode_chat(
            messages, tools=tools, continue_last=continue_last, template_args=template_args, tenant=tenant
        )

    def without(self, text: str) -> str:
        """A system prompt without the volatile headers that it begins with."""
        for _ in range(MAX_HEADERS):
            line, _, rest = text.partition("\n")
            length = max((found.end() for found in self._found(line)), default=0)
            if not length:
                break
            text = line[length:] + text[len(line) :] if line[length:].strip() else rest
        return text

    def _found(self, line: str) -> Iterator[Match]:
        return (found for pattern in self._patterns if (found := pattern.match(line)) is not None)
