"""Builds the simulator with the C++ compiler of this machine, once per state of the sources.

Headers under test (device/, scheduler/) are compiled as they are, with GPURT_SIM selecting the
simulated atomics. Code that includes them is instrumented by the compiler (-fsanitize=thread) but
linked against tests/sim/instrumentation.cpp instead of the sanitizer's runtime.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SIM = ROOT / "tests" / "sim"
BUILD = ROOT / "build" / "sim"

FLAGS = [
    "-std=c++20",
    "-g1",
    *("-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"),
    *(f"-I{ROOT / folder}" for folder in ("device", "scheduler", "tests/sim")),
]
SIM_FLAGS = [*FLAGS, "-O2", "-DGPURT_SIM"]
INSTRUMENTED = ["-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0", "-fno-builtin"]
WRAPPED = ["-Wl,--wrap=memcpy", "-Wl,--wrap=memmove", "-Wl,--wrap=memset"]
FRAMEWORK = ["memory.cpp", "machine.cpp"]
PRODUCT = ["model.cpp", "families.cpp", "world.cpp", "experts.cpp", "host.cpp", "planted.cpp"]
PRODUCT += ["pipeline.cpp"]


class BuildError(Exception):
    """The compiler is missing or refused a source."""


def compiler() -> str:
    """Path of the C++ compiler: CXX if set, else g++."""
    name = os.environ.get("CXX", "g++")
    path = shutil.which(name)
    if path is None:
        raise BuildError(f"no C++ compiler {name} - at PATH - install g++ or set CXX")
    return path


def compile_and_link(
    name: str, flags: list[str], sources: list[list[str]], link: list[str]
) -> Path:
    """Builds `name` from sources ([file, own flags...]), unless the same inputs are built."""
    BUILD.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(repr((compiler(), flags, sources, link)).encode())
    for path in sorted(
        path
        for folder in (ROOT / "device", ROOT / "scheduler", SIM)
        for path in folder.rglob("*.[hc]pp")
    ):
        digest.update(path.read_bytes())
    program = BUILD / f"{name}-{digest.hexdigest()[:16]}"
    with (BUILD / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes may start at once
        if program.exists():
            return program
        for old in BUILD.glob(f"{name}-*"):
            old.unlink()
        objects = [str(BUILD / f"{name}.{Path(source).stem}.o") for source, *_ in sources]
        commands = [
            [compiler(), *flags, *own, "-c", str(SIM / source), "-o", target]
            for (source, *own), target in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(max_workers=2) as pool:
            list(pool.map(run, commands))
        partial = program.with_suffix(".partial")
        run([compiler(), *objects, *link, "-o", str(partial)])
        partial.rename(program)
    return program


def run(command: list[str]) -> None:
    """Runs a compiler command; its output is the error's text."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def build_litmus() -> Path:
    """The litmus programs: the memory model alone."""
    return compile_and_link("litmus", SIM_FLAGS, [[f] for f in [*FRAMEWORK, "litmus.cpp"]], [])


def build_sim() -> Path:
    """The simulator around the product's protocol headers."""
    sources = [[f] for f in [*FRAMEWORK, "instrumentation.cpp", "cases.cpp", "main.cpp"]]
    sources += [[f, *INSTRUMENTED] for f in PRODUCT]
    return compile_and_link("sim", SIM_FLAGS, sources, WRAPPED)


def build_ranks() -> Path:
    """The simulator of several ranks."""
    sources = [[f] for f in [*FRAMEWORK, "instrumentation.cpp"]]
    return compile_and_link("ranks", SIM_FLAGS, [*sources, ["ranks.cpp", *INSTRUMENTED]], WRAPPED)


def build_threads() -> Path:
    """The host executor on real threads, under ThreadSanitizer."""
    # -Wno-tsan: it knows no fences, and only the end protocol uses one, between two atomic words.
    flags = [*FLAGS, "-O1", "-fsanitize=thread", "-Wno-tsan"]
    sources = ["threads.cpp", "model.cpp", "families.cpp", "memory.cpp"]
    sources.append("../../scheduler/host_executor.cpp")
    return compile_and_link("threads", flags, [[f] for f in sources], ["-fsanitize=thread"])


def has_thread_sanitizer() -> bool:
    """Whether the compiler can link ThreadSanitizer's runtime."""
    command = [compiler(), "-fsanitize=thread", "-x", "c++", "-", "-o", os.devnull]
    done = subprocess.run(
        command, input="int main() { return 0; }", capture_output=True, text=True, check=False
    )
    return done.returncode == 0
