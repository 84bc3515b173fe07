"""Body: what a Task computes. How it is cut into tiles, its reference, and its source.

A built-in body has one stem in four folders: device/bodies/X.cuh, device/bodies/X.hpp,
graphs/ops/X.py, tests/gpu/test_X.py. A body of a user's own is made by `body()`: one numpy
function, which is its host version and its oracle, and one CUDA struct for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from gpurt.errors import GraphError

if TYPE_CHECKING:
    from gpurt.buffer import Region
    from gpurt.graph import Operator
    from gpurt.planner.lower import Lowering

Param = int | float
Access = Literal["r", "w", "rw"]


@dataclass(frozen=True)
class Target:
    """What a plan is made for. Tiles and the order of sums depend on `kind` and `arch` alone,
    never on workers or team, so that any number of workers gives the same bits.
    """

    kind: Literal["host", "cuda"]
    workers: int
    team_warps: int = 1
    arch: str = ""  # cuda: "sm_90a"
    smem_bytes: int = 0  # cuda: shared memory one block may use
    l2_bytes: int = 0


STAGE_BYTES = 32768  # of the weight ring: kStageBytes of device/shared_memory.cuh
STAGE_ROOM_BYTES = 36864  # the most that a plan's streams may put into one: kStageRoom there


@dataclass(frozen=True)
class Stream:
    """A tile's weights: one contiguous range of the packed buffer bound to argument `arg`.

    stride_bytes: if not 0, which expert's weights is known at run time. Those of expert 0 are
        stated, each further one's lie `stride_bytes` further. The id is the u32 at byte
        `expert_id_bytes` of argument `routes`, with five more behind it that the task is given
        (route.py: of its slot); the first u32 there is the number of live slots; a tile whose
        slot, coords[0], is not live streams nothing.
    stage_bytes: of an expert's: how many of them go into one stage of the ring.
    """

    arg: str
    offset_bytes: int
    size_bytes: int
    stride_bytes: int = 0
    expert_id_bytes: int = 0
    stage_bytes: int = STAGE_BYTES


@dataclass(frozen=True)
class Tile:
    """One Task of an Operator: coordinates, the regions it touches, the bytes it streams."""

    coords: tuple[int, int, int, int]
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]
    stream: Stream | None = None
    cost_bytes: int = 0  # bytes moved, for the planner's cost model


@dataclass(frozen=True)
class Arg:
    """A buffer argument of a Body: its name and use. Their order is `TaskRecord.addr` order."""

    name: str
    access: Access
    optional: bool = False
    payload: bool = False  # cuda: the struct polls, or stores, it as a payload edge needs


@dataclass(frozen=True)
class StepRows:
    """The rows of a step, as a reference sees them: arrays of `rows` elements."""

    token: NDArray[np.uint32]
    slot: NDArray[np.uint32]
    position: NDArray[np.uint32]
    sample_rows: NDArray[np.uint32]  # indices of rows whose logits are wanted


class Tiler(Protocol):
    """Cuts an operator into tiles for a target. Pure: the same operator gives the same tiles."""

    def __call__(self, op: Operator, target: Target) -> list[Tile]:
        """The tiles of `op`, in an order that is fixed."""


class Lower(Protocol):
    """Adds operators that take an operator's place on `target`; False: none, it stays."""

    def __call__(self, op: Operator, target: Target, lowering: Lowering) -> bool:
        """Raises: GraphError for what the target cannot compute."""


class Reference(Protocol):
    """Computes a whole operator in numpy float32. `arrays` maps argument name to the WHOLE buffer
    as an array (weights and bf16 activations as float32, written in place).
    """

    def __call__(self, op: Operator, arrays: Mapping[str, NDArray[Any]], step: StepRows) -> None:
        """Fill the written arrays."""


@dataclass(frozen=True)
class Body:
    """A body's contract. `packing(op, arg, target)` names the layout a weight is packed to at load
    ("" for row-major as stored); graphs/ops/packing.py has the packers by name.
    """

    name: str
    args: tuple[Arg, ...]
    params: tuple[str, ...] = ()
    tile: Tiler | None = None  # None: one task
    reference: Reference | None = None
    packing: Callable[[Operator, str, Target], str] | None = None
    host: Callable[..., None] | None = None  # a user's numpy function
    cuda: str = ""  # a user's CUDA struct
    # The name of the body that computes `op` on `target`, where that is another: same arguments and
    # parameters, another precision.
    variant: Callable[[Operator, Target], str] | None = None
    payload: bool = False  # cuda: its struct does so with all of its arguments
    payload_words: bool = False  # they need not be whole granules: each word is its own flag
    # Tiles lie slot by slot (coords[0] is the slot, as many tiles in each), and a step needs only
    # those of the slots in use: the first word of argument `routes`. A task of another slot returns
    # at once, so running it is always right; under `claim` it need not run at all.
    dynamic: bool = False
    ranks: bool = False  # it may read symmetric buffers: it asks for their set of the round
    publishes: bool = False  # it may write them, on all ranks
    lower: Lower | None = None  # planner/lower.py
    # cuda: whether a task can store `y` on all ranks, or, with a share of columns, each part on one
    # rank, as four further parameters say: planner/direct.py.
    published: Callable[[Operator, int], bool] | None = None
    # cuda: whether a task finds an argument's elements in whatever order the parameter of its name
    # and `_fragments` says: planner/fragments.py.
    fragments: Callable[[Operator, str], bool] | None = None
    ring: bool = False  # cuda: a task has the whole weight ring as its room, and streams nothing

    def takes_payload(self, arg: str) -> bool:
        """Whether the argument of that name may be payload."""
        return self.payload or any(a.name == arg and a.payload for a in self.args)

    @property
    def is_user(self) -> bool:
        """Whether this body was made by `body()`."""
        return self.host is not None


def body(name: str, host: Callable[..., None], cuda: str = "") -> Body:
    """A body of your own.

    host: called as `host(*reads, *writes, **params)` with numpy arrays that view the declared
        regions; writes are filled in place. It runs on a worker thread, under the GIL.
    cuda: the source of `struct NAME { __device__ static void run(const gpurt::TaskRecord& task,
        const gpurt::BodyContext& context); };` where task.addr holds reads then writes.
    Raises: GraphError if the name is no identifier.
    """
    if not name.isidentifier():
        msg = f"a body is named {name!r}, which is no identifier - at gpurt.body"
        raise GraphError(f"{msg} - use letters, digits and underscores: it names the CUDA struct")
    return Body(name=name, args=(), host=host, cuda=cuda)
