"""The pool: which adapter is in which slot, and who is using it.

A slot that anyone may still read is never written. `replace` fills a free slot and then moves the
name; the old slot is retired and becomes free with its last lease. One slot more than
`max_adapters` is kept for that.
"""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from lora_compile.adapters.canonical import CanonicalAdapter
from lora_compile.adapters.leases import Fence, Lease, SlotStates
from lora_compile.adapters.peft_reader import read_adapter, read_adapter_tensors
from lora_compile.adapters.slots import SlotImage, SlotTensors, copy_image, make_image
from lora_compile.errors import (
    AdapterNameTaken,
    AdapterUnknown,
    InvalidValue,
    PoolFull,
    RequestInvalid,
)
from lora_compile.planning.plan import Plan

AdapterSource = str | Path | CanonicalAdapter | Mapping[str, torch.Tensor]
WhenFull = Literal["error", "wait"]

_POLL_SECONDS = 0.001
_DEVICE_SECONDS = 60.0
"""How long a slot may stay unreadable because the device has not finished with it."""


@dataclass(frozen=True)
class LoadedAdapter:
    """One name of the pool."""

    name: str
    digest: str
    """Identity of the content: the key for every cache that depends on the adapter."""
    rank: int
    """Highest rank over its projections."""
    bytes: int
    """Bytes of its A and B as read; what a slot takes is fixed (`slot_bytes`)."""
    slot: int
    pinned: bool
    last_use: int
    """Position in the order of loads and leases of this pool; higher is later."""
    scale: float
    """Factor on the whole delta where a request names none."""


class AdapterPool:
    """Adapters by name over a fixed set of slots. All methods may be called from any thread.

    Args:
        plan: the model.
        slots: what `allocate_slots` gave for it.
        when_full: `error`: raise PoolFull when no slot can be had; `wait`: wait for one first.
        wait_seconds: how long `wait` waits before PoolFull.
    """

    def __init__(
        self,
        plan: Plan,
        slots: dict[str, SlotTensors],
        *,
        when_full: WhenFull,
        wait_seconds: float,
    ) -> None:
        if when_full not in ("error", "wait"):
            raise InvalidValue(
                "no such policy", where="when_full", expected="error or wait", found=when_full
            )
        if not (math.isfinite(wait_seconds) and wait_seconds >= 0):
            raise InvalidValue(
                "not a duration", where="wait_seconds", expected=">= 0", found=wait_seconds
            )
        self._plan = plan
        self._tensors = slots
        self._wait = wait_seconds if when_full == "wait" else 0.0
        self._changed = threading.Condition()
        self._slots = SlotStates(plan.slots.slots)
        self._names: dict[str, LoadedAdapter] = {}
        self._loading: set[str] = set()
        self._clock = 0

    # --- names --------------------------------------------------------------------------------

    def load(
        self,
        name: str,
        source: AdapterSource,
        *,
        config: Mapping[str, Any] | None = None,
        scale: float = 1.0,
        pinned: bool = False,
    ) -> LoadedAdapter:
        """Add an adapter under a new name.

        With `max_adapters` names loaded, the least recently used one that is neither pinned nor
        leased makes room.

        Args:
            source: an adapter directory, an adapter already read, or tensors by their PEFT keys.
            config: the adapter's config; with tensors only, and required there.
            scale: factor on the whole delta where a request names none.
            pinned: never make room for another name.

        Raises:
            AdapterNameTaken: the name is loaded; use `replace`.
            PoolFull: no slot can be had (in time).
            RequestInvalid: a bad name, scale or config.
            What `read_adapter` and `make_image` raise; nothing has changed then.
        """
        self._check_name(name, scale)
        with self._changed:
            self._check_free_name(name)
        image = self._image(source, config)
        slot = self._reserve(name, new=True)
        self._write(name, slot, image)
        with self._changed:
            self._loading.discard(name)
            return self._publish(name, slot, image, scale, pinned)

    def replace(
        self,
        name: str,
        source: AdapterSource,
        *,
        config: Mapping[str, Any] | None = None,
        scale: float | None = None,
        pinned: bool | None = None,
    ) -> LoadedAdapter:
        """Give a loaded name new content. Open leases keep the old content to their end.

        Args: as `load`; `scale` and `pinned` keep what they were where they are None.

        Raises:
            AdapterUnknown: the name is not loaded, or was unloaded meanwhile.
            Otherwise as `load`; the old content stays then.
        """
        self._check_name(name, 1.0 if scale is None else scale)
        with self._changed:
            self._get(name)
        image = self._image(source, config)
        slot = self._reserve(name, new=False)
        self._write(name, slot, image)
        with self._changed:
            old = self._names.get(name)
            if old is None:
                self._set_state(slot, "free")
                self._get(name)
            else:
                self._set_state(old.slot, "retired")
                pinned = old.pinned if pinned is None else pinned
                scale = old.scale if scale is None else scale
            return self._publish(name, slot, image, 1.0 if scale is None else scale, bool(pinned))

    def unload(self, name: str) -> None:
        """Take a name out; its slot becomes free with its last lease.

        Raises:
            AdapterUnknown: the name is not loaded.
        """
        with self._changed:
            self._drop(self._get(name))

    def pin(self, name: str) -> None:
        """Keep a name from making room for others. Raises AdapterUnknown."""
        self._set_pinned(name, True)

    def unpin(self, name: str) -> None:
        """Undo `pin`. Raises AdapterUnknown."""
        self._set_pinned(name, False)

    def list(self) -> tuple[LoadedAdapter, ...]:
        """All loaded adapters, in the order of their names."""
        with self._changed:
            return tuple(self._names[name] for name in sorted(self._names))

    def lease(self, names: Sequence[str | None]) -> Lease:
        """Hold the adapters of a batch, one name (or None) per row.

        Raises:
            AdapterUnknown: a name that is not loaded; nothing is held then.
        """
        with self._changed:
            unknown = sorted({n for n in names if n is not None and n not in self._names})
            if unknown:
                raise self._unknown(unknown)
            rows = [None if name is None else self._names[name] for name in names]
            for adapter in {row.name: row for row in rows if row is not None}.values():
                self._slots.hold(adapter.slot)
                self._names[adapter.name] = replace(adapter, last_use=self._tick())
            return Lease(
                self._release,
                tuple(-1 if row is None else row.slot for row in rows),
                tuple(1.0 if row is None else row.scale for row in rows),
                tuple(None if row is None else row.digest for row in rows),
            )

    # --- slots --------------------------------------------------------------------------------

    def _reserve(self, name: str, *, new: bool) -> int:
        """Take a free slot for writing, or make one free. The name is then being loaded."""
        start = time.monotonic()
        with self._changed:
            while True:
                if new:
                    self._check_free_name(name)
                else:
                    self._get(name)
                crowded = (
                    new and len(self._names) + len(self._loading) >= self._plan.slots.max_adapters
                )
                if crowded and (victim := self._least_used()) is not None:
                    self._drop(victim)
                    crowded = False
                slot = None if crowded else self._slots.take_free()
                if slot is not None:
                    if new:
                        self._loading.add(name)
                    return slot
                waited = time.monotonic() - start
                if not crowded and self._slots.draining() and waited < _DEVICE_SECONDS:
                    self._changed.wait(_POLL_SECONDS)
                elif waited < self._wait:
                    # Fences complete without a notice, so never sleep long.
                    self._changed.wait(min(self._wait - waited, 0.05))
                else:
                    raise self._full(name)

    def _least_used(self) -> LoadedAdapter | None:
        idle = [a for a in self._names.values() if not a.pinned and not self._slots.leases(a.slot)]
        return min(idle, key=lambda adapter: adapter.last_use, default=None)

    def _write(self, name: str, slot: int, image: SlotImage) -> None:
        try:
            copy_image(self._tensors, slot, image)
            if self._device.type == "cuda":
                # Any stream may read the slot once the name points to it.
                torch.cuda.current_stream(self._device).synchronize()
        except BaseException:
            with self._changed:
                self._loading.discard(name)
                self._set_state(slot, "free")
            raise

    def _publish(
        self, name: str, slot: int, image: SlotImage, scale: float, pinned: bool
    ) -> LoadedAdapter:
        adapter = image.adapter
        for text in adapter.warnings:
            warnings.warn(f"adapter {name}: {text}", stacklevel=3)
        factors = {id(t): t for d in adapter.deltas.values() for t in (d.A, d.B)}
        self._names[name] = LoadedAdapter(
            name=name,
            digest=adapter.digest,
            rank=adapter.max_rank,
            bytes=sum(tensor.nbytes for tensor in factors.values()),
            slot=slot,
            pinned=pinned,
            last_use=self._tick(),
            scale=scale,
        )
        self._set_state(slot, "live")
        return self._names[name]

    def _drop(self, adapter: LoadedAdapter) -> None:
        del self._names[adapter.name]
        self._set_state(adapter.slot, "retired")

    def _set_state(self, slot: int, state: Literal["free", "live", "retired"]) -> None:
        self._slots.set(slot, state)
        self._changed.notify_all()

    def _release(self, lease: Lease) -> None:
        with self._changed:
            if lease.closed:
                return
            lease.closed = True
            held = {slot for slot in lease.slots if slot >= 0}
            self._slots.release(held, self._record_fence())
            self._changed.notify_all()

    def _record_fence(self) -> Fence | None:
        if self._device.type != "cuda":
            return None
        fence: Fence = torch.cuda.current_stream(self._device).record_event()
        return fence

    @property
    def _device(self) -> torch.device:
        first = next(iter(self._tensors.values()), None)
        return torch.device("cpu") if first is None else first.lora_A.device

    # --- small things -------------------------------------------------------------------------

    def _image(self, source: AdapterSource, config: Mapping[str, Any] | None) -> SlotImage:
        if isinstance(source, Mapping):
            if config is None:
                raise RequestInvalid("tensors need the adapter's config", where="config")
            return make_image(self._plan, read_adapter_tensors(source, config, self._plan))
        if config is not None:
            raise RequestInvalid(
                "a config goes with tensors only", where="config", found=type(source).__name__
            )
        if isinstance(source, CanonicalAdapter):
            return make_image(self._plan, source)
        return make_image(self._plan, read_adapter(source, self._plan))

    def _check_name(self, name: str, scale: float) -> None:
        if not isinstance(name, str) or not name:
            raise RequestInvalid("an adapter's name is a non-empty string", found=repr(name))
        if not math.isfinite(scale):
            raise RequestInvalid("an adapter's scale is a finite number", found=scale)

    def _check_free_name(self, name: str) -> None:
        if name in self._names or name in self._loading:
            raise AdapterNameTaken(
                f"an adapter named {name!r} is loaded already",
                found=f"loaded: {self._loaded()}",
                fix="use replace, or unload it first",
            )

    def _set_pinned(self, name: str, pinned: bool) -> None:
        with self._changed:
            self._names[name] = replace(self._get(name), pinned=pinned)
            self._changed.notify_all()

    def _get(self, name: str) -> LoadedAdapter:
        if name not in self._names:
            raise self._unknown([name])
        return self._names[name]

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _loaded(self) -> str:
        return ", ".join(sorted(self._names)) or "none"

    def _unknown(self, names: Sequence[str]) -> AdapterUnknown:
        asked = ", ".join(repr(name) for name in names)
        return AdapterUnknown(
            f"no adapter named {asked} is loaded",
            expected=f"one of: {self._loaded()}",
            found=asked,
            fix="load it first, or correct the name",
        )

    def _full(self, name: str) -> PoolFull:
        states = [
            f"{a.name} ({', '.join(w for w, is_so in self._holds(a) if is_so) or 'idle'})"
            for a in self._names.values()
        ]
        old = self._slots.count("retired")
        return PoolFull(
            f"no slot is free for adapter {name!r}",
            expected="an adapter that is neither pinned nor in use, or a free slot",
            found=f"loaded: {', '.join(states)}; {old} slots hold replaced content still in use",
            fix="raise runtime.max_adapters, unpin or unload an adapter, or close leases",
        )

    def _holds(self, adapter: LoadedAdapter) -> tuple[tuple[str, bool], ...]:
        leases = self._slots.leases(adapter.slot)
        return (("pinned", adapter.pinned), (f"{leases} leases", leases > 0))
