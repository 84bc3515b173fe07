"""noop: touches nothing. The planner joins many producers with it; benches time empty stages."""

from __future__ import annotations

from gpurt.body import Body

NOOP = Body(name="noop", args=())
