"""Trace: all spans of a run, their file, their analysis and how they are shown.

Data flows one way: RawTrace (executors) -> Trace -> file, analysis -> terminal, Perfetto.
Nothing here knows a device.
"""

from gpurt.trace.spans import SPAN, StepSpans
from gpurt.trace.trace import STEP, OperatorInfo, RequestInfo, Trace

__all__ = ["SPAN", "STEP", "OperatorInfo", "RequestInfo", "StepSpans", "Trace"]
