"""rearm: fills bytes of the payload set that the next step writes with all ones, the sentinel.
The planner adds it to plans with payload edges and orders it after the last reader.
"""

from __future__ import annotations

from gpurt.body import Arg, Body

REARM = Body(name="rearm", args=(Arg("buffer", "w"),), params=("bytes_lo", "bytes_hi"))
