"""Which tensors of a checkpoint somebody takes: each is consumed, ignored by a rule, or a fault."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from lora_compile.checkpoints.source import WeightSource
from lora_compile.checkpoints.stacked import NO_RULES, ParameterRules, Stack
from lora_compile.errors import (
    FaultList,
    SchemeUnsupported,
    TensorMissing,
    TensorShape,
    TensorUnexpected,
)

FLOAT_DTYPES = ("BF16", "F16", "F32")


class Ledger:
    """The tensors accounted for so far, and the faults found on the way."""

    def __init__(self, source: WeightSource) -> None:
        self.source = source
        self.headers = source.headers
        self.faults = FaultList()
        self.taken: set[str] = set()

    def expect(self, key: str, shape: tuple[int, ...], where: str | None) -> bool:
        """Take a floating-point tensor of this shape, or note what is wrong with it."""
        self.taken.add(key)
        header = self.headers.get(key)
        if header is None:
            self.faults.add(
                TensorMissing(
                    "the checkpoint lacks a tensor of the model",
                    file=self.source.name,
                    where=where,
                    tensor=key,
                    expected=f"shape {list(shape)}",
                    fix="check that the checkpoint is complete and of this architecture",
                )
            )
            return False
        if header.shape == shape and header.dtype in FLOAT_DTYPES:
            return True
        self.faults.add(
            TensorShape(
                "a tensor of the wrong shape"
                if header.shape != shape
                else "a tensor of a dtype that is not read unquantised",
                file=header.file,
                where=where,
                tensor=key,
                expected=f"{'/'.join(FLOAT_DTYPES)} {list(shape)}",
                found=f"{header.dtype} {list(header.shape)}",
            )
        )
        return False

    def parameters(
        self, other: Mapping[str, tuple[int, ...]], rules: ParameterRules = NO_RULES
    ) -> None:
        """Take what lies outside projections, by name or piece by piece."""
        refused = self._refuse_quantised(other, rules)
        for key, shape in other.items():
            if _module_of(key, rules.kept) in refused:
                continue
            stack = rules.stacks.get(key)
            if stack is None:
                self.expect(key, tuple(shape), None)
            else:
                self._stacked(stack)

    def _refuse_quantised(
        self, other: Mapping[str, tuple[int, ...]], rules: ParameterRules
    ) -> set[str]:
        """Note the modules that must be stored unquantised and are not; returns them."""
        wanted = {*other, *(name for s in rules.stacks.values() for name, _ in s.all_tensors())}
        found: dict[str, list[str]] = defaultdict(list)
        refused: set[str] = set()
        for key, header in self.headers.items():
            module = _module_of(key, rules.kept)
            if module is None:
                continue
            scale = key not in wanted and "scale" in key.rpartition(".")[2]
            if header.dtype not in FLOAT_DTYPES or scale:
                found[rules.kept[module]].append(key)
                refused.add(module)
        for what, keys in found.items():
            first = min(keys)
            header = self.headers[first]
            self.faults.add(
                SchemeUnsupported(
                    f"{what}: stored quantised, which is not served yet",
                    file=header.file,
                    where=_module_of(first, rules.kept),
                    tensor=_some(sorted(keys)),
                    expected=f"{'/'.join(FLOAT_DTYPES)} tensors without scales",
                    found=f"{header.dtype} {list(header.shape)}",
                    fix=f"use a checkpoint in which the {what} are not quantised",
                )
            )
        if refused:  # told by these faults; telling each tensor again would bury them
            self.taken |= {key for key in self.headers if _module_of(key, rules.kept) in refused}
        return refused

    def _stacked(self, stack: Stack) -> None:
        """Take a parameter as a whole, or every one of its pieces."""
        pieces = stack.all_tensors()
        present = [name for name, _ in pieces if name in self.headers]
        self.taken |= set(present)
        if stack.parameter in self.headers:
            self.expect(stack.parameter, stack.shape, None)
            if present:
                self.faults.add(
                    TensorUnexpected(
                        f"pieces of {stack.parameter} stand beside the whole parameter",
                        file=self.headers[present[0]].file,
                        tensor=_some(present),
                        expected="the whole, or all its pieces",
                        found="both",
                        fix="remove one of the two from the checkpoint",
                    )
                )
            return
        missing = [name for name, _ in pieces if name not in self.headers]
        if missing:
            self.faults.add(
                TensorMissing(
                    f"the checkpoint lacks {len(missing)} of {len(pieces)} pieces of a parameter"
                    if present
                    else "the checkpoint lacks a parameter, whole and in pieces",
                    file=self.source.name,
                    where=stack.parameter,
                    tensor=_some(missing),
                    expected=f"shape {list(dict(pieces)[missing[0]])}, or {stack.parameter} "
                    f"{list(stack.shape)} as a whole",
                    fix="check that the checkpoint is complete and of this architecture",
                )
            )
        wrong: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name, shape in pieces:
            header = self.headers.get(name)
            if header and (header.shape != shape or header.dtype not in FLOAT_DTYPES):
                wrong[f"{list(shape)}", f"{header.dtype} {list(header.shape)}"].append(name)
        for (expected, found), names in wrong.items():
            self.faults.add(
                TensorShape(
                    "a piece of the wrong shape or dtype",
                    file=self.headers[names[0]].file,
                    where=stack.parameter,
                    tensor=_some(names),
                    expected=f"{'/'.join(FLOAT_DTYPES)} {expected}",
                    found=found,
                )
            )

    def leftovers(self, ignored: Mapping[str, str]) -> dict[str, str]:
        """Name -> why of the ignored tensors; all others that nobody took are faults."""
        rules = [(re.compile(pattern), why) for pattern, why in ignored.items()]
        left_out: dict[str, str] = {}
        for key in sorted(self.headers.keys() - self.taken):
            rule = next((why for pattern, why in rules if pattern.fullmatch(key)), None)
            if rule is not None:
                left_out[key] = rule
                continue
            header = self.headers[key]
            self.faults.add(
                TensorUnexpected(
                    "a tensor that no part of the model takes",
                    file=header.file,
                    tensor=key,
                    found=f"{header.dtype} {list(header.shape)}",
                    fix="if it may be left out, say so in the architecture file's ignored tensors",
                )
            )
        return left_out


def _module_of(key: str, modules: Mapping[str, str]) -> str | None:
    """The module among `modules` in which a tensor lies."""
    parts = key.split(".")
    paths = (".".join(parts[:end]) for end in range(1, len(parts)))
    return next((path for path in paths if path in modules), None)


def _some(keys: Iterable[str]) -> str:
    """The first of several keys and how many more there are."""
    first, *rest = keys
    return f"{first} (and {len(rest)} more)" if rest else first
