"""The console command `jaxpriv`: finds the area's own command line and loads nothing else."""

import importlib
import os
import pathlib
import sys
import warnings

AREAS = {
    "keyboard": (
        "trainers.keyboard.cli",
        "private language models: train, evaluate, compare, suggest, compose, rescore, export",
    ),
    "documents": ("trainers.documents.cli", "private document embeddings: fit, release, evaluate"),
    "translation": (
        "trainers.translation.cli",
        "federated translation: train, evaluate, translate, keygen, store, share, shuffle, open, attack, release, "
        "transfer",
    ),
    "account": (
        "accounting.cli",
        "privacy accounting, without jax: tree, matrix, convert, calibrate, plan, compare, report",
    ),
    "data": ("trainers.common.data_cli", "data sets and files: list, prepare, inspect"),
}


def usage() -> str:
    rows = "\n".join(f"  {name:<12} {text}" for name, (_, text) in AREAS.items())
    lines = (
        "usage: jaxpriv AREA COMMAND [OPTIONS]",
        "areas:\n" + rows,
        "`jaxpriv AREA --help` lists its commands.",
    )
    return "\n\n".join(lines)


def resumes(argv: list[str]) -> bool:
    """Whether this command can be interrupted and continued."""
    kept = {"keyboard": ("train",), "documents": ("fit", "evaluate"), "translation": ("train",)}
    return argv[1:2] != [] and argv[1] in kept.get(argv[0], ())


def _as_line(message, category, filename, lineno, line=None, *, otherwise=warnings.formatwarning) -> str:
    """A warning of ours as one line, without the place in the code that tells its reader nothing."""
    ours = pathlib.Path(filename).resolve().is_relative_to(pathlib.Path(__file__).resolve().parent)
    return f"jaxpriv: {message}\n" if ours else otherwise(message, category, filename, lineno, line)


def main(argv: list[str] | None = None) -> int:
    """Runs one command; bad input ends with one line on standard error and status 2."""
    argv = sys.argv[1:] if argv is None else argv
    warnings.formatwarning = _as_line
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0
    if argv[0] == "--version":
        from importlib.metadata import version

        print(version("jaxpriv"))
        return 0
    if argv[0] not in AREAS:
        print(f"jaxpriv: unknown area {argv[0]!r}; choose one of {', '.join(AREAS)}", file=sys.stderr)
        return 2
    try:
        return importlib.import_module(AREAS[argv[0]][0]).main(argv[1:])
    except BrokenPipeError:
        # The reader went away (`| head`): nothing to say, and nothing left to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        # ValueError is what the libraries raise for settings they refuse; JAXPRIV_TRACEBACK=1 shows where.
        # numpy raises MemoryError, jax a RuntimeError.
        no_room = "No space left on device" in str(error)
        full = (isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)) and not no_room
        if os.environ.get("JAXPRIV_TRACEBACK") or (
            isinstance(error, RuntimeError) and not full and not no_room
        ):
            raise
        text = " ".join(str(error).split())
        if full:
            text = f"there is not enough memory ({text[:200]}); lower the sizes"
        elif no_room:
            text = f"the disk is full ({text[:200]}); make room" + (
                ", then the same command with --resume goes on" if resumes(argv) else ""
            )
        print(
            text if text.startswith(f"jaxpriv {argv[0]}") else f"jaxpriv {argv[0]}: {text}", file=sys.stderr
        )
        return 2
    except KeyboardInterrupt as stop:
        said = f"; {stop}" if str(stop) else ""
        run = "; what was done is kept: the same command with --resume goes on" if resumes(argv) else ""
        print(f"jaxpriv {argv[0]}: interrupted{said}{run}", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
