"""`jaxpriv translation`: train, evaluate, translate, and the protocol: keygen, store, share, shuffle, open;
attack, release
and transfer measure.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from trainers.common import command

COMMANDS = {
    "train": "public model, private memories, and the comparison with other ways to share",
    "evaluate": "complete and print the comparison of a run folder",
    "translate": "translate lines of text, with a memory or without",
    "keygen": "make a member's keys (and, with --round, a round's data key wrapped for every member)",
    "store": "client: turn private pairs into a memory of coded keys",
    "share": "client: seal a memory, record by record, and sign it",
    "shuffle": "server: check, join and shuffle sealed memories, without reading them",
    "open": "client: open what the server sent and save the joint memory",
    "attack": "measure what a memory gives away: reconstruction, membership, rare values",
    "release": "measure what a filter, or an epsilon, costs in BLEU",
    "transfer": "measure a Meta-k network of one domain in the others",
}


def main(argv: list[str]) -> int:
    """Runs `jaxpriv translation COMMAND`; returns the exit status."""
    name, rest = command.choose("translation", COMMANDS, argv), argv[1:]
    if name is None:
        return 0
    if name == "train":
        return _train(rest)
    from trainers.translation import commands

    config = command.parse(
        commands.CONFIGS[name],
        rest,
        prog=f"jaxpriv translation {name}",
        presets={"default": commands.CONFIGS[name]()},
        description=commands.CONFIGS[name].__doc__ or "",
    )
    command.keep_compilations()
    run: Callable = getattr(commands, f"run_{name}")
    result, text = run(config)
    command.finish(result, as_json=config.json, text=text)
    return 0


def gather(argv: list[str], names: tuple[str, ...] = ("--server", "--client", "--held-out")) -> list[str]:
    """Options that may be repeated, collected into one: `--client a --client b` as `--client a b`."""
    found: dict[str, list[str]] = {name: [] for name in names}
    rest: list[str] = []
    words = rest
    for word in argv:
        name, equals, value = word.partition("=")
        if name in names and (equals or word == name):
            words = found[name]
            words += [value] if equals else []
        elif word.startswith("--"):
            words = rest
            words.append(word)
        else:
            words.append(word)
    return rest + [w for name in names if found[name] for w in (name, *found[name])]


def _train(argv: list[str]) -> int:
    from trainers.translation.config import PRESETS, Config

    config = command.parse(
        Config,
        gather(argv),
        prog="jaxpriv translation train",
        presets=PRESETS,
        description=Config.__doc__ or "",
    )
    command.keep_compilations()
    result, text = importlib.import_module("trainers.translation.session").train(config)
    command.finish(result, as_json=config.json, text=text)
    return 0
