"""Layers of experts on the emulated GPU: tests/gpu/test_experts.py, in small."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu import test_experts

# Four row tiles a virtual warp and four chunks of it, as at the true size; K groups of two kinds.
SMALL = {"layers": 2, "experts": 5, "top_k": 2, "width": 1024, "inner": 256, "rows": 3}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(test_experts, "SIZE", SMALL)
    monkeypatch.setattr(test_experts, "STEPS", 2)
    test_experts.wanted.cache_clear()
    yield
    test_experts.wanted.cache_clear()


def test_layers_of_experts_equal_the_oracle() -> None:
    test_experts.test_y_is_the_oracles()


@pytest.mark.parametrize(
    ("name", "routed"),
    [("claim", False), ("all claim", True), ("ready", False), ("few workers", True)],
)
def test_bits_of_layers_of_experts_do_not_depend_on_the_plan(name: str, routed: bool) -> None:
    test_experts.test_bits_do_not_depend_on_the_plan(name, routed)


@pytest.mark.parametrize("name", ["static", "claim"])
def test_spans_name_the_experts_that_rows_chose(name: str) -> None:
    test_experts.test_spans_name_the_experts_that_rows_chose(name)
