"""What the CUDA executor says on machines that cannot run it, by a driver made of lambdas."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gpurt.body import Target
from gpurt.errors import DeviceError
from gpurt.executors import cuda, cuda_driver
from gpurt.executors.base import Options
from gpurt.executors.cuda_driver import Device, Limits
from gpurt.planner import plan
from tests.gpu.tiny_llama import tiny_llama

LIMITS = Limits("H200", "sm_90a", 132, 232448, 60 << 20, 141 << 30, 1980000, False, True)
TARGET = Target("cuda", 132, 16, "sm_90a", 232448, 60 << 20)


def fake(monkeypatch: pytest.MonkeyPatch, **calls: Any) -> None:
    known = {
        "cuInit": lambda _: (0,),
        "cuDeviceGetCount": lambda: (0, 1),
        "cuGetErrorName": lambda _: (0, b"CUDA_ERROR_X"),
        "cuGetErrorString": lambda _: (0, b"something"),
    }
    monkeypatch.setattr(cuda_driver, "bindings", lambda: SimpleNamespace(**(known | calls)))


def device(monkeypatch: pytest.MonkeyPatch, limits: Limits = LIMITS, **calls: Any) -> Device:
    fake(monkeypatch, **calls)
    return Device(0, None, None, limits)


def test_without_cuda_python_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(DeviceError, match=r"^cuda-python is not installed .*gpurt\[cuda\].*host"):
        Device.open()


def test_without_a_driver_the_error_offers_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: int) -> None:
        raise OSError("libcuda.so.1 is not there")

    fake(monkeypatch, cuInit=missing)
    with pytest.raises(DeviceError, match=r"^no NVIDIA driver: libcuda.*device=\"host\""):
        Device.open()


def test_a_driver_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, cuInit=lambda _: (100,))
    with pytest.raises(DeviceError, match=r"^no usable GPU: CUDA_ERROR_X \(something\)"):
        Device.open()


def test_a_device_that_is_not_there_is_refused_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake(monkeypatch)
    with pytest.raises(DeviceError, match=r"^this machine has 1 CUDA devices, device 3 was asked"):
        Device.open(3)


def test_memory_that_does_not_fit_is_refused_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = device(monkeypatch, cuMemAlloc=lambda _: (2, 0), cuMemGetInfo=lambda: (0, 1000, 2000))
    with pytest.raises(DeviceError, match=r"^weights needs 5,000 bytes, 1,000 of 2,000 are free"):
        gpu.allocate(5000, "weights")


def test_an_exported_handle_comes_back_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """With cuda-python's own struct, which has no fields to look into."""
    driver = pytest.importorskip("cuda.bindings.driver")
    wanted = bytes(range(64))

    def export(pointer: int) -> tuple[int, Any]:
        handle = driver.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), wanted, 64)
        return (0 if pointer == 4096 else 1), handle

    def open_handle(handle: Any, flags: int) -> tuple[int, int]:
        assert flags == 1  # the driver enables peer access itself
        return (0, 8192) if ctypes.string_at(handle.getPtr(), 64) == wanted else (1, 0)

    gpu = device(
        monkeypatch,
        cuIpcGetMemHandle=export,
        cuIpcOpenMemHandle=open_handle,
        CU_IPC_HANDLE_SIZE=driver.CU_IPC_HANDLE_SIZE,
        CUipcMemHandle=driver.CUipcMemHandle,
        CUipcMem_flags=driver.CUipcMem_flags,
    )
    ticket = gpu.export(4096)
    assert ticket == wanted
    assert gpu.map_exported(ticket) == 8192
    with pytest.raises(DeviceError, match=r"^cuIpcOpenMemHandle failed: CUDA_ERROR_X"):
        gpu.map_exported(b"x" * 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arch": "sm_100a"}, r"^the plan llama is for sm_100a, the device is sm_90a"),
        ({"smem_bytes": 300_000}, r"^the plan counts on 300,000 bytes .* the device has 232,448"),
    ],
)
def test_a_plan_for_another_device_is_refused(
    change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plan(tiny_llama(), TARGET)
    gpu = device(monkeypatch)
    with pytest.raises(DeviceError, match=message):
        cuda._check_target(replace(made, target=replace(TARGET, **change)), gpu)


def test_a_display_bounds_how_long_a_kernel_may_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = device(monkeypatch, replace(LIMITS, kernel_timeout=True))
    cuda._check_display(Options(residency_ms=500), gpu)
    for options in (Options(resident=True), Options(residency_ms=0), Options(residency_ms=5000)):
        with pytest.raises(DeviceError, match=r"^a display is attached"):
            cuda._check_display(options, gpu)
    cuda._check_display(Options(resident=True), device(monkeypatch))
