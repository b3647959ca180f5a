"""What a verification found, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lora_compile.runtime.site_gate import GateResult
from lora_compile.verification.activation import Followed
from lora_compile.verification.figures import Figures, Tokens
from lora_compile.verification.limits import Limits

PHASES = ("prefill", "decode")
BASE = None
"""The name of base rows among adapters' names."""


@dataclass
class Run:
    """One dtype end to end: the tokens of base rows and of each adapter, by phase."""

    dtype: str
    tokens: dict[tuple[str | None, str], list[Tokens]] = field(default_factory=dict)
    """(adapter or None, phase) -> comparisons."""
    followed: Followed = field(default_factory=Followed)

    def of(self, adapter: str | None, phase: str | None = None) -> Tokens:
        """The tokens of an adapter (None: base rows), of one phase or of both."""
        phases = PHASES if phase is None else (phase,)
        return Tokens.join([t for p in phases for t in self.tokens.get((adapter, p), [])])

    @property
    def adapters(self) -> list[str | None]:
        """Base rows first, then the adapters."""
        names = dict.fromkeys(name for name, _ in self.tokens)
        return sorted(names, key=lambda name: (name is not None, name))

    def figures(self) -> dict[tuple[str | None, str], Figures]:
        return {key: Tokens.join(parts).figures for key, parts in self.tokens.items()}


@dataclass(frozen=True)
class Control:
    """One fault that was built in on purpose; some gate must see it."""

    adapter: str
    fault: str
    """`off`, `half scale`, or which site was dropped."""
    figures: Figures
    """End to end in float32, against the reference with the whole adapter."""
    end_to_end_caught: bool
    site_gate_caught: bool

    @property
    def caught(self) -> bool:
        return self.end_to_end_caught or self.site_gate_caught


@dataclass(frozen=True)
class Result:
    """A whole verification."""

    limits: Limits
    site_gate: GateResult
    float32: Run
    low: Run | None
    """The deployment's own 16-bit dtype; None where that is float32."""
    plain: Run | None
    """Plain transformers in that dtype, with the same quantised weights and inputs."""
    controls: tuple[Control, ...]

    @property
    def failures(self) -> list[str]:
        """What is past a limit, in words; empty where everything passed."""
        return [
            *self._site_failures(),
            *self._float32_failures(),
            *self._low_failures(),
            *(
                f"control `{control.fault}` of adapter {control.adapter} was not noticed"
                for control in self.controls
                if not control.caught
            ),
        ]

    @property
    def ratios(self) -> dict[str, float]:
        """Adapter -> its figure in 16 bit over that of base rows."""
        return _over_base(self.low)

    @property
    def plain_ratios(self) -> dict[str, float]:
        """The same of plain transformers: how much more sensitive an adapter makes the model."""
        return _over_base(self.plain)

    def _site_failures(self) -> list[str]:
        found, limits = self.site_gate, self.limits
        failures = []
        for what, figure, limit in (
            ("output", found.output, limits.site_output),
            ("delta", found.delta, limits.site_delta),
        ):
            if figure is not None and not figure.error <= limit:
                failures.append(
                    f"site gate: {what} of {figure.site}, row {figure.row}, {figure.phase}: "
                    f"{figure.error:.1e} of {limit:.1e}"
                )
        failures += [f"site gate: {what}" for what in found.gaps(PHASES)]
        return failures

    def _float32_failures(self) -> list[str]:
        failures = []
        for (name, phase), figures in self.float32.figures().items():
            where = f"float32, {name or 'base rows'}, {phase}"
            if not figures.half_mean_square <= self.limits.float32:
                failures.append(
                    f"{where}: ½ mean Δ² is {figures.half_mean_square:.1e} of "
                    f"{self.limits.float32:.1e}"
                )
            if not figures.top1 >= self.limits.float32_top1:
                failures.append(
                    f"{where}: {figures.top1:.2%} equal top tokens, "
                    f"of {self.limits.float32_top1:.2%}"
                )
        return failures

    def _low_failures(self) -> list[str]:
        dtype = "" if self.low is None else self.low.dtype
        failures = []
        for name, ratio in self.ratios.items():
            limit = self.limits.ratio_16bit * max(1.0, self.plain_ratios[name])
            if not ratio <= limit:
                failures.append(
                    f"{dtype}, {name}: {ratio:.2f} times the figure of base rows, of {limit:.2f}"
                )
        return failures

    def as_dict(self) -> dict[str, Any]:
        """For machines."""

        def run(found: Run | None) -> Any:
            if found is None:
                return None
            return {
                "dtype": found.dtype,
                "figures": [
                    {"adapter": name, "phase": phase, **vars(figures)}
                    for (name, phase), figures in found.figures().items()
                ],
                "codes": vars(found.followed),
            }

        return {
            "ok": not self.failures,
            "failures": self.failures,
            "limits": vars(self.limits),
            "loosened": self.limits.loosened,
            "site_gate": self.site_gate.as_dict(),
            "float32": run(self.float32),
            "low": run(self.low),
            "ratios_16bit": self.ratios,
            "plain": run(self.plain),
            "plain_ratios_16bit": self.plain_ratios,
            "controls": [
                {
                    "adapter": control.adapter,
                    "fault": control.fault,
                    "figures": vars(control.figures),
                    "end_to_end_caught": control.end_to_end_caught,
                    "site_gate_caught": control.site_gate_caught,
                    "caught": control.caught,
                }
                for control in self.controls
            ],
        }


def _over_base(run: Run | None) -> dict[str, float]:
    if run is None:
        return {}
    base = run.of(BASE).figures.half_mean_square
    return {
        name: run.of(name).figures.half_mean_square / max(base, 1e-30)
        for name in run.adapters
        if name is not None
    }
