"""Commands: their names, what they take, what /help says. What they do is the Chat's business.

A line that begins with / is a command; one that begins with // is a message that begins with /.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from gpurt.chat.conversation import Settings
from gpurt.errors import ChatError

RULES = """\
Enter sends; Alt-Enter or Ctrl-J begins a new line; // begins a message with a /
Ctrl-C stops a reply, or clears the line; Ctrl-D leaves
When the context is full, the oldest exchanges are left out; the system message stays"""


@dataclass(frozen=True)
class Command:
    """takes: what /help calls its argument. about: one or more lines. suggestions: values to
    complete it with; a path is completed from the folders.
    """

    name: str
    takes: str
    about: str
    suggestions: tuple[str, ...] = ()

    @property
    def takes_path(self) -> bool:
        """Whether the argument is a file."""
        return "FILE" in self.takes


COMMANDS = (
    Command("/help", "", "this list"),
    Command("/clear", "", "forget the conversation"),
    Command("/system", "[TEXT]", "show the system message, or set it and forget the conversation"),
    Command("/edit", "[TEXT]", "write the last message anew; TEXT: replace it"),
    Command("/retry", "", "answer the last message again; a sampled reply takes the next seed"),
    Command("/temperature", "[X]", "show or set it; 0 is greedy", ("0", "0.7", "1")),
    Command("/top-k", "[N]", "only the N likeliest tokens; 0 is off", ("0", "40")),
    Command("/top-p", "[X]", "only the likeliest tokens of this share; 1 is off", ("0.9", "1")),
    Command("/seed", "[N]", "of the sampler"),
    Command("/max-tokens", "[N]", "of a reply", ("256", "1024")),
    Command("/reasoning", "", "what the last reply said beside its answer"),
    Command("/stats", "", "figures of the last reply"),
    Command("/trace", "[FILE]", "timeline of the last reply in a browser; - shows it here;\n"
            "FILE.html, FILE.json (Perfetto) or FILE saves it"),
    Command("/save", "FILE", "write the conversation as JSON"),
    Command("/load", "FILE", "go on with a saved conversation"),
    Command("/quit", "", "leave"),
)  # fmt: skip
NAMES = tuple(command.name for command in COMMANDS)


def split_command(line: str) -> tuple[str, str]:
    """(name, argument) of a command line; the name is empty for a message.

    Raises: ChatError for a name that is no command.
    """
    if not line.startswith("/") or line.startswith("//"):
        return "", line.removeprefix("/") if line.startswith("//") else line
    name, _, argument = line.partition(" ")
    if name.rstrip("\n") not in NAMES or "\n" in name:
        shown = name.splitlines()[0][:40]
        raise ChatError(f"{shown} is no command - at chat - /help lists them; // sends a /")
    return name, argument.strip()


def help_text() -> str:
    """What /help says."""
    heads = [f"{c.name} {c.takes}".rstrip() for c in COMMANDS]
    wide = max(map(len, heads)) + 2
    indent = "\n" + wide * " "
    abouts = [c.about.replace("\n", indent) for c in COMMANDS]
    lines = [f"{head:<{wide}}{about}" for head, about in zip(heads, abouts, strict=True)]
    return "\n".join([*lines, "", RULES])


def parse_setting(name: str, text: str) -> dict[str, int | float]:
    """{field of Settings: value} of `/top-k 40`. Raises: ChatError if it is no number."""
    field = name.removeprefix("/").replace("-", "_")
    is_real = field in ("temperature", "top_p")
    try:
        value: int | float = float(text) if is_real else int(text)
    except ValueError:
        kind = "number" if is_real else "whole number"
        raise ChatError(f"{text[:40]!r} is no {kind} - at {name} - see /help") from None
    return {field: value}


def settings_commands() -> Sequence[str]:
    """The commands that set a field of Settings."""
    return [f"/{field.name.replace('_', '-')}" for field in fields(Settings)]
