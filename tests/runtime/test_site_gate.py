"""The site gate: right to 1e-5 in float32 at every site, and it fails when it must."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lora_compile.adapters.canonical import CanonicalAdapter
from lora_compile.runtime.site_gate import GateResult, GateRow
from tests.gate import gate_rows, judge
from tests.runtime.conftest import Served
from tests.tiny import llama, prompts


def gate(served: Served, rows: list[GateRow], ids: torch.Tensor, seed: int) -> GateResult:
    """With all ranks mixed."""
    return judge(served.model, llama(seed), rows, ids, served.mixed)


def right_rows(served: Served) -> list[GateRow]:
    return gate_rows(served.model, served.paths, served.mixed)


def test_every_site_is_right_to_1e_5(served: Served, seed: int) -> None:
    ids = prompts(seed, len(served.mixed), 12)
    result = gate(served, right_rows(served), ids, seed)
    assert result.passed
    assert result.as_dict()["compared"] == {"prefill": 10}
    assert result.output is not None
    assert result.output.error <= 1e-5, result.output
    assert result.delta is not None
    assert result.delta.error <= 1e-4, result.delta  # a difference of two sums, so it cancels


def dropped(adapter: CanonicalAdapter, module: str) -> CanonicalAdapter:
    return replace(adapter, deltas={k: d for k, d in adapter.deltas.items() if k != module})


@pytest.mark.parametrize("fault", ["off", "half", "one site dropped", "another adapter"])
def test_the_gate_fails_when_a_row_got_something_else(
    served: Served, fault: str, seed: int
) -> None:
    rows = right_rows(served)
    adapted = [i for i, row in enumerate(rows) if row.adapter is not None]
    adapter = rows[adapted[2]].adapter
    assert adapter is not None
    rows[adapted[2]] = {
        "off": GateRow(None, 1.0),
        "half": GateRow(adapter, 0.5),
        "one site dropped": GateRow(dropped(adapter, "model.layers.1.mlp.down_proj"), 1.0),
        "another adapter": rows[adapted[3]],
    }[fault]
    result = gate(served, rows, prompts(seed, len(rows), 12), seed)
    assert not result.passed
    assert result.delta is not None
    assert result.delta.row == adapted[2]
    if fault == "one site dropped":
        assert result.delta.site == "model.layers.1.mlp.down_proj"


def test_a_site_that_was_not_compared_fails_the_gate(served: Served, seed: int) -> None:
    result = gate(served, right_rows(served), prompts(seed, len(served.mixed), 12), seed)
    assert result.passed
    result.sites["prefill"].discard("lm_head")
    assert not result.passed
