"""A scheme runs only if it is whole: its YAML, a reader, its ops and a lowering."""

from __future__ import annotations

import pytest

from lora_compile.errors import SchemeUnsupported
from lora_compile.passes.insert_lora import LOWERINGS
from lora_compile.planning.prepare import require_complete
from lora_compile.schemas.quant_scheme import all_schemes, find_scheme


@pytest.mark.parametrize("scheme", all_schemes(), ids=lambda scheme: scheme.name)
def test_every_shipped_scheme_is_whole(scheme: object) -> None:
    assert require_complete(scheme) is scheme  # type: ignore[arg-type]


def test_a_scheme_that_lacks_something_is_refused_with_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = find_scheme("fp8_block")
    form = whole.stored_as[0].model_copy(update={"reader": None})
    with pytest.raises(SchemeUnsupported, match="it lacks a reader"):
        require_complete(whole.model_copy(update={"stored_as": (form,)}))
    ops = whole.ops.model_copy(update={"lora": "lora_compile::fp8_blok_linear"})
    with pytest.raises(SchemeUnsupported, match="the op lora_compile::fp8_blok_linear"):
        require_complete(whole.model_copy(update={"ops": ops}))
    monkeypatch.delitem(LOWERINGS, whole.ops.base)
    with pytest.raises(SchemeUnsupported, match="a lowering"):
        require_complete(whole)
