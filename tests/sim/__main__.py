"""Replays one simulated schedule, or runs many: `python -m tests.sim --seed 17 --case mixed`."""

import argparse
import subprocess
import sys

from tests.sim import build


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="first seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds, one after another")
    parser.add_argument("--case", default="mixed", help="kind of world; a wrong name lists them")
    options = parser.parse_args()
    try:
        program = build.build_sim()
    except build.BuildError as error:
        print(error, file=sys.stderr)
        return 2
    command = [program, "--case", options.case, "--seed", str(options.seed)]
    return subprocess.run([*command, "--count", str(options.count), "--verbose"]).returncode


if __name__ == "__main__":
    sys.exit(main())
