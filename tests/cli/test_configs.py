"""The deployments in configs/, as a user would try them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Result

Cli = Callable[..., Result]
CONFIGS = Path(__file__).parents[2] / "configs"


def test_quickstart_is_right(cli: Cli) -> None:
    """The deployment of the README and its two trained adapters."""
    result = cli("check", CONFIGS / "quickstart.yaml", "--json")
    assert result.code == 0, result.err
    assert result.data["schemes"] == {"none": 2, "fp8_block": 120}
    assert {adapter["name"] for adapter in result.data["adapters"]} == {"pirate", "json"}


def test_deepseek_v3_at_its_real_widths_is_explained_in_seconds(cli: Cli) -> None:
    started = time.perf_counter()
    assert cli("check", CONFIGS / "deepseek_v3.yaml").code == 0
    result = cli("explain", CONFIGS / "deepseek_v3.yaml")
    assert time.perf_counter() - started < 60, "two commands, 30 s for each"
    assert result.code == 0, result.err
    out = " ".join(result.out.split())
    assert "warning" not in out
    fused = "self_attn.fused_qkv_a_proj_with_mqa"
    sites, _, deltas = out.partition("adapter q_a_kv_a")
    assert f"model.layers.{{0-60}}.{fused} x 61 fp8_block" in sites
    assert "q_a_proj rows 0 to 1536 of 7168 scale rows 0 to 12" in sites
    assert "kv_a_proj_with_mqa rows 1536 to 2112 of 7168 scale rows 12 to 17" in sites
    assert f"model.layers.0.{fused}" in deltas
    assert "q_a_proj rows 0 to 1536 rank 4 scale 2" in deltas
    assert "kv_a_proj_with_mqa rows 1536 to 2112 rank 4 scale 2" in deltas
    assert sites.count("routed experts: as transformers runs them") == 1


def test_deepseek_v3_tiny_runs_and_verifies(cli: Cli, tmp_path: Path) -> None:
    run = cli("run", CONFIGS / "deepseek_v3_tiny.yaml", "--json")
    assert run.code == 0, run.err
    assert run.data["gate"]["passed"]
    assert run.data["report"]["graph_breaks"] == 0
    assert run.data["swap"]["recompiles"] == 0
    base, adapted = (row["text"] for row in run.data["rows"][:2])
    assert base != adapted
    plot = tmp_path / "plot.png"
    found = cli("verify", CONFIGS / "deepseek_v3_tiny.yaml", "--plot", plot)
    assert found.code == 0, found.out
    assert found.out.rstrip().endswith("verified")
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_quickstart_runs_and_verifies(cli: Cli) -> None:
    """Minutes of compilation; all three gates on a real model, its 16-bit ratios among them."""
    run = cli("run", CONFIGS / "quickstart.yaml", "--json")
    assert run.code == 0, run.err
    base, pirate, json_text, half = (row["text"] for row in run.data["rows"])
    assert "Paris" in base
    assert "Arr" in pirate
    assert "Arr" in half
    assert json_text.startswith('{"answer"')
    found = cli("verify", CONFIGS / "quickstart.yaml", "--json")
    assert found.code == 0, found.out
    assert found.data["failures"] == []
    assert found.data["loosened"] == []
