"""Sandbox: a Jinja environment in which a template can neither touch the process nor occupy it.

Owns the metering of templates. A template comes with a model and its data from clients, so neither is trusted. Python
cannot interrupt a running thread from outside and worker threads have no signals, so the bounds are built into the
template itself: its syntax tree is rewritten so that every loop step, every call, every filter and every joined text
passes a meter that checks the deadline and the sizes. Between two checks only built-in operations run, and those that
can make much out of little (multiplication, powers, padding, replacement, formats with widths, a list that holds one
text many times) are checked before they run. A render thus ends within the bound plus one small operation, on any
thread.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, cast

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from appliance.model.meter import Meter, check_widths

Render = Callable[[Mapping[str, Any], Meter], str]
"""A compiled template: variables and a meter to text."""

_meter: ContextVar[Meter] = ContextVar("template_meter")

_DROPPED_FILTERS = ("center", "filesizeformat", "format", "pprint", "random", "urlize", "wordwrap", "xmlattr")
"""Filters that pad, shuffle or mark up text; no use in a prompt."""
_DROPPED_METHODS = ("center", "ljust", "rjust", "zfill", "expandtabs", "translate")
_MAX_INDENT = 64
_STEPS, _JOINED, _CUT = "_steps", "_joined", "_cut"


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment; one serves all templates and threads."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, now: Callable[[], datetime]) -> None:
        """Set up filters and functions as the chat templates of published models expect them.

        Args:
            now: local time, for ``strftime_now``.
        """
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
            finalize=_written,
            cache_size=0,
        )
        for name in _DROPPED_FILTERS:
            del self.filters[name]
        for name, function in list(self.filters.items()):
            self.filters[name] = _metered(name, function)
        self.filters |= {"tojson": _to_json, "join": _join, _STEPS: _steps, _JOINED: _concat, _CUT: _made}
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        self.globals |= {
            "namespace": _PlainNamespace,
            "raise_exception": _raise_exception,
            "strftime_now": lambda layout: now().strftime(str(layout)),
        }

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join the output of a block, macro or capture."""
        return _concat(parts)

    def call(self, context: Context, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call from a template, metered."""
        meter = _meter.get()
        meter.tick()
        method = getattr(target, "__wrapped__", target)
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str | bytes):
            if name in _DROPPED_METHODS:
                raise SecurityError(f"a chat template may not call the text method {name}")
            meter.written(*args, *kwargs.values())
            if name in ("format", "format_map"):
                meter.layout(owner)
            elif isinstance(owner, str) and name == "replace" and len(args) >= 2:
                meter.replacement(owner, str(args[0]), str(args[1]))
            elif isinstance(owner, str) and name == "join" and len(args) == 1:
                return meter.join(owner, args[0])
        result = super().call(context, target, *args, **kwargs)
        meter.made(result)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic from a template, metered."""
        meter = _meter.get()
        if operator == "*":
            meter.product(left, right)
        elif operator == "**":
            meter.power(left, right)
        elif operator == "%" and isinstance(left, str | bytes):
            meter.layout(left)
            meter.written(right)
        result = super().call_binop(context, operator, left, right)
        meter.made(result)
        return result

    def metered_template(self, source: str) -> Render:
        """Compile a template.

        Raises:
            TemplateError: the source is no template.
        """
        template = self.from_string(_Instrument().visit(self.parse(source)))

        def render(variables: Mapping[str, Any], meter: Meter) -> str:
            token = _meter.set(meter)
            try:
                return _concat(template.generate(**variables))
            finally:
                _meter.reset(token)

        return render


def local_now() -> datetime:
    """The local time."""
    return datetime.now(tz=UTC).astimezone()


class _Instrument(NodeTransformer):
    """Sends every loop's items, every joined text and every slice through the meter."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - Jinja's naming
        self.generic_visit(node)
        node.iter = _filter(cast("nodes.Expr", node.iter), _STEPS)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - Jinja's naming
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), _JOINED)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802 - Jinja's naming
        self.generic_visit(node)
        return _filter(node, _CUT) if isinstance(node.arg, nodes.Slice) else node


def _filter(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _GenerationTag(Extension):
    """``{% generation %}``: marks the assistant's own text for training; renders what is inside."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainNamespace(Namespace):
    """A namespace without underscored names, behind which Python keeps its machinery."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a chat template may not set {name!r}")
        super().__setitem__(name, value)


class _SizedSteps:
    """Counted loop steps that keep their length, for ``loop.length``."""

    def __init__(self, meter: Meter, items: Sequence[Any] | Mapping[Any, Any]) -> None:
        self._meter, self._items = meter, items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return _counted(self._meter, self._items)


def _counted(meter: Meter, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        meter.tick()
        yield item


def _steps(items: Any) -> Any:
    """A loop's items, each counted as a step; what is not iterable stays for Jinja to complain about."""
    meter = _meter.get()
    if isinstance(items, Sequence | Mapping):
        return _SizedSteps(meter, items)
    return _counted(meter, items) if isinstance(items, Iterable) else items


def _written(value: Any) -> Any:
    """An expression about to be written into the output, as text."""
    if isinstance(value, str):
        return value
    _meter.get().written(value)
    return _made(str(value))


def _made(value: Any) -> Any:
    _meter.get().made(value)
    return value


def _concat(parts: Iterable[object]) -> str:
    return _meter.get().join("", parts)


def _join(value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    """Jinja's ``join`` filter, metered."""
    if attribute is not None:
        value = (item.get(attribute, "") if isinstance(item, Mapping) else item[attribute] for item in value)
    return _meter.get().join(str(d), value)


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose sizes are checked before and after; Jinja's marks on the function are kept."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        meter = _meter.get()
        meter.tick()
        meter.written(*args, *kwargs.values())
        if name in ("indent", "round"):
            check_widths((*args[1:], *kwargs.values()), _MAX_INDENT)
        elif name in ("batch", "slice"):
            check_widths((*args[1:], *kwargs.values()), meter.max_chars)
        elif name == "replace":
            texts = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, str)]
            if len(texts) >= 3:
                meter.replacement(*texts[:3])
        result = function(*args, **kwargs)
        meter.made(result)
        return result

    for mark in ("jinja_pass_arg", "jinja_async_variant"):
        if hasattr(function, mark):
            setattr(checked, mark, getattr(function, mark))
    return checked


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it: keys in order, nothing escaped that JSON does not need escaped."""
    meter = _meter.get()
    meter.tick()
    meter.written(value)
    check_widths([indent], _MAX_INDENT)
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    meter.made(text)
    return text


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))
