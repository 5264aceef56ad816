"""The section `memory` of a run, set on a model that was built. docs/memory.md weighs the choices."""

from __future__ import annotations

from afmoe.config import MemoryConfig
from afmoe.decoder_layer import DecoderLayer
from afmoe.errors import MachineError
from afmoe.hardware import Hardware
from afmoe.layer_compilation import compile_each
from afmoe.model import AfmoeForCausalLM, iter_moe_blocks


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
