"""gpurt/wire.py says what device/task_record.hpp says."""

import numpy as np
import pytest

from gpurt import _native, wire

LAYOUT = _native.wire_layout()
ENUMS = {
    "k": wire.DTypeCode,
    "kTask": wire.TaskFlags,
    "kPolicy": wire.Policy,
    "kRow": wire.RowFlags,
    "kPhase": wire.Phase,
    "kRequest": wire.RequestKind,
    "kFinish": wire.FinishReason,
    "kKernel": wire.KernelState,
    "kFault": wire.FaultKind,
    "kOrder": wire.OrderKind,
}


def test_python_and_cpp_have_the_same_structs():
    assert set(wire.STRUCTS) == set(LAYOUT)


@pytest.mark.parametrize("name", sorted(LAYOUT))
def test_every_field_has_the_offset_and_size_that_the_compiler_gave_it(name):
    size, fields = LAYOUT[name]
    dtype = wire.STRUCTS[name]
    ours = {k: (v[1], v[0].itemsize) for k, v in dtype.fields.items()}
    assert ours == fields
    assert list(ours) == list(fields)
    assert dtype.itemsize == size


@pytest.mark.parametrize("name", sorted(LAYOUT))
def test_no_byte_of_a_struct_is_unnamed_but_the_tail_of_a_cache_line(name):
    size, fields = LAYOUT[name]
    end = 0
    for offset, bytes_ in fields.values():
        assert offset == end
        end += bytes_
    assert end <= size < end + 64


def test_limits_are_the_same():
    constants = _native.wire_constants()
    for ours, theirs in {
        "WAITS_PER_TASK": "kWaitsPerTask",
        "SIGNALS_PER_TASK": "kSignalsPerTask",
        "ADDRS_PER_TASK": "kAddrsPerTask",
        "PARAMS_PER_TASK": "kParamsPerTask",
        "ONLY_WAIT": "kOnlyWait",
        "PUBLISHED_PER_DECISION": "kPublishedPerDecision",
        "PARAM_DECISION": "kParamDecision",
        "PARAM_EXPERT_STAGE": "kParamExpertStage",
        "PARAM_EXPERT_SIGNALS": "kParamExpertSignals",
        "PARAM_EXPERT_COUNTER": "kParamExpertCounter",
        "PARAM_EXPERT_STRIDE": "kParamExpertStride",
        "EXPERT_WORDS": "kExpertWords",
        "ADDR_LIVE_SLOTS": "kAddrLiveSlots",
        "ADDR_EXPERT_ID": "kAddrExpertId",
        "VARIANTS_PER_PLAN": "kVariantsPerPlan",
        "TURN_COUNT": "kTurnCount",
        "ADDR_SAMPLE_ROWS": "kAddrSampleRows",
        "ADDR_ROWS": "kAddrRows",
        "STOP_IDS_PER_REQUEST": "kStopIdsPerRequest",
        "COUNTER_STRIDE": "kCounterStride",
        "RANKS_MAX": "kRanksMax",
        "RANK_COUNTER": "kRankCounter",
        "SPAN_COUNT_STRIDE": "kSpanCountStride",
        "SPANS_UNPUBLISHED": "kSpansUnpublished",
        "NO_SAMPLE": "kNoSample",
    }.items():
        assert getattr(wire, ours) == constants[theirs]


@pytest.mark.parametrize("prefix", sorted(ENUMS))
def test_every_enumerator_has_the_same_number(prefix):
    constants = _native.wire_constants()
    for member in ENUMS[prefix]:
        name = prefix + "".join(part.capitalize() for part in member.name.split("_"))
        assert constants[name] == member.value


def test_request_flags_have_the_same_number():
    assert _native.wire_constants()["kRequestIgnoreStop"] == wire.RequestFlags.IGNORE_STOP


def test_the_tails_of_a_step_state_do_not_overlap():
    rows = 16
    sampled = wire.sampled_offset_bytes(rows)
    assert sampled == 64 + rows * 16 + rows * 4
    assert wire.step_state_bytes(rows) == sampled + rows * 4
    assert np.dtype("u4").itemsize == 4
