"""Settings that no data could serve, and sizes that no memory could hold: refused before anything is read or made."""

import math
import os

from jaxpriv import participation
from trainers.common import readers
from trainers.common.errors import InputError
from trainers.keyboard.config import Config
from trainers.keyboard.model import ModelConfig

# Norms and noise scales outside would be rounded to zero or infinity in float32.
SMALLEST, LARGEST = 1e-30, 1e30
MOST_BUFFERS, MOST_OVER_SELECTION = 20, 1000
# Beyond them no machine has room for the model or a batch; for what is below, `require_memory` asks this one.
MOST_WIDTH, MOST_AT_ONCE, MOST_DEVICES = 2**17, 2**20, 10**15
MOST_RATE = 1e6
_NO_ROOM = "more fits into no memory"
_BYTES = 4  # of a parameter, an activation, a token


def check(config: Config) -> None:
    """Refuses settings that no population could serve, or no machine."""
    for name, low in (
        ("rounds", 1),
        ("report_goal", 1),
        ("vocabulary_size", 1),
        ("local_epochs", 1),
        ("batch_size", 1),
        ("max_examples", 1),
        ("sequence_length", 1),
        ("embedding_size", 1),
        ("hidden_size", 1),
        ("chunk_size", 1),
        ("buffers", 1),
        ("bands", 1),
        ("evaluate_every", 1),
        ("evaluation_examples", 1),
        ("checkpoint_every", 1),
        ("deployment_report_goal", 1),
        ("deployment_population", config.deployment_report_goal),
    ):
        if getattr(config, name) < low:
            raise InputError(f"{option(name)} must be at least {low}, got {getattr(config, name)}")
    for name, most, why in (
        ("sequence_length", readers.MAX_TOKENS_PER_EXAMPLE, "to which examples are read"),
        ("embedding_size", MOST_WIDTH, _NO_ROOM),
        ("hidden_size", MOST_WIDTH, _NO_ROOM),
        ("batch_size", MOST_AT_ONCE, _NO_ROOM),
        ("pretrain_batch_size", MOST_AT_ONCE, _NO_ROOM),
        ("chunk_size", MOST_AT_ONCE, _NO_ROOM),
        ("max_examples", participation.MOST, "since steps are counted in 32 bits"),
        ("local_epochs", participation.MOST // config.max_examples, "since steps are counted in 32 bits"),
        ("secagg_bits", 32, "integers of a secure sum have no more"),
        ("deployment_report_goal", MOST_DEVICES, "more than there are"),
        ("deployment_population", MOST_DEVICES, "more than there are"),
    ):
        if getattr(config, name) > most:
            raise InputError(f"{option(name)} must be at most {most} ({why}), got {getattr(config, name)}")
    for name in ("client_learning_rate", "server_learning_rate", "clip_norm", "clip_learning_rate"):
        if not 0 < getattr(config, name) < math.inf:
            raise InputError(f"{option(name)} must be a finite number above 0, got {getattr(config, name)}")
        if name.endswith("learning_rate") and getattr(config, name) > MOST_RATE:
            raise InputError(
                f"{option(name)} must be at most {MOST_RATE:g} (rounds would be spent on parameters beyond float32), "
                f"got {getattr(config, name)}"
            )
    for name in ("clip_quantile", "delta"):
        if not 0 < getattr(config, name) < 1:
            raise InputError(f"{option(name)} must be between 0 and 1, got {getattr(config, name)}")
    for name in ("server_momentum", "drop_out"):
        if not 0 <= getattr(config, name) < 1:
            raise InputError(f"{option(name)} must be at least 0 and below 1, got {getattr(config, name)}")
    if not 0 <= config.server_cooldown <= config.rounds:
        raise InputError(f"--server-cooldown must be from 0 to --rounds, got {config.server_cooldown}")
    if not 0 <= config.over_selection <= MOST_OVER_SELECTION:
        raise InputError(
            f"--over-selection must be a share of the report goal from 0 to {MOST_OVER_SELECTION}, got "
            f"{config.over_selection}"
        )
    for name in ("clip_norm", "clipped_count_stddev"):
        value = getattr(config, name)
        if value is not None and not SMALLEST <= value <= LARGEST:
            raise InputError(f"{option(name)} must be from {SMALLEST:g} to {LARGEST:g}, got {value}")
    for name in ("min_separation", "max_participations", "rounds", "report_goal"):
        value = getattr(config, name)
        if value is not None and value > participation.MOST:
            raise InputError(f"{option(name)} must be at most {participation.MOST}, got {value}")
    if not 0 <= config.timer_jitter <= config.rounds:
        raise InputError(
            f"--timer-jitter must be a number of rounds from 0 to --rounds {config.rounds}, got {config.timer_jitter}"
        )
    if config.buffers > MOST_BUFFERS:
        raise InputError(
            f"--buffers must be at most {MOST_BUFFERS} (more gain nothing), got {config.buffers}"
        )
    if config.devices is not None and config.devices < 1:
        raise InputError(f"--devices must be at least 1, got {config.devices}")
    for name in ("seed", "insecure_noise_seed"):
        value = getattr(config, name)
        if value is not None and not 0 <= value < 2**32:
            raise InputError(f"{option(name)} must be from 0 to 2^32 - 1, got {value}")
    z = config.noise_multiplier
    if not 0 <= z < math.inf:
        raise InputError(f"--noise-multiplier must be a finite number above 0, got {z}")
    if config.mechanism == "none":
        return
    if z == 0:
        raise InputError(
            "--noise-multiplier 0 adds no noise and guarantees nothing; say --mechanism none instead"
        )
    if not SMALLEST <= z * config.clip_norm <= LARGEST:
        raise InputError(
            f"--noise-multiplier {z:g} times --clip-norm {config.clip_norm:g} must be from {SMALLEST:g} to "
            f"{LARGEST:g}, where float32 noise is neither zero nor infinite"
        )
    if config.restarts and (
        any(a >= b for a, b in zip((0, *config.restarts), config.restarts, strict=False))
        or config.restarts[-1] >= config.rounds
    ):
        raise InputError(
            f"--restarts must be rising round counts above 0 and below --rounds {config.rounds}, "
            f"got {' '.join(map(str, config.restarts))}"
        )
    if config.completion and config.mechanism not in ("tree", "tree_reduced"):
        raise InputError(f"--completion pads trees; the mechanism is {config.mechanism}")


def require_memory(config: Config, sizes: ModelConfig, dimension: int) -> None:
    """Refuses what this machine's memory cannot hold, by what is certainly allocated at once.

    Args:
      dimension: parameters of the model of these `sizes`.

    Raises:
      InputError: with what is needed, what there is, and the options to lower.
    """
    positions = config.batch_size * config.sequence_length
    # The model, the server's momentum, the sum and, of each client computed at once, a local model.
    copies = (3 + config.chunk_size) * dimension
    # Of each of these clients' batches gates and states of the cells; and the round's packed text, two integers each.
    batches = config.chunk_size * positions * 8 * sizes.hidden_size + 2 * 256 * positions
    pretraining = config.pretrain_data != "none" and config.pretrain_batch_size * (
        4 * sizes.hidden_size + sizes.num_tokens
    )
    needed, there = _BYTES * max(copies + batches, int(pretraining)), memory()
    if needed > there:
        raise InputError(
            f"these sizes need at least {needed / 2**30:,.1f} GiB of memory and this machine has {there / 2**30:,.1f}: "
            "lower --chunk-size, --batch-size, --pretrain-batch-size, --sequence-length, --hidden-size, "
            "--embedding-size or --vocabulary-size"
        )


def memory() -> float:
    """Bytes of this machine's memory; infinite where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return math.inf


def option(name: str) -> str:
    """The command line's name of a field."""
    return "--" + name.replace("_", "-")
