"""What `gpurt run`, `chat` and `plan` share: a model by name, its graph for a device, its prompt.

Does not know: options of the command line, how a reply is shown.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpurt.errors import BoundError, ModelError, RequestError
from gpurt.ranks import group

if TYPE_CHECKING:
    from gpurt.channels import ChannelFormat
    from gpurt.graph import Graph
    from gpurt.loaders import Model
    from gpurt.progress import Progress

# The file in graphs/ that builds an architecture.
BUILDERS = {
    "llama": "llama",
    "qwen3": "llama",
    "qwen3_moe": "qwen3_moe",
    "muse_spark": "muse_spark",
}
DEFAULT_CONTEXT = 2048
AUTO = "auto"
DRAFT_FOLDER = "draft"  # in a model's folder: its drafter
CONTEXT_STEP = 256
DEFAULT_MAX_TOKENS = 256
# Of one step. The bodies on a GPU take 16. On host threads steps of 128 bring a long prompt 13 to
# 20 % sooner than those of 16, and cost a decode step nothing (tools/LOG.md).
DEFAULT_ROWS = {"host": 128, "cuda": 16}


@dataclass(frozen=True)
class Drafting:
    """Who proposes tokens, the folder of its model if it has one, and how many a step at most.

    name: "auto", or one of `graphs.drafters.DRAFTERS`. tree: greedy proposals are one.
    """

    name: str = "none"
    model: Path | None = None
    proposals: int | None = None
    tree: bool = False

    def beside(self, model: Model) -> Drafting:
        """The same for one model: dflash without a folder takes the one in the model's own. "auto"
        is dflash if there is a folder, or one in the model's own; else none.
        """
        own = Path(model.path) / DRAFT_FOLDER
        name, folder = self.name, self.model
        if folder is None and name in ("dflash", AUTO) and own.is_dir():
            folder = own
        if name == AUTO:
            name = "none" if folder is None else "dflash"
        return replace(self, name=name, model=folder)

    def options(self, progress: Progress | None = None) -> dict[str, Any]:
        """The arguments of a `build`. Raises: RequestError naming the option, ModelError."""
        options: dict[str, Any] = {"draft": self.name}
        if self.proposals is not None:
            options["proposals"] = self.proposals
        if self.tree:
            options["draft_tree"] = True
        if (self.name == "dflash") != (self.model is not None):
            what = f"--draft {self.name} {'with' if self.model else 'without'} a drafter's folder"
            raise RequestError(f"{what} - at --draft-model - a dflash drafter has one, no other")
        if self.model is not None:
            from gpurt.loaders.hf_dflash import load_draft

            options["draft_model"] = load_draft(self.model, progress)
        return options


@dataclass(frozen=True)
class Prompt:
    """Where a prompt comes from: exactly one of the three."""

    text: str | None = None
    file: Path | None = None
    ids: str | None = None

    def read(self) -> str | list[int]:
        """The text, or the ids. Raises: RequestError naming the option."""
        given = [v for v in (self.text, self.file, self.ids) if v is not None]
        if len(given) != 1:
            what = f"{len(given)} prompts"
            hint = "use one of --prompt, --prompt-file and --prompt-ids"
            raise RequestError(f"{what} - at the command line - {hint}")
        if self.ids is not None:
            return _parse_ids(self.ids)
        if self.file is not None:
            return _read_text(self.file)
        return str(self.text)


def model_graph(
    model: Model,
    kind: str,
    *,
    rows: int | None = None,
    context: int | None = None,
    need: int = 0,
    drafting: Drafting | None = None,
    tp: int = 1,
    rank: int | None = None,
    kv_dtype: str | None = None,
    cache_packed: Path | None = None,
    progress: Progress | None = None,
) -> Graph:
    """The graph of a model for "host" or "cuda"; of several ranks their group's, gpurt/ranks.py.

    rows None: as DEFAULT_ROWS says. context None: 2048, or as much as `need` positions ask for,
    within the model's own bound. tp: ranks; rank: build that one's alone, the others are those of
    other processes. kv_dtype None: bf16 on cuda; f32 on the host, whose logits then stay within
    1e-3 of a float32 model's (bf16: 0.3 to 1.4 % off on random models).
    cache_packed: a folder that keeps the packed weights for the next load. progress: called while a
    drafter's model is opened.
    Raises: BoundError naming both numbers, GraphError for the drafter, the kv_dtype and for ranks
    that the model cannot have, and as `Drafting.options`.
    """
    bound = model.config.context
    if context is None:
        room = -(-need // CONTEXT_STEP) * CONTEXT_STEP
        context = min(bound, max(DEFAULT_CONTEXT, room))
    if rows is not None and rows < 1:
        raise BoundError(f"rows is {rows} - at --rows - use 1 or more")
    builder = importlib.import_module(f"gpurt.graphs.{BUILDERS[model.config.architecture]}")
    weight_dtype = "bf16" if kind == "cuda" else None
    drafter = (drafting or Drafting()).beside(model).options(progress)
    graphs: list[Graph] = [
        builder.build(
            model.config,
            model.weights,
            rows=DEFAULT_ROWS[kind] if rows is None else rows,
            context=context,
            # The tensor cores take bf16; the host reads blocks as they are stored.
            weight_dtype=weight_dtype,
            kv_dtype=kv_dtype or ("bf16" if kind == "cuda" else "f32"),
            **drafter,
            **({"tp_size": tp, "tp_rank": one} if tp > 1 else {}),
        )
        for one in (range(tp) if rank is None else [rank])
    ]
    if cache_packed is not None:
        from gpurt.executors.packed_cache import PackedCache, checkpoint_identity

        for graph in graphs:
            settings = {"rank": graph.rank, "ranks": tp, "weight_dtype": weight_dtype}
            graph.packed = PackedCache(cache_packed, checkpoint_identity(model.path, **settings))
    return group(graphs) if rank is None else graphs[0]


def parse_rows(text: str | None) -> tuple[int, ...] | None:
    """`16`, or the rows of each step size: `16,128`. Raises: BoundError for anything else."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not part.isdecimal() or int(part) < 1:
            raise BoundError(f"rows is {part} - at --rows - use 1 or more, or several: 16,128")
    return tuple(int(part) for part in parts)


def most_rows(sizes: Sequence[int] | None) -> int | None:
    """The rows of a graph whose steps have these sizes; None: the default."""
    return None if sizes is None else max(sizes)


def encode_prompt(model: Model, prompt: str | Sequence[int], *, chat: bool) -> list[int]:
    """Token ids of a prompt; with `chat`, of a chat whose only message it is.

    Raises: ModelError without a tokenizer or template, RequestError for an empty prompt.
    """
    if not isinstance(prompt, str):
        ids = list(prompt)
    else:
        if not prompt:
            raise RequestError("the prompt is empty - at --prompt - give at least one character")
        if model.tokenizer is None:
            what = f"{model.name} has no tokenizer"
            raise ModelError(f"{what} - at {model.path} - give token ids with --prompt-ids")
        if chat:
            ids = encode_chat(model, [{"role": "user", "content": prompt}])
        else:
            ids = model.tokenizer.encode(prompt)
    if not ids:
        raise RequestError("the prompt is empty - at the command line - give at least one token")
    return ids


def encode_chat(model: Model, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of a chat, up to where the reply begins. Raises: ModelError if it cannot chat."""
    if model.tokenizer is None or model.chat is None:
        lacks = "tokenizer" if model.tokenizer is None else "chat template that gpurt can follow"
        what = f"{model.name} has no {lacks}"
        raise ModelError(f"{what} - at {model.path} - use gpurt run without --chat")
    return model.chat.encode(model.tokenizer, messages)


def channels_of(model: Model) -> ChannelFormat | None:
    """The channels of a model's replies, None if it has none."""
    from gpurt.channels import ChannelFormat

    return model.chat if isinstance(model.chat, ChannelFormat) else None


def token_budget(model: Model, prompt_tokens: int, max_tokens: int | None) -> int:
    """Tokens to generate: what was asked for, else 256 or what the model's context leaves.

    Raises: BoundError if the prompt does not fit the model.
    """
    bound = model.config.context
    if prompt_tokens > bound:
        what = f"the prompt has {prompt_tokens} tokens, {model.name} a context of {bound}"
        raise BoundError(f"{what} - at the prompt - shorten it")
    room = bound + 1 - prompt_tokens
    if max_tokens is None:
        return min(DEFAULT_MAX_TOKENS, room)
    if max_tokens > room:
        what = f"{prompt_tokens} prompt tokens and --max-tokens {max_tokens} exceed the context"
        raise BoundError(f"{what} {bound} - at {model.name} - use --max-tokens {room} or less")
    return max_tokens


# ---- helpers ---------------------------------------------------------------------------------
def _parse_ids(text: str) -> list[int]:
    ids = []
    for position, part in enumerate(text.replace(" ", "").split(",")):
        if not part.isascii() or not part.isdigit():
            what = f"token id {part!r}"
            raise RequestError(f"{what} - at --prompt-ids[{position}] - give numbers like 1,2,3")
        ids.append(int(part))
    return ids


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        what = f"cannot read the prompt: {error.strerror}"
        raise RequestError(f"{what} - at {path} - check the path") from error
    except UnicodeDecodeError as error:
        what = f"byte {error.start} is not UTF-8"
        raise RequestError(f"{what} - at {path} - convert the file to UTF-8") from error
