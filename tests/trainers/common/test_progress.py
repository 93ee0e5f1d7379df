"""Progress bars: seen while there is something to do."""

import pytest

from trainers.common import progress


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({"total": 3}, True),
        ({"total": 0}, False),
        ({"total": 6, "initial": 6}, False),
        ({"items": []}, False),
        ({"items": ["a"]}, True),
        ({"items": iter([])}, True),  # nobody knows beforehand
    ],
)
def test_a_bar_with_nothing_to_do_is_not_shown(capsys, options, seen):
    with progress.bar(what="packing", unit="box", **options) as bar:
        for _ in bar if "items" in options else ():
            pass
        bar.update(0)
    assert ("packing" in capsys.readouterr().err) == seen
