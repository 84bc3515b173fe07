"""The host's draft_ngram against its reference, and the reference against what it says it does."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpurt.body import StepRows, Target, body
from gpurt.errors import GraphError
from gpurt.graph import Graph
from gpurt.graphs.drafters import add_drafter
from gpurt.graphs.ops.draft_ngram import DRAFT_NGRAM, committed, draft_ngram, look_up
from gpurt.planner import plan
from tests.helpers.host_bodies import bodies
from tests.helpers.oracle import step_rows

CONTEXT, SLOTS, ROWS = 48, 3, 24


def test_what_followed_the_latest_longest_match_is_proposed() -> None:
    text = [1, 2, 3, 9, 2, 3, 8, 1, 2, 3]
    assert look_up(text, 4) == [9, 2, 3, 8]  # 1 2 3 stood before; 2 3 later, too
    assert look_up(text[1:], 4) == [8, 1]  # the latest 2 3, and no more than it has tokens
    assert look_up([4, 7, 4, 5, 4], 3) == [5]  # the latest of two
    assert look_up([4, 7, 4, 5, 4], 3, longest=1) == [5, 4, 5]  # then what was proposed
    assert look_up([1, 2, 3], 5) == []
    assert look_up([6], 5) == []
    assert look_up([6, 6], 4) == [6]
    assert look_up([6, 6, 6, 6], 4) == [6, 6, 6, 6]
    assert look_up([1, 2, 1, 2, 1], 5) == [2, 1, 2, 1, 2]


def make_graph(limit: int = 15, longest: int = 3) -> Graph:
    graph = Graph("g", rows=ROWS, slots=SLOTS, context=CONTEXT, vocab=9)
    draft_ngram(graph, limit, longest=longest)
    return graph


class Sequences:
    """Random sequences fed as advance would feed them: prompts in chunks, then blocks."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.vocab = self.rng.choice([2, 3, 9])
        self.prompts = [self.tokens(self.rng.randint(1, 30)) for _ in range(SLOTS)]
        self.texts: list[list[int]] = [[] for _ in range(SLOTS)]

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(self.vocab) for _ in range(count)]

    def step(self, proposals: NDArray[np.uint32]) -> tuple[StepRows, list[int], list[int]]:
        """(the rows, which of them hold a proposal, tokens sampled)."""
        tokens, positions, slots, samples, proposed = [], [], [], [], []
        sampled: list[int] = []
        for slot, text in enumerate(self.texts):
            prompt = self.prompts[slot]
            begin = max(0, len(text) - 1)
            if len(text) < len(prompt):
                fed, begin = prompt[len(text) : len(text) + 7], len(text)
                text += fed
                if len(text) == len(prompt):
                    made = self.tokens(1)
                    sampled += made
                    samples.append(len(tokens) + len(fed) - 1)
                    text += made
            elif self.rng.random() < 0.8 and begin < CONTEXT - 8:
                found = proposals[slot, 1 : 1 + min(proposals[slot, 0], 7)].tolist()
                fed = [text[-1], *found]
                choices = [t if self.rng.random() < 0.7 else 0 for t in found] + self.tokens(1)
                at = len(tokens)
                samples += range(at, at + len(fed))
                proposed += range(at + 1, at + len(fed))
                sampled += choices
                text += committed(fed, choices)
            else:
                continue
            tokens += fed
            positions += range(begin, begin + len(fed))
            slots += [slot] * len(fed)
        return step_rows(tokens, positions, slots, samples), proposed, sampled


@pytest.mark.parametrize("seed", range(12))
def test_proposals_are_those_of_the_reference_step_by_step(seed: int) -> None:
    limit, longest = random.Random(seed).choice([(15, 3), (1, 3), (4, 1), (15, 2)])
    op = make_graph(limit, longest).operators[0]
    world = Sequences(seed)
    ours: dict[str, NDArray[Any]] = {
        "history": np.zeros((SLOTS, CONTEXT), np.uint32),
        "proposals": np.zeros((SLOTS, 16), np.uint32),
    }
    wanted = {name: array.copy() for name, array in ours.items()}
    found = 0
    for _ in range(30):
        step, proposed, sampled = world.step(ours["proposals"])
        if not len(step.token):
            continue
        sampled_array = np.zeros(ROWS, np.uint32)
        sampled_array[: len(sampled)] = sampled
        kind, _ = bodies("portable").run(
            DRAFT_NGRAM,
            {"sampled": sampled_array, **ours},
            {k: int(v) for k, v in op.params.items()},
            step,
            plan_rows=ROWS,
            proposal_rows=proposed,
        )
        assert kind == 0
        assert op.body.reference is not None
        op.body.reference(op, {"sampled": sampled_array, **wanted}, step)
        for slot in range(SLOTS):
            ours_row, wanted_row = ours["proposals"][slot], wanted["proposals"][slot]
            count = int(wanted_row[0])
            assert ours_row[: 1 + count].tolist() == wanted_row[: 1 + count].tolist()
            text = world.texts[slot]
            if count:
                found += 1
                assert wanted_row[1 : 1 + count].tolist() == look_up(text, limit, longest)
            assert ours["history"][slot, : len(text)].tolist() == text
    assert found > 10


def test_a_sequence_that_fills_its_context_gets_no_proposals() -> None:
    op = make_graph().operators[0]
    history = np.zeros((SLOTS, CONTEXT), np.uint32)
    proposals = np.full((SLOTS, 16), 7, np.uint32)
    arrays = {"sampled": np.zeros(ROWS, np.uint32), "history": history, "proposals": proposals}
    params = {k: int(v) for k, v in op.params.items()}
    bodies("portable").run(DRAFT_NGRAM, arrays, params, step_rows([0], [CONTEXT - 1], [1]))
    assert proposals[:, 0].tolist() == [7, 0, 7]


def test_a_drafter_is_refused_where_it_makes_no_sense() -> None:
    for count in (0, 16):
        with pytest.raises(GraphError, match=rf"^{count} proposals a step - at g.draft"):
            make_graph(count)
    with pytest.raises(GraphError, match=r"^matches of 0 tokens - at g.draft_ngram"):
        make_graph(longest=0)
    with pytest.raises(GraphError, match=r"^a second drafter - at g.draft"):
        make_graph().draft(3)
    with pytest.raises(GraphError, match=r"^a graph that makes no tokens has no drafter"):
        Graph("g").draft(3)
    with pytest.raises(GraphError, match=r"^draft is 'bigram' - at g - use one of none, ngram"):
        add_drafter(Graph("g", vocab=9), "bigram")


def test_only_a_drafter_adds_to_a_plan() -> None:
    plain = Graph("g", rows=2, context=8, vocab=9)
    assert plain.sampled is not None
    plain.task(body("first", lambda sampled: sampled.fill(0)), [], [plain.sampled])
    assert add_drafter(plain, "none") is plain
    assert ([b.name for b in plain.buffers], len(plain.operators)) == (["step.sampled"], 1)
    assert len(plan(plain, Target("host", 1)).tasks[-1].addr) == 1
    made = plan(add_drafter(plain, "ngram", 4), Target("host", 2))
    assert [t.body for t in made.tasks] == ["first", "draft_ngram", "advance"]
    advance = made.tasks[-1]
    buffers = [made.buffers[place[0]].name for place in advance.addr if place is not None]
    assert (buffers, advance.params) == (["step.sampled", "step.proposals"], (4,))
    assert made.operators[1].path == "g.draft.draft_ngram"
