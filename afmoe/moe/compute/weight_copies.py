"""Copies of weights in another form, made once an optimizer step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

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
        # one object, replaced as a whole: threads may share a layer
        self._kept = _Kept([], None)

    def __reduce__(self) -> Any:
        # a copy or a pickle of a model belongs to other weights
        return type(self), ()

    def of(self, weights: tuple[Tensor, ...], make: Callable[[], Any]) -> Any:
        """For a forward, which makes and keeps what is missing."""
        kept = self._kept
        if kept.are_of(weights, _is_same):
            return kept.made
        # before the new ones are made: no two have to fit in memory
        del kept
        self.drop()
        before = self._kept
        # tensors of inference mode have no version counter, so their copies are never used again
        keys = [] if any(w.is_inference() for w in weights) else [_key(w) for w in weights]
        kept = _Kept(keys, make())
        # not if the weights were said to change meanwhile
        if self._kept is before:
            self._kept = kept
        return kept.made

    def of_forward(self, weights: tuple[Tensor, ...], make: Callable[[], Any]) -> Any:
        """For a backward: those that its forward used, made again where another forward came between.

        `weights` may be what autograd or checkpointing kept in the tensors' place: other objects, which see
        the same memory and share the version counter.
        """
        kept = self._kept
        return kept.made if kept.are_of(weights, _sees_same_memory) else make()


Key = tuple["weakref.ref[Tensor]", int, int]
"""A weight, its address and version."""


def _key(weight: Tensor) -> Key:
    return weakref.ref(weight), weight.data_ptr(), weight._version


class _Kept(NamedTuple):
    keys: list[Key]
    """Empty: the copies may serve nobody."""
    made: Any

    def are_of(self, weights: tuple[Tensor, ...], is_same: Callable[[Tensor, Tensor], bool]) -> bool:
        return len(self.keys) == len(weights) and all(
            (known := reference()) is not None
            and is_same(weight, known)
            and weight.data_ptr() == address
            and weight._version == version
            for weight, (reference, address, version) in zip(weights, self.keys, strict=True)
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
