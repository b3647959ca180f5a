"""Check every Triton op against fp32 PyTorch on a CUDA device, and time it.

    python benchmarks/gpu_ops_check.py --json results.json

Each case makes one site, binds rows to adapters in random order (one row in eight has none), and

* compares the Triton ops with the PyTorch bodies of the same ops in fp32 (error of each row over
  the row's largest value), eagerly, and once for each shape under torch.compile;
* checks that codes and scales equal PyTorch's, that INT8 base rows do so bit by bit, that rows
  without adapter keep their bits when foreign slots hold NaN, that unbound rows are NaN, that a NaN
  of x stays one, and that two runs agree bit by bit;
* times base and base + LoRA with CUDA-graph replay (median), over enough copies of the weights
  that the L2 cache never holds them.

A case that fails or raises is reported with its text, and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from lora_compile.ops import kernel_name
from lora_compile.ops.sample import (
    SampleSite,
    call,
    quantise_call,
    run_base,
    run_lowered,
    sample_site,
)
from lora_compile.schemas.quant_scheme import all_schemes

SHAPES: dict[str, tuple[list[int], int]] = {
    "qkv_a": ([1536, 576], 7168),
    "smol_qkv": ([576, 192, 192], 576),
    "smol_gate_up": ([1536, 1536], 576),
    "q_b": ([24576], 1536),
    "unequal": ([96, 80], 576),
    "four": ([33, 20, 70, 5], 200),
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LIMITS = {torch.bfloat16: 2**-8, torch.float32: 1e-5}
"""bf16: one rounding of a row's largest value. fp32: order of summation."""
FP8_LIMIT = 5e-4
"""Hopper's tensor cores add FP8 products with about 14 bits inside one step of K."""
SCHEMES = [scheme.name for scheme in all_schemes()]
L2_BYTES = 200 * 2**20


@dataclass
class Result:
    shape: str
    scheme: str
    dtype: str
    rows: int
    rank: int
    adapters: int
    error: float | None = None
    base_error: float | None = None
    base_us: float | None = None
    lora_us: float | None = None
    failures: list[str] = field(default_factory=list)


@dataclass
class Case:
    site: SampleSite
    x: Tensor
    slot: Tensor
    scale: Tensor
    kernel: str

    @property
    def limit(self) -> float:
        limit = LIMITS[self.site.dtype]
        fp8 = self.site.quant.weight_dtype == "float8_e4m3fn"
        return max(limit, FP8_LIMIT) if fp8 else limit

    def lora(self, site: SampleSite | None = None, slot: Tensor | None = None) -> Tensor:
        slot = self.slot if slot is None else slot
        return run_lowered(site or self.site, self.x, slot, self.scale, True, self.kernel)

    def base(self) -> Tensor:
        return run_base(self.site, self.x, self.kernel)


def to_fp32(site: SampleSite) -> SampleSite:
    """The same values with everything but codes in fp32, so that PyTorch computes in fp32."""
    copy = SampleSite(**vars(site))
    copy.dtype = torch.float32
    for name in ("lora_a", "lora_b", "bias"):
        value = getattr(site, name)
        setattr(copy, name, None if value is None else value.float())
    if not site.aux:
        copy.weight = site.weight.float()
    return copy


def reference(case: Case, slot: Tensor) -> Tensor:
    """The PyTorch bodies in fp32, on the same codes."""
    site = to_fp32(case.site)
    kernel = kernel_name("torch")
    return run_lowered(site, case.x.float(), slot, case.scale, True, kernel)


def row_error(y: Tensor, expected: Tensor) -> float:
    error = (y.float() - expected.float()).abs().amax(1) / expected.float().abs().amax(1)
    return float(error.max())


def make_case(args: argparse.Namespace, result: Result, seed: int) -> Case:
    parts, columns = SHAPES[result.shape]
    generator = torch.Generator().manual_seed(seed)
    dtype = DTYPES[result.dtype]
    site = sample_site(
        generator,
        parts,
        columns,
        [result.rank] * result.adapters,
        scheme=result.scheme,
        dtype=dtype,
        bias=True,
        device=args.device,
    )
    x = torch.randn(result.rows, columns, generator=generator).to(dtype).to(args.device)
    slot = torch.randint(0, result.adapters, (256,), generator=generator, dtype=torch.int32)
    slot[7::8] = -1
    scale = torch.rand(256, generator=generator) + 0.5
    kernel = kernel_name("triton")
    return Case(site, x, slot.to(args.device), scale.to(args.device), kernel)


def check(case: Case, result: Result) -> None:
    """Fill in errors; every broken promise becomes a line of `failures`."""
    limit = case.limit
    y, again, base = case.lora(), case.lora(), case.base()
    nobody = torch.full_like(case.slot, -1)
    result.error = row_error(y, reference(case, case.slot))
    result.base_error = row_error(base, reference(case, nobody))
    if not result.error <= limit:
        result.failures.append(f"error {result.error:.2e} > {limit:.2e}")
    if not result.base_error <= limit:
        result.failures.append(f"base error {result.base_error:.2e} > {limit:.2e}")
    if not torch.equal(y, again):
        result.failures.append("two runs differ")
    rows = case.slot[: result.rows] == -1
    without = case.lora(slot=nobody)
    if not torch.equal(y[rows], without[rows]):
        result.failures.append("rows without adapter changed with their neighbours")
    if not torch.equal(without, base):
        result.failures.append("LoRA kernel without adapters differs from the base kernel")
    poisoned = case.lora(site=case.site.poisoned(list(range(result.adapters))))
    if not torch.equal(poisoned[rows], without[rows]):
        result.failures.append("NaN of a foreign slot reached a row without adapter")
    stray = case.slot.clone()
    stray[0] = -2
    if not case.lora(slot=stray)[0].isnan().all():
        result.failures.append("a row that was not bound is not NaN")
    if result.scheme == "int8_channel":
        exact = run_base(case.site, case.x, kernel_name("torch"))
        if not torch.equal(base, exact):
            result.failures.append(f"{int((base != exact).sum())} INT8 base values differ in bits")
    holed = Case(case.site, case.x.clone(), case.slot, case.scale, case.kernel)
    holed.x[0, -1] = float("nan")
    if not holed.base()[0].isnan().all():
        result.failures.append("a NaN of x became a number")
    if case.site.aux:
        name, *args = quantise_call(case.site, case.x)
        found = call(name, *args, kernel=case.kernel)
        expected = call(name, *args, kernel=kernel_name("torch"))
        if not torch.equal(found[1], expected[1]):
            result.failures.append("scales differ from PyTorch's")
        differing = int((found[0].float() != expected[0].float()).sum())
        if differing:
            result.failures.append(f"{differing} codes differ from PyTorch's")


def check_compiled(case: Case, result: Result) -> None:
    """One graph for a dynamic number of rows; the eager launch gives the same numbers."""
    torch._dynamo.reset()

    def forward(x: Tensor) -> Tensor:
        return run_lowered(case.site, x, case.slot, case.scale, True, case.kernel)

    compiled = torch.compile(forward, fullgraph=True)
    for rows in (max(2, result.rows), max(2, result.rows) + 5):
        x = torch.cat([case.x] * (rows // result.rows + 1))[:rows].contiguous()
        torch._dynamo.mark_dynamic(x, 0)
        expected = forward(x)
        error = row_error(compiled(x), expected)
        if not error <= case.limit:
            result.failures.append(f"compiled, {rows} rows: differs from eager by {error:.2e}")


def replay_us(functions: list[Callable[[], object]], repeats: int) -> float:
    """Median microseconds of one of `functions`, all captured in one CUDA graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for function in functions:
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for function in functions:
            function()
    graph.replay()
    times = []
    for _ in range(repeats):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(functions))
    return float(statistics.median(times))


def measure(case: Case, result: Result, repeats: int) -> None:
    size = case.site.weight.numel() * case.site.weight.element_size()
    copies = [case]
    for _ in range(min(32, L2_BYTES // size)):
        site = SampleSite(**vars(case.site))
        site.weight = case.site.weight.clone()
        site.lora_a, site.lora_b = case.site.lora_a.clone(), case.site.lora_b.clone()
        copies.append(Case(site, case.x, case.slot, case.scale, case.kernel))
    result.base_us = replay_us([copy.base for copy in copies], repeats)
    result.lora_us = replay_us([copy.lora for copy in copies], repeats)


def cases(args: argparse.Namespace) -> list[Result]:
    chosen = []
    for shape in args.shapes:
        for scheme in args.schemes:
            for dtype in args.dtypes:
                for rows in args.rows:
                    for rank, adapters in args.adapters:
                        if adapters <= rows:
                            chosen.append(Result(shape, scheme, dtype, rows, rank, adapters))
    return chosen


def pair(text: str) -> tuple[int, int]:
    rank, adapters = text.split(":")
    return int(rank), int(adapters)


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, default=Path("gpu_ops_check.json"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--schemes", nargs="+", default=SCHEMES, choices=SCHEMES)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument(
        "--adapters", nargs="+", type=pair, default=[(16, 1), (16, 8), (16, 16), (64, 4), (3, 2)],
        metavar="RANK:COUNT",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--no-timing", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.device.startswith("cuda"):
        if not torch.cuda.is_available():
            parser.error("no CUDA device; on a CPU use --device cpu under TRITON_INTERPRET=1")
        torch.backends.cuda.matmul.allow_tf32 = False
        print(torch.cuda.get_device_name(), end=", ")
    print(f"torch {torch.__version__}, seed {args.seed}")
    print(
        f"{'shape':<13}{'scheme':<20}{'dtype':<6}{'M':>4}{'r':>4}{'L':>4}"
        f"{'error':>10}{'base err':>10}{'base us':>9}{'lora us':>9}{'added':>8}"
    )
    results = cases(args)
    compiled: set[tuple[str, str, str]] = set()
    for result in results:
        try:
            case = make_case(args, result, args.seed)
            check(case, result)
            key = (result.shape, result.scheme, result.dtype)
            if not args.no_compile and key not in compiled:
                compiled.add(key)
                check_compiled(case, result)
            if not args.no_timing and args.device.startswith("cuda"):
                measure(case, result, args.repeats)
        except Exception:
            result.failures.append(traceback.format_exc())
        added = None
        if result.lora_us is not None and result.base_us is not None:
            added = result.lora_us - result.base_us
        print(
            f"{result.shape:<13}{result.scheme:<20}{result.dtype:<6}{result.rows:>4}"
            f"{result.rank:>4}{result.adapters:>4}{number(result.error, '10.1e')}"
            f"{number(result.base_error, '10.1e')}{number(result.base_us, '9.1f'):>9}"
            f"{number(result.lora_us, '9.1f'):>9}{number(added, '8.1f'):>8}",
            flush=True,
        )
        for failure in result.failures:
            print(f"    FAILED: {failure}", flush=True)
    failed = sum(bool(result.failures) for result in results)
    args.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    print(f"{len(results)} cases, {failed} failed; {args.json}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
