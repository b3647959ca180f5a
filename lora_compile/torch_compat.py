"""Every name of torch that is not public API, in one place, with one test per name.

Tested on torch 2.11 and 2.13; another version is tried with one warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import fx

TESTED = ("2.11", "2.13")

_warned = False


def check_torch_version() -> None:
    """Warn once per process when torch is of a version that lora_compile was not tested on."""
    global _warned
    version = ".".join(torch.__version__.split(".")[:2])
    if version not in TESTED and not _warned:
        _warned = True
        warnings.warn(
            f"lora_compile is tested on torch {' and '.join(TESTED)}; this is torch "
            f"{torch.__version__}. Run `lora-compile run` on a small deployment before you rely "
            "on it.",
            stacklevel=2,
        )


def compile_fx(
    gm: fx.GraphModule, inputs: list[Any], config_patches: dict[str, Any]
) -> Callable[..., Any]:
    """Lower a Dynamo graph with AOTAutograd and Inductor (both caches apply)."""
    from torch._inductor.compile_fx import compile_fx as inductor_compile

    return cast(
        Callable[..., Any], inductor_compile(gm, inputs, config_patches=config_patches or None)
    )


def cache_counters() -> dict[str, int]:
    """Hits and misses of AOTAutograd's and Inductor's graph caches in this process."""
    from torch._dynamo.utils import counters

    return {
        f"{group}.{name}": count
        for group in ("aot_autograd", "inductor")
        for name, count in counters[group].items()
        if "cache" in name
    }


def graph_breaks() -> int:
    """Graph breaks that Dynamo has counted in this process."""
    from torch._dynamo.utils import counters

    return sum(counters["graph_break"].values())


def reset_dynamo() -> None:
    """Forget every graph that Dynamo has compiled in this process."""
    torch._dynamo.reset()


def backend_error(error: Exception) -> BaseException | None:
    """What a Dynamo backend raised, out of the exception that Dynamo wraps around it."""
    from torch._dynamo.exc import BackendCompilerFailed

    return error.inner_exception if isinstance(error, BackendCompilerFailed) else None


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Compile with a symbolic size for `dim` from the first call on."""
    torch._dynamo.mark_dynamic(tensor, dim)


def op_packet(target: object) -> object:
    """The overload packet of an op (`torch.ops.x.y` of `torch.ops.x.y.default`), else `target`."""
    return target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target


def check_value(condition: Any, message: Callable[[], str]) -> None:
    """Raise ValueError unless the condition holds; on symbolic sizes it becomes a guard."""
    torch._check_value(condition, message)  # type: ignore[no-untyped-call]


def recompile_limit(limit: int) -> AbstractContextManager[None]:
    """Inside, Dynamo compiles a function up to `limit` times before it gives up.

    It counts by code object, and all models of one class share theirs; the default is 8.
    """
    return cast(AbstractContextManager[None], torch._dynamo.config.patch(recompile_limit=limit))


def fail_on_recompile() -> AbstractContextManager[None]:
    """Inside, a call that would compile raises instead."""
    return cast(AbstractContextManager[None], torch.compiler.set_stance("fail_on_recompile"))


def triton_kernels_of(op_name: str) -> list[Any]:
    """The Triton kernels that the compile caches see in the body of a `triton_op`."""
    from torch._library.triton import get_triton_kernels_for_op

    return list(get_triton_kernels_for_op(op_name))
