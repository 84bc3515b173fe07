"""On the device every atomic access becomes the one instruction of its order and scope."""

import re

import pytest

from tests.sim.build import ROOT

nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC (pip install gpurt[cuda])")

# call: instruction. T is u32 here, u64 in the second run.
EXPECTED = {
    "store_relaxed(p, load_acquire(q))": "ld.acquire.gpu",
    "store_relaxed(p, load_relaxed(q))": "ld.relaxed.gpu",
    "store_release(p, x)": "st.release.gpu",
    "store_relaxed(p, x)": "st.relaxed.gpu",
    "store_relaxed(p, add_release(q, x))": "atom.add.release.gpu",
    "store_relaxed(p, add_relaxed(q, x))": "atom.add.relaxed.gpu",
    "store_relaxed(p, add_acq_rel(q, x))": "atom.add.acq_rel.gpu",
    "store_relaxed(p, exchange_acq_rel(q, x))": "atom.exch.acq_rel.gpu",
    "fence_seq_cst()": "fence.sc.gpu",
}


def compile_ptx(source: str, arch: str) -> str:
    result, program = nvrtc.nvrtcCreateProgram(source.encode(), b"atomics.cu", 0, [], [])
    assert result == nvrtc.nvrtcResult.NVRTC_SUCCESS
    include = f"-I{ROOT / 'device'}".encode()
    options = [b"--std=c++20", f"--gpu-architecture={arch}".encode(), include]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    size = nvrtc.nvrtcGetProgramLogSize(program)[1]
    log = bytearray(size)  # not b" " * size: of size 1 that is Python's one and only b" "
    nvrtc.nvrtcGetProgramLog(program, log)
    assert result == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()
    ptx = bytearray(nvrtc.nvrtcGetPTXSize(program)[1])
    nvrtc.nvrtcGetPTX(program, ptx)
    return ptx.decode()


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("word", ["u32", "u64"])
def test_each_access_is_one_instruction_of_its_order_and_scope(word: str, arch: str) -> None:
    calls = dict(EXPECTED)
    for call, instruction in EXPECTED.items():
        system = re.sub(r"(\w+)\((?=[pq)])", r"\1_system(", call)
        calls[system] = instruction.replace(".gpu", ".sys")
    kernels = [
        f'extern "C" __global__ void k{i}({word}* p, {word}* q, {word} x) {{ {call}; }}'
        for i, call in enumerate(calls)
    ]
    header = '#include "atomics.hpp"\nusing namespace gpurt;\n'
    ptx = compile_ptx(header + "\n".join(kernels), arch)
    bodies = re.split(r"\.entry k\d+\(", ptx)[1:]
    for body, (call, instruction) in zip(bodies, calls.items(), strict=True):
        found = re.findall(r"\b(?:ld|st|atom|red|fence)\.[\w.]+", body)
        found = [f for f in found if not f.startswith("ld.param")]
        # The order of a mnemonic's parts differs between architectures.
        parts = set(instruction.split("."))
        assert any(parts <= set(f.split(".")) for f in found), (call, found)
        assert len(found) == (2 if "(q" in call else 1), (call, found)
