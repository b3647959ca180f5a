"""How a validator inside a model says which of our errors a value deserves."""

from __future__ import annotations

from lora_compile.errors import InvalidValue, LoraCompileError


class RejectedValue(ValueError):
    """Raised in a validator; the YAML loader turns it into `kind` with file, line and path."""

    def __init__(
        self,
        message: str,
        *,
        kind: type[LoraCompileError] = InvalidValue,
        expected: str | None = None,
        found: str | None = None,
        fix: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind
        self.expected = expected
        self.found = found
        self.fix = fix
