"""A plan of two matvecs, f32 and bf16, for tests that compile or run the CUDA kernel."""

from gpurt.body import Target
from gpurt.graph import Graph
from gpurt.graphs.ops.matvec import matvec
from gpurt.plan import Plan
from gpurt.planner import plan


def matvec_plan(*, team: int = 16, rows: int = 1, target: Target | None = None) -> Plan:
    """x [rows, 128] f32 -> y [rows, 64] bf16 -> z [rows, 32] f32, planned for cuda."""
    graph = Graph("two_matvecs", rows=rows)
    x = graph.input("x", [rows, 128], "f32")
    y = graph.activation("y", [rows, 64], "bf16")
    z = graph.output("z", [rows, 32], "f32")
    matvec(graph, x, graph.weight("w", [64, 128], "bf16", lambda: None), y)
    matvec(graph, y, graph.weight("v", [32, 64], "bf16", lambda: None), z)
    return plan(graph, target or Target("cuda", 4, team, "sm_90a", 232448, 60 << 20))
