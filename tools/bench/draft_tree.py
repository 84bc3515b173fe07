"""Chain or tree: tokens a step of a model with its drafter, by the number of proposals.

`python -m tools.bench.draft_tree FOLDER`: greedy answers to held-out problems, of templates that
training knew and of others, each with a chain and with a tree. Says where a text differs from that
without a drafter, and exits with 1 then.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gpurt.graphs import muse_spark
from gpurt.loaders import load_model
from gpurt.loaders.hf_dflash import load_draft
from gpurt.runtime import Runtime
from gpurt.serving import DRAFT_FOLDER, encode_chat
from tools.train.problem import make

_SEED = 101  # of the held-out ones
_MAX_TOKENS = 160
_CONTEXT = 512


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a muse_spark model with draft/ inside")
    parser.add_argument("--problems", type=int, default=8, help="of each kind")
    parser.add_argument("--proposals", type=int, nargs="+", default=[3, 7, 15])
    parser.add_argument("--block", type=int, help="cut the drafter's block to so many rows")
    parser.add_argument("--device", default="host")
    parser.add_argument("--workers", type=int)
    options = parser.parse_args(arguments)
    model, drafter = load_model(options.folder), load_draft(options.folder / DRAFT_FOLDER)
    if options.block is not None:
        drafter = replace(drafter, config=replace(drafter.config, block=options.block))
    kinds = {"known": False, "unseen": True}
    prompts = {
        kind: [
            encode_chat(model, [{"role": "user", "content": problem.question}])
            for problem in (
                make((_SEED << 32) + i, test=True, unseen=unseen) for i in range(options.problems)
            )
        ]
        for kind, unseen in kinds.items()
    }
    base = {"context": _CONTEXT} | ({} if options.device == "host" else {"kv_dtype": "bf16"})
    if options.device != "host":
        base["weight_dtype"] = "bf16"
    different = 0
    with Runtime(options.device, workers=options.workers) as runtime:

        def answers(kind: str, **drafting: object) -> tuple[list[list[int]], float]:
            graph = muse_spark.build(model.config, model.weights, **base, **drafting)
            settings = {"max_tokens": _MAX_TOKENS, "stop_ids": model.stop_ids}
            texts, steps = [], 0.0
            for prompt in prompts[kind]:
                request = runtime.submit(graph, prompt, **settings)
                texts.append(request.result().token_ids)
                steps += (len(texts[-1]) - 1) / (request.stats.accepted_per_step or 1.0)
            return texts, sum(len(text) - 1 for text in texts) / steps

        for kind in kinds:
            wanted, _ = answers(kind)
            for proposals in options.proposals:
                rates = []
                for tree in (False, True):
                    drafting = {"draft": "dflash", "draft_model": drafter, "draft_tree": tree}
                    texts, rate = answers(kind, proposals=proposals, **drafting)
                    different += sum(a != b for a, b in zip(texts, wanted, strict=True))
                    rates.append(rate)
                line = f"chain {rates[0]:.2f}, tree {rates[1]:.2f} tokens a step"
                print(f"{kind}, {proposals} proposals: {line}", flush=True)
    print(f"{different} texts differ from those without a drafter")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
