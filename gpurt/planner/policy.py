"""Policy: which of the three dispatch policies each operator gets, and the segments they form."""

from __future__ import annotations

from collections.abc import Mapping

from gpurt.errors import PlanError
from gpurt.graph import Graph
from gpurt.plan import POLICIES, PlanSegment, Policy
from gpurt.planner.draft import DraftOp


def resolve(graph: Graph, policy: Policy | Mapping[str, Policy]) -> list[Policy]:
    """The policy of each operator of the graph. A mapping goes by operator name, then by body;
    what it leaves out is static. Raises: PlanError for an unknown policy or an unused name.
    """
    mapping = {} if isinstance(policy, str) else dict(policy)
    for value in [policy] if isinstance(policy, str) else mapping.values():
        if value not in POLICIES:
            msg = f"unknown policy {value!r} - at plan(policy=...)"
            raise PlanError(f"{msg} - use one of {list(POLICIES)}")
    known = {op.name for op in graph.operators} | {op.body.name for op in graph.operators}
    unknown = sorted(set(mapping) - known)
    if unknown:
        msg = f"no operator or body is named {unknown} - at plan(policy=...)"
        raise PlanError(f"{msg} - use names among {sorted(known)[:12]}")
    if isinstance(policy, str):
        return [policy] * len(graph.operators)
    return [mapping.get(op.name, mapping.get(op.body.name, "static")) for op in graph.operators]


def tail_policy(last: Policy, rearm: bool) -> Policy:
    """The policy of the generated end of a step: the last operator's, so that no segment is added.
    Under `ready` a re-arm would run as soon as the step opens, before the work it should not delay.
    """
    return "claim" if rearm and last == "ready" else last


def segments(ops: list[DraftOp]) -> list[PlanSegment]:
    """Neighbours under one policy merge; a dynamic operator stands alone."""
    result: list[PlanSegment] = []
    may_merge = True
    for op in ops:
        if op.begin == op.end:
            continue
        alone = op.dynamic is not None
        if result and result[-1].policy == op.policy and not alone and may_merge:
            result[-1] = PlanSegment(op.policy, result[-1].begin, op.end)
        else:
            result.append(PlanSegment(op.policy, op.begin, op.end))
        may_merge = not alone
    return result
