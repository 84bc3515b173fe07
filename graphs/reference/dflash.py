"""DFlash in plain torch, to read beside dflash.py and to train with. No cache, no tasks.

A module whose parameters have the checkpoint's names. One call runs many blocks over the same
context: block j starts at position anchors[j], and sees the features of all positions before it.
The embedding and the head are the target's, so the caller passes rows of one and hands the other.
tests/models holds it to the `dflash` package.
Legend: N sequences, T context positions, J blocks, B rows of a block, F = taps x hidden, H heads,
K kv heads, D head dimension, C candidates.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from gpurt.graphs.dflash import DFlashConfig
from gpurt.graphs.reference.muse_spark import rms, rotate
from gpurt.graphs.weights import rotary_frequencies, rotary_table


class DFlash(nn.Module):
    """A drafter with random weights; its convolutions begin as the identity."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config, hidden = config, config.hidden
        self.fc = nn.Linear(len(config.taps) * hidden, hidden, bias=False)
        self.hidden_norm = Norm(hidden, config.eps)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.layers))
        self.norm = Norm(hidden, config.eps)
        if config.selector_rank:
            self.candidate_selector = Selector(config)
        frequencies = rotary_frequencies(config.theta, config.head_dim)
        table = torch.from_numpy(rotary_table(frequencies, config.context))
        self.register_buffer("rope", table, persistent=False)

    def forward(
        self, features_NTF: torch.Tensor, anchors_NJ: torch.Tensor, x_NJBE: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states of all rows of all blocks, after the last norm; shaped as x.

        features_NTF: the target's stream of positions 0 to T - 1 after each tap, beside each other.
        anchors_NJ: the position of each block's row 0. x_NJBE: `embedded` rows of the anchors and
        masks. Row 0's state is of no use: row i proposes the token of position anchor + i.
        """
        context = self.hidden_norm(self.fc(features_NTF))
        for layer in self.layers:
            x_NJBE = layer(context, anchors_NJ, x_NJBE, self.rope)
        return self.norm(x_NJBE)

    def embedded(self, embedding: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Blocks of anchor token ids and masks, as rows of the target's embedding [vocab, hidden].

        Returns [*anchors.shape, B, hidden]. The rows are raw: a target that norms its own does not
        here.
        """
        masks = torch.full_like(anchors, self.config.mask_token)[..., None]
        ids = torch.cat([anchors[..., None]] + [masks] * (self.config.block - 1), -1)
        return functional.embedding(ids, embedding) * self.config.input_scale

    def logits(self, hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """Unary scores [..., vocab] in float32; head: the target's, [vocab, hidden]."""
        logits = (hidden @ head.T).float() * self.config.output_multiplier
        cap = self.config.softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def propose(
        self,
        hidden_BE: torch.Tensor,
        anchor: int,
        head: torch.Tensor,
        temperature: float = 0.0,
        uniforms: list[float] | None = None,
    ) -> list[int]:
        """One block's proposals from the hidden states of its masks.

        temperature above 0: slot i is drawn from its scores' softmax by uniforms[i].
        """
        path: list[int] = []
        scores = self.logits(hidden_BE, head)
        for slot, row in enumerate(scores):
            unary, ids = candidates(row, self.config.selector_top_k if self.selects else None)
            if self.selects:
                before = torch.tensor(path[-1] if path else anchor, device=ids.device)
                unary = unary + self.candidate_selector(hidden_BE[slot], before, ids)
            index = int(unary.argmax())
            if temperature > 0 and uniforms is not None:
                index = drawn(unary / temperature, uniforms[slot])
            path.append(int(ids[index]))
        return path

    @property
    def selects(self) -> bool:
        """Whether there is a selector: DFlash 2."""
        return self.config.selector_rank > 0


class Layer(nn.Module):
    """Attention and an MLP, each with its norm, its convolution and its residual add."""

    def __init__(self, config: DFlashConfig, layer: int) -> None:
        super().__init__()
        hidden, eps = config.hidden, config.eps
        self.input_layernorm, self.self_attn = Norm(hidden, eps), Attention(config, layer)
        self.post_attention_layernorm, self.mlp = Norm(hidden, eps), Mlp(config)
        if config.conv_taps:
            self.attention_conv = Convolution(hidden, config.conv_taps, config.conv_group)
            self.mlp_conv = Convolution(hidden, config.conv_taps, config.conv_group)
        self.convolves = config.conv_taps > 0

    def forward(
        self,
        context_NTE: torch.Tensor,
        anchors_NJ: torch.Tensor,
        x: torch.Tensor,
        rope: torch.Tensor,
    ) -> torch.Tensor:
        """The blocks after this layer. The context is not normed or convolved here."""
        a = self.input_layernorm(x)
        if not self.convolves:
            x = x + self.self_attn(context_NTE, anchors_NJ, a, rope)
            return x + self.mlp(self.post_attention_layernorm(x))
        a, after = self.attention_conv(a)
        x = x + after(self.self_attn(context_NTE, anchors_NJ, a, rope))
        b, after = self.mlp_conv(self.post_attention_layernorm(x))
        return x + after(self.mlp(b))


class Attention(nn.Module):
    """A block's rows over the context before its anchor, and over the block itself."""

    def __init__(self, config: DFlashConfig, layer: int) -> None:
        super().__init__()
        self.config, hidden = config, config.hidden
        self.window, self.causal = config.windows[layer], config.causal[layer]
        width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(hidden, width, bias=False)
        self.k_proj = nn.Linear(hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(width, hidden, bias=False)
        self.q_norm, self.k_norm = (
            Norm(config.head_dim, config.eps),
            Norm(config.head_dim, config.eps),
        )

    def forward(
        self,
        context_NTE: torch.Tensor,
        anchors_NJ: torch.Tensor,
        a_NJBE: torch.Tensor,
        rope: torch.Tensor,
    ) -> torch.Tensor:
        """Output rows [N, J, B, hidden]."""
        n, blocks, rows, _ = a_NJBE.shape
        length, head_dim = context_NTE.shape[1], self.config.head_dim
        own_NS = (anchors_NJ[..., None] + torch.arange(rows, device=rope.device)).flatten(1)
        a_NSE = a_NJBE.flatten(1, 2)
        before_NT = torch.arange(length, device=rope.device).expand(n, -1)
        at_NU = torch.cat([before_NT, own_NS], 1)
        both_NUE = torch.cat([context_NTE, a_NSE], 1)
        q = turned(self.q_norm(heads(self.q_proj(a_NSE), head_dim)), rope, own_NS)
        k = turned(self.k_norm(heads(self.k_proj(both_NUE), head_dim)), rope, at_NU)
        v = heads(self.v_proj(both_NUE), head_dim)
        seen_NSU = self.visible(own_NS, at_NU, anchors_NJ, rows, length)
        out = functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            seen_NSU[:, None],
            enable_gqa=True,
        )
        return self.o_proj(out.transpose(1, 2).reshape(n, blocks, rows, -1))

    def visible(
        self,
        own_NS: torch.Tensor,
        at_NU: torch.Tensor,
        anchors_NJ: torch.Tensor,
        rows: int,
        length: int,
    ) -> torch.Tensor:
        """[N, S, U]: which keys each row of all blocks sees."""
        distance = own_NS[:, :, None] - at_NU[:, None]
        anchor_NS = anchors_NJ.repeat_interleave(rows, 1)
        context = at_NU[:, None, :length] < anchor_NS[..., None]
        block = torch.arange(own_NS.shape[1], device=own_NS.device) // rows
        same = (block[:, None] == block).expand(len(own_NS), -1, -1)
        seen = torch.cat([context, same], -1)
        if self.causal:
            seen = seen & (distance >= 0)
        return seen & (distance.abs() < self.window) if self.window else seen


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows in, rows out."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Convolution(nn.Module):
    """Two convolutions along a block, of a sublayer's input and of its output.

    Tap i multiplies the row i before (zeros before row 0) by a constant of its channel, plus a
    coefficient of its channel's group that is computed from the sublayer's input.
    """

    def __init__(self, hidden: int, taps: int, group: int) -> None:
        super().__init__()
        self.taps, self.group = taps, group
        kernel = torch.zeros(2, taps, hidden)
        kernel[:, 0] = 1
        self.base_kernel = nn.Parameter(kernel)
        self.kernel_projection = nn.Linear(hidden, 2 * taps * (hidden // group), bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, u: torch.Tensor) -> tuple[torch.Tensor, After]:
        """The sublayer's input u [..., B, hidden] convolved, and what convolves its output."""
        d = self.kernel_projection(u).unflatten(-1, (2, self.taps, -1))
        kernels = self.base_kernel.to(u.dtype) + d.repeat_interleave(self.group, -1)
        return convolved(u, kernels[..., 0, :, :]), After(kernels[..., 1, :, :])


class After:
    """The second convolution of a sublayer, with its coefficients."""

    def __init__(self, kernels: torch.Tensor) -> None:
        self.kernels = kernels

    def __call__(self, z: torch.Tensor) -> torch.Tensor:
        """The sublayer's output convolved."""
        return convolved(z, self.kernels)


class Selector(nn.Module):
    """Scores of candidates after a predecessor, on top of their unary scores."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        shape = (config.vocab, config.selector_rank)
        self.predecessor_codebook = nn.Parameter(0.02 * torch.randn(shape))
        self.successor_codebook = nn.Parameter(0.02 * torch.randn(shape))
        self.hidden_projection = nn.Linear(config.hidden, config.selector_rank, bias=False)

    def forward(
        self, hidden: torch.Tensor, before: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """Scores [..., C] of hidden [..., hidden], predecessors [...] and candidates [..., C]."""
        pair = functional.embedding(before, self.predecessor_codebook)
        pair = pair * self.hidden_projection(hidden)
        after = functional.embedding(ids, self.successor_codebook)
        return (pair[..., None, :] * after).sum(-1)


class Norm(nn.Module):
    """RMS norm with a gain."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Reduced in float32, returned in x's dtype."""
        return (rms(x, self.eps) * self.weight.float()).to(x.dtype)


def candidates(scores: torch.Tensor, count: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The best `count` scores of the last axis and their ids; of equal ones the lowest id first."""
    best, ids = scores.sort(dim=-1, descending=True, stable=True)
    return best[..., :count], ids[..., :count]


def drawn(scores: torch.Tensor, uniform: float) -> int:
    """The first index, by falling score, at which the softmax's running sum exceeds `uniform`: as
    `sample` draws the target's tokens, so that equal numbers mostly mean equal tokens.
    """
    best, order = candidates(scores.double(), None)
    running = best.softmax(-1).cumsum(-1)
    return int(order[min(int((running <= uniform).sum()), len(running) - 1)])


def convolved(z: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
    """Sum over taps of kernels [..., B, taps, hidden] times z [..., B, hidden], shifted down."""
    out = kernels[..., 0, :] * z
    for tap in range(1, kernels.shape[-2]):
        out = out + kernels[..., tap, :] * functional.pad(z, (0, 0, tap, 0))[..., : z.shape[-2], :]
    return out


def heads(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[N, rows, width] as [N, rows, heads, D]."""
    return x.unflatten(-1, (-1, head_dim))


def turned(x_NSHD: torch.Tensor, rope: torch.Tensor, at_NS: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of each row at its position."""
    n, rows = at_NS.shape
    flat = rotate(x_NSHD.flatten(0, 1), rope[at_NS.flatten()])
    return flat.unflatten(0, (n, rows))
