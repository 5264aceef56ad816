"""The MLP of a layer's experts as one node of autograd, and as one operator of a compiled graph.

How the experts are multiplied is an `ExpertMlp`, which knows nothing of autograd; every plugin but
`reference` is an `ExpertNode` over one. Eager runs are one `torch.autograd.Function`. Under `torch.compile`
the node is the operator `afmoe::expert_mlp`, opaque to the compiler: its graph neither breaks where offsets
are read on the host, weights are quantized or kernels launched, nor is made anew when the offsets change.
"""

from __future__ import annotations

import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from afmoe.errors import ConfigError
from afmoe.moe.activations import Activation
from afmoe.moe.compute.weight_copies import WeightCopies
from afmoe.moe.grouped_mm import ExpertWeights, RowSource, SavedRows


class Forward(NamedTuple):
    """What a forward is given. Contract: `afmoe.moe.compute`; y and all that is saved have the dtype of x."""

    x_RD: Tensor
    weights: ExpertWeights
    offsets_L: Tensor
    source: RowSource | None
    trains_first: bool
    """Whether backward will want gradients of gate or up weights: it needs x for no others."""


class Backward(NamedTuple):
    """What a backward is given."""

    grad_y_RD: Tensor
    rows: SavedRows
    """x; empty if forward did not keep it."""
    saved: Sequence[Tensor]
    weights: ExpertWeights
    offsets_L: Tensor
    needed: Sequence[bool]
    """Which of the gradients of x and the six weights are wanted."""


class ExpertMlp(ABC):
    """How experts are multiplied, forward and backward, outside autograd. Holds nothing of one layer."""

    activation: Activation
    form: str
    """The same for two that keep the same tensors for backward, by `keeps_rows` and `saved_like`."""
    stores_weights: ClassVar[bool] = False
    """Whether the products read copies of the weights in another form, made by `store`."""

    def store(self, weights: ExpertWeights, offsets_L: Tensor | None = None) -> Any:
        """Copies of the weights for the products. With `offsets_L`: for one forward over those rows alone."""
        return None

    def keeps_rows(self, given: Forward) -> bool:
        """Whether backward wants x, or where it was gathered from, beside what `forward` saves."""
        return given.trains_first

    @abstractmethod
    def forward(self, given: Forward, stored: Any) -> tuple[Tensor, list[Tensor]]:
        """y, and what to save for backward beside x: new tensors, none of them an operand."""

    @abstractmethod
    def saved_like(self, given: Forward) -> list[Tensor]:
        """Empty tensors of the shapes and dtypes of what `forward` saves, whatever the offsets hold."""

    @abstractmethod
    def backward(self, given: Backward, stored: Any) -> list[Tensor | None]:
        """Gradients of x and the six weights, in the dtypes of y and the weights; None where not needed."""


class ExpertNode:
    """The experts of one layer. Call it on operands that have the dtype of the products already."""

    def __init__(self, mlp: ExpertMlp) -> None:
        self.mlp = mlp
        self.form = mlp.form
        self.has_derivative = mlp.activation.has_derivative
        self.weight_copies = WeightCopies()
        _mlp_of_form.setdefault(self.form, mlp)
        number = next(_numbers)
        _nodes[number], _mlps[number] = self, mlp
        # An operator takes no Python object. A number would be a constant of the graph, and each layer
        # another graph; a tensor is one more input. On the CPU, because reading it there waits for nothing.
        with torch.inference_mode(False):
            self.key = torch.tensor(number, device="cpu")

    def __reduce__(self) -> Any:
        # a copy or a pickle of a model has a key and weights of its own
        return type(self), (self.mlp,)

    def __call__(
        self, x_RD: Tensor, offsets_L: Tensor, weights: ExpertWeights, source: RowSource | None = None
    ) -> Tensor:
        """y, differentiable in x and the weights. A `source` may be kept for backward in x's place."""
        is_training = torch.is_grad_enabled()
        first = (weights.gate_LFD, weights.up_LFD)
        trains_first = is_training and any(weight is not None and weight.requires_grad for weight in first)
        inputs = (x_RD, *weights, offsets_L, *(source or (None, None)), is_training, trains_first)
        if not torch.compiler.is_compiling():
            return _ExpertMlp.apply(*inputs, self)
        if not self.has_derivative:
            raise ConfigError(
                f"hidden_act={self.mlp.activation.name} cannot be compiled, because its derivative is taken "
                "by autograd inside an operator; run without torch.compile"
            )
        return _expert_mlp(*inputs, self.form, self.key)[0]

    def forward(self, given: Forward, is_training: bool) -> tuple[Tensor, list[Tensor]]:
        # the operands have their dtype already
        with torch.autocast(given.x_RD.device.type, enabled=False):
            stored = None
            if self.mlp.stores_weights:
                stored = (
                    self.weight_copies.of(_there(given.weights), lambda: self._store(given.weights))
                    if is_training
                    else self._store(given.weights, given.offsets_L)
                )
            return self.mlp.forward(given, stored)

    def backward(self, given: Backward) -> list[Tensor | None]:
        with torch.autocast(given.grad_y_RD.device.type, enabled=False):
            stored = None
            if self.mlp.stores_weights:
                weights = _there(given.weights)
                stored = self.weight_copies.of_forward(weights, lambda: self._store(given.weights))
            return self.mlp.backward(given, stored)

    def on_weights_updated(self) -> None:
        self.weight_copies.drop()

    def _store(self, weights: ExpertWeights, offsets_L: Tensor | None = None) -> Any:
        detached = ExpertWeights._make(None if weight is None else weight.detach() for weight in weights)
        return self.mlp.store(detached, offsets_L)


_nodes: weakref.WeakValueDictionary[int, ExpertNode] = weakref.WeakValueDictionary()
_mlps: dict[int, ExpertMlp] = {}
_numbers = itertools.count()
_mlp_of_form: dict[str, ExpertMlp] = {}
"""For tensors without values, whose key cannot be read."""

_NUM_DIFFERENTIABLE = 1 + len(ExpertWeights._fields)
# offsets, the source's two tensors, is_training, trains_first
_NO_GRADIENTS = (None,) * 5
# x, the source's two tensors, offsets, weights
_NUM_KEPT = 4 + len(ExpertWeights._fields)


def _node_of(key: Tensor) -> ExpertNode:
    number = int(key)
    # the backward of a graph may outlive the layer, with which only copies of its weights are lost
    return _nodes.get(number) or ExpertNode(_mlps[number])


def _there(weights: ExpertWeights) -> tuple[Tensor, ...]:
    return tuple(weight for weight in weights if weight is not None)


def _given(operands: Sequence[Any], trains_first: bool) -> Forward:
    """Of the tensors that node and operator take."""
    x_RD, *weights, offsets_L, tokens_TD, token_of_row_R = operands
    source = None if tokens_TD is None else RowSource(tokens_TD, token_of_row_R)
    return Forward(x_RD, ExpertWeights(*weights), offsets_L, source, trains_first)


def _kept(mlp: ExpertMlp, given: Forward) -> list[Tensor | None]:
    """The operands that backward needs, of which `_asked` makes its own."""
    rows: tuple[Tensor | None, ...] = (None, None, None)
    if mlp.keeps_rows(given):
        rows = (given.x_RD, None, None) if given.source is None else (None, *given.source)
    return [*rows, given.offsets_L, *given.weights]


def _asked(
    grad_y_RD: Tensor, kept: Sequence[Any], saved: Sequence[Tensor], needed: Sequence[bool]
) -> Backward:
    x_RD, tokens_TD, token_of_row_R, offsets_L, *weights = kept
    rows = SavedRows(x_RD, tokens_TD, token_of_row_R, grad_y_RD.dtype)
    return Backward(grad_y_RD, rows, saved, ExpertWeights(*weights), offsets_L, needed)


class _ExpertMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *operands, is_training, trains_first, node = inputs
        given = _given(operands, trains_first)
        y_RD, saved = node.forward(given, is_training)
        ctx.node = node
        ctx.save_for_backward(*_kept(node.mlp, given), *saved)
        return y_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_RD: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        tensors = ctx.saved_tensors
        kept, saved = tensors[:_NUM_KEPT], tensors[_NUM_KEPT:]
        needed = ctx.needs_input_grad[:_NUM_DIFFERENTIABLE]
        return *ctx.node.backward(_asked(grad_y_RD, kept, saved, needed)), *_NO_GRADIENTS, None


@torch.library.custom_op("afmoe::expert_mlp", mutates_args=())
def _expert_mlp(
    x_RD: Tensor,
    gate_LFD: Tensor | None,
    up_LFD: Tensor,
    down_LDF: Tensor,
    gate_bias_LF: Tensor | None,
    up_bias_LF: Tensor | None,
    down_bias_LD: Tensor | None,
    offsets_L: Tensor,
    tokens_TD: Tensor | None,
    token_of_row_R: Tensor | None,
    is_training: bool,
    trains_first: bool,
    form: str,
    key: Tensor,
) -> list[Tensor]:
    """y, then what is saved for backward."""
    weights = (gate_LFD, up_LFD, down_LDF, gate_bias_LF, up_bias_LF, down_bias_LD)
    given = _given((x_RD, *weights, offsets_L, tokens_TD, token_of_row_R), trains_first)
    y_RD, saved = _node_of(key).forward(given, is_training)
    return [y_RD, *saved]


@_expert_mlp.register_fake
def _(*inputs: Any) -> list[Tensor]:
    *operands, _, trains_first, form, _ = inputs
    given = _given(operands, trains_first)
    return [given.x_RD.new_empty(given.x_RD.shape), *_mlp_of_form[form].saved_like(given)]


@torch.library.custom_op("afmoe::expert_mlp_backward", mutates_args=())
def _expert_mlp_backward(
    grad_y_RD: Tensor,
    kept: Sequence[Tensor | None],
    saved: Sequence[Tensor],
    needed: list[bool],
    key: Tensor,
) -> list[Tensor]:
    """Those gradients that are needed, in order."""
    grads = _node_of(key).backward(_asked(grad_y_RD, kept, saved, needed))
    return [grad for grad in grads if grad is not None]


@_expert_mlp_backward.register_fake
def _(
    grad_y_RD: Tensor,
    kept: Sequence[Tensor | None],
    saved: Sequence[Tensor],
    needed: list[bool],
    key: Tensor,
) -> list[Tensor]:
    differentiable = (grad_y_RD, *_asked(grad_y_RD, kept, saved, needed).weights)
    return [
        tensor.new_empty(tensor.shape)
        for tensor, is_needed in zip(differentiable, needed, strict=True)
        if is_needed and tensor is not None
    ]


def _save_in_graph(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *operands, _, trains_first, form, key = inputs
    _, *saved = output
    ctx.save_for_backward(key, *_kept(_mlp_of_form[form], _given(operands, trains_first)), *saved)
    # what is saved goes nowhere else; zeros for its gradients would be tensors of the same size
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    key, *tensors = ctx.saved_tensors
    kept, saved = tensors[:_NUM_KEPT], tensors[_NUM_KEPT:]
    needed = list(ctx.needs_input_grad[:_NUM_DIFFERENTIABLE])
    found = iter(_expert_mlp_backward(grads[0], kept, saved, needed, key))
    return *(next(found) if is_needed else None for is_needed in needed), *_NO_GRADIENTS, None, None


_expert_mlp.register_autograd(_differentiate, setup_context=_save_in_graph)
