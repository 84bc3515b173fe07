"""Drafters by name: operators that propose the tokens of the next step, at the end of a graph.

A drafter asks its graph for the buffer that it writes (`Graph.draft`), runs under the scope
"draft", and needs no more than `graph.sampled` and the StepState; one that also reads what the
target computed finds it in a DraftTarget.
"""

from __future__ import annotations

from gpurt.errors import GraphError
from gpurt.graph import Graph
from gpurt.graphs.dflash import DraftModel, DraftTarget, add_dflash
from gpurt.graphs.ops.draft_ngram import draft_ngram
from gpurt.wire import PROPOSALS_PER_SLOT

DRAFTERS = ("none", "ngram", "dflash")
SCOPE = "draft"


def add_drafter(
    graph: Graph,
    draft: str,
    proposals: int = PROPOSALS_PER_SLOT,
    target: DraftTarget | None = None,
    model: DraftModel | None = None,
    tree: bool = False,
) -> Graph:
    """The graph, with a drafter behind its `sample`; "none" leaves it as it is.

    proposals: the most that one step verifies of a sequence, 1 to 15; rows, context and the
    request's max_tokens bound it too. target, model: what "dflash" reads; no other drafter has a
    model. tree: dflash's greedy proposals are a tree, not a chain (ops/draft_walk.py).
    Raises: GraphError for an unknown drafter, for a model that is missing or not for it, and for a
    tree of another drafter.
    """
    if draft not in DRAFTERS:
        msg = f"draft is {draft!r} - at {graph.name}"
        raise GraphError(f"{msg} - use one of {', '.join(DRAFTERS)}")
    if (draft == "dflash") != (model is not None):
        msg = f"draft is {draft!r} {'with' if model else 'without'} a model - at {graph.name}"
        raise GraphError(f"{msg} - a dflash drafter has one, and no other drafter")
    if tree and draft != "dflash":
        msg = f"draft is {draft!r}, and is to make trees - at {graph.name}"
        raise GraphError(f"{msg} - only dflash makes trees")
    with graph.at(SCOPE):
        if draft == "ngram":
            draft_ngram(graph, proposals)
        elif model is not None:
            if target is None:
                msg = f"a dflash drafter for a graph without its target - at {graph.name}"
                raise GraphError(f"{msg} - pass a DraftTarget")
            add_dflash(graph, model, target, proposals, tree=tree)
    return graph
