"""Writes the client data of `inputs.py` as jaxpriv does: `python -m tests.tff.write_clients FILE`."""

import sys

from tests.tff import inputs
from trainers.common import tff_sqlite

if __name__ == "__main__":
    tff_sqlite.write(sys.argv[1], inputs.client_data())
