"""From body names to a cubin: generates the list of bodies, compiles by NVRTC, caches on disk.

The kernel is scheduler/persistent.cu; it includes `bodies.gen.cuh`, which this module writes for
exactly the bodies of a plan, a user's CUDA structs among them. NVRTC needs no GPU, so the same
path serves tests on machines without one. Nothing here touches the driver.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpurt.body import STAGE_BYTES, Body, Param, Target
from gpurt.errors import CacheWarning, DeviceError, GraphError
from gpurt.plan import TASK_OWN_ROWS, TASK_RING, Plan, PlanTask
from gpurt.source import source_dir
from gpurt.wire import DTypeCode

GENERATED = "bodies.gen.cuh"
KERNEL_SOURCE = "persistent.cu"
ENTRY = "gpurt_persistent"
PROGRAM_SYMBOL = "gpurt_program"
BUILT_IN = (
    *("noop", "matvec", "embed", "attention", "sample", "rearm"),
    *("matvec_input", "matvec_wide", "route_choose", "route_group"),
    *("publish", "collect", "reduce", "reduce_squares", "combine_columns"),
    *("matvec_f32", "gated_residual", "route", "expert_matvec", "combine"),
    *("draft_ngram", "draft_rows", "block_conv", "candidates", "draft_walk"),
    *("attention_merge", "attention_commit", "attention_rows"),
)
# Those that can store on all ranks in any kernel.
PUBLISHERS = ("publish", "collect", "reduce", "reduce_squares", "combine_columns")
ATTENTIONS = ("attention", "attention_rows")  # whose instances are chosen for a plan
SCRATCH_BYTES = {16: 32768, 1: 65536}  # kScratchBytes of device/shared_memory.cuh, by team
SLOT_BYTES = 3072  # slots and barriers there, rounded up
STAGES_MAX = 16
_SPANS = 14  # attention's parameter
_X_DTYPE = 6  # matvec's
PAGE_MIN = 16  # positions: attention's largest chunk
# fmad=false: a body writes its multiply-adds out, so that no instance of a template and no
# compiler version fuses other pairs than another.
OPTIONS = ("--std=c++20", "--fmad=false", "--ptxas-options=-v")


@dataclass(frozen=True)
class Resources:
    """What ptxas says of one function. spill: bytes stored and loaded by spills."""

    name: str
    registers: int  # 0 for a function that is called: it shares its kernel's
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    smem_bytes: int  # static


@dataclass(frozen=True)
class Compiled:
    """A cubin, what it needs, and whether it came from the cache."""

    cubin: bytes
    resources: tuple[Resources, ...]
    cached: bool

    def function(self, name: str) -> Resources:
        """Resources of the first function whose (mangled) name contains `name`."""
        for entry in self.resources:
            if name in entry.name:
                return entry
        raise KeyError(name)


@dataclass(frozen=True)
class KernelCode:
    """The persistent kernel of one plan. bodies: index by name, as TaskRecord.body counts them."""

    compiled: Compiled
    bodies: Mapping[str, int]
    header: str  # bodies.gen.cuh, for reports

    @property
    def cubin(self) -> bytes:
        """What the driver loads."""
        return self.compiled.cubin


def compile_kernel(plan: Plan, bodies: Mapping[str, Body], arch: str) -> KernelCode:
    """The persistent kernel for exactly the bodies of `plan`.

    bodies: of the Graph, by name: a user's CUDA structs are in them. Raises: GraphError if one of
    those is missing or does not compile; DeviceError as `compile_source`.
    """
    users = {n: b for n, b in bodies.items() if b.is_user}
    header, names = generate_header(plan, users)
    source = (source_dir() / "scheduler" / KERNEL_SOURCE).read_text()
    compiled = compile_source(
        source, arch, headers={GENERATED: header}, user_files=tuple(users), name=KERNEL_SOURCE
    )
    index = {name: i for i, name in enumerate(names)}
    # A task with the flag `advance` runs advance(), whatever its index says.
    return KernelCode(compiled, {**index, "advance": index["noop"]}, header)


def generate_header(plan: Plan, users: Mapping[str, Body]) -> tuple[str, list[str]]:
    """bodies.gen.cuh, and the names of its bodies in their order."""
    target = plan.target
    used = {task.body for task in plan.tasks} - {"advance"} | {"noop"}
    unknown = sorted(used - set(BUILT_IN) - set(users))
    if unknown:
        msg = f"the plan runs {unknown}, which the CUDA executor lacks - at {plan.name}"
        raise GraphError(f"{msg} - it has {list(BUILT_IN)} and bodies with a CUDA struct")
    built_in = [name for name in BUILT_IN if name in used and name not in users]
    own = sorted(used & set(users))
    room = stage_room(plan)
    lines = [
        "#pragma once",
        '#include "types.hpp"',
        "namespace gpurt {",
        f"constexpr u32 kTeamWarps = {target.team_warps};",
        f"constexpr u32 kStageRoom = {room};",
        f"constexpr u32 kStageCount = {stage_count(target, room)};",
        "}  // namespace gpurt",
        *_features(plan),
        '#include "bodies/body_list.cuh"',
        *(f'#include "bodies/{name}.cuh"' for name in built_in),
    ]
    for name in ATTENTIONS:
        lines += _attention_struct(plan, name) if name in built_in else []
    for name in own:
        lines += _user_struct(users[name])
    types = [*built_in, *(f"::{name}" for name in own)]
    lines += ["namespace gpurt {", f"using Bodies = BodyList<{', '.join(types)}>;", "}", ""]
    return "\n".join(lines), [*built_in, *own]


def stage_room(plan: Plan) -> int:
    """Bytes of a stage of the weight ring."""
    experts = (t.expert.stage_bytes for t in plan.tasks if t.expert is not None)
    return max((STAGE_BYTES, *experts))


def stage_count(target: Target, room: int = STAGE_BYTES) -> int:
    """Stages of the weight ring that fit. Raises: DeviceError below two."""
    fixed = SCRATCH_BYTES[target.team_warps] + SLOT_BYTES
    count = min(STAGES_MAX, (target.smem_bytes - fixed) // room)
    if count < 2:
        need = fixed + 2 * room
        msg = f"a block needs {need:,} bytes of shared memory, the target has {target.smem_bytes:,}"
        raise DeviceError(f"{msg} - at the plan's target - use a larger GPU")
    return count


def compile_source(
    source: str,
    arch: str,
    *,
    headers: Mapping[str, str],
    user_files: Sequence[str] = (),
    options: Sequence[str] = OPTIONS,
    name: str = "gpurt.cu",
) -> Compiled:
    """The cubin of `source` for `arch`, from the disk cache if it is there.

    headers: generated files by name, includable. user_files: names of #line directives whose errors
    are the user's: they raise GraphError with that line. Raises: DeviceError without NVRTC, or if
    gpurt's own source does not compile.
    """
    nvrtc = _nvrtc()
    roots = [source_dir() / "device", source_dir() / "scheduler"]
    version = ".".join(str(v) for v in _call(nvrtc, nvrtc.nvrtcVersion()))
    key = _key(source, arch, headers, options, version, roots)
    hit = _read_cache(key)
    if hit is not None:
        return Compiled(hit[0], parse_resources(hit[1]), True)
    names = [n.encode() for n in headers]
    texts = [t.encode() for t in headers.values()]
    program = _call(
        nvrtc, nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), len(names), texts, names)
    )
    arguments = [f"--gpu-architecture={arch}", *options, *(f"--include-path={r}" for r in roots)]
    flags = [a.encode() for a in arguments]
    code = nvrtc.nvrtcCompileProgram(program, len(flags), flags)[0]
    log = _text(nvrtc, program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
    if int(code) != 0:
        nvrtc.nvrtcDestroyProgram(program)
        raise _compile_error(log, arch, user_files)
    size = int(_call(nvrtc, nvrtc.nvrtcGetCUBINSize(program)))
    cubin = bytearray(size)
    _call(nvrtc, nvrtc.nvrtcGetCUBIN(program, cubin))
    nvrtc.nvrtcDestroyProgram(program)
    _write_cache(key, bytes(cubin), log)
    return Compiled(bytes(cubin), parse_resources(log), False)


def parse_resources(log: str) -> tuple[Resources, ...]:
    """Functions of ptxas's verbose report, in its order."""
    found: list[Resources] = []
    entry = ""
    name, stack, stores, loads = "", 0, 0, 0
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            entry = match[1]
        elif match := re.search(r"Function properties for (\w+)", line):
            name = match[1]
        elif match := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            stack, stores, loads = (int(g) for g in match.groups())
            if name != entry:
                found.append(Resources(name, 0, stack, stores, loads, 0))
        elif match := re.search(r"Used (\d+) registers", line):
            smem = re.search(r"(\d+) bytes smem", line)
            static = int(smem[1]) if smem else 0
            found.append(Resources(entry, int(match[1]), stack, stores, loads, static))
    return tuple(found)


def cache_folder() -> Path:
    """Where cubins are kept: a folder of $GPURT_CACHE_DIR, or of ~/.cache/gpurt."""
    from gpurt.doctor import cache_folder as folder

    return folder() / "cubin"


# ---- helpers ---------------------------------------------------------------------------------
def _features(plan: Plan) -> list[str]:
    """What only some plans need of their bodies: other kernels are compiled without it."""
    tasks = plan.tasks
    found = {
        "GPURT_MATVEC_SCALED": any(
            t.body in ("matvec", "matvec_wide")
            and [float(p) for p in t.params[8:10]] not in ([], [1.0, 0.0])
            for t in tasks
        ),
        "GPURT_EMBED_NORMS": any(
            t.body == "embed" and any(float(p) > 0 for p in t.params[2:3]) for t in tasks
        ),
        "GPURT_EMBED_SCALES": any(
            t.body == "embed" and any(float(p) != 1 for p in t.params[3:4]) for t in tasks
        ),
        "GPURT_TREES": any(t.body == "attention_commit" for t in tasks),
        "GPURT_EXPERTS": any(t.expert is not None for t in tasks),
        "GPURT_PUBLISHED": any(
            t.body not in PUBLISHERS and plan.buffers[number].role == "symmetric"
            for t in tasks
            for number, _ in t.writes
        ),
        "GPURT_FRAGMENTS": any(
            t.body == "matvec" and any(p != 0 for p in t.params[15:16]) for t in tasks
        ),
        "GPURT_MAKES_FRAGMENTS": any(
            t.body == "matvec" and any(p != 0 for p in t.params[16:17]) for t in tasks
        ),
        "GPURT_MATVEC_SHARES": any(
            t.body == "matvec" and _shares_activations(plan.rows, t) for t in tasks
        ),
        "GPURT_RANKS": any(b.memory == "symmetric_payload" for b in plan.buffers),
        "GPURT_OWN_ROWS": any(t.flags & TASK_OWN_ROWS for t in tasks),
        "GPURT_MANY_USERS": plan.rows > 16 and any(t.body == "expert_matvec" for t in tasks),
        "GPURT_RING": any(t.flags & TASK_RING for t in tasks),
    }
    return [f"#define {name} 1" for name, wanted in found.items() if wanted]


def _shares_activations(step_rows: int, task: PlanTask) -> bool:
    """Whether device/bodies/matvec.cuh takes the task by the way of warps that share x."""
    rows = task.coords[1] - task.coords[0]
    is_f32 = task.params[_X_DTYPE] != DTypeCode.BF16
    return step_rows > 8 and is_f32 and task.addr[2] is None and 48 < rows <= 64


def _attention_struct(plan: Plan, body: str) -> list[str]:
    """`attention` or `attention_rows`, which picks the instance of a task's shape: head size,
    group, cache dtype, and whether it can do more than plain causal attention.
    """
    tasks = [t for t in plan.tasks if t.body in ATTENTIONS]
    # One without queries writes the cache only, which of 16 rows is more than plain.
    full = {
        shape[:3]
        for t in tasks
        for shape in [attention_shape(t.params)]
        # A shape that some layers need in full serves all layers of that shape.
        if shape[3] or (t.addr[0] is None and t.body == "attention")
    }
    shapes = {
        (attention_splits(t.params), *attention_shape(t.params)[:3])
        for t in tasks
        if t.body == body
    }
    source = body if body != "attention" or not any(s[0] for s in shapes) else "attention_split"
    lines = [
        f'#include "bodies/{source}.cuh"',
        "namespace gpurt {",
        f"struct {body}{' : RingBody<attention_rows>' if body == 'attention_rows' else ''} {{",
        "  __device__ static void run(const TaskRecord& task, const BodyContext& context) {",
    ]
    for splits, *shape in sorted(shapes, reverse=True):
        dim, group, cache = shape
        test = f"task.param[2] == {dim} && task.param[0] / task.param[1] == {group}"
        test += f" && task.param[7] == {cache}"
        test += f" && task.param[{_SPANS}] != 0" if splits else ""
        is_full = tuple(shape) in full
        if body == "attention_rows":
            struct = "attention_rows_of"
            flags = f", {str(is_full).lower()}, {str(splits).lower()}"
        else:
            struct = "attention_split_of" if splits else "attention_of"
            flags = ", true" if is_full else ""
        run = f"{struct}<{dim}, {group}, {cache}{flags}>::run(task, context)"
        lines.append(f"    if ({test}) return {run};")
    return [*lines, "  }", "};", "}  // namespace gpurt"]


def attention_splits(params: Sequence[Param]) -> bool:
    """Whether positions are summed span by span, by several tasks."""
    return len(params) > _SPANS and float(params[_SPANS]) != 0


def attention_shape(params: Sequence[Param]) -> tuple[int, int, int, bool]:
    """(head size, query heads a kv head, cache dtype, whether it has a window, a gate, an output
    norm, weight-less norms, no rotation or blocks). Raises: GraphError for what no body takes.
    """
    heads, kv_heads, dim, cache = (int(params[i]) for i in (0, 1, 2, 7))
    if dim not in (64, 128):
        msg = f"attention with heads of {dim} elements - at the plan"
        raise GraphError(f'{msg} - the CUDA body takes 64 and 128; use device="host"')
    page = int(params[3])
    if page & (page - 1) or page < PAGE_MIN:
        msg = f"a cache page of {page} positions - at the plan"
        raise GraphError(f"{msg} - the CUDA body takes powers of two from {PAGE_MIN} on")
    window, rope, norm_kind, gated, out_eps = [float(p) for p in params[8:13]] or [0, 1, 0, 0, 0]
    extras = window != 0 or rope == 0 or norm_kind > 1 or gated != 0 or out_eps != 0
    return dim, heads // kv_heads, cache, extras or any(params[13:14])


def _user_struct(body: Body) -> list[str]:
    if not body.cuda:
        msg = f"body {body.name} has no CUDA struct - at gpurt.body({body.name!r})"
        raise GraphError(f'{msg} - pass cuda=..., or use device="host"')
    source = body.cuda.strip("\n")
    return [f'#line 1 "{body.name}"', source, f'#line 1 "{GENERATED}"']


def _nvrtc() -> Any:
    hint = "pip install 'gpurt[cuda]', or use device=\"host\""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        msg = f"cuda-python is not installed ({error}) - at device cuda - {hint}"
        raise DeviceError(msg) from error
    try:
        nvrtc.nvrtcVersion()
    except Exception as error:  # a missing library raises classes of its own
        text = " ".join(str(error).split())
        raise DeviceError(f"NVRTC cannot be loaded: {text} - at device cuda - {hint}") from error
    return nvrtc


def _call(nvrtc: Any, result: tuple[Any, ...]) -> Any:
    code, *values = result
    if int(code) != 0:
        text = nvrtc.nvrtcGetErrorString(code)[1].decode()
        raise DeviceError(f"NVRTC answers {text} - at compiling - see `gpurt doctor`")
    return values[0] if len(values) == 1 else values


def _text(nvrtc: Any, program: Any, size_of: Any, read: Any) -> str:
    buffer = bytearray(int(_call(nvrtc, size_of(program))))
    _call(nvrtc, read(program, buffer))
    # ptxas marks lines of callees with a byte that is no text.
    return buffer.rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")


def _compile_error(log: str, arch: str, user_files: Sequence[str]) -> Exception:
    lines = [line.strip() for line in log.splitlines()]
    errors = [(i, line) for i, line in enumerate(lines) if re.search(r"\berror\b", line)]
    for index, line in errors:
        for file in user_files:
            if match := re.search(rf"{re.escape(file)}\((\d+)\): (?:\w+ )?error:?\s*(.*)", line):
                shown = lines[index + 1] if index + 1 < len(lines) else ""
                what = f"{match[2]}: `{shown}`" if shown else match[2]
                where = f"at body {file}, line {match[1]} of its CUDA source"
                return GraphError(f"{what} - {where} - correct the struct")
    first = errors[0][1] if errors else (lines[0] if lines else "no log")
    return DeviceError(f"{first} - at NVRTC for {arch} - this is gpurt's own source: report it")


def _key(
    source: str,
    arch: str,
    headers: Mapping[str, str],
    options: Sequence[str],
    version: str,
    roots: Sequence[Path],
) -> str:
    digest = hashlib.sha256()
    for part in (source, arch, version, *options, *(x for item in headers.items() for x in item)):
        digest.update(part.encode() + b"\0")
    for root in roots:
        for path in sorted(root.rglob("*")):
            if path.suffix in (".hpp", ".cuh", ".cu"):
                digest.update(path.relative_to(root).as_posix().encode() + b"\0")
                digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def _read_cache(key: str) -> tuple[bytes, str] | None:
    try:
        cubin = (cache_folder() / f"{key}.cubin").read_bytes()
        log = (cache_folder() / f"{key}.log").read_text()
    except OSError:
        return None
    # A file that was cut short would fail at load, far from here.
    return (cubin, log) if cubin[:4] == b"\x7fELF" and log.endswith(f"{len(cubin)}\n") else None


def _write_cache(key: str, cubin: bytes, log: str) -> None:
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / f"{key}.cubin", cubin)
        _replace(folder / f"{key}.log", f"{log}\n{len(cubin)}\n".encode())
    except OSError as error:
        msg = f"compiled kernels cannot be kept: {error.strerror or error} - at {folder}"
        hint = "set GPURT_CACHE_DIR to a folder that can be written"
        warnings.warn(f"{msg} - {hint}", CacheWarning, stacklevel=4)


def _replace(path: Path, data: bytes) -> None:
    """Whole or not at all: other processes may read and write the same file."""
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
