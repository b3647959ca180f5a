"""What the product gives for given texts, through the graphs that serve them.

Texts are forced through `generate`: one prefill of the prompt, then one decode step for each token
of the completion, with the static cache. So log-probabilities come from the very graphs that
generate, for prompt tokens too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch

from lora_compile.runtime.model import LoraModel


@dataclass(frozen=True)
class Texts:
    """Prompts and completions as tokens."""

    prompt: torch.Tensor
    """(B, P), padded on the left."""
    mask: torch.Tensor
    """(B, P), 0 on padding."""
    completion: torch.Tensor
    """(B, n)."""
    lengths: torch.Tensor
    """(B,) tokens of each completion; those behind are fill that is not compared."""
    template: torch.Tensor
    """(B,) tokens at the start of each prompt that the chat template puts before any user's text.
    They are the same in every row, and no text of the deployment: they are not compared."""

    @property
    def ids(self) -> torch.Tensor:
        """(B, P + n - 1): all positions that have a token to predict."""
        return torch.cat([self.prompt, self.completion[:, :-1]], 1)

    @property
    def whole_mask(self) -> torch.Tensor:
        """(B, P + n - 1), 0 on padding."""
        return torch.cat([self.mask, torch.ones_like(self.completion[:, :-1])], 1)

    @property
    def following(self) -> torch.Tensor:
        """(B, P + n - 1): the token behind each position."""
        return torch.cat([self.prompt, self.completion], 1)[:, 1:]

    def counted(self, phase: str) -> torch.Tensor:
        """(B, P + n - 1) bool: positions of a phase whose prediction is compared.

        `prefill`: those of the prompt, the last of which predicts the completion's first token.
        `decode`: those of the completion.
        """
        prompt, new = self.prompt.shape[1], self.completion.shape[1]
        position = torch.arange(prompt + new - 1, device=self.prompt.device)
        inside = position < prompt + self.lengths.unsqueeze(1) - 1
        # A position is compared for the token that follows it.
        inside &= self.whole_mask.cumsum(1) >= self.template.unsqueeze(1)
        in_phase = position < prompt if phase == "prefill" else position >= prompt
        return self.whole_mask.bool() & inside & in_phase

    def take(self, rows: Sequence[int]) -> Texts:
        """Some rows, also repeated, in this order."""
        index = torch.tensor(list(rows), device=self.prompt.device)
        return Texts(*(getattr(self, field.name)[index] for field in fields(self)))


def forced_logits(
    model: LoraModel, texts: Texts, names: Sequence[str | None], scales: Sequence[float]
) -> torch.Tensor:
    """(B, P + n - 1, V): one prefill and n - 1 decode steps of `generate`, told what to say."""
    from transformers import LogitsProcessorList

    prompt, new = texts.prompt.shape[1], texts.completion.shape[1]

    def force(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        wanted = texts.completion[:, ids.shape[1] - prompt].unsqueeze(1)
        return torch.full_like(scores, float("-inf")).scatter(1, wanted, 0.0)

    vocabulary = int(model.module.config.vocab_size)  # type: ignore[union-attr,arg-type]
    with _recorded(model) as logits:
        model.generate(
            texts.prompt,
            adapters=list(names),
            scales=list(scales),
            attention_mask=texts.mask,
            logits_processor=LogitsProcessorList([force]),
            logits_to_keep=0,
            max_new_tokens=new,
            do_sample=False,
            num_beams=1,
            pad_token_id=0,
            # No token ends a text here, or those behind it would be cut.
            eos_token_id=vocabulary,
        )
    return torch.cat(logits, 1)


@contextmanager
def _recorded(model: LoraModel) -> Iterator[list[torch.Tensor]]:
    """Collects the logits of every forward inside."""
    forward = model.module.forward
    logits: list[torch.Tensor] = []

    @functools.wraps(forward)
    def recording(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        logits.append(output.logits.float())
        return output

    model.module.forward = recording
    try:
        yield logits
    finally:
        model.module.forward = forward
