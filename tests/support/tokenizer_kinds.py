"""Small tokenizers of every kind that is served, trained here; equal calls, equal tokenizers."""

# ruff: noqa: RUF001 - look-alike characters are the point

from collections.abc import Callable, Mapping
from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from appliance.model.gguf_tokenizer import rebuild_text_assets
from tests.support.texts import TEXTS
from tests.support.tiny_sentencepiece import gguf_metadata, trained

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
_PUNCTUATED = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _PUNCTUATED)
_CORPUS = tuple(TEXTS) * 2

ADDED = (
    AddedToken("<|end|>", special=True, normalized=False),
    AddedToken("<l>", special=True, lstrip=True, normalized=False),
    AddedToken("<r>", special=True, rstrip=True, normalized=False),
    AddedToken("<think>", special=False, normalized=False),
    AddedToken("word", special=False, single_word=True, normalized=False),
    AddedToken("  ", special=False, normalized=False),
    AddedToken("\n\n\n", special=False, normalized=False),
    AddedToken("a b", special=False, normalized=False),
    AddedToken("b c d", special=False, lstrip=True, rstrip=True, normalized=False),
    AddedToken("。字", special=False, normalized=False),
)


def _byte_level(*patterns: str, add_prefix_space: bool = False, use_regex: bool = False, vocab: int = 700) -> Tokenizer:
    engine = Tokenizer(models.BPE())
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=use_regex))
    engine.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    engine.train_from_iterator(_CORPUS, trainer)
    return engine


def _composing() -> Tokenizer:
    engine = _byte_level(QWEN2)
    engine.normalizer = normalizers.NFC()
    return engine


def _single_digits() -> Tokenizer:
    engine = _byte_level(use_regex=True)
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    engine.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return engine


def _sentencepiece(*, space_prefix: bool) -> Tokenizer:
    return Tokenizer.from_str(rebuild_text_assets(gguf_metadata(trained(), space_prefix=space_prefix)).tokenizer_json)


def _metaspace_bpe(scheme: str, *, split: bool) -> Tokenizer:
    engine = _sentencepiece(space_prefix=False)
    engine.normalizer = normalizers.Sequence([])
    engine.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    engine.decoder = decoders.Metaspace(prepend_scheme=scheme, split=split)
    return engine


def _gemma() -> Tokenizer:
    """Spaces replaced, a split that finds none, and runs of line breaks and spaces as added tokens."""
    engine = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    engine.normalizer = normalizers.Replace(" ", "\u2581")
    engine.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    engine.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    engine.train_from_iterator(
        _CORPUS, trainers.BpeTrainer(vocab_size=1200, special_tokens=tokens, show_progress=False, max_token_length=6)
    )
    engine.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    engine.add_tokens([AddedToken(text, normalized=False) for text in ("\n\n", "\n\n\n", "\u2581\u2581")])
    return engine


def _unknown_runs() -> Tokenizer:
    """Without byte fallback: a run of unknown characters is one token."""
    engine = _metaspace_bpe("never", split=False)
    engine.model = models.BPE(
        {text: token_id for text, token_id in engine.get_vocab().items() if text not in ("\u2581", "d")},
        [],
        unk_token="<unk>",
        fuse_unk=True,
    )
    return engine


def _unigram() -> Tokenizer:
    engine = Tokenizer(models.Unigram())
    engine.pre_tokenizer = pre_tokenizers.Metaspace()
    engine.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=500, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False, max_piece_length=8
    )
    engine.train_from_iterator(_CORPUS, trainer)
    return engine


def _normalised_added() -> Tokenizer:
    engine = _sentencepiece(space_prefix=True)
    engine.add_tokens([AddedToken("d e", special=False), AddedToken("x", special=False, lstrip=True)])
    return engine


def _with_added(make: Callable[[], Tokenizer]) -> Callable[[], Tokenizer]:
    def made() -> Tokenizer:
        engine = make()
        engine.add_tokens([token for token in ADDED if not token.special])
        engine.add_special_tokens([token for token in ADDED if token.special])
        return engine

    return made


KINDS: Mapping[str, Callable[[], Tokenizer]] = {
    "gpt-2": lambda: _byte_level(use_regex=True),
    "gpt-2 with a prefix": lambda: _byte_level(use_regex=True, add_prefix_space=True),
    "gpt-2 with added": _with_added(lambda: _byte_level(use_regex=True)),
    "llama-3": _with_added(lambda: _byte_level(LLAMA3)),
    "qwen2": _composing,
    "smollm": _single_digits,
    "deepseek": lambda: _byte_level(*DEEPSEEK),
    "llama-2": lambda: _sentencepiece(space_prefix=True),
    "llama-2 with added": _with_added(lambda: _sentencepiece(space_prefix=True)),
    "llama-2 with normalised": _normalised_added,
    "no prefix": _with_added(lambda: _sentencepiece(space_prefix=False)),
    "metaspace first": _with_added(lambda: _metaspace_bpe("first", split=False)),
    "metaspace always": lambda: _metaspace_bpe("always", split=True),
    "metaspace never": lambda: _metaspace_bpe("never", split=False),
    "gemma": _gemma,
    "unknown runs": _unknown_runs,
    "unigram": _unigram,
}
"""Kinds that have cuts."""


def _whole_words_first() -> Tokenizer:
    engine = _metaspace_bpe("never", split=False)
    engine.model.ignore_merges = True
    return engine


WHOLE: Mapping[str, Callable[[], Tokenizer]] = {
    "lower case": lambda: _changed(normalizer=normalizers.Lowercase()),
    "two letters for one": lambda: _changed(normalizer=normalizers.Replace("ß", "ss")),
    "prefix of another kind": lambda: _changed(normalizer=normalizers.Prepend("x")),
    "white space split": lambda: _changed(pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
    "looking behind": lambda: _byte_level(r"(?<=a)b|[^b]+|b"),
    "merged matches": lambda: _changed(pre_tokenizer=pre_tokenizers.Split(Regex(r"\s"), "merged_with_next")),
    "no split at all": lambda: _byte_level(use_regex=False),
    "whole words first": _whole_words_first,
}
"""Kinds whose texts stay whole."""


def _changed(**parts: object) -> Tokenizer:
    engine = _byte_level(use_regex=True)
    for name, part in parts.items():
        setattr(engine, name, part)
    return engine


@cache
def tokenizer(kind: str) -> Tokenizer:
    """One tokenizer of a kind, made once."""
    return {**KINDS, **WHOLE}[kind]()
