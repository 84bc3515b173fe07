"""gpurt tune: what the search keeps, under costs that are given; profiles and what `auto` makes of
them. No test here measures a time.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpurt import profiles
from gpurt.bench import cases, graphs, models, shapes
from gpurt.body import Target
from gpurt.cli import main
from gpurt.doctor import examine
from gpurt.errors import ConfigError
from gpurt.graph import Graph
from gpurt.plan import Plan
from gpurt.profiles import Key, Profile
from gpurt.runtime import Runtime
from gpurt.tune import Choice, Decoding, Tuner, operators_of, profile_of
from tests.helpers.tiny import tiny_folder

HOST = Target("host", 2)
COSTLY = {("head", "claim"): -2, ("head", "ready"): -2, ("down", "ready"): -2}


class Machine:
    """Costs of a step by policy and edges, with noise; counts what is loaded at a time."""

    def __init__(self, worth: dict[Any, float], noise: float = 0.0) -> None:
        self.worth, self.noise = worth, noise
        self.random = random.Random(1)
        self.open_now = self.open_most = 0

    def open(self, choice: Choice) -> Any:
        machine, us = self, 100.0
        for pair in (*choice.policy, ("edges", choice.edges)):
            us -= self.worth.get(pair, 0.0)

        class Sampler:
            def sample(self) -> float:
                return us * (1 + machine.noise * machine.random.uniform(-1, 1))

            def close(self) -> None:
                machine.open_now -= 1

        self.open_now += 1
        self.open_most = max(self.open_most, self.open_now)
        return Sampler()


def search(machine: Machine, **options: Any) -> tuple[Choice, Any, Tuner]:
    options = {"operators": ["up", "down", "head"], "seconds": 1e9} | options
    tuner = Tuner(machine.open, **options)
    choice, trial = tuner.run()
    return choice, trial, tuner


def test_the_policy_that_each_operator_likes_best_is_found() -> None:
    machine = Machine({("up", "ready"): 10, ("up", "claim"): 5, ("down", "claim"): 7} | COSTLY)
    choice, trial, _ = search(machine)
    assert dict(choice.policy) == {"up": "ready", "down": "claim"}
    assert trial.gain == pytest.approx(0.17)
    assert (machine.open_now, machine.open_most) == (0, 2), "two are loaded at most"
    assert str(trial).endswith("kept")


def test_an_operator_goes_back_when_all_at_once_was_better_but_for_it() -> None:
    worth = {("up", "claim"): 20, ("down", "claim"): 20, ("head", "claim"): -10}
    choice, trial, _ = search(Machine(worth))
    assert dict(choice.policy) == {"up": "claim", "down": "claim"}
    assert trial.gain == pytest.approx(0.4)


def test_edges_are_a_coordinate_too() -> None:
    machine = Machine({("edges", "payload"): 30, ("up", "ready"): 5} | COSTLY)
    choice, _, _ = search(machine, edges=("auto", "payload", "counter"))
    assert (choice.edges, dict(choice.policy)) == ("payload", {"up": "ready"})


def test_what_gains_less_than_noise_leaves_the_default() -> None:
    machine = Machine({("up", "ready"): 2.0}, noise=0.3)
    choice, trial, tuner = search(machine)
    assert (choice, trial) == (Choice(), None)
    assert tuner.trials[1].noise > 0.01
    small = Machine({("up", "ready"): 0.5})
    assert search(small)[0] == Choice(), "half a percent is not worth another plan"


def test_a_lucky_trial_is_measured_again_and_dropped() -> None:
    class Lucky(Machine):
        """The first candidate is fast while it is tried, and not afterwards."""

        def open(self, choice: Choice) -> Any:
            self.worth = {("up", "claim"): 30} if choice.policy else {}
            sampler = super().open(choice)
            if not choice.policy:
                return sampler
            left, fast = self.__dict__.setdefault("left", itertools.count()), sampler.sample
            sampler.sample = lambda: fast() if next(left) < 8 else 100.0
            return sampler

    choice, trial, tuner = search(Lucky({}), operators=["up"])
    assert tuner.trials[1].kept
    assert (choice, trial) == (Choice(), None)
    assert not tuner.trials[-1].kept


def test_a_second_load_that_is_faster_by_itself_is_no_gain() -> None:
    class Uneven(Machine):
        """Whatever is loaded first is slow."""

        def open(self, choice: Choice) -> Any:
            self.worth = {("edges", "auto"): 0.0 if self.open_most == 0 else 12.0}
            return super().open(choice)

    choice, _, tuner = search(Uneven({}))
    assert tuner.trials[0].gain == pytest.approx(0.12)
    assert choice == Choice()
    assert not any(trial.kept for trial in tuner.trials[1:])


def test_a_choice_must_win_in_every_load() -> None:
    class Moody(Machine):
        """The third load of the choice is as slow as the default."""

        def open(self, choice: Choice) -> Any:
            seen = self.__dict__.setdefault("seen", itertools.count())
            lucky = bool(choice.policy) and next(seen) != 3
            self.worth = {("up", "claim"): 20.0 if lucky else 0.0}
            return super().open(choice)

    choice, trial, tuner = search(Moody({}), operators=["up"])
    assert tuner.trials[1].kept
    assert [t.kept for t in tuner.trials[-3:]] == [False, True, True]
    assert (choice, trial) == (Choice(), None)


def test_no_trial_begins_after_its_seconds() -> None:
    clock: Iterator[float] = iter(range(100))
    machine = Machine({})
    _, _, tuner = search(machine, seconds=3.5, now=lambda: float(next(clock)))
    assert len(tuner.trials) == 1 + 2, "the default again, then what fits"
    assert machine.open_now == 0


def test_operators_come_dearest_first_and_generated_ones_not() -> None:
    graph = cases.find(["smollm2-host"])[0].make(True).graph
    assert graph is not None
    names = operators_of(profiles.plan_with(graph(), HOST, "cpu", "static", "auto"))
    assert set(names) == {"embed", "q", "kv", "attention", "o", "gate_up", "down", "head", "sample"}
    assert names.index("gate_up") < names.index("sample")


def test_a_model_decodes_under_a_choice() -> None:
    graph = cases.find(["smollm2-host"])[0].make(True).graph
    assert graph is not None
    sampler = Decoding(graph(), "host", 2, Choice((("head", "ready"),)), 4)
    try:
        assert {o.policy for o in sampler.plan.operators if o.name == "head"} == {"ready"}
        assert sampler.sample() > 0
    finally:
        sampler.close()


# ---- profiles --------------------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Any) -> Path:
    monkeypatch.setenv("GPURT_CACHE_DIR", str(tmp_path))
    return tmp_path / "profiles"


def made(key: Key, when: str, **changes: Any) -> Profile:
    profile = Profile(key, {"head": "claim"}, "auto", 10.0, 9.0, 0.1, 0.01, when, "abc")
    return replace(profile, **changes)


def small(context: int = 64, layers: int = 2) -> Graph:
    config = shapes.llama_layers(models.small_model(shapes.SMOLLM2_135M), layers)
    return models.model_graph(config, rows=4, context=context, host=True)


def planned(graph: Graph, policy: Any = "auto", edges: str = "auto") -> Plan:
    return profiles.plan_with(graph, HOST, "a CPU", policy, edges)


def policies_of(plan: Plan) -> dict[str, str]:
    return {op.name: op.policy for op in plan.operators if op.body != "advance"}


@pytest.mark.usefixtures("folder")
def test_auto_takes_the_newest_profile_that_fits() -> None:
    key = profiles.key_of(small(), "a CPU", 2)
    profiles.save(made(key, "2026-01-01T00:00:00", policy={"head": "claim"}))
    profiles.save(made(key, "2026-03-01T00:00:00", policy={"head": "ready"}))
    profiles.save(made(key, "2026-02-01T00:00:00", policy={"down": "ready"}))
    for wrong in (
        replace(key, device="another CPU"),
        replace(key, workers=3),
        replace(key, rows=5),
        profiles.key_of(small(layers=1), "a CPU", 2),
    ):
        assert wrong != key
        profiles.save(made(wrong, "2026-04-01T00:00:00", policy={"embed": "claim"}))
    plan = planned(small())
    policies = policies_of(plan)
    assert policies["head"] == "ready"
    assert policies["down"] == policies["embed"] == "static"
    assert "head ready" in plan.profile
    assert "profile: head ready, edges auto (+10.0% measured" in str(plan)
    assert policies_of(planned(small(context=32))) == policies, "context is no part of the key"


@pytest.mark.usefixtures("folder")
def test_without_a_profile_auto_is_static_and_says_so() -> None:
    plan = planned(small())
    assert set(policies_of(plan).values()) == {"static"}
    assert plan.profile == "no profile for llama with 4 rows on a CPU, 2 workers: static"
    assert planned(small(), policy="claim").profile == ""


@pytest.mark.usefixtures("folder")
def test_edges_that_were_asked_for_stay() -> None:
    key = profiles.key_of(small(), "a CPU", 2)
    profiles.save(made(key, "2026-01-01T00:00:00", edges="payload"))
    assert profiles.choose(small(), "a CPU", 2, "auto", "auto")[1] == "payload"
    assert profiles.choose(small(), "a CPU", 2, "auto", "counter")[1] == "counter"
    assert profiles.choose(small(), "a CPU", 2, "static", "counter")[1] == "counter"


@pytest.mark.usefixtures("folder")
def test_a_plan_file_keeps_where_its_policies_came_from(tmp_path: Path) -> None:
    plan = planned(small())
    plan.save(tmp_path / "x.plan")
    assert Plan.load(tmp_path / "x.plan").profile == plan.profile != ""


@pytest.mark.usefixtures("folder")
def test_a_broken_profile_is_named_and_another_version_is_left_alone() -> None:
    key = profiles.key_of(small(), "a CPU", 2)
    path = profiles.save(made(key, "2026-01-01T00:00:00"))
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"version": 99, "new": 1}))
    assert profiles.all_profiles() == []
    for broken in ("{", "[]", json.dumps(values | {"policy": {"head": "best"}}), "{}"):
        path.write_text(broken)
        with pytest.raises(ConfigError, match=r"^no profile that gpurt can read .* delete it"):
            planned(small())
    check = next(c for c in examine().checks if c.name == "profiles")
    assert check.ok is False


@pytest.mark.usefixtures("folder")
def test_a_runtime_with_auto_runs_what_was_measured() -> None:
    graph = small()
    with Runtime("host", workers=2, policy="auto") as runtime:
        key = profiles.key_of(graph, runtime.config.device_name, 2)
        profiles.save(made(key, "2026-01-01T00:00:00", policy={"gate_up": "claim"}))
        plan = runtime.prepare(graph)
        assert policies_of(plan)["gate_up"] == "claim"
        assert len(runtime.submit(graph, [1, 2], max_tokens=3, ignore_eos=True).result().token_ids)
    with pytest.raises(ConfigError, match=r"^policy is 'auto' .* use one of static, claim, ready$"):
        Runtime("host", policy={"head": "auto"})


def test_a_kept_choice_and_a_kept_default_make_profiles() -> None:
    key = Key("a CPU", 2, "llama", "0" * 16, 4)
    choice, trial, tuner = search(Machine({("up", "ready"): 25} | COSTLY))
    profile = profile_of(key, choice, trial, tuner, "abc")
    assert (profile.policy, profile.us, profile.default_us) == ({"up": "ready"}, 75.0, 100.0)
    assert (round(profile.gain, 3), profile.commit) == (0.25, "abc")
    assert any("up=ready" in line and "kept" in line for line in profile.trials)
    choice, trial, tuner = search(Machine({}))
    profile = profile_of(key, choice, trial, tuner, "abc")
    assert (profile.policy, profile.gain, profile.default_us) == ({}, 0.0, 100.0)
    assert str(profile).startswith("all static, edges auto (+0.0% measured")


# ---- command line ----------------------------------------------------------------------------
def test_tune_writes_a_profile_that_plan_and_doctor_show(
    folder: Path, tmp_path: Path, capsys: Any
) -> None:
    model = str(tiny_folder(tmp_path / "model"))
    options = ["--model", model, "--device", "host", "--workers", "2", "--rows", "4"]
    assert main(["tune", *options, "--seconds", "0.001", "--tokens", "2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["key"]["workers"], shown["key"]["rows"], shown["policy"]) == (2, 4, {})
    assert len(list(folder.glob("*.json"))) == 1
    assert main(["plan", *options, "--policy", "auto"]) == 0
    assert "profile: all static, edges auto" in capsys.readouterr().out
    check = next(c for c in examine().checks if c.name == "profiles")
    assert check.ok
    assert check.detail.startswith("1; the newest: llama, 4 rows")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no model, or two - at gpurt tune"),
        (["--case", "chain-8-r1", "--device", "host"], "chain-8-r1 decodes nothing on host"),
        (["--model", "x", "--tokens", "1"], "tokens is 1, seconds 60 - at gpurt tune"),
    ],
)
def test_what_cannot_be_tuned_is_refused(arguments: list[str], message: str, capsys: Any) -> None:
    assert main(["tune", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"gpurt: {message}")


def test_a_graph_without_matrices_has_a_key_too() -> None:
    graph = graphs.stages(2, 3)
    assert profiles.key_of(graph, "d", 1) != profiles.key_of(graphs.stages(3, 3), "d", 1)
