"""LoraModel: a model that serves a different adapter on each row of a batch."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import nn

from lora_compile import torch_compat
from lora_compile.adapters.pool import AdapterPool
from lora_compile.errors import (
    CompileIncomplete,
    FeatureUnsupported,
    InvalidValue,
    LoraCompileError,
    RequestInvalid,
)
from lora_compile.planning.plan import Plan, SitePlan
from lora_compile.runtime.attach import SiteLinear
from lora_compile.runtime.backend import Backend
from lora_compile.runtime.report import Report, make_report
from lora_compile.runtime.rows import RowBinding, RowMaps

GRAPH_LIMIT = 64
"""Graphs that one model may have, over all its shapes."""

CompileScope = Literal["whole", "layers", "off"]


class LoraModel:
    """A transformers causal LM with its sites attached.

    Made by `lora_compile.load` or `lora_compile.wrap`. Forwards of one model run one at a time
    (a lock); adapters may be loaded, replaced and unloaded from other threads meanwhile.

    Attributes:
        module: the transformers model; call it through this object.
        plan: every site with everything decided.
        adapters: the pool of adapter slots.
        backend: the Dynamo backend of this model and no other.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        sites_by_tensor: dict[int, SitePlan],
        rows: RowMaps,
        adapters: AdapterPool,
    ) -> None:
        torch_compat.check_torch_version()
        self.module = module
        self.plan = plan
        self.adapters = adapters
        self.scope: CompileScope = "off"
        self.backend = Backend(plan, sites_by_tensor, whole=True)
        self._sites_by_tensor = sites_by_tensor
        self._rows = rows
        self._lock = threading.RLock()
        self._binding: RowBinding | None = None
        self._layer_forwards: list[tuple[nn.Module, Callable[..., Any] | None]] = []
        self._forward = _with_own_code(module.forward, {})
        site = next(m for m in module.modules() if isinstance(m, SiteLinear)).site
        self._witnesses = [
            (owner, name, tensor)
            for owner in (site, site.rows)
            for name, tensor in owner.named_buffers(recurse=False)
        ]
        self._breaks_before = torch_compat.graph_breaks()
        self._signature = inspect.signature(module.forward)
        self._run = self._forward

        @functools.wraps(self._forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._step(*args, **kwargs)

        # An instance attribute, so that whoever calls the module (generate does) goes through
        # the row maps; the signature stays visible because generate looks at it.
        module.forward = forward

    @property
    def forward(self) -> Callable[..., Any]:
        """The module's own forward, for `torch.compile(handle.forward, backend=handle.backend)`.

        It does not fill the row maps: call it inside `bind`.
        """
        return self._forward

    def compile(
        self,
        scope: CompileScope = "whole",
        *,
        options: dict[str, Any] | None = None,
        dynamic: bool | None = None,
    ) -> LoraModel:
        """Compile with torch.compile and the pass pipeline; takes effect at the next call.

        Args:
            scope: `whole` compiles the model as one graph per shape; `layers` compiles the
                decoder layers one by one, for forwards without a cache; `off` runs eagerly.
            options: Inductor options. CUDA graphs (`triton.cudagraphs`) are not supported yet.
            dynamic: as in torch.compile.
        """
        if options and options.get("triton.cudagraphs"):
            raise FeatureUnsupported(
                "CUDA graphs are not supported yet",
                found="triton.cudagraphs",
                fix="leave the option out; the model is compiled without CUDA graphs",
            )
        if scope not in get_args(CompileScope):
            raise InvalidValue(
                "no such scope of compilation",
                expected=" | ".join(get_args(CompileScope)),
                found=scope,
            )
        self._uncompile_layers()
        self.scope = scope
        self._run = self._forward
        if scope == "off":
            return self
        self.backend = Backend(self.plan, self._sites_by_tensor, whole=scope == "whole")
        settings: dict[str, Any] = {
            "backend": self.backend,
            "options": options,
            "fullgraph": True,  # a graph break is an error, never a silent fall-back
            "dynamic": dynamic,
        }
        if scope == "whole":
            self._run = torch.compile(self._forward, **settings)
        else:
            copies: dict[types.CodeType, types.CodeType] = {}
            for layer in _children(self.module, self.plan.layers):
                self._layer_forwards.append((layer, vars(layer).get("forward")))
                layer.forward = torch.compile(_with_own_code(layer.forward, copies), **settings)
        return self

    def _uncompile_layers(self) -> None:
        """Give each layer back the forward that it had, its class's or its own."""
        while self._layer_forwards:
            layer, own = self._layer_forwards.pop()
            del layer.forward
            if own is not None:
                layer.forward = own

    def __call__(
        self,
        input_ids: torch.Tensor,
        *,
        adapters: Sequence[str | None] | None = None,
        scales: Sequence[float] | None = None,
        lengths: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> Any:
        """One forward.

        Args:
            input_ids: (B, S) token ids; (1, T) for packed inputs.
            adapters: one loaded adapter's name, or None, for each row (for each segment of a
                packed input). None as a whole: no row has an adapter.
            scales: a factor on each row's delta, beside the adapter's own scale.
            lengths: tokens of each segment, for packed inputs only.
            kwargs: passed on to the model's forward.

        Raises:
            AdapterUnknown: a name that is not loaded.
            RequestInvalid: names or scales that do not fit the rows, or too many rows or tokens.
        """
        with self.bind(input_ids, adapters, scales, lengths=lengths):
            return self.module(input_ids, **kwargs)

    @contextmanager
    def bind(
        self,
        input_ids: torch.Tensor,
        adapters: Sequence[str | None] | None,
        scales: Sequence[float] | None = None,
        *,
        lengths: Sequence[int] | None = None,
        expand: int = 1,
    ) -> Iterator[None]:
        """Hold the model's lock and a lease on the rows' adapters, and fill the row maps.

        `__call__` and `generate` do this themselves. It is public for those who compile on their
        own: `run = torch.compile(handle.forward, backend=handle.backend)`, then call `run` inside
        `with handle.bind(input_ids, [...])`.
        """
        rows = len(lengths) if lengths is not None else int(input_ids.shape[0])
        names = [None] * rows if adapters is None else list(adapters)
        factors = [1.0] * rows if scales is None else [float(scale) for scale in scales]
        if (lengths is not None) != self.plan.packed:
            raise RequestInvalid(
                "lengths are for packed inputs, and packed inputs need them",
                expected="lengths" if self.plan.packed else "no lengths",
                found=lengths,
                fix="runtime.packed in the deployment (or `packed` of wrap) decides",
            )
        if not all(math.isfinite(factor) for factor in factors):
            raise RequestInvalid("scales must be finite", expected="finite numbers", found=factors)
        for what, found in (("adapters", names), ("scales", factors)):
            if isinstance(adapters, str) or len(found) != rows:
                raise RequestInvalid(
                    f"{what} must have one entry for each row",
                    expected=f"{rows} entries",
                    found=adapters if isinstance(adapters, str) else f"{len(found)} entries",
                    fix="use None for a row without an adapter",
                )
        with self.adapters.lease(names) as lease, self._lock:
            previous = self._binding  # a callback of `generate` may call the model again
            self._binding = RowBinding(
                slots=tuple(lease.slots),
                scales=tuple(f * own for f, own in zip(factors, lease.scales, strict=True)),
                expand=expand,
                lengths=None if lengths is None else tuple(lengths),
            )
            try:
                self._rows.bind(self._binding, *map(int, input_ids.shape[:2]))
                yield
            finally:
                self._binding = previous
                if previous is None:
                    self._rows.release()

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        """What `module.forward` is: fill the row maps, then run."""
        given = self._signature.bind_partial(*args, **kwargs).arguments
        with self._lock:
            inputs = given.get("input_ids")
            if inputs is None:
                inputs = given.get("inputs_embeds")
            if inputs is None:
                raise RequestInvalid("the forward got neither input_ids nor inputs_embeds")
            self._check_untouched()
            if self.scope == "layers":
                self._refuse_cache(given)
            if self.plan.packed and given.get("logits_to_keep", 0) != 0:
                raise RequestInvalid(
                    "logits_to_keep would map the kept tokens to the first segments",
                    expected="logits_to_keep=0 for packed inputs",
                    found=given["logits_to_keep"],
                    fix="take the logits of the tokens you want from the result",
                )
            self._rows.bind(self._binding, int(inputs.shape[0]), int(inputs.shape[1]))
            try:
                with torch.no_grad(), torch_compat.recompile_limit(GRAPH_LIMIT):
                    return self._run(*args, **kwargs)
            except Exception as error:
                # Our own faults should reach the user as they are, not inside Dynamo's.
                inner = torch_compat.backend_error(error)
                if isinstance(inner, LoraCompileError):
                    raise inner from None
                raise
            finally:
                self._rows.done()

    def _check_untouched(self) -> None:
        """The pool writes the buffers that attach registered; they must still be the module's."""
        for module, name, tensor in self._witnesses:
            if getattr(module, name) is not tensor:
                raise CompileIncomplete(
                    "the model was cast or moved after lora_compile attached to it",
                    expected="the buffers that attach registered",
                    found=f"another tensor as {name}",
                    fix="cast or move the module first, then wrap it",
                )

    def _refuse_cache(self, given: dict[str, Any]) -> None:
        use_cache = given.get("use_cache", given.get("kwargs", {}).get("use_cache"))
        if use_cache is None:
            use_cache = getattr(self.module.config, "use_cache", False)
        if use_cache or given.get("past_key_values") is not None:
            raise FeatureUnsupported(
                "layer-by-layer compilation does not work with a KV cache",
                expected="a forward with use_cache=False",
                found="a forward with a cache",
                fix="set runtime.compile: whole (each layer would recompile for its cache and "
                "fall back to eager at torch's recompile limit)",
            )

    def generate(
        self,
        input_ids: torch.Tensor,
        *,
        adapters: Sequence[str | None] | None = None,
        scales: Sequence[float] | None = None,
        cache: Literal["static", "dynamic"] = "static",
        **kwargs: Any,
    ) -> Any:
        """transformers' `generate`, with an adapter for each row.

        The adapters are leased for the whole call: a row keeps its weights to its last token,
        whatever is replaced or unloaded meanwhile.

        Args:
            input_ids: (B, S) token ids.
            adapters, scales: as in `__call__`; one entry per row, before beams are expanded.
            cache: `static` keeps shapes fixed, so prefill and decode are one graph each.
            kwargs: passed on to transformers (`max_new_tokens`, `attention_mask`, …).
        """
        from lora_compile.runtime.generation import cache_arguments, expansion

        if self.plan.packed:
            raise FeatureUnsupported(
                "generate does not work on packed inputs",
                fix="set runtime.packed: false",
            )
        if self.scope == "layers":
            self._refuse_cache({"use_cache": True})
        expand = expansion(self.module, kwargs)
        arguments = cache_arguments(self.module, input_ids, cache, kwargs)
        with self.bind(input_ids, adapters, scales, expand=expand), torch.no_grad():
            # transformers would compile by itself when it sees a static cache on CUDA.
            generate: Callable[..., Any] = self.module.generate  # type: ignore[assignment]
            return generate(input_ids, disable_compile=True, **arguments, **kwargs)

    @property
    def report(self) -> Report:
        """Sites, schemes, kernels, adapters, graphs and their calls, graph breaks."""
        breaks = torch_compat.graph_breaks() - self._breaks_before
        return make_report(self.plan, self.backend, self.adapters, self.scope, breaks)


_copies = itertools.count()


def _with_own_code(
    method: Callable[..., Any], copies: dict[types.CodeType, types.CodeType]
) -> Callable[..., Any]:
    """The bound method over a copy of its code.

    Dynamo keeps compiled graphs, and counts them against its limit, by code object; models of one
    class would share it. The sizes that it has seen it keeps by the code's file, line and name,
    so a copy has a name of its own too.

    Args:
        copies: code -> its copy, for methods that are to share one; new ones are added.
    """
    function, owner = getattr(method, "__func__", None), getattr(method, "__self__", None)
    if not isinstance(function, types.FunctionType) or owner is None:
        return method
    code = function.__code__
    if code not in copies:
        copies[code] = code.replace(co_name=f"{code.co_name}_{next(_copies)}")
    copy = types.FunctionType(
        copies[code],
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copy, function)
    return types.MethodType(copy, owner)


def _children(module: nn.Module, path: str) -> list[nn.Module]:
    return list(module.get_submodule(path).children())
