"""Which adapter slot a row of an activation uses.

Two maps lie in fixed buffers that the runtime fills before each step:

* `seq_slot` (max_rows,) int32 and `seq_scale` (max_rows,) float32: one entry per sequence,
* `token_slot` (max_tokens,) int32 and `token_scale` (max_tokens,) float32: one per token.

A slot of -1 means "no adapter": the delta is exactly zero. Anything else outside [0, S) means that
the row was never bound: the markers raise `RequestInvalid`, the lowered ops give NaN, so that such
a row can never pass for a base row.

Everything here works with symbolic sizes: nothing calls `int()` on a shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lora_compile.errors import RequestInvalid
from lora_compile.torch_compat import check_value

UNBOUND_FIX = "bind the batch to adapters (or to None) before the forward"


class Rows(NamedTuple):
    """The leading size L of an activation, as `batch` x `tokens`.

    `per_token`: row i uses entry i of the token map (then `tokens` is 1); otherwise rows
    [b * tokens, (b + 1) * tokens) use entry b of the sequence map.
    """

    batch: int
    tokens: int
    per_token: bool

    @property
    def total(self) -> int:
        return self.batch * self.tokens


def uses_token_map(dim: int, packed: bool) -> bool:
    """Whether an activation of `dim` dimensions (the last one is features) is mapped per token."""
    return packed or dim == 2


def leading_rows(x: Tensor, per_token: bool) -> Rows:
    """Leading size of x (..., features). `tokens` is a product, so a batch of zero rows works.

    Raises:
        ValueError: x has fewer than two dimensions.
    """
    if x.dim() < 2:
        raise ValueError(f"expected an activation of at least 2 dimensions, found {tuple(x.shape)}")
    tokens = 1
    for size in x.shape[1:-1]:
        tokens = tokens * size
    if per_token:
        return Rows(x.shape[0] * tokens, 1, True)
    return Rows(x.shape[0], tokens, False)


def check_fits(rows: Rows, slot: Tensor) -> None:
    """Refuse more rows than the map has entries.

    Raises:
        ValueError: also while tracing, where a symbolic size becomes a guard.
    """
    check_value(rows.batch <= slot.shape[0], _too_many(rows, slot))


def _too_many(rows: Rows, slot: Tensor) -> Callable[[], str]:
    kind = "tokens" if rows.per_token else "rows"
    return lambda: f"{rows.batch} {kind} exceed the row map of {slot.shape[0]} {kind}"


def active_rows(slot: Tensor, lora_rank: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Resolve slots of any values.

    Args:
        slot: (B,) int32.
        lora_rank: (S,) int32; 0 = the slot has no delta at this site.

    Returns:
        index (B,) int64 in [0, S), safe to gather with; active (B,) bool, rows that have a delta;
        fill (B,) float32, the delta of the other rows: 0, or NaN where the row was not bound.
    """
    slots = lora_rank.shape[0]
    index = slot.clamp(0, slots - 1).long()
    bound = (slot >= 0) & (slot < slots)
    active = bound & (lora_rank[index] > 0)
    fill = torch.zeros_like(slot, dtype=torch.float32)
    fill = fill.masked_fill(~bound & (slot != -1), float("nan"))
    return index, active, fill


def resolve_rows(
    x: Tensor, rows: list[Tensor], packed: bool, slots: int
) -> tuple[Tensor, Tensor, Rows]:
    """Slot and scale of each flattened row of x, checked. For the eager markers.

    Args:
        x: (..., features).
        rows: [seq_slot, seq_scale, token_slot, token_scale].
        packed: rows are packed into one sequence.
        slots: S, number of slots.

    Returns:
        slot (L,) int64, scale (L,) float32, and the leading sizes.

    Raises:
        RequestInvalid: too many rows for the map, or a row that is bound to no slot in [-1, S).
    """
    per_token = uses_token_map(x.dim(), packed)
    leading = leading_rows(x, per_token)
    slot, scale = (rows[2], rows[3]) if per_token else (rows[0], rows[1])
    if leading.batch > slot.shape[0]:
        raise RequestInvalid(
            _too_many(leading, slot)(),
            expected=f"at most {slot.shape[0]}",
            found=leading.batch,
            fix="raise runtime.max_rows or runtime.max_tokens, or send a smaller batch",
        )
    if 0 < leading.batch < slot.shape[0] and int(slot[leading.batch]) >= -1:
        raise RequestInvalid(
            "an input has fewer rows than the batch that was bound",
            expected="an input with every row of the batch (every token where it is flattened)",
            found=f"{leading.batch} rows",
            fix="this module sees a slice of the batch; leave it out of the schema",
        )
    slot, scale = slot[: leading.batch].long(), scale[: leading.batch].float()
    wrong = torch.nonzero((slot < -1) | (slot >= slots)).flatten()
    if wrong.numel():
        row = int(wrong[0])
        raise RequestInvalid(
            f"row {row} of the batch is bound to no adapter slot",
            expected=f"-1 (no adapter) or a slot below {slots}",
            found=int(slot[row]),
            fix=UNBOUND_FIX,
        )
    if not per_token:
        slot, scale = (value.repeat_interleave(leading.tokens) for value in (slot, scale))
    return slot, scale, leading
