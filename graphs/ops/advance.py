"""advance: the last task of every step. It takes the sampled tokens, decides what ends and what
begins, writes the next StepState and opens that step (scheduler/advance.hpp). The planner adds it.
"""

from __future__ import annotations

from gpurt.body import Arg, Body

ADVANCE = Body(name="advance", args=(Arg("sampled", "r", optional=True),))
