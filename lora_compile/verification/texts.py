"""The texts of a verification, from a deployment."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lora_compile.errors import MissingKey
from lora_compile.planning.prepare import Prepared
from lora_compile.runtime.prompts import encode_prompts
from lora_compile.runtime.site_gate import GateRow
from lora_compile.schemas.deployment import VerifyRow
from lora_compile.verification.reference import Reference
from lora_compile.verification.served import Texts


def verify_rows(prepared: Prepared) -> tuple[VerifyRow, ...]:
    """The rows under `verify`, or the prompts under `generation`, each once.

    Raises:
        MissingKey: the deployment has neither.
    """
    deployment = prepared.deployment
    if deployment.value.verify.rows:
        return deployment.value.verify.rows
    if deployment.value.generation is not None:
        prompts = dict.fromkeys(row.prompt for row in deployment.value.generation.rows)
        return tuple(VerifyRow(prompt=prompt) for prompt in prompts)
    raise MissingKey(
        "there are no texts to verify with",
        file=deployment.source.file,
        line=deployment.source.line(),
        where="verify.rows",
        expected="a list of prompts, with or without completions",
        fix="add `verify: {rows: [{prompt: ...}]}`",
    )


def encode_texts(
    prepared: Prepared,
    rows: tuple[VerifyRow, ...],
    reference: Reference,
    variants: Sequence[GateRow],
) -> Texts:
    """Encode every row for every variant: all variants of the first row, then of the second, ….

    A completion that is not given is what the reference says with the variant's own adapter. On
    tokens that an adapter would never say, differences are mostly chance.
    """
    value, tokenizer = prepared.deployment.value, prepared.tokenizer
    generation = value.generation
    device = torch.device(prepared.plan.device)
    chat = generation.chat if generation is not None else tokenizer.chat_template is not None
    batch = encode_prompts(
        tokenizer,
        # Last, the empty prompt: what a row has in common with it is the template's.
        [row.prompt for row in rows] + ([""] if chat else []),
        chat=chat,
        system=generation.system if generation is not None else None,
        device=device,
        # A batch without any padding would be traced without a mask: one more graph to compile.
        spare=1,
    )
    each = torch.arange(len(rows), device=device).repeat_interleave(len(variants))
    prompt, mask = (batch[name][each] for name in ("input_ids", "attention_mask"))
    template = [0] * len(rows)
    if chat:
        *texts, empty = _unpadded(batch)
        template = [_common(text, empty) for text in texts]
    new = value.verify.decode_steps + 1
    given = [
        None
        if row.completion is None
        else tokenizer(row.completion, add_special_tokens=False)["input_ids"][:new]
        for row in rows
    ]
    lengths = [new if ids is None else len(ids) for ids in given]
    completion = torch.zeros(len(each), max(lengths), dtype=torch.int64, device=device)
    open_rows = [index for index, row in enumerate(each.tolist()) if given[row] is None]
    if open_rows:
        own = [variants[index % len(variants)] for index in open_rows]
        completion[open_rows] = reference.continuation(prompt[open_rows], mask[open_rows], own, new)
    for index, row in enumerate(each.tolist()):
        ids = given[row]
        if ids is not None:
            completion[index, : len(ids)] = torch.tensor(ids, device=device)
    return Texts(
        prompt,
        mask,
        completion,
        torch.tensor(lengths, device=device)[each],
        torch.tensor(template, device=device)[each],
    )


def _unpadded(batch: dict[str, torch.Tensor]) -> list[list[int]]:
    pairs = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    return [ids[mask.bool()].tolist() for ids, mask in pairs]


def _common(one: list[int], other: list[int]) -> int:
    """Length of the common prefix."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
