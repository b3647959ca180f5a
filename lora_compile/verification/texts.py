"""The texts of a verification, from a deployment."""

from __future__ import annotations

import torch

from lora_compile.errors import MissingKey
from lora_compile.planning.prepare import Prepared
from lora_compile.runtime.prompts import encode_prompts
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


def encode_texts(prepared: Prepared, rows: tuple[VerifyRow, ...], reference: Reference) -> Texts:
    """Encode the rows; completions that are not given are the reference's own."""
    value, tokenizer = prepared.deployment.value, prepared.tokenizer
    generation = value.generation
    device = torch.device(prepared.plan.device)
    batch = encode_prompts(
        tokenizer,
        [row.prompt for row in rows],
        chat=generation.chat if generation is not None else tokenizer.chat_template is not None,
        system=generation.system if generation is not None else None,
        device=device,
        # A batch without any padding would be traced without a mask: one more graph to compile.
        spare=1,
    )
    prompt, mask = batch["input_ids"], batch["attention_mask"]
    new = value.verify.decode_steps + 1
    given: dict[int, list[int]] = {
        index: tokenizer(row.completion, add_special_tokens=False)["input_ids"][:new]
        for index, row in enumerate(rows)
        if row.completion is not None
    }
    longest = max((len(ids) for ids in given.values()), default=0)
    if len(given) < len(rows):
        longest = new
    completion = torch.zeros(len(rows), longest, dtype=torch.int64, device=device)
    lengths = torch.full((len(rows),), longest, device=device)
    open_rows = [index for index in range(len(rows)) if index not in given]
    if open_rows:
        index = torch.tensor(open_rows, device=device)
        completion[index] = reference.continuation(prompt[index], mask[index], longest)
    for row, ids in given.items():
        completion[row, : len(ids)] = torch.tensor(ids, device=device)
        lengths[row] = len(ids)
    return Texts(prompt, mask, completion, lengths)
