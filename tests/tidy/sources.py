"""The project's own source files, as git knows them."""

from __future__ import annotations

import ast
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = (".py", ".pyi")
CXX = (".hpp", ".cuh", ".cpp", ".cu")


@cache
def tracked() -> tuple[Path, ...]:
    """Every tracked or new file, links and ignored ones left out."""
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    paths = [ROOT / line for line in listing.splitlines()]
    return tuple(p for p in paths if p.is_file() and not p.is_symlink())


def with_suffix(*suffixes: str) -> list[Path]:
    """Tracked files that end in one of the suffixes."""
    return [p for p in tracked() if p.suffix in suffixes]


def relative(path: Path) -> str:
    """The path as the repository names it."""
    return path.relative_to(ROOT).as_posix()


def python_functions(path: Path) -> list[tuple[str, int, int]]:
    """(name, first line, number of lines) of every function in a Python file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        (node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1)
        for node in ast.walk(tree)
        if isinstance(node, kinds)
    ]


def cxx_functions(path: Path) -> list[tuple[str, int, int]]:
    """(first words, first line, number of lines) of every function body in a C++ or CUDA file.

    clang-format puts a function's closing brace alone at the column where its first line starts,
    so a block that opens with `) {`, `) const {` or `-> T {` outside another one is a function.
    """
    found = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        body = line.rstrip()
        opens = body.endswith("{") and ")" in body
        control = body.lstrip().startswith(("if", "for", "while", "switch", "}", "else", "do"))
        if not opens or control:
            continue
        start = number
        while start and not lines[start - 1].rstrip().endswith((";", "}", "{", ":", "")):
            start -= 1
        indent = len(line) - len(line.lstrip())
        for end in range(number + 1, len(lines)):
            text = lines[end]
            if text.strip().startswith("}") and len(text) - len(text.lstrip()) <= indent:
                found.append((body.strip()[:50], start + 1, end - start + 1))
                break
    return found
