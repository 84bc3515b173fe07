"""The host executor on real threads is clean under ThreadSanitizer, for every worker count."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.sim import build

SEEDS = {1: 3, 2: 6, 3: 10, 7: 6, 11: 4}  # worker count: random plans, 12 requests each


@pytest.fixture(scope="module")
def threads_program() -> Path:
    if not build.has_thread_sanitizer():
        pytest.skip(f"{build.compiler()} links no ThreadSanitizer runtime (libtsan)")
    return build.build_threads()


def run_threads(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    if "unexpected memory mapping" in done.stderr and shutil.which("setarch"):
        # Old runtimes cannot live with this kernel's address randomisation.
        command = ["setarch", "-R", *command]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    return done


@pytest.mark.parametrize("kind", [[], ["--experts"], ["--variants"]], ids=" ".join)
@pytest.mark.parametrize("workers", SEEDS)
def test_real_threads_have_no_data_race(
    workers: int, kind: list[str], threads_program: Path
) -> None:
    options = ["--workers", str(workers), "--seeds", str(SEEDS[workers])]
    done = run_threads(threads_program, *options, *kind)
    assert "ThreadSanitizer" not in done.stderr, done.stderr[:4000]
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("ok")


def test_a_planted_race_is_reported(threads_program: Path) -> None:
    done = run_threads(threads_program, "--workers", "3", "--seeds", "8", "--race")
    assert "WARNING: ThreadSanitizer: data race" in done.stderr
    assert done.returncode != 0
