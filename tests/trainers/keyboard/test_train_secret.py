"""Nothing outside the private checkpoints holds the secret, or a key made of it, in any form that is read back."""

import base64
import pathlib

import jax
import numpy as np

from jaxpriv import keys
from trainers.common import checkpoint, entropy
from trainers.common.host_arrays import is_key
from trainers.keyboard import corpus, released
from trainers.keyboard.train import Run


def forms(words):
    """How these 32-bit words (two, or more by pairs) may be written: name -> bytes to look for."""
    found = {}
    for i in range(len(words) - 1):
        pair = np.asarray(words[i : i + 2], np.uint32)
        for order in ("<u4", ">u4"):
            raw = pair.astype(order).tobytes()
            found[f"raw {order} {i}"] = raw
            found[f"hex {order} {i}"] = raw.hex().encode()
            found[f"HEX {order} {i}"] = raw.hex().upper().encode()
            for shift in range(3):  # of the groups of three bytes that base64 makes; whole groups only
                inner = raw[shift : shift + (8 - shift) // 3 * 3]
                found[f"base64 {order} {i} {shift}"] = base64.b64encode(inner)
                found[f"base64url {order} {i} {shift}"] = base64.urlsafe_b64encode(inner)
        for base in ("d", "x", "X"):
            high = int(pair[0]) << 32 | int(pair[1])
            low = int(pair[1]) << 32 | int(pair[0])
            found |= {f"64 bits {base} {i} {n}": format(n, base).encode() for n in (high, low)}
    for i, word in enumerate(words):
        if word >= 10**7:  # shorter ones stand in a file by chance
            found[f"word {i}"] = str(int(word)).encode()
        found[f"signed word {i}"] = str(int(np.uint32(word).view(np.int32))).encode()
    return {name: needle for name, needle in found.items() if len(needle) >= 7}


def held(content, needles):
    return [name for name, needle in needles.items() if needle in content]


def secrets(run):
    """The words of the secret, and of every key that comes from it."""
    found = []
    for step in checkpoint.steps(run.checkpoints):
        state = checkpoint.load(run.checkpoints, step, run.start())
        own = entropy.key_from_words(state.secret)
        made = [leaf for leaf in jax.tree.leaves(state) if is_key(leaf)]
        made += [keys.stream(own, name) for name in ("updates", "bits", "secure aggregation")]
        made += [keys.for_round(key, t) for key in [own, *made] for t in range(run.config.rounds)]
        found += [state.secret, *(np.asarray(jax.random.key_data(key)) for key in [own, *made])]
    return {words.tobytes(): words for words in found}.values()


def test_nothing_for_release_holds_the_secret_or_a_key_in_any_form(whole, tmp_path):
    config, _ = whole
    folder = pathlib.Path(config.run_dir)
    run = Run(config, corpus.load(config), folder)
    released.export(folder, tmp_path / "m.safetensors")
    needles = {}
    for number, words in enumerate(secrets(run)):
        needles |= {f"{number}: {name}": needle for name, needle in forms(words).items()}
    assert len(needles) > 100
    for name, needle in needles.items():  # what hides in a file is found
        assert name in held(b"{" + needle + b"}", needles)
    files = [p for p in folder.rglob("*") if p.is_file() and run.checkpoints not in p.parents]
    files += [p for p in tmp_path.iterdir() if p.is_file()]
    assert {"manifest.json", "metrics.jsonl", "privacy.md", "m.safetensors", "learning.png"} <= {
        p.name for p in files
    }
    for path in files:
        assert not held(path.read_bytes(), needles), path


def test_the_forms_that_are_looked_for_are_those_that_a_secret_would_take():
    words = np.frombuffer(bytes(range(65, 97)), np.uint32)
    needles = forms(words)
    raw = words.tobytes()
    for content in (
        raw,
        raw.hex().encode(),
        base64.b64encode(raw),
        base64.b64encode(b"a" + raw),
        base64.b64encode(b"ab" + raw),
        str(words.tolist()).encode(),
        str(words.astype(float).tolist()).encode(),
        str(words.view(np.int32).tolist()).encode(),
        words.astype(">u4").tobytes(),
        str(int(words[0]) << 32 | int(words[1])).encode(),
        hex(int(words[0])).encode() + hex(int(words[1])).encode()[2:],
    ):
        assert held(content, needles), content
    assert not held(b"nothing at all 1234567 0.00000001", needles)
