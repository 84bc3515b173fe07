"""Budgets of the persistent kernel: what each body takes, and the table of what it may take.

    python -m tests.helpers.budgets            # prints what the kernels take now
    python -m tests.helpers.budgets --write    # makes that the table, body_budgets.json

Figures are by body: code in bytes, spills as ptxas counts them, of all the functions it is made of;
shared memory is its part of a block's scratch.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gpurt.body import Target
from gpurt.executors import cubin
from gpurt.executors.cuda_compile import (
    BUILT_IN,
    ENTRY,
    GENERATED,
    KernelCode,
    compile_kernel,
    compile_source,
)
from gpurt.planner import plan
from tests.gpu import one_task, test_matvec
from tests.gpu.tiny_llama import tiny_llama
from tests.gpu.tiny_muse import tiny_muse

TABLE = Path(__file__).with_name("body_budgets.json")
ARCH = "sm_90a"
TARGET = Target("cuda", 132, 16, ARCH, 232448, 60 << 20)
# A hot loop names its body; what names none belongs to the machinery.
INSTANCES = {"attention_of": "attention", "ExpertFew": "expert_matvec"}
MACHINERY = "machinery"
# What each body keeps in the scratch of a block, as its source names it.
SCRATCH = {
    "attention": "attention_of<128, 4, 2, true>::Scratch",
    "combine": "combine::Scratch",
    "embed": "embed::Scratch",
    "expert_matvec": "expert_matvec::Pass[gpurt::expert_matvec::kPasses]",
    "gated_residual": "gated_residual::Scratch",
    "matvec": "MatvecTask::Half[2]",
    "matvec_f32": "matvec_f32::Scratch",
    "route": "route::Scratch",
    "sample": "sample::Shared",
}


@dataclass(frozen=True)
class Kernel:
    """Figures of one kernel. bodies: {name: {code_bytes, spill_store_bytes}}."""

    registers: int
    stack_bytes: int
    shared_bytes: int
    code_bytes: int
    bodies: dict[str, dict[str, int]]

    def as_dict(self) -> dict[str, Any]:
        """As the table has it."""
        return dict(vars(self))


@cache
def kernels() -> dict[str, Kernel]:
    """A kernel of every model family, and one of steps of many rows, team of 16."""
    case = test_matvec.Case(96, 192, norm=True, residual=True, swiglu=True)
    many = test_matvec.graph_of(case, test_matvec.data_of(case), 128)
    made = {
        "many_rows": plan(many, TARGET),
        "llama": plan(tiny_llama(), TARGET, edges="payload"),
        "muse_spark": plan(tiny_muse(), TARGET),
    }
    return {name: figures(compile_kernel(p, {}, ARCH)) for name, p in made.items()}


@cache
def scratch_bytes() -> dict[str, int]:
    """Bytes of a block's scratch that each body takes; compiled, nothing is run."""
    sizes = "\n".join(
        f'extern "C" __device__ unsigned scratch_{name} = sizeof(gpurt::{kind});'
        for name, kind in SCRATCH.items()
    )
    headers = one_task.headers("noop", "", TARGET.team_warps)
    headers[GENERATED] += "\n" + "".join(f'#include "bodies/{name}.cuh"\n' for name in SCRATCH)
    # A body's layout is its own business, but for this.
    source = f"#define private public\n{one_task.RUNNER}\n{sizes}\n"
    compiled = compile_source(source, ARCH, headers=headers, name="scratch.cu")
    read = {name: cubin.variable(compiled.cubin, f"scratch_{name}") for name in SCRATCH}
    return {name: int.from_bytes(value, "little") for name, value in read.items()}


def figures(code: KernelCode) -> Kernel:
    """Of a compiled kernel."""
    bodies: dict[str, dict[str, int]] = {}
    sizes = cubin.code_bytes(code.cubin)
    for name, size in sizes.items():
        if name != ENTRY:
            _row(bodies, name)["code_bytes"] += size
    for function in code.compiled.resources:
        if function.name != ENTRY:
            _row(bodies, function.name)["spill_store_bytes"] += function.spill_store_bytes
    entry = code.compiled.function(ENTRY)
    shared = int.from_bytes(cubin.variable(code.cubin, "gpurt_shared_bytes"), "little")
    return Kernel(entry.registers, entry.stack_bytes, shared, sizes[ENTRY], bodies)


def body_of(function: str) -> str:
    """The body that a mangled name belongs to."""
    text = re.sub(r"L[a-z]\d+E", "", function)  # numbers among template arguments
    at = 0
    while match := re.compile(r"\d+").search(text, at):
        at = match.end() + int(match[0])
        name = INSTANCES.get(text[match.end() : at], text[match.end() : at])
        if name in BUILT_IN:
            return name
    return MACHINERY


def current() -> dict[str, Any]:
    """What the table would be now."""
    return {
        "kernels": {name: kernel.as_dict() for name, kernel in kernels().items()},
        "scratch_bytes": scratch_bytes(),
    }


def report() -> str:
    """A line a kernel and body."""
    lines = []
    for name, kernel in kernels().items():
        lines.append(
            f"{name}: {kernel.code_bytes:,} bytes of code, {kernel.registers} registers, "
            f"{kernel.stack_bytes} bytes of stack, {kernel.shared_bytes:,} of shared memory"
        )
        for body, row in sorted(kernel.bodies.items(), key=lambda item: -item[1]["code_bytes"]):
            lines.append(f"  {body:<16} {row['code_bytes']:>8,}  spills {row['spill_store_bytes']}")
    return "\n".join(lines)


def _row(bodies: dict[str, dict[str, int]], function: str) -> dict[str, int]:
    return bodies.setdefault(body_of(function), {"code_bytes": 0, "spill_store_bytes": 0})


if __name__ == "__main__":
    print(report())
    print("scratch", scratch_bytes())
    if "--write" in sys.argv:
        TABLE.write_text(json.dumps(current(), indent=2, sort_keys=True) + "\n")
        print(f"wrote {TABLE}")
