"""What every loader returns: a config, lazily read weights, and how to turn text into ids.

Owns: `WeightSource`, `Model`, and the check of a checkpoint's tensors against its config.
Knows no file format. Tensors go by their Hugging Face names, whatever the file calls them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray

from gpurt.buffer import DType
from gpurt.errors import ModelError

if TYPE_CHECKING:
    from gpurt.channels import ChannelFormat
    from gpurt.tokenizer import ChatTemplate, Tokenizer

_NUMBERS = ("f32", "f16", "bf16", "q4_1", "q8_0")  # stored so, a tensor needs no other


@dataclass(frozen=True)
class WeightSource:
    """One tensor of a checkpoint, read when `load` is called.

    shape: in elements. load: returns `dtype.storage` elements; a block format as bytes, whole
    blocks along the last axis. The array may view a memory map and must not be written.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    load: Callable[[], NDArray[Any]] = field(repr=False)

    @property
    def size_bytes(self) -> int:
        """Bytes as stored."""
        *outer, width = self.shape or (1,)
        return math.prod(outer) * self.dtype.row_bytes(width)


class ModelConfig(Protocol):
    """What a config of any model states; the file in graphs/ that builds it knows the rest."""

    @property
    def architecture(self) -> str:
        """The model_type, as in `serving.BUILDERS`."""

    @property
    def vocab(self) -> int:
        """Tokens there are."""

    @property
    def context(self) -> int:
        """Positions the model was made for."""

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that a checkpoint must hold."""

    def tensor_dtypes(self) -> dict[str, str]:
        """Tensors that must be stored in one dtype; all others in any that holds numbers."""

    def ignored_tensors(self) -> list[str]:
        """Tensors that may be there and are not read."""


@dataclass(frozen=True)
class Model:
    """A checkpoint, ready for the `build` of its file in graphs/.

    tokenizer: None for a folder that has none: it takes and gives ids. chat: None if the model
    states no chat template that gpurt can follow. stop_ids: tokens that end a reply. notices: what
    of the checkpoint is not run, a sentence each.
    """

    name: str
    path: str
    config: ModelConfig
    weights: Mapping[str, WeightSource] = field(repr=False)
    tokenizer: Tokenizer | None = field(default=None, repr=False)
    chat: ChatTemplate | ChannelFormat | None = field(default=None, repr=False)
    stop_ids: tuple[int, ...] = ()
    notices: tuple[str, ...] = ()


def check_tensors(
    found: Mapping[str, WeightSource],
    config: ModelConfig,
    path: str,
    stored_name: Callable[[str], str] = str,
) -> dict[str, WeightSource]:
    """The tensors a config asks for, and no other.

    stored_name: what the file calls a tensor, for messages.
    Raises: ModelError naming the tensor and both shapes if one is missing, extra, misshapen or of
    another dtype.
    """
    expected, dtypes = config.tensors(), config.tensor_dtypes()
    for name, shape in expected.items():
        if name not in found:
            msg = f"tensor {stored_name(name)} {list(shape)} is missing"
            raise ModelError(f"{msg} - at {path} - the config asks for it: get the whole model")
        if found[name].shape != shape:
            msg = f"tensor {stored_name(name)} is {list(found[name].shape)}"
            msg += f", the config asks for {list(shape)}"
            raise ModelError(f"{msg} - at {path} - config and weights are of different models")
        stored, wanted = found[name].dtype.name, dtypes.get(name)
        if stored != wanted and (wanted is not None or stored not in _NUMBERS):
            msg = f"tensor {stored_name(name)} {list(shape)} is stored as {stored}"
            msg += f", the config asks for {list(shape)} in {wanted or 'a float dtype'}"
            raise ModelError(f"{msg} - at {path} - config and weights are of different models")
    ignored = set(config.ignored_tensors())
    extra = sorted(set(found) - set(expected) - ignored)
    if extra:
        first = found[extra[0]]
        msg = f"tensor {stored_name(extra[0])} {list(first.shape)} has no place in a"
        msg += f" {config.architecture} model ({len(extra)} such)"
        raise ModelError(f"{msg} - at {path} - gpurt would ignore it, so the output would be wrong")
    return {name: found[name] for name in expected}


def need(condition: bool, what: str, path: str, advice: str) -> None:
    """Raises: ModelError `what - at path - advice` unless the condition holds."""
    if not condition:
        raise ModelError(f"{what} - at {path} - {advice}")


def integer(values: Mapping[str, Any], key: str, path: str, default: int | None = None) -> int:
    """A whole number of 1 or more from a config. Raises: ModelError naming the key."""
    value = values.get(key)
    if value is None:
        if default is None:
            raise ModelError(f"{key} is missing - at {path} - the config must state it")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{key} is {value!r} - at {path} - it must be a whole number of 1 or more")
    return value


def number(values: Mapping[str, Any], key: str, path: str, default: float | None = None) -> float:
    """A positive number from a config. Raises: ModelError naming the key."""
    value = values.get(key)
    if value is None:
        if default is None:
            raise ModelError(f"{key} is missing - at {path} - the config must state it")
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelError(f"{key} is {value!r} - at {path} - it must be a number above 0")
    return float(value)


def only_setting(
    values: Mapping[str, Any], wanted: Mapping[str, Any], path: str, prefix: str = ""
) -> None:
    """Keys of which gpurt runs one value; a config that leaves one out means it.

    prefix: what stands before a key in messages. Raises: ModelError naming key and value.
    """
    for key, only in wanted.items():
        value = values.get(key)
        need(
            value is None or value == only,
            f"{prefix}{key} is {value!r}",
            path,
            f"gpurt runs models with {key} {only!r}",
        )


def check_heads(heads: int, kv_heads: int, head_dim: int, path: str) -> None:
    """Raises: ModelError if heads share no kv heads evenly, or cannot be rotated."""
    need(
        heads % kv_heads == 0,
        f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}",
        path,
        "the config is wrong",
    )
    need(head_dim % 2 == 0, f"head_dim is {head_dim}", path, "rotary embedding needs an even size")


def experts_of(values: Mapping[str, Any], key: str, path: str) -> tuple[int, int]:
    """(experts, experts a token) of a config. Raises: ModelError naming the key at fault."""
    experts = integer(values, key, path)
    top_k = integer(values, "num_experts_per_tok", path)
    need(
        top_k <= experts,
        f"num_experts_per_tok {top_k} exceeds {key} {experts}",
        path,
        "the config is wrong",
    )
    return experts, top_k


def id_list(value: Any) -> tuple[int, ...]:
    """Token ids from a config's `int | list[int] | None`."""
    if value is None:
        return ()
    values: Sequence[Any] = value if isinstance(value, list) else [value]
    return tuple(int(v) for v in values if isinstance(v, int))
