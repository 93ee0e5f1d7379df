"""Settings of a keyboard run: one frozen dataclass, four presets."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Train a next-word model by simulated federated learning with DP-FTRL."""

    data: str
    """Private clients: a parquet, JSONL, CSV, LEAF or TFF SQLite file, or `docstrings` (embedded: those of
    installed Python packages, one client per module)."""
    public: str
    """Public text for the vocabulary (and the public n-gram): a file, `docstrings`, or `none`."""
    client_field: str
    """Column or field of the data that holds the client's id."""
    text_field: str
    """Column or field of the data, and of the public text, that holds the text."""
    skip_bad: bool
    """Leave records that cannot be read out, instead of stopping at the first; their number and the first places are
    told, and kept in manifest.json."""
    vocabulary: str
    """Word list (TSV, most frequent first), or `public` to count the words of the public text."""
    vocabulary_size: int
    """Words in the vocabulary, special tokens not counted."""
    run_dir: str
    """Folder for everything the run writes; it must not exist, unless --resume is given."""

    rounds: int
    """Released rounds T: leaves of the noise mechanism."""
    report_goal: int
    """Clients whose update enters a round (m); the fixed divisor of every sum."""
    noise_multiplier: float
    """Standard deviation of one underlying Gaussian on the sum, divided by the clip norm (z)."""
    mechanism: Literal["none", "independent", "tree", "tree_reduced", "blt", "banded"]
    """Noise mechanism; `none` adds no noise and has no guarantee."""
    restarts: tuple[int, ...]
    """A new tree (or strategy segment) starts after each of these round counts."""
    completion: bool
    """Pad a tree with empty leaves before a restart (tree mechanisms only)."""
    buffers: int
    """Buffers of the BLT strategy (model copies on the server)."""
    bands: int
    """Bands of the banded strategy (one model copy less on the server), at most the separation."""
    clip: Literal["fixed", "adaptive", "two_stage"]
    """`adaptive`: the clip norm becomes the private quantile estimate at every restart. `two_stage`: a first, small
    run with adaptive clipping finds the clip norm, the run proper keeps it fixed; both are accounted together."""
    clip_norm: float
    """Clip norm C (L2 norm of a whole update); with --clip adaptive or two_stage the first one."""
    clip_quantile: float
    """Quantile of update norms that adaptive clipping follows (0 to 1)."""
    clip_learning_rate: float
    """Geometric learning rate of the quantile estimate."""
    clipped_count_stddev: float | None
    """Standard deviation of the noise on the count of clipped clients; None: report goal / 20."""
    clip_search_rounds: int
    """With --clip two_stage: rounds of the first stage."""
    clip_search_report_goal: int | None
    """With --clip two_stage: its report goal; None: a tenth of --report-goal."""
    clip_search_noise_multiplier: float | None
    """With --clip two_stage: its noise multiplier; None: the same noise per client, z / m."""
    clip_search_restarts: tuple[int, ...]
    """With --clip two_stage: its restarts, where its clip norm becomes the estimate (--restarts is the second's)."""
    secure_aggregation: Literal["none", "secagg", "distributed"]
    """`secagg`: clients send integers of which the server sees only the modular sum, and adds the noise; `distributed`:
    the clients add it, in shares (mechanism independent, fixed clip norm)."""
    secagg_bits: int
    """The secure sum is taken modulo 2^bits (up to 32); more bits round finer and send more."""
    min_separation: int | None
    """Least difference b between two rounds of one client; None: the most the population allows."""
    max_participations: int | None
    """Most rounds one client takes part in; None: as many as the separation allows."""
    adjacency: Literal["zero-out", "add-remove", "replace-one"]
    """Neighbouring runs: one client's every message becomes zero, is absent, or is anything else."""
    delta: float
    """Probability parameter of the (epsilon, delta) statement."""
    deployment_report_goal: int
    """Report goal of the deployment that the statement compares with, at the same noise per client z / m."""
    deployment_population: int
    """Devices of that deployment."""

    over_selection: float
    """Extra clients selected, as a fraction of the report goal; those cut off still start their timer."""
    drop_out: float
    """Probability that a selected client fails to report (0 to 1)."""
    timer_jitter: int
    """A device's wait is lengthened by 0 to this many rounds, at random."""
    availability: Literal["constant", "diurnal"]
    """Which clients can be reached: all, or by the hour of day (the data's `hour` column if it has one)."""

    local_epochs: int
    """Passes over a client's own examples per round (E)."""
    batch_size: int
    """Examples per local SGD step."""
    client_learning_rate: float
    """Learning rate of local SGD."""
    server_learning_rate: float
    """Learning rate of the server's SGD on the noised mean."""
    server_momentum: float
    """Momentum of the server's SGD."""
    server_cooldown: int
    """Last rounds, over which the server's learning rate falls linearly towards zero."""
    max_examples: int
    """Examples used per client at most."""
    sequence_length: int
    """Tokens kept per example, begin and end marks not counted."""

    embedding_size: int
    """Width of the embedding and of the projected LSTM output."""
    hidden_size: int
    """CIFG-LSTM cells."""
    shared_embeddings: bool
    """One table for input and output embeddings instead of two."""

    pretrain_data: str
    """Public text that a first stage trains on before the federated rounds: a file, `docstrings`, or `none`."""
    pretrain_epochs: float
    """Passes over that text; fractions are allowed."""
    pretrain_learning_rate: float
    """Largest learning rate of that stage's Adam."""
    pretrain_batch_size: int
    """Rows of public text per step of that stage."""
    initial_model: str
    """Start from the public model of another run: its folder, or a model.safetensors that a pretraining stage wrote;
    or `none`."""

    seed: int
    """Public randomness: initial values, cohorts, schedules (0 to 2^32 - 1). Never the noise."""
    insecure_noise_seed: int | None
    """Tests and reproducible pictures only: the noise comes from this seed and there is no guarantee."""
    chunk_size: int
    """Clients computed at once on each device: 1 is fastest on CPU, large on accelerators; changes speed and
    memory only."""
    devices: int | None
    """Devices (of each process) that the clients are spread over, on a CPU its cores; None: one, and on a CPU with
    two cores the comparison runs beside it."""
    coordinator: str | None
    """Several processes that compute one run: HOST:PORT of process 0, which alone writes the run
    folder; it lies on storage that all of them see."""
    num_processes: int
    """Processes of the run, each started with the same options and its own --process-id; each keeps the text of its
    own clients only."""
    process_id: int
    """Number of this process, from 0."""
    compare: bool
    """Also train the same model without noise, side by side, for the closing table."""
    evaluate_every: int
    """Rounds between evaluations on held-out clients."""
    evaluation_examples: int
    """Held-out examples used at each evaluation during training; the last one uses all."""
    checkpoint_every: int
    """Rounds between checkpoints."""
    resume: bool
    """Go on from the newest whole checkpoint in --run-dir."""
    json: bool
    """Print one JSON object as the last line of standard output; everything else goes to standard error."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Score the newest checkpoint of a run, or an exported model, on test clients."""

    run_dir: str = "runs/keyboard"
    """Folder of the run, or a file that `keyboard export` wrote (with --data)."""
    data: str | None = None
    """Score on the test clients of this file instead of the run's own."""
    client_field: str | None = None
    """With --data: field that holds the client's id; None: as the run's own data has it, else client_id."""
    text_field: str | None = None
    """With --data: field that holds the text; None: as the run's own data has it, else text."""
    json: bool = False
    """Print one JSON object as the last line of standard output; everything else goes to standard error."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Draw several runs on one picture: accuracy by round, over the noise per client, and over rho by mechanism."""

    runs: tuple[str, ...] = ()
    """Run folders; their names label the lines."""
    reach: tuple[float, ...] = ()
    """List the first evaluated round in which each run reached this top-1 words accuracy (percent)."""
    output: str = "compare.png"
    """Picture to write (.png, .pdf or .svg)."""
    json: bool = False
    """Print one JSON object as the last line of standard output; everything else goes to standard error."""


DEMO = Config(
    data="docstrings",
    public="docstrings",
    client_field="client_id",
    text_field="text",
    skip_bad=False,
    vocabulary="public",
    vocabulary_size=2000,
    run_dir="runs/keyboard",
    rounds=200,
    report_goal=50,
    noise_multiplier=0.054,
    mechanism="tree_reduced",
    restarts=(),
    completion=False,
    buffers=3,
    bands=16,
    clip="fixed",
    clip_norm=1.0,
    clip_quantile=0.5,
    clip_learning_rate=0.2,
    clipped_count_stddev=None,
    clip_search_rounds=100,
    clip_search_report_goal=None,
    clip_search_noise_multiplier=None,
    clip_search_restarts=(),
    secure_aggregation="none",
    secagg_bits=20,
    min_separation=None,
    max_participations=None,
    adjacency="zero-out",
    delta=1e-10,
    deployment_report_goal=6500,
    deployment_population=4_000_000,
    over_selection=0.0,
    drop_out=0.0,
    timer_jitter=0,
    availability="constant",
    local_epochs=1,
    batch_size=8,
    client_learning_rate=0.5,
    server_learning_rate=2.0,
    server_momentum=0.9,
    server_cooldown=60,
    max_examples=256,
    sequence_length=20,
    embedding_size=64,
    hidden_size=128,
    shared_embeddings=False,
    pretrain_data="none",
    pretrain_epochs=1.0,
    pretrain_learning_rate=2e-3,
    pretrain_batch_size=128,
    initial_model="none",
    seed=0,
    insecure_noise_seed=None,
    chunk_size=1,
    devices=None,
    coordinator=None,
    num_processes=1,
    process_id=0,
    compare=True,
    evaluate_every=10,
    evaluation_examples=2000,
    checkpoint_every=20,
    resume=False,
    json=False,
)
TINY = dataclasses.replace(
    DEMO,
    vocabulary_size=200,
    rounds=4,
    clip_search_rounds=4,
    server_cooldown=1,
    report_goal=5,
    noise_multiplier=0.3,
    batch_size=4,
    max_examples=8,
    embedding_size=8,
    hidden_size=16,
    evaluate_every=2,
    evaluation_examples=64,
    checkpoint_every=2,
)
IRC = dataclasses.replace(
    DEMO,
    vocabulary_size=4000,
    rounds=800,
    server_cooldown=250,
    report_goal=100,
    noise_multiplier=0.108,
    batch_size=4,
    embedding_size=96,
    hidden_size=256,
    evaluate_every=25,
    checkpoint_every=25,
    compare=False,
)
PAPER = dataclasses.replace(
    IRC,
    vocabulary_size=10_000,
    rounds=2000,
    server_cooldown=500,
    report_goal=6500,
    noise_multiplier=7.0,
    hidden_size=670,
    chunk_size=64,
)
# Sizes of the presets:   tiny          demo           irc              paper
#   embedding x hidden    8 x 16        64 x 128       96 x 256         96 x 670
#   words                 200           2,000          4,000            10,000
#   rounds x report goal  4 x 5         200 x 50       800 x 100        2,000 x 6,500
#   noise multiplier      0.3           0.054          0.108            7
# demo and irc have the deployed noise per client, z / m = 7 / 6500: its accuracy, hardly any guarantee of their own.
PRESETS = {"demo": DEMO, "tiny": TINY, "irc": IRC, "paper": PAPER}
