"""The language head: hidden states to logits, or with targets straight to their loss."""

from __future__ import annotations

from torch import Tensor, nn

from afmoe.chunked_cross_entropy import HeadLoss, head_cross_entropy


class LanguageHead(nn.Linear):
    """A linear layer whose loss needs no logits. Both are calls of the module, so that hooks see its weight
    used."""

    loss_chunk_tokens: int | None = None
    """Tokens whose logits are held at a time; None: chosen by size."""

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__(hidden_size, vocab_size, bias=False)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input: Tensor,
        targets: Tensor | None = None,
        *,
        max_labels: int | None = None,
        with_predictions: bool = False,
    ) -> Tensor | HeadLoss:
        """Logits [..., V] of hidden states [..., D]; with `targets` [...] their loss, see
        `head_cross_entropy`."""
        if targets is None:
            return super().forward(input)
        return head_cross_entropy(
            input.flatten(0, -2),
            self.weight,
            targets.flatten(),
            chunk_tokens=self.loss_chunk_tokens,
            max_labels=max_labels,
            with_predictions=with_predictions,
        )
