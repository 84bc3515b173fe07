"""Fixtures: the compiled simulator programs."""

from pathlib import Path

import pytest

from tests.sim import build


@pytest.fixture(scope="session")
def litmus_program() -> Path:
    return build.build_litmus()


@pytest.fixture(scope="session")
def sim_program() -> Path:
    return build.build_sim()


@pytest.fixture(scope="session")
def ranks_program() -> Path:
    return build.build_ranks()
