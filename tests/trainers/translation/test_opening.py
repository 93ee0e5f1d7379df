"""What a member makes of the server's file: whole records of a cut one, refusals of one that contradicts itself."""

import numpy as np
import pytest

from tests.trainers.translation.test_protocol import Setting
from trainers.common.errors import InputError
from trainers.translation import layout


@pytest.fixture
def setting(tmp_path):
    return Setting(tmp_path)


def test_a_cut_file_gives_its_whole_records(setting):
    setting.shuffle()
    data = (setting.folder / "shuffled").read_bytes()
    (setting.folder / "cut").write_bytes(data[: -34 - 5])
    report = setting.open("cut")
    assert report.accepted == 4
    assert report.refused == {"truncated": 2}
    assert report.details == ("2 records: truncated",)


def test_a_changed_header_or_digest_does_not_pass_in_silence(setting):
    setting.shuffle()
    data = (setting.folder / "shuffled").read_bytes()
    before = set(setting.folder.iterdir())

    def variant(name, changed):
        assert changed != data
        (setting.folder / name).write_bytes(changed)
        return name

    fewer = variant("fewer", data.replace(b'"count": "000000000006"', b'"count": "000000000002"'))
    none = variant("none", data.replace(b'"count": "000000000006"', b'"count": "000000000000"'))
    more = variant("more", data.replace(b'"count": "000000000006"', b'"count": "000000000009"'))
    stray = variant("stray", data + b"\0" * 5)
    for name in (fewer, none, stray):
        with pytest.raises(InputError, match=r"damaged .*its header says"):
            setting.open(name)
    assert set(setting.folder.iterdir()) - before == {setting.folder / n for n in (fewer, none, more, stray)}
    assert setting.open(more, into="joint-more").refused == {"truncated": 3}
    _, sealed = layout.read(setting.folder / "shuffled", layout.SHUFFLED)
    swapped = data[: -sealed.size] + np.asarray(sealed)[::-1].tobytes()  # each record sound, the file another
    report = setting.open(variant("swapped", swapped), into="joint-swapped")
    assert report.accepted == 6
    assert report.details == ("the file is not the one that its header speaks of: changed on its way",)


def test_an_empty_result_is_no_memory(tmp_path):
    empty = Setting(tmp_path, sizes=(0, 0, 0))
    empty.shuffle()
    with pytest.raises(InputError, match="could be opened: it holds none"):
        empty.open()
    assert not (tmp_path / "joint").exists()


def test_a_member_notices_records_that_the_server_dropped(setting):
    setting.shuffle(setting.uploads[1:])
    report = setting.open(own_upload=setting.uploads[0])
    assert report.details == ("4 of your own records: left out by the server",)
