"""A privacy statement beside what it is about."""

import os

from accounting import PrivacyStatement
from trainers.common import files


def write(statement: PrivacyStatement, stem: files.PathLike) -> None:
    """Writes `stem`.json and `stem`.md."""
    for ending, text in ((".json", statement.json()), (".md", statement.markdown())):
        with files.atomic_write(os.fspath(stem) + ending) as file:
            file.write(text)
