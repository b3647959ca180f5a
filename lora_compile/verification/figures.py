"""How far the log-probabilities of two runs are apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tokens:
    """Some tokens of a comparison, each with both log-probabilities; all tensors (tokens,)."""

    reference: torch.Tensor
    """log p of the token that follows, by the reference."""
    product: torch.Tensor
    kl: torch.Tensor
    """KL(reference || product) of the whole distribution, in nats."""
    same_top: torch.Tensor
    """bool: whether both have the same most probable token."""

    @staticmethod
    def join(parts: list[Tokens]) -> Tokens:
        """All tokens of several comparisons."""
        return Tokens(
            *(
                torch.cat([getattr(part, name) for part in parts])
                for name in ("reference", "product", "kl", "same_top")
            )
        )

    @property
    def figures(self) -> Figures:
        difference = self.product - self.reference
        return Figures(
            tokens=len(difference),
            max_abs=float(difference.abs().max()),
            mean_abs=float(difference.abs().mean()),
            half_mean_square=float(0.5 * difference.square().mean()),
            kl=float(self.kl.mean()),
            top1=float(self.same_top.double().mean()),
        )


@dataclass(frozen=True)
class Figures:
    """The differences of some tokens in short."""

    tokens: int
    max_abs: float
    """max |Δ log p|."""
    mean_abs: float
    """mean |Δ log p|."""
    half_mean_square: float
    """0.5 mean (Δ log p)²: the size of a KL divergence that such differences amount to."""
    kl: float
    """Mean KL(reference || product), nats."""
    top1: float
    """Share of tokens with the same most probable token."""


def compare(
    reference: torch.Tensor, product: torch.Tensor, following: torch.Tensor, counted: torch.Tensor
) -> Tokens:
    """Compare the logits of one row.

    Args:
        reference, product: (S, V) logits.
        following: (S,) the token that follows each position.
        counted: (S,) bool, the positions to compare.
    """
    expected = reference[counted].double().log_softmax(-1)
    found = product[counted].double().log_softmax(-1)
    index = following[counted].unsqueeze(-1)
    return Tokens(
        reference=expected.gather(-1, index).squeeze(-1),
        product=found.gather(-1, index).squeeze(-1),
        kl=(expected.exp() * (expected - found)).sum(-1),
        same_top=expected.argmax(-1) == found.argmax(-1),
    )
