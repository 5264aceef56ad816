"""Is a checkpoint exact here? Our layers and transformers' side by side, one at a time, in fp32.

Both sides get the same hidden states: those of transformers' layers before, from the checkpoint's own
embeddings. So the errors of layers do not add up, and a layer that differs is named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from afmoe.checkpoint.layouts import layer_prefix
from afmoe.checkpoint.model_directory import EMBEDDING, HEAD
from afmoe.checkpoint.model_files import ModelFiles
from afmoe.checkpoint.reference import ReferenceLayers
from afmoe.config import AfmoeConfig
from afmoe.model import AfmoeModel
from afmoe.moe.block import moe_blocks
from afmoe.moe.router import Routing

TOLERANCE = 1e-5
# two experts whose selection scores differ by less may change places between two correct computations
TIE = 1e-5
_VOCABULARY_PIECE = 16384


@dataclass
class LayerResult:
    """Relative errors `||ours - theirs|| / ||theirs||` of one layer."""

    layer: int
    attention: str
    """`sliding` or `full`."""
    feed_forward: str
    """`dense` or `experts`."""
    errors: dict[str, float] = field(default_factory=dict)
    """Of the attention branch, the feed-forward branch (each after its norm, before it is added), the layer's
    output, and `experts`: each expert alone, the worst of them."""
    worst_expert: int | None = None
    num_experts_reached: int = 0
    """Experts that the router chose for at least one token."""
    num_ties: int = 0
    """Tokens left out of feed-forward and output: their k-th and next expert score the same to 1e-5."""
    same_experts: list[tuple[str, int, int]] = field(default_factory=list)
    """Pairs of experts that hold the same tensor: name, first, second."""
    non_finite: list[str] = field(default_factory=list)
    """Names of tensors that hold NaN or infinite values."""

    @property
    def largest_error(self) -> float:
        # max() passes over NaN
        return next((error for error in self.errors.values() if error != error), max(self.errors.values()))

    @property
    def passes(self) -> bool:
        return self.largest_error <= TOLERANCE


@dataclass
class _Run:
    """What one side computed for one layer."""

    branches: dict[str, Tensor]
    normed_TD: Tensor
    """What the feed-forward part was given."""
    expert_ids_TK: Tensor | None = None
    scores_TE: Tensor | None = None
    """By which the experts are chosen, bias included."""
    experts_ED: Tensor | None = None
    """The output of each expert alone, for one row."""
    last_SD: Tensor | None = None
    """After the final norm."""


@torch.no_grad()
def verify_layers(
    files: ModelFiles,
    config: AfmoeConfig,
    reference: ReferenceLayers,
    *,
    num_layers: int,
    num_tokens: int,
    seed: int = 0,
    on_layer: Callable[[LayerResult], None] = lambda result: None,
) -> dict[str, float]:
    """Compare the first `num_layers` layers; returns the errors of `embedding` and `logits`.

    `files` is what our side reads, `reference` the other. One layer of one side is in memory at a time.
    """
    generator = torch.Generator().manual_seed(seed)
    ids_S = torch.randint(0, config.vocab_size, (num_tokens,), generator=generator)
    hidden_SD = reference.embedding_rows(ids_S)
    ours_SD = torch.cat([files.reader.read_rows(EMBEDDING, range(row, row + 1)) for row in ids_S.tolist()])
    ends = {"embedding": relative_error(ours_SD.float(), hidden_SD)}
    theirs = ours = None
    for layer in range(num_layers):
        theirs = _run_theirs(reference, layer, hidden_SD)
        result = LayerResult(
            layer,
            (config.layer_types or [])[layer].removesuffix("_attention"),
            "dense" if layer < config.num_dense_layers else "experts",
        )
        ours = _run_ours(files, config, layer, hidden_SD, result)
        _compare(ours, theirs, result)
        on_layer(result)
        hidden_SD = theirs.branches["output"]
    assert ours is not None
    assert theirs is not None
    ends["logits"] = _logits_error(files, config, reference, ours.last_SD, theirs.last_SD)
    return ends


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """DESIGN's measure. 0 for two zeros."""
    difference = (ours.double() - theirs.double()).norm().item()
    return 0.0 if difference == 0 else difference / max(theirs.double().norm().item(), 1e-30)


def _run_theirs(reference: ReferenceLayers, layer: int, hidden_SD: Tensor) -> _Run:
    body: Any = reference.model_of(layer).model
    mlp = body.layers[0].mlp
    run = _run(body, hidden_SD)
    if run.scores_TE is not None:
        run.scores_TE = run.scores_TE + mlp.expert_bias
        rows_ED = _rows(run, len(mlp.expert_bias))
        if isinstance(mlp.experts, nn.ModuleList):
            # transformers before its experts were stacked
            run.experts_ED = torch.stack(
                [expert(row) for expert, row in zip(mlp.experts, rows_ED, strict=True)]
            )
        else:
            ids_E1 = torch.arange(len(rows_ED))[:, None]
            run.experts_ED = mlp.experts(rows_ED, ids_E1, torch.ones(len(rows_ED), 1))
    return run


def _run_ours(
    files: ModelFiles, config: AfmoeConfig, layer: int, hidden_SD: Tensor, result: LayerResult
) -> _Run:
    model = _our_layer(files, config, layer)
    for name, tensor in model.layers[0].state_dict().items():
        if not tensor.isfinite().all():
            result.non_finite.append(layer_prefix(layer) + name)
    run = _run(model, hidden_SD)
    if run.scores_TE is not None:
        experts = next(iter(moe_blocks(model))).experts
        ends_E = torch.arange(1, config.num_experts + 1, dtype=torch.int32)
        run.experts_ED = experts(_rows(run, config.num_experts), ends_E)
        for name, weights in experts.named_parameters():
            result.same_experts += [(name, *pair) for pair in _equal_pairs(weights)]
    return run


def _our_layer(files: ModelFiles, config: AfmoeConfig, layer: int) -> AfmoeModel:
    """A model whose only layer is number `layer`, through our own conversion."""
    one = dataclasses.replace(
        config,
        num_hidden_layers=1,
        num_dense_layers=int(layer < config.num_dense_layers),
        layer_types=[(config.layer_types or [])[layer]],
        mup_enabled=config.mup_enabled and layer == 0,
        vocab_size=1,
        pad_token_id=None,
    )
    with torch.device("meta"):
        model = AfmoeModel(one)
    model.to_empty(device="cpu")
    state = model.state_dict()
    for key, tensor in files.read_layer(layer).items():
        state[key.replace(layer_prefix(layer), "layers.0.")].copy_(tensor)
    model.norm.weight.copy_(files.read_top("model.norm.weight"))
    return model.eval()


def _run(model: Any, hidden_SD: Tensor) -> _Run:
    """One layer of either side: their parts that matter here have the same names."""
    layer = model.layers[0]
    parts = {
        "attention": layer.post_attention_layernorm,
        "feed_forward": layer.post_mlp_layernorm,
        "output": layer,
        "normed": layer.pre_mlp_layernorm,
    }
    is_moe = "router" in dict(layer.mlp.named_children())
    if is_moe:
        parts |= {"router": layer.mlp.router, "gate": layer.mlp.router.gate}
    with _caught(parts) as caught:
        last_BSD = model(inputs_embeds=hidden_SD[None]).last_hidden_state
    output = caught["output"]
    run = _Run(
        {
            "attention": caught["attention"][0],
            "feed_forward": caught["feed_forward"][0],
            "output": (output[0] if isinstance(output, tuple) else output)[0],
        },
        caught["normed"][0],
        last_SD=last_BSD[0],
    )
    if is_moe:
        routing = caught["router"]
        if isinstance(routing, Routing):
            run.expert_ids_TK, run.scores_TE = routing.expert_ids_TK, routing.scores_TE
        else:
            # with or without logits and weights before it, by transformers' version
            run.expert_ids_TK, run.scores_TE = routing[-1], caught["gate"].float().sigmoid()
    return run


@contextmanager
def _caught(parts: dict[str, nn.Module]) -> Iterator[dict[str, Any]]:
    """Name to output of each module that runs inside."""
    outputs: dict[str, Any] = {}

    def catch(name: str) -> Callable:
        return lambda module, inputs, output: outputs.__setitem__(name, output)

    handles = [module.register_forward_hook(catch(name)) for name, module in parts.items()]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _rows(run: _Run, num_experts: int) -> Tensor:
    """One row of real input for each expert."""
    return run.normed_TD[torch.arange(num_experts) % len(run.normed_TD)]


def _compare(ours: _Run, theirs: _Run, result: LayerResult) -> None:
    kept_T = torch.ones(len(theirs.normed_TD), dtype=torch.bool)
    if theirs.experts_ED is not None and ours.experts_ED is not None:
        assert theirs.expert_ids_TK is not None
        result.num_experts_reached = theirs.expert_ids_TK.unique().numel()
        kept_T = ~_is_tie(ours, theirs)
        result.num_ties = int((~kept_T).sum())
        pairs = zip(ours.experts_ED, theirs.experts_ED, strict=True)
        errors = [relative_error(*pair) for pair in pairs]
        result.worst_expert = max(range(len(errors)), key=lambda e: (errors[e] != errors[e], errors[e]))
        result.errors["experts"] = errors[result.worst_expert]
    for name in ("attention", "feed_forward", "output"):
        rows_T = torch.ones_like(kept_T) if name == "attention" else kept_T
        result.errors[name] = relative_error(ours.branches[name][rows_T], theirs.branches[name][rows_T])


def _is_tie(ours: _Run, theirs: _Run) -> Tensor:
    """Tokens for which the sides chose other experts although the scores leave it open."""
    assert theirs.scores_TE is not None
    chosen = []
    for run in (ours, theirs):
        assert run.expert_ids_TK is not None
        chosen.append(
            torch.zeros_like(theirs.scores_TE, dtype=torch.bool).scatter(1, run.expert_ids_TK, True)
        )
    only_ours_TE, only_theirs_TE = chosen[0] & ~chosen[1], chosen[1] & ~chosen[0]
    best_T = theirs.scores_TE.masked_fill(~only_theirs_TE, -torch.inf).amax(1)
    worst_T = theirs.scores_TE.masked_fill(~only_ours_TE, torch.inf).amin(1)
    return only_theirs_TE.any(1) & ((best_T - worst_T).abs() <= TIE)


def _equal_pairs(weights: Tensor) -> list[tuple[int, int]]:
    """Experts with the same tensor: candidates by the sum of their bits, then compared."""
    sums = weights.detach().reshape(len(weights), -1).view(torch.int32).sum(1, dtype=torch.int64).tolist()
    first: dict[int, int] = {}
    pairs = []
    for expert, total in enumerate(sums):
        other = first.setdefault(total, expert)
        if other != expert and torch.equal(weights[other], weights[expert]):
            pairs.append((other, expert))
    return pairs


def _logits_error(
    files: ModelFiles, config: AfmoeConfig, reference: ReferenceLayers, ours_SD: Any, theirs_SD: Any
) -> float:
    """Over the whole vocabulary, a piece at a time."""
    key = EMBEDDING if config.tie_word_embeddings else HEAD
    difference = total = 0.0
    for start in range(0, config.vocab_size, _VOCABULARY_PIECE):
        rows = range(start, min(start + _VOCABULARY_PIECE, config.vocab_size))
        ours_SV = F.linear(ours_SD, files.reader.read_rows(key, rows).float())
        theirs_SV = F.linear(theirs_SD, reference.head_rows(rows))
        difference += (ours_SV.double() - theirs_SV.double()).square().sum().item()
        total += theirs_SV.double().square().sum().item()
    return 0.0 if difference == 0 else (difference / max(total, 1e-60)) ** 0.5
