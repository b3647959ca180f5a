"""End to end on a CUDA machine: a tiny model against PEFT, compiled and swapped.

    python benchmarks/gpu_model_check.py --json result.json

Prints one line per check; the exit code is 1 if any failed.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import lora_compile as lc
from lora_compile import torch_compat
from lora_compile.adapters.peft_reader import read_adapter
from lora_compile.planning.plan import SitePlan
from lora_compile.runtime.site_gate import GateRow, SiteGate
from tests.fake_quant import decode_block_fp8, fake_quantise
from tests.tiny import llama, make_adapter, peft_logits, prompts, relative

RANKS = (1, 8, 33)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    results: list[dict[str, object]] = []

    def check(name: str, run: Callable[[], dict[str, object]]) -> None:
        try:
            found = {"check": name, "ok": True, **run()}
        except Exception as error:
            found = {"check": name, "ok": False, "error": f"{type(error).__name__}: {error}"}
            traceback.print_exc()
        results.append(found)
        print(json.dumps(found, default=str)[:600], flush=True)

    for scheme in ("none", "fp8_block"):
        for dtype in (torch.float32, torch.bfloat16):
            check(f"{scheme} {str(dtype)[6:]}", lambda s=scheme, d=dtype: serve(s, d))
    arguments.json.write_text(json.dumps(results, indent=1, default=str))
    return 0 if all(result["ok"] for result in results) else 1


def serve(scheme: str, dtype: torch.dtype) -> dict[str, object]:
    """Wrap, compile, judge every site, compare with PEFT, swap, compare base rows' bits."""
    torch_compat.reset_dynamo()
    plain = llama(5).cuda().to(dtype)
    exact = copy.deepcopy(plain).float()  # `float` works in place
    oracle = exact if scheme == "none" else fake_quantise(exact)
    # Under FP8 a value that differs by one ulp flips a code, which no bound on the whole model
    # can tell from a fault: every site is judged on its own input (the site gate). In float32 flips
    # are few; in 16 bit they are everywhere, and adapter rows are measured by base rows.
    bound = {
        ("none", torch.float32): 1e-4,
        ("none", torch.bfloat16): 5e-2,
        ("fp8_block", torch.float32): 1e-1,
        ("fp8_block", torch.bfloat16): 5e-1,
    }[scheme, dtype]
    with tempfile.TemporaryDirectory() as folder:
        paths = {
            f"r{rank}": make_adapter(oracle, Path(folder) / f"r{rank}", rank=rank, seed=rank)
            for rank in RANKS
        }
        model = lc.wrap(
            copy.deepcopy(plain), quantization=scheme, adapters=paths, max_adapters=4, max_rank=48
        ).compile()
        names = [None, *paths, None]
        ids = prompts(3, len(names), 100).cuda()
        gate = site_gate(model, plain, scheme, paths, names)
        model.backend.intercept = gate
        model(ids, adapters=names, use_cache=False)
        model.backend.intercept = None
        assert gate.result.passed, gate.result.as_dict()
        logits = model(ids, adapters=names, use_cache=False).logits.clone()
        errors, figures = {}, {}
        for row, name in enumerate(names):
            one = ids[row : row + 1]
            if name is None:
                with torch.no_grad():
                    expected = oracle(one).logits
            else:
                expected = peft_logits(oracle, paths[name], one)
            errors[f"{row} {name}"] = relative(logits[row : row + 1].float(), expected)
            figures[f"{row} {name}"] = log_prob_figure(logits[row : row + 1], expected)
        assert max(errors.values()) <= bound, errors
        of_adapters = [f for key, f in figures.items() if not key.endswith("None")]
        of_base = [f for key, f in figures.items() if key.endswith("None")]
        if scheme != "none" and dtype != torch.float32:
            assert statistics.mean(of_adapters) <= 1.5 * statistics.mean(of_base), figures

        graphs = len(model.report.graphs)
        with torch_compat.fail_on_recompile():
            base = model(ids, use_cache=False).logits.clone()
            again = model(ids, adapters=names, use_cache=False).logits.clone()
            model.adapters.replace("r8", paths["r33"])
            swapped = model(ids, adapters=names, use_cache=False).logits.clone()
        rows = [row for row, name in enumerate(names) if name is None]
        assert torch.equal(again[rows], base[rows]), "base rows depend on other rows' adapters"
        assert torch.equal(again, logits), "the same batch twice gives other bits"
        expected = peft_logits(oracle, paths["r33"], ids[2:3])
        assert relative(swapped[2:3].float(), expected) <= bound
        assert relative(swapped[2:3].float(), again[2:3].float()) > 1e-2, "the swap did nothing"
        assert len(model.report.graphs) == graphs
        settings = {"max_new_tokens": 8, "do_sample": False}
        mask = torch.ones_like(ids)
        text = model.generate(ids, adapters=names, attention_mask=mask, **settings)
        assert text.shape == (len(names), ids.shape[1] + 8)
        return {
            "worst": max(errors.values()),
            "figures": figures,
            "worst_site": gate.result.as_dict()["worst_output"],
            "worst_delta": gate.result.as_dict()["worst_delta"],
            "graphs": len(model.report.graphs),
            "kernels": model.report.kernels,
            "breaks": model.report.graph_breaks,
        }


def log_prob_figure(found: torch.Tensor, expected: torch.Tensor) -> float:
    """0.5 mean(d log p)^2 of the tokens that the reference finds likeliest."""
    wanted = expected.float().log_softmax(-1)
    tokens = wanted.argmax(-1, keepdim=True)
    change = found.float().log_softmax(-1).gather(-1, tokens) - wanted.gather(-1, tokens)
    return float(0.5 * change.square().mean())


def site_gate(
    model: lc.LoraModel,
    plain: nn.Module,
    scheme: str,
    paths: dict[str, Path],
    names: list[str | None],
) -> SiteGate:
    """Every site's own input against float32, decoded by the tests' own decoder."""
    weights = dict(plain.named_parameters())

    def dense(site: SitePlan, index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight = weights[f"{site.parts[index].module}.weight"].detach().float()
        return (decode_block_fp8(weight) if site.quant.scheme == "fp8_block" else weight), None

    read = {name: read_adapter(path, model.plan) for name, path in paths.items()}
    rows = [GateRow(None if name is None else read[name], 1.0) for name in names]
    return SiteGate(model.plan, model.module, dense, rows)


if __name__ == "__main__":
    raise SystemExit(main())
