"""Drafters by name: operators that propose the tokens of the next step, at the end of a graph.

A drafter asks its graph for the buffer that it writes (`Graph.draft`), runs under the scope
"draft", and needs no more than `graph.sampled` and the StepState; one that also reads what the
target computed takes those buffers as arguments of its own.
"""

from __future__ import annotations

from gpurt.errors import GraphError
from gpurt.graph import Graph
from gpurt.graphs.ops.draft_ngram import draft_ngram
from gpurt.wire import PROPOSALS_PER_SLOT

DRAFTERS = ("none", "ngram")
SCOPE = "draft"


def add_drafter(graph: Graph, draft: str, proposals: int = PROPOSALS_PER_SLOT) -> Graph:
    """The graph, with a drafter behind its `sample`; "none" leaves it as it is.

    proposals: the most that one step verifies of a sequence, 1 to 15; rows, context and the
    request's max_tokens bound it too. Raises: GraphError for an unknown drafter.
    """
    if draft not in DRAFTERS:
        msg = f"draft is {draft!r} - at {graph.name}"
        raise GraphError(f"{msg} - use one of {', '.join(DRAFTERS)}")
    if draft == "ngram":
        with graph.at(SCOPE):
            draft_ngram(graph, proposals)
    return graph
