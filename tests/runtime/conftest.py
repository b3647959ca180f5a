"""One served model per scheme, eager and compiled, shared by the tests of this folder."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import nn

import lora_compile as lc
from tests.conftest import SEED
from tests.fake_quant import fake_quantise
from tests.tiny import RANKS, llama, make_adapter


@dataclass
class Served:
    """Two served copies of one plain model, and its adapters."""

    scheme: str
    oracle: nn.Module
    """transformers' model; under a scheme, with decoded weights and decoded q(x)."""
    eager: lc.LoraModel
    model: lc.LoraModel
    """Compiled as a whole."""
    paths: dict[str, Path]

    @property
    def names(self) -> list[str]:
        return list(self.paths)

    @property
    def mixed(self) -> list[str | None]:
        """Every rank, with base rows between them."""
        return [None, *self.names[:3], None, *self.names[3:]]

    @property
    def bound(self) -> float:
        """Most relative difference in float32 over the whole model.

        Under FP8 a difference of one ulp before q(x) can flip a code, which is a real difference
        of the site's input; there 1e-5 holds site by site, see test_site_gate.
        """
        return 1e-5 if self.scheme == "none" else 1e-1


@pytest.fixture(scope="session", params=["none", "fp8_block"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    scheme: str = request.param
    folder = tmp_path_factory.mktemp(scheme)
    plain = llama(SEED)
    paths = {
        f"rank{rank}": make_adapter(plain, folder / f"rank{rank}", rank=rank, seed=SEED + rank)
        for rank in RANKS
    }

    def wrapped() -> lc.LoraModel:
        return lc.wrap(
            copy.deepcopy(plain), quantization=scheme, adapters=paths, max_adapters=8, max_rank=64
        )

    oracle = plain if scheme == "none" else fake_quantise(plain)
    return Served(scheme, oracle, wrapped(), wrapped().compile(), paths)
