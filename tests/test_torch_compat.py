"""Every private name of torch that we use does what we use it for."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

import lora_compile.ops  # noqa: F401
from lora_compile import torch_compat


def test_an_untested_version_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "9.99.0")
    monkeypatch.setattr(torch_compat, "_warned", False)
    with pytest.warns(UserWarning, match=r"tested on torch 2\.11 and 2\.13; this is torch 9\.99"):
        torch_compat.check_torch_version()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_compat.check_torch_version()


def test_this_version_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_compat, "_warned", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_compat.check_torch_version()


def test_compile_fx_lowers_a_dynamo_graph_and_takes_options() -> None:
    seen: list[int] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        seen.append(len(inputs))
        return torch_compat.compile_fx(gm, inputs, {"pattern_matcher": False})

    x = torch.randn(4, 8)
    found = torch.compile(lambda x: x.sin() + 1, backend=backend)(x)
    torch.testing.assert_close(found, x.sin() + 1)
    assert seen == [1]


def test_cache_counters_and_graph_breaks_count() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    before = torch_compat.graph_breaks()
    torch.compile(broken, backend="eager")(torch.ones(2))
    assert torch_compat.graph_breaks() == before + 1
    torch.compile(lambda x: x.cos() * 3)(torch.ones(3))
    assert sum(torch_compat.cache_counters().values()) > 0


def test_reset_mark_dynamic_and_fail_on_recompile() -> None:
    torch_compat.reset_dynamo()
    compiles: list[int] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        compiles.append(1)
        return gm.forward

    run = torch.compile(lambda x: x + 1, backend=backend)
    for rows in (3, 5, 9):
        x = torch.ones(rows, 2)
        torch_compat.mark_dynamic(x, 0)
        run(x)
    assert len(compiles) == 1
    with torch_compat.fail_on_recompile(), pytest.raises(Exception, match="recompile"):
        run(torch.ones(3, 2, dtype=torch.float64))


def test_recompile_limit_holds_inside() -> None:
    torch_compat.reset_dynamo()
    run = torch.compile(lambda x: x + 1, backend="eager", fullgraph=True, dynamic=False)
    with torch_compat.recompile_limit(12):
        for size in range(2, 14):
            run(torch.ones(size))
        with pytest.raises(Exception, match=r"fullgraph=True|recompile"):
            run(torch.ones(14))


def test_backend_error_unwraps_what_a_backend_raised() -> None:
    class Mine(Exception):
        pass

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        raise Mine("here")

    with pytest.raises(Exception, match="here") as caught:
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert isinstance(torch_compat.backend_error(caught.value), Mine)
    assert torch_compat.backend_error(ValueError()) is None


def test_triton_kernels_of_finds_the_kernels_in_an_ops_body() -> None:
    for op in ("lora_shrink", "linear_lora", "fp8_block_linear_lora", "quantize_fp8_group"):
        assert torch_compat.triton_kernels_of(f"lora_compile::{op}"), op


def test_op_packet_is_the_same_of_every_overload() -> None:
    packet = torch.ops.aten.add
    assert torch_compat.op_packet(packet.Tensor) is packet
    assert torch_compat.op_packet(packet.Scalar) is packet
    assert torch_compat.op_packet(packet) is packet


def test_check_value_raises_value_errors() -> None:
    torch_compat.check_value(True, lambda: "unused")
    with pytest.raises(ValueError, match="too many"):
        torch_compat.check_value(False, lambda: "too many")


def test_private_names_of_torch_are_in_one_module() -> None:
    root = Path(torch_compat.__file__).parent
    private = re.compile(r"\btorch(?:\.\w+)*\._(?!_)\w+")
    found = [
        f"{path.relative_to(root)}: {match}"
        for folder in (root, root / "schemas", root / "passes")
        for path in sorted(folder.rglob("*.py"))
        if path.name != "torch_compat.py"
        for match in private.findall(path.read_text())
    ]
    assert found == []


def test_importing_the_package_does_not_import_torch() -> None:
    """Schemas and errors must answer at once."""
    code = "import sys, lora_compile, lora_compile.schemas.lint; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
