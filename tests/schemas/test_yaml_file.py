"""Data -> models: which values fit which types, and how each mistake reads."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import Field

from lora_compile.errors import InvalidValue, LoraCompileError, MissingKey, UnknownKey
from lora_compile.schemas.architecture import SHIPPED as ARCHITECTURES
from lora_compile.schemas.base import StrictModel
from lora_compile.schemas.lint import lint
from lora_compile.schemas.quant_scheme import SHIPPED as SCHEMES
from lora_compile.schemas.yaml_file import load_yaml


class Circle(StrictModel):
    kind: Literal["circle"]
    radius: float


class Box(StrictModel):
    kind: Literal["box"]
    sides: tuple[int, int]
    tags: dict[str, int] = Field(default_factory=dict)


class Inner(StrictModel):
    deep_key: Annotated[int, Field(ge=1, le=9)] = 1


class Model(StrictModel):
    whole: int = 0
    number: float = 0.0
    flag: bool = False
    text: str | None = None
    words: tuple[str, ...] = ()
    shape: Annotated[Circle | Box, Field(discriminator="kind")] | None = None
    several: Literal["all"] | tuple[Literal["x", "y"], ...] = "all"
    inner: Inner = Inner()


@pytest.mark.parametrize(
    ("text", "attribute", "value"),
    [
        ("whole: 3", "whole", 3),
        ("number: 3", "number", 3.0),
        ("number: 1e-3", "number", 0.001),
        ("flag: true", "flag", True),
        ("words: [a, 'b']", "words", ("a", "b")),
        ("text: yes", "text", "yes"),
        ("several: [y]", "several", ("y",)),
        ("several: []", "several", ()),
        ("several: all", "several", "all"),
        ("shape: {kind: box, sides: [1, 2]}", "shape", Box(kind="box", sides=(1, 2))),
    ],
)
def test_values_that_fit(write, text: str, attribute: str, value: object) -> None:
    read = getattr(load_yaml(write(text), Model).value, attribute)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "where", "expected", "found", "fix"),
    [
        ("whole: '1'", "whole", "a whole number", "'1' (text)", "remove the quotes"),
        ("whole: true", "whole", "a whole number", "true (true/false)", None),
        ("whole: 1.0", "whole", "a whole number", "1.0", None),
        ("whole: 1e2", "whole", "a whole number", "100.0", None),
        ("number: '0.5'", "number", "a number", "'0.5' (text)", "remove the quotes"),
        ("number: false", "number", "a number", "false (true/false)", None),
        ("number: .nan", "number", "a number", "nan", None),
        ("number: -.inf", "number", "a number", "-inf", None),
        ("flag: yes", "flag", "true or false", "'yes' (text)", "write `true`"),
        ("flag: off", "flag", "true or false", "'off' (text)", "write `false`"),
        ("flag: 1", "flag", "true or false", "1", None),
        ("text: 3", "text", "text, or null", "3", "in quotes"),
        ("words: a", "words", "a list, each item text", "'a' (text)", None),
        ("words: [a, 1]", "words[1]", "text", "1", "in quotes"),
        ("words: {a: 1}", "words", "a list", "a mapping (keys: a)", None),
        ("words:", "words", "a list", "nothing (null)", None),
        ("shape: 3", "shape", "a mapping", "3", None),
        ("shape: {kind: bax}", "shape.kind", "circle | box", "'bax' (text)", "`box`"),
        ("shape: {kind: 3}", "shape.kind", "circle | box", "3", None),
        ("shape: {kind: circle, radius: x}", "shape.radius", "a number", "'x' (text)", None),
        ("shape: {kind: box, sides: [1]}", "shape.sides", "a list of 2", "a list of 1", None),
        ("shape: {kind: box, sides: [1, a]}", "shape.sides[1]", "a whole", "'a' (text)", None),
        (
            "shape: {kind: box, sides: [1, 2], tags: {box: x}}",
            "shape.tags.box",
            "a whole number",
            "'x' (text)",
            None,
        ),
        ("several: al", "several", "all, or a list, each item x | y", "'al' (text)", "`all`"),
        ("several: [x, z]", "several[1]", "x | y", "'z' (text)", None),
        ("several: 3", "several", "all, or a list", "3", None),
        ("inner: {deep_key: 10}", "inner.deep_key", "a whole number from 1 to 9", "10", None),
        ("inner: 3", "inner", "a mapping (keys: deep_key)", "3", None),
    ],
)
def test_values_that_do_not_fit(
    write, faults, text: str, where: str, expected: str, found: str, fix: str | None
) -> None:
    path = write("# a comment\n" + text)
    (fault,) = faults(lambda: load_yaml(path, Model))
    assert type(fault) is InvalidValue
    assert (fault.file, fault.line, fault.where) == (str(path), 2, where)
    assert (fault.expected or "").startswith(expected)
    assert fault.found == found
    assert (fix or "") in (fault.fix or "")


@pytest.mark.parametrize(
    ("text", "where", "hints"),
    [
        ("wohle: 1", "wohle", ["did you mean `whole`?"]),
        ("Whole: 1", "Whole", ["did you mean `whole`?"]),
        ("inner: {deepkey: 1}", "inner.deepkey", ["did you mean `deep_key`?"]),
        ("deep_key: 1", "deep_key", ["`deep_key` is a key of `inner`"]),
        ("inner: {number: 1}", "inner.number", ["`number` is a key of the top level"]),
        (
            "shape: {kind: circle, radius: 1, sides: [1, 2]}",
            "shape.sides",
            ["`sides` is a key of `shape with kind: box`"],
        ),
        ("shape: {kind: circle, radius: 1, circle: 2}", "shape.circle", []),
        ("xyzzy: 1", "xyzzy", ["remove it"]),
    ],
)
def test_unknown_keys_say_what_was_meant(
    write, faults, text: str, where: str, hints: list[str]
) -> None:
    path = write("\n" + text)
    (fault,) = faults(lambda: load_yaml(path, Model))
    assert type(fault) is UnknownKey
    assert (fault.line, fault.where) == (2, where)
    for hint in hints:
        assert hint in (fault.fix or "")


def test_missing_keys_say_where_and_what(write, faults) -> None:
    path = write("whole: 1\nshape:\n  kind: circle\n")
    (fault,) = faults(lambda: load_yaml(path, Model))
    assert type(fault) is MissingKey
    assert (fault.line, fault.where, fault.expected) == (2, "shape.radius", "a number")
    (fault,) = faults(lambda: load_yaml(write("shape: {radius: 1}"), Model))
    assert type(fault) is MissingKey
    assert (fault.where, fault.expected) == ("shape.kind", "circle | box")


def test_a_misspelt_required_key_is_one_fault(write, faults) -> None:
    (fault,) = faults(lambda: load_yaml(write("shape: {kind: circle, radis: 1}"), Model))
    assert type(fault) is UnknownKey
    assert "`radius`" in (fault.fix or "")


def test_all_faults_of_a_file_come_together_by_line(write, faults) -> None:
    text = "flag: 1\nwords: [1]\nzzz: 1\nflag: 2\ninner:\n  deep_key: 0\nshape: {kind: circle}\n"
    found = faults(lambda: load_yaml(write(text), Model))
    assert [(type(f).__name__, f.line) for f in found] == [
        ("InvalidValue", 1),
        ("InvalidValue", 2),
        ("UnknownKey", 3),
        ("DuplicateKey", 4),
        ("InvalidValue", 6),
        ("MissingKey", 7),
    ]


def test_checks_see_the_sections_that_are_valid(write, faults) -> None:
    seen: dict[str, Any] = {}

    def check(sections: Any, source: Any) -> list[LoraCompileError]:
        seen.update(sections)
        return [InvalidValue("from the check", file=source.file, line=1)]

    found = faults(lambda: load_yaml(write("number: 2\nflag: 1\n"), Model, check))
    assert [f.message for f in found] == ["from the check", "wrong value for `flag`"]
    assert "flag" not in seen
    assert (seen["number"], seen["whole"]) == (2.0, 0)
    seen.clear()
    faults(lambda: load_yaml(write("nmber: 2\nwhole: 1\n"), Model, check))
    assert seen == {"whole": 1}, "an absent key may be the misspelt one"


INTERNALS = ("pydantic", "Input should", "literal[", "tuple[", "function-", "[key]", "ValueError")
SHIPPED = [
    yaml.safe_load(path.read_text()) for path in (*ARCHITECTURES.iterdir(), *SCHEMES.iterdir())
]
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 400),
    st.floats(),
    st.text(st.characters(codec="utf-8", exclude_categories=("C",)), max_size=8),
    st.sampled_from(["linear", "auto", "none", "model.{layer}.x", "hidden_size //", "${A}", "("]),
    st.just([]),
    st.just({}),
    st.just([1, {"kind": "linear"}]),
    st.just({"kind": "embedding", "name": "x", "auto": 1}),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [(*path, k) for k, _ in inner] + [p for k, v in inner for p in places(v, (*path, k))]


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_broken_file_gives_readable_faults(
    data: st.DataObject, deployment: dict[str, Any], tmp_path: Path
) -> None:
    broken = copy.deepcopy(data.draw(st.sampled_from([deployment, *SHIPPED])))
    for _ in range(data.draw(st.integers(1, 3))):
        paths = places(broken)
        if not paths:
            break
        *parent, last = data.draw(st.sampled_from(paths))
        holder = broken
        for step in parent:
            holder = holder[step]
        action = data.draw(st.sampled_from(["replace", "delete", "rename"]))
        if action == "replace" or not isinstance(holder, dict):
            holder[last] = copy.deepcopy(data.draw(ODD))
        else:
            value = holder.pop(last)
            if action == "rename":
                holder[f"{last}s"] = value
    path = tmp_path / "broken.yaml"
    path.write_text(yaml.safe_dump(broken, sort_keys=False, allow_unicode=True))
    count = len(path.read_text().splitlines())
    for fault in lint(path):
        text = str(fault)
        assert fault.file == str(path)
        assert fault.line is not None
        assert 1 <= fault.line <= count
        assert not [word for word in INTERNALS if word in text], text


def test_source_of_a_valid_file(write: Callable[..., Path]) -> None:
    path = write("inner:\n  deep_key: 4\n")
    loaded = load_yaml(path, Model)
    assert loaded.source.file == str(path)
    assert loaded.source.line("inner.deep_key") == 2
    assert loaded.source.text_path(("words", random.Random(0).randrange(1), "x")) == "words[0].x"
