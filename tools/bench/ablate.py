"""Which part of a hop costs what: `python -m tools.bench.ablate [case ...]` (one GPU, minutes).

Runs cases with the device code as it is and with single changes, each made in a copy of the
sources. Some changes are wrong on purpose: what a fence or a warp costs is seen without it. Names
are beginnings of cases; --check: only whether the changes fit the sources.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gpurt.executors.cuda_compile as compiler
from gpurt.bench.cases import find
from gpurt.bench.machine import cuda_machine
from gpurt.source import source_dir

Edit = tuple[str, str, str]  # file, text, what takes its place
STORER, TEAM, STREAM = "scheduler/storer.cuh", "scheduler/team.cuh", "device/stream.cuh"
LOADER, SPIN, KERNEL = "scheduler/loader.cuh", "device/spin.cuh", "scheduler/persistent.cu"
BEGUN = "st_shared_release_u32(shared_address(&slot_of(turn).met_turn), turn);"
BEGUN_PLAINLY = "*const_cast<volatile u32*>(&slot_of(turn).met_turn) = turn;"
NO_SPANS: Edit = (
    STORER,
    "const bool traces = is_first && gpurt_program.span_capacity != 0;",
    "const bool traces = false;",
)
NO_FENCE: Edit = (STORER, "add_release(word, 1);", "add_relaxed(word, 1);")
QUIET: Edit = (
    KERNEL,
    "    controller_poll(gpurt_program, controller);\n",
    "    controller_poll(gpurt_program, controller), __nanosleep(20000);\n",
)
REST = "  for (u32 polls = 0; load_acquire(counter) < target;) {\n"


def rest(cycles: int) -> Edit:
    """Between polls of a counter."""
    text = f"""{REST}    const u32 since = clock_cycles_low();
    while (clock_cycles_low() - since < {cycles}) {{
    }}
"""
    return SPIN, REST, text


COLD = "    Bodies::run_cold(turn);\n  }\n  finish_slot(turn);\n"
TEAM_SIGNALS = """  const TaskRecord& record = slot_of(turn).record;
  if ((record.flags & (kTaskWakes | kTaskDecides)) == 0) {
    team_sync();
    if (threadIdx.x < record.signal_count && slot_of(turn).kind == kSlotTask)
      add_release(counter_address(gpurt_program, record.signal[threadIdx.x]), 1);
  }
"""


def behind_cold(text: str) -> Edit:
    """Behind a cold task's end."""
    return TEAM, COLD, COLD + text


POLL = "    for (; payload_missing(missing(set), polls);) reload(set, 0);\n"


def poll(line: str) -> list[Edit]:
    """Between polls of a matvec's payload."""
    text = f"""    for (; payload_missing(missing(set), polls);) {{
      {line}
      reload(set, 0);
    }}
"""
    return [("device/bodies/matvec_activations.cuh", POLL, text)]


def spin(cycles: int) -> str:
    """That long."""
    return f"for (u32 since = clock_cycles_low(); clock_cycles_low() - since < {cycles};) {{}}"


VARIANTS: dict[str, list[Edit]] = {
    "payload polls 60 cycles apart": poll(spin(60)),
    "payload polls 120 apart": poll(spin(120)),
    "payload polls 200 apart": poll(spin(200)),
    "payload polls 300 apart": poll(spin(300)),
    "payload polls, nanosleep(0)": poll("__nanosleep(0);"),
    "payload polls, nanosleep(40)": poll("__nanosleep(40);"),
    "the first four polls 150 apart": poll("if (polls < 5) " + spin(150)),
    "base": [],
    "a begin told without a release": [(TEAM, BEGUN, BEGUN_PLAINLY)],
    "no fence (wrong)": [NO_FENCE],
    "controller looks each 20 us": [QUIET],
    "no spans": [NO_SPANS],
    "no clocks of the team": [
        (STREAM, "return threadIdx.x == (kTeamWarps == 1 ? 0 : 32);", "return false;")
    ],
    "rest of 100 cycles between polls": [rest(100)],
    "rest of 200": [rest(200)],
    "rest of 400": [rest(400)],
    "storer spins": [
        (
            STORER,
            "while (!mbarrier_try_wait(address, slot_parity(turn))) {",
            "while (!mbarrier_test_wait(address, slot_parity(turn))) {",
        )
    ],
    "loader and streamer rest 20 us": [
        (LOADER, "constexpr u32 kRestNs = 1000;", "constexpr u32 kRestNs = 20000;"),
    ],
    "no look at time": [
        (
            LOADER,
            "constexpr u32 kCyclesPerLook = 200000;",
            "constexpr u32 kCyclesPerLook = 4000000000u;",
        )
    ],
    "signals by RED": [
        (
            STORER,
            "add_release(word, 1);",
            'asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(word), "l"(1ull)'
            ' : "memory");',
        )
    ],
    "team sleeps 100 ns behind a cold task": [behind_cold("  __nanosleep(100);\n")],
    "team sleeps 200 ns": [behind_cold("  __nanosleep(200);\n")],
    "warps 1 to 15 sleep 200 ns": [behind_cold("  if (threadIdx.x >= 32) __nanosleep(200);\n")],
    "the team signals": [
        (
            TEAM,
            COLD,
            COLD.replace("  finish_slot(turn);\n", TEAM_SIGNALS + "  finish_slot(turn);\n"),
        ),
        (
            STORER,
            "        signal.send(slot.round);\n",
            "        if (signal.wakes || slot.met_turn != turn) signal.send(slot.round);\n",
        ),
    ],
    "all of it: no fence, quiet, no spans": [
        NO_FENCE,
        QUIET,
        NO_SPANS,
    ],
}
PAYLOAD = ("payload", "the first four")
# By case: which of them.
CASES = {
    "dispatch-static": [name for name in VARIANTS if not name.startswith(PAYLOAD)],
    "dispatch-claim": [
        "base",
        "a begin told without a release",
        "controller looks each 20 us",
        "storer spins",
    ],
    "dispatch-ready": [
        "base",
        "controller looks each 20 us",
        "storer spins",
        "no spans",
        "no look at time",
    ],
    **{
        f"chain-{size}-r1": ["base", *(name for name in VARIANTS if name.startswith(PAYLOAD))]
        for size in (2, 8)
    },
    "llama-1b": ["base", "payload polls 120 apart", "payload polls 200 apart"],
}


def changed(folder: Path, edits: list[Edit]) -> None:
    """A copy of the sources in `folder`. Raises: SystemExit if a text is not there once."""
    for part in ("device", "scheduler"):
        shutil.copytree(source_dir() / part, folder / part)
    for name, old, new in edits:
        text = (folder / name).read_text()
        if text.count(old) != 1:
            raise SystemExit(f"{name}: {text.count(old)} times {old!r}")
        (folder / name).write_text(text.replace(old, new))


def compile_from(folder: Path) -> None:
    """What is compiled from here on is compiled from there."""
    compiler.source_dir = lambda: folder  # type: ignore[attr-defined]


def main() -> None:
    """Each case's variants, three figures each."""
    if "--check" in sys.argv:
        for name, edits in VARIANTS.items():
            with tempfile.TemporaryDirectory() as folder:
                changed(Path(folder), edits)
            print("fits:", name)
        return
    machine: Any = cuda_machine()
    began = time.monotonic()
    wanted = tuple(a for a in sys.argv[1:] if not a.startswith("-"))
    for case_name, names in CASES.items():
        if wanted and not case_name.startswith(wanted):
            continue
        case = find([case_name])[0]
        workload = case.make(False)
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                changed(Path(folder), VARIANTS[name])
                compile_from(Path(folder))
                try:
                    side: Any = case.ours(machine, workload, lambda *_: None)
                    figures = sorted(side.measure() for _ in range(3))
                    side.close()
                    shown = ", ".join(f"{f:.4f}" for f in figures)
                except Exception as error:  # the next variant may run all the same
                    shown = f"{type(error).__name__}: {str(error)[:200]}"
            print(f"{case_name} | {name}: {shown} ({time.monotonic() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
