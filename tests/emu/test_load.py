"""Loading on the emulated GPU: compiling runs beside the upload, and what fails gives all back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from gpurt.errors import DeviceError, GraphError
from gpurt.executors import cuda
from gpurt.executors.base import Options
from gpurt.executors.contents import PackedContents
from gpurt.graph import Graph
from gpurt.plan import PlanBuffer
from gpurt.planner import plan
from gpurt.runtime import Runtime
from tests.emu.device import KERNEL_THREAD, EmulatedDevice
from tests.gpu.tiny_llama import device_target, tiny_llama


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Device memory that was not given back."""
    addresses: set[int] = set()
    allocate, free = EmulatedDevice.allocate, EmulatedDevice.free

    def allocates(self: EmulatedDevice, *given: Any) -> int:
        addresses.add(pointer := allocate(self, *given))
        return pointer

    def frees(self: EmulatedDevice, pointer: int) -> None:
        free(self, pointer)
        addresses.remove(pointer)

    monkeypatch.setattr(EmulatedDevice, "allocate", allocates)
    monkeypatch.setattr(EmulatedDevice, "free", frees)
    return addresses


def graph() -> Graph:
    return tiny_llama(rows=2, context=64, hidden=64, heads=1, kv_heads=1, intermediate=64)


def load(progress: Callable[[str, int, int], None] | None = None) -> Any:
    loaded = graph()
    return cuda.load(plan(loaded, device_target()), loaded, Options(), progress)


def test_the_kernel_is_compiled_while_weights_are_uploaded(
    held: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling, compiles = cuda.compile_kernel, threading.Event()
    uploading = threading.Event()

    def compile_kernel(*given: Any) -> Any:
        compiles.set()
        assert uploading.wait(30), "weights wait for the compiler"
        return compiling(*given)

    def progress(what: str, done: int, total: int) -> None:
        del done, total
        if what.startswith("packing"):
            assert compiles.wait(30), "the compiler waits for weights"
            uploading.set()

    monkeypatch.setattr(cuda, "compile_kernel", compile_kernel)
    load(progress).close()
    assert not held


def test_a_kernel_that_does_not_compile_leaves_no_memory_behind(
    held: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_kernel(*given: Any) -> Any:
        del given
        assert uploaded.wait(30)
        raise GraphError("no such body - at x - fix it")

    def progress(what: str, done: int, total: int) -> None:
        del done, total
        if what == "compiling":
            assert held
            uploaded.set()

    uploaded = threading.Event()
    monkeypatch.setattr(cuda, "compile_kernel", compile_kernel)
    with pytest.raises(GraphError, match="no such body"):
        load(progress)
    assert not held


def test_a_kernel_whose_blocks_do_not_fit_leaves_no_memory_behind(
    held: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda.Kernel, "resident_blocks", lambda *_: 0)
    with pytest.raises(DeviceError, match="only 0 blocks can be resident"):
        load()
    assert not held


def test_a_runtime_frees_nothing_while_a_kernel_of_its_runs(
    held: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, giving memory back waits for all kernels, for ever for one that stays."""
    free = EmulatedDevice.free

    def frees(self: EmulatedDevice, pointer: int) -> None:
        running = [t for t in threading.enumerate() if t.name == KERNEL_THREAD]
        assert not running, "a GPU would wait here"
        free(self, pointer)

    monkeypatch.setattr(EmulatedDevice, "free", frees)
    with Runtime("cuda:0", resident=True) as runtime:
        for _ in range(2):
            runtime.submit(graph(), [1, 2], max_tokens=1).result(30)
    assert not held


def test_a_weight_is_packed_while_the_one_before_is_uploaded(
    held: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    packed = threading.Condition()
    take, upload = PackedContents.take, EmulatedDevice.upload

    def takes(self: PackedContents, planned: PlanBuffer) -> Any:
        with packed:
            taken.append(planned.name)
            packed.notify_all()
        return take(self, planned)

    def uploads(self: EmulatedDevice, *given: Any) -> None:
        with packed:
            number = len(uploaded) + 2  # the second is taken while the first is uploaded
            uploaded.append(len(taken))
            assert packed.wait_for(lambda: len(taken) >= min(number, weights), 30)
            assert len(taken) <= number, "no more than one ahead"
        upload(self, *given)

    uploaded: list[int] = []
    loaded = graph()
    made = plan(loaded, device_target())
    begins = {b.name for b in loaded.buffers if b.source is not None}
    weights = sum(1 for b in made.buffers if (b.source or b.name) in begins)
    monkeypatch.setattr(PackedContents, "take", takes)
    monkeypatch.setattr(EmulatedDevice, "upload", uploads)
    cuda.load(made, loaded, Options()).close()
    assert len(taken) == weights
    assert not held
