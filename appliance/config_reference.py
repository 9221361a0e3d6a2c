"""The reference of the configuration, made from its types, so that documentation cannot differ from the code.

Owns the table of keys. Reads type information only.
"""

from dataclasses import asdict, dataclass
from typing import cast

from msgspec import NODEFAULT, inspect

from appliance.config import ENVIRONMENT, ApplianceConfig


@dataclass(frozen=True, slots=True)
class KeyReference:
    """One key: its dotted path, type in words, default as YAML would write it, range and meaning."""

    path: str
    type: str
    default: str
    range: str
    meaning: str


def reference() -> list[KeyReference]:
    """Every key in the order of the file."""
    rows: list[KeyReference] = []
    for section in _struct(inspect.type_info(ApplianceConfig)).fields:
        for key in _struct(section.type).fields:
            inner, meaning = _unwrap(key.type)
            rows.append(
                KeyReference(
                    path=f"{section.encode_name}.{key.encode_name}",
                    type=_type_name(inner),
                    default=_default(key),
                    range=_range(inner),
                    meaning=meaning,
                )
            )
    return rows


def reference_markdown() -> str:
    """The table of keys and the table of environment variables, for the documentation."""
    lines = ["| key | type | default | range | meaning |", "|---|---|---|---|---|"]
    lines += [f"| `{r.path}` | {r.type} | {r.default} | {r.range} | {r.meaning} |" for r in reference()]
    lines += ["", "| environment variable | meaning |", "|---|---|"]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in ENVIRONMENT.items()]
    return "\n".join(lines) + "\n"


def reference_json() -> dict[str, object]:
    """The same as plain data."""
    return {"keys": [asdict(row) for row in reference()], "environment": dict(ENVIRONMENT)}


def _struct(info: inspect.Type) -> inspect.StructType:
    if not isinstance(info, inspect.StructType):
        raise TypeError(f"a section must be a struct, not {info!r}")
    return info


def _unwrap(info: inspect.Type) -> tuple[inspect.Type, str]:
    """The type of a key without what allows it to be empty, and its description."""
    if isinstance(info, inspect.Metadata):
        return info.type, str((info.extra_json_schema or {}).get("description", ""))
    if isinstance(info, inspect.UnionType):
        return _unwrap(next(kind for kind in info.types if not isinstance(kind, inspect.NoneType)))
    return info, ""


def _type_name(kind: inspect.Type) -> str:
    names: dict[type, str] = {
        inspect.IntType: "whole number",
        inspect.FloatType: "number",
        inspect.BoolType: "true or false",
        inspect.StrType: "text",
        inspect.VarTupleType: "list of texts",
        inspect.DictType: "mapping of texts",
    }
    if isinstance(kind, inspect.LiteralType):
        return " or ".join(f"`{value}`" for value in kind.values)
    return names[type(kind)]


def _range(kind: inspect.Type) -> str:
    if isinstance(kind, inspect.IntType | inspect.FloatType) and kind.ge is not None and kind.le is not None:
        return f"{kind.ge:,.15g} to {kind.le:,.15g}".replace(",", " ")
    return ""


def _default(key: inspect.Field) -> str:
    value = key.default
    if value is NODEFAULT or value is None or value in ("", ()):
        return "empty"
    if isinstance(value, tuple):
        return ", ".join(f"`{item}`" for item in cast("tuple[object, ...]", value))
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"
