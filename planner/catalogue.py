"""Catalogue of architectures: models that can be planned for without their weights.

Owns the lookup by name or file. Reads the JSON files of ``planner.architectures``, each the keys of a public
``config.json`` that matter with its source, and any local ``config.json``; never imports jax.
"""

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from planner.architecture import ModelArchitecture, UnsupportedArchitectureError, from_hf_config


class UnknownArchitectureError(ValueError):
    """No architecture of that name and no such file; the message says what there is."""


def architecture_names() -> tuple[str, ...]:
    """All architectures of the catalogue, sorted."""
    files = resources.files("planner.architectures").iterdir()
    return tuple(sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json")))


def find_architecture(reference: str) -> ModelArchitecture:
    """The architecture of a name of the catalogue, or of a ``config.json``.

    Args:
        reference: a name, the path of a JSON file, or of a folder with a ``config.json``.

    Raises:
        UnknownArchitectureError: it is neither, or the file holds no JSON object.
        UnsupportedArchitectureError: the configuration asks for what cannot be served.
    """
    if reference in architecture_names():
        text = resources.files("planner.architectures").joinpath(f"{reference}.json").read_text()
        return from_hf_config(json.loads(text)["config"])
    path = Path(reference)
    path = path / "config.json" if path.is_dir() else path
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else "it holds no JSON"
        raise UnknownArchitectureError(
            f"architecture {reference!r} is none of {', '.join(architecture_names())}, and as the path of a "
            f"config.json it cannot be read: {reason}"
        ) from error
    if not isinstance(document, Mapping):
        kinds = {list: "an array", str: "a text", bool: "true or false", type(None): "null"}
        held = kinds.get(type(document), "a number")
        raise UnknownArchitectureError(f"{path} holds {held}; a config.json is an object")
    try:
        return from_hf_config(document)
    except UnsupportedArchitectureError as error:
        raise UnsupportedArchitectureError(f"{path}: {error}") from error
