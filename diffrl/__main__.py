"""`python -m diffrl`: the command line."""

import sys

from diffrl.cli import main

if __name__ == "__main__":
    sys.exit(main())
