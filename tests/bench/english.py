"""English text for benches: the documentation of Python's language, or a file, cut into ids and into prompts.

Owns the default text's source and the questions. Encoding is the served model's own, so that every contestant gets the
same ids: other readers of a GGUF tokenizer may leave out the splitting of digits.
"""

import pydoc_data.topics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from api.ports import ChatMessage, TextCodec
from appliance.bench.runner import BenchUseError

DEFAULT_SOURCE = "pydoc_data.topics of the running Python, topics in order of name (PSF licence)"

QUESTIONS = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper.",
    "What is the capital of Australia, and why is it not Sydney?",
    "Explain recursion to a child.",
    "Give me a recipe for pancakes with exact amounts.",
    "Write a Python function that reverses a linked list.",
    "What are the primary causes of inflation?",
    "Translate to French: The library opens at nine.",
    "List five animals that sleep during winter.",
    "How does a bicycle stay upright?",
)
_EXCERPTS = (17, 24, 48, 96, 160, 257, 384, 513, 700, 1000)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Ids, and the text they stand for."""

    ids: list[int]
    text: str


def text_of(file: Path | None) -> tuple[str, str]:
    """The text to measure on and the name of its source.

    Raises:
        BenchUseError: the file cannot be read.
    """
    if file is None:
        topics = pydoc_data.topics.topics
        return "\n\n".join(topics[name] for name in sorted(topics)), DEFAULT_SOURCE
    try:
        return file.read_text(encoding="utf-8"), file.name
    except (OSError, UnicodeDecodeError) as error:
        raise BenchUseError(f"--text {file}: {error}; name a text file in UTF-8") from error


def windows_of(codec: TextCodec, text: str, count: int, length: int) -> list[list[int]]:
    """The first ``count`` windows of ``length`` ids.

    Raises:
        BenchUseError: the text is too short.
    """
    ids = list(codec.encode(text, parse_special=False))
    if len(ids) < count * length:
        raise BenchUseError(f"the text has {len(ids)} ids; {count} windows of {length} need {count * length}")
    return [ids[start : start + length] for start in range(0, count * length, length)]


def mixed_prompts(codec: TextCodec, text: str, count: int) -> list[list[int]]:
    """``count`` (at most 20) prompts, by turns a question as a conversation and an excerpt of the text."""
    ids = list(codec.encode(text, parse_special=False))
    prompts: list[list[int]] = []
    start = 0
    for question, length in zip(QUESTIONS, _EXCERPTS, strict=True):
        prompts.append(list(codec.encode_chat([ChatMessage(role="user", content=question)])))
        prompts.append(ids[start : start + length])
        start += length
    return prompts[:count]


def fresh_prompts(codec: TextCodec, text: str, lengths: list[int]) -> Iterator[Prompt]:
    """Prompts of the given lengths, cut one after the other so that no two share a beginning.

    Raises:
        BenchUseError: the text is too short.
    """
    ids = list(codec.encode(text, parse_special=False))
    if len(ids) < sum(lengths):
        raise BenchUseError(f"the text has {len(ids)} ids; the prompts of this run need {sum(lengths)}: fewer --rounds")
    start = 0
    for length in lengths:
        cut = ids[start : start + length]
        decoder = codec.decoder()
        yield Prompt(cut, "".join(decoder.push(token) for token in cut) + decoder.flush())
        start += length
