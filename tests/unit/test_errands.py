"""Errands of a process group: questions, answers, and a question that is half written."""

from __future__ import annotations

import os

import numpy as np
import pytest

from gpurt import wire
from gpurt.errors import RankError
from gpurt.executors.errands import Errands
from gpurt.executors.shared import Pages, Stage, Word
from tests.helpers.rank_threads import together

pytestmark = pytest.mark.timeout(60)


def pair(tmp_path, act):
    """`act(group, pages, errands)` on two ranks."""

    def run(group):
        pages = Pages(group, 0)
        errands = Errands(group, pages)
        try:
            return act(group, pages, errands)
        finally:
            group.exchange("done", None)
            errands.close()

    return together(tmp_path, 2, run)


def test_arrays_go_and_come_with_their_names_and_dtypes(tmp_path):
    spans = np.zeros(3, wire.SPAN)
    spans["task"] = [5, 6, 7]

    def act(group, _, errands):
        if group.rank:
            served = []
            while len(served) < 2:
                errands.answer(lambda question: served.append(question) or {"spans": spans})
            errands.answer(lambda _: pytest.fail("nothing is asked"))
            return served
        return [errands.ask("a test", {"x": np.array(["y"])}, 30)[0] for _ in range(2)]

    answers, questions = pair(tmp_path, act)
    assert [question["x"].tolist() for question in questions] == [["y"], ["y"]]
    for answer in answers:
        assert answer["spans"].dtype == wire.SPAN
        assert answer["spans"].tolist() == spans.tolist()


def test_a_question_that_is_half_written_or_another_one_is_left(tmp_path):
    def act(group, pages, errands):
        if group.rank:
            group.exchange("torn", None)
            errands.answer(lambda _: pytest.fail("it is torn"))
            group.exchange("other", None)
            group.exchange("written", None)
            errands.answer(lambda _: pytest.fail("it is the second"))
            return
        errands._number = 1
        errands._put({"x": np.arange(8)})
        whole = os.pread(errands._files[0], 1 << 20, 0)
        os.ftruncate(errands._files[0], len(whole) // 2)
        pages.say(Word.ASKED, 1)
        group.exchange("torn", None)
        group.exchange("other", None)
        errands._number = 2
        errands._put({"x": np.arange(8)})
        group.exchange("written", None)

    assert pair(tmp_path, act) == [None, None]


def test_a_rank_that_does_not_answer_or_has_left_is_named(tmp_path):
    def act(group, pages, errands):
        if group.rank:
            group.exchange("late", None)
            pages.say(Word.STAGE, Stage.CLOSED)
            group.exchange("left", None)
            return
        with pytest.raises(RankError, match=r"^rank 1 does not answer - at rank 0, a test - ev"):
            errands.ask("a test", {}, 0.01)
        group.exchange("late", None)
        group.exchange("left", None)
        with pytest.raises(RankError, match=r"^rank 1 has left - at rank 0, a test - every other"):
            errands.ask("a test", {}, 30)

    assert pair(tmp_path, act) == [None, None]
