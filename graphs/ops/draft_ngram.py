"""draft_ngram: prompt look-up, a drafter that needs no model and no weights.

For every sequence that sampled a token: of all places in its tokens (prompt, and what was made so
far) that end with the same `longest` tokens as the whole, else with the same longest - 1, ..., 1,
the latest; what followed there is proposed. Past the end of the tokens the proposals follow, so a
text that repeats a short period is proposed to the limit. A match of n < longest tokens is weak
evidence, and rows cost time: it gives n proposals at most. No such place: no proposals.
Source: prompt look-up decoding, A. Saxena, 2023.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpurt.body import Arg, Body, StepRows, Target, Tile
from gpurt.buffer import u32
from gpurt.errors import GraphError
from gpurt.graphs.ops.regions import required
from gpurt.wire import PROPOSALS_PER_SLOT

if TYPE_CHECKING:
    from gpurt.graph import Graph, Operator

LONGEST = 3  # tokens of a match


def draft_ngram(
    graph: Graph, proposals: int = PROPOSALS_PER_SLOT, *, longest: int = LONGEST
) -> Operator:
    """Add the drafter, behind `sample`. proposals: as in `Graph.draft`. longest: tokens of a match.

    Raises: GraphError if longest is not positive, and what `Graph.draft` raises.
    """
    if longest < 1:
        msg = f"matches of {longest} tokens - at {graph.name}.draft_ngram"
        raise GraphError(f"{msg} - use 1 or more")
    written = graph.draft(proposals)
    history = graph.state("draft.history", [graph.slots, graph.context], u32)
    return graph.op(
        DRAFT_NGRAM,
        {"sampled": graph.sampled, "history": history, "proposals": written},
        context=graph.context,
        limit=proposals,
        longest=longest,
    )


def tile_draft_ngram(op: Operator, target: Target) -> list[Tile]:
    """One task."""
    del target
    reads = (op.args["sampled"], op.args["history"])
    writes = (op.args["history"], op.args["proposals"])
    return [Tile((0, 0, 0, 0), reads, writes, cost_bytes=4 * int(op.params["context"]))]


def draft_ngram_reference(op: Operator, arrays: Mapping[str, NDArray[Any]], step: StepRows) -> None:
    """Sampled rows of one slot are its block: the last token, and what was proposed to follow."""
    sampled, history = required(op, arrays, "sampled"), required(op, arrays, "history")
    proposals = required(op, arrays, "proposals")
    history[step.slot, step.position] = step.token
    for slot in np.unique(step.slot[step.sample_rows]):
        block = [j for j, row in enumerate(step.sample_rows) if step.slot[row] == slot]
        fed = [int(step.token[step.sample_rows[j]]) for j in block]
        made = committed(fed, [int(sampled[j]) for j in block])
        begin = int(step.position[step.sample_rows[block[0]]]) + 1
        tokens = [int(t) for t in history[slot, :begin]] + made
        found: list[int] = []
        if len(tokens) <= history.shape[1]:
            history[slot, begin : len(tokens)] = made
            found = look_up(tokens, int(op.params["limit"]), int(op.params["longest"]))
        proposals[slot, 0] = len(found)
        proposals[slot, 1 : 1 + len(found)] = found


def committed(fed: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """What a block commits: the target's tokens up to the first that is not the proposal fed next.

    fed: the block's rows, its last token and its proposals. sampled: the target's choice a row.
    """
    made = [sampled[0]]
    for proposal, choice in zip(fed[1:], sampled[1:], strict=True):
        if proposal != made[-1]:
            break
        made.append(choice)
    return made


def look_up(tokens: Sequence[int], limit: int, longest: int = LONGEST) -> list[int]:
    """The proposals after `tokens`, at most `limit`."""
    whole = list(tokens)
    for n in range(min(longest, len(whole) - 1), 0, -1):
        for end in range(len(whole) - 2, n - 2, -1):
            if whole[end + 1 - n : end + 1] == whole[-n:]:
                return _follow(whole, end + 1, limit if n == longest else min(n, limit))
    return []


def _follow(tokens: list[int], begin: int, limit: int) -> list[int]:
    text = list(tokens)
    for i in range(limit):
        text.append(text[begin + i])
    return text[len(tokens) :]


DRAFT_NGRAM = Body(
    name="draft_ngram",
    args=(Arg("sampled", "r"), Arg("history", "rw"), Arg("proposals", "w")),
    params=("context", "limit", "longest"),
    tile=tile_draft_ngram,
    reference=draft_ngram_reference,
)
