"""What anybody may send without a key, and files made to break a reader: refused in one line, nothing lost."""

import json

import numpy as np
import pytest

from tests.trainers.translation.test_cli import run
from tests.trainers.translation.test_protocol import Setting, codebook, facts
from trainers.common.errors import InputError
from trainers.translation import crypto, data, datastore, layout, protocol

DEEP = "[" * 60_000


@pytest.fixture
def setting(tmp_path):
    return Setting(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"record_bytes": float("inf")},
        {"count": float("inf")},
        {"count": 1.0},
        {"count": "9" * 4000},
        {"count": 10**18},
        {"count": -1},
        {"count": "4 "},
        {"record_bytes": True},
        DEEP,
        "[1, 2]",
    ],
    ids=str,
)
def test_a_forged_header_harms_no_other_upload(setting, change):
    """The good upload beside it is shuffled, and a file from the server with such a header is refused, too."""
    setting.shuffle()
    for kind, name in ((layout.UPLOAD, "upload0"), (layout.SHUFFLED, "shuffled")):
        whole = (setting.folder / name).read_bytes()
        length = int.from_bytes(whole[8:12], "little")
        header = json.loads(whole[12 : 12 + length])
        text = (change if isinstance(change, str) else json.dumps({**header, **change})).encode()
        forged = kind + len(text).to_bytes(4, "little") + text + whole[12 + length :]
        (setting.folder / f"forged-{name}").write_bytes(forged.replace(b"Infinity", b"1e999"))
    report = setting.shuffle([setting.folder / "forged-upload0", setting.uploads[2]], name="out")
    assert report.refused == {"damaged": 1}
    assert report.accepted == 2
    with pytest.raises(InputError, match="damaged"):
        setting.open("forged-shuffled")


@pytest.mark.parametrize("depth", [0, 400, 900])
@pytest.mark.parametrize("field", ["round", "client"])
def test_names_that_are_none_can_be_told(setting, field, depth):
    """Also those that cannot be printed, and lists too deep to be written out."""
    header = {"round": setting.round.id, "client": "it"}
    sealed = np.zeros((1, 34), np.uint8)
    layout.write(setting.folder / "odd", layout.UPLOAD, {**header, field: "mark"}, sealed)
    odd = json.dumps("\ud800" * 200) if not depth else "[" * depth + "]" * depth
    whole = (setting.folder / "odd").read_bytes()
    length = int.from_bytes(whole[8:12], "little")
    text = whole[12 : 12 + length].replace(b'"mark"', odd.encode())
    (setting.folder / "odd").write_bytes(
        whole[:8] + len(text).to_bytes(4, "little") + text + whole[12 + length :]
    )
    report = setting.shuffle([setting.folder / "odd", setting.uploads[0]], name="out")
    assert report.accepted == 4
    assert sum(report.refused.values()) == 1
    assert all(len(line.encode()) < 1000 for line in report.details)


@pytest.mark.parametrize("said", ["x" * 60_000, {"delta": [1]}, {"delta": "9" * 2000}, [1]])
def test_a_member_cannot_fill_the_header_of_all(setting, said):
    """What is said of a release goes to everybody: a long one would make the shuffled file unreadable."""
    sealed = crypto.seal(setting.key, np.zeros((1, 6), np.uint8), context=setting.round.context())
    header = {"round": setting.round.id, "client": "law", "release": said}
    sign = lambda message: crypto.sign(setting.secrets[2], message)
    layout.write(setting.folder / "long", layout.UPLOAD, header, sealed, sign=sign)
    report = setting.shuffle([setting.uploads[0], setting.folder / "long"])
    assert (report.accepted, report.refused) == (4, {"damaged": 1})


def test_records_of_values_that_no_text_has_are_malformed(setting):
    """Padding or the unknown piece as a neighbour's value would make translations empty."""
    values = np.array([0, 1, 2, 59_999])
    records = layout.pack(facts(), np.zeros((4, 4), np.uint8), values)
    sealed = crypto.seal(setting.key, records, context=setting.round.context())
    header = {"round": setting.round.id, "client": "law"}
    sign = lambda message: crypto.sign(setting.secrets[2], message)
    layout.write(setting.folder / "odd", layout.UPLOAD, header, sealed, sign=sign)
    setting.shuffle([setting.folder / "odd"])
    assert setting.open().refused == {"malformed": 2}
    assert sorted(datastore.open_store(setting.folder / "joint").values) == [2, 59_999]


def test_nested_json_is_one_line(setting, small_run, tmp_path):
    place = tmp_path / "deep.json"
    place.write_text('{"format": ' + DEEP)
    place.chmod(0o600)
    for read in (protocol.read_round, crypto.load_secret, crypto.load_public):
        with pytest.raises(InputError, match="is not JSON"):
            read(place)
    (setting.folder / "store0" / "manifest.json").write_text(DEEP)
    with pytest.raises(InputError, match="is damaged"):
        datastore.open_store(setting.folder / "store0")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.json").write_text(DEEP)
    with pytest.raises(InputError, match="describes no model"):
        data.load(tmp_path / "model")


def test_share_and_shuffle_overwrite_nothing(tmp_path, capsys):
    """Not even a member's private key, nor the server's own input."""
    rng = np.random.default_rng(0)
    secret = crypto.generate("it")
    crypto.save_secret(tmp_path / "it.secret.json", secret)
    crypto.save_public(tmp_path / "it.public.json", secret.public())
    made = protocol.make_round(tmp_path / "round.json", secret, [secret.public()], facts(), quota=9)
    datastore.create(tmp_path / "store", facts(), codebook())
    keys = rng.integers(0, 256, (3, 4), np.uint8)
    datastore.append(tmp_path / "store", facts(), keys=keys, values=np.arange(3) + 5)
    assert made.quota == 9
    place = ["--round", tmp_path / "round.json"]
    share = ["share", *place, "--secret", tmp_path / "it.secret.json", "--store", tmp_path / "store"]
    shuffle = ["shuffle", *place, "--uploads", tmp_path / "up"]
    assert run(capsys, *share, "--out", tmp_path / "up")[0] == 0
    before = {p: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    for argv in (share, shuffle):
        for out in ("it.secret.json", "up", "round.json"):
            status, said = run(capsys, *argv, "--out", tmp_path / out)
            assert status == 2
            assert f"--out {tmp_path / out} exists" in said
    assert {p: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == before
    assert run(capsys, *shuffle, "--out", tmp_path / "all")[0] == 0
