"""The embedded default corpus: prose only, clients apart from public text, the same at every run."""

import sys

import pytest

from trainers.common import docstrings, prose
from trainers.common.errors import InputError

NUMPY_STYLE = """Return the mean of `values` along an axis.

    The result is **float64**, see :func:`numpy.mean` and https://example.org/x for
    the details [1]_. It uses ``np.add.reduce``, i.e. A. pairwise sum.

    Parameters
    ----------
    values : array_like, optional
        Input data that is averaged over
        the given axis.
    keep_dims : bool
        If true, the axis stays.

    .. versionadded:: 1.0
       Not prose at all in here.

    Notes
    -----
    Use it like this::

        code_block(1)
        is not prose either

    Then go on with the text.

    >>> mean([1, 2])
    1.5

    - A first item of the list.
    - A second item of it.
"""

GOOGLE_STYLE = """Computes things.

  Args:
    first: the first argument, which
      is explained on two lines.
    second (int): the second one is short.

  Returns:
    A new array of the same shape.
"""


def test_prose_of_a_numpy_docstring():
    assert prose.paragraphs(NUMPY_STYLE) == [
        "Return the mean of values along an axis.",
        "The result is float64, see _code_ and _url_ for the details . It uses _code_, i.e. A. pairwise sum.",
        "Input data that is averaged over the given axis.",
        "If true, the axis stays.",
        "Use it like this:",
        "Then go on with the text.",
        "A first item of the list.",
        "A second item of it.",
    ]


def test_prose_of_a_google_docstring():
    assert prose.paragraphs(GOOGLE_STYLE) == [
        "Computes things.",
        "the first argument, which is explained on two lines.",
        "the second one is short.",
        "A new array of the same shape.",
    ]


def test_sentences_end_at_sentence_ends():
    text = 'See e.g. Knuth. It is "done." Then (maybe) more! 3.5 is a number, cf. Eq. (2). And so on'
    assert prose.split_sentences(text) == [
        "See e.g. Knuth.",
        'It is "done."',
        "Then (maybe) more! 3.5 is a number, cf. Eq. (2).",
        "And so on",
    ]
    assert prose.sentences("Yes. This one is long enough. X = 1 + 2 * 3 / 4 - 5.") == [
        "This one is long enough."
    ]


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Two small packages on the path, and an empty cache."""
    monkeypatch.setenv("JAXPRIV_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path / "site")
    for package in ("jpx_private", "jpx_public"):
        folder = tmp_path / "site" / package
        (folder / "tests").mkdir(parents=True)
        (folder / "__init__.py").write_text(f'raise SystemExit("{package} must not be imported")\n')
        (folder / "tests" / "test_a.py").write_text('"""Tests are not read at all here."""\n')
        (folder / "broken.py").write_text('"""This file has no valid syntax."""\ndef f(:\n')
        for module in range(12):
            (folder / f"m{module}.py").write_text(
                f'"""The module number {module} of {package} does many things. It has two sentences."""\n'
                f'class C:\n    """A class that holds the number {module} in it."""\n'
                '    def f(self):\n        r"""Returns the square of it \\d.\n\n'
                '        Another sentence follows here."""\n'
                "        def inner(self):\n            '''A function inside another one is read too.'''\n"
            )
    yield tmp_path / "site"
    for name in ("jpx_private", "jpx_public"):
        sys.modules.pop(name, None)


def load(**options):
    return docstrings.load_default(private=["jpx_private"], public=["jpx_public"], **options)


def test_modules_are_clients_and_packages_do_not_mix(packages):
    corpus = load()
    parts = corpus.clients[:3]
    ids = [i for part in parts for i in part.ids]
    assert sorted(ids) == sorted(f"jpx_private.m{n}" for n in range(12))
    module = next(part for part in parts if "jpx_private.m3" in part.ids)
    assert module.client_texts(module.ids.index("jpx_private.m3")) == [
        "The module number 3 of _code_ does many things.",
        "It has two sentences.",
        "A class that holds the number 3 in it.",
        "Returns the square of it d.",
        "Another sentence follows here.",
        "A function inside another one is read too.",
    ]
    assert len(corpus.public.tokens) == 72
    assert corpus.versions == {"jpx_private": "unknown", "jpx_public": "unknown"}
    assert corpus.missing == ()


def test_the_second_run_reads_the_cache_only(packages, monkeypatch):
    first = load()

    def parsed(file):
        raise AssertionError(f"{file} was parsed again")

    monkeypatch.setattr(docstrings, "_module_row", parsed)
    again = load()
    assert again.clients.train.digest == first.clients.train.digest
    assert again.public.digest == first.public.digest


def test_a_damaged_cache_is_made_anew(packages, tmp_path):
    first = load()
    for file in (tmp_path / "cache" / "docstrings").iterdir():
        file.write_bytes(file.read_bytes()[:50])
    assert load().clients.train.digest == first.clients.train.digest


def test_caps_and_missing_packages(packages):
    corpus = docstrings.load_default(
        private=["jpx_private", "jpx_absent"], public=["jpx_public"], max_examples_per_client=2
    )
    assert corpus.missing == ("jpx_absent",)
    assert set(corpus.clients.train.counts.tolist()) == {2}
    assert corpus.clients.train.report.capped_examples == 12 * 4
    with pytest.raises(ValueError, match="disjoint"):
        docstrings.load_default(private=["jpx_private"], public=["jpx_private"])
    with pytest.raises(InputError, match="--data FILE"):
        docstrings.load_default(private=["jpx_absent"], public=["jpx_public"])
    with pytest.raises(InputError, match="--data FILE"):
        docstrings.load_documents(packages=["jpx_private", "jpx_absent"])


def test_documents_have_labels_and_modules_stay_together(packages):
    documents = docstrings.load_documents(packages=["jpx_private", "jpx_public"], max_per_label=None)
    assert (
        len(documents.texts) == 2 * 13
    )  # one module docstring each, and one method's that all modules share
    assert "The module number 3 of code does many things. It has two sentences." in documents.texts
    assert set(documents.labels) == {"jpx_private", "jpx_public"}
    where = {}
    for module, split in zip(documents.modules, documents.splits):
        assert where.setdefault(module, split) == split
    few = docstrings.load_documents(packages=["jpx_private", "jpx_public"], max_per_label=4)
    assert len(few.texts) == 8
    assert set(few.texts) <= set(documents.texts)
    assert few.digest != documents.digest


def test_documents_of_one_sentence_are_left_out_by_name(packages):
    """The paper keeps documents of 2 and more: `min_sentences` does, and 1 takes the others too (AC33)."""
    names, one = ["jpx_private", "jpx_public"], "A class that holds the number 3 in it."
    kept = docstrings.load_documents(packages=names, max_per_label=None)
    every = docstrings.load_documents(packages=names, max_per_label=None, min_sentences=1)
    assert all(len(prose.split_sentences(text)) >= 2 for text in kept.texts)
    assert one not in kept.texts
    assert one in every.texts
    assert set(kept.texts) < set(every.texts)
    with pytest.raises(InputError, match="no docstring of the packages has 3 sentences"):
        docstrings.load_documents(packages=names, min_sentences=3)


@pytest.mark.slow
def test_the_default_is_large_enough_for_the_demonstration(monkeypatch, tmp_path):
    corpus = docstrings.load_default()
    train = corpus.clients.train
    assert train.num_clients > 600
    assert train.num_examples > 25_000
    assert min(corpus.clients.validation.num_clients, corpus.clients.test.num_clients) > 60
    assert len(corpus.public.tokens) > 20_000
    from trainers.common.vocabulary import Vocabulary

    vocabulary = Vocabulary.from_public_texts(corpus.public.tokens, 2000)
    assert vocabulary.coverage(corpus.clients.test.tokens) > 0.8
    documents = docstrings.load_documents()
    assert len(set(documents.labels)) >= 6
    assert min(documents.splits.count(s) for s in ("train", "validation", "test")) > 200
