"""Ranks: the graphs that run together, one on each device.

    graphs = [build(config, weights, tp_size=2, tp_rank=rank) for rank in range(2)]
    with Runtime(device=["host", "host"]) as runtime:
        runtime.submit(group(graphs), prompt)

A request goes to rank 0, which decides what every step is; the others follow (scheduler/ranks.hpp).
"""

from __future__ import annotations

from collections.abc import Sequence

from gpurt.errors import GraphError
from gpurt.graph import Graph


def group(graphs: Sequence[Graph]) -> Graph:
    """Make one group of the graphs of all ranks, in their order. Returns: rank 0's, which stands
    for all of them in a Runtime.

    Raises: GraphError if they are not rank 0, 1, ... of that many, or differ in their bounds.
    """
    count = len(graphs)
    if not graphs:
        raise GraphError("0 graphs - at gpurt.group - give one for each rank")
    first = graphs[0]
    for rank, graph in enumerate(graphs):
        if (graph.rank, graph.rank_count) != (rank, count):
            msg = f"graph {rank} of {count} is of rank {graph.rank} of {graph.rank_count}"
            raise GraphError(f"{msg} - at gpurt.group - build one for each rank, in order")
        bounds = [(g.rows, g.slots, g.context, g.vocab) for g in (first, graph)]
        if bounds[0] != bounds[1]:
            what = (
                f"rows, slots, context and vocabulary are {bounds[0]}, of rank {rank} {bounds[1]}"
            )
            raise GraphError(f"{what} - at gpurt.group - build all with the same bounds")
    for graph in graphs:
        graph.group = tuple(graphs)
    return first
