"""The bodies of tests/helpers/experts.py as CUDA structs: same integers, one thread each."""

from __future__ import annotations

from dataclasses import replace

from tests.helpers.experts import PRIME, Experts

_HEAD = """
struct NAME {
  using u32 = gpurt::u32;
  using u64 = gpurt::u64;
  __device__ static u32 add(u32 hash, u32 number) {
    return static_cast<u32>((u64{hash} * 31 + number) % PRIME);
  }
  __device__ static void run(const gpurt::TaskRecord& task, const gpurt::BodyContext& context) {
    if (context.thread != 0) return;
    const u32 layer = task.param[0], step = static_cast<u32>(context.step_index);
    const auto in = [&](u32 i) { return context.address<const u32>(task, i); };
    const auto out = [&](u32 i) { return context.address<u32>(task, i); };
BODY
  }
};
"""
# Names of args in order: as Experts declares them. 17 is where every hash begins.
_BODIES = {
    "start": "out(1)[0] = add(add(add(17, in(0)[0]), layer), step);",
    "route": """
    const u32 draw = (layer * 7919 + step * 104729) % 10;
    const u32 some = static_cast<u32>((layer + u64{step} * step) % (SLOTS + 1));
    const u32 live = draw < 2 ? 0 : draw < 4 ? SLOTS : some;
    out(1)[0] = live;
    for (u32 j = 0; j < SLOTS; ++j) out(1)[1 + j] = j < live ? add(add(17, in(0)[0]), j) : PRIME;
    """,
    "pre": "out(1)[task.tile[0]] = add(add(add(17, in(0)[0]), layer), 1);",
    "expert_up": """
    const u32 slot = task.tile[0], at = slot * TILES + task.tile[1];
    if (slot >= in(1)[0]) return;
    out(3)[at] = add(add(add(add(17, in(0)[0]), in(0)[1]), in(1)[1 + slot]), in(2)[at]);
    """,
    "expert_down": """
    const u32 slot = task.tile[0], at = slot * TILES + task.tile[1];
    if (slot >= in(1)[0]) return;
    u32 hash = 17;
    for (u32 i = 0; i < TILES; ++i) hash = add(hash, in(0)[slot * TILES + i]);
    out(3)[at] = add(add(hash, in(1)[1 + slot]), in(2)[at]);
    """,
    "combine": """
    u32 hash = add(add(17, layer), in(1)[0]);
    for (u32 i = 0; i < in(1)[0] * TILES; ++i) hash = add(hash, in(0)[i]);
    out(2)[0] = hash;
    """,
    "fold": "out(1)[0] = add(add(add(17, in(1)[0]), in(0)[0]), layer);",
}


def on_gpu(experts: Experts) -> Experts:
    """The same experts, with a CUDA struct for every body."""
    experts.bodies = [
        replace(b, cuda=_source(b.name, experts.slots, experts.tiles)) for b in experts.bodies
    ]
    return experts


def _source(name: str, slots: int, tiles: int) -> str:
    text = _HEAD.replace("BODY", _BODIES[name]).replace("NAME", name)
    for word, number in (("SLOTS", slots), ("TILES", tiles), ("PRIME", PRIME)):
        text = text.replace(word, f"{number}u")
    return text
