"""The cache's dtype, from the command line to the buffers: fp8 is a byte an element, bits stay."""

from __future__ import annotations

import json

import pytest

from gpurt.cli import main
from gpurt.errors import GraphError
from gpurt.graphs.llama import build
from gpurt.loaders import load_model
from gpurt.runtime import Runtime
from tests.helpers.tiny import tiny_folder

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("tiny"), num_hidden_layers=2)


def tokens(model, **options):
    workers = options.pop("workers", 1)
    graph = build(model.config, model.weights, context=64, **options)
    with Runtime("host", workers=workers) as runtime:
        return list(runtime.submit(graph, PROMPT, max_tokens=20, ignore_eos=True))


def test_tokens_of_an_8_bit_cache_depend_on_no_rows_and_no_workers(folder):
    model = load_model(folder)
    first = tokens(model, kv_dtype="fp8", rows=16)
    assert tokens(model, kv_dtype="fp8", rows=1) == first
    assert tokens(model, kv_dtype="fp8", rows=3, workers=3) == first


def test_an_8_bit_cache_takes_a_byte_an_element(folder):
    model = load_model(folder)
    sizes = {
        kind: sum(
            b.size_bytes
            for b in build(model.config, model.weights, context=64, kv_dtype=kind).buffers
            if b.name.endswith("_cache")
        )
        for kind in ("f32", "bf16", "fp8")
    }
    assert sizes["f32"] == 2 * sizes["bf16"] == 4 * sizes["fp8"] > 0


def test_the_command_line_chooses_it(folder, capsys):
    ids = ",".join(map(str, PROMPT))
    command = ["run", "--model", str(folder), "--device", "host", "--prompt-ids", ids, "--json"]
    command += ["--max-tokens", "20", "--ignore-eos", "--context", "64"]
    assert main([*command, "--kv-dtype", "fp8"]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == tokens(
        load_model(folder), kv_dtype="fp8"
    )
    assert main([*command, "--kv-dtype", "int4"]) == 2
    assert "kv_dtype is 'int4'" in capsys.readouterr().err


def test_an_unknown_dtype_is_refused_with_those_there_are(folder):
    model = load_model(folder)
    with pytest.raises(GraphError, match=r"^kv_dtype is 'q8'.*use f32, f16, bf16 or fp8$"):
        build(model.config, model.weights, kv_dtype="q8")
