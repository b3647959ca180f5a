"""Slot states and leases: who may still read which slot."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Protocol

State = Literal["free", "writing", "live", "retired"]


class Fence(Protocol):
    """A mark in the device's work; `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether everything before the mark is done."""


@dataclass
class _Slot:
    state: State = "free"
    leases: int = 0
    fences: list[Fence] = field(default_factory=list)

    def forget_passed(self) -> None:
        self.fences = [fence for fence in self.fences if not fence.query()]


class SlotStates:
    """What every slot is used for. Not locked: the pool's lock guards it.

    free -> writing -> live -> retired -> free. A retired slot becomes free when no lease holds it
    and the device has passed the fence of every lease that did.
    """

    def __init__(self, count: int) -> None:
        self._slots = [_Slot() for _ in range(count)]

    def take_free(self) -> int | None:
        """A free slot, now `writing`; None if there is none."""
        for index, slot in enumerate(self._slots):
            if slot.state == "retired" and not slot.leases:
                slot.forget_passed()
                if not slot.fences:
                    slot.state = "free"
            if slot.state == "free":
                slot.state = "writing"
                return index
        return None

    def set(self, index: int, state: Literal["free", "live", "retired"]) -> None:
        self._slots[index].state = state

    def hold(self, index: int) -> None:
        self._slots[index].leases += 1

    def release(self, indices: Iterable[int], fence: Fence | None) -> None:
        """End one hold of each slot; the device holds it on until `fence` has passed."""
        for index in indices:
            slot = self._slots[index]
            slot.leases -= 1
            slot.forget_passed()
            if fence is not None:
                slot.fences.append(fence)

    def leases(self, index: int) -> int:
        return self._slots[index].leases

    def draining(self) -> bool:
        """Whether some slot waits for nothing but the device."""
        return any(slot.state == "retired" and not slot.leases for slot in self._slots)

    def count(self, state: State) -> int:
        return sum(slot.state == state for slot in self._slots)


class Lease:
    """The slots of a batch's rows, held until closed; use it as a context manager.

    While it is open nothing writes these slots, whatever is unloaded or replaced meanwhile. Close
    it on the thread and stream that ran the batch: on CUDA the hold ends when the work queued so
    far on the current stream has completed.
    """

    def __init__(
        self,
        release: Callable[[Lease], None],
        slots: tuple[int, ...],
        scales: tuple[float, ...],
        digests: tuple[str | None, ...],
    ) -> None:
        self.slots = slots
        """Slot per row; -1 for no adapter."""
        self.scales = scales
        """The adapter's own default scale per row; 1.0 for no adapter."""
        self.digests = digests
        """Content per row; None for no adapter."""
        self.closed = False
        self._release = release

    def close(self) -> None:
        """End the lease; a second call does nothing."""
        self._release(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
