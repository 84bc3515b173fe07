"""The torch peers of the bench compute what our models compute: else their times mean nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from gpurt.bench import cases, made_up, shapes
from gpurt.graphs import llama, qwen3_moe
from gpurt.graphs.llama import LlamaConfig
from gpurt.graphs.qwen3_moe import Qwen3MoeConfig
from gpurt.graphs.reference import llama as plain
from gpurt.graphs.reference.decode import Decoder
from gpurt.graphs.reference.transformers_llama import Llama, peer_model
from gpurt.runtime import Runtime

pytestmark = pytest.mark.reference

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
COUNT = 6
SMALL = {
    "llama": cases.small_model(replace(shapes.LLAMA_1B, eps=1e-4)),
    "llama-untied": cases.small_model(shapes.LLAMA_8B),
    "qwen3": replace(cases.small_model(shapes.SMOLLM2_135M), qk_norm=True, architecture="qwen3"),
    "qwen3-moe": cases.small_model(shapes.QWEN3_30B_A3B),
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
