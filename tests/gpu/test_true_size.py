"""Muse Spark's layers at their true width, one of each kind, against plain torch on the same GPU.

Layer 0 slides and has NVFP4 experts, layer 1 is global and has bf16 ones: 34 GB of random weights,
made by torch on the GPU. The prompt is longer than the window and its ring of pages. It is fed a
step at a time, so that every row's stream before and after a layer is known, and each layer of the
reference starts from the stream that ours had.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpurt.bench.made_up import nvfp4_scale
from gpurt.bench.phases import Phases
from gpurt.bench.shapes import MUSE_SPARK
from gpurt.buffer import DTYPES, bf16, e4m3, f32
from gpurt.graph import Graph
from gpurt.graphs.muse_spark import MuseSparkConfig, build
from gpurt.graphs.ops.route import RoutesLayout
from gpurt.loaders.model import WeightSource
from gpurt.runtime import Runtime

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # torch's own
]

CONFIG = replace(
    MUSE_SPARK,
    layers=2,
    vocab=2048,  # the head is not what is tested
    thetas=(500000.0, 0.0),
    windows=(2048, 0),
    sparse=(True, True),
    quantised=frozenset({0}),
)
ROWS, STEPS, PAGE = 16, 138, 64  # 2,208 positions; a ring has 2,176
PIECE = 64 << 20  # elements
TOLERANCE = 1e-2  # of a layer, all rows; at a small size it is 5e-3
ROW_TOLERANCE = 5e-2  # of its worst row
# Of all rows, those with the reference's experts: where scores nearly tie, bf16 before it decides.
SAME_CHOICE = 0.85


@dataclass
class Run:
    """What our side computed, a row a position: streams [layers + 1] of [T, H], experts [layers] of
    [T, top_k], ascending.
    """

    tokens: list[int]
    streams: list[NDArray[np.float32]]
    chosen: list[NDArray[np.int64]]


def test_each_layer_is_within_a_hundredth_of_plain_torch() -> None:
    with torch.no_grad():
        device = "cuda" if torch.cuda.is_available() else "cpu"
        weights = made_weights(CONFIG, device)
        ours = run(CONFIG, weights)
        for layer in range(CONFIG.layers):
            check_layer(layer, layer_of(weights, layer), ours, device)


def run(config: MuseSparkConfig, weights: Mapping[str, Any]) -> Run:
    """Feed a prompt to our side, `ROWS` of it a step."""
    sources = {name: source_of(name, tensor, config) for name, tensor in weights.items()}
    dtypes = {"kv_dtype": "bf16", "weight_dtype": "bf16"}
    graph = build(config, sources, rows=ROWS, context=(STEPS + 1) * ROWS, page=PAGE, **dtypes)
    tokens = np.random.default_rng(3).integers(0, config.vocab, STEPS * ROWS).tolist()
    names = ["embed.s", *(f"layers[{i}].s" for i in range(config.layers))]
    phases, parts = Phases("true size", lambda *_: None), []
    with Runtime("cuda", policy={"expert_matvec": "claim"}) as runtime:
        runtime.prepare(graph, progress=phases)
        phases("running", 0, 1)
        last = None
        for end in range(ROWS, len(tokens) + 1, ROWS):
            last = runtime.submit(graph, tokens[:end], max_tokens=1, ignore_eos=True, after=last)
            last.result()
            assert last.stats.cached_tokens == end - ROWS
            streams = [runtime.read(graph, name) for name in names]
            parts.append((streams, choices(runtime, graph, config)))
    print(phases.note())
    joined = [np.concatenate([step[0][i] for step in parts]) for i in range(len(names))]
    chosen = [np.concatenate([step[1][i] for step in parts]) for i in range(config.layers)]
    return Run(tokens, joined, chosen)


def choices(runtime: Runtime, graph: Graph, config: MuseSparkConfig) -> list[NDArray[np.int64]]:
    """Of each layer, the experts of every row of the last step."""
    layout = RoutesLayout(ROWS, config.experts, config.top_k)
    of_pair = layout.pair(0) + 2 * np.arange(ROWS * config.top_k)
    result = []
    for layer in range(config.layers):
        routes = runtime.read(graph, f"layers[{layer}].routes").astype(np.int64)
        slots = layout.slot(0) + routes[of_pair] * (layout.slot(1) - layout.slot(0))
        result.append(routes[slots].reshape(ROWS, config.top_k))
    return result


def check_layer(layer: int, own: Mapping[str, Any], ours: Run, device: str) -> None:
    """One layer of the reference from our own stream before it."""
    before = torch.from_numpy(ours.streams[layer]).to(device)
    want, chosen = reference_layer(layer, own, before)
    same = (chosen == ours.chosen[layer]).all(axis=1)
    assert same.mean() >= SAME_CHOICE, f"layer {layer}: {same.mean():.3f} of rows have its experts"
    error_T = np.linalg.norm(ours.streams[layer + 1] - want, axis=1)[same]
    size_T = np.linalg.norm(want, axis=1)[same]
    error, worst = np.linalg.norm(error_T) / np.linalg.norm(size_T), (error_T / size_T).max()
    print(f"layer {layer}: error {error:.2e}, of its worst row {worst:.2e}, {same.mean():.3f} same")
    assert error < TOLERANCE
    assert worst < ROW_TOLERANCE


def reference_layer(
    layer: int, own: Mapping[str, Any], before: Any
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """In float32: the stream after a layer, and the experts that its router chose, ascending."""
    from gpurt.graphs.reference import muse_spark as plain

    routed: list[Any] = []

    def route(*given: Any) -> Any:
        routed.append(true_route(*given))
        return routed[0]

    true_route = plain.route
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain, "route", route)
        after = plain.layer_forward(CONFIG, layer, own, before)
    return after.cpu().numpy(), routed[0][0].sort(-1).values.cpu().numpy()


# ---- weights -----------------------------------------------------------------------------------
def made_weights(config: MuseSparkConfig, device: str) -> dict[str, Any]:
    """Random tensors by their checkpoint names, on `device`, in their checkpoint dtypes."""
    generator = torch.Generator(device).manual_seed(1)
    codes = config.tensor_dtypes()

    def made(name: str, shape: tuple[int, ...]) -> Any:
        if name in codes:
            low, high = (0x28, 0x38) if codes[name] == "e4m3" else (0, 256)  # e4m3: 0.25 to 0.94
            out = torch.empty(shape, dtype=torch.uint8, device=device)
            return out.random_(low, high, generator=generator)
        if name.endswith("weight_scale_2"):
            out = torch.empty(shape, device=device).uniform_(0.5, 1.5, generator=generator)
            return out * nvfp4_scale(config.moe_hidden)
        plain = len(shape) == 1 or name.endswith("mlp.gate.weight")
        out = torch.empty(shape, dtype=torch.float32 if plain else torch.bfloat16, device=device)
        # A router's logits of some units, so that its bias of a tenth does not choose alone.
        spread = 0.1 if len(shape) == 1 else shape[-1] ** -0.5 * (10 if plain else 1)
        out.normal_(0, spread, generator=generator)
        return out + 1 if name.endswith("language_model.norm.weight") else out

    return {name: made(name, shape) for name, shape in config.tensors().items()}


def source_of(name: str, tensor: Any, config: MuseSparkConfig) -> WeightSource:
    """A tensor as a checkpoint gives it, copied to the host when it is read."""
    stored = config.tensor_dtypes().get(name)
    dtype = bf16 if tensor.dtype == torch.bfloat16 else f32
    if stored is not None:
        dtype = e4m3 if stored == "e4m3" else DTYPES[stored]
    bits = tensor.view(torch.int16) if dtype is bf16 else tensor

    def load() -> NDArray[Any]:
        return on_host(bits).numpy().view(dtype.storage)

    return WeightSource(name, dtype, tuple(tensor.shape), load)


def on_host(tensor: Any) -> Any:
    """A tensor in the host's memory: through pinned pieces, which torch then spreads by all cores;
    of `.cpu()`, the first touch of new memory by one core would take most of this test.
    """
    if not tensor.is_cuda:
        return tensor
    whole, pieces = torch.empty(tensor.shape, dtype=tensor.dtype), tensor.reshape(-1).split(PIECE)
    pinned = torch.empty(PIECE, dtype=tensor.dtype, pin_memory=True)
    for out, piece in zip(whole.view(-1).split(PIECE), pieces, strict=True):
        out.copy_(pinned[: len(piece)].copy_(piece))
    return whole


def layer_of(weights: Mapping[str, Any], layer: int) -> dict[str, Any]:
    """A layer's tensors as the reference takes them: in float32, experts one at a time."""
    from gpurt.graphs.reference import muse_spark as plain

    own = plain.layer_weights(weights, layer)
    wide = {n: w.float() for n, w in own.items() if n.split(".")[-1] in ("weight", "gate")}
    wide |= {n: w for n, w in own.items() if n.endswith("e_score_correction_bias")}
    halves = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    return wide | {name: Half(partial(expert_of, own, name)) for name in halves}


@dataclass(frozen=True)
class Half:
    """One half of all experts, made expert by expert: in float32 a layer would take 52 GB."""

    expert: Any

    def __getitem__(self, index: int) -> Any:
        return self.expert(index)


def expert_of(own: Mapping[str, Any], name: str, index: int) -> Any:
    """A matrix in float32; of NVFP4 code * block scale * second-level scale, by its definition."""
    w = own[name][index]
    if w.dtype != torch.uint8:
        return w.float()
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=w.device)
    values = torch.cat([magnitudes, -magnitudes])[torch.stack([w & 15, w >> 4], -1).long()]
    blocks = own[f"{name}_weight_scale"][index].view(torch.float8_e4m3fn).float()
    second = own[f"{name}_weight_scale_2"][index].reshape(-1)  # of gate and up, or of all
    rows = len(w) // len(second)
    scales = blocks * second.repeat_interleave(rows)[:, None]
    return values.flatten(1) * scales.repeat_interleave(16, dim=1)
