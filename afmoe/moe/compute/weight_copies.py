"""Copies of weights in another form, made once an optimizer step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor


class WeightCopies:
    """What `make` derived from an expert layer's weights, for as long as it is known to be current.

    A copy is used again only for the same tensors at the same addresses with the same version counters, and
    not after `drop()`. Version counters see every in-place change that autograd sees: optimizers,
    `load_state_dict`, `copy_` under `no_grad`. They miss writes through `.data` or by a foreign kernel
    (DeepSpeed): those need a call of `drop()`, which the trainer makes after every optimizer step.

    Only for training: without gradients (validation, generation) weights may be swapped through `.data`
    (averaged weights, for one), so callers make what they need afresh there.
    """

    def __init__(self) -> None:
        self.drop()

    def drop(self) -> None:
        self._keys: list[tuple[weakref.ref[Tensor], int, int]] = []
        self._made: Any = None

    def __reduce__(self) -> Any:
        # a copy or a pickle of a model belongs to other weights
        return type(self), ()

    def of(self, weights: tuple[Tensor, ...], make: Callable[[], Any]) -> Any:
        """For a forward, which makes and keeps what is missing."""
        if not self._are_current(weights, _is_same):
            self.drop()
            self._made = make()
            # tensors of inference mode have no version counter, so their copies are never used again
            if not any(weight.is_inference() for weight in weights):
                self._keys = [(weakref.ref(w), w.data_ptr(), w._version) for w in weights]
        return self._made

    def of_forward(self, weights: tuple[Tensor, ...], make: Callable[[], Any]) -> Any:
        """For a backward: those that its forward used, made again where another forward came between.

        `weights` may be what autograd or checkpointing kept in the tensors' place: other objects, which see
        the same memory and share the version counter.
        """
        return self._made if self._are_current(weights, _sees_same_memory) else make()

    def _are_current(self, weights: tuple[Tensor, ...], is_same: Callable[[Tensor, Tensor], bool]) -> bool:
        return len(self._keys) == len(weights) and all(
            (known := reference()) is not None
            and is_same(weight, known)
            and weight.data_ptr() == address
            and weight._version == version
            for weight, (reference, address, version) in zip(weights, self._keys, strict=True)
        )


def _is_same(weight: Tensor, known: Tensor) -> bool:
    return weight is known


def _sees_same_memory(weight: Tensor, known: Tensor) -> bool:
    """Both live, so equal addresses are one memory."""
    return (
        weight.data_ptr() == known.data_ptr()
        and weight._version == known._version
        and weight.shape == known.shape
        and weight.stride() == known.stride()
        and weight.dtype == known.dtype
    )
