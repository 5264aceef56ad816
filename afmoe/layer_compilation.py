"""`torch.compile` of each decoder layer, in training.

Layers of one kind (dense or with experts, sliding or full, trained or frozen) share their graphs, so a model
compiles about four in the first step, and as many again once batches change their shape; nothing in them
depends on how many tokens an expert gets. Names in the state dict stay. Without gradients, in validation and
generation, whose shapes change, layers run as they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from afmoe.decoder_layer import DecoderLayer
from afmoe.moe.statistics import CountedModule, RoutingStatistics, counted_modules

_MOST_GRAPHS = 64
"""Of the layers' forward. A layer has two, for the first shape and for any other, times four kinds of layer,
times what of it is frozen. torch stops at 8, and a graph that may not break then ends the run.
"""


def compile_each(layers: Iterable[DecoderLayer], backend: str = "inductor") -> None:
    """Compile the layers' forward in place. On a CPU `inductor` needs a C++ compiler.

    A layer whose plugins can all stand in a graph is one graph, or an error says where it would break.
    """
    for layer in layers:
        layer.compile(fullgraph=not layer.leaves_graph, backend=backend)


@contextmanager
def running_compiled(layers: nn.Module, *, is_training: bool) -> Iterator[None]:
    """One forward of compiled layers; without `is_training` they run as they are."""
    if not is_training:
        with torch.compiler.set_stance("force_eager"):
            yield
        return
    for module in counted_modules(layers):
        if module.is_counting:
            # what is made in the first step would be a second graph
            module.statistics_on(next(module.parameters()).device)
    with warnings.catch_warnings(), torch._dynamo.config.patch(recompile_limit=_MOST_GRAPHS):
        # the compiler looks at every attribute of its inputs; hidden states have no gradient of their own
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        yield


def same_graph_again(layer: nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """For the forward of a compiled layer and for that which repeats it in backward.

    The second counts as the first does, into sums that nobody reads: another graph might keep other tensors.
    """
    blocks = [block for block in counted_modules(layer) if block.is_counting]
    return nullcontext(), _counting_in_vain(blocks)


@contextmanager
def _counting_in_vain(blocks: list[CountedModule]) -> Iterator[None]:
    kept = [(block.is_counting, block.statistics) for block in blocks]
    for block in blocks:
        assert block.statistics is not None
        in_vain = RoutingStatistics(block.num_experts, block.statistics.counts_E.device)
        block.is_counting, block.statistics = True, in_vain
    try:
        yield
    finally:
        for block, (is_counting, statistics) in zip(blocks, kept, strict=True):
            block.is_counting, block.statistics = is_counting, statistics
