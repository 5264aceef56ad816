"""One rank's memory: states, copies of weights, activations, and what is held for a moment.

Peak = what is always there + the larger of (activations, the last layer's backward or the loss, communication
buffers) and (what the optimizer's step holds), and on a GPU two constants beside.
"""

from __future__ import annotations

from collections import Counter

from afmoe.planning.kept import ends_bytes, layer_bytes, rotary_bytes
from afmoe.planning.kept_experts import expert_casts, expert_weights, stored_copies
from afmoe.planning.parameters import Parameter, parameters
from afmoe.planning.parts import BACKWARD, START, Part, peak
from afmoe.planning.recomputed import kept_under_checkpointing, recomputed_at_once
from afmoe.planning.setup import BF16, FP32, Setup
from afmoe.planning.states import state_parts

CUDA_CONTEXT = 1 << 30
"""Context, NCCL's channels, cuBLAS workspaces: taken before the first tensor."""
GAPS = 0.05
"""Of all tensors together: what torch's allocator holds and cannot use."""
LOSS_ELEMENTS = {"cpu": 1 << 25, "cuda": 1 << 28}
"""Logits of a chunk of the loss (`afmoe.chunked_cross_entropy`), and of one block of its softmax."""
LOSS_BLOCK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
LIVE_NUMEL = 1_000_000_000
"""Gathered weights that ZeRO 3 keeps at most (`stage3_max_live_parameters`)."""


def memory_parts(setup: Setup) -> list[Part]:
    """Every part of the plan, in the order of the tables."""
    held = parameters(setup)
    parts = [*state_parts(setup, held), *_copies(setup, held)]
    parts += [Part("activations", name, size, BACKWARD) for name, size in activations(setup).items()]
    parts += _moments(setup, held)
    parts += _communication(setup, held)
    if setup.device_type == "cuda":
        parts.append(Part("reserved", "allocator's gaps", round(GAPS * peak(parts))))
        parts.append(Part("reserved", "CUDA context", CUDA_CONTEXT))
        parts += _start(setup, held)
    return [part for part in parts if part.num_bytes]


def activations(setup: Setup) -> Counter[str]:
    """What a micro-batch keeps from forward to backward, copies of weights apart."""
    kept = kept_under_checkpointing(setup, _layers(setup))
    kept["masks and angles"] += rotary_bytes(setup)
    kept["embedding and head"] = ends_bytes(setup)
    return kept


def _layers(setup: Setup) -> list[Counter[str]]:
    """Layers of one kind keep the same."""
    kinds: dict[tuple[bool, str], Counter[str]] = {}
    layers = []
    for index, attention in enumerate(setup.model.layer_types or []):
        kind = (index < setup.model.num_dense_layers, attention)
        if kind not in kinds:
            kinds[kind] = layer_bytes(setup, index)
        layers.append(kinds[kind])
    return layers


def weight_casts(setup: Setup, held: list[Parameter]) -> int:
    """bf16 copies of weights at the end of the forward.

    They lie in the graph; of weights whose product is computed again, in autocast's own cache.
    """
    experts = setup.num_moe_layers * expert_casts(setup) if setup.activation_checkpointing == "none" else 0
    if not setup.is_autocast:
        return experts
    # the router's product in fp32 needs none; norms are no products
    uncast = ("embed_tokens.", "lm_head.", *(("router.",) if setup.fp32_router else ()))
    dense = [one for one in held if len(one.shape) == 2 and not any(part in one.name for part in uncast)]
    return experts + BF16 * sum(one.numel for one in dense)


def _start(setup: Setup, held: list[Parameter]) -> list[Part]:
    """A process makes what it holds on the host, in fp32, before it goes to the device.

    Weights that are read come a layer at a time; those that are drawn, one tensor of all experts at a time.
    """
    layers: Counter[str] = Counter()
    for one in held:
        # the number of the layer; embedding and head count as one each
        layers[".".join(one.name.split(".")[:3])] += one.numel
    stacked = max((one.numel for one in held if one.is_expert), default=0)
    filling = max(*layers.values(), setup.ep_size * stacked)
    return [
        Part("start", "its weights in fp32", FP32 * sum(layers.values()), START, on_host=True),
        Part("start", "while they are filled", FP32 * filling, START, on_host=True),
    ]


def _copies(setup: Setup, held: list[Parameter]) -> list[Part]:
    return [
        Part("weight copies", f"experts in {setup.compute}", setup.num_moe_layers * stored_copies(setup)),
        Part("weight copies", "bf16 for products", weight_casts(setup, held), BACKWARD),
    ]


def _moments(setup: Setup, held: list[Parameter]) -> list[Part]:
    """The loss and the backward of a layer do not meet: the larger of both counts."""
    loss, layer = loss_bytes(setup), recomputed_at_once(setup, _layers(setup)) + backward_bytes(setup)
    head = [one for one in held if one.name == "lm_head.weight"]
    # gradients exist when the forward ends, and wait for backward
    waiting = setup.num_tokens * setup.model.hidden_size * setup.hidden_bytes
    waiting += sum(one.num_bytes for one in head if one.is_trained)
    name = "loss" if loss > layer else "backward of a layer"
    return [
        Part("working memory", name, max(loss, layer), BACKWARD),
        Part("working memory", "gradients of the loss", waiting, BACKWARD),
    ]


def loss_bytes(setup: Setup) -> int:
    """A chunk of logits, one block of its softmax, the sums of the gradients of hidden states and head."""
    config, tokens, each = setup.model, setup.num_tokens, setup.product_bytes
    elements = LOSS_ELEMENTS[setup.device_type]
    rows = min(tokens, setup.loss_chunk_tokens or max(1, elements // config.vocab_size))
    block_rows = min(rows, max(1, LOSS_BLOCK_ELEMENTS[setup.device_type] // config.vocab_size))
    weight = config.vocab_size * config.hidden_size
    # in fp32 the sum becomes the gradient itself
    sums = weight * FP32 if setup.weight_bytes < FP32 else 0
    cast = weight * BF16 + tokens * config.hidden_size * BF16 if setup.is_autocast else 0
    return (
        rows * config.vocab_size * each
        + block_rows * config.vocab_size * FP32
        + tokens * config.hidden_size * each
        + sums
        + cast
    )


def backward_bytes(setup: Setup) -> int:
    """Gradients inside the backward of the layer that needs most."""
    config, each, tokens = setup.model, setup.product_bytes, setup.num_tokens
    rows, width, size = setup.num_rows, config.moe_intermediate_size, config.hidden_size
    experts = attention = dense = 0
    if setup.num_moe_layers:
        # of the answers and the rows, the rows again; of hidden, gate and up, hidden again
        experts = rows * (4 * size + 4 * width) * each
        numel = expert_weights(setup)
        experts += numel * BF16 if expert_casts(setup) else 0
        # until they are added to those of earlier micro-batches
        experts += numel * setup.weight_bytes if setup.accumulate > 1 else 0
    if config.num_dense_layers:
        dense = tokens * (2 * size + 3 * config.intermediate_size) * each
    attention = tokens * (2 * size + 4 * config.num_attention_heads * config.head_dim) * each
    return max(experts, dense, attention)


def _communication(setup: Setup, held: list[Parameter]) -> list[Part]:
    trained = [one for one in held if one.is_trained]
    parts = []
    if setup.strategy == "ddp" and setup.num_ranks > 1:
        parts.append(Part("communication", "DDP buckets", sum(one.num_bytes for one in trained)))
    elif setup.zero_stage:
        largest = max((one.numel for one in trained), default=0)
        # what is reduced is copied once more; a tensor beyond the bucket goes alone
        buckets = setup.bucket_size * (2 if setup.overlap_comm else 1) + max(
            min(setup.bucket_size, sum(one.numel for one in trained)), largest
        )
        parts.append(Part("communication", "ZeRO buckets", FP32 * buckets, BACKWARD))
    if setup.zero_stage == 3:
        live = min(LIVE_NUMEL, sum(one.numel for one in held))
        parts.append(Part("communication", "gathered weights", live * setup.weight_bytes, BACKWARD))
    if setup.dispatch != "local":
        parts.append(Part("communication", "rows on their way", _rows_on_their_way(setup), BACKWARD))
    return parts


def _rows_on_their_way(setup: Setup) -> int:
    """The rows as gathered, packed and received, of the exchange that needs most."""
    row = setup.model.hidden_size * setup.hidden_bytes
    packed = setup.num_copies + setup.num_rows if setup.transport != "native" else 0
    return (setup.num_copies + setup.num_rows) * row + packed * wire_row_bytes(setup, setup.hidden_bytes)


def wire_row_bytes(setup: Setup, num_bytes_each: int) -> int:
    """One row on the wire (`afmoe.moe.dispatch.wire`), whose numbers have so many bytes here."""
    size = setup.model.hidden_size
    if setup.transport == "mxfp8":
        return size + -(-size // 32)
    return size * (BF16 if setup.transport == "bf16" else num_bytes_each)
