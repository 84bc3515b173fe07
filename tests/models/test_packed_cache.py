"""Packed weights kept between loads: the same tokens, and nothing wrong is ever taken."""

from __future__ import annotations

import os
import warnings

import numpy as np
import pytest

from gpurt.body import Target, body
from gpurt.buffer import f32
from gpurt.cli import main
from gpurt.errors import CacheWarning
from gpurt.executors.contents import contents_of
from gpurt.executors.packed_cache import PackedCache, checkpoint_identity
from gpurt.graph import Graph
from gpurt.graphs.ops.matvec import matvec
from gpurt.loaders import load_model
from gpurt.planner import plan
from gpurt.runtime import Runtime
from gpurt.serving import model_graph
from tests.helpers.tiny import tiny_folder

PROMPT = [3, 1, 4, 1, 5]
FILL = body("fill", lambda *_: None)


@pytest.fixture
def folder(tmp_path):
    return tiny_folder(tmp_path / "tiny", num_hidden_layers=2)


def tokens(folder, cache, rows=4):
    model = load_model(folder)
    graph = model_graph(model, "host", rows=rows, context=64, cache_packed=cache)
    with Runtime("host", workers=2) as runtime:
        return list(runtime.submit(graph, PROMPT, max_tokens=24, ignore_eos=True))


def files(cache):
    return sorted(cache.iterdir())


def test_tokens_from_the_cache_are_those_from_the_checkpoint(folder, tmp_path):
    cache, want = tmp_path / "cache", tokens(folder, None)
    assert tokens(folder, cache) == want
    (file,) = files(cache)
    written = file.stat().st_mtime_ns
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tokens(folder, cache) == want
        assert tokens(folder, cache, rows=9) == want
    assert [f.stat().st_mtime_ns for f in files(cache)] == [written], "read, not written again"


def test_a_hit_reads_nothing_of_the_checkpoint(folder, tmp_path):
    cache, want = tmp_path / "cache", tokens(folder, None)
    tokens(folder, cache)
    weights, status = folder / "model.safetensors", (folder / "model.safetensors").stat()
    data = bytearray(weights.read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    weights.write_bytes(data)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert tokens(folder, cache) == want
    assert tokens(folder, None) != want


def test_another_checkpoint_or_rank_has_a_file_of_its_own(folder, tmp_path):
    cache = tmp_path / "cache"
    tokens(folder, cache)
    tiny_folder(folder, seed=1, num_hidden_layers=2)
    assert tokens(folder, cache) == tokens(folder, None)
    assert len(files(cache)) == 2
    assert checkpoint_identity(folder, rank=0) != checkpoint_identity(folder, rank=1)


@pytest.mark.parametrize("damage", ["bit", "short", "empty", "index"])
def test_a_damaged_file_is_named_and_made_anew(folder, tmp_path, damage):
    cache, want = tmp_path / "cache", tokens(folder, None)
    tokens(folder, cache)
    (file,) = files(cache)
    data = bytearray(file.read_bytes())
    if damage == "bit":
        data[5] ^= 4
    elif damage == "index":
        data[-40] = ord("{")
    elif damage == "short":
        del data[len(data) // 2 :]
    else:
        data.clear()
    file.write_bytes(data)
    with pytest.warns(CacheWarning, match=r"packed weights.* - at .*\.packed - .* made anew$"):
        assert tokens(folder, cache) == want
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tokens(folder, cache) == want
        assert tokens(folder, cache) == want


def test_a_folder_that_cannot_be_written_is_said_and_the_work_goes_on(folder, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.warns(CacheWarning, match=r"^packed weights cannot be kept"):
        assert tokens(folder, blocked) == tokens(folder, None)


def test_packings_of_the_gpu_come_back_byte_for_byte(tmp_path):
    calls = []

    def graph():
        made = Graph("packed", rows=1)
        made.packed = PackedCache(tmp_path, "test")

        def content():
            calls.append(1)
            return np.random.default_rng(1).standard_normal((48, 64)).astype(np.float32)

        w = made.weight("w", [48, 64], f32, content)
        x, y = made.activation("x", [1, 64], f32), made.output("y", [1, 48], f32)
        made.task(FILL, reads=[], writes=[x])
        matvec(made, x, w, y)
        return made

    taken = []
    for _ in range(2):
        one = graph()
        planned = plan(one, Target("cuda", 2, 16, "sm_90a", 232448, 60 << 20))
        contents = contents_of(planned, one)
        weight = next(b for b in planned.buffers if b.name == "w")
        assert weight.packing.startswith("mma16")
        taken.append(bytes(contents.take(weight)))
        contents.close()
    assert taken[0] == taken[1]
    assert len(calls) == 1


def test_the_command_line_keeps_them(folder, tmp_path, capsys):
    cache = tmp_path / "cache"
    command = ["run", "--model", str(folder), "--device", "host", "--prompt-ids", "3,1,4"]
    command += ["--max-tokens", "4", "--ignore-eos", "--cache-packed", str(cache), "--json"]
    assert main(command) == 0
    first = capsys.readouterr().out.split('"time_to')[0]
    assert len(files(cache)) == 1
    assert main(command) == 0
    assert capsys.readouterr().out.split('"time_to')[0] == first
