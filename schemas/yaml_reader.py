"""YAML text -> plain data with the line of every key.

Scalars are read by the core schema of YAML 1.2, so a value is what it looks like: only `true` and
`false` are booleans (`yes`, `no`, `on` and `off` are text), `1e-3` is a number, `010` is ten, and
a date is text. Keys are text and may stand once in a mapping; merge keys (`<<`) do not exist.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lora_compile.errors import (
    DuplicateKey,
    FileMissing,
    InvalidValue,
    LoraCompileError,
    YamlSyntax,
)
from lora_compile.schemas.source_map import KeyPath, SourceMap, text_path

MAX_VALUES = 100_000
"""Aliases can make a small file stand for an endless one; no file of ours comes near this."""

_TAG = "tag:yaml.org,2002:"


class _CoreLoader(yaml.SafeLoader):
    """SafeLoader with the implicit types of YAML 1.2's core schema (section 10.3.2)."""


_CoreLoader.yaml_implicit_resolvers = {}

for _name, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    _CoreLoader.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_pattern})\Z"), _first)


@dataclass(frozen=True)
class Document:
    """One YAML file as plain data. `faults` are those that did not keep it from being read."""

    data: dict[str, Any]
    source: SourceMap
    faults: tuple[LoraCompileError, ...]


def missing_file(
    path: Path, *, file: object = None, line: int | None = None, where: str | None = None
) -> FileMissing:
    """The error for a path that is not there; names the nearest folder and its nearest entries.

    Args:
        path: what was looked for.
        file, line, where: the place that names `path`; without them `path` itself is the place.
    """
    folder = path.parent
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    wanted = path.relative_to(folder).parts[0] if path != folder else path.name
    entries = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    near = difflib.get_close_matches(wanted, entries, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(f'`{folder / name}`' for name in near)}?" if near else None
    return FileMissing(
        f"`{path}` does not exist",
        file=path if file is None else file,
        line=line,
        where=where,
        found=f"`{folder}` exists and has no `{wanted}`",
        fix=hint or "correct the path",
    )


def read_yaml(path: str | Path) -> Document:
    """Read one YAML file whose top level is a mapping.

    Raises:
        FileMissing: nothing readable is at `path`.
        YamlSyntax: the text is not YAML, or its top level is not a mapping.
    """
    path = Path(path)
    if not path.exists():
        raise missing_file(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise FileMissing(
            "the file cannot be read", file=path, expected="a YAML file", found=error.strerror
        ) from error
    return parse_yaml(_decode(raw, path), path)


def parse_yaml(text: str, path: str | Path) -> Document:
    """The same for text; `path` is what errors name as the file."""
    return _Builder(str(path)).document(_compose(text, Path(path)))


def _decode(raw: bytes, path: Path) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise YamlSyntax(
            "the file is not UTF-8 text",
            file=path,
            line=raw.count(b"\n", 0, error.start) + 1,
            found=f"byte 0x{raw[error.start]:02x}",
            fix="save the file as UTF-8",
        ) from error


def _compose(text: str, path: Path) -> yaml.Node | None:
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=_CoreLoader)
        return node
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        context = f"{error.context}: " if error.context else ""
        raise YamlSyntax(
            f"not YAML: {context}{error.problem}",
            file=path,
            line=None if mark is None else mark.line + 1,
            found=None if mark is None else _source_line(text, mark.line),
            fix="put a value that holds any of `{ } [ ] , # :` in quotes; check the indentation",
        ) from error
    except yaml.reader.ReaderError as error:
        raise YamlSyntax(
            "not YAML: a character that YAML does not allow",
            file=path,
            line=text.count("\n", 0, error.position) + 1,
            found=f"U+{ord(text[error.position]):04X}",
        ) from error
    except RecursionError as error:
        raise YamlSyntax("not readable: nested too deeply", file=path) from error


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a single value"


def _source_line(text: str, index: int) -> str | None:
    lines = text.splitlines()
    return lines[index].strip() if index < len(lines) else None


@dataclass
class _Builder:
    """Turns nodes into data and notes each key's line."""

    file: str
    lines: dict[KeyPath, int] = field(default_factory=dict)
    faults: list[LoraCompileError] = field(default_factory=list)
    open_nodes: set[int] = field(default_factory=set)
    count: int = 0

    def document(self, root: yaml.Node | None) -> Document:
        if not isinstance(root, yaml.MappingNode):
            raise YamlSyntax(
                "the top level is not a mapping",
                file=self.file,
                line=1 if root is None else root.start_mark.line + 1,
                expected="`key: value` lines",
                found="an empty file" if root is None else _kind(root),
            )
        self.lines[()] = root.start_mark.line + 1
        data = self.mapping(root, ())
        return Document(data, SourceMap(self.file, self.lines), tuple(self.faults))

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        self.count += 1
        if self.count > MAX_VALUES or id(node) in self.open_nodes:
            raise self.syntax(node, path, "an alias makes the file endless", fix="write it out")
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, path)
        self.open_nodes.add(id(node))
        result: Any
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            result = self.mapping(node, path)
        elif isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            result = self.sequence(node, path)
        else:
            raise self.syntax(node, path, f"tag `{node.tag}` is not supported", fix="remove it")
        self.open_nodes.discard(id(node))
        return result

    def mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _TAG + "str":
                found = getattr(key_node, "value", None)
                self.faults.append(
                    InvalidValue(
                        "a key is not text",
                        file=self.file,
                        line=line,
                        where=text_path(path) or None,
                        expected="text as the key",
                        found=found if isinstance(found, str) else _kind(key_node),
                        fix="put the key in quotes",
                    )
                )
                continue
            key = str(self.scalar(key_node, path))
            if key in result:
                first = self.lines[(*path, key)]
                self.faults.append(
                    DuplicateKey(
                        f"key `{key}` stands twice in one mapping",
                        file=self.file,
                        line=line,
                        where=text_path((*path, key)),
                        expected="each key once",
                        found=f"first written in line {first}",
                        fix=f"remove line {first} or line {line}",
                    )
                )
                continue
            self.lines[(*path, key)] = line
            result[key] = self.value(value_node, (*path, key))
        return result

    def sequence(self, node: yaml.SequenceNode, path: KeyPath) -> list[Any]:
        result = []
        for index, item in enumerate(node.value):
            self.lines[(*path, index)] = item.start_mark.line + 1
            result.append(self.value(item, (*path, index)))
        return result

    def scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        kind, text = node.tag.removeprefix(_TAG), str(node.value)
        try:
            if kind == "str":
                text.encode()  # a lone surrogate is not text
                return text
            if kind == "null":
                return None
            if kind == "bool":
                return {"true": True, "false": False}[text.lower()]
            if kind == "int":
                return int(text, 0 if text[:2] in ("0o", "0x") else 10)
            if kind == "float":
                return float(re.sub(r"\.(inf|nan)", r"\1", text.lower()))
        except (ValueError, KeyError) as error:
            raise self.syntax(node, path, f"not a {kind} value", found=text[:60]) from error
        raise self.syntax(node, path, f"tag `{node.tag}` is not supported", fix="remove it")

    def syntax(
        self,
        node: yaml.Node,
        path: KeyPath,
        message: str,
        *,
        found: str | None = None,
        fix: str | None = None,
    ) -> YamlSyntax:
        return YamlSyntax(
            message,
            file=self.file,
            line=node.start_mark.line + 1,
            where=text_path(path) or None,
            found=None if found is None else ascii(found),
            fix=fix,
        )
