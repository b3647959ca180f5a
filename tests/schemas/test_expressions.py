"""The expression language: equal to Python where it speaks, deaf to everything else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_compile.errors import ExpressionInvalid
from lora_compile.schemas.expressions import MAX_LENGTH, Expression, evaluate

NAMES = ("hidden_size", "n", "head_dim", "flag", "zero")


def trees() -> st.SearchStrategy[str]:
    leaves = st.one_of(
        st.integers(0, 300).map(str), st.sampled_from(NAMES), st.sampled_from(["True", "False"])
    )

    def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        binary = st.sampled_from(["+", "-", "*", "//", "and", "or", "==", "!=", "<", "<=", ">"])
        return st.one_of(
            st.tuples(inner, binary, inner).map(" ".join),
            st.tuples(inner, st.just("<"), inner, st.just(">="), inner).map(" ".join),
            inner.map("({})".format),
            inner.map("not {}".format),
            inner.map("-{}".format),
            st.tuples(inner, inner, inner).map(lambda t: "{} if {} else {}".format(*t)),
        )

    return st.recursive(leaves, grow, max_leaves=12)


VALUES = st.fixed_dictionaries(
    {name: st.integers(-5, 9000) for name in NAMES[:3]}
    | {"flag": st.booleans(), "zero": st.just(0)}
)


@settings(max_examples=500, deadline=None)
@given(text=trees(), config=VALUES)
def test_agrees_with_python(text: str, config: dict[str, int]) -> None:
    try:
        wanted = eval(text, {"__builtins__": {}}, dict(config))
    except SyntaxError:  # e.g. `1 + not 2`
        with pytest.raises(ExpressionInvalid):
            evaluate(text, config)
        return
    except ZeroDivisionError:
        with pytest.raises(ExpressionInvalid, match="division by zero"):
            evaluate(text, config)
        return
    if len(text) > MAX_LENGTH:
        with pytest.raises(ExpressionInvalid):
            evaluate(text, config)
        return
    found = evaluate(text, config)
    assert found == wanted
    assert type(found) is type(wanted)


@pytest.mark.parametrize(
    ("text", "config", "value"),
    [
        ("head_dim or hidden_size // n", {"hidden_size": 64, "n": 4}, 16),
        ("head_dim or hidden_size // n", {"hidden_size": 64, "n": 4, "head_dim": None}, 16),
        ("head_dim or hidden_size // n", {"hidden_size": 64, "n": 4, "head_dim": 8}, 8),
        ("a or b or 3", {}, 3),
        ("(a or b) or 3", {}, 3),
        ("a and 2 or 3", {}, 3),
        ("(a if 1 else 2) or 3", {}, 3),
        ("2 if a or 0 else 3", {}, 3),
        ("  1 +\n2", {}, None),
        ("(1 +\n2)", {}, 3),
        ("0 and gone", {}, 0),
        ("1 or gone", {}, 1),
        ("1 if 1 else gone", {}, 1),
        ("2 < 1 < gone", {}, False),
    ],
)
def test_absent_names_count_only_left_of_or(text, config, value) -> None:
    if value is None:
        with pytest.raises(ExpressionInvalid):
            evaluate(text, config)
    else:
        assert evaluate(text, config) == value


@pytest.mark.parametrize(
    ("text", "config", "facts"),
    [
        ("hiden_size * 2", {"hidden_size": 4}, ["`hiden_size`", "did you mean `hidden_size`?"]),
        ("a", {"a": None}, ["`a`", "a = null"]),
        ("1 or a + gone or 2", {}, None),
        ("0 or a + 1", {}, ["`a`", "no `a`"]),
        ("(a + 1) or 2", {}, ["`a`"]),
        ("-a or 2", {}, ["`a`"]),
        ("not a", {}, ["`a`"]),
        ("3 or 4 if a else 5", {}, ["`a`"]),
        ("0 or a", {}, ["`a`"]),
        ("a // 2", {"a": 0.5}, ["a = 0.5", "whole number"]),
        ("a", {"a": "8"}, ["a = '8'"]),
        ("a", {"a": [1]}, ["a = [1]"]),
    ],
)
def test_names_that_give_no_number(text, config, facts) -> None:
    if facts is None:
        assert evaluate(text, config) == 1
        return
    with pytest.raises(ExpressionInvalid) as caught:
        evaluate(text, config)
    for fact in facts:
        assert fact in str(caught.value)


def test_names_come_from_let_before_the_config() -> None:
    class Config:
        _hidden = 3

        def __init__(self) -> None:
            self.width = 3

        @property
        def derived(self) -> int:
            return 4

        def method(self) -> int:
            return 5

    assert evaluate("width + derived", Config()) == 7
    assert evaluate("width + derived", Config(), {"width": 10}) == 14
    for text in ("_hidden", "method", "__class__"):
        with pytest.raises(ExpressionInvalid):
            evaluate(text, Config())


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "().__class__.__bases__[0]",
        "open('/etc/passwd')",
        "config.hidden_size",
        "a[0]",
        "(lambda: 1)()",
        "[x for x in (1,)]",
        "{1: 2}",
        "{1}",
        "(1, 2)",
        "'text'",
        "f'{a}'",
        "b'x'",
        "1.5",
        "1j",
        "...",
        "None",
        "(a := 3)",
        "2 ** 9 ** 9",
        "1 << 60",
        "1 / 2",
        "7 % 2",
        "1 @ 2",
        "~1",
        "+1",
        "1 & 2",
        "a is b",
        "a in b",
        "await a",
        "(yield)",
        "*a",
        "a; b",
        "import os",
        "a = 1",
        "",
        "  ",
        "1 +",
        "a\x00",
        "_private",
        "\\",
        "(" * 100 + "1" + ")" * 100 + "+" * 120,
        "(" * 250 + "1",
        "-" * 250 + "1",
        "not " * 70 + "1",
        "1" * 301,
        "1 + " * 70 + "1",
    ],
)
def test_hostile_or_foreign_text_is_refused(text: str) -> None:
    with pytest.raises(ExpressionInvalid) as caught:
        Expression.parse(text)
    assert caught.value.expected
    assert caught.value.found
