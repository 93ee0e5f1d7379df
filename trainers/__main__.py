"""`python -m trainers` is the console command `jaxpriv`, from a checkout."""

import sys

from trainers.cli import main

sys.exit(main())
