"""Lightning's DeepSpeed strategy with expert parallelism, on CPUs too, and with this project's checkpoints.

What differs from Lightning's own, each proven by a test:

- a micro-batch's loss is divided by their number once (Lightning and DeepSpeed each do);
- a checkpoint is the one that a single process writes, so that any number of ranks continues it;
- gradients are clipped by `optim.gradient_clip`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import deepspeed
import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from lightning.pytorch.strategies.deepspeed import remove_module_hooks
from torch import Tensor, nn
from torch.optim import Optimizer

from afmoe.checkpoint.lightning_io import RunCheckpointIO
from afmoe.optim.muon import MuonWithAdamW
from afmoe.parallel.deepspeed_precision import AfmoeDeepSpeedPrecision
from afmoe.parallel.expert_parallel import (
    ExpertRanks,
    expert_range,
    set_timeout_of_all_groups,
    without_shm_comm,
)
from afmoe.parallel.optimizer_groups import CanonicalGroups
from afmoe.parallel.partitions import Partitions
from afmoe.parallel.sharded_muon import ShardedMuon
from afmoe.parallel.whole_state import WholeState


class AfmoeDeepSpeedStrategy(DeepSpeedStrategy):
    def __init__(self, options: Any) -> None:
        """`options`: a `DeepSpeedPlugin.Config`."""
        self.stage, self.ep_size = options.stage, options.ep_size
        self.expert_ranks: ExpertRanks | None = None
        """None as long as each rank has every expert."""
        self.groups: CanonicalGroups | None = None
        super().__init__(
            config=_engine_config(options),
            process_group_backend=options.process_group_backend,
            timeout=timedelta(seconds=options.timeout_seconds),
        )

    def experts_of_rank(self, num_experts: int) -> range | None:
        """The experts that this rank's model has to hold; None: all."""
        return None if self.ep_size == 1 else expert_range(self.global_rank, num_experts, self.ep_size)

    # --- start ---

    @property
    def precision_plugin(self) -> Precision:
        return self._precision_plugin or Precision()

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        # Lightning gives every DeepSpeed strategy its own plugin; of it we take the name
        name = None if precision_plugin is None else precision_plugin.precision
        self._precision_plugin = None if name is None else AfmoeDeepSpeedPrecision(name, self.stage)

    def setup_environment(self) -> None:
        # past Lightning's check for a GPU
        with without_shm_comm():
            DDPStrategy.setup_environment(self)
        if self.ep_size > 1 and self.expert_ranks is None:
            self.expert_ranks = ExpertRanks(self.ep_size, self.root_device)

    def setup_distributed(self) -> None:
        # as Lightning's, without its check that devices have numbers
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def setup(self, trainer: Any) -> None:
        assert isinstance(self.precision_plugin, AfmoeDeepSpeedPrecision)
        self.precision_plugin.device_type = self.root_device.type
        if self.expert_ranks is not None:
            self.expert_ranks.connect(self._module, self._module.model)
        super().setup(trainer)

    def model_sharded_context(self) -> Any:
        # the model is made before ranks know each other; stage 3 shards it in `setup`
        return DDPStrategy.model_sharded_context(self)

    def init_deepspeed(self) -> None:
        assert self.model is not None
        if self._module.trainer.training:
            self._initialize_deepspeed_train(self.model)
        elif self.stage == 3:
            self._initialize_deepspeed_inference(self.model)
        else:
            self.model_to_device()

    def _init_optimizers(self) -> Any:
        schedule: Any
        optimizer, schedule = super()._init_optimizers()
        if self.stage and isinstance(optimizer, MuonWithAdamW):
            optimizer = ShardedMuon(optimizer.param_groups)
            if schedule is not None:
                schedule.scheduler.optimizer = optimizer
        self.groups = CanonicalGroups(optimizer, self.stage)
        if schedule is not None:
            schedule.scheduler = self.groups.schedule(schedule.scheduler)
        if self.expert_ranks is not None:
            self.expert_ranks.mark_groups(optimizer.param_groups)
        return optimizer, schedule

    def _setup_model_and_optimizer(
        self, model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any = None
    ) -> Any:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        engine = self._engine(
            model, self.config, model_parameters=parameters, optimizer=optimizer, lr_scheduler=lr_scheduler
        )
        assert self._timeout is not None
        set_timeout_of_all_groups(self._timeout)
        if self.stage in (1, 2):
            # else it would take steps with NaN where the working dtype is bf16
            engine.optimizer.check_grad_overflow = True
        if isinstance(optimizer, ShardedMuon):
            optimizer.zero = engine.optimizer
        return engine, engine.optimizer

    def _initialize_deepspeed_inference(self, model: nn.Module) -> None:
        """An engine that computes only, for weights sharded by stage 3."""
        remove_module_hooks(model)
        config = self.config
        assert isinstance(config, dict)
        names = ("train_micro_batch_size_per_gpu", "zero_allow_untested_optimizer", "zero_optimization")
        self.model = self._engine(model, {name: config[name] for name in names}, model_parameters=[])

    def _engine(self, model: nn.Module, config: Any, **trained: Any) -> Any:
        engine, *_ = deepspeed.initialize(
            args=argparse.Namespace(device_rank=self._device_number),
            config=config,
            model=model,
            dist_init_required=False,
            **trained,
        )
        return engine

    @property
    def _device_number(self) -> int:
        """DeepSpeed wants one for a CPU too."""
        index = self.root_device.index
        return self.local_rank if index is None else index

    def _format_config(self) -> None:
        assert isinstance(self.config, dict)
        self.config["gradient_accumulation_steps"] = self._module.trainer.accumulate_grad_batches
        # without ZeRO the module clips, as in a single process
        limit = self._module.optim.config.gradient_clip if self.stage else None
        self.config["gradient_clipping"] = limit or 0.0

    # --- steps ---

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        if self.stage:
            # ZeRO leaves a step out for its gradients alone, and those of a loss that is no number may be
            closure_loss = closure_loss * torch.where(closure_loss.isfinite(), 1.0, math.nan)
        # Lightning has divided by the number of micro-batches
        return super().backward(closure_loss, optimizer, *args, scale_wrt_gas=False, **kwargs)

    # --- checkpoints: those of a single process, see whole_state.py ---

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self._whole_state.module()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self.groups is not None
        return self._whole_state.optimizer(self.groups)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        # its tensors are whole as they are written, one at a time
        assert isinstance(self.checkpoint_io, RunCheckpointIO)
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options)
        else:
            self.checkpoint_io.take_part(checkpoint)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return DDPStrategy.load_checkpoint(self, checkpoint_path, weights_only)

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._whole_state.load_module(checkpoint["state_dict"])
        self._module.model.on_weights_updated()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.groups is not None
        self._whole_state.load_optimizer(self.groups, checkpoint["optimizer_states"][0])

    @property
    def _whole_state(self) -> WholeState:
        partitions = None
        if self.groups is not None and isinstance(self.model, deepspeed.DeepSpeedEngine):
            partitions = Partitions(self.model, self.stage)
        return WholeState(self._module, partitions, self.expert_ranks)

    @property
    def _module(self) -> Any:
        """The `AfmoeModule`."""
        assert self.lightning_module is not None
        return self.lightning_module


def _engine_config(options: Any) -> dict[str, Any]:
    """DeepSpeed's configuration, as far as it is known before the run."""
    zero: dict[str, Any] = {
        "stage": options.stage,
        "overlap_comm": options.overlap_comm,
        "reduce_bucket_size": options.bucket_size,
        "allgather_bucket_size": options.bucket_size,
        # what ZeRO 1 and 2 ask for with shared experts
        "contiguous_gradients": True,
        "reduce_scatter": True,
    }
    if options.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return {
        # only a throughput that DeepSpeed would print
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": None,
        "zero_allow_untested_optimizer": True,
        # torch's AdamW, wherever the states are: no operation has to be compiled
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
