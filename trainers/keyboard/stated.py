"""The statement of a run, in its folder, however the run ends."""

import contextlib
import pathlib
from collections.abc import Iterator, Sequence

from accounting import PrivacyStatement, evidence, reporting
from trainers.common import statements
from trainers.common.errors import InputError
from trainers.common.wording import counted


def write(folder: pathlib.Path) -> PrivacyStatement:
    """Writes privacy.json and privacy.md from the run's own record, and returns what they say."""
    statement = reporting.report(folder)
    statements.write(statement, folder)
    return statement


@contextlib.contextmanager
def when_stopped(folders: Sequence[pathlib.Path]) -> Iterator[None]:
    """Whatever stops the block, what the runs in `folders` released until then is stated, and the error says where
    for the first."""
    try:
        yield
    except BaseException as stop:
        said = [_state_so_far(folder) for folder in folders]
        text = "; ".join(filter(None, [str(stop), said[0]]))
        if isinstance(stop, KeyboardInterrupt):
            raise KeyboardInterrupt(text) from stop
        if isinstance(stop, ValueError):
            raise InputError(text) from stop
        raise


def _state_so_far(folder: pathlib.Path) -> str:
    """Writes the statement of a run that was stopped and says where it is; empty where nothing was released."""
    with contextlib.suppress(ValueError, OSError):  # a damaged record: whoever asks for the statement is told
        stages = [folder / name for name in evidence.stages_of(folder) or []]
        if any(evidence.sign_of_release(place) for place in (folder, *stages)):
            seen = write(folder).data["observed"]
            rounds = f" ({counted(seen['num_rounds'], 'round')})" if seen else ""
            return f"{folder / 'privacy.md'} states what was released so far{rounds}"
    return ""
