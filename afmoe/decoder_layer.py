"""One layer of the decoder: attention and feed-forward, dense or with experts."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from afmoe.attention.cache import LayerCache
from afmoe.attention.layer import Attention
from afmoe.config import AfmoeConfig
from afmoe.layers import FeedForward, RMSNorm
from afmoe.model_plugins import ModelPlugins
from afmoe.moe.block import MoeBlock
from afmoe.recomputation import part


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each between two norms (before, and after, inside the residual branch)."""

    recomputes_parts = False
    """Whether backward computes again what lies inside attention, feed-forward and the last norm."""

    def __init__(self, config: AfmoeConfig, layer_index: int, plugins: ModelPlugins) -> None:
        super().__init__()

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_order)

        self.self_attn = Attention(config, layer_index, plugins.attention)
        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()
        self.pre_mlp_layernorm = norm()
        self.post_mlp_layernorm = norm()
        if layer_index < config.num_dense_layers:
            self.mlp = FeedForward(config.hidden_size, config.intermediate_size, config.hidden_act)
        else:
            self.mlp = MoeBlock(
                config,
                layer_index,
                compute=plugins.make_compute(),
                dispatcher=plugins.dispatcher,
                shared_expert=_shared_expert(config),
            )

    @property
    def leaves_graph(self) -> bool:
        """Whether `torch.compile` has to break its graph, because a plugin's call cannot stand in one."""
        plugins = [self.self_attn.plugin]
        if isinstance(self.mlp, MoeBlock):
            plugins += [self.mlp.compute, self.mlp.dispatcher]
        return any(plugin.leaves_graph for plugin in plugins)

    def forward(
        self,
        hidden_BSD: Tensor,
        prepared: Any,
        rotary: tuple[Tensor, Tensor],
        token_mask_T: Tensor | None = None,
        agreed: Any = None,
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The layer's output and, from a layer with experts, the router's logits [B*S, E].

        `agreed`: what the ranks that share the experts settled for this forward.
        """
        is_recomputed = self.recomputes_parts and cache is None
        hidden_BSD, normed_BSD = part(
            self._attend, hidden_BSD, prepared, rotary, cache, is_recomputed=is_recomputed
        )
        router_logits_TE = None
        if isinstance(self.mlp, MoeBlock):
            mixed_BSD, router_logits_TE = self.mlp(normed_BSD, token_mask_T, agreed)
        else:
            mixed_BSD = part(self.mlp, normed_BSD, is_recomputed=is_recomputed)
        mixed_BSD = part(self.post_mlp_layernorm, mixed_BSD, is_recomputed=is_recomputed)
        return hidden_BSD + mixed_BSD, router_logits_TE

    def _attend(
        self, hidden_BSD: Tensor, prepared: Any, rotary: tuple[Tensor, Tensor], cache: LayerCache | None
    ) -> tuple[Tensor, Tensor]:
        """The hidden states after attention, and as the feed-forward gets them."""
        attended_BSD = self.self_attn(self.input_layernorm(hidden_BSD), prepared, rotary, cache)
        hidden_BSD = hidden_BSD + self.post_attention_layernorm(attended_BSD)
        return hidden_BSD, self.pre_mlp_layernorm(hidden_BSD)


def _shared_expert(config: AfmoeConfig) -> FeedForward | None:
    """The expert that every token goes through, as wide as `num_shared_experts` routed ones."""
    if config.num_shared_experts == 0:
        return None
    width = config.moe_intermediate_size * config.num_shared_experts
    return FeedForward(config.hidden_size, width, config.hidden_act)
