"""Check: stub."""

from gpurt.graph import Graph
from gpurt.plan import Plan


def check_graph(graph: Graph) -> None:
    """."""


def check_plan(plan: Plan) -> None:
    """."""
