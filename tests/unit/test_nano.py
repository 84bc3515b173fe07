"""`--model nano`: the default, found in the package; a sentence where a checkout has none."""

from __future__ import annotations

import inspect

import pytest

from gpurt import cli
from gpurt.errors import ModelError
from gpurt.loaders import DEFAULT_MODEL, load_model, nano
from gpurt.loaders.nano import nano_path


def test_nano_lies_in_the_package():
    folder = inspect.signature(nano_path).parameters["folder"].default
    assert folder.parts[-3:] == ("gpurt", "models", "nano")


def test_without_it_the_error_says_how_it_is_made(tmp_path, monkeypatch):
    message = r"^nano is not trained yet in this checkout - at .+ - run tools/train/run.sh"
    with pytest.raises(ModelError, match=message):
        nano_path(tmp_path)
    monkeypatch.setattr(nano.nano_path, "__defaults__", (tmp_path,))
    with pytest.raises(ModelError, match=message):
        load_model("Nano")


def test_one_constant_is_the_default_of_run_and_chat():
    for command in (cli.run, cli.chat):
        assert inspect.signature(command).parameters["model"].default is DEFAULT_MODEL


def test_the_default_lies_in_the_package_with_its_drafter():
    assert DEFAULT_MODEL == nano.NANO
    assert (nano_path() / "draft" / "config.json").is_file()
