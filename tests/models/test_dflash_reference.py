"""DFlash in plain torch against the `dflash` package, in float32 on random configs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional

from gpurt.graphs.dflash import DFlashConfig, default_taps
from gpurt.graphs.reference.dflash import DFlash, candidates
from tests.helpers.dflash import BASE, CASES, make_dflash, package_model

pytestmark = [pytest.mark.reference, pytest.mark.timeout(120)]

# Of the largest value: float32 sums in another order, 1.3e-5 on a CPU with AVX-512.
TOLERANCE = 5e-5
ANCHORS = (1, 4, 13, 30)


@dataclasses.dataclass
class Case:
    """A model, the package's, and random inputs of one sequence."""

    ours: DFlash
    theirs: object
    features: torch.Tensor
    anchor_ids: torch.Tensor
    embedding: torch.Tensor
    head: torch.Tensor

    @property
    def config(self) -> DFlashConfig:
        return self.ours.config

    def hidden(self) -> torch.Tensor:
        """[J, B, hidden] of one call over all anchors."""
        anchors = torch.tensor(ANCHORS)[None]
        x = self.ours.embedded(self.embedding, self.anchor_ids[None])
        return self.ours(self.features[None], anchors, x)[0]

    def package_hidden(self, block: int) -> torch.Tensor:
        """[B, hidden] of one call of the package for one anchor."""
        at = ANCHORS[block]
        ids = torch.full((1, self.config.block), self.config.mask_token)
        ids[0, 0] = self.anchor_ids[block]
        return self.theirs(
            position_ids=torch.arange(at + self.config.block)[None],
            noise_embedding=functional.embedding(ids, self.embedding) * self.config.input_scale,
            target_hidden=self.features[None, :at],
        )[0]


@pytest.fixture(scope="module")
def cases():
    made: dict[str, Case] = {}

    def case(name):
        if name not in made:
            ours = make_dflash(seed=len(name), **CASES[name])
            config, length = ours.config, max(ANCHORS)
            made[name] = Case(
                ours,
                package_model(ours),
                torch.randn(length, len(config.taps) * config.hidden),
                torch.randint(0, config.vocab, (len(ANCHORS),)),
                torch.randn(config.vocab, config.hidden),
                torch.randn(config.vocab, config.hidden),
            )
        return made[name]

    with torch.no_grad():
        yield case


def relative_error(seen, wanted):
    return float((seen - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("name", CASES)
def test_hidden_states_of_blocks_at_any_anchor_equal_the_package(name, cases):
    case = cases(name)
    seen = case.hidden()
    for block in range(len(ANCHORS)):
        assert relative_error(seen[block], case.package_hidden(block)) < TOLERANCE, block


@pytest.mark.parametrize("name", CASES)
def test_scores_and_the_greedy_path_equal_the_package(name, cases):
    case = cases(name)
    head = torch.nn.Linear(case.config.hidden, case.config.vocab, bias=False)
    head.weight.copy_(case.head)
    for block in range(len(ANCHORS)):
        hidden = case.package_hidden(block)[1:]
        logits = case.theirs.compute_logits(hidden, head)
        assert relative_error(case.ours.logits(hidden, case.head), logits) < TOLERANCE
        anchor = case.anchor_ids[block : block + 1]
        if case.ours.selects:
            wanted = case.theirs.propose(hidden[None], anchor, head, 0.0)[0][0]
        else:
            wanted = logits.argmax(-1)
        seen = case.ours.propose(case.hidden()[block, 1:], int(anchor), case.head)
        assert seen == wanted.tolist()


def test_a_sampled_walk_has_the_package_s_distribution(cases):
    """Slot by slot: where an even grid of uniforms falls, against the package's probabilities."""
    case, slots = cases("plain"), 3
    hidden, temperature, grid = case.hidden()[1, 1 : 1 + slots], 9.0, 300
    selector = case.theirs.candidate_selector
    logits = case.ours.logits(hidden, case.head)
    torch.manual_seed(5)
    path, ids, q = selector.select(hidden[None], logits[None], case.anchor_ids[1:2], temperature)
    before = [int(case.anchor_ids[1]), *path[0].tolist()]
    for slot in range(slots):
        counts = dict.fromkeys(ids[0, slot].tolist(), 0)
        for step in range(grid):
            uniform = (step + 0.5) / grid
            chosen = case.ours.propose(
                hidden[slot : slot + 1], before[slot], case.head, temperature, [uniform]
            )
            counts[chosen[0]] += 1
        assert min(counts.values()) < max(counts.values()) < grid
        seen = torch.tensor(list(counts.values())) / grid
        assert (seen - q[0, slot]).abs().max() < 2 / grid


def test_parameters_have_the_names_and_shapes_of_the_config_s_tensors():
    for changes in CASES.values():
        model = make_dflash(**changes)
        shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
        assert shapes == model.config.tensors()


def test_convolutions_of_a_new_model_are_the_identity():
    model, plain = DFlash(BASE), make_dflash(**CASES["dflash-1"])
    plain.load_state_dict(model.state_dict(), strict=False)
    features, x = torch.randn(1, 9, 3 * 48), torch.randn(1, 2, 16, 48)
    anchors = torch.tensor([[3, 9]])
    assert torch.equal(model(features, anchors, x), plain(features, anchors, x))


def test_equal_scores_order_by_id():
    best, ids = candidates(torch.tensor([1.0, 3.0, 2.0, 3.0, 3.0]), 3)
    assert ids.tolist() == [1, 3, 4]
    assert best.tolist() == [3.0, 3.0, 3.0]


def test_default_taps_are_those_of_the_release():
    assert default_taps(62, 5) == (1, 16, 30, 44, 59)
    assert default_taps(52, 5) == (1, 13, 25, 37, 49)
    assert default_taps(8, 1) == (4,)
