"""`trainer/strategy=deepspeed`: its options, and what is refused before anything is built.

DeepSpeed itself is imported when the strategy is made. docs/expert_parallel.md tells how the parts fit.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import DeepSpeedStrategy

from afmoe.config import AfmoeConfig, RunConfig
from afmoe.config.checks import at_least, one_of
from afmoe.errors import ConfigError, MachineError
from afmoe.hardware import Hardware
from afmoe.moe.dispatch import check_dispatch, refuse_several_ranks
from afmoe.registry import configure, register

if TYPE_CHECKING:
    from afmoe.model import AfmoeForCausalLM
    from afmoe.parallel.gathered_tensors import GatheredTensors


@register("trainer/strategy", "deepspeed")
class DeepSpeedPlugin:
    """ZeRO, and experts shared by `ep_size` ranks: the dense part is data parallel over all of them."""

    @dataclass(kw_only=True)
    class Config:
        stage: int = 1
        """ZeRO: 0 shards nothing, 1 optimizer states, 2 gradients too, 3 weights too."""
        ep_size: int = 1
        """Consecutive ranks that share the experts."""
        offload_optimizer: bool = False
        overlap_comm: bool = True
        bucket_size: int = 200_000_000
        """Numbers reduced or gathered at once."""
        process_group_backend: str | None = None
        """None: nccl on GPUs, gloo on CPUs."""
        timeout_seconds: int = 1800

        def __post_init__(self) -> None:
            if self.stage not in (0, 1, 2, 3):
                raise ConfigError(f"trainer.strategy.stage must be 0, 1, 2 or 3, got {self.stage}")
            at_least("trainer.strategy.ep_size", self.ep_size, 1)
            at_least("trainer.strategy.bucket_size", self.bucket_size, 1)
            at_least("trainer.strategy.timeout_seconds", self.timeout_seconds, 1)
            one_of(
                "trainer.strategy.process_group_backend", self.process_group_backend, ("gloo", "nccl", None)
            )
            if self.ep_size > 1 and self.stage not in (1, 2):
                raise ConfigError(
                    f"trainer.strategy.ep_size={self.ep_size} works with trainer.strategy.stage=1 or 2, got "
                    f"stage={self.stage}: stage 0 clips by the mean of the ranks' norms, stage 3 would shard "
                    "the experts a second time"
                )
            if self.offload_optimizer and self.stage not in (1, 2):
                raise ConfigError(
                    "trainer.strategy.offload_optimizer=true works with trainer.strategy.stage=1 or 2, got "
                    f"stage={self.stage}"
                )

    def __init__(self, config: Config) -> None:
        if find_spec("deepspeed") is None:
            raise MachineError(
                "trainer/strategy=deepspeed needs the package deepspeed: pip install --no-build-isolation "
                "'deepspeed>=0.19.8,<0.20' (after torch), or make setup"
            )
        from afmoe.parallel.deepspeed_strategy import AfmoeDeepSpeedStrategy

        self.strategy = AfmoeDeepSpeedStrategy(config)


def choose_accelerator(hardware: Hardware) -> None:
    """Tell DeepSpeed what the run is on, before it is imported and looks for itself: a machine with GPUs may
    have to train on its CPU.
    """
    os.environ["DS_ACCELERATOR"] = "cuda" if hardware.is_cuda else "cpu"


def check_strategy(run: RunConfig, model: AfmoeConfig, *, world_size: int, hardware: Hardware) -> None:
    """Refuse a run that cannot be shared as `trainer/strategy` asks. Raises `ConfigError`."""
    strategy = configure("trainer/strategy", run.trainer.strategy)
    if not isinstance(strategy, DeepSpeedPlugin.Config):
        return
    if world_size % strategy.ep_size:
        raise ConfigError(
            f"trainer.strategy.ep_size={strategy.ep_size} must divide the number of ranks, which is "
            f"{world_size} (trainer.devices x trainer.num_nodes)"
        )
    if model.num_experts % strategy.ep_size:
        raise ConfigError(
            f"trainer.strategy.ep_size={strategy.ep_size} must divide model.num_experts={model.num_experts}"
        )
    if strategy.ep_size > 1:
        if run.moe.dispatch.get("name") == "local":
            refuse_several_ranks(strategy.ep_size)
        check_dispatch(run.moe.dispatch, hardware=hardware, precision=run.trainer.precision)
    if strategy.process_group_backend == "nccl" and not hardware.is_cuda:
        raise ConfigError(
            "trainer.strategy.process_group_backend=nccl needs GPUs, this run is on the CPU; leave it null"
        )
    if run.trainer.precision == "16-mixed":
        raise ConfigError(
            "trainer.precision=16-mixed scales the loss in a way that DeepSpeed does not know; use "
            "bf16-mixed, or trainer/strategy=ddp"
        )
    if strategy.stage in (0, 3) and run.trainer.precision == "bf16-true":
        raise ConfigError(
            "trainer.precision=bf16-true needs fp32 weights behind the bf16 ones, which "
            f"trainer.strategy.stage={strategy.stage} does not keep here; use stage=1 or 2, or bf16-mixed"
        )
    if run.optim.get("name") == "muon" and (strategy.stage == 3 or strategy.offload_optimizer):
        raise ConfigError(
            "optim=muon works on whole matrices: trainer.strategy.stage=3 never has them in one place, and "
            "offload_optimizer=true would orthogonalise them on the CPU; use stage=1 or 2 without offload, "
            "or optim=adamw"
        )


def rank_experts(strategy: Any, num_experts: int) -> range | None:
    """The experts of each layer that this process is to hold; None: all. Known before the ranks meet."""
    if not isinstance(strategy, DeepSpeedStrategy):
        return None
    from afmoe.parallel.deepspeed_strategy import AfmoeDeepSpeedStrategy

    assert isinstance(strategy, AfmoeDeepSpeedStrategy)
    return strategy.experts_of_rank(num_experts)


def gathered_tensors(strategy: Any, model: AfmoeForCausalLM) -> GatheredTensors | None:
    """The tensors of a model that the ranks hold parts of; None: each holds it whole."""
    if not isinstance(strategy, DeepSpeedStrategy):
        return None
    from afmoe.parallel.gathered_tensors import GatheredTensors

    return GatheredTensors(strategy, model)
