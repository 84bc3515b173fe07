"""The persistent kernel's code, as NVRTC and ptxas report it: no GPU is needed.

A spilled word in a stage loop costs the weight stream a quarter of its speed; no result shows it.
"""

from pathlib import Path

import pytest

from gpurt.body import Target
from gpurt.errors import GpurtError
from gpurt.executors import cuda_compile
from gpurt.executors.cuda_compile import Compiled, Resources, compile_kernel, parse_resources
from gpurt.plan import Plan
from gpurt.planner import plan
from tests.gpu import test_matvec
from tests.helpers.matvec_plan import matvec_plan

pytest.importorskip("cuda.bindings.nvrtc")
pytestmark = pytest.mark.timeout(300)

DECODE_WAYS = 4  # f32 and bf16, 1 row and up to 8: the loops that set the speed of decoding
# Words of one row of floats that are stored before its stage loop and read behind it.
KEPT_BYTES: dict[int, int] = {}


@pytest.fixture(scope="module", params=[16, 1], ids=["team16", "team1"])
def kernel(request: pytest.FixtureRequest) -> tuple[int, Compiled]:
    return request.param, _compile(matvec_plan(team=request.param), "sm_90a")


def _compile(plan: Plan, arch: str) -> Compiled:
    try:
        return compile_kernel(plan, {}, arch).compiled
    except GpurtError as error:
        if "NVRTC cannot be loaded" in str(error):
            pytest.skip(str(error))
        raise


def test_hot_loops_of_decoding_spill_nothing(kernel: tuple[int, Compiled]) -> None:
    team, compiled = kernel
    for way in range(DECODE_WAYS if team == 16 else 2):
        function = compiled.function(f"hot_loopINS_6matvecELj{way}E")
        kept = KEPT_BYTES.get(way, 0) if team == 16 else 0
        assert function.spill_store_bytes <= kept, function


def test_a_block_of_the_team_fits_the_registers_of_an_sm(kernel: tuple[int, Compiled]) -> None:
    team, compiled = kernel
    entry = compiled.function("gpurt_persistent")
    # Registers are given to the warps of an SM's quarter in blocks of 8: (team + 4) warps share.
    warps_a_quarter = -(-(team + 4) // 4)
    assert entry.registers * 32 * warps_a_quarter <= 16384


def test_the_kernel_compiles_for_the_next_architecture() -> None:
    plan = matvec_plan(team=16, target=Target("cuda", 148, 16, "sm_100a", 232448, 126 << 20))
    assert _compile(plan, "sm_100a").cubin[:4] == b"\x7fELF"


def test_products_of_four_warps_overlap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """ptxas says so where it waits for each single wgmma: nothing else would tell but the clock."""
    logs: list[str] = []

    def parse(log: str) -> tuple[Resources, ...]:
        logs.append(log)
        return parse_resources(log)

    monkeypatch.setenv("GPURT_CACHE_DIR", str(tmp_path))  # the report of a cached kernel is not all
    monkeypatch.setattr(cuda_compile, "parse_resources", parse)
    case = test_matvec.Case(96, 192)
    many = test_matvec.graph_of(case, test_matvec.data_of(case), 128)
    _compile(plan(many, Target("cuda", 132, 16, "sm_90a", 232448, 60 << 20)), "sm_90a")
    assert logs
    assert not [line for line in logs[-1].splitlines() if "serialized" in line]
