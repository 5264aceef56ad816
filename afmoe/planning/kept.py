"""What one micro-batch keeps from forward to backward, layer by layer, in bytes.

The formulas follow what autograd saves in `afmoe.model`, each tensor once; tests measure it. h: bytes of a
number between layers, p: of an operand of a product. A norm keeps its input and the normed values in fp32, a
product its input, a gated feed-forward its gate, up, activated gate and their product.
"""

from __future__ import annotations

from collections import Counter

from afmoe.config import SLIDING_ATTENTION
from afmoe.planning.kept_experts import keeps_tokens, routed_bytes
from afmoe.planning.setup import BF16, FP32, INDEX, Setup

_MIN_BLOCK = 64
"""The narrowest block of a sliding layer under `attention=sdpa`."""


def layer_bytes(setup: Setup, index: int) -> Counter[str]:
    """Everything that layer `index` keeps, by what it belongs to."""
    config, tokens = setup.model, setup.num_tokens
    kept: Counter[str] = Counter()
    # before and after attention, before and after the feed-forward part: those after see products
    for input_bytes in (setup.hidden_bytes, setup.product_bytes) * 2:
        kept["norms"] += norm_bytes(setup, tokens, config.hidden_size, input_bytes)
    is_sliding = (config.layer_types or [])[index] == SLIDING_ATTENTION
    kept["attention"] = attention_bytes(setup, is_sliding=is_sliding)
    if index < config.num_dense_layers:
        kept["dense"] = input_bytes_of(setup, num_products=2) + _feed_forward(setup, config.intermediate_size)
        return kept
    num_shared = config.num_shared_experts
    kept["router"] = router_input(setup)
    if num_shared:
        kept["shared expert"] = _feed_forward(setup, config.moe_intermediate_size * num_shared)
    return kept + routed_bytes(setup)


def ends_bytes(setup: Setup) -> int:
    """Token ids, last norm, and the head's input and targets."""
    config, tokens = setup.model, setup.num_tokens
    return (
        INDEX * tokens
        + norm_bytes(setup, tokens, config.hidden_size, setup.hidden_bytes)
        + tokens * (config.hidden_size * setup.hidden_bytes + INDEX)
    )


def rotary_bytes(setup: Setup) -> int:
    """Cosines and sines, which the sliding layers share."""
    has_rotary = SLIDING_ATTENTION in (setup.model.layer_types or [])
    return setup.num_tokens * setup.model.head_dim * setup.hidden_bytes if has_rotary else 0


def norm_bytes(setup: Setup, num_rows: int, size: int, input_bytes: int) -> int:
    """The input in fp32, its inverse root mean square, and the normed values."""
    is_wide = setup.model.norm_order == "scale_then_cast"
    return num_rows * (size * (FP32 + (FP32 if is_wide else input_bytes)) + FP32)


def input_bytes_of(setup: Setup, num_products: int) -> int:
    """A normed token as the input of several products: autocast makes a bf16 copy for each."""
    each = BF16 * num_products if setup.is_autocast else setup.hidden_bytes
    return setup.num_tokens * setup.model.hidden_size * each


def router_input(setup: Setup, *, keeps_parts: bool = True) -> int:
    """The tokens for router and shared expert; and as they are, where something keeps them so.

    `keeps_parts` False: the shared expert is computed again, from the tokens as they are.
    """
    config = setup.model
    size = setup.num_tokens * config.hidden_size
    if not setup.is_autocast:
        is_cast = setup.fp32_router and setup.hidden_bytes < FP32
        return size * (setup.hidden_bytes + (FP32 if is_cast else 0))
    num_products = 0 if setup.fp32_router else 1
    keeps_own = setup.fp32_router or keeps_tokens(setup)
    if config.num_shared_experts:
        num_products += 2 if keeps_parts else 0
        keeps_own |= not keeps_parts
    return size * (BF16 * num_products + (setup.hidden_bytes if keeps_own else 0))


def _feed_forward(setup: Setup, width: int) -> int:
    """Behind its input. A clamped activation keeps gate and up before the clamp, too."""
    num_tensors = 6 if setup.model.hidden_act.startswith("clamped") else 4
    return setup.num_tokens * width * num_tensors * setup.product_bytes


def attention_bytes(setup: Setup, *, is_sliding: bool) -> int:
    """Input, normed queries and keys, what the plugin keeps, gate and gated output."""
    config, tokens = setup.model, setup.num_tokens
    heads, groups = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
    wide = tokens * heads * config.head_dim
    return (
        input_bytes_of(setup, num_products=4)
        + norm_bytes(setup, tokens * heads, config.head_dim, setup.product_bytes)
        + norm_bytes(setup, tokens * groups, config.head_dim, setup.product_bytes)
        + _mixing_bytes(setup, is_sliding=is_sliding)
        + 2 * wide * setup.product_bytes
    )


def _mixing_bytes(setup: Setup, *, is_sliding: bool) -> int:
    """Queries, keys, values, output, and what the softmax is computed again from."""
    config, length, each = setup.model, setup.sequence_length, setup.product_bytes
    heads, groups = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
    num_blocks, queries, keys = _blocks(setup, is_sliding=is_sliding)
    rows = setup.batch_size * num_blocks
    scores = attention_scores(setup, is_sliding=is_sliding)
    if materialises_scores(setup):
        # keys and values repeated for every head, softmax in fp32, the mask
        channels = 2 * rows * (queries + keys) * heads * config.head_dim
        cast = each if each < FP32 else 0
        return channels * each + scores * (heads * (FP32 + cast) + 1)
    channels = 2 * rows * (queries * heads + keys * groups) * config.head_dim
    statistics = rows * queries * heads * FP32
    mask = scores * each if setup.attention == "sdpa" else 0
    # flash works on the real tokens only and puts its output back among all
    extra = setup.batch_size * length * heads * config.head_dim if setup.attention == "flash" else 0
    return (channels + extra) * each + statistics + mask


def attention_scores(setup: Setup, *, is_sliding: bool) -> int:
    """Pairs of a query and a key in one head, masked ones too."""
    num_blocks, queries, keys = _blocks(setup, is_sliding=is_sliding)
    return setup.batch_size * num_blocks * queries * keys


def _blocks(setup: Setup, *, is_sliding: bool) -> tuple[int, int, int]:
    """Blocks of a row, and the queries and keys of each."""
    length = setup.sequence_length
    if setup.attention == "sdpa" and is_sliding:
        block = max(setup.model.sliding_window, _MIN_BLOCK)
        if length > 2 * block:
            # a block of queries sees its own keys and those of the block before
            return -(-length // block), block, 2 * block
    return 1, length, length


def materialises_scores(setup: Setup) -> bool:
    """Whether a score for every query, key and head exists in memory.

    torch's fused kernels on a GPU take grouped keys, or a mask, but not both ("works only for Flash_attention
    and math kernel", the documentation of `enable_gqa`); packed rows have a mask.
    """
    config = setup.model
    is_grouped = config.num_attention_heads != config.num_key_value_heads
    falls_back = setup.attention == "sdpa" and setup.device_type == "cuda" and is_grouped
    return setup.attention == "reference" or falls_back
