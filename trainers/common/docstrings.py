"""Text that every installation has: the docstrings of installed Python packages, by module.

The sources are parsed, never imported. A module is a client; the packages of clients and those of public text
are disjoint. The result depends on nothing but the installed versions, and is cached under them.
"""

import ast
import importlib.metadata
import importlib.util
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainers.common import prose
from trainers.common.errors import InputError
from trainers.common.files import atomic_write, cache_dir, digest, digest_of
from trainers.common.packed import PackedTokens, ReadReport, client_data
from trainers.common.progress import bar
from trainers.common.readers import (
    MAX_EXAMPLES_PER_CLIENT,
    Splits,
    Texts,
    hash_split,
    public_texts,
    unit_hash,
)
from trainers.common.tokenizer import tokenize

STANDARD_LIBRARY = "python"
# All of these come with jaxpriv's own dependencies; one that is absent is left out and reported.
PRIVATE_PACKAGES = ("jax", "scipy", "numpy", "matplotlib", "orbax")
PUBLIC_PACKAGES = (
    STANDARD_LIBRARY,
    "flax",
    "optax",
    "dp_accounting",
    "mpmath",
    "fontTools",
    "PIL",
    "pyarrow",
    "treescope",
    "rich",
    "pygments",
    "tyro",
    "etils",
    "absl",
    "opt_einsum",
    "pyparsing",
    "contourpy",
    "dateutil",
    "attr",
    "packaging",
    "tqdm",
    "jaxtyping",
    "wrapt",
    "prometheus_client",
    "humanize",
)
DOCUMENT_PACKAGES = ("scipy", "jax", "numpy", "matplotlib", "orbax", "flax", "optax", STANDARD_LIBRARY)

_SKIPPED_FOLDER = re.compile(
    r"tests?|_?testing|_?vendor(ed)?|third_party|idlelib|lib2to3|site-packages|dist-packages|.*-.*"
)


class Corpus(NamedTuple):
    """The embedded default.

    clients: private text, one client a module, by use. public: text of other packages.
    versions: package -> version, of all that were read. missing: packages that are not installed.
    """

    clients: Splits
    public: Texts
    versions: dict[str, str]
    missing: tuple[str, ...]


class Documents(NamedTuple):
    """Multi-sentence docstrings: `texts[i]` has the label `labels[i]`, its package, and is in `splits[i]`.

    splits: "train", "validation" or "test"; a module's docstrings are all in one of them.
    """

    texts: list[str]
    labels: list[str]
    splits: list[str]
    modules: list[str]
    versions: dict[str, str]
    digest: str


def load_default(
    *,
    private: Sequence[str] = PRIVATE_PACKAGES,
    public: Sequence[str] = PUBLIC_PACKAGES,
    max_examples_per_client: int = MAX_EXAMPLES_PER_CLIENT,
    min_examples_per_client: int = 2,
    holdout: float = 0.1,
) -> Corpus:
    """Returns the sentences of docstrings as clients (modules) and as public text, from disjoint packages.

    Args:
      min_examples_per_client: modules with fewer sentences are no clients.
      holdout: share of the modules for validation and for test each, by a hash of the module's name.
    """
    both = set(private) & set(public)
    if both:
        raise ValueError(f"private and public packages must be disjoint, both hold {sorted(both)}")
    table, versions, missing = _extracted(set(private) | set(public))
    sentences = table["sentences"].combine_chunks()
    lengths = np.diff(sentences.offsets.to_numpy())
    package = np.array(table["package"].to_pylist())
    owners = np.repeat(np.arange(table.num_rows), lengths)
    is_private = np.isin(package, list(private)) & (lengths >= min_examples_per_client)
    rank = np.arange(len(owners)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    kept = is_private[owners] & (rank < max_examples_per_client)
    if not kept.any() or not np.isin(package, list(public)).any():
        raise InputError("too few installed packages have docstrings to train on; give text with --data FILE")

    texts = sentences.values
    tokens = PackedTokens.from_spaced(table["tokens"].combine_chunks().values)
    counts = np.minimum(lengths[is_private], max_examples_per_client)
    chosen = np.flatnonzero(kept)
    modules = np.array(table["module"].to_pylist())
    report = ReadReport(
        capped_clients=int((lengths[is_private] > max_examples_per_client).sum()),
        capped_examples=int(lengths[is_private].sum() - counts.sum()),
    )
    data = client_data(
        ids=modules[is_private].tolist(),
        counts=counts,
        tokens=tokens.take(chosen),
        texts=texts.take(pa.array(chosen)),
        hours=None,
        report=report,
    )
    parts = hash_split(data, (1 - 2 * holdout, holdout, holdout))
    origin = f"modules divided by a hash of their name, {holdout:.0%} each for validation and for test"
    open_text = np.flatnonzero(np.isin(package, list(public))[owners])
    text = public_texts(tokens.take(open_text), texts.take(pa.array(open_text)))
    clients = Splits(parts[0], parts[1], parts[2], origin, shared_clients=0)
    return Corpus(clients, text, versions, missing)


def load_documents(
    *,
    packages: Sequence[str] = DOCUMENT_PACKAGES,
    max_per_label: int | None = 300,
    min_sentences: int = 2,
    shares: tuple[float, float, float] = (0.6, 0.2, 0.2),
) -> Documents:
    """Returns docstrings of at least `min_sentences` sentences, labelled by package.

    Code spans read "code", so that a name of the package does not give the label away.

    Args:
      max_per_label: at most so many documents of a package, chosen by a hash of their text; None takes all.
      shares: of the modules, for train, validation and test, by a hash of the module's name.
    """
    table, versions, missing = _extracted(set(packages))
    if len(packages) - len(missing) < 2:
        raise InputError("fewer than two of the packages are installed; give documents with --data FILE")
    names = ("train", "validation", "test")
    bounds = np.cumsum(shares)[:-1]
    chosen: list[tuple[str, str, str, str]] = []
    for label in packages:
        found: dict[str, tuple[str, str]] = {}
        for row in table.filter(pa.array([p == label for p in table["package"].to_pylist()])).to_pylist():
            split = names[int(np.searchsorted(bounds, unit_hash(row["module"]), side="right"))]
            for text in row["documents"]:
                if sum(len(prose.split_sentences(p)) for p in text.split("\n\n")) >= min_sentences:
                    found.setdefault(text, (split, row["module"]))
        order = sorted(found, key=digest_of)[:max_per_label]
        chosen.extend((text, label, *found[text]) for text in order)
    if not chosen:
        raise InputError(
            f"no docstring of the packages has {min_sentences} sentences; give documents with --data FILE"
        )
    texts, labels, splits, modules = (list(column) for column in zip(*chosen))
    content = digest_of(*texts, *labels, *splits)
    return Documents(texts, labels, splits, modules, versions, content)


def _extracted(packages: set[str]) -> tuple[pa.Table, dict[str, str], tuple[str, ...]]:
    """One row a module with prose: package, module, sentences, tokens, documents; from the cache if there."""
    roots = {name: _roots(name) for name in sorted(packages)}
    missing = tuple(name for name, folders in roots.items() if not folders)
    versions = _versions([name for name in roots if name not in missing])
    rules = digest_of(digest(__file__), digest(prose.__file__))  # other rules make another text
    cached = {
        name: cache_dir("docstrings") / f"{name}-{digest_of(rules, name, version)[:24]}.parquet"
        for name, version in versions.items()
    }
    tables = {name: table for name, path in cached.items() if (table := _read_cached(path)) is not None}
    files = {name: list(_sources(roots[name])) for name in versions if name not in tables}
    total = sum(map(len, files.values()))
    if total:
        with bar(total=total, what="reading docstrings of installed packages", unit="module") as progress:
            for name, sources in files.items():
                rows = []
                for module, file in sources:
                    row = _module_row(file)
                    if row["sentences"]:
                        rows.append({"package": name, "module": module} | row)
                    progress.update()
                tables[name] = pa.Table.from_pylist(rows, schema=_SCHEMA)
                with atomic_write(cached[name], "wb") as out:
                    pq.write_table(tables[name], out, compression="zstd")
    return pa.concat_tables([tables[name] for name in versions]), versions, missing


def _read_cached(path: Path) -> pa.Table | None:
    try:
        return pq.read_table(path)
    except (pa.ArrowException, OSError):  # absent, or damaged and written anew
        return None


_SCHEMA = pa.schema(
    [
        ("package", pa.string()),
        ("module", pa.string()),
        ("sentences", pa.large_list(pa.large_string())),
        ("tokens", pa.large_list(pa.large_string())),
        ("documents", pa.large_list(pa.large_string())),
    ]
)


def _module_row(file: Path) -> dict[str, list[str]]:
    """The prose of one source file: each sentence once, and docstrings as documents."""
    sentences: dict[str, None] = {}
    documents: list[str] = []
    for docstring in _docstrings(file):
        kept = []
        for paragraph in prose.paragraphs(docstring):
            good = prose.sentences(paragraph)
            sentences.update(dict.fromkeys(good))
            if good:
                kept.append(" ".join(good))
        if kept:
            documents.append("\n\n".join(kept).replace("_code_", "code").replace("_url_", "a link"))
    tokens = [" ".join(tokenize(sentence)) for sentence in sentences]
    return {"sentences": list(sentences), "tokens": tokens, "documents": documents}


def _docstrings(file: Path) -> Iterator[str]:
    """The docstrings of a source file, in its order. A file that does not parse has none."""
    try:
        source = file.read_bytes()
        if b'"""' not in source and b"'''" not in source:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            todo: list[ast.AST] = [ast.parse(source)]
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    while todo:
        node = todo.pop()
        body = getattr(node, "body", [])
        inner = [n for n in body if isinstance(n, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))]
        todo.extend(reversed(inner))
        first = body[0] if body else None
        value = first.value if isinstance(first, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.value


def _roots(package: str) -> list[Path]:
    """The folders of an installed package, without importing it."""
    if package == STANDARD_LIBRARY:
        folder = Path(sysconfig.get_path("stdlib"))
        return [folder] if (folder / "typing.py").is_file() else []
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    found = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    return [folder for folder in found if folder.is_dir()]


def _sources(roots: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Module names and source files, sorted by name; tests and vendored copies are left out."""
    found: dict[str, Path] = {}
    for root in roots:
        prefix = STANDARD_LIBRARY if root == Path(sysconfig.get_path("stdlib")) else root.name
        for file in root.rglob("*.py"):
            parts = file.relative_to(root).with_suffix("").parts
            if any(_SKIPPED_FOLDER.fullmatch(p) for p in parts[:-1]) or parts[-1].startswith(
                ("test_", "conftest")
            ):
                continue
            name = ".".join((prefix, *(p for p in parts if p != "__init__")))
            found.setdefault(name, file)
    yield from sorted(found.items())


def _versions(packages: Sequence[str]) -> dict[str, str]:
    """package -> the version of the distributions that provide it."""
    providers = importlib.metadata.packages_distributions()
    versions = {}
    for name in packages:
        if name == STANDARD_LIBRARY:
            versions[name] = platform.python_version()
        else:
            dists = sorted(set(providers.get(name, [])))
            versions[name] = ", ".join(importlib.metadata.version(d) for d in dists) or "unknown"
    return versions
