"""Every test here runs on the emulated GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.emu import device
from tests.gpu import tiny_llama


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The emulated GPU is `cuda:0`; what tests keep of it is forgotten afterwards."""
    device.install(monkeypatch)
    tiny_llama.device_target.cache_clear()
    yield
    tiny_llama.device_target.cache_clear()
