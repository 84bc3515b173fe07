"""The empty Graph of a model: the options that every `build` takes, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gpurt.errors import BoundError, GraphError
from gpurt.graph import Graph

if TYPE_CHECKING:
    from gpurt.loaders.model import ModelConfig

DEFAULT_CONTEXT = 2048
_DTYPES = ("f32", "f16", "bf16")
# What a cache of keys and values may be, and the dtype of its buffers.
KV_DTYPES = {"f32": "f32", "f16": "f16", "bf16": "bf16", "fp8": "e4m3"}


def check_shares(sizes: Mapping[str, int], count: int, where: str, kv_heads: int = 0) -> None:
    """Raises: GraphError, with the numbers, if `count` ranks cannot have equal shares of all sizes;
    kv_heads: which equal groups of ranks may also have one of each.
    """
    bad = [f"{size} {what}" for what, size in sizes.items() if count < 1 or size % count]
    if count > 1 and kv_heads and max(kv_heads, count) % min(kv_heads, count):
        bad.append(f"{kv_heads} kv heads")
    if bad:
        msg = f"{', '.join(bad)} have no {count} equal shares"
        raise GraphError(f"{msg} - at {where} - use a tp_size that divides them")


def empty_graph(
    config: ModelConfig,
    where: str,
    rows: int,
    slots: int,
    context: int | None,
    kv_dtype: str,
    weight_dtype: str | None,
    *,
    rank: int = 0,
    rank_count: int = 1,
) -> Graph:
    """A Graph with a model's name, vocabulary and bounds, and no operator.

    context: default the model's, at most 2048. where: of the errors, as in "llama.build".
    Raises: BoundError if context exceeds the model's; GraphError for an unknown dtype.
    """
    bound = min(config.context, DEFAULT_CONTEXT) if context is None else context
    if not 1 <= bound <= config.context:
        msg = f"context is {bound}, the model was made for {config.context} positions"
        raise BoundError(f"{msg} - at {where} - use 1 to {config.context}")
    for what, name, known in (
        ("kv_dtype", kv_dtype, tuple(KV_DTYPES)),
        ("weight_dtype", weight_dtype or "f32", _DTYPES),
    ):
        if name not in known:
            msg = f"{what} is {name!r} - at {where} - use {', '.join(known[:-1])} or {known[-1]}"
            raise GraphError(msg)
    return Graph(
        config.architecture,
        rows=rows,
        slots=slots,
        context=bound,
        vocab=config.vocab,
        rank=rank,
        rank_count=rank_count,
    )
