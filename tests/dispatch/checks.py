"""What the ranks do in one launch, and report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from afmoe import AfmoeConfig, AfmoeForCausalLM, iter_moe_blocks
from afmoe.moe.dispatch import make_dispatcher
from afmoe.moe.dispatch.wire import TRANSPORTS
from tests.dispatch import deepep_stand_in
from tests.dispatch.cases import (
    CASES,
    DISPATCHERS,
    Case,
    D,
    largest_deviations,
    my_rank,
    on_my_rank,
    shard,
    shared_block,
    square_norms,
)


def two_ranks() -> dict[str, Any]:
    deepep_stand_in.install()
    deepep_stand_in.DTYPES.add(torch.float32)
    return {
        "exact": exact(CASES, ("native", "deepep", "deepep_chunked")),
        "mxfp8": {case: square_norms(case, run(case, "mxfp8")) for case in quantized_cases()},
        "bf16": {case: square_norms(case, run(case, "bf16")) for case in CASES[:1]},
        "operator": operator(),
        "bytes": bytes_sent(),
        "repeated": repeated(),
        "checkpointed": {name: checkpointed(name) for name in ("native", "mxfp8", "deepep_chunked")},
        "compiled": compiled(),
        "strict": strict_dtypes(),
        "control": control(),
        "model": whole_model(),
        "pending_events": deepep_stand_in.EventOverlap.pending,
    }


def four_ranks() -> dict[str, Any]:
    deepep_stand_in.install()
    deepep_stand_in.DTYPES.add(torch.float32)
    cases = [case for case in CASES if case.shared and not case.score_before_experts]
    return {"exact": exact(cases, ("native", "deepep_chunked"))}


def quantized_cases() -> list[Case]:
    """Enough tokens for a norm of errors to mean something, and fp8 with the wire's kind of scales too."""
    cases = [case for case in CASES if case.tokens in ("uneven", "zero_receive", "zero_send")]
    return cases + [replace(case, compute="fp8_ue8m0") for case in cases if case.compute == "fp8"]


def run(case: Case, dispatcher: str) -> dict[str, Tensor]:
    return on_my_rank(case, shared_block(case, DISPATCHERS[dispatcher]))


def exact(cases: list[Case], dispatchers: tuple[str, ...]) -> dict[tuple[str, Case], dict[str, float]]:
    return {(name, case): largest_deviations(case, run(case, name)) for case in cases for name in dispatchers}


@contextmanager
def watched(collective: str) -> Iterator[list[tuple[Any, ...]]]:
    """The arguments of every call of one of torch.distributed's functions."""
    calls: list[tuple[Any, ...]] = []
    original = getattr(dist, collective)

    def watching(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    setattr(dist, collective, watching)
    try:
        yield calls
    finally:
        setattr(dist, collective, original)


def bytes_sent() -> dict[str, int]:
    """Of the rows, forward and backward, for each transport; the rank's own rows among them."""
    found = {}
    for name in ("native", "bf16", "mxfp8"):
        with watched("all_to_all_single") as calls:
            run(CASES[0], name)
        found[name] = sum(sent.numel() * sent.element_size() for _, sent, *_ in calls)
    return found


def repeated() -> bool:
    """Whether a second run gives the same bits."""
    first, second = (run(CASES[0], "native") for _ in range(2))
    return all(torch.equal(first[name], second[name]) for name in first)


def operator() -> None:
    """What torch asks of an operator."""
    rank, _ = my_rank()
    sent = [3, 2] if rank == 0 else [0, 4]
    received = [3, 0] if rank == 0 else [2, 4]
    sizes_2W = torch.tensor([sent, received])
    rows_RD = torch.randn(sum(sent) + 1, 40, requires_grad=True)
    name = dist.group.WORLD.group_name  # pyright: ignore[reportOptionalMemberAccess]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for num_rows in (None, sum(received) + 2):
        for transport in TRANSPORTS:
            inputs = (rows_RD, sizes_2W, num_rows, name, transport)
            torch.library.opcheck(torch.ops.afmoe.exchange_rows.default, inputs, test_utils=checks)


def checkpointed(name: str) -> dict[str, bool]:
    """20 steps whose tokens crowd on ever other experts, some ranks empty: whether the gradients are the bits
    of those without, where backward computes the whole block again, or its experts only.
    """
    case = Case("native", score_before_experts=False, shared=True, tokens="uneven")
    blocks = {kind: shared_block(case, DISPATCHERS[name]) for kind in ("none", "full", "selective")}
    blocks["selective"].recomputes_experts = True
    rank, _ = my_rank()
    is_equal = {"full": True, "selective": True}
    for step in range(20):
        generator = torch.Generator().manual_seed(step * 10 + rank)
        num_tokens = int(torch.randint(0, 30, (), generator=generator))
        hidden_BSD = torch.randn(1, num_tokens, D, generator=generator)
        gradients = {}
        for kind, block in blocks.items():
            block.router.selection_bias.fill_(-1e4)
            block.router.selection_bias[torch.arange(step, step + 3) % 8] = 0.0
            leaf = hidden_BSD.clone().requires_grad_()
            output = checkpoint(block, leaf, use_reentrant=False)[0] if kind == "full" else block(leaf)[0]
            output.square().sum().backward()
            gradients[kind] = [leaf.grad, *(parameter.grad for parameter in block.parameters())]
            block.zero_grad()
        for kind in is_equal:
            pairs = zip(gradients["none"], gradients[kind], strict=True)
            is_equal[kind] &= all(torch.equal(a, b) for a, b in pairs)
    return is_equal


def compiled() -> dict[str, bool]:
    """The block as one graph: whether it gives the eager bits, made once whatever the counts."""
    found = {}
    for transport, before in (("native", False), ("mxfp8", True)):
        case = Case("native", score_before_experts=before, shared=True, tokens="uneven")
        eager, graph = (shared_block(case, DISPATCHERS[transport]) for _ in range(2))
        torch.compiler.reset()
        # a backend without code generation: needs no C++ compiler
        graph.compile(fullgraph=True, backend="aot_eager")
        is_equal = True
        for first_favoured, stance in ((None, "default"), (0, "fail_on_recompile"), (5, "fail_on_recompile")):
            for block in (eager, graph):
                block.zero_grad()
                block.router.selection_bias.zero_()
                if first_favoured is not None:
                    block.router.selection_bias[first_favoured : first_favoured + 3] = 1e4
            with torch.compiler.set_stance(stance):
                actual = on_my_rank(case, graph)
            expected = on_my_rank(case, eager)
            is_equal &= all(torch.equal(actual[name], expected[name]) for name in expected)
        found[transport] = is_equal
    return found


def whole_model() -> tuple[float, int]:
    """Ranks with sequences of other lengths: how far the logits are from `local`, and how many times they
    agreed on the chunks.
    """
    rank, _ = my_rank()
    config = AfmoeConfig(
        vocab_size=50,
        hidden_size=D,
        intermediate_size=D,
        moe_intermediate_size=D,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=8,
    )
    torch.manual_seed(0)
    model = AfmoeForCausalLM(config)
    ids_BS = torch.randint(0, 50, (1, 40 - 23 * rank))
    expected = model(ids_BS).logits
    dispatcher = make_dispatcher(DISPATCHERS["deepep_chunked"], num_experts=8, process_group=dist.group.WORLD)
    for block in iter_moe_blocks(model):
        shard(block)
        block.dispatcher = dispatcher
    with watched("all_reduce") as calls:
        actual = model(ids_BS).logits
    return ((actual - expected).abs().max() / expected.abs().max()).item(), len(calls)


def control() -> dict[str, dict[str, float]]:
    """What a block that weighs on the other side of the experts would deviate by."""
    found = {}
    for name in ("native", "deepep_chunked"):
        block = shared_block(CASES[0], DISPATCHERS[name])
        block.score_before_experts = not CASES[0].score_before_experts
        found[name] = largest_deviations(CASES[0], on_my_rank(CASES[0], block))
    return found


def strict_dtypes() -> dict[str, float]:
    """bf16 as the library has it, against fp32: the largest deviation of the output and the input's
    gradient.
    """
    case = Case("native", score_before_experts=False, shared=False, tokens="uneven")
    deepep_stand_in.DTYPES.discard(torch.float32)
    try:
        block = shared_block(case, DISPATCHERS["deepep_chunked"])
        with torch.autocast("cpu", torch.bfloat16):
            found = on_my_rank(case, block)
    finally:
        deepep_stand_in.DTYPES.add(torch.float32)
    return largest_deviations(case, found)
