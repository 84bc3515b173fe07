"""Forms: of each choice that a graph leaves open, the form that a plan has.

The choices are those of all-reduces (graphs/collectives.py): one shot, where every rank sends its
part to all others, or two, where each sends shares of it, sums its own, and sends that. What a form
costs is the bytes that a rank sends over its links, and what it cannot save is a second hop. So the
first form stays while it sends little, or no more than the others. A variant of few rows may so
have another form than one of many.
"""

from __future__ import annotations

from math import prod

from gpurt.graph import Form, Graph, Operator
from gpurt.plan import sent_share

# One shot up to here: 0.5 MB take about as long on a link as a second hop (design: an all-reduce of
# 512 KB took 0.3 us more than one of 32 KB, a hop with its counter about 1.5).
FIRST_FORM_BYTES = 512 << 10


def sent_bytes(op: Operator, ranks: int) -> int:
    """Bytes that one rank sends to others."""
    written = sum(
        prod(r.shape[:-1]) * r.buffer.dtype.row_bytes(r.shape[-1])
        for r in op.writes
        if r.buffer.role == "symmetric"
    )
    return sent_share(written, ranks)


def left_out(graph: Graph) -> set[int]:
    """Indices of the operators whose forms were not chosen."""
    sent: dict[str, dict[Form, int]] = {}
    for op in graph.operators:
        if op.form is not None:
            forms = sent.setdefault(op.form.choice, {})
            forms[op.form] = forms.get(op.form, 0) + sent_bytes(op, graph.rank_count)
    chosen = {_chosen(forms) for forms in sent.values()}
    return {op.index for op in graph.operators if op.form is not None and op.form not in chosen}


def unused(graph: Graph, left_out: set[int]) -> set[int]:
    """Indices of buffers that only operators which were left out use."""

    def used(op: Operator) -> set[int]:
        return {region.buffer.index for region in (*op.reads, *op.writes)}

    found: set[int] = set()
    for op in graph.operators:
        if op.index in left_out:
            found |= used(op)
    for op in graph.operators:
        if found and op.index not in left_out:
            found -= used(op)
    return {i for i in found if graph.buffers[i].role in ("activation", "symmetric")}


def _chosen(forms: dict[Form, int]) -> Form:
    first = next(iter(forms))
    return first if forms[first] <= FIRST_FORM_BYTES else min(forms, key=forms.__getitem__)
