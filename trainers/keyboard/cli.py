"""`jaxpriv keyboard`: train, evaluate, compare; suggest, compose, rescore, export."""

from trainers.common import command
from trainers.keyboard.config import Config

COMMANDS = {
    "train": "train a private model, with its guarantee, pictures and baselines",
    "evaluate": "score the model of a run folder on test clients again",
    "compare": "draw several runs on one picture",
    "suggest": "offer the next words as you type",
    "compose": "complete a text by several words; measure trigger rate and accuracy",
    "rescore": "re-rank noisy typing; measure words modified and keystrokes saved",
    "export": "write the model as one safetensors file, with its statement",
}


def main(argv: list[str]) -> int:
    """Runs `jaxpriv keyboard COMMAND`; returns the exit status."""
    name, rest = command.choose("keyboard", COMMANDS, argv), argv[1:]
    if name is None:
        return 0
    from trainers.keyboard import config as settings
    from trainers.keyboard import features_config

    presets = {
        "train": settings.PRESETS,
        "evaluate": {"default": settings.EvaluateConfig()},
        "compare": {"default": settings.CompareConfig()},
        "suggest": {"default": features_config.SuggestConfig()},
        "compose": {"default": features_config.ComposeConfig()},
        "rescore": {"default": features_config.RescoreConfig()},
        "export": {"default": features_config.ExportConfig()},
    }[name]
    kind = type(next(iter(presets.values())))
    if name == "train":
        from accounting import options, record

        rest = options.with_names(rest, {"--mechanism": record.MECHANISMS})
    config = command.parse(
        kind, rest, prog=f"jaxpriv keyboard {name}", presets=presets, description=kind.__doc__ or ""
    )
    if isinstance(config, settings.Config):
        prepare_processes(config)
    else:
        command.prepare_devices(None)
    command.keep_compilations()
    from trainers.common import processes
    from trainers.keyboard import features, session

    run = {
        "train": session.train,
        "evaluate": session.evaluate_run,
        "compare": session.compare,
        "suggest": features.suggest,
        "compose": features.compose,
        "rescore": features.rescore,
        "export": features.export,
    }[name]
    with processes.ending_together():
        result, text = run(config)
    command.finish(result, as_json=config.json, text=text)  # pyright: ignore[reportAttributeAccessIssue]
    return 0


def prepare_processes(config: Config) -> None:
    """Prepares the devices, and joins the other processes of the run where there are any."""
    command.prepare_devices(config.devices, config.num_processes)
    from trainers.common import processes

    processes.check(config.coordinator, config.num_processes, config.process_id)
    if config.coordinator is not None:
        processes.start(config.coordinator, config.num_processes, config.process_id)
