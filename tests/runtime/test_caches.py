"""Another library's Inductor pass beside ours, and the compile caches across processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tests.tiny import llama, make_adapter, peft_logits, prompts, relative

PROCESS = """
import json, sys, torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
import lora_compile as lc
from lora_compile import torch_compat
from tests.tiny import llama, prompts

class Foreign(CustomGraphPass):
    seen = 0
    def __call__(self, graph):
        Foreign.seen += 1
    def uuid(self):
        return "another library's pass, version 1"

config.post_grad_custom_post_pass = Foreign()
model = lc.wrap(
    llama(11, num_hidden_layers=1), adapters={"x": sys.argv[1]}, max_rank=int(sys.argv[3])
).compile()
logits = model(prompts(2, 2, 10), adapters=["x", None], use_cache=False).logits
torch.save(logits, sys.argv[2])
print(json.dumps({"seen": Foreign.seen, **torch_compat.cache_counters()}))
"""


def process(adapter: Path, out: Path, rank: int, cache: Path) -> dict[str, Any]:
    """Compile and run once in a process of its own; what it counted."""
    run = subprocess.run(
        [sys.executable, "-c", PROCESS, str(adapter), str(out), str(rank)],
        env={
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            "PYTHONPATH": str(Path(__file__).parents[2]),
        },
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    counted: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return counted


def test_a_foreign_pass_and_both_caches_work_together(tmp_path: Path) -> None:
    """The second process takes the first one's code, which has seen the foreign pass; another
    max_rank is another graph, which both of us see anew."""
    plain, ids = llama(11, num_hidden_layers=1), prompts(2, 2, 10)
    with torch.no_grad():
        base = plain(ids).logits
    ranks = {"a": 16, "b": 16, "c": 32}
    paths = {name: make_adapter(plain, tmp_path / name, rank=7, seed=ord(name)) for name in ranks}

    def run(name: str) -> dict[str, Any]:
        return process(paths[name], tmp_path / f"{name}.pt", ranks[name], tmp_path / "cache")

    counted = [run("a")]
    with ThreadPoolExecutor(2) as pool:  # neither of these two needs the other
        counted.extend(pool.map(run, ("b", "c")))
    for name, path in paths.items():
        found = torch.load(tmp_path / f"{name}.pt")
        assert relative(found[:1], peft_logits(plain, path, ids[:1])) <= 1e-5, name
        assert relative(found[1:], base[1:]) <= 1e-5, name
        assert relative(found[:1], base[:1]) > 1e-2, "a weak adapter; a weak test"

    outcomes = [
        {
            "seen": one["seen"],
            **{
                f"{cache} {what}": one.get(f"{prefix}_{what}", 0)
                for cache, prefix in (
                    ("autograd", "aot_autograd.autograd_cache"),
                    ("graph", "inductor.fxgraph_cache"),
                )
                for what in ("hit", "miss")
            },
        }
        for one in counted
    ]
    miss = {"autograd hit": 0, "autograd miss": 1, "graph hit": 0, "graph miss": 1}
    hit = {"autograd hit": 1, "autograd miss": 0, "graph hit": 1, "graph miss": 0}
    assert outcomes == [{"seen": 1, **miss}, {"seen": 0, **hit}, {"seen": 1, **miss}], counted
