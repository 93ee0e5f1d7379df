"""A privacy statement beside what it is about, in the one place where `jaxpriv account report` looks for it."""

import pathlib

from accounting import PrivacyStatement
from trainers.common import files


def write(statement: PrivacyStatement, about: files.PathLike) -> None:
    """Writes FILE.privacy.json and FILE.privacy.md beside a file, privacy.json and privacy.md into a folder."""
    about = pathlib.Path(about)
    stem = str(about / "privacy") if about.is_dir() else f"{about}.privacy"
    for ending, text in ((".json", statement.json()), (".md", statement.markdown())):
        with files.atomic_write(stem + ending) as file:
            file.write(text)
