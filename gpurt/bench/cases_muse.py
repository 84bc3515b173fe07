"""Cases of Muse Spark: a TP8 rank's slice, its experts alone, its drafter."""

from __future__ import annotations

from functools import cache

from gpurt.bench import graphs, models, ours, peers_muse, shapes
from gpurt.bench.case import Case, Workload
from gpurt.bench.cases_draft import draft_cases
from gpurt.bench.traffic import step_bytes

TOKENS = 100  # of a slice, or steps of 16 rows
POSITION = {1: 512, 16: 1024}  # by rows: so many steps of 16 lie around it
STEPS = 16
GROUPED = "our stand-alone grouped kernel, CUDA graph"


def muse_cases() -> list[Case]:
    """Slices of a rank, the experts alone, and the drafter."""

    def moe(name: str, routed: bool, goal: float, prototype: float) -> Case:
        def make(small: bool) -> Workload:
            size = {"layers": 8, "experts": 256, "top_k": 8, "width": 4096, "inner": 512}
            if small:
                size = {"layers": 2, "experts": 12, "top_k": 3, "width": 64, "inner": 32}
            rows = 4 if small else 16
            build = cache(lambda: graphs.experts_alone(**size, rows=rows, routed=routed))
            return Workload(
                graph=build,
                bytes_moved=lambda: step_bytes(build(), rows=rows),
                settings={"policy": {"expert_matvec": "claim"}},
                step={"steps": STEPS, "rows": rows, **size},
            )

        known = "by a router before each layer" if routed else "decided before the first layer"
        return Case(
            name=name,
            measures=f"NVFP4 experts of a Muse Spark TP8 rank alone, 16 rows, routing {known}",
            kind="cuda",
            unit="GB/s",
            make=make,
            ours=ours.Bandwidth,
            peers={GROUPED: peers_muse.grouped_experts},
            goal=goal,
            prototype=prototype,
            beside=False,
        )

    return [
        _muse_slice("muse-slice-r1", 1, "random"),
        _muse_slice("muse-slice-r16", 16, "random", goal=8700.0),
        _muse_slice("muse-slice-r16-repeat", 16, "repeat", goal=8300.0),
        _muse_slice("muse-slice-r16-natural", 16, "natural"),
        moe("muse-moe-known", False, 3900.0, 4060.0),
        moe("muse-moe-routed", True, 3600.0, 3760.0),
        *draft_cases(),
    ]


def _muse_slice(name: str, rows: int, routing: str, goal: float | None = None) -> Case:
    def make(small: bool) -> Workload:
        config = models.small_muse(shapes.MUSE_SPARK) if small else shapes.MUSE_SPARK
        at, tokens, context = (16, 4, 64) if small else (POSITION[rows], TOKENS, 2048)
        ranks = 2 if small else shapes.MUSE_RANKS
        build = cache(
            lambda: models.model_graph(
                config, rows=rows, context=context, tp_size=ranks, routing=routing
            )
        )
        return Workload(
            graph=build,
            bytes_moved=lambda: step_bytes(build(), rows=rows, position=at),
            # Of one row all experts' slots are live: there is nothing to draw lots for.
            settings={"step_rows": (rows,)}
            | ({} if rows == 1 else {"policy": {"expert_matvec": "claim"}}),
            step={
                "position": at,
                "tokens": tokens,
                "context": context,
                "ranks": ranks,
                "rows": rows,
            },
            config=config,
            routing=routing,
        )

    return Case(
        name=name,
        measures=f"Muse Spark, a TP8 rank's slice, 62 layers, rows {rows}, {routing} routing",
        kind="cuda",
        unit="us",
        make=make,
        ours=ours.Decode if rows == 1 else ours.Verify,
        peers={"torch and our grouped kernel, CUDA graph": peers_muse.torch_slice},
        goal=goal,
        beside=False,
    )
