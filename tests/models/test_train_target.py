"""Training: the batched target equals the reference, learns, and goes on where it stopped."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch

from gpurt.graphs.muse_spark_config import PREFIX
from gpurt.graphs.reference import muse_spark as plain
from tests.helpers.muse import by_definition
from tests.helpers.training import MICRO, StopAfter, new_run
from tools.train.data import make_batch
from tools.train.draft import DraftJob
from tools.train.loop import save, train
from tools.train.optimiser import orthogonal, rate_scale
from tools.train.quantise import packed, rounded
from tools.train.recipe import quantised_layers
from tools.train.target import TargetJob, on_device

pytestmark = [pytest.mark.reference, pytest.mark.timeout(120)]

FOREVER = 10**9
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    """Sums in one order, and no thread that waits for another test's."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def shaken(model, seed=1):
    """Gains, gates, biases and head away from their first values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.tensors.values():
            tensor.add_(0.2 * torch.randn(tensor.shape, generator=generator))
    return model


def states_equal(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(states_equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(states_equal, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


# ---- the model -------------------------------------------------------------------------------
@pytest.mark.parametrize("experts", ["dense", "grouped"])
def test_packed_chats_give_the_logits_of_each_alone(experts, tmp_path):
    job = TargetJob(MICRO, new_run(tmp_path / "run"), "cpu", experts=experts)
    model = shaken(job.model)
    model.quantised = quantised_layers(MICRO)
    batch = make_batch(job.shape, 0, job.encoder)
    inputs, _, _ = on_device(batch, model, CPU)
    with torch.no_grad():
        logits, streams, loads = model(inputs, taps=(1,))
        used, checked = model.used(), 0
        for row in range(MICRO.rows):
            for number in range(1, int(batch.document[row].max()) + 1):
                at = np.flatnonzero(batch.document[row] == number)
                wanted = plain.forward(model.config, used, batch.ids[row, at].tolist())
                assert (logits[row, at] - wanted).abs().max() < 2e-4
                checked += 1
    assert checked > MICRO.rows
    assert streams[0].shape == (MICRO.rows, MICRO.length, MICRO.hidden)
    assert loads.sum(1).tolist() == [MICRO.rows * MICRO.length * MICRO.top_k] * MICRO.layers


def test_both_ways_to_compute_experts_have_the_same_gradients(tmp_path):
    run = new_run(tmp_path / "run")
    jobs = [TargetJob(MICRO, run, "cpu", experts=kind) for kind in ("dense", "grouped")]
    batch = make_batch(jobs[0].shape, 0, jobs[0].encoder)
    for job in jobs:
        shaken(job.model)(on_device(batch, job.model, CPU)[0])[0].square().mean().backward()
    for name, tensor in jobs[0].model.tensors.items():
        if tensor.requires_grad:
            wanted, seen = tensor.grad, jobs[1].model.tensors[name].grad
            assert (seen - wanted).abs().max() <= 1e-5 * wanted.abs().max(), name


def test_an_expert_with_too_many_rows_becomes_harder_to_choose(tmp_path):
    job = TargetJob(MICRO, new_run(tmp_path / "run"), "cpu")
    loads = torch.full((MICRO.layers, MICRO.experts), 10.0)
    loads[:, 2], loads[:, 0] = 14.0, 6.0
    job._balance(loads, 0.25)
    bias = job.model.tensors[f"{PREFIX}.layers.0.mlp.gate.e_score_correction_bias"]
    assert bias.tolist() == [0.25, 0.0, -0.25, 0.0, 0.0]


# ---- steps and stops -------------------------------------------------------------------------
def test_the_loss_falls(tmp_path):
    job = TargetJob(replace(MICRO, steps=30), new_run(tmp_path / "run"), "cpu")
    batch = make_batch(job.shape, 0, job.encoder)
    losses = [float(job.step(step, batch)["loss"].detach()) for step in range(12)]
    assert losses[0] > 5  # of 5.8: an even guess among 320 tokens
    assert losses[-1] < 0.6 * losses[0]


def test_the_drafters_loss_falls(tmp_path):
    run = new_run(tmp_path / "run")
    assert train(TargetJob(MICRO, run, "cpu"), run, StopAfter(FOREVER))
    job = DraftJob(replace(MICRO, draft_steps=30), run, "cpu")
    batch = make_batch(job.shape, 0, job.encoder)
    losses = [float(job.step(step, batch)["selector_loss"].detach()) for step in range(12)]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("stops", [(3, 5), (7, 1)])
def test_a_run_that_was_stopped_ends_as_one_that_was_not(stops, tmp_path):
    straight, broken = new_run(tmp_path / "a"), new_run(tmp_path / "b")
    assert train(TargetJob(MICRO, straight, "cpu"), straight, StopAfter(FOREVER))
    assert not train(TargetJob(MICRO, broken, "cpu"), broken, StopAfter(stops[0]))
    assert train(TargetJob(MICRO, broken, "cpu"), broken, StopAfter(FOREVER))
    for job in (TargetJob, DraftJob):
        if job is DraftJob:
            assert train(job(MICRO, straight, "cpu"), straight, StopAfter(FOREVER))
            assert not train(job(MICRO, broken, "cpu"), broken, StopAfter(stops[1]))
            assert train(job(MICRO, broken, "cpu"), broken, StopAfter(FOREVER))
        a, b = (torch.load(run / f"{job.name}.pt", weights_only=True) for run in (straight, broken))
        assert states_equal(a, b)


def test_a_signal_saves_and_stops(tmp_path):
    run = new_run(tmp_path / "run")
    job = TargetJob(MICRO, run, "cpu")
    step, handler = job.step, signal.getsignal(signal.SIGTERM)

    def signalled(index, batch):
        if index == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(index, batch)

    job.step = signalled
    assert not train(job, run, StopAfter(FOREVER))
    assert torch.load(run / "target.pt", weights_only=True)["step"] == 3
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_finished_run_does_nothing(tmp_path, capsys):
    run = new_run(tmp_path / "run")
    assert train(TargetJob(MICRO, run, "cpu"), run, StopAfter(FOREVER))
    before = (run / "target.pt").read_bytes()
    assert train(TargetJob(MICRO, run, "cpu"), run, StopAfter(FOREVER))
    assert (run / "target.pt").read_bytes() == before
    assert "all 8 steps are done" in capsys.readouterr().out


# ---- NVFP4 -----------------------------------------------------------------------------------
@pytest.mark.parametrize("halves", [1, 2])
def test_rounded_is_what_the_stored_codes_multiply_out_to(halves):
    w = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(0)) * 0.1
    w[0, :2] *= 1e-4  # a half of tiny values, which its own second-level scale keeps
    w[1, 1, :16] = 0
    w[2, 3, 5] = 7.0
    stored = packed(w, halves)
    second = stored.second.numpy() if halves == 2 else stored.second[:, 0].numpy()
    wanted = by_definition(stored.codes.numpy(), stored.scales.float().numpy(), second)
    seen = rounded(w, halves)
    assert torch.allclose(seen, wanted, rtol=1e-6, atol=0)
    # Between neighbouring codes 4 and 6 lies the widest gap: a sixth of a block's largest value,
    # and e4m3 rounds the block's scale by up to a sixteenth.
    largest = w.unflatten(-1, (-1, 16)).abs().amax(-1, keepdim=True)
    error = (seen - w).unflatten(-1, (-1, 16)).abs()
    assert (error <= 0.25 * largest).all()
    assert (error.mean() / w.abs().mean()) < 0.12
    assert torch.allclose(rounded(seen, halves), seen, rtol=1e-6, atol=0)


def test_gradients_pass_the_rounding():
    w = torch.randn(2, 4, 32, requires_grad=True)
    (rounded(w, 2) * 3).sum().backward()
    assert (w.grad == 3).all()


# ---- the optimiser ---------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(2, 8, 24), (3, 24, 8), (1, 16, 16)])
def test_orthogonal_makes_singular_values_about_one(shape):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    u, _, v = torch.linalg.svd(w, full_matrices=False)
    seen = orthogonal(w)
    values = torch.linalg.svdvals(seen)
    assert values.min() > 0.5
    assert values.max() < 1.3
    assert ((seen * (u @ v)).sum() / (seen.norm() * (u @ v).norm())) > 0.97


def test_the_rate_rises_stays_and_falls_to_almost_nothing():
    scales = [rate_scale(step, 100, 0.1, 0.4) for step in range(100)]
    assert scales[0] == pytest.approx(0.1)
    assert scales[9:61] == [1.0] * 52
    assert scales[99] == pytest.approx(1 / 40)
    assert sorted(scales[60:], reverse=True) == scales[60:]
    assert rate_scale(120, 100, 0.1, 0.4) == 0


# ---- the drafter's lessons -------------------------------------------------------------------
@pytest.fixture
def draft(tmp_path):
    run = new_run(tmp_path / "run")
    job = TargetJob(replace(MICRO, steps=100), run, "cpu")
    batch = make_batch(job.shape, 0, job.encoder)
    for step in range(25):
        job.step(step, batch)
    save(job, run / "target.pt", 25)
    return DraftJob(MICRO, run, "cpu")


def test_a_slot_counts_while_the_text_is_what_the_target_says(draft):
    batch = make_batch(draft.shape, 0, draft.encoder)
    anchors = torch.from_numpy(np.where(batch.reply, np.arange(batch.ids.shape[1]), -1))
    blocks = draft.blocks(batch, anchors)
    with torch.no_grad():
        says = draft.target(on_device(batch, draft.target, CPU)[0])[0].argmax(-1)
    counted = [0] * (MICRO.block - 1)
    for row in range(len(batch.ids)):
        length = int((batch.document[row] > 0).sum())
        for anchor in range(batch.ids.shape[1] - 1):
            path = bool(batch.reply[row, anchor])
            for slot in range(MICRO.block - 1):
                at = anchor + slot
                path = path and at + 1 < length
                assert bool(blocks.weight[row, anchor, slot]) == path
                if path:
                    assert blocks.labels[row, anchor, slot] == says[row, at]
                    path = bool(says[row, at] == int(batch.ids[row, at + 1]))
                    counted[slot] += 1
    assert counted[0] > 50
    assert counted[2] > 5


def test_anchors_are_different_tokens_of_the_reply(draft):
    batch = make_batch(draft.shape, 0, draft.encoder)
    for row, anchors in enumerate(draft._draw(batch).tolist()):
        assert len(set(anchors)) == MICRO.draft_anchors
        assert batch.reply[row, anchors].all()


def test_accepted_is_how_far_the_greedy_walk_is_right(draft):
    batch = make_batch(draft.shape, 0, draft.encoder)
    blocks = draft.blocks(batch, draft._draw(batch))
    with torch.no_grad():
        for tensor in draft.model.parameters():
            tensor.add_(0.3 * torch.randn(tensor.shape))
        hidden = draft.hidden(blocks)
        walks = [
            [
                draft.model.propose(hidden[n, j], int(blocks.first[n, j]), draft.head)
                for j in range(3)
            ]
            for n in range(3)
        ]
        blocks.labels.copy_(torch.tensor(walks))
        blocks.weight.fill_(1)
        blocks.labels[0, 0, 2] += 1
        blocks.labels[1, 1, 0] += 1
        wanted = torch.full((3, 3), MICRO.block - 1)
        wanted[0, 0], wanted[1, 1] = 2, 0
        assert torch.equal(draft.accepted(blocks), wanted.to(torch.int64))
