"""`run`, `explain` and `schema` as a user calls them, on a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from lora_compile.schemas.architecture import SHIPPED
from tests.cli.conftest import Result, Site
from tests.tiny import llama, make_adapter

Cli = Callable[..., Result]


@pytest.fixture
def runnable(site: Site) -> Site:
    """The same with a tokenizer and a batch to generate."""
    words = {"[PAD]": 0, "[BOS]": 1, "[UNK]": 2, **{f"w{i}": i for i in range(3, 320)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", bos_token="[BOS]"
    )
    fast.save_pretrained(str(site.folder / "model"))
    make_adapter(llama(21), site.folder / "b", rank=7, seed=5, targets=("v_proj", "down_proj"))

    def batch(data: dict[str, Any]) -> None:
        data["adapters"].append({"name": "b", "path": "b", "scale": 0.5})
        data["generation"] = {
            "chat": False,
            "max_new_tokens": 6,
            "rows": [
                {"prompt": "w5 w6 w7 w8"},
                {"prompt": "w5 w6 w7 w8", "adapter": "a"},
                {"prompt": "w9 w10", "adapter": "b"},
                {"prompt": "w5 w6 w7 w8", "adapter": "a", "scale": 0.5},
            ],
        }

    site.write(batch)
    return site


def test_run(runnable: Site, cli: Cli) -> None:
    result = cli("run", runnable.file, "--json")
    assert result.code == 0, result.err
    data = result.data
    texts = [row["text"] for row in data["rows"]]
    assert texts[0] != texts[1]
    report = data["report"]
    assert report["graph_breaks"] == 0
    assert [graph["sites"] for graph in report["graphs"]] == [10, 10]
    # prefill once and 5 decode steps, in each of the two generations
    assert [graph["calls"] for graph in report["graphs"]] == [2, 10]
    assert data["swap"] == {"adapter": "a", "recompiles": 0, "same_texts": True}
    gate = data["gate"]
    assert gate["passed"]
    assert gate["sites"] == 10
    # float32: far below the limits, which are those of 16 bit
    assert gate["worst_output"]["error"] < 1e-5
    assert gate["worst_delta"]["error"] < 1e-4


def test_run_prints_texts_and_what_was_compiled(runnable: Site, cli: Cli) -> None:
    result = cli("run", runnable.file)
    assert result.code == 0, result.err
    for fact in ("one adapter per row", "2 graphs, 0 graph breaks", "0 recompiles", "tokens/s",
                 "site gate     passed", "worst output error"):  # fmt: skip
        assert fact in result.out, result.out
    assert "compiling" in result.err


def test_run_without_a_batch_says_what_is_missing(site: Site, cli: Cli) -> None:
    result = cli("run", site.file)
    assert result.code == 1
    assert "generation" in result.err


def test_explain(runnable: Site, cli: Cli) -> None:
    result = cli("explain", runnable.file)
    assert result.code == 0, result.err
    out = " ".join(result.out.split())
    assert "model.layers.{0-1}.self_attn.qkv_proj x 2 fp8_block, aten kernel" in out
    assert "k_proj rows 256 to 320 of 256 scale rows 2 to 3" in out
    assert "v_proj rows 320 to 384 of 256 scale rows 3 to 4" in out
    deltas = out.partition("adapter b (equal layers together)")[2]
    scale = "rank 7 scale 0.5 (the file's 1 x 0.5)"
    assert f"self_attn.qkv_proj x 2 v_proj rows 320 to 384 {scale}" in deltas


def test_explain_graphs(runnable: Site, cli: Cli) -> None:
    result = cli("explain", runnable.file, "--graphs", "--json")
    assert result.code == 0, result.err
    graphs = result.data["graphs"]
    assert graphs["traced"].count("site_linear(") == 15
    assert "site_linear" not in graphs["verify_graph"]
    assert graphs["verify_graph"].count("aten_fp8_block_linear_lora(") == 8
    assert result.data["plan"]["architecture"] == "llama"
    sites = {t["site"] for t in result.data["adapter_reports"]["b"]["tensors"]}
    touched = ("self_attn.qkv_proj", "mlp.down_proj")
    assert sites == {f"model.layers.{i}.{name}" for i in (0, 1) for name in touched}


def test_schema_lint(cli: Cli, tmp_path: Path) -> None:
    assert cli("schema", "lint", SHIPPED / "llama.yaml").code == 0
    data = yaml.safe_load((SHIPPED / "llama.yaml").read_text())
    data["sites"][1]["part"] = data["sites"][1].pop("parts")
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(data))
    result = cli("schema", "lint", tmp_path / "mine.yaml", "--json")
    assert result.code == 1
    assert any(f["error"] == "UnknownKey" and "parts" in f["fix"] for f in result.data["faults"])


def test_schema_json(cli: Cli, tmp_path: Path) -> None:
    assert cli("schema", "json", tmp_path).code == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "architecture.schema.json", "deployment.schema.json", "dialect.schema.json",
        "quant_scheme.schema.json",
    ]  # fmt: skip


@pytest.mark.parametrize("command", ["run", "verify"])
def test_weights_none_is_not_run(command: str, site: Site, cli: Cli) -> None:
    site.write(lambda data: data["model"].update(weights="none"))
    assert cli("check", site.file).code == 0
    result = cli(command, site.file)
    assert result.code == 1
    assert "deployment.yaml:5: model.weights is none" in result.err
    assert "use `check` and `explain`" in result.err
