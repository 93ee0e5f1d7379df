"""Runs benchmarks by name, or all of them: `python -m tests.bench [NAME ...]`."""

import importlib
import pathlib
import sys

found = sorted(path.stem.removeprefix("bench_") for path in pathlib.Path(__file__).parent.glob("bench_*.py"))
for name in sys.argv[1:] or found:
    if name not in found:
        sys.exit(f"no benchmark is called {name!r}; there are: {', '.join(found)}")
    print(f"== {name}", flush=True)
    importlib.import_module(f"tests.bench.bench_{name}").main()
