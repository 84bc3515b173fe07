"""The torch peers of the bench compute what our models compute: else their times mean nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from gpurt.bench import made_up, models, shapes
from gpurt.graphs import llama, qwen3_moe
from gpurt.graphs.llama import LlamaConfig
from gpurt.graphs.qwen3_moe import Qwen3MoeConfig
from gpurt.graphs.reference import llama as plain
from gpurt.graphs.reference import muse_slice
from gpurt.graphs.reference import muse_spark as reference_muse
from gpurt.graphs.reference.decode import Decoder
from gpurt.graphs.reference.transformers_llama import Llama, peer_model
from gpurt.runtime import Runtime

pytestmark = pytest.mark.reference

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
COUNT = 6
SMALL = {
    "llama": models.small_model(replace(shapes.LLAMA_1B, eps=1e-4)),
    "llama-untied": models.small_model(shapes.LLAMA_8B),
    "qwen3": replace(models.small_model(shapes.SMOLLM2_135M), qk_norm=True, architecture="qwen3"),
    "qwen3-moe": models.small_model(shapes.QWEN3_30B_A3B),
}


def tensors(config: LlamaConfig) -> dict[str, torch.Tensor]:
    return plain.dequantised(made_up.weights(config))


def decoder(config: LlamaConfig) -> Decoder:
    return Decoder(config, 32, tensors(config), device="cpu", dtype=torch.float32)


def ours(config: LlamaConfig) -> list[int]:
    build = qwen3_moe.build if isinstance(config, Qwen3MoeConfig) else llama.build
    graph = build(config, made_up.weights(config), rows=4, context=32, weight_dtype="f32")
    with Runtime("host", workers=2) as runtime:
        request = runtime.submit(graph, PROMPT, max_tokens=COUNT, ignore_eos=True)
        return request.result(60).token_ids


@pytest.mark.parametrize("name", SMALL)
def test_a_decoder_over_a_static_cache_makes_our_tokens(name: str) -> None:
    model = decoder(SMALL[name])
    seen = []
    with torch.no_grad():
        model.prefill(torch.tensor(PROMPT))
        for _ in range(COUNT):
            seen.append(int(model.token))
            model.step()
    assert seen == ours(SMALL[name])


def test_steps_of_one_row_and_a_whole_prompt_give_the_same_logits() -> None:
    config = SMALL["llama-untied"]
    whole, single = decoder(config), decoder(config)
    tokens = torch.tensor(PROMPT)
    with torch.no_grad():
        want = whole.forward(tokens, torch.arange(len(PROMPT)), whole=True)[-1]
        for at in range(len(PROMPT)):
            got = single.forward(tokens[at : at + 1], torch.tensor([at]))[-1]
    assert torch.allclose(got, want, atol=1e-4)
    assert torch.allclose(want, plain.forward(config, tensors(config), PROMPT)[-1], atol=1e-4)


def test_made_experts_have_the_shapes_of_given_ones() -> None:
    config = SMALL["qwen3-moe"]
    assert isinstance(config, Qwen3MoeConfig)
    given = decoder(config)
    made = Decoder(config, 32, device="cpu", dtype=torch.float32)
    for own, other in zip(given.layers, made.layers, strict=True):
        assert {n: w.shape for n, w in own.items()} == {n: w.shape for n, w in other.items()}
    made.step()
    assert int(made.position) == 1


@pytest.mark.parametrize("rows", [1, 4])
def test_a_slice_of_one_rank_is_muse_spark(rows: int) -> None:
    config = replace(models.small_muse(shapes.MUSE_SPARK), windows=(6, 0, 6, 0))
    weights = reference_muse.dequantised(made_up.weights(config))
    model = muse_slice.Slice(
        config,
        32,
        muse_slice.plain_experts,
        rows=rows,
        weights=weights,
        device="cpu",
        dtype=torch.float32,
    )
    tokens = [int(t) for t in np.random.default_rng(4).integers(0, config.vocab, 12)]
    seen = []
    with torch.no_grad():
        want = reference_muse.forward(config, weights, tokens)
        for at in range(0, len(tokens), rows):
            model.tokens.copy_(torch.tensor(tokens[at : at + rows]))
            model.step()
            seen.append(model.logits)
    assert torch.allclose(torch.cat(seen), want, atol=1e-3)


def test_a_made_slice_has_a_ranks_shapes_and_takes_a_forced_choice() -> None:
    config, ranks = models.small_muse(shapes.MUSE_SPARK), 2
    used: list[tuple[muse_slice.Half, muse_slice.Routes]] = []

    def experts(half: Any, x: torch.Tensor, routes: Any, y: torch.Tensor) -> None:
        assert x.shape[1] == half.k
        used.append((half, routes))
        y.zero_()

    table = torch.tensor([[0, 3, 5], [1, 3, 7]])
    model = muse_slice.Slice(
        config, 32, experts, rows=2, ranks=ranks, forced=lambda _: table, device="cpu"
    )
    model.step()
    assert model.logits.shape == (2, config.vocab // ranks)
    up, down = used[2], used[3]
    inner = config.moe_intermediate // ranks
    assert (up[0].n, down[0].k) == (2 * inner, inner)
    assert up[0].scales is not None
    counts, users, pairs = up[1].counts, up[1].users, up[1].pairs
    assert counts[[0, 1, 3, 5, 7]].tolist() == [1, 1, 2, 1, 1]
    assert (users[3].tolist(), pairs[3].tolist()) == ([0, 1], [1, 4])
    assert torch.equal(down[1].users, pairs), "the second half reads what the first wrote"


def test_transformers_model_has_our_rotary_scaling() -> None:
    """LLAMA_1B's: without it, logits at far positions are another model's."""
    config = replace(SMALL["llama"], rope_theta=100.0)
    model = peer_model(config, tensors(config))
    tokens = [int(t) for t in np.random.default_rng(2).integers(0, config.vocab, 24)]
    with torch.no_grad():
        got = model(torch.tensor([tokens])).logits[0]
    assert torch.allclose(got, plain.forward(config, tensors(config), tokens), atol=1e-4)


def test_transformers_peer_states_a_rate() -> None:
    config = SMALL["llama"]
    peer = Llama(config, made_up.weights(config), threads=torch.get_num_threads())
    assert peer.decode(PROMPT, 3) > 0
