"""A privacy statement beside what it is about, in the one place where `jaxpriv account report` looks for it."""

import pathlib

from accounting import PrivacyStatement
from accounting.participation_log import sync_folder
from trainers.common import files


def write(statement: PrivacyStatement, about: files.PathLike) -> None:
    """Writes FILE.privacy.json and FILE.privacy.md beside a file, privacy.json and privacy.md into a folder."""
    for place, text in zip(places(about), (statement.json(), statement.markdown())):
        with files.atomic_write(place) as file:
            file.write(text)


def withdraw(about: files.PathLike) -> None:
    """Removes a statement, if any, before more is released than it states."""
    found = [place for place in places(about) if place.exists()]
    for place in found:
        place.unlink()
    if found:  # on disk before what it does not count
        sync_folder(found[0].parent)


def places(about: files.PathLike) -> tuple[pathlib.Path, pathlib.Path]:
    """Where the statement about a file or folder goes: as JSON and in words."""
    about = pathlib.Path(about)
    stem = about / "privacy" if about.is_dir() else about.with_name(f"{about.name}.privacy")
    return stem.with_name(f"{stem.name}.json"), stem.with_name(f"{stem.name}.md")
