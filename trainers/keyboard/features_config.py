"""Settings of the commands that use a trained model: suggest, compose, rescore, export."""

import dataclasses

BEAMS = 1  # hypotheses of the search for a completion


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Model:
    run_dir: str = "runs/keyboard"
    """Folder of a run, or a file that `keyboard export` wrote."""
    text: tuple[str, ...] = ()
    """Texts to work on, one an argument; without any: see above."""
    json: bool = False
    """Print one JSON object as the last line of standard output; everything else goes to standard error."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _HeldOut:
    data: str | None = None
    """Measure on the held-out clients of this file instead of the run's own."""
    client_field: str = "client_id"
    """With --data: field that holds the client's id."""
    text_field: str = "text"
    """With --data: field that holds the text."""
    examples: int = 2000
    """Held-out examples used at most."""
    output: str | None = None
    """Picture to write (.png, .pdf or .svg); none without it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuggestConfig(_Model):
    """Offer three words as you type: in the terminal; or for each --text, or each line of standard input."""

    threshold: float = 0.1
    """Least probability (0 to 1) of a completion of several words that is shown too."""
    beams: int = BEAMS
    """Hypotheses of the search for that completion; 1 takes the most probable word again and again."""
    offered: int = 3
    """Words offered."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComposeConfig(_Model, _HeldOut):
    """Complete each --text, or each line piped in, by several words at once; with neither, measure trigger rate and
    accuracy on held-out clients (not covered by the guarantee)."""

    threshold: float = 0.1
    """Least probability (0 to 1) of a completion that is shown."""
    min_words: int = 2
    """Fewest words of a completion."""
    beams: int = BEAMS
    """Hypotheses of the search for it; 1 takes the most probable word again and again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RescoreConfig(_Model, _HeldOut):
    """Re-rank the words of each --text, or of each line piped in, as noisy typing; with neither, measure simulated
    typing on held-out clients (not covered by the guarantee)."""

    tap_stddev: float = 0.5
    """Standard deviation of a tap around its key's centre, in key widths."""
    weight: float = 1.0
    """Weight of the model beside the taps, with --text; measuring tunes it on validation clients."""
    seed: int = 0
    """Of the simulated taps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Write the model of a run as one safetensors file, with its vocabulary and statement; nothing secret."""

    run_dir: str = "runs/keyboard"
    """Folder of the run."""
    output: str = "keyboard.safetensors"
    """File to write; the statement lands beside it as FILE.privacy.json and FILE.privacy.md."""
    json: bool = False
    """Print one JSON object as the last line of standard output; everything else goes to standard error."""
