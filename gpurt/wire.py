"""The wire structs of device/task_record.hpp as numpy dtypes, and their enumerations.

Owns: the Python side of the byte layout. tests/unit/test_wire.py compares every size and offset
with what the C++ compiler says, so the two files cannot drift apart.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Any

import numpy as np

WAITS_PER_TASK = 4
SIGNALS_PER_TASK = 4
ADDRS_PER_TASK = 10
PARAMS_PER_TASK = 20
PUBLISHED_PER_DECISION = 4
# On a successor: the counter is all that it waits for (kOnlyWait).
ONLY_WAIT = 0x80000000
# Where the tasks of TaskFlags.DECIDES and EXPERT_STREAM keep what no body reads.
PARAM_DECISION = PARAMS_PER_TASK - 1
PARAM_EXPERT_STAGE = PARAMS_PER_TASK - 4  # in units of EXPERT_STRIDE_UNIT bytes
PARAM_EXPERT_SIGNALS = PARAMS_PER_TASK - 3
PARAM_EXPERT_COUNTER = PARAMS_PER_TASK - 2
PARAM_EXPERT_STRIDE = PARAMS_PER_TASK - 1  # in units of EXPERT_STRIDE_UNIT bytes
EXPERT_STRIDE_UNIT = 16
EXPERT_WORDS = 6  # u32 from the expert's id on that the loader brings along
ADDR_LIVE_SLOTS = ADDRS_PER_TASK - 2
ADDR_EXPERT_ID = ADDRS_PER_TASK - 1
# Of TaskFlags.OWN_ROWS.
ADDR_SAMPLE_ROWS = ADDRS_PER_TASK - 2
ADDR_ROWS = ADDRS_PER_TASK - 1
STOP_IDS_PER_REQUEST = 16
PROPOSALS_PER_SLOT = 15
VARIANTS_PER_PLAN = 4
TURN_COUNT = 4  # DeviceControl.turns
COUNTER_STRIDE = 64  # bytes between counters
RANKS_MAX = 8
RANK_COUNTER = 0x80000000  # set in the index of a counter that all ranks signal
SPAN_COUNT_STRIDE = 64  # bytes between the span counts of two workers
SPANS_UNPUBLISHED = 64  # that a worker on the GPU stores before it publishes its count
NO_SAMPLE = 0xFFFFFFFF


class DTypeCode(IntEnum):
    """Element types as bodies see them in their parameters."""

    F32 = 0
    F16 = 1
    BF16 = 2
    I32 = 3
    U32 = 4
    U8 = 5
    Q4_1 = 6
    Q8_0 = 7
    NVFP4 = 8
    E4M3 = 9


DTYPE_CODES = {
    "f32": DTypeCode.F32,
    "f16": DTypeCode.F16,
    "bf16": DTypeCode.BF16,
    "i32": DTypeCode.I32,
    "u32": DTypeCode.U32,
    "u8": DTypeCode.U8,
    "q4_1": DTypeCode.Q4_1,
    "q8_0": DTypeCode.Q8_0,
    "nvfp4": DTypeCode.NVFP4,
    "e4m3": DTypeCode.E4M3,
}


class TaskFlags(IntFlag):
    """Bits of `TaskRecord.flags`."""

    ADVANCE = 1
    PAYLOAD_IN = 2
    PAYLOAD_OUT = 4
    REARM = 8
    DECIDES = 16
    EXPERT_STREAM = 32
    WAKES = 64
    OWN_ROWS = 128
    RING = 256


class Policy(IntEnum):
    """How a segment's tasks reach workers."""

    STATIC = 0
    CLAIM = 1
    READY = 2
    DYNAMIC = 3


class RowFlags(IntFlag):
    """Bits of `RowState.flags`."""

    SAMPLE = 1
    PROPOSAL = 2


class Phase(IntEnum):
    """Kind of a step, by its first row."""

    PLAIN = 0
    PREFILL = 1
    DECODE = 2


class RequestKind(IntEnum):
    """What a request asks for."""

    STEPS = 0
    GENERATE = 1


class FinishReason(IntEnum):
    """Why a request ended; NONE while it has not."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    FAULT = 4
    STEPS = 5


class RequestFlags(IntFlag):
    """Bits of `RequestRecord.flags`."""

    IGNORE_STOP = 1


class KernelState(IntEnum):
    """What the controller last said about the launch."""

    ABSENT = 0
    RUNNING = 1
    ENDING = 2


class OrderKind(IntEnum):
    """What rank 0 tells the others."""

    STEP = 0
    IDLE = 1
    EXIT = 2


class FaultKind(IntEnum):
    """What a worker gave up on."""

    NONE = 0
    EDGE_TIMEOUT = 1
    PAYLOAD_TIMEOUT = 2
    STREAM_TIMEOUT = 3
    QUEUE_TIMEOUT = 4
    NON_FINITE = 5
    HOST_BODY = 6
    CHECK_IN = 7
    CAPACITY = 8
    PEER = 9
    RANKS_DIFFER = 10
    RANK_LOST = 11


def _struct(size_bytes: int, *fields: tuple[Any, ...]) -> np.dtype[Any]:
    """Fields at their natural alignment, as C lays them out, padded to `size_bytes`."""
    natural = np.dtype(list(fields), align=True)
    offsets = [natural.fields[name][1] for name in natural.names or ()] if natural.fields else []
    return np.dtype(
        {
            "names": [f[0] for f in fields],
            "formats": [f[1:] if len(f) > 2 else f[1] for f in fields],
            "offsets": offsets,
            "itemsize": size_bytes,
        }
    )


WAIT = _struct(8, ("counter", "u4"), ("signals_per_step", "u4"))

TASK_RECORD = _struct(
    256,
    ("stream_base", "u8"),
    ("stream_bytes", "u4"),
    ("body", "u2"),
    ("flags", "u2"),
    ("task_index", "u4"),
    ("op_index", "u4"),
    ("wait_count", "u2"),
    ("signal_count", "u2"),
    ("layer", "u2"),
    ("payload_mask", "u2"),
    ("wait", WAIT, WAITS_PER_TASK),
    ("signal", "u4", SIGNALS_PER_TASK),
    ("tile", "u4", 4),
    ("addr", "u8", ADDRS_PER_TASK),
    ("param", "u4", PARAMS_PER_TASK),
)

SEGMENT = _struct(16, ("policy", "u4"), ("begin", "u4"), ("end", "u4"), ("cursor", "u4"))

VARIANT = _struct(
    32,
    ("rows", "u4"),
    ("segment_begin", "u4"),
    ("segment_end", "u4"),
    ("root_begin", "u4"),
    ("root_count", "u4"),
    ("reserved", "u4", 3),
)

COUNTER_INFO = _struct(
    16,
    ("signals_per_step", "u4"),
    ("successor_begin", "u4"),
    ("successor_count", "u4"),
    ("queue", "u4"),
)

CURSOR = _struct(128, ("head", "u8"), ("pad0", "u1", 56), ("tail", "u8"), ("pad1", "u1", 56))

PUBLISHED = _struct(8, ("cursor", "u4"), ("tiles_per_slot", "u4"))

ABSENT = _struct(
    16, ("counter", "u4"), ("slot_begin", "u4"), ("slot_end", "u4"), ("signals_per_slot", "u4")
)

DECISION = _struct(
    64,
    ("live", "u8"),
    ("slots", "u4"),
    ("absent_begin", "u4"),
    ("absent_count", "u4"),
    ("published_count", "u4"),
    ("reserved", "u4", 2),
    ("published", PUBLISHED, PUBLISHED_PER_DECISION),
)

ROW_STATE = _struct(16, ("token", "u4"), ("slot", "u4"), ("position", "u4"), ("flags", "u4"))

STEP_STATE = _struct(
    64,
    ("step", "u8"),
    ("rows", "u4"),
    ("sample_count", "u4"),
    ("phase", "u4"),
    ("variant", "u4"),
    ("round", "u8"),
    ("rows_capacity", "u4"),
    ("reserved", "u4", 7),
)

REQUEST_RECORD = _struct(
    128,
    ("sequence", "u8"),
    ("kind", "u4"),
    ("flags", "u4"),
    ("prompt_tokens", "u4"),
    ("max_tokens", "u4"),
    ("temperature", "f4"),
    ("top_k", "u4"),
    ("top_p", "f4"),
    ("stop_count", "u4"),
    ("seed", "u8"),
    ("cancel", "u4"),
    ("kept_tokens", "u4"),
    ("follows", "u8"),
    ("stop_ids", "u4", STOP_IDS_PER_REQUEST),
)

REQUEST_OUTPUT = _struct(
    128,
    ("token_count", "u8"),
    ("finish_reason", "u4"),
    ("steps", "u4"),
    ("begin_ns", "u8"),
    ("first_token_ns", "u8"),
    ("end_ns", "u8"),
    ("first_step", "u8"),
    ("last_step", "u8"),
    ("kept_tokens", "u8"),
    ("verify_steps", "u4"),
    ("accepted", "u4", PROPOSALS_PER_SLOT),
)

PROPOSALS = _struct(64, ("count", "u4"), ("tokens", "u4", PROPOSALS_PER_SLOT))

SLOT_STATE = _struct(
    192,
    ("active", "u4"),
    ("entry", "u4"),
    ("position", "u4"),
    ("prompt_tokens", "u4"),
    ("produced", "u4"),
    ("max_tokens", "u4"),
    ("last_token", "u4"),
    ("kind", "u4"),
    ("flags", "u4"),
    ("stop_count", "u4"),
    ("temperature", "f4"),
    ("top_k", "u4"),
    ("top_p", "f4"),
    ("sample_index", "u4"),
    ("seed", "u8"),
    ("stop_ids", "u4", STOP_IDS_PER_REQUEST),
    ("verify_steps", "u4"),
    ("accepted", "u4", PROPOSALS_PER_SLOT),
)

FAULT = _struct(
    64,
    ("kind", "u4"),
    ("worker", "u4"),
    ("task", "u4"),
    ("counter", "u4"),
    ("step", "u8"),
    ("seen", "u8"),
    ("needed", "u8"),
    ("waited_ns", "u8"),
    ("detail", "u4", 4),
)

HOST_CONTROL = _struct(
    192,
    ("submit_tail", "u8"),
    ("exit_request", "u4"),
    ("abort_request", "u4"),
    ("cancel_count", "u4"),
    ("pad0", "u1", 44),
    ("submit_head", "u8"),
    ("kernel_state", "u4"),
    ("workers_in", "u4"),
    ("heartbeat", "u8"),
    ("idle_since_ns", "u8"),
    ("launch", "u4"),
    ("ranks_in", "u4"),
    ("pad1", "u1", 24),
    ("fault", FAULT),
)

DEVICE_CONTROL = _struct(
    192,
    ("steps_open", "u8"),
    ("turns", "u8", TURN_COUNT),
    ("pad0", "u1", 24),
    ("mirror_submit_tail", "u8"),
    ("mirror_exit", "u4"),
    ("mirror_cancel", "u4"),
    ("abort", "u4"),
    ("exit", "u4"),
    ("idle", "u4"),
    ("workers_in", "u4"),
    ("submit_head", "u8"),
    ("cancel_seen", "u4"),
    ("launch", "u4"),
    ("order_count", "u8"),
    ("pad1", "u1", 8),
    ("rounds", "u8", VARIANTS_PER_PLAN),
    ("slow_step", "u8"),
    ("slow_bound_ns", "u8", 2),
    ("pad2", "u1", 8),
)

RANK_CONTROL = _struct(128, ("in", "u8", RANKS_MAX), ("abort", "u8"), ("pad", "u1", 56))

STEP_ORDER = _struct(
    64,
    ("stamp", "u8"),
    ("kind", "u4"),
    ("checks", "u4"),
    ("check", "u8"),
    ("next_variant", "u4"),
    ("pad", "u1", 36),
)

SPAN = _struct(
    32,
    ("begin", "u8"),
    ("task", "u4"),
    ("step", "u4"),
    ("wait", "u4"),
    ("stall", "u4"),
    ("run", "u4"),
    ("chosen", "u4"),
)

STEP_SUMMARY = _struct(
    32,
    ("step", "u8"),
    ("begin_ns", "u8"),
    ("end_ns", "u8"),
    ("rows", "u4"),
    ("phase", "u2"),
    ("variant", "u2"),
)

_PROGRAM_U64 = """
    records segments lists list_offsets counters counter_infos successors arrived ready_slots
    cursors step_state slots device_control host_control requests outputs prompt_tokens
    output_tokens spans span_counts sampled_spans sampled_counts summaries wait_timeout_ns
    linger_ns residency_ns tick_ns_x1024 first_step payload_set_bytes held_tickets
"""
_PROGRAM_U32 = """
    task_count segment_count worker_count counter_count rows_capacity slot_count queue_capacity
    context_capacity span_capacity summary_capacity sample_period vocab_size prefill_rows
    team_warps variant_count reserved
"""
PROGRAM = _struct(
    512,
    *((n, "u8") for n in _PROGRAM_U64.split()),
    *((n, "u4") for n in _PROGRAM_U32.split()),
    *((n, "u8") for n in ["decisions", "absents", "symmetric", "peers", "rank_counters"]),
    *((n, "u4") for n in ["rank", "rank_count", "rank_counter_count", "reserved1"]),
    ("slot_owners", "u8"),
    ("variants", VARIANT, VARIANTS_PER_PLAN),
)

STRUCTS: dict[str, np.dtype[Any]] = {
    "Wait": WAIT,
    "TaskRecord": TASK_RECORD,
    "Segment": SEGMENT,
    "Variant": VARIANT,
    "CounterInfo": COUNTER_INFO,
    "Cursor": CURSOR,
    "Published": PUBLISHED,
    "Absent": ABSENT,
    "Decision": DECISION,
    "RowState": ROW_STATE,
    "StepState": STEP_STATE,
    "RequestRecord": REQUEST_RECORD,
    "RequestOutput": REQUEST_OUTPUT,
    "Proposals": PROPOSALS,
    "SlotState": SLOT_STATE,
    "Fault": FAULT,
    "HostControl": HOST_CONTROL,
    "DeviceControl": DEVICE_CONTROL,
    "RankControl": RANK_CONTROL,
    "StepOrder": STEP_ORDER,
    "Span": SPAN,
    "StepSummary": STEP_SUMMARY,
    "Program": PROGRAM,
}


def field_offset(struct: np.dtype[Any], name: str) -> int:
    """Bytes from the start of a struct to one of its fields."""
    assert struct.fields is not None
    return int(struct.fields[name][1])


def first_turn(control: np.ndarray[tuple[()], Any], first_step: int, variant: int) -> None:
    """Fix the turn of a launch's first step in a zeroed DeviceControl: round 1 of `variant`."""
    control["turns"][first_step % TURN_COUNT] = 1 << 8 | variant
    control["rounds"][variant] = 1


def step_state_bytes(rows: int) -> int:
    """Bytes of a StepState with its rows, sample rows and sampled tokens."""
    return STEP_STATE.itemsize + rows * (ROW_STATE.itemsize + 4 + 4)


def sampled_offset_bytes(rows: int) -> int:
    """Where the sampled tokens lie in a StepState of `rows` rows."""
    return STEP_STATE.itemsize + rows * (ROW_STATE.itemsize + 4)


def sample_rows_offset_bytes(rows: int) -> int:
    """Where the sample rows lie in a StepState, or a table, of `rows` rows."""
    return STEP_STATE.itemsize + rows * ROW_STATE.itemsize


def row_table_words(rows: int) -> int:
    """32-bit words of a table of `rows` rows: a StepState without its sampled tokens."""
    return sampled_offset_bytes(rows) // 4


def row_table_rows(words: int) -> int:
    """The rows of a table of so many words."""
    return (words - row_table_words(0)) // (row_table_words(1) - row_table_words(0))
