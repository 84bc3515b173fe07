"""The safetensors container: one JSON header, then raw tensors, read through a memory map.

Owns: the byte format and the index of sharded checkpoints. The `safetensors` package cannot give
numpy a bfloat16, so the header is read here. Source: the format's own description.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpurt.buffer import DType, bf16, e4m3, f16, f32, u8
from gpurt.errors import ModelError
from gpurt.loaders.model import WeightSource
from gpurt.progress import Progress

_DTYPES = {"F32": f32, "F16": f16, "BF16": bf16, "U8": u8, "F8_E4M3": e4m3}
_HEADER_BYTES_MAX = 100_000_000  # the format's own bound
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def read_folder(folder: Path, progress: Progress | None = None) -> dict[str, WeightSource]:
    """All tensors of a folder: model.safetensors, or the shards that the index names.

    Raises: ModelError if a file is missing, truncated or damaged, or if a shard lacks a tensor
    that the index promises.
    """
    index_path = folder / _INDEX
    if not index_path.exists():
        if not (folder / _SINGLE).exists():
            msg = f"neither {_SINGLE} nor {_INDEX} is there"
            raise ModelError(f"{msg} - at {folder} - give a folder with safetensors weights")
        return read_file(folder / _SINGLE)
    places = _weight_map(index_path)
    found: dict[str, WeightSource] = {}
    shards = sorted(set(places.values()))
    for done, shard in enumerate(shards):
        if not (folder / shard).exists():
            msg = f"shard {shard} is missing, {_INDEX} names {len(shards)}"
            raise ModelError(f"{msg} - at {folder} - get the whole model")
        tensors = read_file(folder / shard)
        absent = sorted(n for n, place in places.items() if place == shard and n not in tensors)
        if absent:
            msg = f"tensor {absent[0]} is not in shard {shard}, where {_INDEX} puts it"
            raise ModelError(f"{msg} - at {folder} - index and shards are of different models")
        found |= tensors
        if progress is not None:
            progress("reading shard headers", done + 1, len(shards))
    return found


def read_file(path: Path) -> dict[str, WeightSource]:
    """The tensors of one safetensors file; their bytes stay on disk until they are loaded.

    Raises: ModelError if it is truncated or damaged.
    """
    try:
        mapped: NDArray[np.uint8] = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        msg = f"cannot read it: {error}"
        raise ModelError(f"{msg} - at {path} - get the file again") from error
    header_bytes = int.from_bytes(mapped[:8].tobytes(), "little") if mapped.size >= 8 else -1
    if not 0 <= header_bytes <= min(mapped.size - 8, _HEADER_BYTES_MAX):
        msg = f"the header claims {header_bytes} bytes, the file has {mapped.size}"
        raise ModelError(f"{msg} - at {path} - the file is truncated or no safetensors")
    base = 8 + header_bytes
    try:
        header = json.loads(mapped[8:base].tobytes())
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        return {name: _tensor(name, entry, mapped, base, path) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        msg = f"the header is no safetensors header ({type(error).__name__}: {error})"
        raise ModelError(f"{msg} - at {path} - the file is damaged: get it again") from error


def _tensor(
    name: str, entry: dict[str, Any], mapped: NDArray[np.uint8], base: int, path: Path
) -> WeightSource:
    shape = tuple(int(extent) for extent in entry["shape"])
    begin, end = (int(offset) for offset in entry["data_offsets"])
    known = _DTYPES.get(entry["dtype"])
    # What no model here computes with may still lie in a checkpoint: in a tower, as a count. It
    # keeps its own name, so that a model that asks for it can say what it found.
    dtype = known or DType(str(entry["dtype"]), 1, 1, np.dtype(np.uint8))
    size = math.prod(shape) * dtype.block_bytes if known else end - begin
    if begin < 0 or end - begin != size:
        msg = f"tensor {name} {list(shape)} {dtype} needs {size} bytes, its range has {end - begin}"
        raise ModelError(f"{msg} - at {path} - the file is damaged: get it again")
    if base + end > mapped.size:
        msg = f"tensor {name} {list(shape)} {dtype} ends at byte {base + end}"
        msg += f", the file has {mapped.size}"
        raise ModelError(f"{msg} - at {path} - the file is truncated: get it again")
    return WeightSource(name, dtype, shape, _loader(mapped, base + begin, base + end, dtype, shape))


def _loader(
    mapped: NDArray[np.uint8], begin: int, end: int, dtype: DType, shape: tuple[int, ...]
) -> Callable[[], NDArray[Any]]:
    def load() -> NDArray[Any]:
        return mapped[begin:end].view(dtype.storage).reshape(shape)

    return load


def _weight_map(path: Path) -> dict[str, str]:
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not isinstance(places, dict) or not places:
            raise TypeError("weight_map is empty or no object")
        return {str(name): Path(str(shard)).name for name, shard in places.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        msg = f"cannot read weight_map ({type(error).__name__}: {error})"
        raise ModelError(f"{msg} - at {path} - get the file again") from error
