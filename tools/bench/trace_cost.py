"""What tracing costs: pairs of requests with it on and off, in alternating order, in one process.

    chrt -f 10 python -m tools.bench.trace_cost [--model smollm2] [--device host] [--pairs 60]

Of each request the tokens a second from its first token to its last: load and prefill do not count.
"""

from __future__ import annotations

import argparse
import json
import math

import numpy as np

from gpurt import Runtime
from gpurt.loaders import load_model
from gpurt.serving import model_graph


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="host")
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=100)
    arguments = parser.parse_args()
    model = load_model(arguments.model)
    prompt = model.tokenizer.encode("Once upon a time") if model.tokenizer else [1, 2, 3]
    with Runtime(arguments.device) as on, Runtime(arguments.device, trace=False) as off:
        runtimes = {"on": on, "off": off}
        graph = model_graph(model, on.config.target.kind, context=512)

        def rate(name: str) -> float:
            request = runtimes[name].submit(
                graph, prompt, max_tokens=arguments.tokens, ignore_eos=True
            )
            request.result()
            return float(request.stats.tokens_per_second)

        for name in runtimes:
            rate(name)  # loads
        rates: dict[str, list[float]] = {"on": [], "off": []}
        for pair in range(arguments.pairs):
            for name in ("on", "off") if pair % 2 else ("off", "on"):
                rates[name].append(rate(name))
    ratios = np.array(rates["off"]) / np.array(rates["on"])
    error = 1.2533 * float(ratios.std(ddof=1)) / math.sqrt(len(ratios))
    medians = {name: round(float(np.median(values)), 1) for name, values in rates.items()}
    cost = {"median_ratio": round(float(np.median(ratios)), 4), "standard_error": round(error, 4)}
    print(f"tokens/s on {medians['on']}, off {medians['off']}; off over on {cost}")
    record = {"model": arguments.model, "device": arguments.device, "pairs": arguments.pairs}
    print(json.dumps({"case": "trace-cost", **record, "tokens_per_s": medians, **cost}))


if __name__ == "__main__":
    main()
