"""The typed configuration: the model's (`AfmoeConfig`) and a run's (`RunConfig`).

Plain dataclasses without torch. A section that chooses a plugin (`attention`, `moe.compute`, `data`, ...)
stays a mapping here, `name` and options: its types are checked against the YAML, its values by the plugin's
own `Config`.
"""

from __future__ import annotations

from afmoe.config.model import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    STRETCHED_ROPE_TYPES,
    AfmoeConfig,
    ModelConfig,
)
from afmoe.config.run import (
    CheckpointConfig,
    ExportConfig,
    FaultsConfig,
    MemoryConfig,
    MoeConfig,
    RunConfig,
    SamplesConfig,
    TokenizerConfig,
)
from afmoe.config.trainer import PRECISIONS, TrainerConfig

__all__ = [
    "FULL_ATTENTION",
    "PRECISIONS",
    "SLIDING_ATTENTION",
    "STRETCHED_ROPE_TYPES",
    "AfmoeConfig",
    "CheckpointConfig",
    "ExportConfig",
    "FaultsConfig",
    "MemoryConfig",
    "ModelConfig",
    "MoeConfig",
    "RunConfig",
    "SamplesConfig",
    "TokenizerConfig",
    "TrainerConfig",
]
