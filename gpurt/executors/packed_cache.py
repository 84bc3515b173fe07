"""PackedCache: weights as a plan wants them, written once and mapped at the next load.

A file holds the packed weights of one plan, each at a page's start, then a JSON index with a CRC-32
of each, its length, and a mark; a file that was cut short has no mark. Its name is its key: all
that the bytes depend on. What is damaged is said in one line and made anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from gpurt.errors import CacheWarning
from gpurt.plan import Plan, PlanBuffer

PACKING_VERSION = 2  # of all layouts in graphs/ops/packing*.py: raise it when one changes
_MARK = b"GPURTPK1"
_PAGE_BYTES = 4096
_TAIL_BYTES = 16  # the index's length, the mark


@dataclass(frozen=True)
class PackedCache:
    """Where packed weights are kept. identity: all that a weight depends on beside the plan: the
    checkpoint's files, the rank, the dtype that weights are read as.
    """

    folder: Path
    identity: str

    def open(self, plan: Plan, planned: Sequence[PlanBuffer]) -> PackedFile:
        """The file of a plan's weights: to read if it is there and whole, else to write."""
        digest = hashlib.sha256()
        target = plan.target
        parts = [self.identity, str(PACKING_VERSION), target.kind, target.arch, plan.name]
        parts += [f"{b.name} {b.shape} {b.dtype} {b.packing} {b.size_bytes}" for b in planned]
        for part in parts:
            digest.update(part.encode() + b"\0")
        return PackedFile(self.folder / f"{digest.hexdigest()[:32]}.packed")


class PackedFile:
    """The packed weights of one plan. `hit` says whether they come from the file."""

    def __init__(self, path: Path) -> None:
        """Map the file, or begin a new one. Warns once, with a CacheWarning, if it cannot."""
        self._path = path
        self._index: dict[str, list[int]] = {}
        self._mapped: NDArray[np.uint8] | None = None
        self._out: IO[bytes] | None = None
        self._part = ""  # its name until it is whole
        if path.exists():
            self._mapped = self._map()
        self.hit = self._mapped is not None
        if not self.hit:
            self._begin()

    def take(self, name: str) -> NDArray[np.uint8] | None:
        """A weight from the file: a read-only view. None: it is to be made, and `put`."""
        if self._mapped is None:
            return None
        begin, size, check = self._index.get(name, [0, -1, 0])
        data = self._mapped[begin : begin + max(size, 0)]
        if data.size == size and zlib.crc32(data.data) == check:
            return data
        self._warn(f"weight {name} is damaged in a file of packed weights", "it is made anew")
        self._mapped = None
        self._path.unlink(missing_ok=True)  # the next load writes it
        return None

    def put(self, name: str, data: NDArray[np.uint8]) -> None:
        """Write a weight, if a file is being written."""
        if self._out is None:
            return
        try:
            at = -(-self._out.tell() // _PAGE_BYTES) * _PAGE_BYTES
            self._out.seek(at)
            self._out.write(np.ascontiguousarray(data).data)
            self._index[name] = [at, data.nbytes, zlib.crc32(np.ascontiguousarray(data).data)]
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """All was put: the file gets its index and its name."""
        if self._out is None:
            return
        text = json.dumps(self._index).encode()
        try:
            self._out.write(text + len(text).to_bytes(8, "little") + _MARK)
            self._out.close()
            os.replace(self._part, self._path)
            self._out = None
        except OSError as error:
            self._give_up(error)

    # ---- helpers -------------------------------------------------------------------------
    def _map(self) -> NDArray[np.uint8] | None:
        try:
            mapped: NDArray[np.uint8] = np.memmap(self._path, np.uint8, "r")
            tail = mapped[-_TAIL_BYTES:].tobytes()
            length = int.from_bytes(tail[:8], "little")
            if tail[8:] != _MARK or length > mapped.size - _TAIL_BYTES:
                raise ValueError("it ends early")
            begin = mapped.size - _TAIL_BYTES - length
            self._index = json.loads(mapped[begin : begin + length].tobytes())
            return mapped
        except (OSError, ValueError) as error:
            self._warn(f"packed weights cannot be read: {error}", "they are made anew")
            self._index = {}
            return None

    def _begin(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle, self._part = tempfile.mkstemp(dir=self._path.parent, suffix=".part")
            self._out = os.fdopen(handle, "wb")
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._out = None
        if self._part:
            Path(self._part).unlink(missing_ok=True)
        what = f"packed weights cannot be kept: {error.strerror or error}"
        self._warn(what, "choose another folder, or free space")

    def _warn(self, what: str, advice: str) -> None:
        warnings.warn(f"{what} - at {self._path} - {advice}", CacheWarning, stacklevel=2)


def checkpoint_identity(path: str | Path, **settings: Any) -> str:
    """Names, sizes and times of a checkpoint's files, and settings that weights depend on."""
    root = Path(path)
    files = sorted(root.iterdir()) if root.is_dir() else [root]
    kept = [f for f in files if f.suffix in (".safetensors", ".json", ".gguf")]
    stats = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in kept]
    return json.dumps([str(root.resolve()), stats, sorted(settings.items())])
