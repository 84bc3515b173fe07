"""JSON files that somebody names in a command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpurt.errors import GpurtError


def read_json_file(path: str | Path, what: str, kind: type[GpurtError], hint: str) -> Any:
    """What a UTF-8 file holds. what: of the file, `the chat`. hint: what to do if it is no JSON.

    Raises: `kind` if the file cannot be read or is no JSON.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        msg = f"cannot read {what}: {error.strerror}"
        raise kind(f"{msg} - at {path} - check the path") from error
    except UnicodeDecodeError as error:
        msg = f"no JSON: byte {error.start} is no UTF-8"
        raise kind(f"{msg} - at {path} - {hint}") from error
    except ValueError as error:
        raise kind(f"no JSON: {error} - at {path} - {hint}") from error
