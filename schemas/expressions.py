"""Widths and conditions of a schema, as small expressions over a model's config.

The language: whole numbers, `True`, `False`, names, `+ - * //`, unary `-`, comparisons,
`and or not`, `a if condition else b`, parentheses. Values and operators mean what they mean in
Python. A name is an attribute of the model's config, a flag of the schema, or a key of its `let`.
The `when` of something in a decoder layer may also use `layer`, the layer's index. A name that is
absent or null is an error, except in the left operand of `or`: there it counts as false, so
`head_dim or hidden_size // num_attention_heads` reads as it looks. Nothing is ever executed: the
text is parsed and the tree is walked.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from lora_compile.errors import ExpressionInvalid
from lora_compile.schemas.rejected import RejectedValue
from lora_compile.schemas.yaml_faults import nearest

MAX_LENGTH = 300
MAX_DEPTH = 32

_GRAMMAR = "whole numbers, names, + - * //, comparisons, and/or/not, `a if c else b`, parentheses"

_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
_COMPARE: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


@dataclass(frozen=True)
class Scope:
    """What the names of an expression stand for."""

    config: object
    """A Hugging Face config, or a mapping."""
    derived: Mapping[str, int | bool]
    """The schema's flags and its `let` values so far; they come before the config's."""

    def find(self, name: str) -> object:
        """The value of `name`; None where it is absent or null."""
        if name in self.derived:
            return self.derived[name]
        if isinstance(self.config, Mapping):
            return self.config.get(name)
        return None if name.startswith("_") else getattr(self.config, name, None)

    @cached_property
    def names(self) -> frozenset[str]:
        config = self.config
        known = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
        return frozenset((*self.derived, *(n for n in known if not n.startswith("_"))))


@dataclass(frozen=True)
class Expression:
    """A parsed expression."""

    text: str
    body: ast.expr

    @staticmethod
    def parse(text: str) -> Expression:
        """Parse and check against the language.

        Raises:
            ExpressionInvalid: the text is outside the language.
        """
        if len(text) > MAX_LENGTH:
            raise _outside(text[:40] + "...", f"{len(text)} characters; at most {MAX_LENGTH}")
        try:
            body = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            found = getattr(error, "msg", None) or str(error) or type(error).__name__
            raise _outside(text, found) from error
        _check(text, body, 0)
        return Expression(text, body)

    @property
    def names(self) -> frozenset[str]:
        """Every name that stands in the text."""
        return frozenset(node.id for node in ast.walk(self.body) if isinstance(node, ast.Name))

    def evaluate(self, scope: Scope) -> int | bool:
        """The value, a whole number or a truth value.

        Raises:
            ExpressionInvalid: a name is unknown, null or no whole number; division by zero.
        """
        value = _Walk(self.text, scope).value(self.body, absent_ok=False)
        assert value is not None
        return value


def _outside(text: str, found: str) -> ExpressionInvalid:
    return ExpressionInvalid(f"`{text}` is not an expression", expected=_GRAMMAR, found=found)


def _check(text: str, node: ast.expr, depth: int) -> None:
    """Refuse every node that the language does not have."""
    if depth > MAX_DEPTH:
        raise _outside(text, f"nested more than {MAX_DEPTH} levels deep")
    inner: list[ast.expr] = []
    match node:
        case ast.Constant(value=value) if type(value) in (int, bool):
            pass
        case ast.Name(id=name) if not name.startswith("_"):
            pass
        case ast.BoolOp(values=values):
            inner = values
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            inner = [left, right]
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            inner = [operand]
        case ast.Compare(left=left, ops=ops, comparators=rest) if all(
            type(op) in _COMPARE for op in ops
        ):
            inner = [left, *rest]
        case ast.IfExp(test=test, body=body, orelse=orelse):
            inner = [test, body, orelse]
        case _:
            raise _outside(text, f"`{ast.get_source_segment(text.strip(), node)}`")
    for item in inner:
        _check(text, item, depth + 1)


@dataclass(frozen=True)
class _Walk:
    text: str
    scope: Scope

    def value(self, node: ast.expr, *, absent_ok: bool) -> int | bool | None:
        """Evaluate one node. None (an absent name) comes back only where `absent_ok`."""
        match node:
            case ast.Constant(value=int(value)):
                return value
            case ast.Name(id=name):
                return self.name(name, absent_ok=absent_ok)
            case ast.BoolOp(op=ast.Or(), values=[*left, last]):
                for operand in left:
                    if chosen := self.value(operand, absent_ok=True):
                        return chosen
                return self.value(last, absent_ok=absent_ok)
            case ast.BoolOp(op=ast.And(), values=[*left, last]):
                for operand in left:
                    if not (chosen := self.value(operand, absent_ok=absent_ok)):
                        return chosen
                return self.value(last, absent_ok=absent_ok)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                branch = body if self.number(test) else orelse
                return self.value(branch, absent_ok=absent_ok)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self.number(operand)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.number(operand)
            case ast.BinOp(left=a, op=op, right=b):
                return self.arithmetic(type(op), self.number(a), self.number(b))
            case ast.Compare(left=first, ops=ops, comparators=rest):
                left_value = self.number(first)
                for compare, right in zip(ops, rest, strict=True):
                    right_value = self.number(right)
                    if not _COMPARE[type(compare)](left_value, right_value):
                        return False
                    left_value = right_value
                return True
        raise _outside(self.text, ast.dump(node))

    def number(self, node: ast.expr) -> int | bool:
        value = self.value(node, absent_ok=False)
        assert value is not None
        return value

    def arithmetic(self, op: type[ast.operator], left: int, right: int) -> int:
        if op is ast.FloorDiv and right == 0:
            raise ExpressionInvalid(
                f"division by zero in `{self.text}`",
                expected="a divisor other than 0",
                found=f"{left} // 0",
            )
        return _ARITHMETIC[op](left, right)

    def name(self, name: str, *, absent_ok: bool) -> int | bool | None:
        value = self.scope.find(name)
        if value is None and absent_ok:
            return None
        if isinstance(value, int):
            return value
        known = value is not None or name in self.scope.names
        near = None if known else nearest(name, self.scope.names)
        raise ExpressionInvalid(
            f"`{name}` in `{self.text}` is " + ("not a whole number" if known else "not known"),
            expected="a name of the model's config, of `flags` or of `let` whose value is a whole "
            "number",
            found=f"{name} = {_short(value)}" if known else f"no `{name}`",
            fix=f"did you mean `{near}`?" if near else f"`{name} or <other>` allows it to be null",
        )


def _short(value: object) -> str:
    if value is None:
        return "null"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def evaluate(text: str, config: object, derived: Mapping[str, int | bool] | None = None) -> int:
    """Parse and evaluate in one step; see `Expression`. A truth value comes back as a bool."""
    return Expression.parse(text).evaluate(Scope(config, {} if derived is None else derived))


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, (int, float)) else value


def _parsed(text: str) -> str:
    try:
        Expression.parse(text)
    except ExpressionInvalid as error:
        raise RejectedValue(
            error.message,
            kind=ExpressionInvalid,
            expected=error.expected,
            found=error.found,
            fix=error.fix,
        ) from error
    return text


ExpressionText = Annotated[
    str,
    BeforeValidator(_as_text, json_schema_input_type=str | int | bool),
    AfterValidator(_parsed),
    Field(title="an expression over the model's config, e.g. `hidden_size // 2`"),
]
"""A field that holds an expression; a plain number may stand in the YAML too."""
