"""What the routed experts of one layer keep for backward: routing, dispatch, products; copies of weights."""

from __future__ import annotations

from collections import Counter

from afmoe.planning.setup import BF16, FP32, INDEX, Setup

_TILE = 128
"""Rows of a tile of the quantizing kernels and of DeepGEMM."""
_MX_BLOCK = 32
_QUANTIZED = ("fp8", "mxfp8")


def keeps_tokens(setup: Setup) -> bool:
    """Whether the experts keep the tokens that their rows were gathered from, and not the rows."""
    return (
        setup.dispatch == "local"
        and not setup.model.score_before_experts
        and setup.compute not in ("reference", "deepgemm_fp8")
        and not _keeps_columns(setup)
    )


def routed_bytes(setup: Setup) -> Counter[str]:
    """Router, dispatch and experts, behind the router's input."""
    config, tokens, copies = setup.model, setup.num_tokens, setup.num_copies
    size, rows = config.hidden_size, setup.num_rows
    kept: Counter[str] = Counter()
    kept["router"] = tokens * config.num_experts * FP32 + copies * INDEX
    if config.route_norm:
        kept["router"] += copies * FP32 + tokens * FP32
    # where each copy lies (there, back, and of which token), its weight, the mask; the answers
    kept["dispatch"] = copies * (3 * INDEX + FP32) + tokens + copies * size * setup.product_bytes
    if config.score_before_experts:
        kept["dispatch"] += copies * (size * FP32 + FP32)
    if setup.dispatch != "local":
        kept["dispatch"] += 2 * rows * INDEX
    kept["experts"] = expert_bytes(setup)
    return kept


def expert_bytes(setup: Setup) -> int:
    """The products before the activation, and what the gradients of the first weights need of the rows."""
    config, rows = setup.model, setup.num_rows
    width, size, each = config.moe_intermediate_size, config.hidden_size, setup.product_bytes
    if setup.compute == "reference":
        # autocast makes a copy of the rows for each product
        return rows * (4 * width + size * (2 if setup.is_autocast else 1)) * each
    if setup.compute == "deepgemm_fp8":
        slots = (rows // _TILE + min(setup.num_local_experts, rows)) * _TILE
        return 2 * slots * width * BF16 + rows * size * each
    if setup.compute == "bf16":
        each = BF16
    kept_rows = 0 if keeps_tokens(setup) else rows * size * each
    if _keeps_columns(setup):
        kept_rows = _column_bytes(setup)
    return 2 * rows * width * each + kept_rows


def _keeps_columns(setup: Setup) -> bool:
    """Whether quantizing kernels keep a copy of the rows for the weight gradients."""
    return setup.compute in _QUANTIZED and not setup.emulates and setup.wgrad != "bf16"


def _column_bytes(setup: Setup) -> int:
    """Codes, and a scale for 128 of them (fp32) or for 32 (a byte), in whole tiles of an expert's rows."""
    tiles = -(-setup.num_rows // _TILE) + setup.num_local_experts
    columns = -(-setup.model.hidden_size // _TILE) * _TILE
    codes = columns * tiles * _TILE
    return codes + (codes // _TILE * FP32 if setup.compute == "fp8" else codes // _MX_BLOCK)


def expert_weights(setup: Setup) -> int:
    """Numbers in this rank's experts of one layer."""
    return 3 * setup.num_local_experts * setup.model.hidden_size * setup.model.moe_intermediate_size


def expert_casts(setup: Setup) -> int:
    """bf16 copies of one layer's experts that the graph holds, from forward to backward."""
    is_cast = setup.compute in ("native", "reference") and setup.is_autocast
    is_bf16 = setup.compute == "bf16" and setup.kernels == "torch" and setup.weight_bytes > BF16
    return BF16 * expert_weights(setup) if is_cast or is_bf16 else 0


def stored_copies(setup: Setup) -> int:
    """Copies of one layer's experts in the plugin's own form, made once an optimizer step and kept."""
    numel = expert_weights(setup)
    if setup.compute == "bf16" and setup.kernels == "triton":
        return BF16 * numel if setup.weight_bytes > BF16 else 0
    if setup.compute in _QUANTIZED and setup.emulates:
        # fp8's blocks are square: one copy serves forward and backward
        return FP32 * numel * (1 if setup.compute == "fp8" else 2)
    if setup.compute == "fp8" or setup.compute == "deepgemm_fp8":
        return 2 * (numel + numel // _TILE**2 * FP32)
    if setup.compute == "mxfp8":
        return 2 * (numel + numel // _MX_BLOCK)
    return 0
