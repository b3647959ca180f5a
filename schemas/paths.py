"""Paths as users write them in a deployment."""

from __future__ import annotations

import os
import re
from pathlib import Path

from lora_compile.errors import InvalidValue

_VARIABLE = re.compile(r"\$\{([^}]*)\}?")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def resolve_path(
    deployment_file: str | Path, text: str, *, line: int | None = None, where: str | None = None
) -> Path:
    """`text` as a path: `${VAR}` and a leading `~` expanded, relative to the deployment's folder.

    Args:
        deployment_file: the YAML file that holds `text`.
        line, where: the place of `text` in it, for errors.

    Raises:
        InvalidValue: a variable is not set or empty, `${` is not closed, or `~user` has no home.
    """

    def fault(message: str, expected: str, found: str, fix: str) -> InvalidValue:
        return InvalidValue(
            message,
            file=deployment_file,
            line=line,
            where=where,
            expected=expected,
            found=found,
            fix=fix,
        )

    def variable(match: re.Match[str]) -> str:
        name = match[1]
        if not match[0].endswith("}") or not _NAME.fullmatch(name):
            raise fault(
                f"`{match[0]}` in a path is not a variable",
                "${NAME}, with a name of letters, digits and _",
                text,
                "write the variable as ${NAME}",
            )
        value = os.environ.get(name)
        if not value:
            raise fault(
                f"the environment variable `{name}` is {'not set' if value is None else 'empty'}",
                f"a value for ${{{name}}}",
                text,
                f"export {name}=..., or write the path itself",
            )
        return value

    expanded = _VARIABLE.sub(variable, text)
    try:
        path = Path(expanded).expanduser()
    except RuntimeError as error:
        raise fault(
            "the home directory in a path is not known", "~ or ~user of this machine", text, "~/..."
        ) from error
    return Path(deployment_file).parent / path
