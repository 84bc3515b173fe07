"""Style that a machine can hold: sizes, places of imports, words, a home for every body."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tidy.sources import (
    CXX,
    PYTHON,
    ROOT,
    cxx_functions,
    python_functions,
    relative,
    with_suffix,
)

FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
LINE_LENGTH_MAX = 100
TOP_LEVEL = {"gpurt", "device", "scheduler", "graphs", "tests", "tools"}
SMALL_FILES = {
    ".ci",
    ".clang-format",
    ".clang-tidy",
    ".gitignore",
    ".pre-commit-config.yaml",
    "CHANGELOG.md",
    "CMakeLists.txt",
    "Makefile",
    "README.md",
    "pyproject.toml",
}
TORCH_HOMES = ("graphs/reference/", "gpurt/torch_store.py", "tests/", "tools/")


def test_top_level_holds_only_the_agreed_folders_and_small_files() -> None:
    listing = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    tops = {line.split("/")[0] for line in listing.splitlines()}
    assert tops - TOP_LEVEL - SMALL_FILES == set()


@pytest.mark.parametrize("path", with_suffix(*PYTHON, *CXX), ids=relative)
def test_source_file_is_short_and_narrow(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= FILE_LINES_MAX, f"{len(lines)} lines - at {relative(path)} - split by noun"
    wide = [i for i, line in enumerate(lines, 1) if len(line) > LINE_LENGTH_MAX]
    assert not wide, f"lines {wide} are over {LINE_LENGTH_MAX} - at {relative(path)}"
    tabs = [i for i, line in enumerate(lines, 1) if "\t" in line]
    assert not tabs, f"lines {tabs} hold tabs - at {relative(path)}"


@pytest.mark.parametrize("path", with_suffix(".py"), ids=relative)
def test_python_functions_fit_a_screen(path: Path) -> None:
    long = [f for f in python_functions(path) if f[2] > FUNCTION_LINES_MAX]
    assert not long, f"over {FUNCTION_LINES_MAX} lines: {long} - at {relative(path)}"


@pytest.mark.parametrize("path", with_suffix(*CXX), ids=relative)
def test_cxx_functions_fit_a_screen(path: Path) -> None:
    long = [f for f in cxx_functions(path) if f[2] > FUNCTION_LINES_MAX]
    assert not long, f"over {FUNCTION_LINES_MAX} lines: {long} - at {relative(path)}"


def test_a_function_over_the_limit_is_seen(tmp_path: Path) -> None:
    body = "\n".join("  x += 1;" for _ in range(FUNCTION_LINES_MAX))
    file = tmp_path / "long.hpp"
    file.write_text(f"inline void long_one(int x) {{\n{body}\n}}\n")
    assert cxx_functions(file)[0][2] == FUNCTION_LINES_MAX + 2


@pytest.mark.parametrize("path", with_suffix(".py"), ids=relative)
def test_python_module_says_what_it_owns(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if tree.body:
        assert ast.get_docstring(tree), f"no module docstring - at {relative(path)}"


@pytest.mark.parametrize("path", with_suffix(*CXX), ids=relative)
def test_cxx_file_opens_with_a_comment(path: Path) -> None:
    first = path.read_text(encoding="utf-8").lstrip()[:3]
    assert first in ("// ", "///"), f"no opening comment - at {relative(path)}"


@pytest.mark.parametrize("path", with_suffix(".py"), ids=relative)
def test_torch_stays_in_reference_tests_and_tools(path: Path) -> None:
    if relative(path).startswith(TORCH_HOMES):
        return
    text = path.read_text(encoding="utf-8")
    found = re.findall(r"^\s*(?:import|from) (torch|transformers)\b", text, re.MULTILINE)
    assert not found, f"imports {found} - at {relative(path)} - accept tensors through DLPack"


@pytest.mark.parametrize("path", with_suffix(*PYTHON, *CXX), ids=relative)
def test_source_holds_no_todo_and_no_machine_path(path: Path) -> None:
    if path == Path(__file__).resolve():
        return
    text = path.read_text(encoding="utf-8")
    found = re.findall(r"\bTODO\b|\bFIXME\b|\bXXX\b|/work/|/root/", text)
    assert not found, f"holds {found} - at {relative(path)}"


def test_device_headers_include_no_system_header_on_the_device() -> None:
    """NVRTC has none: a device file may include only files of ours."""
    for path in with_suffix(".cuh", ".cu"):
        text = path.read_text(encoding="utf-8")
        found = re.findall(r"#include <[^>]+>", text)
        assert not found, f"includes {found} - at {relative(path)}"


def test_import_starts_neither_cuda_nor_torch() -> None:
    code = (
        "import sys, gpurt, gpurt.cli, gpurt.runtime, gpurt.executors.cuda, gpurt.process_group\n"
        "bad = [m for m in ('torch', 'transformers', 'cuda.core', 'cuda.bindings') "
        "if m in sys.modules]\n"
        "assert not bad, bad\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_builtin_body_has_its_stem_in_each_folder() -> None:
    stems = {p.stem for p in with_suffix(".py") if relative(p).startswith("graphs/ops/")}
    stems -= {"__init__", "packing", "packing_experts", "dtypes", "regions", "normed"}
    stems = {stem for stem in stems if not stem.endswith("_cuda")}
    for stem in sorted(stems):
        homes = [f"device/bodies/{stem}.cuh", f"device/bodies/{stem}.hpp"]
        missing = [home for home in homes if not (ROOT / home).is_file()]
        assert not missing, f"body {stem} lacks {missing}"
