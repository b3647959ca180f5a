"""A site's weight in the form that the ops take: all parts of the group in one storage."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lora_compile.checkpoints.codes import decode, encode_for
from lora_compile.checkpoints.readers import PartWeights, reader_for
from lora_compile.checkpoints.scales import scale_shape
from lora_compile.checkpoints.source import WeightSource
from lora_compile.checkpoints.survey import ModuleFormat, Survey
from lora_compile.errors import CheckpointInvalid, TensorNotFinite
from lora_compile.planning.plan import PartPlan, SitePlan


@dataclass(frozen=True)
class SiteWeights:
    """Packed tensors of one site, on the device they were packed for."""

    weight: torch.Tensor
    """(N, K), parts one below the other; dtype `site.quant.weight_dtype`."""
    aux: list[torch.Tensor]
    """The tensors of `site.quant.aux_shapes`, float32."""
    bias: torch.Tensor | None
    """(N,), zeros where a part has none; None if `site.quant.bias` is false."""


@dataclass(frozen=True)
class DensePart:
    """One part as the reference must see it, all float32."""

    weight: torch.Tensor
    """(N_p, K), decoded from the file. Quantised at load: decode(encode(W)), not the stored W."""
    bias: torch.Tensor | None
    """(N_p,), or None where the part has none."""
    input_scale: float | None
    """The static scale of its input, where the scheme has one."""


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
    quantised here if the plan says so; stored scales are never rounded, and blocks never re-cut.

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
    _check_scale_rows(site)
    weight = torch.empty(quant.out_features, quant.in_features, dtype=weight_dtype, device=device)
    aux = {
        name: torch.empty(shape, dtype=torch.float32, device=device)
        for name, shape in quant.aux_shapes.items()
    }
    bias = torch.zeros(quant.out_features, dtype=dtype, device=device) if quant.bias else None
    for part, place in zip(site.parts, quant.parts, strict=True):
        fmt = _format_of(site, part, survey)
        low, high = place.rows
        stored = _read(site, part, fmt, source, device)
        weight[low:high].copy_(stored.weight)
        _check_finite(weight[low:high], stored.weight, part, fmt, source)
        if stored.scale is not None:
            aux["weight_scale"][slice(*(place.scale_rows or place.rows))].copy_(stored.scale)
        if place.input_scale is not None and fmt.input_scale is not None:
            aux["input_scale"][place.input_scale] = fmt.input_scale
        if fmt.bias_key is not None:
            if bias is None:
                raise _disagree(site, part, "a plan with a bias", f"{fmt.bias_key} in the file")
            bias[low:high].copy_(source.tensor(fmt.bias_key))
    return SiteWeights(weight, list(aux.values()), bias)


def dense_part(site: SitePlan, index: int, source: WeightSource, survey: Survey) -> DensePart:
    """One part decoded from the file, on the file's device. Raises as `pack_site` does."""
    part = site.parts[index]
    fmt = _format_of(site, part, survey)
    stored = _read(site, part, fmt, source, None)
    key = fmt.bias_key
    return DensePart(
        weight=decode(stored.weight, stored.scale, site.quant.scale.block_shape),
        bias=None if key is None else source.tensor(key).float(),
        input_scale=fmt.input_scale,
    )


def _check_scale_rows(site: SitePlan) -> None:
    """With blocks, each part must have just the rows of scales that it needs."""
    block_shape, row = site.quant.scale.block_shape, 0
    if block_shape is None:
        return
    for part, place in zip(site.parts, site.quant.parts, strict=True):
        rows, _ = scale_shape((part.out_features, site.in_features), block_shape)
        if place.scale_rows != (row, row + rows):
            raise _disagree(site, part, f"scale rows {(row, row + rows)}", f"{place.scale_rows}")
        row += rows


def _format_of(site: SitePlan, part: PartPlan, survey: Survey) -> ModuleFormat:
    fmt = survey.formats.get(part.module)
    if fmt is None:
        raise _disagree(site, part, "a surveyed projection", "a module the survey does not know")
    if fmt.scheme not in ("none", site.quant.scheme):
        raise _disagree(site, part, f"a part stored as {site.quant.scheme}", fmt.scheme)
    if fmt.scheme != "none" and fmt.block_shape != site.quant.scale.block_shape:
        raise _disagree(site, part, f"blocks of {site.quant.scale.block_shape}", fmt.block_shape)
    return fmt


def _read(
    site: SitePlan,
    part: PartPlan,
    fmt: ModuleFormat,
    source: WeightSource,
    device: torch.device | str | None,
) -> PartWeights:
    """One part's tensors, quantised (on `device`) if the plan says so and the file does not."""
    stored = reader_for(fmt.reader).read_part(source, fmt)
    if tuple(stored.weight.shape) != (part.out_features, site.in_features):
        raise _disagree(
            site,
            part,
            f"a weight {[part.out_features, site.in_features]}",
            f"{list(stored.weight.shape)}",
        )
    if fmt.scheme == site.quant.scheme:
        return stored
    codes, scale = encode_for(stored.weight.to(device=device, dtype=torch.float32), site.quant)
    if not bool(torch.isfinite(scale).all()):
        raise _not_finite(stored.weight, part, fmt, source, "before it is quantised")
    return PartWeights(codes, scale)


def _check_finite(
    packed: torch.Tensor,
    stored: torch.Tensor,
    part: PartPlan,
    fmt: ModuleFormat,
    source: WeightSource,
) -> None:
    """A cast to a dtype of smaller range can turn large weights into Inf without a word."""
    if not packed.is_floating_point():
        return
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
