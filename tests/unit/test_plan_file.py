"""Plan files: what is saved is loaded, and a file that is no whole plan is one clear error."""

from __future__ import annotations

import msgpack
import pytest

from gpurt.body import Target, body
from gpurt.errors import PlanError
from gpurt.graph import Graph
from gpurt.plan import PLAN_VERSION, Plan
from gpurt.planner import plan
from tests.helpers.random_graphs import CUDA, POLLING
from tests.unit.test_check_plan import chain
from tests.unit.test_plan import llama


@pytest.fixture
def saved(tmp_path):
    made = plan(llama(), Target("host", 3), policy={"attention": "ready"})
    made.save(tmp_path / "p.plan")
    return made, tmp_path / "p.plan"


def test_loaded_plan_equals_the_saved_one_and_checks(saved):
    made, path = saved
    loaded = Plan.load(path)
    assert loaded == made
    loaded.check()


def test_parameter_keeps_its_type(tmp_path):
    # 1 and 1.0 are equal, but not one bit pattern in a record.
    graph = Graph("kinds")
    f = body("f", lambda *_, **__: None)
    for value in (1, 1.0, 1, 0.5):
        graph.task(f, reads=[], writes=[], value=value)
    plan(graph, Target("host", 1)).save(tmp_path / "p.plan")
    params = [t.params[0] for t in Plan.load(tmp_path / "p.plan").tasks[:-1]]
    assert [repr(p) for p in params] == ["1", "1.0", "1", "0.5"]


def test_payload_plan_survives_a_round_trip(tmp_path):
    made = plan(chain(POLLING), CUDA, edges="payload")
    made.save(tmp_path / "p.plan")
    assert Plan.load(tmp_path / "p.plan") == made


def test_same_plan_gives_the_same_bytes(saved, tmp_path):
    _, path = saved
    Plan.load(path).save(tmp_path / "again.plan")
    assert (tmp_path / "again.plan").read_bytes() == path.read_bytes()


def test_truncated_file_is_rejected_at_every_length(saved):
    _, path = saved
    data = path.read_bytes()
    for length in (0, 1, 10, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(PlanError, match=rf"^no whole plan file: {length} bytes end early"):
            Plan.load(path)


def test_damaged_byte_is_rejected_wherever_it_is(saved):
    _, path = saved
    data = path.read_bytes()
    for at in range(40, len(data), len(data) // 23):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :])
        with pytest.raises(
            PlanError, match=r"^(the plan's checksum|no whole plan file|not a plan)"
        ):
            Plan.load(path)


def test_newer_file_says_both_versions(saved):
    _, path = saved
    record = msgpack.unpackb(path.read_bytes())
    path.write_bytes(msgpack.packb({**record, "schema": PLAN_VERSION + 1}))
    what = rf"^plan file of schema {PLAN_VERSION + 1}, this gpurt reads up to {PLAN_VERSION} - at "
    with pytest.raises(PlanError, match=what):
        Plan.load(path)


def test_other_files_are_rejected(tmp_path):
    other = tmp_path / "other"
    other.write_bytes(msgpack.packb({"format": "gpurt.trace", "schema": 1}))
    with pytest.raises(PlanError, match=r"^not a plan file - at .*other"):
        Plan.load(other)
    with pytest.raises(PlanError, match=r"^cannot read the plan: No such file"):
        Plan.load(tmp_path / "absent")
    with pytest.raises(PlanError, match=r"^cannot read the plan: Is a directory"):
        Plan.load(tmp_path)
    with pytest.raises(PlanError, match=r"^cannot write the plan: "):
        plan(chain(), Target("host", 1)).save(tmp_path / "no" / "p.plan")


def test_file_with_a_right_checksum_but_other_fields_is_rejected(saved):
    import hashlib

    _, path = saved
    record = msgpack.unpackb(path.read_bytes())
    wire = msgpack.unpackb(record["payload"])
    for change in ({"tasks": None}, {"buffers": [[1]]}, {"target": {"kind": "host"}}):
        payload = msgpack.packb({**wire, **change})
        digest = hashlib.sha256(payload).digest()
        path.write_bytes(msgpack.packb({**record, "payload": payload, "checksum": digest}))
        with pytest.raises(PlanError, match=r"^the plan's fields do not fit schema 1"):
            Plan.load(path)
