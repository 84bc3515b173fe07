"""Lower: operators that a target computes by several.

A body may ask for it (`Body.lower`): it gives operators that take an operator's place, over
activations of their own. So a graph says what a step computes, and in which form a target wants an
operand is that target's business. An operator that was replaced keeps its index, without tasks, as
one whose form was not chosen; those in its place are generated ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from gpurt.body import Body, Param, Target
from gpurt.buffer import DTYPES, Buffer, Region
from gpurt.graph import Graph, Operator
from gpurt.plan import Policy


class Lowering:
    """What a body gets to replace one operator after another of a graph."""

    def __init__(self, graph: Graph) -> None:
        """The graph stays as it is: `graph` is a twin of it."""
        self.graph = copy.copy(graph)
        self.graph.buffers = list(graph.buffers)
        self.graph.operators = []
        self.generated = 0
        self._count = len(graph.operators)
        self._made: dict[Hashable, tuple[set[int], tuple[Region | None, ...]]] = {}

    def activation(self, op: Operator, name: str, shape: Sequence[int], dtype: str) -> Region:
        """A buffer that lives inside a step, in whole, for operators in place of `op`."""
        buffers = self.graph.buffers
        where = f"{op.path}[{op.index}].{name}"  # several operators may have one path
        buffers.append(Buffer(where, tuple(shape), DTYPES[dtype], "activation", len(buffers)))
        return buffers[-1].whole

    def once(
        self,
        key: Hashable,
        reads: Sequence[Region | None],
        make: Callable[[], tuple[Region | None, ...]],
    ) -> tuple[Region | None, ...]:
        """What `make` gave for this key before, while nobody wrote what it was made of."""
        if key not in self._made:
            of = {region.buffer.index for region in reads if region is not None}
            self._made[key] = of, make()
        return self._made[key][1]

    def written(self, op: Operator) -> None:
        """An operator of the graph was lowered."""
        indices = {region.buffer.index for region in op.writes}
        self._made = {k: v for k, v in self._made.items() if not v[0] & indices}

    def add(
        self,
        op: Operator,
        name: str,
        body: Body,
        args: Mapping[str, Region | None],
        params: Mapping[str, Param],
    ) -> None:
        """An operator in place of `op`, after those that are there. Of `params` it takes those that
        the body has; None stands for an argument that is absent.
        """
        index = self._count + self.generated
        self.generated += 1
        given = {a.name: args.get(a.name) for a in body.args}
        kept = {key: region for key, region in given.items() if region is not None}
        self.graph.operators.append(
            replace(
                op,
                index=index,
                name=f"{op.name}.{name}",
                path=f"{op.path}.{name}",
                body=body,
                args=kept,
                params={key: params[key] for key in body.params},
                reads=tuple(kept[a.name] for a in body.args if "r" in a.access and a.name in kept),
                writes=tuple(kept[a.name] for a in body.args if "w" in a.access and a.name in kept),
            )
        )


@dataclass(frozen=True)
class Lowered:
    """A graph as a target computes it. policies: of its operators, in their order. replaced: those
    of the graph that others stand for, with their policies. generated: how many of these.
    """

    graph: Graph
    policies: Sequence[Policy]
    replaced: Sequence[tuple[Operator, Policy]] = ()
    generated: int = 0


def lower(graph: Graph, target: Target, policies: Sequence[Policy]) -> Lowered:
    """Raises: GraphError for what a body cannot compute."""
    lowering = Lowering(graph)
    made = lowering.graph.operators
    chosen: list[Policy] = []
    replaced: list[tuple[Operator, Policy]] = []
    for op, policy in zip(graph.operators, policies, strict=True):
        if op.body.lower is not None and op.body.lower(op, target, lowering):
            replaced.append((op, policy))
        else:
            made.append(op)
        chosen += [policy] * (len(made) - len(chosen))
        lowering.written(op)
    if not replaced:
        return Lowered(graph, policies)
    return Lowered(lowering.graph, chosen, replaced, lowering.generated)
