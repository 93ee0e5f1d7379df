"""A round end to end: what is honest arrives, the rest is refused under its name, the server reads nothing."""

import dataclasses
import itertools
import json
import re

import numpy as np
import pytest

from jaxpriv import pq
from trainers.common.errors import InputError
from trainers.translation import crypto, datastore, layout, protocol

RARE = np.array([54_321, 59_007, 51_234, 58_765])  # values that only one client has, one after another


def codebook():
    rng = np.random.default_rng(0)
    return pq.Codebook(np.asarray(rng.standard_normal((4, 256, 2)), np.float32))


def facts(**changes):
    plain = dict(
        model="m" * 64,
        dim=8,
        width=4,
        dtype="uint8",
        coding="pq",
        codebook=datastore.codebook_digest(codebook()),
        key="output",
        vocabulary_size=60_000,
    )
    return datastore.Facts(**{**plain, **changes})


class Setting:
    """Three members with 4, 0 and 2 records, their uploads, and what the server is given."""

    def __init__(self, folder, sizes=(4, 0, 2), quota=1000):
        self.folder = folder
        self.secrets = [crypto.generate(name) for name in ("it", "medical", "law")]
        self.members = [s.public() for s in self.secrets]
        self.round = protocol.make_round(
            folder / "round.json", self.secrets[0], self.members, facts(), quota=quota
        )
        self.stores, self.uploads = [], []
        self.key = protocol.join(self.round, self.secrets[1], self.members)
        rng = np.random.default_rng(1)
        for i, n in enumerate(sizes):
            datastore.create(folder / f"store{i}", facts(), codebook())
            keys = rng.integers(0, 256, (n, 4), np.uint8)
            values = rng.integers(0, 60_000, n)
            if i == 0:
                values[: len(RARE)] = RARE[:n]
            datastore.append(folder / f"store{i}", facts(), keys=keys, values=values)
            self.stores.append(datastore.open_store(folder / f"store{i}"))
            self.uploads.append(folder / f"upload{i}")
            protocol.share(self.uploads[i], self.round, self.key, self.secrets[i], self.stores[i])

    def shuffle(self, uploads=None, name="shuffled"):
        return protocol.shuffle(self.folder / name, self.round, self.uploads if uploads is None else uploads)

    def open(self, name="shuffled", into="joint", **options):
        return protocol.open_shuffled(
            self.folder / into, self.round, self.key, self.folder / name, codebook(), **options
        )


@pytest.fixture
def setting(tmp_path):
    return Setting(tmp_path)


def as_multiset(*stores):
    return sorted((*key, int(value)) for s in stores for key, value in zip(s.keys.tolist(), s.values))


def test_a_round_joins_all_memories(setting):
    """Of three clients with 4, 0 and 2 pairs (AC44)."""
    report = setting.shuffle()
    assert report.accepted == 6
    assert report.refused == {}
    opened = setting.open(own_upload=setting.uploads[0])
    assert opened.accepted == 6
    assert opened.details == ()
    joint = datastore.open_store(setting.folder / "joint", facts=facts())
    assert as_multiset(joint) == as_multiset(*setting.stores)


def test_records_have_the_stated_size(setting):
    """64 codes and a 2-byte value are 66 bytes, 94 with nonce and tag."""
    assert layout.record_bytes(facts(width=64, dim=128)) == 66
    assert layout.record_bytes(facts(width=64, dim=128)) + crypto.OVERHEAD == 94
    assert layout.record_bytes(facts(vocabulary_size=65_537)) == 4 + 4
    report = setting.shuffle()
    sizes = [path.stat().st_size for path in setting.uploads]
    assert report.bytes_read == sum(sizes)
    assert report.bytes_written == (setting.folder / "shuffled").stat().st_size
    assert sizes[0] - sizes[1] == 4 * (4 + 2 + 28) - len("medical") + len(
        "it"
    )  # the sender's name is in the header


def test_two_shuffles_differ_and_neither_follows_the_uploads(tmp_path):
    """300 records in three orders (AC44)."""
    big = Setting(tmp_path, sizes=(200, 0, 100))
    big.shuffle(name="one")
    big.shuffle(name="two")
    one, two = (layout.read(tmp_path / name, layout.SHUFFLED)[1] for name in ("one", "two"))
    given = np.concatenate([layout.read(u, layout.UPLOAD)[1] for u in big.uploads])
    assert sorted(map(bytes, one)) == sorted(map(bytes, two)) == sorted(map(bytes, given))
    position = {bytes(row): i for i, row in enumerate(given)}
    orders = [np.array([position[bytes(row)] for row in shuffled]) for shuffled in (one, two)]
    for a, b in ((orders[0], orders[1]), (orders[0], np.arange(300)), (orders[1], np.arange(300))):
        assert (
            a == b
        ).sum() < 12  # a uniform permutation of 300 agrees in 1 place on average, in 12 once in 10^9


def test_the_server_reads_neither_values_nor_codes_nor_keys(tmp_path):
    """Searched for whole records, keys, secrets and the rare sequence (AC49)."""
    many = Setting(tmp_path, sizes=(50, 20, 30))
    many.shuffle()
    seen = b"".join(
        path.read_bytes() for path in [tmp_path / "round.json", tmp_path / "shuffled", *many.uploads]
    )
    plain = [layout.pack(facts(), store.keys, store.values) for store in many.stores]
    assert not any(record.tobytes() in seen for records in plain for record in records)
    # 100 keys of 4 bytes: one of them is in the noise once in some 3,000 runs, two once in 10^7.
    assert sum(key.tobytes() in seen for store in many.stores for key in store.keys) < 2
    for secret in (many.key, *(k for s in many.secrets for k in (s.wrap_key, s.sign_key))):
        assert secret not in seen
        assert secret.hex().encode() not in seen
    # The rare sequence is there for whoever may read, in columns and in records, and nowhere for the server.
    at_home = (tmp_path / "store0" / "values.bin").read_bytes() + plain[0][:, 4:].tobytes()
    for sequence in (RARE.astype("<i4").tobytes(), RARE.astype("<u2").tobytes()):
        assert sequence in at_home
        assert sequence not in seen
    # As words: among the hexadecimal digits of keys and digests five such digits turn up by chance.
    assert not any(re.search(rf"\b{value}\b".encode(), seen) for value in RARE)


def corrupt(path, position, value=None):
    data = bytearray(path.read_bytes())
    data[position] = data[position] ^ 1 if value is None else value
    path.write_bytes(bytes(data))


def test_bad_uploads_are_refused_by_name(setting, tmp_path_factory):
    other = Setting(tmp_path_factory.mktemp("other"))
    folder = setting.folder

    def variant(name, data):
        (folder / name).write_bytes(data)
        return folder / name

    good = setting.uploads[0].read_bytes()
    changed = bytearray(good)
    changed[-1] ^= 1
    header = bytearray(good)
    header[good.index(b'"it"') + 1 : good.index(b'"it"') + 3] = b"It"
    claims = good.replace(b'"client": "it"', b'"client": "law"'[: len(b'"client": "it"')])
    strangers = crypto.generate("stranger")
    protocol.share(folder / "strange", setting.round, setting.key, strangers, setting.stores[0])
    impostor = dataclasses.replace(strangers, name="law")
    protocol.share(folder / "impostor", setting.round, setting.key, impostor, setting.stores[0])
    report = setting.shuffle(
        [
            setting.uploads[0],
            setting.uploads[0],
            variant("changed", bytes(changed)),
            variant("short", good[:-1]),
            variant("stub", good[:30]),
            variant("renamed", bytes(header)),
            variant("claims", claims),
            variant("text", b"hello"),
            variant("empty", b""),
            folder / "absent",
            folder / "strange",
            folder / "impostor",
            other.uploads[2],
        ]
    )
    assert report.accepted == 4
    assert report.refused == {
        "replayed upload": 1,
        "changed": 1,
        "truncated": 2,
        "unknown member": 2,
        "damaged": 1,
        "not an upload": 2,
        "missing": 1,
        "bad signature": 1,
        "another round": 1,
    }
    assert len(report.details) == 12
    assert f"{folder / 'changed'}: changed" in report.details[1]


def test_quota(tmp_path):
    small = Setting(tmp_path, sizes=(4, 0, 2), quota=4)
    datastore.append(
        tmp_path / "store0", facts(), keys=np.zeros((1, 4), np.uint8), values=np.zeros(1, np.int32)
    )
    store = datastore.open_store(tmp_path / "store0")
    with pytest.raises(InputError, match="quota of 4"):
        protocol.share(tmp_path / "more", small.round, small.key, small.secrets[0], store)
    # One who does not ask its own client: the server counts, too.
    generous = dataclasses.replace(small.round, quota=100)
    protocol.share(tmp_path / "more", generous, small.key, small.secrets[0], store)
    report = small.shuffle([tmp_path / "more", *small.uploads[1:]])
    assert report.refused == {"over quota": 1}
    assert report.accepted == 2


@pytest.mark.parametrize(("name", "value"), [("7", 7), ("None", None), ("True", True), ("['it']", ["it"])])
def test_a_member_is_named_by_text_alone(tmp_path, name, value):
    """Otherwise the number 7 sends in the name of the member "7", once more than that one may."""
    secret = crypto.Secret(name=name, wrap_key=b"\1" * 32, sign_key=b"\2" * 32)
    made = protocol.make_round(tmp_path / "round.json", secret, [secret.public()], facts(), quota=9)
    sealed = crypto.seal(crypto.new_data_key(), np.zeros((3, 6), np.uint8), context=made.context())
    for file, client in (("one", name), ("two", value)):
        header = {"round": made.id, "client": client, "upload": file}
        layout.write(tmp_path / file, layout.UPLOAD, header, sealed[:], sign=lambda m: crypto.sign(secret, m))
    report = protocol.shuffle(tmp_path / "out", made, [tmp_path / "one", tmp_path / "two"])
    assert report.accepted == 3
    assert report.refused == {"unknown member": 1}


def test_no_accepted_upload_is_an_error(setting):
    with pytest.raises(InputError, match=r"no upload was accepted.*missing"):
        setting.shuffle([setting.folder / "absent"])
    with pytest.raises(InputError, match="no upload was given"):
        setting.shuffle([])
    assert not (setting.folder / "shuffled").exists()


def test_records_replayed_by_another_member_are_dropped(setting):
    """A member copies another's ciphertexts into its own upload."""
    _, sealed = layout.read(setting.uploads[0], layout.UPLOAD)
    header = {"round": setting.round.id, "client": "law", "upload": "0" * 32}
    sign = lambda message: crypto.sign(setting.secrets[2], message)
    layout.write(setting.folder / "copy", layout.UPLOAD, header, np.asarray(sealed), sign=sign)
    report = setting.shuffle([setting.uploads[0], setting.folder / "copy"])
    assert report.accepted == 4
    assert report.refused == {"replayed record": 4}


def rewrite(setting, change):
    header, sealed = layout.read(setting.folder / "shuffled", layout.SHUFFLED)
    out = change(np.asarray(sealed).copy())
    layout.write(
        setting.folder / "changed",
        layout.SHUFFLED,
        {"round": header["round"]},
        out,
        record_bytes=sealed.shape[1],
    )


def test_bad_records_are_counted_by_name_and_the_rest_arrives(setting, tmp_path_factory):
    setting.shuffle()
    foreign = crypto.seal(crypto.new_data_key(), np.zeros((3, 6), np.uint8), context=setting.round.context())
    unsound = layout.pack(facts(), np.zeros((2, 4), np.uint8), np.array([60_000, 65_535]))
    malformed = crypto.seal(setting.key, unsound, context=setting.round.context())

    def change(sealed):
        sealed[0, 20] ^= 1
        return np.concatenate([sealed, sealed[1:3], foreign, malformed])

    rewrite(setting, change)
    report = setting.open("changed")
    assert report.accepted == 5
    assert report.refused == {"tampered or foreign": 4, "replayed": 2, "malformed": 2}
    assert datastore.open_store(setting.folder / "joint").count == 5


def test_nothing_is_left_behind_when_nothing_opens(setting):
    setting.shuffle()
    before = set(setting.folder.iterdir())
    with pytest.raises(InputError, match=r"no record of .* could be opened: 6 records: tampered or foreign"):
        protocol.open_shuffled(
            setting.folder / "joint",
            setting.round,
            crypto.new_data_key(),
            setting.folder / "shuffled",
            codebook(),
        )
    with pytest.raises(InputError, match="not a shuffled file"):
        setting.open("upload0")
    with pytest.raises(InputError, match="missing"):
        setting.open("absent")
    assert set(setting.folder.iterdir()) == before
    setting.open()
    with pytest.raises(InputError, match="exists already; choose another folder"):
        setting.open()


def test_filtered_records_do_not_leave(setting):
    keep = np.array([True, False, True, False])
    report = protocol.share(
        setting.folder / "some", setting.round, setting.key, setting.secrets[0], setting.stores[0], keep=keep
    )
    assert report.accepted == 2
    assert report.refused == {"filtered": 2}
    setting.shuffle([setting.folder / "some"])
    setting.open()
    kept = datastore.open_store(setting.folder / "joint")
    assert sorted(kept.values) == sorted(setting.stores[0].values[keep])


def test_a_memory_of_another_model_is_not_shared(setting):
    datastore.create(setting.folder / "other", facts(model="x" * 64), codebook())
    other = datastore.open_store(setting.folder / "other")
    with pytest.raises(InputError, match="differ in model"):
        protocol.share(setting.folder / "up", setting.round, setting.key, setting.secrets[0], other)
    assert not (setting.folder / "up").exists()


def test_round_files(setting):
    path = setting.folder / "round.json"
    read = protocol.read_round(path)
    assert read == setting.round
    keys = {protocol.join(read, secret, setting.members) for secret in setting.secrets}
    assert keys == {setting.key}
    assert setting.key.hex() not in path.read_text()
    data = json.loads(path.read_text())
    for change in ({"quota": 5}, {"maker": "law"}, {"signature": "00" * 64}, {"maker": "nobody"}):
        path.write_text(json.dumps({**data, **change}))
        with pytest.raises(InputError, match="does not carry its maker's signature"):
            protocol.read_round(path)
    path.write_text(json.dumps({**data, "members": 3}))
    with pytest.raises(InputError, match="is damaged"):
        protocol.read_round(path)


def test_a_server_cannot_slip_its_own_key_in(setting):
    """It makes a round in which a member's keys are its own, under the maker's name."""
    server = crypto.generate("it")
    forged = protocol.make_round(
        setting.folder / "forged.json", server, [server.public(), *setting.members[1:]], facts(), quota=9
    )
    with pytest.raises(InputError, match="not those of the public file you gave; compare fingerprints"):
        protocol.join(forged, setting.secrets[1], setting.members)
    extra = protocol.make_round(
        setting.folder / "extra.json",
        setting.secrets[0],
        [*setting.members, crypto.generate("spy").public()],
        facts(),
        quota=9,
    )
    with pytest.raises(InputError, match="'spy' whose public file you did not give"):
        protocol.join(extra, setting.secrets[1], setting.members)
    outsider = crypto.generate("outsider")
    with pytest.raises(InputError, match="not a member of this round"):
        protocol.join(setting.round, outsider, setting.members)


def test_rounds_that_cannot_work_are_refused(setting):
    make = lambda secret, members, quota=5, name="r": protocol.make_round(
        setting.folder / name, secret, members, facts(), quota=quota
    )
    it = setting.secrets[0]
    with pytest.raises(InputError, match="is not among its members"):
        make(it, setting.members[1:])
    with pytest.raises(InputError, match="share a name or a key"):
        make(it, [*setting.members, setting.members[0]])
    with pytest.raises(InputError, match="quota must be at least 1"):
        make(it, setting.members, quota=0)
    with pytest.raises(InputError, match="exists; choose another name"):
        make(it, setting.members, name="round.json")


def test_simulation_takes_the_same_path(tmp_path, setting):
    names = ("it", "medical", "law")
    joint, traffic = protocol.simulate(
        tmp_path / "run", dict(zip(names, setting.stores)), codebook(), quota=10
    )
    assert as_multiset(joint) == as_multiset(*setting.stores)
    assert traffic.down == (tmp_path / "run" / "shuffled.bin").stat().st_size
    assert set(traffic.up) == set(names)
    assert sorted(traffic.up.values()) == sorted(
        p.stat().st_size for p in (tmp_path / "run").glob("upload-*")
    )


def test_float_and_weighted_records_survive(tmp_path):
    """Exact keys (no K-encryption) and noisy counts travel in the same records."""
    rng = np.random.default_rng(3)
    for dtype, weighted in itertools.product(("float32", "float16"), (False, True)):
        what = facts(
            coding="none", codebook="", dtype=dtype, width=8, weighted=weighted, vocabulary_size=70_000
        )
        keys, values = rng.standard_normal((5, 8)).astype(dtype), rng.integers(0, 70_000, 5)
        weights = rng.random(5).astype(np.float32) + 1 if weighted else None
        records = layout.pack(what, keys, values, weights)
        assert records.shape == (5, layout.record_bytes(what))
        got = layout.unpack(what, records)
        assert got[3].all()
        assert (got[0] == keys).all()
        assert (got[1] == values).all()
        assert (got[2] == weights).all() if weighted else got[2] is None
        bad = layout.pack(what, np.where(np.eye(5, 8), np.nan, keys).astype(dtype), values, weights)
        assert not layout.unpack(what, bad)[3].any()
    what = facts(coding="none", codebook="", dtype="float32", width=8, vocabulary_size=70_000)
    far = np.where(np.eye(5, 8) * (np.arange(5) > 0)[:, None], 1e10, 1.0).astype(
        "f4"
    )  # one number in each but the first
    assert layout.unpack(what, layout.pack(what, far, values, None))[3].tolist() == [True] + [False] * 4
    what = facts(coding="pq", width=4, dtype="uint8")
    codes = np.array([[0, 1, 2, 63], [0, 1, 2, 64]], np.uint8)
    records = layout.pack(what, codes, np.array([7, 7]), None)
    assert layout.unpack(what, records, centroids=64)[3].tolist() == [True, False]
    assert layout.unpack(what, records)[3].all()


def mutated(rng, data):
    """Some bytes changed, cut off or put in."""
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        kind, place = rng.random(), int(rng.integers(len(data)))
        if kind < 0.6:
            data[place] = int(rng.integers(256))
        elif kind < 0.8:
            del data[max(place, 1) :]
        else:
            data[place:place] = rng.bytes(int(rng.choice([1, 4, 50])))
    return bytes(data)


def test_damaged_files_end_in_one_line_and_changed_uploads_never_pass(setting):
    """Whatever bytes arrive: a named refusal or InputError, no other exception."""
    setting.shuffle()
    folder, rng, said = setting.folder, np.random.default_rng(0), []
    given = {
        name: (folder / name).read_bytes()
        for name in ("upload0", "shuffled", "round.json", "store0/manifest.json")
    }
    for number in range(150):
        for name, data in given.items():
            (folder / "damaged").write_bytes(mutated(rng, data))
            changed = (folder / "damaged").read_bytes() != data
            try:
                if name == "upload0":
                    report = setting.shuffle([folder / "damaged", setting.uploads[1]], name="out")
                    assert bool(report.refused) == changed
                elif name == "shuffled":
                    setting.open("damaged", into=f"joint{number}")
                elif name == "round.json":
                    assert protocol.read_round(folder / "damaged") == setting.round
                else:
                    (folder / "store0" / "manifest.json").write_bytes((folder / "damaged").read_bytes())
                    datastore.open_store(folder / "store0", facts=facts())
            except InputError as error:
                said.append(str(error))
    assert len(said) > 100
    assert not any("\n" in line for line in said)


@pytest.mark.parametrize(
    "change",
    [
        {"count": True},
        {"count": 1e400},
        {"dim": "8"},
        {"width": None},
        {"model": 3},
        {"weighted": "no"},
        {"extra": 1},
    ],
)
def test_manifests_of_wrong_types_are_damaged(setting, change):
    path = setting.folder / "store0" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(InputError, match="is damaged"):
        datastore.open_store(setting.folder / "store0")


def test_a_shuffled_file_without_its_round_is_refused(setting):
    setting.shuffle()
    _, sealed = layout.read(setting.folder / "shuffled", layout.SHUFFLED)
    layout.write(setting.folder / "bare", layout.SHUFFLED, {}, np.asarray(sealed))
    with pytest.raises(InputError, match="another round"):
        setting.open("bare")
