"""Head and cross entropy in one: a few tokens' logits at a time, never those of all.

At a vocabulary of 200,192 the fp32 logits of 2,048 tokens are 1.5 GiB, and plain autograd holds three such
tensors at its peak. Here a chunk of logits becomes its loss and, in the same buffer, its gradient, which at
once is multiplied into the gradients of hidden states and weight. So the gradients exist when forward ends,
backward only scales them, and the products are the three of the plain way.

Labels that do not count cost nothing: their rows are left out before the first product. On a CPU those that
count are looked up. On a CUDA device that would wait for the GPU, so there they are sorted to the front, and
the caller's `max_labels`, which it knows on the host, says how many rows are computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from afmoe.losses import IGNORED
from afmoe.moe.grouped_mm import product_dtype

CPU_CHUNK_ELEMENTS = 1 << 25
CUDA_CHUNK_ELEMENTS = 1 << 28
"""Logits of a chunk: 128 MiB in fp32 on a CPU, 512 MiB in bf16 on a GPU, whose products need more rows."""
_CPU_BLOCK_ELEMENTS = 1 << 20
_CUDA_BLOCK_ELEMENTS = 1 << 26
_VOCABULARY_SLICE = 1 << 14
_TILE_ROWS = 128


class HeadLoss(NamedTuple):
    loss_sum: Tensor
    """Over the labels that count, in fp32 at least."""
    predictions_T: Tensor | None
    """int64: the likeliest token where a label counts, `IGNORED` elsewhere; None: not asked for."""


class _Plan(NamedTuple):
    """What is to be computed, and how."""

    dtype: torch.dtype
    """Of the operands of the products. Softmax and sums are fp32 at least."""
    needs_hidden: bool
    needs_weight: bool
    needs_predictions: bool
    chunk_tokens: int | None
    max_labels: int | None
    looks_up_rows: bool


def head_cross_entropy(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    *,
    chunk_tokens: int | None = None,
    max_labels: int | None = None,
    with_predictions: bool = False,
    looks_up_rows: bool | None = None,
) -> HeadLoss:
    """Summed cross entropy of `hidden @ weight.T`, differentiable in both.

    Equal to the plain way but for the rounding of sums over chunks. `targets_T` int64, `IGNORED` does not
    count. `chunk_tokens`: rows of logits held at a time, None: as many as `CPU_CHUNK_ELEMENTS` allows.
    `max_labels`: no more labels than this count, None: unknown; fails where more do. `looks_up_rows`: find
    the rows that count, which waits for a GPU, None: on a CPU only.
    """
    wants_gradients = torch.is_grad_enabled()
    plan = _Plan(
        dtype=product_dtype(hidden_TD),
        needs_hidden=wants_gradients and hidden_TD.requires_grad,
        needs_weight=wants_gradients and weight_VD.requires_grad,
        needs_predictions=with_predictions,
        chunk_tokens=chunk_tokens,
        max_labels=max_labels,
        looks_up_rows=not hidden_TD.is_cuda if looks_up_rows is None else looks_up_rows,
    )
    if torch.compiler.is_compiling():
        loss_sum, predictions_T, _, _ = _head_loss(hidden_TD, weight_VD, targets_T, *plan)
    else:
        loss_sum, predictions_T = _HeadLoss.apply(hidden_TD, weight_VD, targets_T, plan)
    return HeadLoss(loss_sum, predictions_T if with_predictions else None)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, plan: _Plan
    ) -> tuple[Tensor, Tensor]:
        loss_sum, predictions_T, *ctx.gradients = _compute(hidden_TD, weight_VD, targets_T, plan)
        ctx.plan = plan
        ctx.save_for_backward(hidden_TD, weight_VD, targets_T)
        ctx.mark_non_differentiable(predictions_T)
        return loss_sum, predictions_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        inputs, gradients = ctx.saved_tensors, ctx.gradients
        if gradients is None:
            # a second backward through a graph that was kept: the first one gave its gradients away
            gradients = _compute(*inputs, plan=ctx.plan)[2:]
        ctx.gradients = None
        needed = (ctx.plan.needs_hidden, ctx.plan.needs_weight)
        scaled = [
            gradient.mul_(grad_loss) if is_needed else None
            for gradient, is_needed in zip(gradients, needed, strict=True)
        ]
        return *scaled, None, None


def _compute(
    hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, plan: _Plan
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, predictions, and the loss's gradients; empty tensors for what is not needed."""
    rows_N, has_ignored = _rows_to_compute(targets_T, plan)
    with torch.no_grad(), torch.autocast(hidden_TD.device.type, enabled=False):
        hidden_ND, targets_N = hidden_TD[rows_N].to(plan.dtype), targets_T[rows_N]
        chunks = _Chunks(hidden_ND, weight_VD, targets_N, plan, has_ignored)
        chunks.run()
        grad_hidden_TD, grad_weight_VD = hidden_TD.new_empty(0), hidden_TD.new_empty(0)
        predictions_T = targets_T.new_empty(0)
        if plan.needs_hidden:
            grad_hidden_TD = hidden_TD.new_zeros(hidden_TD.shape)
            grad_hidden_TD[rows_N] = chunks.grad_hidden_ND.to(hidden_TD.dtype)
        if plan.needs_weight:
            grad_weight_VD = chunks.grad_weight_VD.to(weight_VD.dtype)
        if plan.needs_predictions:
            predictions_T = torch.full_like(targets_T, IGNORED)
            predictions_T[rows_N] = chunks.predictions_N
    return chunks.losses_N.sum(), predictions_T, grad_hidden_TD, grad_weight_VD


def _rows_to_compute(targets_T: Tensor, plan: _Plan) -> tuple[Tensor | slice, bool]:
    """The rows to compute, and whether some of them may not count."""
    is_ignored_T = targets_T == IGNORED
    if plan.max_labels is not None:
        num_labels = (~is_ignored_T).sum()
        torch.ops.aten._assert_async.msg(num_labels <= plan.max_labels, "more labels count than max_labels")
    if plan.looks_up_rows:
        rows_N = (~is_ignored_T).nonzero()[:, 0]
        return (slice(None) if len(rows_N) == len(targets_T) else rows_N), False
    if plan.max_labels is None or plan.max_labels >= len(targets_T):
        return slice(None), True
    # False sorts first
    return is_ignored_T.argsort(stable=True)[: plan.max_labels], True


class _Chunks:
    """The rows that count, chunk after chunk through one buffer of logits."""

    def __init__(
        self, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, plan: _Plan, has_ignored: bool
    ) -> None:
        num_rows, num_tokens = len(hidden_ND), len(weight_VD)
        wide = torch.promote_types(plan.dtype, torch.float32)
        self.plan = plan
        self.hidden_ND, self.targets_N, self.has_ignored = hidden_ND, targets_N, has_ignored
        self.weight_VD = weight_VD.to(plan.dtype)
        is_cuda = hidden_ND.is_cuda
        chunk_elements = CUDA_CHUNK_ELEMENTS if is_cuda else CPU_CHUNK_ELEMENTS
        self.chunk_rows = min(num_rows, plan.chunk_tokens or _fitting_rows(chunk_elements, num_tokens))
        # between the passes of the softmax a block stays in the cache
        self.block_rows = max(1, (_CUDA_BLOCK_ELEMENTS if is_cuda else _CPU_BLOCK_ELEMENTS) // num_tokens)
        self.losses_N = hidden_ND.new_empty(num_rows, dtype=wide)
        self.predictions_N = torch.empty_like(targets_N)
        self.grad_hidden_ND = torch.empty_like(hidden_ND) if plan.needs_hidden else hidden_ND.new_empty(0)
        # fp32: in bf16 every chunk would round the sum of those before it
        grad_dtype = torch.promote_types(weight_VD.dtype, wide)
        self.grad_weight_VD = weight_VD.new_empty(
            weight_VD.shape if plan.needs_weight else 0, dtype=grad_dtype
        )

    def run(self) -> None:
        num_rows = len(self.hidden_ND)
        if num_rows == 0:
            self.grad_weight_VD.zero_()
            return
        buffer_CV = self.hidden_ND.new_empty(self.chunk_rows, len(self.weight_VD))
        for start in range(0, num_rows, self.chunk_rows):
            rows = slice(start, min(num_rows, start + self.chunk_rows))
            logits_CV = buffer_CV[: rows.stop - start]
            torch.mm(self.hidden_ND[rows], self.weight_VD.t(), out=logits_CV)
            for block in range(start, rows.stop, self.block_rows):
                part = slice(block, min(rows.stop, block + self.block_rows))
                self._softmax(logits_CV[part.start - start : part.stop - start], part)
            if self.plan.needs_hidden:
                torch.mm(logits_CV, self.weight_VD, out=self.grad_hidden_ND[rows])
            if self.plan.needs_weight:
                self._add_weight_gradient(logits_CV, self.hidden_ND[rows], is_first=start == 0)

    def _softmax(self, logits_XV: Tensor, rows: slice) -> None:
        """Losses and predictions of these rows; their logits become the loss's gradient."""
        targets_X = self.targets_N[rows]
        is_ignored_X = targets_X == IGNORED
        if self.has_ignored:
            targets_X = targets_X.masked_fill(is_ignored_X, 0)
        if self.plan.needs_predictions:
            torch.argmax(logits_XV, 1, out=self.predictions_N[rows])
        log_probabilities_XV = logits_XV.log_softmax(1, dtype=self.losses_N.dtype)
        torch.neg(log_probabilities_XV.gather(1, targets_X[:, None])[:, 0], out=self.losses_N[rows])
        if self.has_ignored:
            self.losses_N[rows].masked_fill_(is_ignored_X, 0.0)
            self.predictions_N[rows].masked_fill_(is_ignored_X, IGNORED)
        if not (self.plan.needs_hidden or self.plan.needs_weight):
            return
        is_wide = logits_XV.dtype == log_probabilities_XV.dtype
        grad_XV = torch.exp(log_probabilities_XV, out=logits_XV if is_wide else log_probabilities_XV)
        # before rounding to bf16, in which a probability near 1 is 1
        grad_XV.scatter_add_(1, targets_X[:, None], grad_XV.new_full((len(targets_X), 1), -1.0))
        if self.has_ignored:
            grad_XV.masked_fill_(is_ignored_X[:, None], 0.0)
        if not is_wide:
            logits_XV.copy_(grad_XV)

    def _add_weight_gradient(self, grad_CV: Tensor, hidden_CD: Tensor, *, is_first: bool) -> None:
        if grad_CV.dtype == self.grad_weight_VD.dtype:
            self.grad_weight_VD.addmm_(grad_CV.t(), hidden_CD, beta=0 if is_first else 1)
            return
        for start in range(0, len(self.grad_weight_VD), _VOCABULARY_SLICE):
            part = slice(start, start + _VOCABULARY_SLICE)
            product_XD = grad_CV[:, part].t() @ hidden_CD
            self.grad_weight_VD[part] = product_XD if is_first else self.grad_weight_VD[part] + product_XD


def _fitting_rows(num_elements: int, num_tokens: int) -> int:
    """Rows of logits, in whole tiles of a product where there are that many."""
    rows = max(1, num_elements // num_tokens)
    return rows // _TILE_ROWS * _TILE_ROWS or rows


@torch.library.custom_op("afmoe::head_cross_entropy", mutates_args=())
def _head_loss(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    dtype: torch.dtype,
    needs_hidden: bool,
    needs_weight: bool,
    needs_predictions: bool,
    chunk_tokens: int | None,
    max_labels: int | None,
    looks_up_rows: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`_HeadLoss` in a compiled graph, to which it is opaque."""
    plan = _Plan(
        dtype, needs_hidden, needs_weight, needs_predictions, chunk_tokens, max_labels, looks_up_rows
    )
    return _compute(hidden_TD, weight_VD, targets_T, plan)


@_head_loss.register_fake
def _(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    dtype: torch.dtype,
    needs_hidden: bool,
    needs_weight: bool,
    needs_predictions: bool,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        hidden_TD.new_empty((), dtype=torch.promote_types(dtype, torch.float32)),
        targets_T.new_empty(targets_T.shape if needs_predictions else 0),
        hidden_TD.new_empty(hidden_TD.shape if needs_hidden else 0),
        weight_VD.new_empty(weight_VD.shape) if needs_weight else hidden_TD.new_empty(0),
    )


def _save_in_graph(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.needed = inputs[4:6]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[2:])


def _differentiate(ctx: Any, grad_loss: Tensor | None, *_: None) -> tuple[Any, ...]:
    num_others = len(_Plan._fields) + 1
    if grad_loss is None:
        return (None,) * (2 + num_others)
    scaled = [
        (gradient * grad_loss).to(gradient.dtype) if is_needed else None
        for gradient, is_needed in zip(ctx.saved_tensors, ctx.needed, strict=True)
    ]
    return *scaled, *(None,) * num_others


_head_loss.register_autograd(_differentiate, setup_context=_save_in_graph)
