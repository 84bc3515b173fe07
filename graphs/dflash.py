"""DFlash, a block drafter: what its checkpoint's config says.

It reads the target's residual stream after some layers, and in one pass proposes a block: the
anchor (the token just decided) and masks in, one proposal a mask out. DFlash 2 adds a convolution
around every sublayer and a selector that walks a path through each slot's best candidates.
The embedding and the head are the target's. Source: arXiv 2602.06036; the `dflash` package.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DFlashConfig:
    """The tuples `windows` and `causal` have one value a layer."""

    hidden: int  # the target's
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int  # the target's
    context: int  # positions the drafter was made for
    eps: float
    theta: float
    windows: tuple[int, ...]  # 0: all positions
    causal: tuple[bool, ...]  # whether a row of a block sees only those before it
    taps: tuple[int, ...]  # layers of the target after which its stream is read
    block: int  # the anchor and its masks
    mask_token: int
    input_scale: float = 1.0  # of the target's embedding
    output_multiplier: float = 1.0  # of the target's logits
    softcap: float = 0.0  # 0: none
    conv_taps: int = 0  # rows that a convolution sees; 0: DFlash 1, as is selector_rank 0
    conv_group: int = 1  # channels that share a dynamic coefficient
    selector_rank: int = 0
    selector_top_k: int = 1  # candidates of a slot
    architecture: str = "dflash"

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that a checkpoint must hold."""
        hidden, head_dim = self.hidden, self.head_dim
        q, kv, wide = self.heads * head_dim, self.kv_heads * head_dim, self.intermediate
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, len(self.taps) * hidden),
            "hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
        }
        own: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, q),
            "self_attn.q_norm.weight": (head_dim,),
            "self_attn.k_norm.weight": (head_dim,),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (wide, hidden),
            "mlp.up_proj.weight": (wide, hidden),
            "mlp.down_proj.weight": (hidden, wide),
        }
        if self.conv_taps:
            coefficients = 2 * self.conv_taps * (hidden // self.conv_group)
            for conv in ("attention_conv", "mlp_conv"):
                own[f"{conv}.base_kernel"] = (2, self.conv_taps, hidden)
                own[f"{conv}.kernel_projection.weight"] = (coefficients, hidden)
        for layer in range(self.layers):
            shapes |= {f"layers.{layer}.{name}": shape for name, shape in own.items()}
        if self.selector_rank:
            at, rank = "candidate_selector", self.selector_rank
            shapes[f"{at}.predecessor_codebook"] = (self.vocab, rank)
            shapes[f"{at}.successor_codebook"] = (self.vocab, rank)
            shapes[f"{at}.hidden_projection.weight"] = (rank, hidden)
        return shapes

    def tensor_dtypes(self) -> dict[str, str]:
        """Tensors that must be stored in one dtype: none."""
        return {}

    def ignored_tensors(self) -> list[str]:
        """Tensors that may be there and are not read: copies of the target's, as exporters add."""
        return ["embed_tokens.weight", "lm_head.weight"]


def default_taps(target_layers: int, layers: int) -> tuple[int, ...]:
    """The target's layers that a config without a list means: evenly from 1 to the third last."""
    if layers == 1:
        return (target_layers // 2,)
    span = target_layers - 4
    return tuple(round(1 + i * span / (layers - 1)) for i in range(layers))
