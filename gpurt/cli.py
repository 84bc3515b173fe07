"""The command line: gpurt run, chat, trace, plan, bench, tune, doctor. Entry point: `main`.

What goes wrong on purpose (GpurtError, bad usage) is ONE line on stderr and exit code 2; Ctrl-C is
exit code 130. Only a bug shows a traceback. Results go to stdout, all else to stderr.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import gpurt
from gpurt.cli_bench import bench, tune
from gpurt.cli_options import (
    PlanOptions,
    RunOptions,
    SamplingOptions,
    parse_policy,
    with_options,
)
from gpurt.cli_trace import trace_app, trace_on_signal
from gpurt.errors import ConfigError, GpurtError, GpurtWarning, RankError, TraceError
from gpurt.loaders import DEFAULT_MODEL

if TYPE_CHECKING:
    from gpurt.graph import Graph
    from gpurt.loaders import Model
    from gpurt.process_group import ProcessGroup
    from gpurt.reply import Reply
    from gpurt.request import Request
    from gpurt.runtime import Runtime

USAGE_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="A whole LLM request as one task graph that lives on the device.",
)

app.add_typer(trace_app, name="trace")
app.command()(bench)
app.command()(tune)

ModelName = Annotated[
    str, typer.Option("--model", help="nano, smollm2, a .gguf file, or a Hugging Face folder.")
]
TraceFile = Annotated[
    Path | None, typer.Option("--trace", help="Write the trace here; kill -USR1: as far as it is.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    if version:
        typer.echo(gpurt.__version__)
        raise typer.Exit


@app.command()
@with_options
def run(
    *,
    model: ModelName = DEFAULT_MODEL,
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A UTF-8 file with it.")] = None,
    prompt_ids: Annotated[str | None, typer.Option(help="Its token ids: 1,2,3.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Frame it as a chat message.")] = False,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go past end tokens.")] = False,
    sampling: SamplingOptions,
    options: RunOptions,
    trace: TraceFile = None,
    as_json: AsJson = False,
) -> None:
    """Answer one prompt; text streams to stdout.

    Under torchrun with --tp: each process is a rank, and rank 0 answers.
    """
    from gpurt.process_group import from_environment
    from gpurt.request import Sampling
    from gpurt.serving import Prompt, encode_prompt, token_budget

    source = Prompt(prompt, prompt_file, prompt_ids).read()
    _check_writable(trace)
    with _Session(model, options, from_environment()) as session:
        ids = encode_prompt(session.model, source, chat=chat)
        budget = token_budget(session.model, len(ids), sampling.max_tokens)
        draws = sampling.draws() | {"stop_ids": session.model.stop_ids, "ignore_eos": ignore_eos}
        Sampling(budget, **draws).check(session.model.config.vocab)
        session.prepare(len(ids) + budget)
        if session.rank:
            session.runtime.follow()
            return
        request = session.runtime.submit(session.graph, ids, max_tokens=budget, **draws)
        with trace_on_signal(session.runtime, trace):
            reply = _stream(session, request, sampling.stop or [], quiet=as_json, chat=chat)
        if as_json:
            _print_json(_run_record(session, ids, reply))
        else:
            if not reply.text and session.model.chat is not None and not chat:
                _note("the reply is empty; --chat frames the prompt as a message")
            _show_stats(request)
        if trace is not None:
            request.trace().save(trace)


@app.command()
@with_options
def chat(
    *,
    model: ModelName = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    sampling: SamplingOptions,
    options: RunOptions,
    trace: TraceFile = None,
    history: Annotated[
        bool, typer.Option(help="Keep typed lines in ~/.local/state/gpurt/chat_history.")
    ] = True,
) -> None:
    """Talk; /help lists the commands. Lines of a pipe are messages.

    Every turn carries the whole chat. When the context is full, the oldest exchanges are left out,
    and it says so; the system message stays, and a message that is too long alone is refused.
    """
    from gpurt.chat import Chat, Settings, terminal
    from gpurt.process_group import find_place
    from gpurt.serving import encode_chat

    if find_place() is not None:
        msg = "several processes cannot share a terminal - at WORLD_SIZE"
        raise ConfigError(f"{msg} - run gpurt chat --tp without torchrun")
    _check_writable(trace)
    with terminal.typed_ahead(), _Session(model, options) as session:
        encode_chat(session.model, [])
        settings = Settings(sampling.max_tokens, **sampling.draws())
        settings.check(session.model.config.vocab)
        session.prepare()
        parts = session.runtime, session.model, session.graph, terminal.screen(), settings
        talk = Chat(*parts, system=system, stops=sampling.stop or [])
        if terminal.is_terminal():
            _note(f"{session.model.name} on {session.runtime.config.device}; /help for commands")
        with trace_on_signal(session.runtime, trace):
            talk.run(terminal.source(talk, keeps_history=history))
        if trace is not None and talk.last is not None:
            talk.last.trace().save(trace)


@app.command()
@with_options
def plan(
    *,
    model: ModelName,
    device: Annotated[str, typer.Option(help="auto, host, cuda:N; or h100, h200, b200.")] = "auto",
    team_warps: Annotated[int, typer.Option(help="Warps of a GPU worker: 16 or 1.")] = 16,
    options: PlanOptions,
    save: Annotated[Path | None, typer.Option(help="Write the plan file here.")] = None,
) -> None:
    """Print a model's plan for a device, present or not."""
    from gpurt.config import check_edges, check_policy, plan_target
    from gpurt.loaders import load_model
    from gpurt.profiles import plan_with
    from gpurt.progress import ProgressBars
    from gpurt.serving import model_graph, most_rows, parse_rows

    sizes = parse_rows(options.rows)
    target, name = plan_target(device, options.workers, team_warps)
    chosen = check_policy(parse_policy(options.policy))
    kind_of_edges = check_edges(options.edges)
    with ProgressBars() as bars:
        loaded = load_model(model, bars)
        graph = model_graph(
            loaded,
            target.kind,
            rows=most_rows(sizes),
            context=options.context,
            drafting=options.drafting(),
            kv_dtype=options.kv_dtype,
            progress=bars,
        )
        made = plan_with(graph, target, name, chosen, kind_of_edges, bars, rows=sizes)
    if save is not None:
        made.save(save)
        _note(f"wrote {save}")
    typer.echo(str(made))


@app.command()
def doctor(
    bandwidth: Annotated[
        bool, typer.Option("--bandwidth", help="Measure it first, for gpurt trace to quote.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say what this machine can run, and why not. Exit code 1 if nothing."""
    from gpurt.doctor import examine, measure_bandwidth

    if bandwidth:
        measure_bandwidth()
    report = examine()
    if as_json:
        _print_json(report.as_dict())
    else:
        for check in report.checks:
            mark = {True: "ok", False: "NO", None: "--"}[check.ok]
            hint = f" - {check.hint}" if check.hint else ""
            typer.echo(f"{mark}  {check.name:<16} {check.detail}{hint}")
        usable = [n for n, ok in (("host", report.host_usable), ("cuda", report.cuda_usable)) if ok]
        typer.echo(f"can run on: {', '.join(usable) or 'nothing'}")
    if not (report.host_usable or report.cuda_usable):
        raise typer.Exit(1)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 0, 1, 2 (error) or 130 (Ctrl-C); of several
    processes the highest one, in each of them.
    """
    from gpurt.process_group import joined

    code = _run_command(arguments)
    group = joined()
    if group is None:
        return code
    try:
        together = group.leave(code)
    except (KeyboardInterrupt, RankError):
        return code or INTERRUPTED_EXIT_CODE
    if together and not code:
        _note(f"gpurt: rank {group.rank}: another one ends with code {together}, so this one does")
    return together


# ---- helpers ---------------------------------------------------------------------------------
def _run_command(arguments: list[str] | None) -> int:
    from gpurt.config import read_environment

    warnings.showwarning = _show_warning
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character
    try:
        read_environment()
        command: Callable[..., Any] = typer.main.get_command(app).main
        code = command(args=arguments, prog_name="gpurt", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except GpurtError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    except BrokenPipeError:
        # Whoever read our output has left: nothing to say, and nobody to say it to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        # typer brings its own copy of click in some versions, so its classes go by their shape.
        if type(error).__name__ == "Abort":
            return INTERRUPTED_EXIT_CODE
        describe = getattr(error, "format_message", None)
        if describe is None:
            raise
        text = describe()
        return _fail(f"{text} - at the command line - see gpurt --help") if text else 2


class _Session:
    """A Runtime and a model, with bars while they come; closed in the end. name: as asked for.
    rank: of this process.
    """

    model: Model
    graph: Graph
    draft: str

    def __init__(self, model: str, options: RunOptions, group: ProcessGroup | None = None) -> None:
        from gpurt.config import rank_devices
        from gpurt.loaders import load_model
        from gpurt.progress import ProgressBars
        from gpurt.runtime import Runtime

        self.name, self._options = model, options
        self._group, self.rank = group, 0 if group is None else group.rank
        if group is None:
            devices = rank_devices(options.device, options.tp)
        else:
            devices = _process_device(options, group)
        self.runtime: Runtime = Runtime(devices, **options.settings(), group=group)
        self._bars = ProgressBars(enabled=False if self.rank else None)
        try:
            with self._bars:
                self.model = load_model(model, self._bars)
        except BaseException:
            self.runtime.close()
            raise
        for notice in () if self.rank else self.model.notices:
            _note(notice)

    def prepare(self, need: int = 0) -> None:
        """Load the graph. need: positions that a sequence must have."""
        from gpurt.serving import model_graph, most_rows

        config, options = self.runtime.config, self._options
        drafting = options.drafting().beside(self.model)
        self.draft = drafting.name
        with self._bars:
            self.graph = model_graph(
                self.model,
                config.target.kind,
                rows=most_rows(config.step_rows),
                context=options.context,
                need=need,
                drafting=drafting,
                kv_dtype=options.kv_dtype,
                tp=options.tp,
                rank=None if self._group is None else self.rank,
                cache_packed=options.cache_packed,
                progress=self._bars,
            )
            self.runtime.prepare(self.graph, progress=self._bars)

    def __enter__(self) -> _Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.runtime.close()


def _process_device(options: RunOptions, group: ProcessGroup) -> str:
    """Of one process under torchrun, which ends it with SIGTERM if another rank has failed."""
    if options.tp != group.size:
        msg = f"{group.size} processes, but --tp is {options.tp} - at WORLD_SIZE"
        raise ConfigError(f"{msg} - use --tp {group.size}, or one process")

    def end(*_: object) -> None:
        lost = group.lost()
        told = f"told to end (SIGTERM) - at rank {group.rank} - see the other ranks' reports"
        raise RankError(told if lost is None else group.describe_lost(lost))

    signal.signal(signal.SIGTERM, end)
    return options.device


def _stream(
    session: _Session, request: Request, stops: list[str], *, quiet: bool, chat: bool
) -> Reply:
    from gpurt.reply import Reply
    from gpurt.serving import channels_of

    channels = channels_of(session.model) if chat else None
    reply = Reply(request, session.model.tokenizer, stops, channels)
    for piece in reply:
        if not quiet:
            typer.echo(piece, nl=False)
            sys.stdout.flush()
    if not quiet:
        typer.echo()
    return reply


def _run_record(session: _Session, ids: list[int], reply: Reply) -> dict[str, Any]:
    stats = reply.request.stats
    return {
        "text": reply.text if session.model.tokenizer is not None else None,
        "token_ids": reply.token_ids,
        "prompt_token_ids": ids,
        "finish_reason": reply.finish_reason,
        "prompt_tokens": len(ids),
        "completion_tokens": len(reply.token_ids),
        "time_to_first_token_ms": stats.time_to_first_token_ms,
        "tokens_per_second": stats.tokens_per_second,
        "device": session.runtime.config.device,
        "model": session.name,
        "launches": stats.launches,
        "draft": session.draft,
        "accepted_per_step": stats.accepted_per_step,
        "accepted_by_position": stats.accepted_by_position,
        "draft_ms": stats.draft_ms,
        "verify_ms": stats.verify_ms,
    }


def _show_stats(request: Request) -> None:
    from gpurt.reply import stats_line

    _note(stats_line(request.stats))


def _check_writable(path: Path | None) -> None:
    """A run whose trace cannot be written is refused before it starts."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        msg = f"cannot write a trace to {path}"
        raise TraceError(f"{msg} - at --trace - name a file in a folder that exists")


def _print_json(record: dict[str, Any]) -> None:
    typer.echo(json.dumps(record))


def _note(text: str) -> None:
    typer.echo(text, err=True)


def _fail(text: str) -> int:
    from gpurt.process_group import joined

    group, line = joined(), " ".join(text.split())
    if group is not None and not line.startswith("rank "):
        line = f"rank {group.rank}: {line}"
    typer.echo(f"gpurt: {line}", err=True)
    return USAGE_EXIT_CODE


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    """One line; of ours only: a library's warnings are not the user's business."""
    if issubclass(category, GpurtWarning):
        _note("gpurt: " + " ".join(str(message).split()))
