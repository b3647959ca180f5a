"""A site's weight in the form that the ops take: all parts of the group in one storage."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lora_compile.checkpoints.block_scales import scale_shape
from lora_compile.checkpoints.readers import PartWeights, fp8_block, reader_for
from lora_compile.checkpoints.source import WeightSource
from lora_compile.checkpoints.survey import ModuleFormat, Survey
from lora_compile.errors import CheckpointInvalid, TensorNotFinite
from lora_compile.planning.plan import PartPlan, SitePlan
from lora_compile.schemas.quant_info import PartRows


@dataclass(frozen=True)
class SiteWeights:
    """Packed tensors of one site, on the device they were packed for."""

    weight: torch.Tensor
    """(N, K), parts one below the other; dtype `site.quant.weight_dtype`."""
    aux: list[torch.Tensor]
    """In the order of `site.quant.aux_names`. Block scales: float32, rows as in
    `PartRows.scale_rows` (they restart at each part), ceil(K / bk) columns."""
    bias: torch.Tensor | None
    """(N,), zeros where a part has none; None if `site.quant.bias` is false."""


def pack_site(
    site: SitePlan,
    source: WeightSource,
    survey: Survey,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> SiteWeights:
    """Read the parts of `site` one by one into one storage per tensor.

    Memory at its highest: the packed tensors and one part. A part that is stored unquantised is
    quantised here if the plan says block FP8; block scales are never rounded or re-blocked.

    Args:
        dtype: dtype of an unquantised weight and of the bias.

    Raises:
        CheckpointInvalid: plan and survey disagree about a part.
        TensorNotFinite: a weight that cannot be represented in the packed dtype.
    """
    quant = site.quant
    weight_dtype: torch.dtype = getattr(torch, quant.weight_dtype)
    if quant.scheme == "none" and weight_dtype != dtype:
        raise _disagree(site, None, f"weights in {dtype}", f"a plan for {weight_dtype}")
    weight = torch.empty(quant.out_features, quant.in_features, dtype=weight_dtype, device=device)
    aux: list[torch.Tensor] = []
    if quant.scale.granularity == "block":
        aux.append(torch.empty(_scale_shape(site), dtype=torch.float32, device=device))
    bias = torch.zeros(quant.out_features, dtype=dtype, device=device) if quant.bias else None
    for part, place in _parts(site):
        fmt = _format_of(site, part, survey)
        low, high = place.rows
        stored = _read(site, part, fmt, source, device)
        weight[low:high].copy_(stored.weight)
        _check_finite(weight[low:high], stored.weight, part, fmt, source)
        for name, tensor in zip(quant.aux_names, aux, strict=True):
            assert place.scale_rows is not None, "checked by _scale_shape"
            tensor[slice(*place.scale_rows)].copy_(stored.aux[name])
        if fmt.bias_key is not None:
            if bias is None:
                raise _disagree(site, part, "a plan with a bias", f"{fmt.bias_key} in the file")
            bias[low:high].copy_(source.tensor(fmt.bias_key))
    return SiteWeights(weight, aux, bias)


def dense_part(site: SitePlan, index: int, source: WeightSource, survey: Survey) -> torch.Tensor:
    """W of one part as the ops must see it: float32 (N_p, K), decoded from the file on its device.

    For a part that is quantised at load this is decode(quantise(W)), not the stored W.
    Raises CheckpointInvalid as `pack_site` does.
    """
    part = site.parts[index]
    fmt = _format_of(site, part, survey)
    stored = reader_for(fmt.scheme).read_part(source, part.module, fmt)
    dense = reader_for(fmt.scheme).dequantise(stored.weight, stored.aux, fmt.block_shape)
    if fmt.scheme == site.quant.scheme:
        return dense
    block_shape = _block_shape(site)
    codes, scale = fp8_block.quantise(dense, block_shape)
    return fp8_block.dequantise(codes, {fp8_block.SCALE: scale}, block_shape)


def dense_bias(
    site: SitePlan, index: int, source: WeightSource, survey: Survey
) -> torch.Tensor | None:
    """The stored bias of one part, float32 (N_p,), or None where it has none."""
    key = _format_of(site, site.parts[index], survey).bias_key
    return None if key is None else source.tensor(key).float()


def _parts(site: SitePlan) -> list[tuple[PartPlan, PartRows]]:
    return list(zip(site.parts, site.quant.parts, strict=True))


def _block_shape(site: SitePlan) -> tuple[int, int]:
    block_shape = site.quant.scale.block_shape
    if block_shape is None:
        raise _disagree(site, None, "a block shape for block scales", "none in the plan")
    return block_shape


def _scale_shape(site: SitePlan) -> tuple[int, int]:
    """Rows of all parts together, and columns; each part must have just the rows it needs."""
    block_shape = _block_shape(site)
    row = 0
    for part, place in _parts(site):
        rows, _ = scale_shape((part.out_features, site.in_features), block_shape)
        if place.scale_rows != (row, row + rows):
            raise _disagree(site, part, f"scale rows {(row, row + rows)}", f"{place.scale_rows}")
        row += rows
    return row, scale_shape((1, site.in_features), block_shape)[1]


def _format_of(site: SitePlan, part: PartPlan, survey: Survey) -> ModuleFormat:
    fmt = survey.formats.get(part.module)
    if fmt is None:
        raise _disagree(site, part, "a surveyed projection", "a module the survey does not know")
    if fmt.scheme != site.quant.scheme and (fmt.scheme, site.quant.scheme) != ("none", "fp8_block"):
        raise _disagree(site, part, f"a part stored as {site.quant.scheme}", fmt.scheme)
    if fmt.scheme == "fp8_block" and fmt.block_shape != site.quant.scale.block_shape:
        raise _disagree(site, part, f"blocks of {site.quant.scale.block_shape}", fmt.block_shape)
    return fmt


def _read(
    site: SitePlan,
    part: PartPlan,
    fmt: ModuleFormat,
    source: WeightSource,
    device: torch.device | str,
) -> PartWeights:
    stored = reader_for(fmt.scheme).read_part(source, part.module, fmt)
    if tuple(stored.weight.shape) != (part.out_features, site.in_features):
        raise _disagree(
            site,
            part,
            f"a weight {[part.out_features, site.in_features]}",
            f"{list(stored.weight.shape)}",
        )
    if fmt.scheme == site.quant.scheme:
        return stored
    codes, scale = fp8_block.quantise(
        stored.weight.to(device=device, dtype=torch.float32), _block_shape(site)
    )
    if not bool(torch.isfinite(scale).all()):
        raise _not_finite(stored.weight, part, fmt, source, "before it is quantised")
    return PartWeights(codes, {fp8_block.SCALE: scale})


def _check_finite(
    packed: torch.Tensor,
    stored: torch.Tensor,
    part: PartPlan,
    fmt: ModuleFormat,
    source: WeightSource,
) -> None:
    """A cast to a dtype of smaller range can turn large weights into Inf without a word."""
    narrowed = torch.finfo(packed.dtype).max < torch.finfo(stored.dtype).max
    if narrowed and not bool(torch.isfinite(packed).all()):
        raise _not_finite(packed, part, fmt, source, f"in {packed.dtype}")


def _not_finite(
    tensor: torch.Tensor, part: PartPlan, fmt: ModuleFormat, source: WeightSource, when: str
) -> TensorNotFinite:
    first = torch.nonzero(~torch.isfinite(tensor))[0].tolist()
    return TensorNotFinite(
        f"a weight that is not finite {when}",
        file=source.headers[fmt.weight_key].file,
        where=part.module,
        tensor=fmt.weight_key,
        expected="finite values",
        found=f"{tensor[tuple(first)].item()} at {first}",
        fix="use a dtype of larger range (bfloat16 or float32), or repair the checkpoint",
    )


def _disagree(
    site: SitePlan, part: PartPlan | None, expected: object, found: object
) -> CheckpointInvalid:
    return CheckpointInvalid(
        "plan and checkpoint disagree about a site",
        where=site.name if part is None else part.module,
        tensor=None if part is None else f"{part.module}.weight",
        expected=expected,
        found=found,
        fix="make the plan anew from this checkpoint",
    )
