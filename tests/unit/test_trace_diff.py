"""gpurt trace diff: what is slower beyond noise, by operator and by edge."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from gpurt.cli import main
from gpurt.errors import TraceError
from gpurt.trace.diff import Change, Diff, compare, noise_us
from gpurt.trace.diff_view import show_diff
from tests.helpers.hand_trace import hand_trace
from tests.helpers.made_trace import made_trace


def made(seed=1, slower=None, workers=8):
    return made_trace(workers, layers=2, steps=25, seed=seed, slower=slower)


def by_name(diff, kind):
    return {c.name: c for c in diff.of(kind)}


def test_a_trace_does_not_differ_from_itself():
    diff = compare(made(), made())
    assert {c.verdict for c in diff.changes} == {"same"}
    assert {c.change_us for c in diff.changes} == {0.0}


def test_other_noise_of_the_same_model_is_no_change():
    diff = compare(made(1), made(2))
    beyond = [c for c in diff.changes if c.verdict != "same"]
    assert len(beyond) <= len(diff.changes) // 10, beyond


def test_a_slower_operator_is_named_first_and_the_others_are_not():
    diff = compare(made(1), made(2, {"gate_up": 900}))
    run = diff.of("run")
    assert (run[0].name, run[0].verdict) == ("layers[*].gate_up", "slower")
    # 8 workers, 2 layers, 900 ns each.
    assert run[0].change_us == pytest.approx(14.4, abs=2 * run[0].noise_us)
    assert {c.verdict for c in run[1:]} == {"same"}
    assert compare(made(1, {"gate_up": 900}), made(2)).of("run")[0].verdict == "faster"


def test_a_slower_producer_shows_on_its_edge():
    # Attention has 8 tiles: of 16 workers, half wait for the others'.
    diff = compare(made(1, workers=16), made(2, {"attention": 900}, workers=16))
    edges = by_name(diff, "edge")
    assert edges["layers[*].attention -> layers[*].o"].verdict == "slower"
    assert edges["layers[*].o -> layers[*].gate_up"].verdict == "same"


def test_medians_are_per_step_and_exact():
    diff = compare(hand_trace(5), hand_trace(5))
    figures = {(c.kind, c.name): c.after_us for c in diff.changes}
    assert figures["step", "step"] == 1.0
    assert figures["run", "layers[*].up"] == 1.07
    assert figures["stall", "layers[*].up"] == 0.3
    assert figures["edge", "layers[*].up -> advance"] == 0.5


def test_an_operator_of_one_trace_is_new_or_gone():
    trace = made()
    renamed = [replace(o, path=o.path.replace("qkv", "fused")) for o in trace.operators]
    diff = compare(trace, replace(trace, operators=tuple(renamed)))
    run = by_name(diff, "run")
    assert (run["layers[*].qkv"].verdict, run["layers[*].qkv"].after_us) == ("gone", None)
    assert (run["layers[*].fused"].verdict, run["layers[*].fused"].before_us) == ("new", None)


def test_a_wait_that_nobody_had_before_is_0_and_not_new():
    calm = hand_trace(5)
    late = calm.spans["task"] == 3
    calm.spans["begin_ns"][late] += calm.spans["wait_ns"][late]
    calm.spans["wait_ns"][late] = 0
    diff = compare(calm, hand_trace(5))
    for kind, name in (("wait", "advance"), ("edge", "layers[*].up -> advance")):
        change = by_name(diff, kind)[name]
        assert (change.before_us, change.after_us, change.verdict) == (0.0, 0.5, "slower")
        back = by_name(compare(hand_trace(5), calm), kind)[name]
        assert (back.before_us, back.after_us, back.verdict) == (0.5, 0.0, "faster")


def test_the_largest_changes_within_noise_are_shown_too():
    out = io.StringIO()
    changes = [Change("run", f"op{i}", 1.0, 2.0, 0.1, "slower") for i in range(20)]
    changes += [Change("wait", "calm", 0.0, 500.0, 900.0, "same")]
    show_diff(Diff("a", "b", "decode", 5, 5, tuple(changes)), Console(file=out, width=110))
    lines = out.getvalue().splitlines()
    assert sum(line.startswith(" op") for line in lines) == 12
    assert any(line.startswith(" calm (wait)") for line in lines)
    assert any("and 8 more" in line for line in lines)


def test_few_steps_tell_nothing_about_noise():
    diff = compare(hand_trace(2), hand_trace(2))
    assert {c.verdict for c in diff.changes} == {"unknown"}
    assert {c.noise_us for c in diff.changes} == {None}


def test_noise_covers_spread_and_drift():
    steady = np.full(20, 5.0)
    assert noise_us(steady, steady) == 0.0
    spread = steady + np.tile([-1.0, 1.0], 10)
    # MAD 1: 3 * 1.2533 * 1.4826 / sqrt(20).
    assert noise_us(steady, spread) == pytest.approx(1.2465, abs=1e-3)
    drifting = np.concatenate([steady, steady + 4])
    assert noise_us(steady, drifting) == 4.0
    assert noise_us(steady[:2], steady) is None


def test_phases_are_compared_with_their_like():
    assert compare(made(), made()).phase == "decode"
    only = compare(made(), made(), "prefill")
    assert (only.phase, only.before_steps) == ("prefill", 1)
    with pytest.raises(TraceError, match=r"^the traces have no plain steps in both \(prefill/"):
        compare(made(), made(), "plain")
    other = hand_trace(3)
    other.steps["phase"] = 1
    with pytest.raises(TraceError, match=r"^the traces have no phase in common \(decode before"):
        compare(hand_trace(3), other)


def test_terminal_marks_what_is_beyond_noise():
    out = io.StringIO()
    diff = compare(made(1), made(2, {"gate_up": 900}))
    show_diff(diff, Console(file=out, width=110, force_terminal=False))
    text = out.getvalue()
    about = "made on cuda model of 8 SMs, 8 workers, medians of 24 decode steps"
    assert f"before: {about}\nafter:  {about}\n" in text
    assert "two runs of one program may differ by more" in text
    line = next(x for x in text.splitlines() if x.strip().startswith("layers[*].gate_up "))
    assert line.rstrip().endswith("slower")
    assert max(len(x) for x in text.splitlines()) <= 110


def test_command_prints_json(capsys, tmp_path):
    made(1).save(tmp_path / "a")
    made(2, {"down": 900}).save(tmp_path / "b")
    assert main(["trace", "diff", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    slower = [
        c["name"] for c in record["changes"] if (c["kind"], c["verdict"]) == ("run", "slower")
    ]
    assert slower == ["layers[*].down"]
    assert (record["phase"], record["before_steps"]) == ("decode", 24)
    assert main(["trace", "diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "edges" in capsys.readouterr().out


def test_a_bad_path_or_phase_is_one_line(capsys, tmp_path):
    hand_trace(3).save(tmp_path / "a")
    assert main(["trace", "diff", str(tmp_path / "a"), "/no/b"]) == 2
    assert capsys.readouterr().err.startswith("gpurt: cannot read the trace")
    arguments = ["diff", str(tmp_path / "a"), str(tmp_path / "a"), "--phase", "plain"]
    assert main(["trace", *arguments]) == 2
    assert capsys.readouterr().err.startswith("gpurt: the traces have no plain steps in both")
