"""`python -m accounting COMMAND ...`: the same as `jaxpriv account COMMAND ...`."""

import sys

from accounting.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
