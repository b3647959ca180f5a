"""Which slot serves which row: two maps in fixed buffers, filled once per step.

`seq_slot[b]` serves inputs whose first dimension is the batch; `token_slot[t]` serves flattened
(tokens, features) inputs and packed sequences. A scale per row rides beside. Entries behind the
current batch hold UNBOUND, which ops turn into NaN, so that a row nobody bound is never served
with base weights in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lora_compile.errors import RequestInvalid

NO_ADAPTER = -1
UNBOUND = -2


@dataclass(frozen=True)
class RowBinding:
    """The slots and scales of one request, in the order of its rows.

    For packed inputs a row is a segment, and `lengths` gives each segment's number of tokens.
    """

    slots: tuple[int, ...]
    scales: tuple[float, ...]
    expand: int = 1
    """How often generation repeats each row (beams or returned sequences)."""
    lengths: tuple[int, ...] | None = None


class RowMaps:
    """The buffers that every site reads. Allocated once; only `bind` writes them."""

    def __init__(self, max_rows: int, max_tokens: int, *, packed: bool, device: torch.device | str):
        self.packed = packed
        self.seq_slot = torch.full((max_rows,), UNBOUND, dtype=torch.int32, device=device)
        self.seq_scale = torch.ones(max_rows, dtype=torch.float32, device=device)
        self.token_slot = torch.full((max_tokens,), UNBOUND, dtype=torch.int32, device=device)
        self.token_scale = torch.ones(max_tokens, dtype=torch.float32, device=device)
        self._current: tuple[RowBinding | None, int, int] | None = None
        self._read: torch.cuda.Event | None = None
        if self.seq_slot.is_cuda:
            self._read = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Name -> buffer, in the order in which markers take them."""
        return {
            "seq_slot": self.seq_slot,
            "seq_scale": self.seq_scale,
            "token_slot": self.token_slot,
            "token_scale": self.token_scale,
        }

    def bind(self, binding: RowBinding | None, batch: int, tokens_per_row: int) -> None:
        """Fill the maps for a forward of `batch` rows of `tokens_per_row` tokens each.

        Args:
            binding: None binds every row to no adapter.

        Raises:
            RequestInvalid: more rows or tokens than the buffers hold, or a binding whose rows
                are not those of the forward.
        """
        self._wait_for_readers()
        if self._current == (binding, batch, tokens_per_row):
            return
        self._check_sizes(batch, batch * tokens_per_row)
        if self.packed:
            slots, scales = self._packed_rows(binding, batch, tokens_per_row)
            self._fill(self.token_slot, self.token_scale, slots, scales)
        else:
            slots, scales = self._sequence_rows(binding, batch)
            self._fill(self.seq_slot, self.seq_scale, slots, scales)
            per_token = [s for s in slots for _ in range(tokens_per_row)]
            scale_per_token = [s for s in scales for _ in range(tokens_per_row)]
            self._fill(self.token_slot, self.token_scale, per_token, scale_per_token)
        self._current = (binding, batch, tokens_per_row)

    def done(self) -> None:
        """Note that the kernels launched so far read the maps; call it after each forward.

        The model's lock orders the host alone: another thread may work on another CUDA stream.
        """
        if self._read is not None:
            self._read.record()

    def _wait_for_readers(self) -> None:
        if self._read is not None:
            torch.cuda.current_stream(self.seq_slot.device).wait_event(self._read)

    def release(self) -> None:
        """Unbind every row, so that nothing runs on the last request's adapters."""
        self._wait_for_readers()
        self.seq_slot.fill_(UNBOUND)
        self.token_slot.fill_(UNBOUND)
        self._current = None

    def _check_sizes(self, batch: int, tokens: int) -> None:
        for name, found, size in (
            ("max_rows", batch, self.seq_slot.numel()),
            ("max_tokens", tokens, self.token_slot.numel()),
        ):
            if found > size:
                unit = name.removeprefix("max_")
                raise RequestInvalid(
                    f"the batch has more {unit} than the graph was built for",
                    expected=f"at most {size} {unit}",
                    found=f"{found} {unit}",
                    fix=f"set runtime.{name}: {found} or send smaller batches",
                )

    def _sequence_rows(
        self, binding: RowBinding | None, batch: int
    ) -> tuple[list[int], list[float]]:
        if binding is None:
            return [NO_ADAPTER] * batch, [1.0] * batch
        rows = len(binding.slots)
        if batch == rows:
            expand = 1
        elif batch == rows * binding.expand:
            expand = binding.expand
        else:
            raise RequestInvalid(
                "the forward has other rows than the request",
                expected=f"{rows} rows (or {rows * binding.expand} with beams)",
                found=f"{batch} rows",
                fix="give one adapter name (or None) for each row of input_ids",
            )
        slots = [slot for slot in binding.slots for _ in range(expand)]
        return slots, [scale for scale in binding.scales for _ in range(expand)]

    def _packed_rows(
        self, binding: RowBinding | None, batch: int, tokens: int
    ) -> tuple[list[int], list[float]]:
        if batch != 1:
            raise RequestInvalid(
                "packed inputs have batch size 1",
                expected="input_ids of shape (1, tokens)",
                found=f"{batch} rows",
                fix="concatenate the sequences, or set runtime.packed: false",
            )
        if binding is None:
            return [NO_ADAPTER] * tokens, [1.0] * tokens
        lengths = binding.lengths
        fits = lengths is not None and len(lengths) == len(binding.slots)
        if lengths is None or not fits or min(lengths) < 1 or sum(lengths) != tokens:
            raise RequestInvalid(
                "packed inputs need the length of each segment",
                expected=f"lengths: {len(binding.slots)} numbers that add up to {tokens}",
                found=lengths,
                fix="pass lengths=[…], one number of tokens for each entry of adapters",
            )
        pairs = list(zip(lengths, binding.slots, binding.scales, strict=True))
        slots = [slot for length, slot, _ in pairs for _ in range(length)]
        return slots, [scale for length, _, scale in pairs for _ in range(length)]

    @staticmethod
    def _fill(
        slot: torch.Tensor, scale: torch.Tensor, slots: Sequence[int], scales: Sequence[float]
    ) -> None:
        count = len(slots)
        full = torch.full((slot.numel(),), UNBOUND, dtype=torch.int32)
        full[:count] = torch.tensor(slots, dtype=torch.int32)
        slot.copy_(full, non_blocking=True)
        scale[:count].copy_(torch.tensor(scales, dtype=torch.float32), non_blocking=True)
