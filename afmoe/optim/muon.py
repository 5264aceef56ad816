"""Muon for hidden matrices, AdamW for the rest, as one optimizer."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from afmoe.config.checks import positive
from afmoe.errors import ConfigError
from afmoe.hardware import cpu_multiplies_bf16
from afmoe.optim.groups import parameter_groups
from afmoe.optim.newton_schulz import orthogonalize
from afmoe.optim.options import OptimOptions, check_betas, check_eps
from afmoe.registry import register

RATE_RULES: dict[str, Callable[[int, int], float]] = {
    # Jordan, https://kellerjordan.github.io/posts/muon
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    # Moonshot, arXiv 2502.16982: steps as large as AdamW's, whose rate then serves here too
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
"""Factor on the learning rate of a matrix [rows, columns]; names of `torch.optim.Muon`'s `adjust_lr_fn`."""

_DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}
# Values that are orthogonalised at once: more would not be faster, and each takes about four times its memory
_BATCH_VALUES = 2**25


@register("optim", "muon")
class Muon:
    """Makes a `MuonWithAdamW` for a model."""

    @dataclass(kw_only=True)
    class Config(OptimOptions):
        lr: float = 1e-2
        """Peak learning rate of the hidden matrices."""
        weight_decay: float = 0.01
        adamw_lr: float = 4e-3
        """Peak learning rate of everything else."""
        rate_rule: str = "match_rms_adamw"
        momentum: float = 0.95
        nesterov: bool = True
        newton_schulz_dtype: str = "auto"
        """`auto`: bfloat16 where the device multiplies it (GPUs; CPUs with AVX512-BF16 or AMX), else float32.
        """
        betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
        """AdamW's."""
        eps: float = 1e-8
        """AdamW's."""

        def __post_init__(self) -> None:
            super().__post_init__()
            check_betas(self.betas)
            check_eps(self.eps)
            positive("optim.adamw_lr", self.adamw_lr)
            if not 0 <= self.momentum < 1:
                raise ConfigError(f"optim.momentum must lie in [0, 1), got {self.momentum}")
            for name, value, valid in (
                ("rate_rule", self.rate_rule, RATE_RULES),
                ("newton_schulz_dtype", self.newton_schulz_dtype, _DTYPES),
            ):
                if value not in valid:
                    raise ConfigError(f"optim.{name} must be one of {', '.join(valid)}, got {value}")

    def __init__(self, config: Config) -> None:
        self.config = config

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer over `model`'s trainable parameters. Raises `ConfigError` when all are frozen."""
        config = self.config
        matrices = {
            "rule": "muon",
            "rate_rule": config.rate_rule,
            "momentum": config.momentum,
            "nesterov": config.nesterov,
            "newton_schulz_dtype": config.newton_schulz_dtype,
        }
        others = {
            "rule": "adamw",
            "lr": config.adamw_lr,
            "betas": (config.betas[0], config.betas[1]),
            "eps": config.eps,
            # so that torch keeps the step counts on the device when a state is loaded
            "fused": True,
        }
        return MuonWithAdamW(parameter_groups(model, config, matrices=matrices, others=others))


class Piece(NamedTuple):
    """Matrices [n, rows, columns] of one parameter, as views."""

    weight: Tensor
    gradient: Tensor
    momentum: Tensor
    group: dict[str, Any]

    @property
    def is_tall(self) -> bool:
        return self.weight.shape[1] > self.weight.shape[2]


class MuonWithAdamW(torch.optim.Optimizer):
    """Each group follows its `rule`: `muon` or `adamw`.

    Muon (Jordan, https://kellerjordan.github.io/posts/muon): the momentum's matrix, each expert's for itself,
    is orthogonalised and subtracted, so that all directions are learned at one pace. A parameter of rank 3 is
    a stack of matrices. Matrices of one shape, or of its transpose, go through the iteration together.

    `found_inf` (fp32 scalar; 1: leave parameters and state as they are in this step) is honoured without
    waiting for the device.
    """

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None
    """`torch.amp.GradScaler` sets both; gradients have to be unscaled by then, so this one is None."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})
        self._step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        assert self.grad_scale is None, "gradients must be unscaled before the step"
        matrices: dict[tuple[Any, ...], list[Piece]] = defaultdict(list)
        for group in self.param_groups:
            if group["rule"] == "adamw":
                self._step_adamw(group)
                continue
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                for piece in self.pieces(parameter, group):
                    sizes = tuple(sorted(piece.weight.shape[1:]))
                    matrices[*sizes, piece.weight.device, _dtype(piece)].append(piece)
        for (*_, dtype), pieces in matrices.items():
            for batch in _batches(pieces):
                self._step_muon(batch, dtype)
        return loss

    def _step_adamw(self, group: dict[str, Any]) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        states = [self.state[parameter] for parameter in parameters]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def pieces(self, parameter: Tensor, group: dict[str, Any]) -> Iterator[Piece]:
        """A parameter's matrices."""
        if "momentum_buffer" not in self.state[parameter]:
            self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        tensors = [parameter, parameter.grad, self.state[parameter]["momentum_buffer"]]
        yield from self.split(tensors, group)

    def split(self, tensors: list[Tensor], group: dict[str, Any]) -> Iterator[Piece]:
        """Weight, gradient and momentum of one shape, in parts small enough for one batch."""
        stacks = [tensor.unsqueeze(0) if tensor.ndim == 2 else tensor for tensor in tensors]
        at_once = max(1, _BATCH_VALUES // stacks[0][0].numel())
        for weight, gradient, momentum in zip(*(stack.split(at_once) for stack in stacks), strict=True):
            yield Piece(weight, gradient, momentum, group)

    def _step_muon(self, pieces: list[Piece], dtype: torch.dtype) -> None:
        """Move matrices of one shape, or of its transpose."""
        is_bad = None if self.found_inf is None else self.found_inf.bool()
        updates = []
        for piece in pieces:
            beta, gradient = piece.group["momentum"], piece.gradient
            if is_bad is not None:
                # the average of a value and itself is that value: momentum stays as it is
                gradient = torch.where(is_bad, piece.momentum, gradient)
            piece.momentum.lerp_(gradient, 1 - beta)
            update = gradient.lerp(piece.momentum, beta) if piece.group["nesterov"] else piece.momentum
            updates.append((update.mT if piece.is_tall else update).to(dtype))
        orthogonal = orthogonalize(torch.cat(updates))
        if is_bad is not None:
            orthogonal.masked_fill_(is_bad, 0.0)
        for piece, update in zip(pieces, orthogonal.split([len(one) for one in updates]), strict=True):
            group = piece.group
            rate = group["lr"] * RATE_RULES[group["rate_rule"]](*piece.weight.shape[1:])
            kept: Any = 1 - group["lr"] * group["weight_decay"]
            if is_bad is not None:
                kept = torch.where(is_bad, torch.ones_like(is_bad, dtype=torch.float32), kept)
            piece.weight.mul_(kept).add_(update.mT if piece.is_tall else update, alpha=-rate)


_cpu_multiplies_bf16 = cache(cpu_multiplies_bf16)


def _dtype(piece: Piece) -> torch.dtype:
    chosen = _DTYPES[piece.group["newton_schulz_dtype"]]
    if chosen is not None:
        return chosen
    has_bf16 = piece.weight.is_cuda or _cpu_multiplies_bf16()
    return torch.bfloat16 if has_bf16 else torch.float32


def _batches(pieces: list[Piece]) -> Iterator[list[Piece]]:
    """Pieces in order, together while they fit."""
    batch: list[Piece] = []
    values = 0
    for piece in pieces:
        if batch and values + piece.weight.numel() > _BATCH_VALUES:
            yield batch
            batch, values = [], 0
        batch.append(piece)
        values += piece.weight.numel()
    yield batch
