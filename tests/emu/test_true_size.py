"""Muse Spark's layers against plain torch on the emulated GPU: tests/gpu/test_true_size.py, small.

It keeps true what the H200 runs at the true size: the ring of pages rolls over here too.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.gpu import test_true_size as true_size

pytest.importorskip("torch")
pytestmark = pytest.mark.reference

SMALL = replace(
    true_size.CONFIG,
    hidden=128,
    heads=8,
    kv_heads=1,
    vocab=208,
    windows=(20, 0),
    experts=12,
    top_k=3,
    moe_hidden=128,
    moe_intermediate=64,
)


def test_each_layer_is_near_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(true_size, "CONFIG", SMALL)
    monkeypatch.setattr(true_size, "ROWS", 8)
    monkeypatch.setattr(true_size, "STEPS", 7)
    monkeypatch.setattr(true_size, "PAGE", 16)
    true_size.test_each_layer_is_within_a_hundredth_of_plain_torch()
