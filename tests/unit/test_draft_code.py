"""The persistent kernel with a drafter compiles by NVRTC, and is as lean as without: no GPU."""

from dataclasses import replace

import pytest

from gpurt.bench import cases_draft, shapes
from gpurt.body import Target
from gpurt.executors.cuda_compile import compile_kernel
from gpurt.graphs.dflash import default_taps
from gpurt.graphs.drafters import add_drafter
from gpurt.planner import plan
from tests.gpu.tiny_llama import tiny_llama

pytest.importorskip("cuda.bindings.nvrtc")
pytestmark = pytest.mark.timeout(300)

TARGET = Target("cuda", 132, 16, "sm_90a", 232448, 60 << 20)


@pytest.mark.parametrize(("arch", "team"), [("sm_90a", 16), ("sm_100a", 16), ("sm_90a", 1)])
def test_the_drafter_compiles_without_spills(arch: str, team: int) -> None:
    graph = add_drafter(tiny_llama(slots=2), "ngram")
    made = plan(graph, replace(TARGET, arch=arch, team_warps=team), edges="auto")
    compiled = compile_kernel(made, {}, arch).compiled
    assert compiled.cubin[:4] == b"\x7fELF"
    assert compiled.function("gpurt_persistent").registers <= (96 if team == 16 else 255)
    drafter = compiled.function("call_bodyINS_11draft_ngram")
    assert drafter.spill_store_bytes == 0
    assert drafter.spill_load_bytes <= 12  # the caller's, read back once
    for way in range(2):
        # Of a row of floats, over its loops; on sm_100a of one of bf16 two words.
        few = 8 if arch == "sm_100a" else 0
        kept = (few if way else 24) if team == 16 else 0
        assert compiled.function(f"hot_loopINS_6matvecELj{way}E").spill_store_bytes <= kept


def test_a_large_drafter_costs_no_other_body_registers() -> None:
    """The compiler once kept eight registers out of every function of a kernel with a walk."""
    model = shapes.muse_layers(shapes.MUSE_SPARK, 0, 2)
    drafter = replace(shapes.MUSE_DRAFT, layers=1, windows=(2048,), causal=(False,))
    drafter = replace(drafter, taps=default_taps(2, 1))
    graph = cases_draft.whole_step(model, drafter, context=2048, ranks=8, routing="random")
    compiled = compile_kernel(plan(graph, TARGET, edges="auto"), {}, "sm_90a").compiled
    for name, most in (
        ("hot_loopINS_6matvecELj5E", 40),
        ("run_manyINS_9Nvfp4UnitELj16E", 96),
        ("call_bodyINS_10matvec_f32", 96),
        ("call_bodyINS_6reduce", 16),
    ):
        assert compiled.function(name).spill_store_bytes <= most, compiled.function(name)
