"""Sampling with a drafter keeps the target's distribution: chi-square over whole sequences.

A model of five tokens; the probability of every sequence of three comes from the logits that the
graph itself gives after each prefix, by the plain definition of temperature, top_k and top_p.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from gpurt.graphs.llama import build
from gpurt.loaders import load_model
from gpurt.runtime import Runtime
from tests.helpers.hostile_drafters import add_python_drafter, constant
from tests.helpers.tiny import tiny_folder

pytestmark = pytest.mark.timeout(240)

VOCAB, LENGTH, COUNT, BATCH = 5, 3, 6000, 60
PROMPT = [1, 2, 1, 2, 1, 3, 1, 2]
SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 2.0, "top_k": 3},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 4, "top_p": 0.9},
]


@pytest.fixture(scope="module")
def runtime():
    with Runtime("host", workers=1, trace=False) as opened:
        yield opened


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # Its weights are small, so that no token is all but certain.
    return load_model(
        tiny_folder(tmp_path_factory.mktemp("tiny"), vocab_size=VOCAB, eos_token_id=0)
    )


@pytest.fixture(scope="module")
def logits(runtime, model):
    """By prefix: the logits after the prompt and it."""
    graph = build(model.config, model.weights, context=32)
    known = {}
    for length in range(LENGTH):
        for prefix in itertools.product(range(VOCAB), repeat=length):
            runtime.submit(graph, PROMPT + list(prefix), max_tokens=1).result(30)
            known[prefix] = runtime.read(graph, "logits")[0].astype(np.float64)
    return known


def distribution(logits, temperature, top_k=0, top_p=1.0):
    """The probability of each token, by definition."""
    order = np.argsort(-logits, kind="stable")[: top_k or None]
    weights = np.exp((logits[order] - logits.max()) / temperature)
    kept = int(np.searchsorted(np.cumsum(weights), top_p * weights.sum())) + 1
    result = np.zeros(len(logits))
    result[order[:kept]] = weights[:kept] / weights[:kept].sum()
    return result


def sequences(logits, settings):
    """The probability of every sequence."""
    shares = {}
    for sequence in itertools.product(range(VOCAB), repeat=LENGTH):
        shares[sequence] = math.prod(
            distribution(logits[sequence[:i]], **settings)[token]
            for i, token in enumerate(sequence)
        )
    assert sum(shares.values()) == pytest.approx(1)
    return shares


def draw(runtime, graph, settings):
    """COUNT sequences, each with a seed of its own, and the tokens that a verify step committed."""
    counts, accepted = {}, 0
    for begin in range(0, COUNT, BATCH):
        requests = [
            runtime.submit(graph, PROMPT, max_tokens=LENGTH, ignore_eos=True, seed=seed, **settings)
            for seed in range(begin, begin + BATCH)
        ]
        for request in requests:
            sequence = tuple(request.result(30).token_ids)
            counts[sequence] = counts.get(sequence, 0) + 1
            accepted += sum(request.accepted)
    return counts, accepted


def chi_square(counts, shares):
    """(statistic, degrees of freedom); cells that expect less than 5 are taken together."""
    assert all(shares[s] > 0 for s in counts), "a sequence that cannot be"
    small = [s for s, share in shares.items() if share * COUNT < 5]
    cells = [(counts.get(s, 0), share * COUNT) for s, share in shares.items() if s not in small]
    rest = sum(shares[s] for s in small) * COUNT
    if rest > 0:
        cells.append((sum(counts.get(s, 0) for s in small), rest))
    return sum((seen - expected) ** 2 / expected for seen, expected in cells), len(cells) - 1


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("drafter", ["ngram", "constant"])
def test_sequences_have_the_targets_distribution(runtime, model, logits, drafter, settings):
    graph = build(model.config, model.weights, context=32, slots=2)
    if drafter == "ngram":
        graph = build(model.config, model.weights, context=32, slots=2, draft="ngram")
    else:
        add_python_drafter(graph, constant(1), 15)
    counts, accepted = draw(runtime, graph, settings)
    assert accepted > COUNT / 20, "nothing was accepted: nothing was tested"
    statistic, freedom = chi_square(counts, sequences(logits, settings))
    # Four standard deviations above the mean of the distribution: 1 in 10,000 or so.
    assert statistic < freedom + 4 * math.sqrt(2 * freedom), (statistic, freedom)


@pytest.mark.parametrize("settings", SETTINGS[::2], ids=str)
def test_a_sampled_path_of_dflash_keeps_the_targets_distribution(
    runtime, model, logits, settings, tmp_path
):
    pytest.importorskip("torch")
    from gpurt.loaders.hf_dflash import load_draft
    from tests.helpers.dflash import make_dflash, save_dflash

    sizes = {"hidden": 8, "vocab": VOCAB, "mask_token": 4, "taps": (0,), "conv_group": 4}
    drafter = make_dflash(**sizes, layers=1, windows=(0,), causal=(False,), block=4)
    drafter = load_draft(save_dflash(drafter, tmp_path))
    graph = build(
        model.config, model.weights, context=32, slots=2, draft="dflash", draft_model=drafter
    )
    counts, accepted = draw(runtime, graph, settings)
    assert accepted > COUNT / 20, "nothing was accepted: nothing was tested"
    statistic, freedom = chi_square(counts, sequences(logits, settings))
    assert statistic < freedom + 4 * math.sqrt(2 * freedom), (statistic, freedom)


def test_the_chi_square_sees_a_rule_that_takes_every_proposal(logits):
    """What it must catch: token 1 accepted half as often again as it should be."""
    shares = sequences(logits, {"temperature": 1.0})
    bent = {s: share * 1.5 ** s.count(1) for s, share in shares.items()}
    total = sum(bent.values())
    counts = {s: round(COUNT * share / total) for s, share in bent.items()}
    statistic, freedom = chi_square(counts, shares)
    assert statistic > freedom + 10 * math.sqrt(2 * freedom)
