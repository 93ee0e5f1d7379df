"""`jaxpriv keyboard`: train, evaluate, compare."""

from trainers.common import command

COMMANDS = {
    "train": "train a private model, with its guarantee, pictures and baselines",
    "evaluate": "score the model of a run folder on test clients again",
    "compare": "draw several runs on one picture",
}


def main(argv: list[str]) -> int:
    """Runs `jaxpriv keyboard COMMAND`; returns the exit status."""
    name, rest = command.choose("keyboard", COMMANDS, argv), argv[1:]
    if name is None:
        return 0
    from trainers.keyboard import config as settings

    presets = {
        "train": settings.PRESETS,
        "evaluate": {"default": settings.EvaluateConfig()},
        "compare": {"default": settings.CompareConfig()},
    }[name]
    kind = type(next(iter(presets.values())))
    config = command.parse(
        kind, rest, prog=f"jaxpriv keyboard {name}", presets=presets, description=kind.__doc__ or ""
    )
    command.prepare_devices(getattr(config, "devices", None))
    command.keep_compilations()
    from trainers.keyboard import session

    run = {"train": session.train, "evaluate": session.evaluate_run, "compare": session.compare}[name]
    result, text = run(config)
    command.finish(result, as_json=config.json, text=text)  # pyright: ignore[reportAttributeAccessIssue]
    return 0
