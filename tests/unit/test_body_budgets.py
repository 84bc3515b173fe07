"""Registers, spills, shared memory and code of every body stay within body_budgets.json.

Growth costs speed that no result shows: a spilled word in a loop, code that leaves the instruction
cache. Where it is wanted: `python -m tests.helpers.budgets --write`, and say why in the commit.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers import budgets

pytest.importorskip("cuda.bindings.nvrtc")
pytestmark = pytest.mark.timeout(300)

# A compiler's next version may move this much without anybody's doing.
CODE_SLACK, SPILL_SLACK_BYTES = 1.1, 16
HINT = "make it smaller, or python -m tests.helpers.budgets --write and say why"


def table() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(budgets.TABLE.read_text())
    return loaded


def excess(kernel: dict[str, Any], allowed: dict[str, Any]) -> list[str]:
    """What of a kernel is beyond its budget, a sentence each."""
    found = []
    for name in ("registers", "shared_bytes", "stack_bytes"):
        slack = SPILL_SLACK_BYTES if name == "stack_bytes" else 0
        if kernel[name] > allowed[name] + slack:
            found.append(f"{name} {kernel[name]}, budget {allowed[name]}")
    if kernel["code_bytes"] > allowed["code_bytes"] * CODE_SLACK:
        found.append(f"code {kernel['code_bytes']:,} bytes, budget {allowed['code_bytes']:,}")
    for body, row in kernel["bodies"].items():
        own = allowed["bodies"].get(body)
        if own is None:
            found.append(f"{body} has no budget")
            continue
        if row["code_bytes"] > own["code_bytes"] * CODE_SLACK:
            found.append(f"{body}: code {row['code_bytes']:,} bytes, budget {own['code_bytes']:,}")
        if row["spill_store_bytes"] > own["spill_store_bytes"] + SPILL_SLACK_BYTES:
            spilled, most = row["spill_store_bytes"], own["spill_store_bytes"]
            found.append(f"{body}: {spilled} bytes of spills, budget {most}")
    return found


@pytest.mark.parametrize("name", ["llama", "muse_spark", "many_rows"])
def test_a_kernel_and_its_bodies_stay_within_their_budgets(name: str, capsys: Any) -> None:
    kernel = budgets.kernels()[name].as_dict()
    with capsys.disabled():
        print(f"\n{name}: {kernel['code_bytes']:,} bytes of code", end=" ")
    found = excess(kernel, table()["kernels"][name])
    assert not found, f"{'; '.join(found)} - at the kernel of {name} - {HINT}"


def test_every_body_takes_its_part_of_the_scratch_and_no_more() -> None:
    allowed, taken = table()["scratch_bytes"], budgets.scratch_bytes()
    assert set(taken) == set(allowed)
    over = {n: (size, allowed[n]) for n, size in taken.items() if size > allowed[n]}
    assert not over, f"bytes of scratch, taken and budget: {over} - {HINT}"


def test_growth_is_told_with_its_numbers() -> None:
    allowed = table()["kernels"]["llama"]
    grown = json.loads(json.dumps(allowed))
    grown["registers"] += 8
    grown["bodies"]["attention"]["code_bytes"] *= 2
    grown["bodies"]["matvec"]["spill_store_bytes"] += SPILL_SLACK_BYTES + 4
    grown["bodies"]["own"] = {"code_bytes": 1, "spill_store_bytes": 0}
    seen = excess(grown, allowed)
    size, spills = (
        allowed["bodies"]["attention"]["code_bytes"],
        allowed["bodies"]["matvec"]["spill_store_bytes"],
    )
    assert sorted(seen) == sorted(
        [
            f"registers {allowed['registers'] + 8}, budget {allowed['registers']}",
            f"attention: code {2 * size:,} bytes, budget {size:,}",
            f"matvec: {spills + SPILL_SLACK_BYTES + 4} bytes of spills, budget {spills}",
            "own has no budget",
        ]
    )
    assert excess(allowed, allowed) == []


@pytest.mark.parametrize(
    ("function", "body"),
    [
        ("_ZN5gpurt8hot_loopINS_6matvecELj4EEENS_9TeamStateES2_", "matvec"),
        ("_ZN5gpurt10matvec_f328multiplyERKNS_10TaskRecordE", "matvec_f32"),
        ("_ZN5gpurt12attention_ofILj64ELj3ELj2ELb0EE10fold_itemsERKNS_10Task", "attention"),
        ("_ZN5gpurt9call_bodyINS_14gated_residualEEEvRKNS_10TaskRecordE", "gated_residual"),
        ("_ZN5gpurt10run_loaderEv", budgets.MACHINERY),
        ("__cuda_sm20_div_u64", budgets.MACHINERY),
    ],
)
def test_functions_belong_to_their_bodies(function: str, body: str) -> None:
    assert budgets.body_of(function) == body


def test_a_cubin_states_variables_and_the_code_of_callees() -> None:
    code = budgets.kernels()["llama"]
    assert code.shared_bytes > 200_000
    inside = sum(row["code_bytes"] for row in code.bodies.values())
    # The entry's own code lies between those of what it calls.
    assert 0.9 * code.code_bytes < inside <= code.code_bytes
