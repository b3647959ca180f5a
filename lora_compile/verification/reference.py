"""The reference: dense float32 weights decoded from the file, and explicit deltas.

transformers' own model class runs it, with each projection of the plan replaced by
`W q(x) + b + s B (A x)` in float32: one projection, one row after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from lora_compile.checkpoints.other import load_other
from lora_compile.checkpoints.packing import DensePart, dense_part
from lora_compile.planning.meta_model import DTYPES, meta_model
from lora_compile.planning.plan import SitePlan
from lora_compile.planning.prepare import Prepared
from lora_compile.runtime.site_gate import GateRow
from lora_compile.verification.activation import Followed, quantised_activation


@dataclass
class _Request:
    """What the projections need to know of the forward that runs."""

    rows: Sequence[GateRow] = ()
    codes: Mapping[str, torch.Tensor] = field(default_factory=dict)
    counted: torch.Tensor | None = None
    quantised: bool = True
    tally: Followed = field(default_factory=Followed)


class ReferenceLinear(nn.Module):
    """One part of a linear site."""

    def __init__(self, site: SitePlan, index: int, part: DensePart, request: _Request) -> None:
        super().__init__()
        self.site, self.index, self.request = site, index, request
        self.module_path = site.parts[index].module
        self.input_scale = part.input_scale
        self.register_buffer("weight", part.weight, persistent=False)
        self.register_buffer("bias", part.bias, persistent=False)

    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype, x = x.dtype, x.float()
        request = self.request
        y = F.linear(self._quantised(x), self.weight, self.bias)
        for index, row in enumerate(request.rows):
            delta = None if row.adapter is None else row.adapter.deltas.get(self.module_path)
            if delta is None:
                continue
            down = x[index] @ delta.A.to(x).T
            y[index] += row.scale * delta.scale * (down @ delta.B.to(x).T)
        return y.to(dtype)

    def _quantised(self, x: torch.Tensor) -> torch.Tensor:
        request, quant = self.request, self.site.quant
        if not request.quantised:
            return x
        codes = request.codes.get(self.site.name)
        if codes is not None:  # (planes, rows, tokens, K)
            codes = codes[quant.planes[self.index]].reshape(x.shape).to(x.device)
        counted = request.counted
        if counted is not None:
            counted = counted.reshape(x.shape[:-1])
        return quantised_activation(
            quant.activation,
            x,
            self.input_scale,
            codes=codes,
            counted=counted,
            tally=request.tally,
        )


class Reference:
    """A deployment's model in float32, without any of the product's kernels."""

    def __init__(self, prepared: Prepared) -> None:
        checkpoint, survey = prepared.checkpoint, prepared.survey
        assert checkpoint is not None
        assert survey is not None
        plan = prepared.plan
        self.device = torch.device(plan.device)
        self.dtype = torch.float32
        self.module = meta_model(prepared.config, "float32")
        self._request = _Request()
        with torch.no_grad():
            for site in plan.sites:
                for index, part in enumerate(site.parts):
                    read = dense_part(site, index, checkpoint, survey)
                    self.module.set_submodule(part.module, self._replacement(site, index, read))
        self._load_other(prepared)
        self.module.to(self.device)

    def _load_other(self, prepared: Prepared) -> None:
        checkpoint, survey = prepared.checkpoint, prepared.survey
        assert checkpoint is not None
        assert survey is not None
        load_other(
            self.module,
            checkpoint,
            survey.other,
            self.dtype,
            stacks=survey.stacks,
            device=self.device,
        )

    def cast(self, prepared: Prepared) -> None:
        """Turn into a plain model of the deployment's dtype, for good: for comparison only.

        What passes between the projections is then rounded to that dtype, as in any 16-bit model;
        each projection by itself stays exact.
        """
        self.dtype = DTYPES[prepared.plan.dtype]
        for module in self.module.modules():
            if isinstance(module, nn.Embedding):
                module.to(self.dtype)
        self._load_other(prepared)

    def _replacement(self, site: SitePlan, index: int, part: DensePart) -> nn.Module:
        if site.kind == "embedding":
            table = part.weight.to(self.device)
            return nn.Embedding(table.shape[0], table.shape[1], _weight=table)
        return ReferenceLinear(site, index, part, self._request)

    @torch.no_grad()
    def logits(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        rows: Sequence[GateRow],
        *,
        codes: Mapping[str, torch.Tensor] | None = None,
        quantised: bool = True,
    ) -> torch.Tensor:
        """One forward over whole sequences, without a cache.

        Args:
            ids, mask: (B, S); padding on the left has mask 0.
            rows: one for each row of the batch.
            codes: site -> (planes, B, S, K) codes of the inputs that another run had, to be
                followed where both are right; see `quantised_activation`.
            quantised: whether inputs are quantised as the scheme says. Weights always are.

        Returns:
            (B, S, V) float32.
        """
        request = self._request
        request.rows, request.codes, request.quantised = rows, codes or {}, quantised
        request.counted = mask.bool() if codes else None
        request.tally = Followed()
        found: torch.Tensor = self.module(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions(mask),
            use_cache=False,
        ).logits
        return found.float()

    @property
    def followed(self) -> Followed:
        """How the codes of the last forward compared."""
        return self._request.tally

    @torch.no_grad()
    def continuation(
        self, ids: torch.Tensor, mask: torch.Tensor, rows: Sequence[GateRow], tokens: int
    ) -> torch.Tensor:
        """Greedy continuation, each row by its own adapter: (B, tokens)."""
        from transformers import DynamicCache

        request = self._request
        request.rows, request.codes, request.quantised, request.counted = rows, {}, True, None
        cache = DynamicCache(config=self.module.config)
        found: list[torch.Tensor] = []
        while len(found) < tokens:
            step = self.module(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions(mask)[:, -ids.shape[1] :],
                past_key_values=cache,
                use_cache=True,
            )
            ids = step.logits[:, -1].argmax(-1, keepdim=True)
            mask = F.pad(mask, (0, 1), value=1)
            found.append(ids)
        return torch.cat(found, 1)


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Position ids of left-padded rows: the first real token of each row is 0."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)
