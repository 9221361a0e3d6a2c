"""GGUF tokenizers: the vocabulary in a file's metadata, rebuilt as a ``tokenizer.json`` document.

Owns the pre-tokenizer kinds that can be rebuilt exactly and the merge order of SentencePiece vocabularies. Anything
else is refused by name: a wrong split of the text is a silent loss of quality.

Source: the kinds and their defaults, the llama.cpp project (MIT licence); the split patterns, the tokenizer.json files
of the models they are named after.
"""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from appliance.model.tokenizer import TextAssets, TokenizerError

_log = logging.getLogger(__name__)

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
"""Token types; 1 is normal."""
_PADDING = re.compile(r"\[PAD\d+\]")
"""Text that converters give to embedding rows beyond the model's own vocabulary."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True)
class _Kind:
    """How one ``tokenizer.ggml.pre`` splits text; empty ``patterns`` leave it to the byte-level step's own pattern."""

    patterns: tuple[str, ...] = ()
    single_digits: bool = False
    whole_words_first: bool = False
    add_bos: bool = False
    compose: bool = False


_LLAMA3_KIND = _Kind((_LLAMA3,), whole_words_first=True, add_bos=True)
_PRE_TOKENIZERS = {
    "gpt-2": _Kind(),
    "olmo": _Kind(),
    "mpt": _Kind(),
    "smollm": _Kind(single_digits=True),
    "starcoder": _Kind(single_digits=True),
    "refact": _Kind(single_digits=True),
    "codeshell": _Kind(single_digits=True),
    "llama3": _LLAMA3_KIND,
    "llama-v3": _LLAMA3_KIND,
    "llama-bpe": _LLAMA3_KIND,
    "smaug-bpe": _Kind((_LLAMA3,)),
    "dbrx": _Kind((_LLAMA3,)),
    "qwen2": _Kind((_QWEN2,), compose=True),
    "deepseek-r1-qwen": _Kind((_QWEN2,), compose=True),
    "tekken": _Kind((_TEKKEN,), whole_words_first=True, add_bos=True),
    "default": _Kind(_DEFAULT),
}

_END_OF_TURN = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|end_of_text|>",
    "<|endoftext|>",
)
"""Control tokens that end a turn where the model's own template writes them, whatever the metadata lists."""
_TURN_MARKS = frozenset(
    (*_END_OF_TURN, "<|im_start|>", "<start_of_turn>", "<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>")
)
"""Control tokens whatever type a file gives them: as plain text they would let a client forge a turn."""


def rebuild_text_assets(metadata: Mapping[str, object]) -> TextAssets:
    """Tokenizer, chat templates and control tokens of a GGUF file.

    Args:
        metadata: all of the file's metadata.

    Raises:
        TokenizerError: the tokenizer model or its pre-tokenizer is missing or cannot be rebuilt exactly.
    """
    vocabulary = _Vocabulary.read(metadata)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        engine, add_bos = _byte_level(metadata, vocabulary)
    elif kind == "llama":
        engine, add_bos = _sentencepiece(metadata, vocabulary), True
    else:
        raise TokenizerError(
            f"tokenizer.ggml.model is {kind!r}; supported: gpt2 (byte-level BPE) and llama (SentencePiece BPE). "
            "Convert the model's Hugging Face directory instead, which carries a tokenizer.json"
        )
    engine.add_tokens(list(vocabulary.added()))
    templates = _templates(metadata)
    ids = {name: vocabulary.special(metadata, name, kind == "llama") for name in ("bos", "eos", "unknown", "padding")}
    texts = {
        variable: vocabulary.tokens[token_id]
        for variable, name in (
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("unk_token", "unknown"),
            ("pad_token", "padding"),
        )
        if (token_id := ids[name]) is not None
    }
    wanted = metadata.get("tokenizer.ggml.add_bos_token", add_bos)
    return TextAssets(
        tokenizer_json=engine.to_str(),
        templates=templates,
        special_texts=texts,
        add_bos=bool(wanted) and ids["bos"] is not None,
        bos_id=ids["bos"],
        eos_ids=_eos_ids(metadata, vocabulary, ids["eos"], templates),
    )


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Token texts by id and their types, without the padding at the end."""

    tokens: Sequence[str]
    types: Sequence[int]

    @classmethod
    def read(cls, metadata: Mapping[str, object]) -> "_Vocabulary":
        listed = metadata.get("tokenizer.ggml.tokens")
        if not isinstance(listed, list) or not listed:
            raise TokenizerError("tokenizer.ggml.tokens is missing; the file has no tokenizer, fetch a complete one")
        tokens = [str(text) or f"[EMPTY_{token_id}]" for token_id, text in enumerate(listed)]
        seen: dict[str, int] = {}
        for token_id, text in enumerate(tokens):
            if seen.setdefault(text, token_id) != token_id:
                raise TokenizerError(f"token {text!r} has the ids {seen[text]} and {token_id}; each text needs one id")
        given = metadata.get("tokenizer.ggml.token_type")
        if isinstance(given, list) and len(given) == len(tokens):
            types = [_CONTROL if text in _TURN_MARKS else int(kind) for text, kind in zip(tokens, given, strict=True)]
            end = len(tokens)
            while end and types[end - 1] == _UNUSED and _PADDING.fullmatch(tokens[end - 1]):
                end -= 1
            return cls(tokens[:end], types[:end])
        if given is not None:
            raise TokenizerError(f"tokenizer.ggml.token_type does not list one type for each of {len(tokens)} tokens")
        return cls(tokens, _guessed_types(metadata, tokens))

    def by_text(self) -> dict[str, int]:
        return {text: token_id for token_id, text in enumerate(self.tokens)}

    def added(self) -> Iterable[AddedToken]:
        """Tokens that are recognised in the text before anything else; control and unknown ones are special."""
        for text, kind in zip(self.tokens, self.types, strict=True):
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED):
                yield AddedToken(text, special=kind != _USER_DEFINED, normalized=False)

    def special(self, metadata: Mapping[str, object], name: str, sentencepiece: bool) -> int | None:
        defaults = {"unknown": 0, "bos": 1, "eos": 2} if sentencepiece else {}
        value = metadata.get(f"tokenizer.ggml.{name}_token_id", defaults.get(name))
        return int(value) if isinstance(value, int) and 0 <= value < len(self.tokens) else None


def _guessed_types(metadata: Mapping[str, object], tokens: Sequence[str]) -> list[int]:
    """Types where the file lists none: bytes by their spelling, control tokens by the ids that the metadata names."""
    types = [_BYTE if len(text) == 6 and text.startswith("<0x") and text.endswith(">") else 1 for text in tokens]
    for key, value in metadata.items():
        named = key.startswith("tokenizer.ggml.") and key.endswith("_token_id")
        if named and isinstance(value, int) and 0 <= value < len(types):
            types[value] = _CONTROL
    for text in _END_OF_TURN:
        if text in tokens:
            types[tokens.index(text)] = _CONTROL
    return types


def _byte_level(metadata: Mapping[str, object], vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre")
    kind = _PRE_TOKENIZERS.get(str(name))
    if kind is None:
        what = "is missing" if name is None else f"is {name!r}"
        raise TokenizerError(
            f"tokenizer.ggml.pre {what}; how the text is split is not known. Supported: {', '.join(_PRE_TOKENIZERS)}. "
            "Convert the model's Hugging Face directory instead, which carries a tokenizer.json"
        )
    if name == "default":
        _log.warning("tokenizer.ggml.pre is 'default': the model's own way to split text is not recorded in the file")
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise TokenizerError(
            "tokenizer.ggml.merges is missing; a byte-level BPE vocabulary needs it, fetch a complete file"
        )
    pairs = [(text[:at], text[at + 1 :]) for text in map(str, merges) if (at := text.find(" ", 1)) > 0]
    model = models.BPE(vocabulary.by_text(), pairs, ignore_merges=kind.whole_words_first)
    engine = Tokenizer(model)
    if kind.compose:
        normalizer: Normalizer = normalizers.NFC()
        engine.normalizer = normalizer
    steps: list[PreTokenizer] = [pre_tokenizers.Digits(individual_digits=True)] if kind.single_digits else []
    steps += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in kind.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not kind.patterns))
    engine.pre_tokenizer = pre_tokenizers.Sequence(steps)
    engine.decoder = decoders.ByteLevel()
    return engine, kind.add_bos


def _sentencepiece(metadata: Mapping[str, object], vocabulary: _Vocabulary) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) < len(vocabulary.tokens):
        raise TokenizerError(
            f"tokenizer.ggml.scores does not list one score for each of {len(vocabulary.tokens)} tokens; "
            "a SentencePiece vocabulary needs them, fetch a complete file"
        )
    ids = vocabulary.by_text()
    unknown = vocabulary.special(metadata, "unknown", sentencepiece=True)
    model = models.BPE(
        ids,
        _merges_by_score(vocabulary, ids, [float(score) for score in scores]),
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    engine = Tokenizer(model)
    steps: list[decoders.Decoder] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    replace: Normalizer = normalizers.Replace(" ", "\u2581")
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        replace = normalizers.Sequence([normalizers.Prepend("\u2581"), replace])
        steps.append(decoders.Strip(" ", 1, 0))
    engine.normalizer = replace
    engine.decoder = decoders.Sequence(steps)
    return engine


def _merges_by_score(vocabulary: _Vocabulary, ids: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, likeliest piece first, as SentencePiece itself would join them."""
    joinable = {
        text: token_id
        for text, token_id in ids.items()
        if vocabulary.types[token_id] not in (_UNKNOWN, _CONTROL, _BYTE)
    }
    ranked: list[tuple[float, int, int, int, str, str]] = []
    for text, token_id in joinable.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in joinable and right in joinable:
                ranked.append((-scores[token_id], token_id, joinable[left], joinable[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _templates(metadata: Mapping[str, object]) -> dict[str, str]:
    """The default template and the named ones (``tokenizer.chat_template.<name>``)."""
    key = "tokenizer.chat_template"
    found = {"default": metadata.get(key)}
    found |= {name.removeprefix(f"{key}."): value for name, value in metadata.items() if name.startswith(f"{key}.")}
    return {name: value for name, value in found.items() if isinstance(value, str)}


def _eos_ids(
    metadata: Mapping[str, object], vocabulary: _Vocabulary, eos: int | None, templates: Mapping[str, str]
) -> tuple[int, ...]:
    ids = [eos] + [vocabulary.special(metadata, name, sentencepiece=False) for name in ("eot", "eom")]
    written = "".join(templates.values())
    for token_id, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind == _CONTROL and text in _END_OF_TURN and text in written:
            ids.append(token_id)
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))
