"""What a Muse Spark checkpoint's config says, and the tensors that such a checkpoint holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpurt.buffer import nvfp4

PREFIX = "model.language_model"


@dataclass(frozen=True)
class MuseSparkConfig:
    """What a checkpoint's text config says. The tuples have one value a layer."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int  # positions the model was made for
    eps: float
    post_eps: float  # of the norms after attention, an expert and the MLP
    thetas: tuple[float, ...]  # 0: nothing is rotated
    windows: tuple[int, ...]  # 0: all positions
    sparse: tuple[bool, ...]  # experts, or a dense MLP
    qk_scale: float  # of the scores, on top of 1 / sqrt(D)
    output_multiplier: float  # of logits and router logits
    softcap: float
    gate_temperature: float
    intermediate: int  # of a dense MLP
    experts: int
    top_k: int
    moe_hidden: int
    moe_intermediate: int
    routed_factor: float = 1.0
    quantised: frozenset[int] = field(default_factory=frozenset)  # layers with nvfp4 experts
    tied: bool = False
    architecture: str = "muse_spark"

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that a checkpoint must hold."""
        shapes: dict[str, tuple[int, ...]] = {
            f"{PREFIX}.embed_tokens.weight": (self.vocab, self.hidden)
        }
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for layer in range(self.layers):
            at, hidden = f"{PREFIX}.layers.{layer}", self.hidden
            own: dict[str, tuple[int, ...]] = {
                "input_layernorm.weight": (hidden,),
                "self_attn.q_proj.weight": (q, hidden),
                "self_attn.gate_proj.weight": (q, hidden),
                "self_attn.k_proj.weight": (kv, hidden),
                "self_attn.v_proj.weight": (kv, hidden),
                "self_attn.o_proj.weight": (hidden, q),
                "post_attention_residual_gate.gate": (hidden,),
                "pre_feedforward_layernorm.weight": (hidden,),
                "post_feedforward_layernorm.weight": (hidden,),
                "post_feedforward_residual_gate.gate": (hidden,),
            }
            own |= self._moe(layer) if self.sparse[layer] else self._dense()
            shapes |= {f"{at}.{name}": shape for name, shape in own.items()}
        shapes[f"{PREFIX}.norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        return shapes

    def tensor_dtypes(self) -> dict[str, str]:
        """Tensors that must be stored in one dtype; all others in any float dtype."""
        experts = [f"{PREFIX}.layers.{layer}.mlp.experts." for layer in sorted(self.quantised)]
        dtypes: dict[str, str] = {}
        for at in experts:
            for half in ("gate_up_proj", "down_proj"):
                dtypes |= {f"{at}{half}": "u8", f"{at}{half}_weight_scale": "e4m3"}
        return dtypes

    def ignored_tensors(self) -> list[str]:
        """Tensors that may be there and that this forward pass does not read."""
        names = ["lm_head.weight"] if self.tied else []
        for layer in sorted(self.quantised):
            at = f"{PREFIX}.layers.{layer}.mlp.experts"
            names += [f"{at}.gate_up_proj_input_scale", f"{at}.down_proj_input_scale"]
        return names

    def _dense(self) -> dict[str, tuple[int, ...]]:
        wide = (self.intermediate, self.hidden)
        return {
            "mlp.gate_proj.weight": wide,
            "mlp.up_proj.weight": wide,
            "mlp.down_proj.weight": (self.hidden, self.intermediate),
        }

    def _moe(self, layer: int) -> dict[str, tuple[int, ...]]:
        experts, width, inner = self.experts, self.moe_hidden, self.moe_intermediate
        shapes: dict[str, tuple[int, ...]] = {
            "mlp.gate.weight": (experts, self.hidden),
            "mlp.gate.e_score_correction_bias": (experts,),
            "mlp.pre_expert_proj.weight": (width, self.hidden),
            "mlp.pre_expert_norm.weight": (width,),
            "mlp.experts.post_expert_norm.weight": (width,),
            "mlp.post_expert_proj.weight": (self.hidden, width),
        }
        for name, n, k in (("gate_up_proj", 2 * inner, width), ("down_proj", width, inner)):
            at = f"mlp.experts.{name}"
            if layer not in self.quantised:
                shapes[at] = (experts, n, k)
                continue
            shapes[at] = (experts, n, k // 2)
            shapes[f"{at}_weight_scale"] = (experts, n, k // nvfp4.block)
            scales = (experts, 2) if name == "gate_up_proj" else (experts,)
            shapes[f"{at}_weight_scale_2"] = scales
        return shapes
