"""Graph: the tasks of one step and the regions they read and write. Edges follow from that.

Owns: buffers, operators and the order in which the program wrote them. Knows nothing of workers,
tiles or devices: gpurt/planner lowers a Graph to a Plan. Host only, no GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from gpurt.body import Body, Param
from gpurt.buffer import DTYPES, Buffer, DType, Region, Role, u32
from gpurt.errors import GraphError
from gpurt.wire import PROPOSALS_PER_SLOT, RANKS_MAX, row_table_words

if TYPE_CHECKING:
    from gpurt.executors.packed_cache import PackedCache

Operand = Buffer | Region
T = TypeVar("T")


@dataclass(frozen=True)
class Form:
    """One of several ways to compute a value: a plan has one form of each choice."""

    choice: str
    name: str


@dataclass(frozen=True, eq=False)
class Operator:
    """One call of a Body. The planner cuts it into one or more Tasks."""

    index: int
    body: Body
    args: dict[str, Region]  # by the body's argument name, in its order; absent optionals left out
    params: dict[str, Param]
    name: str
    layer: int
    path: str  # for error messages: "graph.layers[3].mlp"
    reads: tuple[Region, ...] = field(default=())
    writes: tuple[Region, ...] = field(default=())
    rows: Region | None = None  # the table whose rows it is about; None: the step's
    form: Form | None = None  # of a choice; None: every plan has it


class Graph:
    """The tasks of one step.

    rows: rows (tokens) one step can carry; a plan may add smaller step sizes. slots: sequences one
    step can mix. context: positions of one sequence. vocab: logits a row, 0 for a graph that makes
    no tokens. rank, rank_count: whose share of a model this is, of how many; gpurt/ranks.py makes
    a group of all of them.
    Not thread-safe. Change no Graph that was planned: plans and sessions rely on it.
    Methods that add a buffer raise GraphError for an unknown dtype, an empty axis, blocks that do
    not divide a row, and a name that is taken.
    """

    def __init__(
        self,
        name: str = "graph",
        *,
        rows: int = 1,
        slots: int = 1,
        context: int = 1,
        vocab: int = 0,
        rank: int = 0,
        rank_count: int = 1,
    ) -> None:
        """Start an empty graph. Raises: GraphError for a bound that is not positive, or a rank."""
        for what, value in (("rows", rows), ("slots", slots), ("context", context)):
            if value < 1:
                raise GraphError(f"{what} is {value} - at {name} - use 1 or more")
        self.name, self.rows, self.slots, self.context, self.vocab = (
            name,
            rows,
            slots,
            context,
            vocab,
        )
        if not 0 <= rank < rank_count <= RANKS_MAX:
            msg = f"rank {rank} of {rank_count} - at {name}"
            raise GraphError(f"{msg} - ranks count from 0, and a group has at most {RANKS_MAX}")
        self.rank, self.rank_count = rank, rank_count
        self.packed: PackedCache | None = None  # where its packed weights are kept between loads
        self.group: tuple[Graph, ...] = (self,)  # the graphs of all ranks, once they are grouped
        self.buffers: list[Buffer] = []
        self.operators: list[Operator] = []
        self.inputs: dict[str, Buffer] = {}
        self.outputs: dict[str, Buffer] = {}
        self.notes: list[str] = []  # for people: what its builder chose, and why
        self._scope: list[str] = []
        self._layer = 0
        self._rows: Region | None = None
        self._form: Form | None = None
        self.sampled: Buffer | None = None
        if vocab:
            # The one buffer that `sample` writes and `advance` reads; it lies in the StepState.
            self.sampled = self.state("step.sampled", [rows], u32)
        self.proposals: Buffer | None = None
        self.parents: Buffer | None = None  # of proposals that are a tree
        self.proposal_limit = 0

    # ---- buffers -----------------------------------------------------------------------------
    def weight(self, name: str, shape: Sequence[int], dtype: DType | str, source: Any) -> Buffer:
        """A buffer that no task writes. source: array, DLPack object, or a function giving one.

        Raises: GraphError, also without a source.
        """
        return self._buffer(name, shape, dtype, "weight", source)

    def activation(self, name: str, shape: Sequence[int], dtype: DType | str) -> Buffer:
        """A buffer that lives inside a step."""
        return self._buffer(name, shape, dtype, "activation", None)

    def row_activation(self, name: str, width: int, dtype: DType | str, per_row: int = 1) -> Buffer:
        """An activation of `per_row` rows for each row of a step, [rows * per_row, width]. Steps of
        a variant of fewer rows use its first ones.
        """
        shape = [self.rows * per_row, width]
        return self._buffer(name, shape, dtype, "activation", None, per_row)

    def symmetric(self, name: str, like: Buffer, *, slots: int = 0, width: int = 0) -> Buffer:
        """A buffer that lives inside a step and that every rank has: [slots, rows, width], with the
        rows of the activation `like`, or without slots [rows, width]; width 0: that of `like`.

        Only collectives write it (graphs/collectives.py): who writes a region does so on all ranks,
        so what is declared is what all ranks together write. Bodies read it that ask for its set.
        """
        shape = [*([slots] if slots else []), *like.shape[:-1], width or like.shape[-1]]
        return self._buffer(name, shape, like.dtype, "symmetric", None, like.per_row)

    def state(
        self, name: str, shape: Sequence[int], dtype: DType | str, source: Any = None
    ) -> Buffer:
        """A buffer that outlives a step. source: its content at load, as of a weight; else zero."""
        return self._buffer(name, shape, dtype, "state", source)

    def input(self, name: str, shape: Sequence[int], dtype: DType | str) -> Buffer:
        """A state buffer that `submit(graph, inputs={name: array})` fills."""
        buffer = self.state(name, shape, dtype)
        self.inputs[name] = buffer
        return buffer

    def output(self, name: str, shape: Sequence[int], dtype: DType | str) -> Buffer:
        """A state buffer that `Request.result()` returns."""
        buffer = self.state(name, shape, dtype)
        self.outputs[name] = buffer
        return buffer

    def refill(self, buffer: Buffer, source: Any) -> None:
        """Give a buffer that has a source another one, as of `weight`; its shape stays.

        What was loaded before keeps what it has. Raises: GraphError without a first source.
        """
        if buffer.source is None:
            what = f"{buffer.name} has no source to replace"
            raise GraphError(f"{what} - at {self._path(buffer.name)} - pass one when it is made")
        object.__setattr__(buffer, "source", source)  # the one field that may change

    def draft(self, proposals: int = PROPOSALS_PER_SLOT, *, tree: bool = False) -> Buffer:
        """The state buffer of a drafter: operators that propose what the next step verifies.

        A drafter runs after `sample`. For every slot that sampled a token in the step it writes
        row [slot] of this buffer, [slots, 16] u32: how many ids it proposes to follow that token,
        then the ids. Tokens are those of decoding without a drafter whatever it writes; what the
        step has no row for, what passes the end, and all from an id on that is no token is left
        out. proposals: the most that one step verifies of a sequence, 1 to 15. tree: proposals may
        be a tree; `graph.parents`, [slots, 15] u32, then has the parent of each: i is the proposal
        in front of proposal i, counted from 1, and 0 the sampled token. Only for a graph whose
        caches are put in order behind `sample`: graphs/ops/attention_commit.py.
        Raises: GraphError for another number, without a vocabulary, and for a second drafter.
        """
        where = self._path("draft")
        if not 1 <= proposals <= PROPOSALS_PER_SLOT:
            msg = f"{proposals} proposals a step - at {where}"
            raise GraphError(f"{msg} - use 1 to {PROPOSALS_PER_SLOT}")
        if self.sampled is None:
            raise GraphError(f"a graph that makes no tokens has no drafter - at {where} - drop it")
        if self.proposals is not None:
            raise GraphError(f"a second drafter - at {where} - a graph has one")
        self.proposals = self.state("step.proposals", [self.slots, 1 + PROPOSALS_PER_SLOT], u32)
        if tree:
            self.parents = self.state("step.parents", [self.slots, PROPOSALS_PER_SLOT], u32)
        self.proposal_limit = proposals
        return self.proposals

    def row_table(self, name: str, rows: int) -> Buffer:
        """A table of rows that an operator makes in each step, for operators added `over` it.

        It has the layout of a StepState for `rows` rows: how many there are, which of them want
        logits, and each one's token, slot and position. Raises: GraphError.
        """
        return self.activation(name, [row_table_words(rows)], u32)

    # ---- tasks -------------------------------------------------------------------------------
    def task(
        self,
        body: Body,
        reads: Sequence[Operand],
        writes: Sequence[Operand],
        *,
        name: str = "",
        **params: Param,
    ) -> Operator:
        """Add one Task: it reads and writes exactly these regions, and is never cut.

        The body gets `reads`, then `writes`. Raises: GraphError for a write to a weight, and for a
        region of another Graph.
        """
        regions = [_region(r) for r in (*reads, *writes)]
        args = {f"arg{i}": region for i, region in enumerate(regions)}
        read, written = tuple(regions[: len(reads)]), tuple(regions[len(reads) :])
        return self._add(body, args, dict(params), name, read, written)

    def op(
        self, body: Body, args: dict[str, Operand | None], *, name: str = "", **params: Param
    ) -> Operator:
        """Add an operator of a built-in body; the planner tiles it. Arguments go by name.

        args: None stands for an optional one that is absent. Raises: GraphError for an argument or
        parameter that is missing or unknown, and as `task`.
        """
        bound = {k: _region(v) for k, v in args.items() if v is not None}
        where = self._path(name or body.name)
        known = {a.name for a in body.args}
        missing = [a.name for a in body.args if not a.optional and a.name not in bound]
        unknown = sorted(set(bound) - known)
        if missing or unknown:
            what = f"{body.name} lacks {missing}" if missing else f"{body.name} has no {unknown}"
            raise GraphError(f"{what} - at {where} - its arguments are {sorted(known)}")
        lacking = [p for p in body.params if p not in params]
        extra = sorted(set(params) - set(body.params))
        if lacking or extra:
            what = f"{body.name} lacks {lacking}" if lacking else f"{body.name} has no {extra}"
            raise GraphError(f"{what} - at {where} - its parameters are {list(body.params)}")
        ordered = {a.name: bound[a.name] for a in body.args if a.name in bound}
        reads = tuple(bound[a.name] for a in body.args if "r" in a.access and a.name in bound)
        writes = tuple(bound[a.name] for a in body.args if "w" in a.access and a.name in bound)
        return self._add(body, ordered, {p: params[p] for p in body.params}, name, reads, writes)

    @contextmanager
    def at(self, scope: str, layer: int | None = None) -> Iterator[None]:
        """Names what is added inside: `with graph.at("layers[3]", layer=3):`."""
        before = self._layer
        self._scope.append(scope)
        self._layer = before if layer is None else layer
        try:
            yield
        finally:
            self._scope.pop()
            self._layer = before

    @contextmanager
    def over(self, table: Buffer) -> Iterator[None]:
        """What is added inside is about the rows of a table, not about those of the step."""
        before, self._rows = self._rows, table.whole
        try:
            yield
        finally:
            self._rows = before

    @contextmanager
    def form(self, choice: str, name: str) -> Iterator[None]:
        """What is added inside is one form of a choice: all forms of it write the same bits, and
        the planner keeps the operators of one (planner/forms.py).
        """
        self._form = Form(choice, name)
        try:
            yield
        finally:
            self._form = None

    @property
    def is_over_table(self) -> bool:
        """Whether what is added now is about the rows of a table."""
        return self._rows is not None

    def check(self) -> None:
        """Prove what can be proved before planning. Raises: GraphError naming task and region."""
        from gpurt.planner.check import check_graph

        check_graph(self)

    def narrowed(self, rows: int) -> Graph:
        """The same operators for steps of at most `rows` rows, over the same buffers, of which
        those of `row_activation` lose their last rows.

        Raises: GraphError if an operator takes only some of such a buffer's rows.
        """
        twin = copy.copy(self)
        twin.rows = rows
        twin.buffers = [
            replace(b, shape=_with_rows(b, rows * b.per_row, b.shape)) if b.per_row else b
            for b in self.buffers
        ]

        def cut(region: Region, op: Operator) -> Region:
            old, new = region.buffer, twin.buffers[region.buffer.index]
            if old is new:
                return region
            count = new.shape[new.row_axis]
            if region.bounds[new.row_axis] != (0, old.shape[new.row_axis]):
                msg = f"{op.body.name} takes {region}, only some rows of a step"
                raise GraphError(f"{msg} - at {op.path} - plan one variant, or take all rows")
            return Region(new, _with_rows(new, (0, count), region.bounds))

        twin.operators = [
            replace(
                op,
                args={name: cut(region, op) for name, region in op.args.items()},
                reads=tuple(cut(region, op) for region in op.reads),
                writes=tuple(cut(region, op) for region in op.writes),
            )
            for op in self.operators
        ]
        return twin

    # ---- helpers -----------------------------------------------------------------------------
    def _buffer(
        self,
        name: str,
        shape: Sequence[int],
        dtype: DType | str,
        role: Role,
        source: Any,
        per_row: int = 0,
    ) -> Buffer:
        kind = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
        where = self._path(name)
        if kind is None:
            raise GraphError(f"unknown dtype {dtype!r} - at {where} - use one of {sorted(DTYPES)}")
        if not shape or any(n < 1 for n in shape):
            raise GraphError(f"shape {list(shape)} - at {where} - every axis needs 1 or more")
        if any(b.name == name for b in self.buffers):
            raise GraphError(f"two buffers are named {name!r} - at {where} - rename one")
        if role == "weight" and source is None:
            raise GraphError(f"weight {name!r} has no source - at {where} - pass an array")
        kind.row_bytes(shape[-1])
        buffer = Buffer(name, tuple(shape), kind, role, len(self.buffers), source, per_row)
        self.buffers.append(buffer)
        return buffer

    def _add(
        self,
        body: Body,
        args: dict[str, Region],
        params: dict[str, Param],
        name: str,
        reads: tuple[Region, ...],
        writes: tuple[Region, ...],
    ) -> Operator:
        where = self._path(name or body.name)
        for region in writes:
            if region.buffer.role == "weight":
                raise GraphError(f"{body.name} writes weight {region} - at {where} - use state")
        for region in args.values():
            if self.buffers[region.buffer.index] is not region.buffer:
                raise GraphError(f"{region} is of another Graph - at {where} - make it here")
        op = Operator(
            len(self.operators),
            body,
            args,
            params,
            name or body.name,
            self._layer,
            where,
            reads if self._rows is None else (*reads, self._rows),
            writes,
            self._rows,
            self._form,
        )
        self.operators.append(op)
        return op

    def _path(self, leaf: str) -> str:
        return ".".join([self.name, *self._scope, leaf])


def _with_rows(buffer: Buffer, rows: T, axes: tuple[T, ...]) -> tuple[T, ...]:
    at = buffer.row_axis
    return (*axes[:at], rows, *axes[at + 1 :])


def _region(operand: Operand) -> Region:
    return operand.whole if isinstance(operand, Buffer) else operand
