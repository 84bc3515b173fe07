"""A Plan's wire arrays: every address, parameter, list and counter where workers look for it."""

import struct
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from gpurt import wire
from gpurt.errors import PlanError
from gpurt.executors import program
from gpurt.executors.base import Options
from gpurt.plan import PlanBuffer
from tests.helpers.hand_plan import Node, hand_plan

ARENAS = {"weight": 0x10000, "state": 0x20000, "activation": 0x30000, "payload": 0x40000}


def made(nodes=None, policies=(("static", 0),), workers=2, **bounds):
    nodes = nodes or [Node(), Node(after=(0,)), Node(after=(0,)), Node(after=(1, 2))]
    plan, _ = hand_plan(nodes, workers, policies, **bounds)
    return plan


def constants(plan):
    addresses = program.buffer_addresses(plan, ARENAS, 0x50000)
    return program.constants(plan, {"noop": 3, "advance": 0}, addresses)


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (7, 7),
        (-1, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (1.0, 0x3F800000),
        (-0.5, 0xBF000000),
        (1e-5, struct.unpack("<I", struct.pack("<f", 1e-5))[0]),
    ],
)
def test_parameters_are_bit_patterns(value, bits):
    assert program.param_bits(value) == bits


def test_records_hold_addresses_parameters_and_streams():
    plan = made()
    buffers = (
        PlanBuffer("w", (64, 4), "f32", "weight", "", 1024, "weight", 256, "w"),
        PlanBuffer("x", (8,), "f32", "activation", "", 32, "activation", 512, "x"),
        PlanBuffer("p", (8,), "f32", "activation", "", 32, "payload", 0, "p"),
    )
    task = replace(
        plan.tasks[1],
        addr=((0, 16), None, (1, 4), (2, 0)),
        params=(5, 0.5),
        stream=(0, 128, 64),
        payload_mask=8,
        coords=(1, 2, 3, 4),
        layer=9,
    )
    plan = replace(plan, buffers=buffers, tasks=(plan.tasks[0], task, *plan.tasks[2:]))
    record = constants(plan)["records"][1]
    assert record["addr"][:4].tolist() == [0x10110, 0, 0x30204, 0x40000]
    assert record["param"][:2].tolist() == [5, 0x3F000000]
    assert not record["addr"][4:].any()
    assert not record["param"][2:].any()
    assert (record["stream_base"], record["stream_bytes"]) == (0x10180, 64)
    assert (record["body"], record["task_index"], record["layer"]) == (3, 1, 9)
    assert record["payload_mask"] == 8
    assert record["tile"].tolist() == [1, 2, 3, 4]
    assert record["wait_count"] == 1
    assert record["wait"][0].tolist() == (0, 1)


def test_the_sampled_tokens_lie_behind_the_rows_of_the_step():
    plan = made(rows=4, vocab=10)
    assert program.buffer_addresses(plan, ARENAS, 0x50000) == [0x50000 + 64 + 4 * 16 + 4 * 4]


def test_lists_are_worker_major_with_an_offset_a_segment():
    sections = constants(made(policies=[("static", 2), ("claim", 1), ("static", 0)], workers=2))
    offsets = sections["list_offsets"].tolist()
    lists = sections["lists"].tolist()
    cut = [lists[a:b] for a, b in pairwise(offsets)]
    assert cut == [[0], [], [4], [1], [], [3]]
    assert [tuple(s) for s in sections["segments"].tolist()] == [
        (wire.Policy.STATIC, 0, 2, 0),
        (wire.Policy.CLAIM, 2, 3, 1),
        (wire.Policy.STATIC, 3, 5, 2),
    ]


def test_ready_roots_follow_the_successors():
    plan = made([Node(), Node(), Node(after=(0, 1))], [("ready", 0)])
    sections = constants(plan)
    variant = program.header(plan, Options(), {})["variants"][0]
    begin, count = int(variant["root_begin"]), int(variant["root_count"])
    assert sections["successors"][begin : begin + count].tolist() == [0, 1]
    infos = sections["counter_infos"]
    first = infos[0]
    assert first["signals_per_step"] == 2
    at = int(first["successor_begin"])
    assert sections["successors"][at : at + int(first["successor_count"])].tolist() == [
        2 | wire.ONLY_WAIT
    ]


def test_a_resident_program_has_no_linger_and_no_residency():
    header = program.header(made(), Options(resident=True), {})
    assert (header["linger_ns"], header["residency_ns"]) == (0, 0)
    header = program.header(made(), Options(linger_ms=0, residency_ms=2.5), {})
    assert (header["linger_ns"], header["residency_ns"]) == (1, 2_500_000)


def test_span_rings_hold_sixteen_steps_of_an_even_share():
    plan = made()
    assert program.span_capacity(plan, Options()) == 8192
    many = replace(plan, tasks=plan.tasks * 1000)
    assert program.span_capacity(many, Options()) == 65536
    assert program.span_capacity(many, Options(trace=False)) == 0
    assert program.span_capacity(many, Options(span_capacity=64)) == 64


def test_an_unknown_body_is_refused():
    plan = made()
    with pytest.raises(PlanError, match=r"^task 0 runs noop, which this executor lacks"):
        program.constants(plan, {"advance": 0}, [])


def test_sections_are_large_enough_for_what_workers_index():
    plan = made(workers=3)
    sections = program.zeroed(plan, Options(span_capacity=16, queue_capacity=5))
    assert sections["counters"].size_bytes == len(plan.counters) * 64
    assert sections["held_tickets"].size_bytes == 3 * len(plan.segments) * 8
    assert sections["spans"].size_bytes == 3 * 16 * 32
    assert sections["output_tokens"].size_bytes == 5 * plan.context * 4
    assert {n for n, s in sections.items() if s.place == "host"} == {
        "host_control",
        "requests",
        "outputs",
        "prompt_tokens",
        "output_tokens",
    }
    assert np.prod(sections["device_control"].shape) == 1
