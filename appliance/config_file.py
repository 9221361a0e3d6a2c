"""The file of the configuration: YAML, as strict as the configuration itself.

Owns the file's syntax: a mapping, no key twice, no value that only looks like a number. Reads one file; knows none of
its keys and never quotes it, since it may hold secrets. Never imports jax.
"""

from collections.abc import Hashable
from pathlib import Path

import yaml

from appliance.config_rules import ConfigError


def parse(path: Path) -> dict[str, object]:
    """The mapping in a YAML file; an empty file is an empty mapping.

    Raises:
        ConfigError: it cannot be read, is no YAML mapping, or names a key twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: {getattr(error, 'strerror', None) or error}"]) from error
    try:
        data = yaml.load(text, Loader=_UniqueKeyLoader)  # noqa: S506 - a SafeLoader that refuses duplicates
    except yaml.YAMLError as error:
        raise ConfigError([f"{path}: {_yaml_problem(error)}"]) from None
    except RecursionError:
        raise ConfigError([f"{path} is nested too deeply; sections hold keys, and keys hold plain values"]) from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError([f"{path} holds a {type(data).__name__}; it must be a mapping of sections"])
    return data


class _UniqueKeyLoader(yaml.SafeLoader):
    """A safe loader that refuses a key given twice, which YAML would silently resolve to the last.

    What looks like a number or a date and is none is a ``yaml.YAMLError`` with its line, not the error of the type.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        """One value.

        Raises:
            yaml.YAMLError: it is not what its form or its tag promises.
        """
        try:
            return super().construct_object(node, deep)
        except (ValueError, AttributeError) as error:
            kind = node.tag.rpartition(":")[2]
            problem = f"a value that looks like {kind} is not one; correct it, or put text in quotes"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        """One mapping.

        Raises:
            yaml.YAMLError: a key appears twice, or is a list or a mapping.
        """
        seen: dict[object, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, Hashable):
                raise yaml.YAMLError(f"the key on line {line} is no plain value; it must be the name of a key")
            if key in seen:
                raise yaml.YAMLError(f"key {key!r} on line {line} was already given on line {seen[key]}")
            seen[key] = line
        return super().construct_mapping(node, deep)


def _yaml_problem(error: yaml.YAMLError) -> str:
    """What is wrong and where, without quoting the file, which may hold secrets."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem or error.context or 'not YAML'}"
    return str(error)
