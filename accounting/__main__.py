"""`python -m accounting COMMAND ...`: the same as `jaxpriv account COMMAND ...`."""

import os
import sys

from accounting.cli import main

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BrokenPipeError:  # the reader went away (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
