"""GPU tests need a GPU: without one every test here is skipped, and says why."""

from __future__ import annotations

import pytest

from gpurt.doctor import probe_cuda

_PROBE = probe_cuda(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if not _PROBE.usable:
                item.add_marker(pytest.mark.skip(reason=f"no GPU: {_PROBE.reason}"))
