"""nano on the GPU: right answers, the same text with its drafter, one launch for all requests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpurt.loaders import Model, load_model
from gpurt.runtime import Runtime
from gpurt.serving import Drafting, encode_chat, model_graph
from tools.train.evaluate import answer_text
from tools.train.problem import is_right, make

pytestmark = pytest.mark.timeout(300)

PROBLEMS = [make((107 << 32) + i, test=True) for i in range(12)]


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with Runtime("cuda", resident=True) as opened:
        yield opened


def replies(runtime: Runtime, model: Model, draft: str) -> list[list[int]]:
    """Tokens of every problem; all but the first are taken by the kernel that is there."""
    graph = model_graph(model, "cuda", context=256, drafting=Drafting(draft))
    texts, steps = [], 0.0
    for number, problem in enumerate(PROBLEMS):
        prompt = encode_chat(model, [{"role": "user", "content": problem.question}])
        request = runtime.submit(graph, prompt, max_tokens=150, stop_ids=model.stop_ids)
        texts.append(request.result().token_ids)
        assert request.stats.launches == (1 if number == 0 else 0)
        steps += (len(texts[-1]) - 1) / (request.stats.accepted_per_step or 1.0)
    assert sum(len(text) - 1 for text in texts) / steps > (5 if draft == "dflash" else 0.99)
    return texts


def test_answers_are_right_and_the_same_with_the_drafter(runtime: Runtime) -> None:
    model = load_model("nano")
    plain = replies(runtime, model, "none")
    for problem, tokens in zip(PROBLEMS, plain, strict=True):
        assert is_right(problem, answer_text(model, tokens)), problem.question
    assert replies(runtime, model, "dflash") == plain
