"""Experts: how many of them the rows of a step chose, as the routers left it on the device."""

from __future__ import annotations

from gpurt.graph import Graph
from gpurt.runtime import Runtime


def chosen_experts(runtime: Runtime, graph: Graph) -> list[int]:
    """Of the last step, the distinct experts of each layer that has a router."""
    names = [b.name for b in graph.buffers if b.name.endswith(".routes")]
    return [int(runtime.read(graph, name)[0]) for name in names]


def experts_note(chosen: list[int]) -> str:
    """Mean, least and most of a layer; empty without routers."""
    if not chosen:
        return ""
    mean = sum(chosen) / len(chosen)
    return f"{mean:.1f} experts a layer ({min(chosen)} to {max(chosen)} in {len(chosen)} layers)"
