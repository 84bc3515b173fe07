"""advance: prompts in chunks, one token a step, stop ids, bounds, queues, slots, cancel."""

import numpy as np
import pytest

from gpurt import wire
from gpurt.wire import FinishReason
from tests.helpers.drive import driven
from tests.helpers.hand_plan import Node, hand_plan

VOCAB = 97


class Model:
    """A model whose next token depends on every (position, token) of its sequence, so a missing,
    doubled or reordered row changes all tokens that follow. It reads the step as bodies do.
    """

    def __init__(self, slots):
        self.steps = []
        self.sums = np.zeros(slots, np.int64)
        self.state = None

    def bind(self, driver):
        self.state = driver.executor._sections["step_state"]
        self.capacity = driver.executor.plan.rows

    def __call__(self):
        header = self.state[:64].view(wire.STEP_STATE)[0]
        rows = self.state[64 : 64 + 16 * self.capacity].view(wire.ROW_STATE)[: header["rows"]]
        tail = self.state[64 + 16 * self.capacity :].view(np.uint32)
        sample_rows = tail[: header["sample_count"]]
        self.steps.append((int(header["phase"]), rows.copy(), sample_rows.copy()))
        sampled = tail[self.capacity :]
        for index, row in enumerate(rows):
            slot = int(row["slot"])
            if row["position"] == 0:
                self.sums[slot] = 0
            self.sums[slot] = self.follow(self.sums[slot], int(row["position"]), int(row["token"]))
            found = np.flatnonzero(sample_rows == index)
            assert len(found) == (1 if row["flags"] & wire.RowFlags.SAMPLE else 0)
            if len(found):
                sampled[found[0]] = self.token(self.sums[slot])

    @staticmethod
    def follow(total, position, token):
        return (total * 31 + (position + 1) * (token + 7)) % 1_000_003

    @staticmethod
    def token(total):
        return total % VOCAB

    @classmethod
    def expected(cls, prompt, count):
        total = 0
        for position, token in enumerate(prompt):
            total = cls.follow(total, position, token)
        tokens = [cls.token(total)]
        while len(tokens) < count:
            total = cls.follow(total, len(prompt) + len(tokens) - 1, tokens[-1])
            tokens.append(cls.token(total))
        return [int(t) for t in tokens]


def modelled(policy="static", workers=2, rows=4, slots=1, context=64, **options):
    model = Model(slots)
    nodes = [Node("noop"), Node(model, (0,)), Node("noop", (1,))]
    planned = hand_plan(
        nodes, workers, [(policy, 0)], rows=rows, slots=slots, context=context, vocab=VOCAB
    )
    return model, driven(planned, **options)


@pytest.mark.parametrize("policy", ["static", "claim", "ready"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_tokens_are_those_of_the_model(policy, workers):
    model, context = modelled(policy, workers)
    with context as driver:
        model.bind(driver)
        prompt = [5, 3, 9, 1, 7, 2]
        tokens, reason = driver.run(prompt=prompt, max_tokens=20)
        assert driver.executor.fault_cause() is None
    assert (tokens, reason) == (Model.expected(prompt, 20), FinishReason.LENGTH)


def test_a_prompt_goes_through_in_chunks_and_only_its_last_row_is_sampled():
    model, context = modelled(rows=4)
    with context as driver:
        model.bind(driver)
        driver.run(prompt=list(range(10)), max_tokens=3)
        assert driver.output(0)["steps"] == 5
    shapes = [(phase, len(rows), samples.tolist()) for phase, rows, samples in model.steps]
    prefill, decode = wire.Phase.PREFILL, wire.Phase.DECODE
    assert shapes == [
        (prefill, 4, []),
        (prefill, 4, []),
        (prefill, 2, [1]),
        (decode, 1, [0]),
        (decode, 1, [0]),
    ]


def test_prefill_rows_bounds_the_chunk():
    model, context = modelled(rows=8, prefill_rows=3)
    with context as driver:
        model.bind(driver)
        driver.run(prompt=list(range(7)), max_tokens=1)
    assert [len(rows) for _, rows, _ in model.steps] == [3, 3, 1]


def test_a_stop_id_ends_the_request_and_is_its_last_token():
    model, context = modelled()
    expected = Model.expected([1, 2, 3], 40)
    stop = expected[6]
    first = expected.index(stop)
    with context as driver:
        model.bind(driver)
        tokens, reason = driver.run(prompt=[1, 2, 3], max_tokens=40, stop=[VOCAB + 1, stop])
        assert (tokens, reason) == (expected[: first + 1], FinishReason.STOP)
        ignored = driver.run(
            prompt=[1, 2, 3], max_tokens=40, stop=[stop], flags=wire.RequestFlags.IGNORE_STOP
        )
    assert ignored == (expected, FinishReason.LENGTH)


def test_the_context_bound_ends_a_request():
    model, context = modelled(context=12)
    with context as driver:
        model.bind(driver)
        tokens, reason = driver.run(prompt=[1, 2, 3], max_tokens=100)
        full, full_reason = driver.run(prompt=list(range(12)), max_tokens=100)
    # Positions 0..11 are fed; the token that position 11 gives is still an answer.
    assert (tokens, reason) == (Model.expected([1, 2, 3], 10), FinishReason.LENGTH)
    assert (full, full_reason) == (Model.expected(list(range(12)), 1), FinishReason.LENGTH)


@pytest.mark.parametrize(("rows", "slots"), [(4, 2), (8, 5), (2, 3)])
def test_sequences_that_share_steps_get_the_tokens_they_get_alone(rows, slots):
    model, context = modelled(rows=rows, slots=slots, workers=3)
    prompts = [[(7 * i + j) % VOCAB for j in range(1 + 3 * i)] for i in range(9)]
    with context as driver:
        model.bind(driver)
        sequences = [driver.submit(prompt=p, max_tokens=5 + i) for i, p in enumerate(prompts)]
        results = [driver.wait(s) for s in sequences]
    assert max(len({int(r["slot"]) for r in rows}) for _, rows, _ in model.steps) > 1
    for i, (tokens, reason) in enumerate(results):
        assert (i, tokens) == (i, Model.expected(prompts[i], 5 + i))
        assert reason == FinishReason.LENGTH


def test_decode_rows_come_before_prefill_rows():
    model, context = modelled(rows=4, slots=2)
    with context as driver:
        model.bind(driver)
        a = driver.submit(prompt=[1], max_tokens=30)
        b = driver.submit(prompt=list(range(20)), max_tokens=2)
        driver.wait(a)
        driver.wait(b)
    mixed = [rows for _, rows, _ in model.steps if len({int(s) for s in rows["slot"]}) > 1]
    assert mixed
    for rows in mixed:
        assert rows["flags"][0] == wire.RowFlags.SAMPLE


def test_1_000_requests_of_different_lengths_on_one_launch():
    model, context = modelled(rows=4, slots=3, workers=2, queue_capacity=8)
    with context as driver:
        model.bind(driver)
        sequences = []
        for i in range(1000):
            if len(sequences) == 8:
                number, wanted = sequences.pop(0)
                assert driver.wait(number)[0] == wanted
            prompt = [(i + j) % VOCAB for j in range(1 + i % 11)]
            number = driver.submit(prompt=prompt, max_tokens=1 + i % 4)
            sequences.append((number, Model.expected(prompt, 1 + i % 4)))
        for number, wanted in sequences:
            assert driver.wait(number)[0] == wanted
        assert driver.executor.launches == 1
        assert driver.view.control["submit_head"] == 1000


@pytest.mark.parametrize("decode_steps", [0, 3])
def test_cancel_ends_a_request_in_prefill_and_in_decode(decode_steps):
    model = Model(1)
    holder = {}

    def run():
        model()
        if len(model.steps) == (2 if decode_steps == 0 else 5 + decode_steps):
            holder["driver"].view.cancel(0)

    planned = hand_plan([Node(run)], 2, [("static", 0)], rows=4, context=1000, vocab=VOCAB)
    with driven(planned) as driver:
        holder["driver"] = driver
        model.bind(driver)
        prompt = list(range(20))
        tokens, reason = driver.run(prompt=prompt, max_tokens=900)
        assert reason == FinishReason.CANCELLED
        # The step that cancelled ends as usual: its token counts.
        assert tokens == Model.expected(prompt, decode_steps + 1)[: len(tokens)]
        assert len(tokens) == (0 if decode_steps == 0 else decode_steps + 1)
        again, reason = driver.run(prompt=[4, 5], max_tokens=3)
        assert (again, reason) == (Model.expected([4, 5], 3), FinishReason.LENGTH)


def test_a_queued_request_that_is_cancelled_takes_no_step():
    model, context = modelled(rows=4)
    with context as driver:
        model.bind(driver)
        a = driver.submit(prompt=[1], max_tokens=50, start=False)
        b = driver.submit(prompt=[2], max_tokens=50, start=False)
        driver.view.cancel(b)
        c = driver.submit(prompt=[3], max_tokens=2)
        assert driver.wait(a)[1] == FinishReason.LENGTH
        assert driver.wait(b) == ([], FinishReason.CANCELLED)
        assert driver.output(b)["steps"] == 0
        assert driver.wait(c) == (Model.expected([3], 2), FinishReason.LENGTH)
