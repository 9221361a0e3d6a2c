"""Hugging Face directories: tokenizer, chat templates and control tokens.

Owns where these lie: ``tokenizer.json``, ``tokenizer_config.json``, ``special_tokens_map.json``,
``generation_config.json``, ``config.json`` and the template files beside them. A template file wins over one in the
configuration. Never imports jax or numpy.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Engine

from appliance.model.tokenizer import TextAssets, TokenizerError, probe_bos

_SPECIALS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def read_text_assets(directory: Path) -> TextAssets:
    """Read a directory's tokenizer and templates.

    Args:
        directory: a Hugging Face model directory.

    Raises:
        TokenizerError: there is no tokenizer.json, or a file is damaged.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(
            f"{directory}: tokenizer.json not found; save the tokenizer in that form (AutoTokenizer.save_pretrained)"
        )
    document = path.read_text(encoding="utf-8")
    try:
        engine = Engine.from_str(document)
    except Exception as error:
        raise TokenizerError(f"{path}: {error}; fetch the file again") from error
    config = _optional_json(directory / "tokenizer_config.json")
    specials = {**_optional_json(directory / "special_tokens_map.json"), **config}
    texts = {name: text for name in _SPECIALS if (text := _token_text(specials.get(name))) is not None}
    bos_id = engine.token_to_id(texts["bos_token"]) if "bos_token" in texts else None
    probed = probe_bos(document)
    wanted = config.get("add_bos_token")
    return TextAssets(
        tokenizer_json=document,
        templates=_templates(directory, config),
        special_texts=texts,
        add_bos=probed is not None if wanted is None else bool(wanted) and bos_id is not None,
        bos_id=probed if wanted is None and probed is not None else bos_id,
        eos_ids=_eos_ids(directory, engine, texts.get("eos_token")),
    )


def _templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    listed = config.get("chat_template")
    if listed is None:
        listed = _optional_json(directory / "chat_template.json").get("chat_template")
    if isinstance(listed, str):
        templates = {"default": listed}
    elif isinstance(listed, list):
        pairs = [(entry.get("name"), entry.get("template")) for entry in listed if isinstance(entry, Mapping)]
        templates = {name: source for name, source in pairs if isinstance(name, str) and isinstance(source, str)}
    else:
        templates = {}
    for file in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    default = directory / "chat_template.jinja"
    if default.is_file():
        templates["default"] = default.read_text(encoding="utf-8")
    return templates


def _eos_ids(directory: Path, engine: Engine, eos_text: str | None) -> tuple[int, ...]:
    """Ids that end a turn, from the generation settings, the model's configuration and the tokenizer's."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = _optional_json(directory / name).get("eos_token_id")
        ids += [entry for entry in (value if isinstance(value, list) else [value]) if isinstance(entry, int)]
    own = engine.token_to_id(eos_text) if eos_text is not None else None
    return tuple(dict.fromkeys([*ids, own] if own is not None else ids))


def _token_text(value: object) -> str | None:
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def _optional_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_bytes())
    except ValueError as error:
        raise TokenizerError(f"{path}: no valid JSON ({error}); fetch the file again") from error
    return document if isinstance(document, dict) else {}
