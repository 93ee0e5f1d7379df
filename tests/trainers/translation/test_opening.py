"""What a member makes of the server's file: whole records of a cut one, refusals of one that contradicts itself."""

import dataclasses

import numpy as np
import pytest

from tests.trainers.translation.test_protocol import Setting, codebook, facts
from trainers.common.errors import InputError
from trainers.translation import crypto, datastore, layout, protocol, release, roles


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


class Commands:
    """Two members with noisy histograms of one bucket each; `said` is what their uploads say of them."""

    def __init__(self, folder, said):
        self.folder, form = folder, facts(weighted=True)
        secrets = [crypto.generate(name) for name in ("it", "law")]
        members = [s.public() for s in secrets]
        made = protocol.make_round(folder / "round.json", secrets[0], members, form, quota=9)
        crypto.save_secret(folder / "it.secret.json", secrets[0])
        crypto.save_public(folder / "law.public.json", members[1])
        datastore.save_codebook(folder / "codebook.npz", codebook())
        self.uploads = []
        for number, secret in enumerate(secrets):
            place = folder / f"store{number}"
            datastore.create(place, form, codebook())
            record = dict(keys=np.full((1, 4), number, np.uint8), values=np.array([7]), weights=np.ones(1))
            datastore.append(place, form, **record)
            key = protocol.join(made, secret, members)
            self.uploads.append(str(folder / f"upload{number}"))
            store = datastore.open_store(place)
            protocol.share(self.uploads[-1], made, key, secret, store, release=said)

    def shuffle(self, uploads, out="all", **options):
        place = str(self.folder / "round.json")
        return roles.run_shuffle(
            roles.ShuffleConfig(round=place, uploads=tuple(uploads), out=str(self.folder / out), **options)
        )

    def open(self, shuffled="all", out="joint", codebook="codebook.npz", **options):
        at = lambda name: str(self.folder / name)
        return roles.run_open(
            roles.OpenConfig(
                round=at("round.json"),
                secret=at("it.secret.json"),
                members=(at("law.public.json"),),
                shuffled=at(shuffled),
                codebook=codebook and at(codebook),
                out=at(out),
                **options,
            )
        )


MADE = release.ReleaseConfig(
    max_buckets=4, stddev=9.0, threshold=60.0, unit="sentence", adjacency="add-remove"
)


@pytest.mark.parametrize("change", [{"max_buckets": 10**400}, {"delta": 0.999}, {"stddev": 10**400}])
def test_an_upload_that_claims_nonsense_stops_neither_server_nor_members(tmp_path, change):
    commands = Commands(tmp_path, {**release.as_json(MADE, delta=1e-6), **change})
    for result, text in (commands.shuffle(commands.uploads), commands.open()):
        assert result["records"] == 2
        assert "epsilon: none that can be stated" in result["guarantee"]
        assert len(text) < 1000
    assert not (tmp_path / "joint" / "privacy.json").exists()


def test_settings_that_the_server_leaves_out_or_changes_are_missed(tmp_path):
    """The statement is that of the weakest histogram: one fewer, or another of one's own, would promise too much."""
    commands = Commands(tmp_path, release.as_json(MADE, delta=1e-6))
    commands.shuffle(commands.uploads)
    header, sealed = layout.read(tmp_path / "all", layout.SHUFFLED)
    said = header["releases"]
    own = {"own_upload": commands.uploads[0]}
    for name, told, options in (
        ("fewer", said[:1], {}),
        ("none", [], {}),
        ("many", said * 5_000, {}),
        ("other", [{**one, "stddev": 900.0} for one in said], own),
    ):
        changed = {key: header[key] for key in ("round", "uploads", "missing")} | {"releases": told}
        changed |= {"uploads": len(told)} if name == "many" else {}
        layout.write(tmp_path / name, layout.SHUFFLED, changed, np.asarray(sealed))
        result, _ = commands.open(name, f"joint-{name}", **options)
        assert "epsilon: none that can be stated" in result["guarantee"]
        assert not (tmp_path / f"joint-{name}" / "privacy.json").exists()
    assert any("own histogram's settings" in line for line in result["details"])
    result, _ = commands.open("all", "joint", **own)
    assert "-differential privacy" in result["guarantee"]
    assert not result["details"]


def test_a_joint_memory_appears_with_its_statement_or_not_at_all(tmp_path, monkeypatch):
    commands = Commands(tmp_path, release.as_json(MADE, delta=1e-6))
    commands.shuffle(commands.uploads)
    with monkeypatch.context() as patched:
        patched.setattr(release, "joint_statement", lambda said: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            commands.open()
    assert not [p for p in tmp_path.iterdir() if "joint" in p.name]
    result, _ = commands.open()
    assert "-differential privacy" in result["guarantee"]
    assert (tmp_path / "joint" / "privacy.json").is_file()
    assert datastore.open_store(tmp_path / "joint").count == 2


def test_a_shuffle_of_one_upload_says_that_it_hides_nobody(tmp_path):
    commands = Commands(tmp_path, dataclasses.asdict(MADE) | {"delta": 1e-6})
    result, text = commands.shuffle(commands.uploads[:1], out="one")
    assert "all members know whose these are" in result["warning"]
    assert text.startswith("warning: only one upload was accepted")
    result, text = commands.shuffle(commands.uploads)
    assert "warning" not in result
    assert "warning" not in text


def test_members_without_an_accepted_upload_are_named(tmp_path):
    """Whether the server was not given it or refused it, to who runs the server and to who opens the result."""
    commands = Commands(tmp_path, None)
    law = tmp_path / "upload1"
    changed = law.read_bytes()[:-1] + bytes([law.read_bytes()[-1] ^ 1])
    (tmp_path / "tampered").write_bytes(changed)
    for number, uploads in enumerate((commands.uploads[:1], [commands.uploads[0], tmp_path / "tampered"])):
        shuffled = commands.shuffle(map(str, uploads), out=f"all{number}")
        for result, text in (shuffled, commands.open(f"all{number}", f"joint{number}")):
            assert (result["missing"], result["records"]) == (["law"], 1)
            assert "\nwithout law: no upload of theirs was accepted" in text
        with pytest.raises(InputError, match=r"no upload of law was accepted.*--require-all"):
            commands.shuffle(map(str, uploads), out="none", require_all=True)
        assert not (tmp_path / "none").exists()
    shuffled = commands.shuffle(commands.uploads, require_all=True)
    for result, text in (shuffled, commands.open()):
        assert result["missing"] == []
        assert "\nwithout" not in text


@pytest.mark.parametrize("said", [None, "law", 7, ["nobody", 7, None, ["law"], {}]])
def test_what_a_header_says_of_members_is_checked(setting, said):
    setting.shuffle()
    header, sealed = layout.read(setting.folder / "shuffled", layout.SHUFFLED)
    told = {"round": header["round"], "uploads": 3, "missing": said}
    layout.write(setting.folder / "other", layout.SHUFFLED, told, np.asarray(sealed))
    report = setting.open("other")
    assert (report.accepted, report.missing) == (6, ())


def test_a_codebook_that_is_not_the_rounds_is_one_line(tmp_path):
    commands = Commands(tmp_path, None)
    commands.shuffle(commands.uploads)
    other = codebook()._replace(centroids=codebook().centroids + 1)
    datastore.save_codebook(tmp_path / "other.npz", other)
    with pytest.raises(InputError, match="--codebook FILE is needed: this round has one"):
        commands.open(codebook=None)
    with pytest.raises(InputError, match=r"other\.npz is not the round's, which has another one"):
        commands.open(codebook="other.npz")
    assert not [p for p in tmp_path.iterdir() if "joint" in p.name]
