"""Profiles: measured choices of policy and edges, by device, model and bounds; `auto` reads them.

Owns: the file format and where files lie, which profile fits a graph. Does not know: how one is
measured (gpurt/tune.py).

A profile is one JSON object in the folder profiles/ of gpurt's cache. It fits where device name,
workers, matrices of the model and rows of a step are the same; the newest of several counts. It
changes speed only: the same tiles and bits come out of every policy.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from gpurt.config import EDGES, POLICIES, EdgeChoice, PolicyChoice
from gpurt.doctor import cache_folder
from gpurt.errors import ConfigError

if TYPE_CHECKING:
    from gpurt.body import Target
    from gpurt.graph import Graph
    from gpurt.plan import Plan
    from gpurt.progress import Progress

PROFILE_VERSION = 1
AUTO = "auto"
DEFAULT_POLICY = "static"  # what `auto` is without a profile
_MATRICES = ("w", "table")  # arguments that are a model's matrices


@dataclass(frozen=True)
class Key:
    """What a profile was measured for. matrices: a digest of operators and matrix shapes."""

    device: str
    workers: int
    model: str
    matrices: str
    rows: int


@dataclass(frozen=True)
class Profile:
    """A choice and what it was worth. policy: of operators by name, the rest static.

    us, default_us: medians of one step. gain: of the default's time, with its noise, as a share.
    made: UTC, as in 2026-11-30T12:00:00. trials: what was tried, a line each.
    """

    key: Key
    policy: dict[str, str]
    edges: str
    default_us: float
    us: float
    gain: float
    noise: float
    made: str
    commit: str
    trials: tuple[str, ...] = ()
    version: int = field(default=PROFILE_VERSION)

    def __str__(self) -> str:
        """One line: what it says and what it is worth."""
        chosen = ", ".join(f"{name} {policy}" for name, policy in self.policy.items())
        worth = f"{self.gain:+.1%} measured, noise {self.noise:.1%}"
        return f"{chosen or 'all static'}, edges {self.edges} ({worth}, {self.made})"


def key_of(graph: Graph, device: str, workers: int) -> Key:
    """The key of a graph on a device."""
    digest = hashlib.sha256()
    for op in graph.operators:
        matrices = [op.args[name] for name in _MATRICES if name in op.args]
        shapes = [(m.shape, m.buffer.dtype.name) for m in matrices]
        digest.update(f"{op.name} {op.body.name} {op.layer} {shapes}\n".encode())
    return Key(device, workers, graph.name, digest.hexdigest()[:16], graph.rows)


def choose(
    graph: Graph, device: str, workers: int, policy: Any, edges: str
) -> tuple[PolicyChoice, EdgeChoice, str]:
    """Policy and edges to plan with, and for `auto` a line that says where they come from.

    An explicit `edges` stays. Raises: ConfigError if a profile that could fit cannot be read.
    """
    kind = cast("EdgeChoice", edges)
    if policy != AUTO:
        return cast("PolicyChoice", policy), kind, ""
    found = newest(key_of(graph, device, workers))
    if found is None:
        what = f"no profile for {graph.name} with {graph.rows} rows on {device}, {workers} workers"
        return cast("PolicyChoice", DEFAULT_POLICY), kind, f"{what}: {DEFAULT_POLICY}"
    kind = cast("EdgeChoice", found.edges) if edges == AUTO else kind
    chosen: Any = dict(found.policy) or DEFAULT_POLICY
    return chosen, kind, str(found)


def plan_with(
    graph: Graph,
    target: Target,
    device: str,
    policy: Any,
    edges: str,
    progress: Progress | None = None,
    *,
    rows: Sequence[int] | None = None,
) -> Plan:
    """The Plan of a graph under a policy that may be `auto`; it says which profile it was made by.

    rows: of each step size, as for `planner.plan`; None: the usual ones. Raises: as `choose` and
    `planner.plan`.
    """
    from gpurt.planner import plan
    from gpurt.planner.variants import usual_rows

    chosen, kind, source = choose(graph, device, target.workers, policy, edges)
    known = cast("Any", chosen)
    rows = usual_rows(graph, target.kind) if rows is None else rows
    made = plan(graph, target, policy=known, edges=kind, progress=progress, rows=rows)
    return replace(made, profile=source)


def newest(key: Key, folder: Path | None = None) -> Profile | None:
    """The newest profile of a key. Raises: ConfigError for a file that is none."""
    fitting = [profile for profile in all_profiles(folder) if profile.key == key]
    return max(fitting, key=lambda profile: profile.made, default=None)


def all_profiles(folder: Path | None = None) -> list[Profile]:
    """Every profile of this gpurt's version. Raises: ConfigError for a file that is none."""
    found = [read(path) for path in sorted((folder or profiles_folder()).glob("*.json"))]
    return [profile for profile in found if profile is not None]


def profiles_folder() -> Path:
    """Where profiles lie."""
    return cache_folder() / "profiles"


def save(profile: Profile, path: Path | None = None) -> Path:
    """Write a profile; by default where `auto` finds it. Raises: ConfigError."""
    if path is None:
        name = f"{profile.key.model}-{profile.key.matrices}-r{profile.key.rows}"
        stamp = profile.made.replace(":", "").replace("-", "")
        path = profiles_folder() / f"{name}-{profile.key.workers}w-{stamp}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(profile), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        msg = f"cannot write the profile: {error.strerror} - at {path}"
        raise ConfigError(f"{msg} - use --out, or set GPURT_CACHE_DIR") from None
    return path


def read(path: Path) -> Profile | None:
    """A profile file; None if another version of gpurt wrote it. Raises: ConfigError."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["version"] != PROFILE_VERSION:
            return None
        profile = Profile(
            **values | {"key": Key(**values["key"]), "trials": tuple(values["trials"])}
        )
        _check(profile.policy, profile.edges)
    except (OSError, ValueError, TypeError, KeyError) as error:
        what = f"no profile that gpurt can read ({error!r})"
        raise ConfigError(f"{what} - at {path} - delete it and run gpurt tune again") from None
    return profile


def _check(policy: Mapping[str, str], edges: str) -> None:
    unknown = [value for value in policy.values() if value not in POLICIES]
    if unknown or edges not in EDGES:
        raise ValueError(f"policy {unknown}, edges {edges}")
