"""Settings of the documents commands: frozen dataclasses and presets.

| preset | documents | candidates | epsilons | trials | word_mdp documents |
| --- | --- | --- | --- | --- | --- |
| tiny | 24 a label and split | 60 | 5, 10 | 1 | 4 |
| demo (default) | all of the embedded ones | 1,000 | 1, 2, 5, 8, 10, 15, 20, 25, 30 | 3 | 60 |
| paper | all | 5,000 | the same | 5 | 300, 2 trials |
"""

import dataclasses
from typing import Literal

METHODS = (
    "deepest_candidate (no privacy)",
    "truncation",
    "word_mdp",
    "deepcandidate",
    "deepcandidate_no_recoder",
    "bounded_sum",
    "low_rank",
)
EPSILONS = (1.0, 2.0, 5.0, 8.0, 10.0, 15.0, 20.0, 25.0, 30.0)


LEAST_EPSILON = 1e-6  # a release with less says nothing, and its noise would leave float32's range


def named(epsilon: float) -> str:
    """An epsilon as text that no other epsilon has: names of streams and columns must not merge close ones.

    >>> named(10.0), named(0.1), named(0.1 + 2**-50)
    ('10', '0.1', '0.10000000000000089')
    """
    short = format(epsilon, "g")
    return short if float(short) == epsilon else repr(float(epsilon))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Fit the public side of sentence-private embeddings, or measure every method."""

    data: str = "docstrings"
    """Public training documents with labels: `docstrings` (those of installed Python packages, labelled by
    package), or a file with `text` and `label` fields; a name with `train` in it finds its val and test files."""
    run_dir: str = "runs/documents"
    """Folder for everything the command writes; it must not exist, unless --resume is given."""
    encoder: str = "minilm"
    """Sentence encoder: `minilm` (fetched once as a package), or a local BERT-type sentence-transformers folder."""
    splitter: Literal["sentencex", "lines"] = "sentencex"
    """What cuts documents into sentences; `lines` for text with one sentence a line."""
    max_documents: int | None = None
    """At most so many documents of each label in each split; None: all."""

    methods: tuple[str, ...] = METHODS
    """Methods to fit or compare."""
    epsilons: tuple[float, ...] = EPSILONS
    """Privacy budgets of one release, in nats per replaced sentence; choices are made for each."""
    selection: Literal["exponential", "permute_and_flip"] = "permute_and_flip"
    """How a candidate is drawn; permute-and-flip has the same epsilon and is never worse in expectation."""
    trials: int = 3
    """Releases of every test document at each epsilon."""

    num_candidates: int = 1000
    """Public documents that a release may come out as (m)."""
    candidates: Literal["random", "kmedoids"] = "random"
    """Which public documents are candidates: any, or those nearest to as many k-means centres."""
    min_candidate_sentences: int = 8
    """Candidates have at least so many sentences, where enough documents do."""
    num_clusters: int = 50
    """k-means clusters that the recoder learns to tell apart."""
    num_directions: tuple[int, ...] = (10, 25, 50, 100)
    """Numbers of random directions among which validation chooses (p); multiples of 5."""
    num_axes: tuple[int, ...] = (5, 10, 15, 20)
    """Numbers of public axes among which validation chooses (r); multiples of 5."""
    num_steps: int = 32
    """Whole steps of one sentence's bounded score."""

    word_documents: int = 60
    """Test documents that word_mdp rewrites and encodes again, at each of its epsilons."""
    word_trials: int = 1
    """Trials of word_mdp."""
    word_epsilons: tuple[float, ...] = (5.0, 10.0, 20.0, 30.0)
    """Epsilons of word_mdp, per unit of distance between word vectors."""
    word_vectors: Literal["glove", "encoder"] = "glove"
    """Word space of word_mdp: GloVe 6B of 50 dimensions (fetched as a package), or the encoder's input table."""

    seed: int = 0
    """Seed of everything public: candidates, directions, initial weights. Never of a private draw."""
    devices: int | None = None
    """Spread documents over so many devices; a CPU is divided into them. None: two on a CPU of two cores or more."""
    insecure_noise_seed: int | None = None
    """Tests only: draws privately released outcomes from this seed, which voids the guarantee."""
    resume: bool = False
    """Go on with an interrupted run in --run-dir."""
    json: bool = False
    """Last line of standard output is one JSON object; everything else goes to standard error."""


PRESETS = {
    "demo": Config(),
    "tiny": Config(
        max_documents=24,
        epsilons=(5.0, 10.0),
        trials=1,
        num_candidates=60,
        num_clusters=8,
        num_directions=(10, 20),
        num_axes=(5, 10),
        word_documents=4,
        word_epsilons=(10.0,),
        word_vectors="encoder",
    ),
    "paper": Config(num_candidates=5000, trials=5, word_documents=300, word_trials=2),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReleaseConfig:
    """Release private embeddings of documents, and count what each document has spent."""

    run_dir: str
    """Folder that `jaxpriv documents fit` made."""
    data: str
    """Documents: a folder of .txt files, one .txt file, or records with `text` (and `id`)."""
    output: str
    """Parquet file of embeddings to write; the statement goes beside it (FILE.privacy.json, FILE.privacy.md)."""
    epsilon: float
    """Budget of this release, in nats per replaced sentence."""
    method: Literal[
        "deepcandidate", "deepcandidate_no_recoder", "bounded_sum", "low_rank", "truncation", "best"
    ] = "best"
    """What to release with; `best` is what did best on public validation documents at this epsilon."""
    selection: Literal["exponential", "permute_and_flip"] | None = None
    """How a candidate is drawn; None: as fitted."""
    ledger: str | None = None
    """File that counts releases of each document; None: ledger.json in --run-dir. Keep it private."""
    allow_repeats: bool = False
    """Release documents again that the ledger holds; their epsilons add, and the statement says so."""
    devices: int | None = None
    """Spread documents over so many devices; a CPU is divided into them. None: two on a CPU of two cores or more."""
    insecure_noise_seed: int | None = None
    """Tests only: draws from this seed, which voids the guarantee."""
    json: bool = False
    """Last line of standard output is one JSON object; everything else goes to standard error."""
