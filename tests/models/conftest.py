"""Tests of real models need the reference packages; without them they are not collected."""

from importlib.util import find_spec

REFERENCE_TESTS = [
    "test_gguf.py",
    "test_hf_parity.py",
    "test_muse_spark_cli.py",
    "test_muse_spark_host.py",
    "test_muse_spark_loader.py",
    "test_muse_spark_ranks.py",
    "test_muse_spark_references.py",
    "test_qwen3_moe.py",
    "test_references.py",
    "test_smollm2_live.py",
    "test_train_release.py",
    "test_train_run.py",
    "test_train_target.py",
]
if find_spec("torch") is None or find_spec("transformers") is None:
    collect_ignore = REFERENCE_TESTS
