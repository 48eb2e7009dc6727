"""Chat templates as what they are: programs from strangers, run in Jinja's sandbox, with bounds on time and size.

The sandbox keeps a template away from Python's internals and from changing what it is given, but lets it run for ever,
or double a string until the memory is full. Here every round of a loop and every call of a macro looks at the clock of
the thread, and every string or list that `+`, `*`, `%` and `~` would make is measured. What no such bound sees is one
filter or method called with an enormous width, such as `center(10 ** 9)`.
"""

import json
import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.filters import do_join
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from anyformer.errors import UserError

MOST_SECONDS = 2.0
"""Of this thread's own computing, for one conversation; real templates take milliseconds."""
MOST_LENGTH = 1 << 24
"""Characters of one string, and items of one list."""
_MOST_MADE = 1 << 28
_MOST_BITS = 1 << 16


def render(template: str, variables: Mapping[str, Any]) -> str:
    """`template` rendered with `variables`.

    Raises:
        UserError: the template is broken, runs for too long, writes too much, or refuses what it is given.
    """
    try:
        program = _compiled(template)
    except jinja2.TemplateSyntaxError as error:
        where = f"chat_template, line {error.lineno}"
        raise UserError("the chat template is not valid Jinja", where=where, got=error.message) from error
    except Exception as error:  # Python itself refuses what is nested too deep.
        raise UserError("the chat template cannot be compiled", where="chat_template", got=error) from error
    token = _EFFORT.set(_Effort())
    try:
        return _whole(program, variables)
    except _Excess as error:
        remedy = "look into the template; it is a program of its own, and this one does not end as it should"
        raise UserError("the chat template does too much", where="chat_template", got=error, remedy=remedy) from error
    except Exception as error:  # A template may fail in any way on unfit messages.
        raise UserError("the chat template refuses these messages", where="messages", got=error) from error
    finally:
        _EFFORT.reset(token)


def _whole(program: jinja2.Template, variables: Mapping[str, Any]) -> str:
    parts, length = [], 0
    for part in program.generate(**variables):
        length += len(part)
        _require(length <= MOST_LENGTH, f"more than {MOST_LENGTH} characters written")
        parts.append(part)
    return "".join(parts)


class _Excess(Exception):
    """A template has gone past a bound."""


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _Excess(otherwise)


@dataclass
class _Effort:
    """What one rendering has cost so far."""

    started: float = field(default_factory=time.thread_time)
    made: int = 0


_EFFORT: ContextVar[_Effort] = ContextVar("effort of a template")


class _Environment(ImmutableSandboxedEnvironment):
    # Jinja folds what is not named here when it compiles, out of reach of any bound.
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The value of `left operator right`, unless it would be too large."""
        if operator in ("*", "**"):
            _require(_product_size(operator, left, right) <= MOST_LENGTH, f"a product longer than {MOST_LENGTH}")
        return _made(super().call_binop(context, operator, left, right))

    def tilde(self, *values: object) -> str:
        """What `~` stands for in a template."""
        return str(_made("".join(map(str, values))))

    def tick(self) -> bool:
        """Called in every round of a loop; always true."""
        spent = time.thread_time() - _EFFORT.get().started
        _require(spent <= MOST_SECONDS, f"more than {MOST_SECONDS:g} seconds spent")
        return True


def _product_size(operator: str, left: Any, right: Any) -> int:
    """The length of `left * right`, or for whole numbers a size that grows past all bounds with their bits."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
        return MOST_LENGTH + 1 if bits > _MOST_BITS else 0
    for one, other in ((left, right), (right, left)):
        if isinstance(one, str | list | tuple) and isinstance(other, int):
            return len(one) * max(other, 0)
    return 0


def _made(value: Any) -> Any:
    if isinstance(value, str | list | tuple):
        effort = _EFFORT.get()
        effort.made += len(value)
        _require(len(value) <= MOST_LENGTH, f"a text or list longer than {MOST_LENGTH}")
        _require(effort.made <= _MOST_MADE, f"texts and lists longer than {_MOST_MADE} in all")
    return value


class _Bounded(NodeTransformer):
    """Puts a look at the clock into all that repeats, and a measure on every `~`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """A loop, whose filter is looked at too: it may reject every item."""
        if node.test is not None:
            node.test = nodes.And(_method("tick"), node.test)
        return self._repeats(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        """A macro, which may call itself."""
        return self._repeats(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """`a ~ b`."""
        self.generic_visit(node)
        return _method("tilde", node.nodes)

    def _repeats(self, node: nodes.For | nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_method("tick")))
        return node


def _method(name: str, arguments: list[nodes.Expr] | None = None) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), arguments or [], [], None, None)


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.filters["join"] = _join
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    del environment.globals["lipsum"]
    program: nodes.Template = _Bounded().visit(environment.parse(template))
    return environment.from_string(program)


class _Namespace(Namespace):
    """Jinja's own, without the names that mean something to Python."""

    def __init__(*args: Any, **attributes: Any) -> None:
        # The arguments are the template's, and one of them may be called `self`.
        namespace, *rest = args
        values = dict(*rest, **attributes)
        for name in values:
            _require_public(name)
        Namespace.__init__(namespace, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)


def _require_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace in a chat template holds no {name!r}: names may not begin with an underscore")


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what the model wrote; rendered, it is a block of its own scope."""

    tags = {"generation"}  # noqa: RUF012  (the name and kind that Jinja asks for)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("written"), [], [], body).set_lineno(line)

    def written(self, caller: Macro) -> str:
        """What the block renders to."""
        return str(caller())


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters and sorts keys, neither of which belongs in a prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@jinja2.pass_eval_context
def _join(context: nodes.EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    items = _made(list(value))
    lengths = (len(item) for item in items if isinstance(item, str))
    _require(len(items) * len(str(d)) + sum(lengths) <= MOST_LENGTH, f"a text longer than {MOST_LENGTH}")
    return str(_made(do_join(context, items, d, attribute)))


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
