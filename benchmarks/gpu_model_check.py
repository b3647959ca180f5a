"""End to end on a CUDA machine: a tiny model against PEFT, compiled and swapped.

    python benchmarks/gpu_model_check.py --json result.json

Prints one line per check; the exit code is 1 if any failed.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import lora_compile as lc
from lora_compile import torch_compat
from tests.fake_quant import fake_quantise
from tests.gate import gate_rows, judge
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
    # The bound of a whole model: codes flip under FP8, and bf16 rounds every activation.
    bound = {("none", torch.float32): 1e-4, ("fp8_block", torch.float32): 5e-2}.get(
        (scheme, dtype), 1e-1
    )
    with tempfile.TemporaryDirectory() as folder:
        paths = {
            f"r{rank}": make_adapter(oracle, Path(folder) / f"r{rank}", rank=rank, seed=rank)
            for rank in RANKS
        }
        model = lc.wrap(
            copy.deepcopy(plain), quantization=scheme, adapters=paths, max_adapters=4, max_rank=48
        ).compile()
        names = [None, *paths, None]
        ids = prompts(3, len(names), 20).cuda()
        rows = gate_rows(model, paths, names)
        gate = judge(model, plain, rows, ids, names, use_cache=False)
        assert gate.passed, gate.as_dict()
        logits = model(ids, adapters=names, use_cache=False).logits.clone()
        errors = {}
        for row, name in enumerate(names):
            one = ids[row : row + 1]
            if name is None:
                with torch.no_grad():
                    expected = oracle(one).logits
            else:
                expected = peft_logits(oracle, paths[name], one)
            errors[f"{row} {name}"] = relative(logits[row : row + 1].float(), expected)
        assert max(errors.values()) <= bound, errors

        graphs = len(model.report.graphs)
        with torch_compat.fail_on_recompile():
            base = model(ids, use_cache=False).logits.clone()
            again = model(ids, adapters=names, use_cache=False).logits.clone()
            model.adapters.replace("r8", paths["r33"])
            swapped = model(ids, adapters=names, use_cache=False).logits.clone()
        bare = [row for row, name in enumerate(names) if name is None]
        assert torch.equal(again[bare], base[bare]), "base rows depend on other rows' adapters"
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
            "gate": gate.as_dict(),
            "graphs": len(model.report.graphs),
            "kernels": model.report.kernels,
            "breaks": model.report.graph_breaks,
        }


if __name__ == "__main__":
    raise SystemExit(main())
