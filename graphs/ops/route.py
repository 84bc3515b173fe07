"""route: which experts each row of a step goes to, grouped by expert. One task decides for all.

Legend: B rows of a step, R rows the plan can carry, E experts, T experts a row (top_k), C slots.
A slot holds one expert that some row chose; slots lie in ascending expert id. A pair is one row at
one of its experts: p = row * T + i, where i counts that row's experts by ascending id. So sums over
pairs in ascending p run in one fixed order, whatever the scores were.

  kind 0  p = sigmoid(logit); the T largest of p + bias; weight = p / (sum of the T p + 1e-15)
  kind 1  p = softmax over all E; the T largest; weight = p, over their sum if norm_topk
  weights are multiplied by `factor`; the bias only selects; equal scores go to the lower id

For benches a table may take the choice's place, after the scores are there: `forced` [P, T] u32,
ids ascending; a row takes entry (position * forced_slots + slot) % P. Its weights are of its own
p, as if it had chosen so.

Of experts that ranks share out, `own` gives this rank's: only they get slots, numbered from the
first of them. Pairs are those of all experts; one of another rank has no slot (NO_SLOT).

`routes` (u32 words; also what a dynamic operator's tasks and `combine` read):

  [0] A, slots in use        [1] pairs of the step, B * T
  [2 + j * (2 + 2 R)] slot j: expert id, n, then n times (row, pair), rows ascending
  [2 + C * (2 + 2 R) + 2 p]   pair p: slot, weight (float bits)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpurt.body import Arg, Body, StepRows, Target, Tile
from gpurt.errors import GraphError
from gpurt.graphs.ops import route_rows_cuda
from gpurt.graphs.ops.regions import array_of, region_of, required

if TYPE_CHECKING:
    from gpurt.graph import Graph, Operand, Operator
    from gpurt.planner.lower import Lowering

SIGMOID, SOFTMAX = 0, 1  # `kind`
NO_SLOT = 0xFFFFFFFF
_SUM_FLOOR = np.float32(1e-15)
_MOST_CUDA = {"rows": 16, "experts": 1024, "top_k": 32}
_FORCED_PERIOD = 4093  # tokens; a prime, so that no batch falls into step with it


@dataclass(frozen=True)
class RoutesLayout:
    """Where things lie in `routes`, in words."""

    rows: int
    experts: int
    top_k: int

    @property
    def slots(self) -> int:
        """Experts that one step can touch at most."""
        return min(self.experts, self.rows * self.top_k)

    @property
    def words(self) -> int:
        """Size of the buffer."""
        return self.pair(self.rows * self.top_k)

    def slot(self, index: int) -> int:
        """First word of a slot."""
        return 2 + index * (2 + 2 * self.rows)

    def pair(self, index: int) -> int:
        """First word of a pair."""
        return self.slot(self.slots) + 2 * index


def route(
    graph: Graph,
    logits: Operand,
    routes: Operand,
    *,
    top_k: int,
    kind: int = SIGMOID,
    bias: Operand | None = None,
    factor: float = 1.0,
    norm_topk: bool = True,
    forced: Operand | None = None,
    own: tuple[int, int] | None = None,
    name: str = "route",
) -> Operator:
    """Add the choice of experts.

    logits: [rows, E] f32. bias: [E] f32, kind 0. routes: [RoutesLayout.words] u32, written; of a
    layout for `own` experts: the first one's id and how many, all if None.
    forced: [any, top_k] u32, see `forced_table`.
    Raises: GraphError if top_k or `own` exceed the experts or routes has another size.
    """
    rows, experts = region_of(logits).shape
    where = f"{graph.name}.{name}"
    if not 1 <= top_k <= experts:
        msg = f"top_k is {top_k} of {experts} experts"
        raise GraphError(f"{msg} - at {where} - use 1 to {experts}")
    first, count = own or (0, experts)
    if not 0 <= first < first + count <= experts:
        msg = f"own experts {first} to {first + count} of {experts}"
        raise GraphError(f"{msg} - at {where} - give a range of them")
    words = RoutesLayout(rows, count, top_k).words
    if region_of(routes).shape != (words,):
        msg = f"routes is {list(region_of(routes).shape)}, {rows} rows need [{words}]"
        raise GraphError(f"{msg} - at {where} - size it by RoutesLayout")
    return graph.op(
        ROUTE,
        {"logits": logits, "bias": bias, "routes": routes, "forced": forced},
        name=name,
        experts=experts,
        top_k=top_k,
        kind=kind,
        factor=float(factor),
        norm_topk=int(norm_topk),
        forced_count=0 if forced is None else region_of(forced).shape[0],
        forced_slots=graph.slots,
        first=first,
        own=count,
    )


def forced_table(
    routing: str, experts: int, top_k: int, seed: int, rows: int = 1
) -> NDArray[np.uint32]:
    """A `forced` table: "random" draws anew for every token, "repeat" once for each of `rows` rows:
    a step of so many neighbours has the experts of the step before. Raises: GraphError.
    """
    if routing not in ("random", "repeat"):
        msg = f"routing is {routing!r}"
        raise GraphError(f"{msg} - at route.forced_table - use natural, random or repeat")
    rng = np.random.default_rng(seed)
    count = rows if routing == "repeat" else _FORCED_PERIOD
    numbers = rng.random((count, experts), np.float32)
    drawn = np.argpartition(numbers, top_k - 1, axis=1)[:, :top_k]
    return np.sort(drawn, axis=1).astype(np.uint32)


def lower_route(op: Operator, target: Target, lowering: Lowering) -> bool:
    """On cuda steps of many rows take two operators: route_rows_cuda.py."""
    if target.kind != "cuda" or op.rows is not None:
        return False
    if op.args["logits"].shape[0] <= route_rows_cuda.ROWS_MAX:
        return False
    _check_cuda(op, ("experts", "top_k"))
    route_rows_cuda.widen(op, lowering)
    return True


def tile_route(op: Operator, target: Target) -> list[Tile]:
    """One task: it groups the rows of the whole step. Raises: GraphError on cuda for more than the
    body has room for.
    """
    if target.kind == "cuda":
        _check_cuda(op, tuple(_MOST_CUDA))
    reads = tuple(op.args[name] for name in ("logits", "bias", "forced") if name in op.args)
    cost_bytes = sum(4 * region.shape[-1] for region in reads)  # of one row
    return [Tile((0, 0, 0, 0), reads, (op.args["routes"],), cost_bytes=cost_bytes)]


def route_reference(op: Operator, arrays: Mapping[str, NDArray[Any]], step: StepRows) -> None:
    """The contract above."""
    logits_RE = required(op, arrays, "logits")
    first, own = int(op.params["first"]), int(op.params["own"])
    layout = RoutesLayout(logits_RE.shape[0], own, int(op.params["top_k"]))
    rows, top_k = len(step.token), layout.top_k
    scores_BE, p_BE = _scores(op, arrays, logits_RE[:rows].astype(np.float32))
    chosen_BT = np.sort(np.argsort(-scores_BE, axis=-1, kind="stable")[:, :top_k], axis=-1)
    forced = array_of(op, arrays, "forced")
    if forced is not None:
        places = step.position.astype(np.int64) * int(op.params["forced_slots"]) + step.slot
        chosen_BT = forced[places % len(forced)].astype(np.int64)
    weights_BT = np.take_along_axis(p_BE, chosen_BT, axis=-1)
    if op.params["kind"] == SIGMOID:
        weights_BT = weights_BT / (weights_BT.sum(axis=-1, keepdims=True) + _SUM_FLOOR)
    elif op.params["norm_topk"]:
        weights_BT = weights_BT / weights_BT.sum(axis=-1, keepdims=True)
    weights_BT = (weights_BT * np.float32(op.params["factor"])).astype(np.float32)
    routes = required(op, arrays, "routes")
    chosen = {int(expert) for expert in chosen_BT.reshape(-1)}
    active = sorted(expert for expert in chosen if first <= expert < first + own)
    routes[layout.pair(0) : layout.pair(rows * top_k) : 2] = NO_SLOT
    routes[0], routes[1] = len(active), rows * top_k
    for slot, expert in enumerate(active):
        at = layout.slot(slot)
        users = np.argwhere(chosen_BT == expert)
        routes[at], routes[at + 1] = expert - first, len(users)
        for number, (row, rank) in enumerate(users):
            pair = int(row) * top_k + int(rank)
            routes[at + 2 + 2 * number : at + 4 + 2 * number] = row, pair
            routes[layout.pair(pair)] = slot
    bits = weights_BT.reshape(-1).view(np.uint32)
    routes[layout.pair(0) + 1 : layout.pair(rows * top_k) : 2] = bits


def _scores(
    op: Operator, arrays: Mapping[str, NDArray[Any]], logits_BE: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """What selects, and what weighs."""
    if op.params["kind"] == SOFTMAX:
        p_BE = np.exp(logits_BE - logits_BE.max(axis=-1, keepdims=True))
        p_BE = p_BE / p_BE.sum(axis=-1, keepdims=True)
        return logits_BE, p_BE
    with np.errstate(over="ignore"):
        p_BE = (1.0 / (1.0 + np.exp(-logits_BE))).astype(np.float32)
    bias_E = array_of(op, arrays, "bias")
    return (p_BE if bias_E is None else p_BE + bias_E), p_BE


def _check_cuda(op: Operator, names: Sequence[str]) -> None:
    counts = {"rows": op.args["logits"].shape[0]} | op.params
    for name in names:
        count, most = counts[name], _MOST_CUDA[name]
        if count > most:
            msg = f"{count} {name}, the CUDA body takes {most} - at {op.path}"
            raise GraphError(f'{msg} - use fewer, or device="host"')


ROUTE = Body(
    name="route",
    args=(
        Arg("logits", "r", payload=True),
        Arg("bias", "r", optional=True),
        Arg("routes", "w"),
        Arg("forced", "r", optional=True),
    ),
    params=(
        "experts",
        "top_k",
        "kind",
        "factor",
        "norm_topk",
        "forced_count",
        "forced_slots",
        "first",
        "own",
    ),
    tile=tile_route,
    reference=route_reference,
    lower=lower_route,
    ranks=True,
)
