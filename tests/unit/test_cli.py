"""The command line: exit codes, one line of error, what --json holds, traces and plans as files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings

import pytest

from gpurt.cli import main
from gpurt.cli_options import parse_policy
from gpurt.errors import CacheWarning, ConfigError
from gpurt.plan import Plan
from gpurt.progress import ProgressBars
from tests.helpers.hand_trace import hand_trace
from tests.helpers.tiny import tiny_folder

JSON_KEYS = [
    "text",
    "token_ids",
    "prompt_token_ids",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "time_to_first_token_ms",
    "tokens_per_second",
    "device",
    "model",
    "launches",
    "draft",
    "accepted_per_step",
    "accepted_by_position",
    "draft_ms",
    "verify_ms",
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model of 20 tokens without a tokenizer, context 64."""
    folder = tmp_path_factory.mktemp("cli") / "tiny"  # errors name it: no number of other modules
    folder.mkdir()
    return str(tiny_folder(folder))


@pytest.fixture(autouse=True)
def keep_warnings(monkeypatch):
    """`main` decides how warnings are shown, for its process."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)


def shell(*arguments, environment=None, **options):
    command = [sys.executable, "-m", "gpurt", *arguments]
    settings = {**os.environ, **(environment or {})}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, env=settings, **options
    )


def failure(capsys, *arguments):
    """The one line that a failing command printed."""
    assert main(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("gpurt: ")
    return err.removeprefix("gpurt: ").rstrip()


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (["run", "--model", "/no/such", "--prompt", "a"], "no model '/no/such'"),
        (["plan"], "Missing option '--model'"),
        (["run", "--model", "TINY"], "0 prompts"),
        (["run", "--model", "TINY", "--prompt", "a", "--prompt-ids", "1"], "2 prompts"),
        (["run", "--model", "TINY", "--prompt", "hello"], "tiny has no tokenizer"),
        (["run", "--model", "TINY", "--prompt", ""], "the prompt is empty"),
        (["run", "--model", "TINY", "--prompt-ids", ""], "token id ''"),
        (["run", "--model", "TINY", "--prompt-ids", "1,x"], "token id 'x'"),
        (["run", "--model", "TINY", "--prompt-ids", "1,99"], "token 99 is outside the vocab"),
        (["run", "--model", "TINY", "--prompt-ids", "1", "--chat"], None),
        (["run", "--model", "TINY", "--prompt-ids", ",".join(["1"] * 65)], "the prompt has 65"),
        (["run", "--model", "TINY", "--prompt-ids", "1", "--max-tokens", "65"], "1 prompt tokens"),
        (["run", "--model", "TINY", "--prompt-ids", "1", "--max-tokens", "0"], "max_tokens is 0"),
        (["run", "--model", "TINY", "--prompt-ids", "1", "--max-tokens", "x"], "Invalid value"),
        (["run", "--model", "TINY", "--prompt-ids", "1", "--temperature", "-1"], "temperature is"),
        (["run", "--model", "TINY", "--prompt-ids", "1", "--top-p", "2"], "top_p is 2.0"),
        (["run", "--model", "TINY", "--prompt-ids", "1", "--policy", "fifo"], "policy is 'fifo'"),
        (["run", "--model", "TINY", "--prompt-ids", "1", "--policy", "a="], "policy is 'a='"),
        (["run", "--model", "TINY", "--prompt-ids", "1", "--device", "tpu"], "device is 'tpu'"),
        (["run", "--model", "TINY", "--prompt-ids", "1", "--rows", "0"], "rows is 0"),
        (["run", "--model", "TINY", "--prompt-ids", "1", "--context", "65"], "context is 65"),
        (["run", "--model", "TINY", "--prompt-ids", "1", "--stop", "a"], "a stop string needs"),
        (["run", "--model", "TINY", "--prompt-ids", "1", "--trace", "/no/a"], "cannot write a"),
        (["run", "--model", "TINY", "--prompt-file", "/no/such"], "cannot read the prompt"),
        (["chat", "--model", "TINY"], "tiny has no tokenizer"),
        (["trace", "/no/such.trace"], "cannot read the trace"),
        (["plan", "--model", "TINY", "--device", "h300"], "device is 'h300'"),
        (["walk"], "No such command 'walk'"),
        (["run", "--model", "TINY", "--prmpt", "a"], "No such option"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, tiny, arguments, start):
    arguments = [tiny if a == "TINY" else a for a in arguments]
    if start is None:  # ids need no template, so --chat has nothing to do
        assert main([*arguments, "--max-tokens", "1"]) == 0
    else:
        assert failure(capsys, *arguments).startswith(start)


def test_process_ends_with_code_2_and_no_traceback(tiny):
    done = shell("run", "--model", tiny, "--prompt-ids", "1,2,77")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gpurt: token 77 is outside the vocabulary of 20 - at prompt[2]")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_unknown_variable_ends_with_code_2():
    done = shell("doctor", environment={"GPURT_DEBUGG": "1"})
    assert done.returncode == 2
    assert done.stderr.startswith("gpurt: GPURT_DEBUGG is no setting of gpurt")
    assert done.stderr.count("\n") == 1


def test_json_is_one_object_with_the_agreed_keys(capsys, tiny):
    ids = "--prompt-ids", "3,4,5"
    assert main(["run", "--model", tiny, *ids, "--max-tokens", "6", "--ignore-eos", "--json"]) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert list(record) == JSON_KEYS
    assert (record["prompt_token_ids"], record["prompt_tokens"]) == ([3, 4, 5], 3)
    assert record["completion_tokens"] == len(record["token_ids"]) == 6
    assert (record["finish_reason"], record["launches"]) == ("length", 1)
    assert (record["device"], record["model"], record["text"]) == ("host", tiny, None)
    assert record["time_to_first_token_ms"] > 0
    assert err == ""


def test_ids_without_a_tokenizer_are_printed_as_ids(capsys, tiny):
    arguments = ["run", "--model", tiny, "--prompt-ids", "3", "--max-tokens", "4", "--ignore-eos"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert len([int(t) for t in out.split()]) == 4
    assert "4 tokens" in err


def test_sampling_repeats_with_its_seed(capsys, tiny):
    def tokens(seed):
        arguments = ["run", "--model", tiny, "--prompt-ids", "3", "--max-tokens", "20", "--json"]
        options = ["--temperature", "1.5", "--seed", seed, "--ignore-eos", "--top-k", "9"]
        assert main([*arguments, *options]) == 0
        return json.loads(capsys.readouterr().out)["token_ids"]

    assert tokens("1") == tokens("1") != tokens("2")


def test_run_writes_a_trace_that_the_viewer_shows(capsys, tiny, tmp_path):
    trace, perfetto = str(tmp_path / "a.trace"), str(tmp_path / "a.json")
    options = ["--max-tokens", "5", "--ignore-eos", "--trace", trace]
    assert main(["run", "--model", tiny, "--prompt-ids", "1", *options]) == 0
    capsys.readouterr()
    assert main(["trace", trace]) == 0
    assert "5 whole steps" in capsys.readouterr().out
    assert main(["trace", trace, "--perfetto", perfetto, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["whole_steps"] == 5
    assert json.loads((tmp_path / "a.json").read_text())["traceEvents"]


def test_trace_variable_writes_a_perfetto_file(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("GPURT_TRACE", str(tmp_path / "step.json"))
    assert main(["run", "--model", tiny, "--prompt-ids", "1", "--max-tokens", "2"]) == 0
    assert json.loads((tmp_path / "step.json").read_text())["traceEvents"]


def test_damaged_trace_is_one_line(capsys, tmp_path):
    path = tmp_path / "a.trace"
    hand_trace().save(path)
    data = path.read_bytes()
    path.write_bytes(data[:-5])  # in the mark of its end
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main(["trace", str(path)]) == 0
    out, err = capsys.readouterr()
    assert "critical path" in out
    assert err.startswith("gpurt: the trace ends early, after the spans of 1 step - at ")
    assert err.count("\n") == 1
    path.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    assert failure(capsys, "trace", str(path)).startswith("the trace's checksum is wrong")


def test_plan_is_printed_and_saved(capsys, tiny, tmp_path):
    path = str(tmp_path / "a.plan")
    arguments = ["plan", "--model", tiny, "--device", "host", "--workers", "3", "--save", path]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert "plan llama: host, 3 workers" in out
    assert err == f"wrote {path}\n"
    assert Plan.load(path).target.workers == 3


def test_policy_may_name_operators():
    assert parse_policy("claim") == "claim"
    assert parse_policy("matvec=claim, attention=ready") == {
        "matvec": "claim",
        "attention": "ready",
    }
    with pytest.raises(ConfigError, match=r"^policy is 'a=b,c'"):
        parse_policy("a=b,c")


def test_doctor_says_what_can_run(capsys):
    assert main(["doctor"]) == 0
    assert "can run on: host" in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["host"] is True


def test_help_and_version_succeed(capsys):
    assert main(["--version"]) == 0
    assert main(["run", "--help"]) == 0
    assert "--prompt-ids" in capsys.readouterr().out


def test_warning_of_a_cache_folder_is_one_line_and_others_are_silent(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        main(["--version"])
        warnings.warn("nothing is kept - at /x - set GPURT_CACHE_DIR", CacheWarning, stacklevel=1)
        warnings.warn("a library's own", UserWarning, stacklevel=1)
    assert capsys.readouterr().err == "gpurt: nothing is kept - at /x - set GPURT_CACHE_DIR\n"


def test_ctrl_c_is_exit_code_130_without_traceback():
    command = [sys.executable, "-m", "gpurt", "run", "--model", "smollm2", "--device", "host"]
    command += ["--prompt", "Count to a thousand:", "--max-tokens", "1500", "--ignore-eos"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert len(out) < 5000


def test_reader_that_leaves_ends_the_command_quietly(tiny):
    command = [sys.executable, "-m", "gpurt", "plan", "--model", tiny]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1


def test_stop_string_is_not_shown(capsys):
    prompt = ["--prompt", "The capital of France is", "--device", "host", "--json"]
    arguments = ["run", "--model", "smollm2", *prompt, "--max-tokens", "12"]
    assert main(arguments) == 0
    whole = json.loads(capsys.readouterr().out)
    stop = whole["text"][5:9]
    assert main([*arguments, "--stop", stop]) == 0
    cut = json.loads(capsys.readouterr().out)
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert cut["finish_reason"] == "stop"
    assert cut["token_ids"] == whole["token_ids"][: len(cut["token_ids"])]


def test_prompt_file_gives_the_same_as_the_prompt(capsys, tmp_path):
    text = "Zwölf Boxkämpfer jagen Viktor 🙂\n"
    (tmp_path / "prompt.txt").write_text(text, encoding="utf-8")
    common = ["--model", "smollm2", "--device", "host", "--max-tokens", "1", "--json"]
    assert main(["run", *common, "--prompt", text]) == 0
    first = json.loads(capsys.readouterr().out)
    assert main(["run", *common, "--prompt-file", str(tmp_path / "prompt.txt")]) == 0
    assert json.loads(capsys.readouterr().out)["prompt_token_ids"] == first["prompt_token_ids"]
    (tmp_path / "bad.txt").write_bytes(b"abc\xff")
    line = failure(capsys, "run", *common, "--prompt-file", str(tmp_path / "bad.txt"))
    assert line.startswith("byte 3 is not UTF-8")


def test_help_loads_no_model_code_and_no_native_module():
    heavy = "gpurt._native gpurt.trace tokenizers prompt_toolkit torch"
    code = f"import sys, gpurt.cli; sys.exit(any(m in sys.modules for m in '{heavy}'.split()))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_bar_is_shown_for_long_work_only_and_taken_away(capsys, monkeypatch):
    with ProgressBars(enabled=True) as bars:
        for done in range(5):
            bars("quick", done, 5)
        assert capsys.readouterr().err == ""
        monkeypatch.setattr("gpurt.progress.SHOW_AFTER_S", 0.0)
        bars("packing", 1, 4)
        bars("packing", 4, 4)
    assert "packing" in capsys.readouterr().err
    with ProgressBars(enabled=False) as bars:
        bars("packing", 1, 4)
    assert capsys.readouterr().err == ""


def test_a_chat_of_several_processes_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["chat"]) == 2
    assert capsys.readouterr().err.startswith("gpurt: several processes cannot share a terminal - ")
