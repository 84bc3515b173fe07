"""The order of training: run.sh goes on where it stopped; probe picks what works and agrees."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from dataclasses import replace

import pytest
import torch

from tests.helpers.training import MICRO, StopAfter, new_run
from tests.tidy.sources import ROOT
from tools.train import probe, target
from tools.train.export import export
from tools.train.loop import train
from tools.train.recipe import read_recipe
from tools.train.target import TargetJob, load_weights

pytestmark = [pytest.mark.reference, pytest.mark.timeout(120)]


class Paced:
    """A job whose steps take a time that is made up, and whose loss is given."""

    tokens_per_step = 10
    encoder = None

    def __init__(self, shape, loss):
        self.shape, self.loss = shape, loss

    def step(self, index, batch):
        del index, batch
        return {"loss": torch.tensor(self.loss)}


@pytest.fixture
def paced(monkeypatch):
    """Jobs by kind: step_s and loss; None raises."""

    def choose(jobs):
        pace = {id(job): step_s for job, step_s in jobs.values() if job is not None}
        monkeypatch.setattr(probe, "make_batch", lambda *_: None)
        monkeypatch.setattr(
            probe, "measured", lambda job, *_: (pace[id(job)], float(job.step(0, None)["loss"]))
        )

        def make_job(experts, fused):
            job = jobs[experts, fused][0]
            if job is None:
                raise NotImplementedError("no such kernel")
            return job

        return [(t.experts, t.fused) for t in probe.trials(make_job, list(jobs), 1)]

    return choose


def test_the_fastest_way_that_works_and_agrees_is_taken(paced, capsys):
    kinds = {
        ("dense", False): (Paced(None, 5.0), 0.4),
        ("grouped", False): (Paced(None, 5.01), 0.3),
        ("dense", True): (None, 0.0),
        ("grouped", True): (Paced(None, 4.0), 0.1),
    }
    assert paced(kinds) == [("grouped", False), ("dense", False)]
    out = capsys.readouterr().out
    assert "dense, compiled: failed, NotImplementedError: no such kernel" in out
    assert "grouped, compiled: the loss is not that of dense: not taken" in out


def test_no_way_that_works_is_an_error(paced):
    with pytest.raises(RuntimeError, match=r"^no way to compute experts works"):
        paced({("dense", False): (None, 0.0)})


def test_steps_fill_the_minutes_with_time_to_spare():
    assert probe.steps_for(10, 0.5) == 1116
    assert probe.steps_for(0, 0.5) == 10


def test_a_probe_settles_a_run_once(tmp_path, capsys):
    run = new_run(tmp_path / "run")
    arguments = [str(run), "target", "--minutes", "0.001", "--steps", "1", "--device", "cpu"]
    assert probe.main(arguments) == 0
    assert read_recipe(run) == replace(MICRO, steps=10)
    settings = json.loads((run / target.SETTINGS).read_text())
    assert (settings["compile"], settings["target"]) == (False, 10)
    assert probe.main([*arguments[:3], "9", *arguments[4:]]) == 0
    assert read_recipe(run).steps == 10
    assert "its steps are settled" in capsys.readouterr().out


def test_weights_of_a_folder_begin_a_run(tmp_path):
    run = new_run(tmp_path / "run")
    job = TargetJob(MICRO, run, "cpu")
    assert train(job, run, StopAfter(10**9))
    export(run, tmp_path / "bf16", plain=True)
    again = new_run(tmp_path / "again", replace(MICRO, steps=0))
    arguments = [str(again), "--weights", str(tmp_path / "bf16"), "--device", "cpu"]
    assert target.main(arguments) == 0
    other = TargetJob(MICRO, run, "cpu")
    load_weights(other.model, tmp_path / "bf16")
    stored = torch.load(again / "target.pt", weights_only=True)["job"]["model"]
    for name, tensor in other.model.state_dict().items():
        assert torch.equal(stored[name], tensor)
        assert torch.allclose(tensor, job.model.state_dict()[name], rtol=2**-8, atol=0)


FAKE_PYTHON = """\
#!/usr/bin/env bash
# Stands for `python -m tools.train.NAME RUN ...`: notes the call, leaves the files it would.
name=${2#tools.train.} run=$3
echo "$name ${*:4}" >>"$CALLS"
case $name in
  export) mkdir -p "$4"; echo weights >"$4/model.safetensors" ;;
  target | draft)
    touch "$run/$name.pt" "$run/$name.jsonl"
    [ -e "$run/$name.once" ] || { touch "$run/$name.once"; exit "$CODE"; } ;;
  probe) touch "$run/recipe.json" "$run/settings.json" ;;
esac
"""


@pytest.fixture
def call(tmp_path):
    """Runs run.sh; returns its exit code, what it called and what is in OUT."""
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)

    def run_sh(minutes="7", code="75", **settings):
        calls.write_text("")
        made = {"PYTHON": str(python), "CALLS": str(calls), "CODE": code} | settings
        command = ["bash", str(ROOT / "tools/train/run.sh"), str(tmp_path / "run")]
        done = subprocess.run(
            [*command, str(tmp_path / "out"), minutes],
            env=os.environ | made,
            capture_output=True,
            text=True,
            check=False,
        )
        brought = sorted(path.name for path in (tmp_path / "out").iterdir())
        return done.returncode, calls.read_text().splitlines(), brought

    return run_sh


def test_run_sh_goes_on_until_all_is_done(call, tmp_path):
    first = call()
    assert first[0] == 75
    assert [line.split()[0] for line in first[1]] == ["probe", "target", "export", "export"]
    assert first[1][0] == "probe target --recipe nano --minutes 11"
    assert first[1][1] == "target --minutes 7"
    logs = ["recipe.json", "release.tar", "settings.json", "target.jsonl"]
    assert first[2] == ["bf16.tar.aa", *logs]
    second = call()
    assert second[0] == 75
    assert [line.split()[0] for line in second[1]] == [
        "probe",
        "target",
        "probe",
        "draft",
        "export",
    ]
    third = call()
    assert third[0] == 0
    assert [line.split()[0] for line in third[1]] == ["probe", "draft", "export"]
    assert third[2] == ["draft.jsonl", *logs]
    with tarfile.open(tmp_path / "out" / "release.tar") as archive:
        assert "release/model.safetensors" in archive.getnames()
    assert [line.split()[0] for line in call()[1]] == ["export"]


def test_run_sh_begins_no_job_in_its_last_minute(call):
    code, calls, _ = call("0")
    assert code == 75
    assert [line.split()[0] for line in calls] == ["probe"]


def test_run_sh_fails_as_its_job_does(call):
    code, calls, brought = call(code="3")
    assert code == 3
    assert [line.split()[0] for line in calls] == ["probe", "target"]
    assert brought == []


def test_run_sh_takes_a_target_and_its_vocabulary_as_they_are(call, tmp_path):
    weights = tmp_path / "release"
    weights.mkdir()
    (weights / "tokenizer.json").write_text("vocabulary")
    _, calls, _ = call(WEIGHTS=str(weights), TARGET_MINUTES="0", DEVICE="cuda")
    assert calls[0] == f"target --recipe nano --weights {weights} --steps 0 --device cuda"
    assert (tmp_path / "run" / "tokenizer.json").read_text() == "vocabulary"
