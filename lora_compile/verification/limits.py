"""The limits of the gates: defaults in code, which a deployment may tighten.

A looser limit is allowed, but never in silence: it marks the result.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from lora_compile.runtime.site_gate import DELTA_LIMIT, OUTPUT_LIMIT
from lora_compile.schemas.deployment import VerifyLimits


@dataclass(frozen=True)
class Limits:
    """See `VerifyLimits`."""

    site_output: float = OUTPUT_LIMIT
    site_delta: float = DELTA_LIMIT
    float32: float = 1e-5
    float32_top1: float = 0.999
    ratio_16bit: float = 1.5

    @staticmethod
    def of(wanted: VerifyLimits) -> Limits:
        """The defaults with what a deployment says instead."""
        given = {name: value for name, value in wanted.model_dump().items() if value is not None}
        return replace(Limits(), **given)

    @property
    def loosened(self) -> list[str]:
        """The limits that are looser than the defaults, in words."""
        default = Limits()
        found = []
        for field in fields(self):
            mine, usual = getattr(self, field.name), getattr(default, field.name)
            looser = mine < usual if field.name == "float32_top1" else mine > usual
            if looser:
                found.append(f"verify.limits.{field.name}: {mine:g} instead of {usual:g}")
        return found
