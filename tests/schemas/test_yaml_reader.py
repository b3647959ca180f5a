"""Text -> data with lines: what counts as a number or a boolean, and what is refused."""

from __future__ import annotations

import math

import pytest

from lora_compile.errors import DuplicateKey, FileMissing, InvalidValue, YamlSyntax
from lora_compile.schemas.source_map import parse_path, text_path
from lora_compile.schemas.yaml_reader import missing_file, parse_yaml, read_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("False", False),
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("off", "off"),
        ("~", None),
        ("", None),
        ("none", "none"),
        ("1e-3", 1e-3),
        ("1.0e-12", 1e-12),
        (".5", 0.5),
        ("010", 10),
        ("0o10", 8),
        ("0x10", 16),
        ("-3", -3),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("2026-01-02", "2026-01-02"),
        ("'8'", "8"),
        ("1.2.3", "1.2.3"),
        (".inf", math.inf),
        ("=", "="),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    read = parse_yaml(f"a: {text}", "f").data["a"]
    assert read == value
    assert type(read) is type(value)


def test_lines_of_keys_items_and_ancestors() -> None:
    source = parse_yaml("a:\n  - b: 1\n\n    c: {d: 2}\n  -\n    b: 3\ne: x\n", "f").source
    assert source.line("a") == 1
    assert source.line("a[0]") == 2
    assert source.line("a[0].c.d") == 4
    assert source.line(("a", 1, "b")) == 6
    assert source.line("e") == 7
    assert source.line("a[0].not_there.at_all") == 2
    assert source.line("nowhere") == source.line() == 1


def test_paths_round_trip() -> None:
    path = ("sites", 3, "parts", 0, "name")
    assert text_path(path) == "sites[3].parts[0].name"
    assert parse_path(text_path(path)) == path
    with pytest.raises(ValueError, match="not a path"):
        parse_path("a[b]")


def test_duplicate_keys_are_faults_and_the_rest_is_read() -> None:
    document = parse_yaml("a: 1\nb:\n  c: 1\n  c: 2\na: 2\n", "f.yaml")
    assert document.data == {"a": 1, "b": {"c": 1}}
    assert [(type(f), f.line, f.where) for f in document.faults] == [
        (DuplicateKey, 4, "b.c"),
        (DuplicateKey, 5, "a"),
    ]
    assert "line 1" in str(document.faults[1])


@pytest.mark.parametrize("key", ["1", "true", "null", "[a, b]", "{a: b}"])
def test_keys_are_text(key: str) -> None:
    (fault,) = parse_yaml(f"x: 1\n? {key}\n: 2\n", "f").faults
    assert isinstance(fault, InvalidValue)
    assert fault.line == 2


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\nb: [1, 2\nc: 3\n", 3),
        ("a: 1\n\tb: 2\n", 2),
        ("a: b: c\n", 1),
        ("- 1\n- 2\n", 1),
        ("just text", 1),
        ("", 1),
        ("a: 1\n---\nb: 2\n", 2),
        ("a: 1\nb: *gone\n", 2),
        ("a: 1\nb: !!python/object/apply:os.system [x]\n", 2),
        ("a: 1\nb: !mine 3\n", 2),
        ("a: 1\nb: !!int x\n", 2),
        ('a: 1\nb: "\\ud800"\n', 2),
        ("a: 1\nb: \x01\n", 2),
        ("a: 1\nb: &x [*x]\n", 2),
        ("a: 1\nb: " + "9" * 5000, 2),
        ("a: {at: model.{layer}.x}\n", 1),
    ],
)
def test_what_is_not_readable_says_the_line(text: str, line: int) -> None:
    with pytest.raises(YamlSyntax) as caught:
        parse_yaml(text, "f.yaml")
    assert (caught.value.file, caught.value.line) == ("f.yaml", line)


def test_depth_does_not_overflow_the_stack() -> None:
    with pytest.raises(YamlSyntax, match="too deeply"):
        parse_yaml("a: " + "[" * 5000, "f")


def test_alias_bomb_is_refused() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    with pytest.raises(YamlSyntax, match="endless"):
        parse_yaml("\n".join(lines), "f")


def test_alias_is_the_value_it_names() -> None:
    document = parse_yaml("a: &x {b: 1}\nc: *x\n", "f")
    assert document.data == {"a": {"b": 1}, "c": {"b": 1}}
    assert document.source.line("c") == 2


def test_bytes_that_are_not_text(tmp_path) -> None:
    path = tmp_path / "f.yaml"
    path.write_bytes(b"a: 1\nb: \xff\n")
    with pytest.raises(YamlSyntax, match="UTF-8") as caught:
        read_yaml(path)
    assert caught.value.line == 2
    path.write_bytes("\ufeffa: ü\n".encode())
    assert read_yaml(path).data == {"a": "ü"}


def test_missing_file_names_its_neighbours(tmp_path) -> None:
    (tmp_path / "deployment.yaml").touch()
    with pytest.raises(FileMissing) as caught:
        read_yaml(tmp_path / "deploymnet.yaml")
    assert f"did you mean `{tmp_path / 'deployment.yaml'}`?" == caught.value.fix
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    error = missing_file(tmp_path / "model" / "tiny", file="d.yaml", line=4, where="model.path")
    assert (error.file, error.line, error.where) == ("d.yaml", 4, "model.path")
    assert str(tmp_path / "models") in (error.fix or "")
    with pytest.raises(FileMissing, match="cannot be read"):
        read_yaml(tmp_path / "models")
