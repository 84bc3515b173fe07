"""The CUDA sources compile by NVRTC, without a GPU: resources, cache, errors in a user's struct."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gpurt.body import Body, Target, body
from gpurt.buffer import f32
from gpurt.errors import CacheWarning, DeviceError, GraphError
from gpurt.executors import cuda_compile
from gpurt.executors.cuda_compile import (
    Compiled,
    KernelCode,
    attention_shape,
    compile_kernel,
    compile_source,
    parse_resources,
    stage_count,
)
from gpurt.graph import Graph
from gpurt.graphs.ops.attention import ATTENTION
from gpurt.planner import plan
from tests.gpu import one_task, tiny_muse
from tests.gpu import tiny_llama as tiny_llama_module
from tests.gpu.tiny_dflash import DRAFT, drafted_muse, tiny_dflash
from tests.gpu.tiny_llama import CONFIG, tiny_llama

pytest.importorskip("cuda.bindings.nvrtc")

SMEM_BYTES = 232448  # of one block of sm_90 and sm_100
TARGET = Target("cuda", 132, 16, "sm_90a", SMEM_BYTES, 60 << 20)
EVERY_BODY = {"noop", "matvec", "embed", "attention", "sample", "rearm", "advance"}
MUSE_BODIES = (
    *("noop", "matvec", "matvec_f32", "embed", "attention", "sample", "advance"),
    *("gated_residual", "route", "expert_matvec", "combine"),
)
DRAFT_BODIES = ("draft_rows", "block_conv", "candidates", "draft_walk")
# What the loop over positions needs not is put away around it, once a tile; with heads of 128
# elements, some of it in the loop.
FOLD_SPILLS = 208
SMALL = 'extern "C" __global__ void small(int* p) { p[0] = 1; }'


@cache
def kernel(arch: str, team_warps: int) -> KernelCode:
    """The kernel of a plan that runs every built-in body."""
    target = replace(TARGET, arch=arch, team_warps=team_warps)
    made = plan(tiny_llama(), target, edges="payload")
    return compile_kernel(made, {}, arch)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("arch", "team"), [("sm_90a", 16), ("sm_100a", 16), ("sm_90a", 1)])
def test_every_body_compiles_within_its_registers_and_without_spills_where_hot(
    arch: str, team: int
) -> None:
    code = kernel(arch, team)
    assert set(code.bodies) == EVERY_BODY
    entry = code.compiled.function("gpurt_persistent")
    # 20 warps, allocated by fours, share 65,536 registers; a team of 1 has 5 warps.
    assert 0 < entry.registers <= (96 if team == 16 else 255)
    assert entry.smem_bytes == 0, "all shared memory is dynamic"
    for way in range(2):  # 1 row: decode
        hot = code.compiled.function(f"hot_loopINS_6matvecELj{way}E")
        # Nothing is stored in a stage loop; 12 bytes are the caller's, read back once. Of a row of
        # floats six words are kept over its loops, of one of bf16 two on sm_100a.
        few = 8 if arch == "sm_100a" else 0
        kept = (few if way else 24) if team == 16 else 0
        assert hot.spill_store_bytes <= kept, hot
        assert hot.spill_load_bytes <= 12 + 2 * kept, hot
    for name in ("embed", "sample", "rearm"):
        cold = [r for r in code.compiled.resources if f"call_bodyINS_{len(name)}{name}" in r.name]
        assert cold, name
        # A few words of `sample`, once a step, around the calls of its parts.
        assert all(r.spill_store_bytes <= (16 if name == "sample" else 0) for r in cold), cold


@pytest.mark.timeout(300)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_attention_with_heads_of_64_hardly_spills(arch: str) -> None:
    for struct in ("attention_of<64, 8, 9, true>", "attention_of<64, 3, 2>"):
        headers = one_task.headers("attention", struct, 16)
        made = compile_source(one_task.RUNNER, arch, headers=headers, name="runner.cu")
        for part in ("9fold_tile", "12make_vectors", "10merge_tile"):
            functions = [r for r in made.resources if part in r.name]
            assert functions, [r.name for r in made.resources]
            # A few words around the loop over positions.
            assert all(r.spill_store_bytes <= 24 for r in functions), functions


def test_the_ring_takes_what_shared_memory_leaves() -> None:
    assert stage_count(TARGET) == 6
    assert stage_count(replace(TARGET, team_warps=1)) == 5
    with pytest.raises(DeviceError, match=r"^a block needs 101,376 bytes .* has 99,000"):
        stage_count(replace(TARGET, smem_bytes=99_000))


def test_attention_takes_heads_of_64_and_128_only() -> None:
    assert attention_shape((32, 8, 128, 64, 4, 0.1, 0.0, 2)) == (128, 4, 2, False)
    with pytest.raises(GraphError, match=r"^attention with heads of 96 elements"):
        attention_shape((8, 8, 96, 64, 4, 0.1, 0.0, 2))
    for page in (8, 48):
        with pytest.raises(GraphError, match=f"^a cache page of {page} positions"):
            attention_shape((8, 8, 64, page, 4, 0.1, 0.0, 2))


def test_attention_beyond_plain_causal_gets_an_instance_that_can_do_it() -> None:
    plain = (32, 8, 128, 64, 4, 0.1, 0.0, 2, 0, 1, 1, 0, 0.0)
    assert attention_shape(plain) == (128, 4, 2, False)
    plain = (*plain, 0)
    for at, value in ((8, 20), (9, 0), (10, 2), (11, 1), (12, 1e-5), (13, 1)):
        params = (*plain[:at], value, *plain[at + 1 :])
        assert attention_shape(params) == (128, 4, 2, True), f"parameter {at}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("arch", "team"), [("sm_90a", 16), ("sm_100a", 16), ("sm_90a", 1)])
def test_every_body_of_muse_spark_and_its_drafter_compiles(arch: str, team: int) -> None:
    made = plan(drafted_muse(), replace(TARGET, arch=arch, team_warps=team))
    code = compile_kernel(made, {}, arch)
    assert set(code.bodies) == {*MUSE_BODIES, *DRAFT_BODIES}
    assert "#define GPURT_MATVEC_SCALED 1" in code.header
    for feature in ("EMBED_NORMS", "EMBED_SCALES", "OWN_ROWS"):
        assert f"#define GPURT_{feature} 1" in code.header
    assert "attention_of<64, 2, 2, true>" in code.header
    assert code.compiled.function("gpurt_persistent").registers <= (96 if team == 16 else 255)
    # Words of a loop's own state, stored once a task: none inside the loop over stages. How many
    # sm_100a has hangs on bodies that the loop never calls.
    most = {"matvec": 80, "expert_matvec": 16} if arch == "sm_90a" else {"matvec": 40}
    for way in range(2):
        for name in ("matvec", "expert_matvec"):
            hot = code.compiled.function(f"hot_loopINS_{len(name)}{name}ELj{way}E")
            assert hot.spill_store_bytes <= most.get(name, 32), hot
    for name in ("route", "gated_residual", "combine", "embed", *DRAFT_BODIES):
        called = code.compiled.function(f"call_bodyINS_{len(name)}{name}")
        # A gate holds a row in registers: ten words too many, none in a loop. A lane of route
        # keeps eight logits over its choice. A convolution has two granules of two taps under way.
        allowed = {"gated_residual": 40, "route": 32, "block_conv": 136}.get(name, 0)
        assert called.spill_store_bytes <= allowed, called


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("arch", "team"), [("sm_90a", 16), ("sm_100a", 16), ("sm_90a", 1)])
def test_a_plan_with_trees_compiles_and_others_hold_no_word_of_them(arch: str, team: int) -> None:
    target = replace(TARGET, arch=arch, team_warps=team)
    code = compile_kernel(plan(drafted_muse(draft_tree=True), target), {}, arch)
    assert set(code.bodies) == {*MUSE_BODIES, *DRAFT_BODIES, "attention_commit"}
    assert "#define GPURT_TREES 1" in code.header
    assert code.compiled.function("gpurt_persistent").registers <= (96 if team == 16 else 255)
    for name in ("attention_commit", "draft_walk", "draft_rows"):
        called = code.compiled.function(f"call_bodyINS_{len(name)}{name}")
        # What a walk keeps over the call for a candidate's product.
        allowed = 16 if name == "draft_walk" else 0
        assert called.spill_store_bytes <= allowed, called
    chain, _ = cuda_compile.generate_header(plan(drafted_muse(), target), {})
    assert "GPURT_TREES" not in chain


def test_a_llama_is_compiled_without_what_only_others_need() -> None:
    header = kernel("sm_90a", 16).header
    assert "GPURT_" not in header
    assert "true>" not in header


@pytest.mark.timeout(300)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_attention_over_several_spans_compiles_and_hardly_spills(arch: str) -> None:
    struct = "attention_split_of<128, 4, 2, true>"
    for stem, name in (("attention_split", struct), ("attention_merge", "")):
        headers = one_task.headers(stem, name, 16)
        compiled = compile_source(one_task.RUNNER, arch, headers=headers, name="runner.cu")
        for function in compiled.resources:
            if any(n in function.name for n in ("4fold", "6run_of")):
                allowed = FOLD_SPILLS if "4fold" in function.name else 0
                assert function.spill_store_bytes <= allowed, function


def test_a_context_of_several_spans_is_split_by_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_llama_module, "CONFIG", replace(CONFIG, context=8192))
    made = plan(tiny_llama(context=8192), TARGET)
    coords = {t.coords for t in made.tasks if t.body == "attention"}
    kv_heads = len({c[0] for c in coords})
    assert coords == {(h, i, 4, 0) for h in range(kv_heads) for i in range(4)}
    header, names = cuda_compile.generate_header(made, {})
    assert "attention_merge" in names
    assert '#include "bodies/attention_split.cuh"' in header
    assert "&& task.param[14] != 0) return attention_split_of<" in header
    assert ATTENTION.params.index("spans") == 14


def test_a_drafters_attention_over_a_long_context_stays_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiny_muse, "CONFIG", replace(tiny_muse.CONFIG, context=8192))
    graph = drafted_muse(model=tiny_dflash(replace(DRAFT, context=8192)), context=8192)
    made = plan(graph, TARGET)
    spans = {
        (op.rows is not None, "q" in op.args, op.params["window"]): op.params["spans"]
        for op in graph.operators
        if op.body is ATTENTION
    }
    # The model's own calls; the drafter's that write the cache, and those over its table's rows.
    own = {(False, True, 20): 0, (False, True, 0): 4}
    writes = {(False, False, 20): 0, (False, False, 0): 0}
    assert spans == own | writes | {(True, True, 20): 0, (True, True, 0): 0}
    header, _ = cuda_compile.generate_header(made, {})
    ways = [line for line in header.splitlines() if "return attention_" in line]
    assert ["attention_split_of" in way for way in ways] == [True, False]


# ---- cache -----------------------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cuda_compile, "cache_folder", lambda: tmp_path / "cubin")
    return tmp_path / "cubin"


def small(**changes: Any) -> Compiled:
    return compile_source(changes.pop("source", SMALL), "sm_90a", headers={}, **changes)


def test_a_kernel_is_compiled_once(folder: Path) -> None:
    first, second = small(), small()
    assert (first.cached, second.cached) == (False, True)
    assert (first.cubin, first.resources) == (second.cubin, second.resources)
    assert first.function("small").registers > 0
    assert len(list(folder.glob("*.cubin"))) == 1
    assert not small(source=SMALL + " ").cached
    assert not small(options=(*cuda_compile.OPTIONS, "-DX=1")).cached


def test_a_cut_cache_file_is_compiled_again(folder: Path) -> None:
    whole = small().cubin
    (path,) = folder.glob("*.cubin")
    path.write_bytes(whole[: len(whole) // 2])
    again = small()
    assert not again.cached
    assert again.cubin == whole


def test_an_unwritable_cache_warns_and_works(tmp_path: Path, monkeypatch: Any) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr(cuda_compile, "cache_folder", lambda: blocked / "cubin")
    with pytest.warns(CacheWarning, match="^compiled kernels cannot be kept"):
        assert small().cubin[:4] == b"\x7fELF"


# ---- user bodies -----------------------------------------------------------------------------
def own_body(source: str) -> Body:
    return body("own", print, source)


def compile_own(source: str) -> KernelCode:
    graph = Graph("own")
    own = own_body(source)
    graph.task(own, [graph.input("x", [4], f32)], [graph.output("y", [4], f32)])
    return compile_kernel(plan(graph, TARGET), {"own": own}, "sm_90a")


OWN = """
struct own {
  __device__ static void run(const gpurt::TaskRecord& task, const gpurt::BodyContext& context) {
    context.address<float>(task, 1)[0] = CODE;
  }
};
"""


@pytest.mark.timeout(300)
def test_a_users_struct_is_compiled_in() -> None:
    code = compile_own(OWN.replace("CODE", "1.0f"))
    assert code.bodies["own"] == 1
    assert code.compiled.function("call_bodyI3own")


@pytest.mark.timeout(300)
def test_an_error_in_a_users_struct_names_its_line() -> None:
    with pytest.raises(GraphError, match=r"identifier .?nothing.? is undefined.*own, line 3"):
        compile_own(OWN.replace("CODE", "nothing"))


def test_a_user_body_without_a_struct_is_refused() -> None:
    with pytest.raises(GraphError, match=r"^body own has no CUDA struct"):
        compile_own("")


def test_resources_are_read_from_ptxas() -> None:
    log = "\n".join(
        [
            "ptxas info    : Compiling entry function 'k' for 'sm_90a'",
            "ptxas info    : Function properties for k",
            "ptxas         .     8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads",
            "ptxas info    : Used 96 registers, used 2 barriers, 16 bytes smem",
            "ptxas info    : Function properties for callee",
            "ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads",
        ]
    )
    entry, callee = parse_resources(log)
    assert (entry.name, entry.registers, entry.smem_bytes) == ("k", 96, 16)
    assert (entry.stack_bytes, entry.spill_store_bytes, entry.spill_load_bytes) == (8, 4, 12)
    assert (callee.name, callee.registers) == ("callee", 0)


def test_importing_the_executor_starts_no_cuda() -> None:
    code = (
        "import sys, gpurt.executors.cuda, gpurt.executors.cuda_compile\n"
        "assert not any(m.startswith('cuda') for m in sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("body", ["embed", "expert_matvec"])
def test_the_runner_of_single_tasks_compiles(body: str) -> None:
    generated = one_task.headers(body, "", 16)
    compiled = compile_source(one_task.RUNNER, "sm_90a", headers=generated, name="runner.cu")
    assert compiled.function("run_tasks").registers > 0
