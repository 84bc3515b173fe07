"""Print the requirements of pyproject.toml: the base and the named extras (`build`: the build's).

    python tools/requirements.py dev cuda >requirements.txt

So that one file states every dependency, and a checkout can be tested without being installed.
"""

import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def requirements(extras: list[str]) -> list[str]:
    """Requirement strings of the base install, then of each extra in order."""
    data = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))
    project = data["project"]
    named = {**project["optional-dependencies"], "build": data["build-system"]["requires"]}
    lines = list(project["dependencies"])
    for extra in extras:
        if extra not in named:
            msg = f"no extra {extra!r} - at pyproject.toml - use one of {sorted(named)}"
            raise SystemExit(msg)
        lines += named[extra]
    return lines


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
