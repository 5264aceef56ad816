"""The section `memory` of a run, set on a model that was built. docs/memory.md weighs the choices."""

from __future__ import annotations

from afmoe.config import AfmoeConfig, MemoryConfig
from afmoe.decoder_layer import DecoderLayer
from afmoe.errors import ConfigError, MachineError
from afmoe.hardware import Hardware
from afmoe.layer_compilation import compile_each
from afmoe.model import AfmoeForCausalLM, iter_moe_blocks
from afmoe.moe.activations import activation_named
from afmoe.moe.compute import ExpertCompute


def check_memory_settings(memory: MemoryConfig, hardware: Hardware) -> None:
    """Raises `MachineError` for what this machine lacks, before anything is built."""
    missing = ["a C++ compiler and Python's headers"] if not hardware.has_cxx_compiler else []
    if hardware.is_cuda and not hardware.has_triton:
        missing.append("the package triton")
    if memory.compile_layers and missing:
        raise MachineError(
            f"memory.compile_layers=true needs {' and '.join(missing)}, which this machine lacks; install "
            f"{'them' if len(missing) > 1 else 'that'} (CXX names the compiler), or leave "
            "memory.compile_layers=false"
        )


def check_compiled_experts(memory: MemoryConfig, model: AfmoeConfig, compute: type[ExpertCompute]) -> None:
    """Raises `ConfigError` for experts that cannot stand in a graph, which the first step would find."""
    has_experts = model.num_dense_layers < model.num_hidden_layers
    if not (memory.compile_layers and has_experts) or compute.leaves_graph:
        return
    if not activation_named(model.hidden_act).has_derivative:
        raise ConfigError(
            f"memory.compile_layers=true cannot compile experts with hidden_act={model.hidden_act}, whose "
            "derivative autograd takes inside an operator; use memory.compile_layers=false or "
            "moe/compute=reference"
        )


def use_memory_settings(model: AfmoeForCausalLM, memory: MemoryConfig) -> None:
    """How much training keeps, and whether layers are compiled. Changes no weight and no name."""
    decoder, mode = model.model, memory.activation_checkpointing
    decoder.recomputes_layers = mode == "full"
    layers = [layer for layer in decoder.layers if isinstance(layer, DecoderLayer)]
    for layer in layers:
        layer.recomputes_parts = mode == "selective"
    for block in iter_moe_blocks(model):
        block.recomputes_experts = mode == "selective"
    model.lm_head.loss_chunk_tokens = memory.loss_chunk_tokens
    decoder.has_compiled_layers = memory.compile_layers
    if memory.compile_layers:
        compile_each(layers)
