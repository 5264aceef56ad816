"""The rows of x, as the experts keep them for backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RowSource(NamedTuple):
    """Where x was gathered from: x[r] = tokens[token_of_row[r]].

    Keeping the tokens, which the rest of the layer keeps anyway, in place of x saves top-k rows a token. No
    gradient flows through them: that of x goes to whoever gathered.
    """

    tokens_TD: Tensor
    token_of_row_R: Tensor

    def rows(self) -> Tensor:
        """x, gathered again, in the tokens' dtype."""
        return self.tokens_TD.index_select(0, self.token_of_row_R)


class SavedRows(NamedTuple):
    """x itself, or its source (the other is None)."""

    x_RD: Tensor | None
    tokens_TD: Tensor | None
    token_of_row_R: Tensor | None
    dtype: torch.dtype
    """Of the products."""

    def part(self, start: int, end: int) -> Tensor:
        """x[start:end]"""
        if self.x_RD is not None:
            return self.x_RD[start:end]
        assert self.tokens_TD is not None
        assert self.token_of_row_R is not None
        return self.tokens_TD.index_select(0, self.token_of_row_R[start:end]).to(self.dtype)

    def all(self) -> Tensor:
        if self.x_RD is not None:
            return self.x_RD.contiguous()
        assert self.token_of_row_R is not None
        return self.part(0, self.token_of_row_R.shape[0])
