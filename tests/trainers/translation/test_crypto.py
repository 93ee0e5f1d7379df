"""Sealed records are secret, authentic and equally long; keys reach the right member only."""

import dataclasses
import os
import stat

import numpy as np
import pytest
import scipy.stats

from trainers.common.errors import InputError
from trainers.translation import crypto

CONTEXT = b"round and codebook"


def some_records(n=40, length=10):
    return np.random.default_rng(n).integers(0, 256, (n, length), np.uint8)


def test_records_come_back():
    key, records = crypto.new_data_key(), some_records()
    sealed = crypto.seal(key, records, context=CONTEXT)
    assert sealed.shape == (40, 10 + 28)
    opened, authentic = crypto.unseal(key, sealed, context=CONTEXT)
    assert authentic.all()
    assert (opened == records).all()


def test_equal_records_look_different():
    """Indistinguishable under chosen plaintext: a sealed vocabulary is no dictionary."""
    records = np.zeros((500, 10), np.uint8)
    sealed = crypto.seal(crypto.new_data_key(), records, context=CONTEXT)
    assert len(np.unique(sealed, axis=0)) == 500
    counts = np.bincount(sealed.ravel(), minlength=256)
    assert scipy.stats.chisquare(counts).pvalue > 1e-6  # fails once in a million runs if bytes are uniform


@pytest.mark.parametrize("byte", [0, 11, 12, 21, 22, 37])
def test_one_flipped_bit_anywhere_is_refused(byte):
    """In nonce, key, value or tag (AC48)."""
    key, records = crypto.new_data_key(), some_records()
    sealed = crypto.seal(key, records, context=CONTEXT)
    sealed[7, byte] ^= 1
    opened, authentic = crypto.unseal(key, sealed, context=CONTEXT)
    assert np.flatnonzero(~authentic).tolist() == [7]
    assert (opened == np.delete(records, 7, 0)).all()


def test_another_key_or_context_opens_nothing():
    """Nothing is returned that somebody else sealed (AC48)."""
    key, records = crypto.new_data_key(), some_records()
    sealed = crypto.seal(key, records, context=CONTEXT)
    for opened, authentic in (
        crypto.unseal(crypto.new_data_key(), sealed, context=CONTEXT),
        crypto.unseal(key, sealed, context=b"another round"),
    ):
        assert not authentic.any()
        assert opened.shape == (0, 10)


def test_order_may_change_but_halves_cannot_be_joined():
    """Two records may change places, for order says nothing; the key of one and the value of another may not (AC48)."""
    key, records = crypto.new_data_key(), some_records()
    sealed = crypto.seal(key, records, context=CONTEXT)
    swapped = sealed[[1, 0, *range(2, 40)]]
    opened, authentic = crypto.unseal(key, swapped, context=CONTEXT)
    assert authentic.all()
    assert (opened == records[[1, 0, *range(2, 40)]]).all()
    # Nonce 0-11, key codes 12-19, value 20-21, tag 22-37: every way to put two of them together.
    for part in (slice(0, 12), slice(12, 20), slice(20, 22), slice(22, 38), slice(0, 20), slice(20, 38)):
        mixed = sealed.copy()
        mixed[0, part] = sealed[1, part]
        opened, authentic = crypto.unseal(key, mixed, context=CONTEXT)
        assert np.flatnonzero(~authentic).tolist() == [0]
        assert (opened == records[1:]).all()


def test_no_records_and_empty_batches():
    key = crypto.new_data_key()
    sealed = crypto.seal(key, some_records(0), context=CONTEXT)
    assert sealed.shape == (0, 38)
    opened, authentic = crypto.unseal(key, sealed, context=CONTEXT)
    assert opened.shape == (0, 10)
    assert authentic.shape == (0,)
    with pytest.raises(InputError, match="at least 28 bytes"):
        crypto.unseal(key, np.zeros((1, 27), np.uint8), context=CONTEXT)


def test_batches_do_not_show(monkeypatch):
    monkeypatch.setattr(crypto, "_BATCH", 7)
    key, records = crypto.new_data_key(), some_records(31)
    sealed = crypto.seal(key, records, context=CONTEXT)
    sealed[10, 20] ^= 4
    opened, authentic = crypto.unseal(key, sealed, context=CONTEXT)
    assert np.flatnonzero(~authentic).tolist() == [10]
    assert (opened == np.delete(records, 10, 0)).all()


def test_a_data_key_unwraps_for_its_member_in_its_context_only():
    alice, bob = crypto.generate("alice"), crypto.generate("bob")
    key = crypto.new_data_key()
    wrapped = crypto.wrap(key, alice.public(), context=b"round 1")
    assert crypto.unwrap(wrapped, alice, context=b"round 1") == key
    assert key not in wrapped
    changed = bytes([*wrapped[:-1], wrapped[-1] ^ 1])
    for secret, data, context in (
        (bob, wrapped, b"round 1"),
        (alice, wrapped, b"round 2"),
        (alice, changed, b"round 1"),
        (alice, wrapped[:20], b"round 1"),
        (alice, b"", b"round 1"),
    ):
        with pytest.raises(InputError, match="does not unwrap"):
            crypto.unwrap(data, secret, context=context)


def test_signatures_name_their_signer():
    alice, bob = crypto.generate("alice"), crypto.generate("bob")
    signature = crypto.sign(alice, b"upload")
    assert crypto.verifies(alice.public(), signature, b"upload")
    assert not crypto.verifies(bob.public(), signature, b"upload")
    assert not crypto.verifies(alice.public(), signature, b"uploaD")
    assert not crypto.verifies(alice.public(), b"short", b"upload")


def test_key_files(tmp_path):
    alice = crypto.generate("alice")
    crypto.save_secret(tmp_path / "a.secret", alice)
    crypto.save_public(tmp_path / "a.public", alice.public())
    assert crypto.load_secret(tmp_path / "a.secret") == alice
    assert crypto.load_public(tmp_path / "a.public") == alice.public()
    assert stat.S_IMODE(os.stat(tmp_path / "a.secret").st_mode) == 0o600
    for secret in (alice.wrap_key, alice.sign_key):
        assert secret.hex() not in (tmp_path / "a.public").read_text()
        assert secret.hex() not in repr(alice)
        assert repr(secret) not in repr(alice)
    with pytest.raises(InputError, match="not overwritten"):
        crypto.save_secret(tmp_path / "a.secret", crypto.generate("alice"))
    assert crypto.load_secret(tmp_path / "a.secret") == alice


def test_bad_key_files_are_named(tmp_path):
    alice = crypto.generate("alice")
    crypto.save_secret(tmp_path / "secret", alice)
    os.chmod(tmp_path / "secret", 0o644)
    with pytest.raises(InputError, match="chmod 600"):
        crypto.load_secret(tmp_path / "secret")
    crypto.save_public(tmp_path / "public", alice.public())
    with pytest.raises(InputError, match=r"private key file .* not of the format"):
        crypto.load_secret(tmp_path / "public")
    text = (tmp_path / "public").read_text()
    (tmp_path / "short").write_text(text.replace(alice.public().sign_key.hex(), "abcd"))
    with pytest.raises(InputError, match="not 32 bytes"):
        crypto.load_public(tmp_path / "short")
    (tmp_path / "hex").write_text(text.replace(alice.public().sign_key.hex(), "xyz"))
    with pytest.raises(InputError, match="not hexadecimal"):
        crypto.load_public(tmp_path / "hex")
    (tmp_path / "text").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="not JSON"):
        crypto.load_public(tmp_path / "text")
    with pytest.raises(InputError, match="does not exist"):
        crypto.load_public(tmp_path / "nothing")
    for name in ("", " a", "a ", "a\n", "../a", "a/b", ".a", "x" * 101):
        with pytest.raises(InputError, match="member's name must be"):
            crypto.generate(name)


def test_permutations_are_uniform_and_fresh():
    orders = [tuple(crypto.permutation(3)) for _ in range(3000)]
    counts = np.unique(orders, axis=0, return_counts=True)[1]
    assert len(counts) == 6
    assert scipy.stats.chisquare(counts).pvalue > 1e-6
    assert not (crypto.permutation(1000) == crypto.permutation(1000)).all()
    assert sorted(crypto.permutation(1000)) == list(range(1000))
    assert crypto.permutation(0).shape == (0,)


def test_a_key_of_low_order_is_refused_with_its_members_name():
    member = dataclasses.replace(crypto.generate("mallory").public(), wrap_key=bytes(32))
    with pytest.raises(InputError, match="the public key of 'mallory' cannot be used"):
        crypto.wrap(crypto.new_data_key(), member, context=b"x")
