"""Tokenizer: text to ids, through the Hugging Face ``tokenizers`` engine, with control tokens parsed only where wanted.

Owns the encoding rules: exactly one BOS, control-token text of users stays text, and chat scaffolding split at its
control tokens. Reads a ``tokenizer.json`` document; never imports jax or numpy, so that workers stay small.

A *control token* is an added token marked special. Added tokens that are not (tool-call or thinking marks of some
models, runs of spaces of others) are part of the language and are always recognised, as the engine itself does.
"""

import json
import re
from array import array
from collections.abc import Mapping, Sequence

from msgspec import Struct
from tokenizers import AddedToken
from tokenizers import Tokenizer as Engine
from tokenizers.decoders import Decoder
from tokenizers.pre_tokenizers import PreTokenizer

from appliance.model.cuts import Cuts
from appliance.model.decoding import IncrementalDecoder, TokenTable
from appliance.model.known_ids import KnownIds
from appliance.model.long_text import LongText, Piece
from appliance.model.split_pattern import WHITE_SPACE


class TokenizerError(ValueError):
    """A tokenizer cannot be used or rebuilt exactly; the message names what and the remedy."""


class TextAssets(Struct, frozen=True, kw_only=True):
    """All of a model that concerns text.

    ``templates`` maps names to Jinja sources (``default``, ``tool_use``, ...; empty without a chat template).
    ``special_texts`` maps template variables (``bos_token``, ``eos_token``, ...) to their text. ``eos_ids`` end a turn.
    """

    tokenizer_json: str
    templates: Mapping[str, str] = {}
    special_texts: Mapping[str, str] = {}
    add_bos: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()


_STRIPPED = "".join(sorted(WHITE_SPACE))
"""What an added token's lstrip and rstrip flags remove."""

_PARSING, _PLAIN, _INNER = 0, 1, 2
"""Ways to encode: with control tokens, as plain text, and as plain text that goes on."""


class Tokenizer:
    """A loaded tokenizer. Thread-safe: nothing changes after construction but a cache."""

    def __init__(self, assets: TextAssets, *, known_bytes: int = 0) -> None:
        """Load and check.

        Args:
            assets: what the model's folder says of its text.
            known_bytes: memory for ids of long texts, from which they are not made again; 0 = none.

        Raises:
            TokenizerError: the document is no tokenizer, or decodes by rules that are not known.
        """
        try:
            self._parsing = Engine.from_str(assets.tokenizer_json)
        except Exception as error:
            raise TokenizerError(f"tokenizer.json cannot be loaded: {error}; fetch the model again") from error
        self._parsing.no_truncation()
        self._parsing.no_padding()
        self._parsing.post_processor = None
        plain = _variant(self._parsing, self._parsing.pre_tokenizer)
        inner = _without_first_prefix(_description(self._parsing.pre_tokenizer))
        self._text = LongText(
            (self._parsing, plain, _variant(self._parsing, inner) if inner is not None else plain),
            Cuts(self._parsing),
            KnownIds(known_bytes),
        )
        self._control = {
            token.content: (token_id, token)
            for token_id, token in self._parsing.get_added_tokens_decoder().items()
            if token.special and token.content
        }
        by_length = sorted(self._control, key=lambda text: (-len(text), text))
        self._split = re.compile("|".join(map(re.escape, by_length))) if by_length else None
        self.control_texts: tuple[str, ...] = tuple(by_length)
        self._bos = assets.bos_id if assets.add_bos else None
        try:
            self.table = TokenTable(self._parsing, _description(self._parsing.decoder))
        except ValueError as error:
            raise TokenizerError(str(error)) from error

    @property
    def num_ids(self) -> int:
        """One more than the largest id that has a text. Works through the whole vocabulary."""
        return max(self._parsing.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, *, parse_special: bool, tenant: str = "") -> "array[int]":
        """Ids of raw text, with exactly one BOS where the model wants it; see ``api.ports.TextCodec``."""
        return self.with_bos(self._text.encode([Piece(_PARSING if parse_special else _PLAIN, text)], tenant))

    def encode_scaffold(self, text: str, mark: str, tenant: str = "") -> "array[int]":
        """Ids of a rendered chat template, in which ``mark`` breaks each control-token text that is not the template's.

        Control tokens are looked for first; then the mark is taken out of the text between them and that text is
        encoded as plain text.

        Args:
            text: the rendered template.
            mark: a string that occurs in nothing but broken control-token texts; may be empty.
            tenant: who asks; ids made for one tenant are used for no other.
        """
        pieces: list[Piece] = []
        for between, token_id in self._pieces(text):
            plain = between.replace(mark, "") if mark else between
            pieces.append(Piece(_INNER if pieces else _PLAIN, plain, token_id))
        return self.with_bos(self._text.encode(pieces, tenant))

    def with_bos(self, ids: "array[int]") -> "array[int]":
        """The ids with BOS in front where the model wants one and it is not there yet."""
        if self._bos is None or (ids and ids[0] == self._bos):
            return ids
        return array("i", (self._bos,)) + ids

    def decoder(self, prompt_ids: Sequence[int] = ()) -> IncrementalDecoder:
        """A fresh decoder for a completion of ``prompt_ids``; see ``api.ports.TextCodec``."""
        goes_on = bool(prompt_ids) and not self.table.is_special(prompt_ids[-1])
        return IncrementalDecoder(self.table, goes_on=goes_on)

    def _pieces(self, text: str) -> list[tuple[str, int | None]]:
        """Text between control tokens, each with the id that follows it; None after the last."""
        pieces: list[tuple[str, int | None]] = []
        at = 0
        while self._split is not None and (match := self._split.search(text, at)) is not None:
            token_id, token = self._control[match.group()]
            before, end = text[at : match.start()], match.end()
            if token.lstrip:
                before = before.rstrip(_STRIPPED)
            if token.rstrip:
                end = len(text) - len(text[end:].lstrip(_STRIPPED))
            pieces.append((before, token_id))
            at = end
        pieces.append((text[at:], None))
        return pieces


def probe_bos(tokenizer_json: str) -> int | None:
    """The id that the document's own post-processor puts in front of a text, or None."""
    engine = Engine.from_str(tokenizer_json)
    bare = engine.encode("a", add_special_tokens=False).ids
    full = engine.encode("a", add_special_tokens=True).ids
    return full[0] if len(full) > len(bare) and full[0] != bare[0] else None


def _variant(engine: Engine, pre_tokenizer: PreTokenizer | None) -> Engine:
    """An engine over the same model object (nothing of size is copied) that takes control-token text as plain text."""
    variant = Engine(engine.model)
    for part in ("normalizer", "decoder"):
        if getattr(engine, part) is not None:
            setattr(variant, part, getattr(engine, part))
    if pre_tokenizer is not None:
        variant.pre_tokenizer = pre_tokenizer
    added: dict[int, AddedToken] = engine.get_added_tokens_decoder()
    variant.add_tokens([token for _, token in sorted(added.items())])
    variant.encode_special_tokens = True
    if variant.get_added_tokens_decoder().keys() != added.keys():
        raise TokenizerError("tokenizer.json numbers its added tokens with gaps; that is not supported")
    return variant


def _description(part: PreTokenizer | Decoder | None) -> object:
    """A part of an engine as it stands in tokenizer.json, without parsing the whole document."""
    return None if part is None else json.loads(part.__getstate__())


def _without_first_prefix(pre_tokenizer: object) -> PreTokenizer | None:
    """The pre-tokenizer of text past the start, where it differs: a Metaspace "first" gives no leading space there."""
    text = json.dumps(pre_tokenizer)
    if '"prepend_scheme": "first"' not in text:
        return None
    state = text.replace('"prepend_scheme": "first"', '"prepend_scheme": "never"')
    whole = json.dumps({**_EMPTY_DOCUMENT, "pre_tokenizer": json.loads(state)})
    return Engine.from_str(whole).pre_tokenizer


_EMPTY_DOCUMENT = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "post_processor": None,
    "decoder": None,
    "model": {"type": "BPE", "vocab": {}, "merges": []},
}
