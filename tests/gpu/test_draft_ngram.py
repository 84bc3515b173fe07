"""Prompt look-up on the GPU: its proposals, and the text that it must not change."""

from __future__ import annotations

from typing import Any

import pytest

from gpurt.graphs.drafters import add_drafter
from gpurt.graphs.ops.draft_ngram import look_up
from gpurt.runtime import Runtime
from tests.gpu.tiny_llama import tiny_llama

pytestmark = pytest.mark.gpu

PROMPT = [3, 17, 200, 3, 17, 5, 9, 3, 17]
COUNT = 60


@pytest.mark.parametrize("team", [16, 1])
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 4}])
def test_the_text_is_that_without_a_drafter(team: int, settings: dict[str, Any]) -> None:
    with Runtime("cuda:0", team_warps=team) as runtime:
        wanted = runtime.submit(tiny_llama(), PROMPT, max_tokens=COUNT, **settings).result(30)
        for proposals in (1, 3, 7, 8, 15):
            graph = add_drafter(tiny_llama(slots=2), "ngram", proposals)
            requests = [
                runtime.submit(graph, PROMPT, max_tokens=COUNT, **settings) for _ in range(3)
            ]
            for request in requests:
                assert request.result(30) == wanted
                assert request.stats.launches <= 1


def test_proposals_are_those_of_the_definition() -> None:
    with Runtime("cuda:0") as runtime:
        for length in range(1, 40):
            graph = add_drafter(tiny_llama(), "ngram")
            prompt = [(n * n) % 5 for n in range(length)]
            (token,) = runtime.submit(graph, prompt, max_tokens=1).result(30).token_ids
            row = runtime.read(graph, "step.proposals")[0]
            found = look_up([*prompt, token], 15)
            assert (row[0], row[1 : 1 + len(found)].tolist()) == (len(found), found)
