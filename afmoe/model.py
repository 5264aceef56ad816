"""The AFMoE decoder: `AfmoeModel` (embeddings to last hidden states) and `AfmoeForCausalLM` (with head and
loss).

Equal to transformers' `AfmoeForCausalLM` in fp32 on unpadded single documents, and stricter elsewhere:
padding and other documents of a row are seen by nobody.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from afmoe.attention.cache import GrowingCache, KeyValueCache
from afmoe.attention.layout import SequenceLayout, sequence_layout
from afmoe.attention.static_cache import SlotLayout, StaticCache
from afmoe.config import SLIDING_ATTENTION, AfmoeConfig
from afmoe.decoder_layer import DecoderLayer
from afmoe.errors import ConfigError
from afmoe.generation import Caching, Sampling, generate
from afmoe.hardware import Hardware
from afmoe.initialization import init_weights
from afmoe.language_head import LanguageHead
from afmoe.layer_compilation import running_compiled, same_graph_again
from afmoe.layers import RMSNorm, RotaryEmbedding
from afmoe.losses import IGNORED, next_token_targets, token_cross_entropy
from afmoe.model_plugins import ModelPlugins
from afmoe.moe.block import MoeBlock, agree, moe_blocks
from afmoe.outputs import CausalLMOutput, ModelOutput
from afmoe.recomputation import part

log = logging.getLogger(__name__)

# static caches come in multiples of this, so that a step compiled for one length serves the lengths near it
_CAPACITY_STEP = 128


class AfmoeModel(nn.Module):
    """Embeddings, decoder layers, last norm. Each plugin is chosen by its name or its `Config`."""

    recomputes_layers = False
    """Whether backward computes again what lies inside each decoder layer."""
    has_compiled_layers = False
    """Whether the layers went through `compile_each`."""

    def __init__(
        self,
        config: AfmoeConfig,
        attention: Any = "sdpa",
        compute: Any = "native",
        dispatch: Any = "local",
        hardware: Hardware | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        plugins = ModelPlugins(config, attention, compute, dispatch, hardware)
        self.attention, self.dispatch = plugins.attention, plugins.dispatch
        self.rotary = RotaryEmbedding(config)
        # as in transformers, the row of `pad_token_id` is not trained through the embedding
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, plugins) for index in range(config.num_hidden_layers)
        )
        kinds = config.layer_types or []
        self.attention.layer_kinds = frozenset(kind == SLIDING_ATTENTION for kind in kinds)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_order)
        self._has_warned_of_length = False
        self.init_weights()

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> ModelOutput:
        """As `AfmoeForCausalLM.forward`. With `cache` the tokens continue those that it holds."""
        hidden_BSD = self._embed(input_ids, inputs_embeds)
        layout = sequence_layout(
            (hidden_BSD.shape[0], hidden_BSD.shape[1]), hidden_BSD.device, position_ids, attention_mask
        )
        if cache is not None:
            layout = cache.extend(layout)
        # with explicit positions a long row may be a pack of short documents: to know would be to wait for
        # the device; a static cache was checked when it was made
        if position_ids is None and not isinstance(layout, SlotLayout):
            self._check_length(layout.num_keys)
        if self.rotary.depends_on_length and position_ids is not None:
            self._check_packing(layout)
        if self.config.mup_enabled:
            hidden_BSD = hidden_BSD * self.config.hidden_size**0.5
        prepared = self.attention.prepare(layout)
        rotary = self.rotary(layout.position_ids_BS, hidden_BSD.dtype)
        token_mask_T = None if layout.token_mask_BS is None else layout.token_mask_BS.flatten()
        shared = (prepared, rotary, token_mask_T, agree(self, hidden_BSD))
        hidden_BSD, router_logits = self._run_layers(hidden_BSD, shared, cache)
        return ModelOutput(self.norm(hidden_BSD), router_logits, layout)

    def _run_layers(
        self, hidden_BSD: Tensor, shared: tuple[Any, ...], cache: KeyValueCache | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Hidden states after the last layer, and the router's logits of each layer that has one."""
        is_training = torch.is_grad_enabled() and cache is None
        is_compiled = self.has_compiled_layers and not torch.compiler.is_compiling()
        router_logits = []
        with running_compiled(self.layers, is_training=is_training) if is_compiled else nullcontext():
            for index, layer in enumerate(self.layers):
                inputs = (hidden_BSD, *shared, None if cache is None else cache.layers[index])
                options = {"context_fn": partial(same_graph_again, layer)} if is_compiled else {}
                hidden_BSD, logits_TE = part(
                    layer, *inputs, is_recomputed=self.recomputes_layers and is_training, **options
                )
                if logits_TE is not None:
                    router_logits.append(logits_TE)
        return hidden_BSD, tuple(router_logits)

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise ConfigError("give exactly one of input_ids and inputs_embeds")
        if inputs_embeds is not None:
            return inputs_embeds
        assert input_ids is not None
        if input_ids.dim() != 2:
            raise ConfigError(f"input_ids must be [batch, sequence], got {list(input_ids.shape)}")
        return self.embed_tokens(input_ids)

    def _check_length(self, length: int) -> None:
        """Say once that positions lie beyond those that the model was made for."""
        limit = self.config.max_position_embeddings
        if length > limit and not self._has_warned_of_length:
            log.warning("a sequence of %d tokens goes beyond max_position_embeddings=%d", length, limit)
            self._has_warned_of_length = True

    def _check_packing(self, layout: SequenceLayout) -> None:
        """Rotary frequencies that follow the longest document would change those packed with it."""
        is_start_BS = layout.position_ids_BS == 0
        if layout.token_mask_BS is not None:
            is_start_BS = is_start_BS & layout.token_mask_BS
        is_packed = bool((is_start_BS.sum(1) > 1).any())
        if is_packed and int(layout.position_ids_BS.max()) >= self.rotary.original_length:
            raise ConfigError(
                f"rope_type={self.rotary.rope_type} cannot pack documents longer than "
                f"{self.rotary.original_length} tokens, because its frequencies depend on the longest one; "
                "pack shorter documents, or one a row"
            )

    def new_cache(self, max_tokens: int | None = None) -> KeyValueCache:
        """An empty cache for `forward`: a static one for that many tokens a row, None: one that grows.

        Raises `ConfigError` where the attention plugin cannot read a static one.
        """
        windows = [
            self.config.sliding_window if kind == SLIDING_ATTENTION else None
            for kind in self.config.layer_types or []
        ]
        if max_tokens is None:
            return GrowingCache(windows)
        device_type = self.embed_tokens.weight.device.type
        reason = self.attention.why_no_static_cache(device_type=device_type, is_compiled=False)
        if reason is not None:
            raise ConfigError(reason)
        self._check_length(max_tokens)
        return StaticCache(windows, -(-max_tokens // _CAPACITY_STEP) * _CAPACITY_STEP)

    def init_weights(self) -> None:
        """Draw every weight anew: matrices from N(0, initializer_range), norms 1, biases 0.

        Callable after `to_empty`, when the model was built on the meta device. The router's gate follows
        `router_init`.
        """
        init_weights(self, self.config)


class AfmoeForCausalLM(nn.Module):
    """AFMoE with its language head."""

    def __init__(
        self,
        config: AfmoeConfig,
        attention: Any = "sdpa",
        compute: Any = "native",
        dispatch: Any = "local",
        hardware: Hardware | None = None,
    ) -> None:
        """`attention`, `compute`, `dispatch`: a plugin's name or its `Config`; `hardware` None: this
        machine's.

        Raises `ConfigError` for an unknown choice, `MachineError` for one that the hardware cannot run.
        """
        super().__init__()
        self.config = config
        self.model = AfmoeModel(config, attention, compute, dispatch, hardware)
        self.lm_head = LanguageHead(config.hidden_size, config.vocab_size)
        init_weights(self.lm_head, config)
        self._tie_weights()

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_router_logits: bool = False,
        logits_to_keep: int | Tensor = 0,
        return_logits: bool | None = None,
        return_predictions: bool = False,
        max_labels: int | None = None,
    ) -> CausalLMOutput:
        """Logits of the next token and, given labels, their loss.

        `input_ids` [B, S] or `inputs_embeds` [B, S, D]. `position_ids` [B, S]: a 0 begins a new document,
        across whose border nothing is seen; None: one document a row. `attention_mask` [B, S]: 1 is a real
        token, None: all are. `labels` [B, S] are aligned with the tokens and shifted here; -100, padding and
        a document's first token do not count. `logits_to_keep`: logits of the last n positions only, or of
        the positions listed; 0 is all; the loss is over all positions in any case. `return_logits`: give
        logits although there are labels; without it those of all positions never exist. `return_predictions`:
        the likeliest token where a label counts. `max_labels`: how many labels count at most, where that is
        known on the host; a GPU then leaves the others out, as a CPU does by itself.
        """
        output = self.model(
            input_ids, position_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds
        )
        result = CausalLMOutput(router_logits=output.router_logits if output_router_logits else None)
        hidden_BSD = output.last_hidden_state
        if labels is None:
            result.logits = self.lm_head(_kept(hidden_BSD, logits_to_keep))
            return result
        targets_BS = next_token_targets(labels, output.layout)
        is_counted_BS = targets_BS != IGNORED
        result.num_labels = num_labels = is_counted_BS.sum()
        if return_logits:
            logits_BSV = self.lm_head(hidden_BSD)
            result.logits = _kept(logits_BSV, logits_to_keep)
            loss_sum = token_cross_entropy(logits_BSV, targets_BS)
            if return_predictions:
                result.predictions = logits_BSV.argmax(-1).masked_fill(~is_counted_BS, IGNORED)
        else:
            head = self.lm_head(
                hidden_BSD, targets_BS, max_labels=max_labels, with_predictions=return_predictions
            )
            loss_sum = head.loss_sum
            if return_predictions:
                result.predictions = head.predictions_T.view_as(targets_BS)
        result.loss_sum, result.loss = loss_sum, loss_sum / num_labels.clamp(min=1)
        return result

    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int = 32,
        *,
        attention_mask: Tensor | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        cache: str = "growing",
        compile: bool = False,
    ) -> Tensor:
        """Prompt and new tokens [B, S + new]; see `generate_tokens` and `Caching` in `afmoe.generation`."""
        return generate(
            self,
            input_ids,
            max_new_tokens,
            attention_mask=attention_mask,
            sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p),
            caching=Caching(kind=cache, compile=compile),
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
        )

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        attention: Any = "sdpa",
        compute: Any = "native",
        dispatch: Any = "local",
        hardware: Hardware | None = None,
    ) -> AfmoeForCausalLM:
        """The model in `directory` (`config.json` and safetensors, any known layout), stored in `dtype`."""
        # the one import against the direction: reading a checkpoint makes a model
        from afmoe.checkpoint.pretrained import load_pretrained

        return load_pretrained(
            directory,
            dtype=dtype,
            attention=attention,
            compute=compute,
            dispatch=dispatch,
            hardware=hardware,
        )

    def save_pretrained(
        self, directory: str | Path, layout: str = "hf", dtype: torch.dtype | None = None
    ) -> None:
        """Write config and weights to `directory`, named and shaped as `layout` says, stored in `dtype`.

        None: as they are; a selection bias stays fp32 in any case.
        """
        from afmoe.checkpoint.pretrained import save_pretrained

        save_pretrained(self, directory, layout, dtype)

    def init_weights(self) -> None:
        """Draw every weight anew, see `AfmoeModel.init_weights`."""
        self.model.init_weights()
        if not self.config.tie_word_embeddings:
            init_weights(self.lm_head, self.config)

    def num_parameters(self, active: bool = False) -> int:
        """Parameters in all or, `active`, those that one token goes through; embedding and head included.

        Experts that other processes hold count too.
        """
        total = sum(parameter.numel() for parameter in self.parameters())
        total += sum(block.experts.num_parameters_elsewhere for block in iter_moe_blocks(self))
        if not active:
            return total
        idle = self.config.num_experts - self.config.num_experts_per_tok
        per_expert = 3 * self.config.hidden_size * self.config.moe_intermediate_size
        return total - sum(idle * per_expert for _ in iter_moe_blocks(self))

    def on_weights_updated(self) -> None:
        """Call it after each optimizer step: compute plugins drop what they derived from the weights."""
        for block in iter_moe_blocks(self):
            block.compute.on_weights_updated()

    def _tie_weights(self) -> None:
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # leaving the meta device makes a new parameter of every module's, of tied ones too
        super()._apply(fn, recurse)
        self._tie_weights()
        return self


def iter_moe_blocks(model: nn.Module) -> Iterator[MoeBlock]:
    """The MoE block of each layer that has one, in order: of a bare, wrapped, sharded or compiled model."""
    return moe_blocks(model)


def _kept(x_BSX: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """The last positions (an int; 0: all) or the listed ones (a tensor of indices), as in transformers."""
    if isinstance(logits_to_keep, int):
        return x_BSX[:, -logits_to_keep:] if logits_to_keep else x_BSX
    return x_BSX[:, logits_to_keep]
