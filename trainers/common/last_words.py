"""One line in place of a stack trace where native code ends the process.

JAX's coordination client ends the whole process from a thread of its own (`abort`, status 134, a page of stack) as
soon as another process is gone: nothing in Python can catch that. So what native code writes to standard error is kept
aside, and a handler of SIGABRT looks at it: if that was the reason it prints one line and ends with status 2, else it
shows what was kept aside. With JAXPRIV_TRACEBACK=1 everything is left as it is.
"""

import atexit
import ctypes
import os
import signal
import sys
import tempfile
import time
from typing import Any

# What the client says before it ends the process.
_REASON = b"JAX distributed service detected fatal errors"
_MOST = 1 << 20  # bytes of it that are looked at, from the end
_GRACE = 10.0  # seconds to say what is about to be said already

_kept: dict[str, Any] = {}


def install(line: str) -> None:
    """From now on an abort because another process is gone prints `line` and ends with status 2."""
    if os.environ.get("JAXPRIV_TRACEBACK") or _kept:
        return
    sys.stderr.flush()
    shown = os.dup(2)
    aside = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process lives
    os.dup2(aside.fileno(), 2)
    sys.stderr = os.fdopen(
        shown, "w", buffering=1, encoding=sys.stderr.encoding, errors="backslashreplace", closefd=False
    )

    def aborted(number: int) -> None:
        if "status" in _kept:  # the main thread knows already, and is saying so
            time.sleep(_GRACE)
            os._exit(_kept["status"])
        size = os.fstat(aside.fileno()).st_size
        said = os.pread(aside.fileno(), _MOST, max(0, size - _MOST))
        if _REASON in said:
            os.write(shown, f"\njaxpriv: {line}\n".encode())
            os._exit(2)
        os.write(shown, said)  # and back into `abort`, which ends the process

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(aborted)
    _kept.update(aside=aside, handler=handler)  # they must live as long as the process
    set_handler = ctypes.CDLL(None).signal
    set_handler.restype, set_handler.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    set_handler(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))


def leave_at_exit(status: int) -> None:
    """Ends the process with `status` when the interpreter is done, without JAX's farewell to the other processes."""
    _kept["status"] = status

    def leave() -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)

    atexit.register(leave)  # later than JAX's, so before it
