"""The Triton kernels without a GPU: interpreted, and compiled for sm_90 without being run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_compile.ops.forms import KERNEL_OPS
from lora_compile.ops.kernels import HAS_TRITON

ROOT = Path(__file__).resolve().parents[2]
TRITON_OPS = [str(op).removeprefix("lora_compile.") for op in KERNEL_OPS]

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")


def interpreted(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize(("file", "least"), [("test_lowered.py", 70), ("test_codes.py", 40)])
def test_the_sweep_of_the_lowered_ops(file: str, least: int, seed: int) -> None:
    environment = f"LORA_COMPILE_TEST_SEED={seed}"
    chosen = ("-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/ops/{file}")
    result = interpreted(*chosen)
    assert result.returncode == 0, environment + result.stdout[-4000:] + result.stderr[-2000:]
    passed = int(result.stdout.rsplit(" passed", 1)[0].split()[-1])
    assert passed >= least


CAST_PROBE = """
import json, sys, torch
from lora_compile.ops.kernels import launch
from lora_compile.ops.sample import run_base, run_lowered, sample_site
generator = torch.Generator().manual_seed(int(sys.argv[1]))
site = sample_site(generator, [40], 64, [8], dtype=torch.bfloat16)
x = torch.randn(3, 64, generator=generator).bfloat16()
rows = torch.zeros(8, dtype=torch.int32), torch.ones(8)
def errors():
    y = run_lowered(site, x, *rows, True, "triton")
    base = x.float() @ site.weight.float().T
    down = x.float() @ site.lora_a[0, 0, :8].float().T * site.lora_scale[0, 0]
    expected = base + down @ site.lora_b[0, :, :8].float().T
    return float((y.float() - expected).abs().max() / expected.abs().max())
cast = errors()
launch.interpreting = lambda: False
print(json.dumps([cast, errors()]))
"""


def test_the_interpreter_is_given_fp32(seed: int) -> None:
    """Its dots on bf16 are wrong: right with the kernels' cast, far off without it."""
    result = interpreted("-W", "ignore", "-c", CAST_PROBE, str(seed))
    assert result.returncode == 0, result.stderr[-4000:]
    cast, uncast = json.loads(result.stdout.splitlines()[-1])
    assert cast < 2**-7
    assert not uncast < 1


@pytest.mark.parametrize("name", TRITON_OPS)
def test_the_cache_key_sees_the_kernels(name: str) -> None:
    """torch finds kernels by a scan of the op's source; what it misses could be served stale."""
    from torch._library.triton import get_triton_kernels_for_op

    assert get_triton_kernels_for_op(f"lora_compile::{name}")


TRACE_PROBE = """
import json, sys, torch, triton
from triton.backends.compiler import GPUTarget
class Hopper:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_device_interface(self): return torch.cpu
triton.runtime.driver.set_active(Hopper())
from torch._dynamo.backends.common import aot_autograd
from lora_compile.ops import kernel_name
from lora_compile.ops.sample import run_lowered, sample_site
generator, kernel, written = torch.Generator().manual_seed(0), kernel_name("triton"), []
done = [None]
def stop(gm, inputs):
    for node in gm.graph.nodes:
        if node.op == "call_function" and "triton_kernel_wrapper" in str(node.target):
            written.append(sorted(node.kwargs["tensors_to_clone"]))
    done.append(scheme)
    raise RuntimeError("traced far enough")
for scheme in ("none", "fp8_block", "fp8_tensor_static", "int8_channel"):
    site = sample_site(generator, [576, 192], 2304, [16], scheme=scheme, dtype=torch.bfloat16)
    slot, scale = torch.zeros(64, dtype=torch.int32), torch.ones(64)
    x = torch.randn(4, 3, 2304).bfloat16()
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(x, 1)
    forward = lambda x: run_lowered(site, x, slot, scale, False, kernel)
    try:
        torch.compile(forward, fullgraph=True, backend=aot_autograd(fw_compiler=stop))(x)
    except Exception:
        if done.pop() != scheme:
            raise
print(json.dumps(written))
"""


def test_the_compiler_sees_that_only_fresh_tensors_are_written() -> None:
    """Else it would copy every operand, weights included, before each launch.

    Traced with a dynamic batch and length, up to the point where a GPU would be needed.
    """
    probe = [sys.executable, "-W", "ignore", "-c", TRACE_PROBE]
    result = subprocess.run(probe, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    lora_only = [["planes"], ["y"]]
    with_codes = [["planes"], ["codes", "scales"], ["y"]]
    assert json.loads(result.stdout.splitlines()[-1]) == lora_only + with_codes * 3


def compile_for_hopper(kernel: Any, tensors: dict[str, str], constants: dict[str, Any]) -> str:
    """PTX of a kernel for sm_90; needs no GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    names = kernel.arg_names
    signature = {name: tensors.get(name, "constexpr") for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in tensors.items()
        if kind.startswith("*")
    }
    source = ASTSource(kernel, signature, places, aligned)
    return str(compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])


TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@pytest.mark.parametrize("dtype", list(TYPES), ids=str)
@pytest.mark.parametrize("scales", ["none", "fp8 blocks", "fp8 rows", "int8 rows"])
@pytest.mark.parametrize("lora", [False, True], ids=["base", "lora"])
def test_the_gemm_compiles_for_hopper(
    dtype: torch.dtype,
    scales: str,
    lora: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lora_compile.ops.kernels.gemm import gemm_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    model = TYPES[dtype]
    kind, _, unit = scales.partition(" ")
    operand = {"none": model, "fp8": "fp8e4nv", "int8": "i8"}[kind]
    tensors = {
        **{name: f"*{operand}" for name in ("x", "w")},
        **{name: f"*{model}" for name in ("bias", "lora_b", "y")},
        **{name: "*fp32" for name in ("xs", "ws", "h")},
        **{name: "*i32" for name in ("lora_rank", "slot")},
        **{name: "i32" for name in ("rows", "tokens")},
    }
    constants: dict[str, Any] = {
        "N": 2112,
        "K": 7168,
        "END0": 1536,
        "END1": 2112,
        "END2": 2112,
        "PLANE0": 0,
        "PLANE1": int(unit == "rows"),
        "PLANE2": 0,
        "PLANE3": 0,
        "TILES": 33,
        "GROUP": 128,
        "BLOCK_N": 128,
        "BLOCK_K": 128,
        "S": 9,
        "P": 2,
        "R": 64,
        "BIAS": True,
        "BLOCK_SCALED": unit == "blocks",
        "ROW_SCALED": unit == "rows",
        "LORA": lora,
        "PER_TOKEN": False,
        "BM": 16,
        "BN": 64,
        "BK": 128 if unit else 32,
        "INTERPRET": False,
    }
    ptx = compile_for_hopper(gemm_kernel, tensors, constants)
    # FP8 and 16-bit products run on the tensor cores; fp32 is exact, so not.
    assert ("wgmma" in ptx) == (bool(unit) or dtype != torch.float32)
    assert ("wgmma.mma_async.sync.aligned.m64n16k32.s32.s8.s8" in ptx) == (kind == "int8")
    # A product that melts into the addition of the bias is rounded otherwise than PyTorch's.
    assert ("mul.rn.f32" in ptx) == (unit == "rows")
    if unit == "rows" and not lora:
        assert "fma." not in ptx.replace("mma.", "")


@pytest.mark.parametrize("dtype", list(TYPES), ids=str)
def test_the_small_kernels_compile_for_hopper(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lora_compile.ops.kernels.quantize import quantize_kernel
    from lora_compile.ops.kernels.shrink import shrink_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    model = TYPES[dtype]
    tensors = {
        **{name: f"*{model}" for name in ("x", "lora_a")},
        **{name: "*fp32" for name in ("lora_scale", "row_scale", "planes")},
        **{name: "*i32" for name in ("lora_rank", "slot")},
        **{name: "i32" for name in ("rows", "tokens")},
    }
    constants: dict[str, Any] = {
        "S": 9,
        "P": 2,
        "R": 64,
        "K": 576,
        "SPLITS": 1,
        "SPLIT_COLUMNS": 640,
        "PER_TOKEN": False,
        "BM": 16,
        "BR": 32,
        "BK": 64,
        "INTERPRET": False,
    }
    assert ".entry shrink_kernel" in compile_for_hopper(shrink_kernel, tensors, constants)
    tensors = {"x": f"*{model}", "codes": "*fp8e4nv", "scales": "*fp32"}
    tensors |= {"rows": "i32", "min_scale": "fp32"}
    constants = {"K": 576, "GROUP": 128, "GROUP_TILE": 128, "ROWS": 4}
    ptx = compile_for_hopper(quantize_kernel, tensors, constants)
    # Division and conversion both round to nearest, so codes equal PyTorch's.
    assert "div.rn.f32" in ptx
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx


@pytest.mark.parametrize("codes", ["fp8e4nv", "i8"])
@pytest.mark.parametrize("dtype", list(TYPES), ids=str)
def test_the_quantise_kernels_compile_for_hopper(
    dtype: torch.dtype, codes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lora_compile.ops.kernels.quantize import quantize_static_kernel, quantize_token_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tensors = {"x": f"*{TYPES[dtype]}", "codes": f"*{codes}", "scales": "*fp32"}
    whole = codes == "i8"
    constants = {"K": 18432, "LARGEST": 127.0 if whole else 448.0, "WHOLE": whole}
    token = compile_for_hopper(
        quantize_token_kernel, tensors | {"min_scale": "fp32"}, constants | {"TILE": 4096}
    )
    static = compile_for_hopper(
        quantize_static_kernel,
        tensors | {"input_scale": "*fp32", "rows": "i32"},
        constants | {"ROWS": 4, "TILE": 512},
    )
    for ptx in (token, static):
        assert "div.rn.f32" in ptx
        assert ("cvt.rn.satfinite.e4m3x2.f32" in ptx) != whole
