"""README.md: its programs print what it says that they print."""

from __future__ import annotations

import re

import pytest

from gpurt.errors import GraphError
from tests.tidy.sources import ROOT

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```\n```\n(.*?)```", TEXT, re.DOTALL)


def test_every_program_has_its_output_beneath_it():
    assert len(PROGRAMS) == TEXT.count("```python") == 2


@pytest.mark.parametrize(("program", "output"), PROGRAMS, ids=["diamond", "nano"])
def test_a_program_prints_what_stands_beneath_it(program, output, capsys):
    exec(compile(program, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.rstrip("\n") == output.rstrip("\n")


def test_the_refusal_is_as_shown():
    program = PROGRAMS[0][0].replace("reads=[a], writes=[c]", "reads=[a], writes=[c[0:2]]")
    with pytest.raises(GraphError) as caught:
        exec(compile(program, "README.md", "exec"), {"__name__": "readme"})
    assert f"GraphError: {caught.value}\n" in TEXT
