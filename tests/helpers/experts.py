"""A small mixture of experts in Python bodies that check and count what runs.

A layer, slots C, tiles a slot T; every arrow is one operator:

    x -> pre -> z --------------.
    x -> route -> routes -> expert_up (C*T tiles) -> h -> expert_down (C*T tiles) -> d
    d, routes -> combine -> y -> fold into `sum`, a state

All layers use the same buffers. `z` is no input of `route`, so the tasks that a step lacks need a
compensator of their own. How many slots are live, and which experts they hold, is a function of
layer and step alone; in some steps none is live and in some all.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np

from gpurt.body import Arg, Body, Tile
from gpurt.buffer import Region
from gpurt.graph import Graph

PRIME = 1_000_003


def live_of(layer: int, step: int, slots: int) -> int:
    """How many slots are live: 0 and all of them, each in one of five steps."""
    draw = (layer * 7919 + step * 104_729) % 10
    return 0 if draw < 2 else slots if draw < 4 else (layer + step * step) % (slots + 1)


def value(*numbers: int) -> int:
    """A small hash."""
    result = 17
    for number in numbers:
        result = (result * 31 + int(number)) % PRIME
    return result


@dataclass
class Experts:
    """The graph's bodies, and what they saw."""

    layers: int = 2
    slots: int = 4
    tiles: int = 2
    fails_in: int = -1  # step in which slot 0 of the last layer raises
    counts: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)
    entries: dict[tuple[str, int], int] = field(default_factory=dict)  # those that return, too
    steps: list[int] = field(default_factory=list)
    too_many: bool = False  # `route` names one slot more than there are

    def __post_init__(self) -> None:
        self.steps = [0] * self.layers
        self.lock = threading.Lock()
        self.bodies = [
            _body("start", self.start, "sum:r", "x:w"),
            _body("route", self.route, "x:r", "routes:w"),
            _body("pre", self.pre, "x:r", "z:w", tile=pre_tiles),
            _body("expert_up", self.up, "z:r", "routes:r", "ids:r", "h:w", dynamic=True),
            _body("expert_down", self.down, "h:r", "routes:r", "ids:r", "d:w", dynamic=True),
            _body("combine", self.combine, "d:r", "routes:r", "y:w"),
            _body("fold", self.fold, "y:r", "sum:rw"),
        ]
        for layer in range(self.layers):
            for name in ("expert_up", "expert_down"):
                self.entries[name, layer] = 0
                self.counts[name, layer] = np.zeros((self.slots, self.tiles), np.int64)

    def graph(self) -> Graph:
        """The graph; its bodies belong to this object."""
        graph = Graph("experts")
        shape = [self.slots, self.tiles]
        sizes = {"x": [1], "z": [2], "routes": [1 + self.slots], "h": shape, "d": shape, "y": [1]}
        b = {name: graph.activation(name, size, "u32") for name, size in sizes.items()}
        ids = np.arange(self.slots * self.tiles, dtype=np.uint32).reshape(shape)
        b["sum"] = graph.state("sum", [1], "u32")
        b["ids"] = graph.state("ids", shape, "u32", ids)
        for layer in range(self.layers):
            with graph.at(f"layers[{layer}]", layer=layer):
                self._layer(graph, b, layer)
        return graph

    def _layer(self, graph: Graph, b, layer: int) -> None:
        for body in self.bodies:
            args = {arg.name: b[arg.name] for arg in body.args}
            graph.op(body, args, name=body.name, layer=layer)

    # ---- bodies ------------------------------------------------------------------------------
    def start(self, total, x, *, layer):
        x[0] = value(int(total[0]), layer, self.steps[layer])

    def route(self, x, routes, *, layer):
        step = self.steps[layer]
        live = live_of(layer, step, self.slots)
        routes[0] = live + (self.slots + 1 if self.too_many else 0)
        routes[1:] = PRIME  # what a slot that is not live holds must not matter
        for slot in range(live):
            routes[1 + slot] = value(x[0], slot)
        self.steps[layer] = step + 1

    def pre(self, x, z, *, layer):
        z[0] = value(x[0], layer, 1)

    def up(self, z, routes, ids, h, *, layer):
        slot = self._enter("expert_up", layer, routes, ids)
        if slot is not None:
            h[0, 0] = value(z[0], z[1], routes[1 + slot], ids[0, 0])

    def down(self, h, routes, ids, d, *, layer):
        slot = self._enter("expert_down", layer, routes, ids)
        if slot is not None:
            d[0, 0] = value(*h[0], routes[1 + slot], ids[0, 0])

    def combine(self, d, routes, y, *, layer):
        live = int(routes[0])
        y[0] = value(layer, live, *d[:live].reshape(-1))

    def fold(self, y, total, total_out, *, layer):
        total_out[0] = value(total[0], y[0], layer)

    def _enter(self, name, layer, routes, ids):
        slot, tile = divmod(int(ids[0, 0]), self.tiles)
        with self.lock:
            self.entries[name, layer] += 1
        if slot >= int(routes[0]):
            return None
        if self.fails_in == self.steps[layer] - 1 and layer == self.layers - 1 and slot == 0:
            raise ZeroDivisionError(f"{name} of slot {slot}")
        with self.lock:
            self.counts[name, layer][slot, tile] += 1
        return slot

    # ---- what is expected ---------------------------------------------------------------------
    def expected_sum(self, steps: int) -> int:
        """`sum` after that many steps."""
        total = 0
        for step in range(steps):
            for layer in range(self.layers):
                x = value(total, layer, step)
                z = [value(x, layer, 1)] * 2
                live = live_of(layer, step, self.slots)
                d = []
                for slot in range(live):
                    expert = value(x, slot)
                    numbers = [slot * self.tiles + tile for tile in range(self.tiles)]
                    h = [value(*z, expert, n) for n in numbers]
                    d += [value(*h, expert, n) for n in numbers]
                total = value(total, value(layer, live, *d), layer)
        return total

    def expected_counts(self, steps: int) -> dict[tuple[str, int], np.ndarray]:
        """How often each expert tile did something."""
        result = {}
        for name, layer in self.counts:
            live = [live_of(layer, step, self.slots) for step in range(steps)]
            by_slot = [sum(n > slot for n in live) for slot in range(self.slots)]
            result[name, layer] = np.repeat(np.array(by_slot)[:, None], self.tiles, axis=1)
        return result


def pre_tiles(op, _target):
    """Two tiles."""
    x, z = op.args["x"], op.args["z"]
    return [Tile((i, 0, 0, 0), (x,), (Region(z.buffer, ((i, i + 1),)),)) for i in range(2)]


def expert_tiles(op, _target):
    """Slot by slot; `down` reads all tiles of its own slot."""
    ids = op.args["ids"].buffer
    slots, tiles = ids.shape
    result = []
    for slot in range(slots):
        for tile in range(tiles):
            one = ((slot, slot + 1), (tile, tile + 1))
            first = op.args.get("z") or Region(op.args["h"].buffer, (one[0], (0, tiles)))
            written = op.args["h" if "z" in op.args else "d"].buffer
            reads = (first, op.args["routes"], Region(ids, one))
            result.append(Tile((slot, tile, 0, 0), reads, (Region(written, one),)))
    return result


def _body(name, host, *args, tile=None, dynamic=False):
    declared = tuple(Arg(*a.split(":")) for a in args)
    tile = expert_tiles if dynamic else tile
    return Body(name, declared, ("layer",), tile=tile, host=host, dynamic=dynamic)
