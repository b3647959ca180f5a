"""One canonical text of a graph: a line per node, without ids, addresses or line numbers.

Used by `explain --graphs` and by the golden tests, so it must be the same on every machine.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx

from lora_compile.passes.base import SITE_META
from lora_compile.torch_compat import op_packet


def graph_text(gm: fx.GraphModule, *, only_sites: bool = False) -> str:
    """The graph as text: `name = op(args)  # shape:dtype  site`.

    Args:
        only_sites: leave out nodes that neither are a lora_compile op nor serve a site.
    """
    names: dict[fx.Node, str] = {}
    lines = []
    for node in gm.graph.nodes:
        names[node] = _name(node)
        if only_sites and SITE_META not in node.meta and "lora_compile" not in str(node.target):
            continue
        call = node.op if node.op in ("placeholder", "output") else _target(node.target)
        args = ", ".join(_arg(a, names) for a in node.args)
        keywords = ", ".join(f"{k}={_arg(v, names)}" for k, v in sorted(node.kwargs.items()))
        inside = ", ".join(part for part in (args, keywords) if part)
        text = names[node] if node.op == "placeholder" else f"{names[node]} = {call}({inside})"
        notes = [_value(node.meta.get("example_value"))]
        site = node.meta.get(SITE_META)
        if site is not None:
            notes.append(f"[{site.name}]")
        comment = "  ".join(note for note in notes if note)
        lines.append(f"{text}  # {comment}" if comment else text)
    return "\n".join(lines) + "\n"


def _name(node: fx.Node) -> str:
    """Dynamo's placeholder names hold the whole path; shorten them to it."""
    if node.op != "placeholder":
        return node.name
    name = re.sub(r"^l_(self|args|kwargs)_+", "", node.name)
    name = re.sub(r"_?modules_", ".", name).replace("_buffers_", ".").replace("_parameters_", ".")
    return name.strip("._") or node.name


def _target(target: object) -> str:
    if (packet := op_packet(target)) is not target:
        return str(packet)
    if isinstance(target, str):
        return target
    module = getattr(target, "__module__", "") or ""
    name = getattr(target, "__name__", str(target))
    return name if module.startswith(("_operator", "builtins", "torch")) else f"{module}.{name}"


def _arg(arg: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(arg, fx.Node):
        return names[arg]
    if isinstance(arg, list | tuple):
        return "[" + ", ".join(_arg(a, names) for a in arg) + "]"
    if isinstance(arg, dict):
        return "{" + ", ".join(f"{k}: {_arg(v, names)}" for k, v in arg.items()) + "}"
    if isinstance(arg, str):
        if arg.startswith("{"):  # the QuantInfo of a marker
            return "'" + re.sub(r'.*?"scheme":"([^"]*)".*', r"quant:\1", arg) + "'"
        return repr(arg.split("@")[0])
    return str(arg)


def _value(found: object) -> str:
    if isinstance(found, torch.Tensor):
        shape = "x".join(str(size) for size in found.shape)
        return f"{shape}:{str(found.dtype).removeprefix('torch.')}"
    return ""
