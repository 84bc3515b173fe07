"""`python -m gpurt`: the same as the `gpurt` command, for an environment that is not on PATH."""

import sys

from gpurt.cli import main

if __name__ == "__main__":
    sys.exit(main())
