"""Steps of more than 16 rows on the emulated GPU: bits of every body, then of a whole model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpurt.cli import main
from tests.emu.test_kernel import DRAFT, LLAMA, MUSE, VOCAB
from tests.gpu import test_attention_rows as rows
from tests.gpu import test_attention_split as split
from tests.gpu import (
    test_dflash,
    test_llama,
    test_matvec,
    test_muse_spark,
    tiny_dflash,
    tiny_llama,
    tiny_muse,
)
from tests.helpers.tiny import tiny_folder


@pytest.fixture(autouse=True)
def forgotten(emulated: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A small model; what was built for the emulated GPU is forgotten afterwards."""
    del emulated
    prompt = [int(t) for t in np.random.default_rng(1).integers(0, VOCAB, 45)]
    monkeypatch.setattr(tiny_llama, "CONFIG", LLAMA)
    monkeypatch.setattr(tiny_muse, "CONFIG", MUSE)
    monkeypatch.setattr(tiny_dflash, "DRAFT", DRAFT)
    for module in (test_llama, test_muse_spark):
        monkeypatch.setattr(module, "PROMPT", prompt)
        monkeypatch.setattr(module, "COUNT", 3)
    monkeypatch.setattr(test_dflash, "PROMPT", prompt[:23])
    monkeypatch.setattr(test_dflash, "COUNT", 5)
    runners = (rows.rows_runner, rows.runner, split.split_runner, rows.extras.runner)
    for runner in runners:
        runner.cache_clear()
    yield
    for runner in runners:
        runner.cache_clear()


MATVEC = [
    (test_matvec.Case(32, 1104), (17, 40)),  # 18 chunks: of some K groups two
    (test_matvec.Case(96, 80, norm=True, residual=True, swiglu=True), (33, 128, 160)),
    (test_matvec.Case(80, 64, dtype="bf16"), (17, 24)),
]


@pytest.mark.parametrize(("case", "many"), MATVEC, ids=str)
def test_many_rows_of_matvec_have_the_bits_of_few(case: Any, many: tuple[int, ...]) -> None:
    test_matvec.check_many_rows(case, many, workers=2)


def test_a_team_of_one_warp_gives_the_same_bits() -> None:
    test_matvec.check_many_rows(MATVEC[1][0], (20, 33), workers=2, team_warps=1)


@pytest.mark.parametrize("most", [2, 4, 8, 16])
def test_packed_tiles_of_every_size(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    test_matvec.test_many_rows_by_packed_tiles_of_every_size(most, monkeypatch)


@pytest.mark.parametrize("case", [1, 2])  # heads of 128, three a key; of 64 and a window
def test_many_rows_of_attention_have_the_bits_of_few(case: int) -> None:
    rows.check(*rows.CASES[case], "bf16", rows.extras.CONTEXT)


def test_many_rows_over_a_span_have_the_bits_of_few() -> None:
    rows.check(split.CASES[1], rows.OVER_A_SPAN, "bf16", rows.CONTEXT)


def test_steps_of_many_rows_change_no_bit_of_llama() -> None:
    few = test_llama.load(tiny_llama.tiny_llama(), workers=2)
    try:
        wanted = test_llama.bits(few)
    finally:
        few.close()
    test_llama.check_many_rows(wanted, step_rows=(16, 40), policy=test_llama.MIXED, workers=3)


def test_decode_rows_beside_a_prompt_equal_each_alone() -> None:
    test_llama.test_two_sequences_in_one_step_equal_each_alone((16, 40))


def test_steps_of_many_rows_change_no_bit_of_muse_spark() -> None:
    few = test_muse_spark.load(workers=2)
    try:
        wanted = test_muse_spark.bits(few)
    finally:
        few.close()
    many = {"step_rows": (16, 40), "policy": test_muse_spark.CLAIMED, "edges": "payload"}
    test_muse_spark.check_many_rows(wanted, workers=3, **many)


def test_a_drafter_keeps_the_text_of_steps_of_many_rows() -> None:
    test_dflash.test_steps_of_many_rows_keep_the_text()


def test_the_command_line_takes_both_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of Qwen3-MoE, whose router is another kind than Muse Spark's."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 64, "vocab_size": 64}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    kind = {"model_type": "qwen3_moe", "max_position_embeddings": 128}
    folder = tiny_folder(tmp_path / "tiny", **sizes, **experts, **kind)
    ids = ",".join(str(i % 64) for i in range(3, 38))
    command = ["run", "--model", str(folder), "--device", "cuda", "--workers", "2", "--json"]
    command += ["--prompt-ids", ids, "--max-tokens", "3", "--ignore-eos"]
    seen = []
    for size in ("16", "16,24"):
        assert main([*command, "--rows", size]) == 0
        seen.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert len(seen[0]) == 3
    assert seen[0] == seen[1]


UNITS = [test_matvec.Case(432, 192, norm=True), test_matvec.Case(4864, 80)]


@pytest.mark.parametrize("case", UNITS, ids=str)
def test_units_of_a_task_of_matvec(case: Any) -> None:
    """One after another in the same stages; in short steps a task has fewer."""
    test_matvec.check_many_rows(case, (24, 128, 160), workers=2)
