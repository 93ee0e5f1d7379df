"""The variant for a document: by its public number of sentences, from validation, one form of release for all."""

import dataclasses

import jax
import numpy as np
import pytest

from trainers.documents import choices, data, methods, release, store

SHORT, LONG = 3, 30


def validation(*sizes):
    """Documents of SHORT and LONG sentences, as many as `sizes`, with labels in turn."""
    counts = np.repeat([SHORT, LONG], sizes)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    labels = np.arange(len(counts)) % 2
    texts = [""] * len(counts)
    return data.Encoded(texts, texts, labels, ("a", "b"), np.zeros((offsets[-1], 1), np.float32), offsets)


def method(right, width=lambda variant: 1):
    """A method whose variant is right about documents of the lengths `right[variant]` and always wrong else."""

    def release(prepared, counts, key_rows, epsilon, variant):
        return methods.Released(np.stack([counts, prepared[variant]], 1), np.zeros(len(counts), int))

    def predict(released, epsilon, variant):
        counts, labels = released.vectors.T.astype(int)
        return np.where(np.isin(counts, right[variant]), labels, 1 - labels)

    return methods.Method(
        name="m", variants=tuple(right), utility="low_rank", draws=False, release=release, predict=predict,
        prepare=lambda documents, wanted: dict.fromkeys(wanted, documents.labels), width=width,
    )  # fmt: skip


def chosen(one, documents):
    prepared = one.prepare(documents, one.variants)
    return choices.choose(one, prepared, documents, jax.random.key(0), 5.0)


def test_each_length_gets_what_serves_it_best():
    documents = validation(150, 200)
    choice, score = chosen(method({"short": [SHORT], "long": [LONG]}), documents)
    assert choice.overall == "long"
    assert choice.by_length == ("short", "long", "long", "long", "long")
    assert score == 100
    parts = {v: rows.tolist() for v, rows in choice.parts(documents.counts)}
    assert parts == {"short": list(range(150)), "long": list(range(150, 350))}


def test_too_few_documents_of_a_length_take_what_is_best_overall():
    choice, _ = chosen(
        method({"short": [SHORT], "long": [LONG]}), validation(choices.LEAST_DOCUMENTS - 1, 200)
    )
    assert choice == choices.always("long")


@pytest.mark.parametrize(("wrong", "variant"), [(2, "a"), (9, "b")])
def test_a_lead_within_the_noise_changes_nothing(wrong, variant):
    """b is wrong about one short document of 150 and about many long ones, a about `wrong` short ones alone."""
    errors = {"a": range(wrong), "b": [0, *range(150, 190)]}

    def predict(released, epsilon, variant):
        labels = released.vectors[:, 1].astype(int)
        return np.where(np.isin(np.arange(350), list(errors[variant])), 1 - labels, labels)

    choice, _ = chosen(dataclasses.replace(method({"a": [], "b": []}), predict=predict), validation(150, 200))
    assert choice == choices.Choice("a", (variant, "a", "a", "a", "a"))


def test_all_releases_have_one_width():
    right = {"short": [SHORT], "long": [LONG], "narrow": []}
    by_width = method(right, width=lambda variant: 2 if variant == "short" else 1)
    assert chosen(by_width, validation(150, 200))[0] == choices.always("long")


def test_neighbouring_documents_have_the_same_variant():
    """They have the same number of sentences, and nothing else counts; 0 and 1 go with the shortest."""
    choice = choices.Choice("a", ("a", "b", "c", "d", "e"))
    counts = np.array([21, 0, 1, 2, 5, 6, 10, 11, 15, 16, 20, 21, 10_000])
    found = dict.fromkeys(range(len(counts)), "")
    for variant, rows in choice.parts(counts):
        found |= dict.fromkeys(rows.tolist(), variant)
    assert "".join(found.values()) == "eaaaabbccddee"
    assert [choices.group_name(i) for i in range(5)] == ["2-5", "6-10", "11-15", "16-20", "21+"]


@pytest.mark.parametrize("name", ["bounded_sum", "low_rank"])
def test_a_document_is_released_by_its_own_variant_as_if_alone(fitted, name):
    found = store.load(fitted)
    built = methods.build(found.config, found.public, found.train, found.validation)[name]
    variants = [v for v in built.variants if built.width(v) == built.width(built.variants[0])]
    choice = choices.Choice(variants[0], (variants[0], variants[1], variants[0], variants[1], variants[-1]))
    documents = found.validation.take(np.arange(12))
    assert len({*choices.group_of(documents.counts).tolist()}) > 1
    key_rows = jax.random.split(jax.random.key(3), 12)
    together = release.release_all(built, documents, key_rows, 8.0, choice, chunk=5)
    for i in range(12):
        variant = choice.by_length[choices.group_of(documents.counts)[i]]
        alone = release.release_all(
            built, documents.take([i]), key_rows[i : i + 1], 8.0, choices.always(variant)
        )
        np.testing.assert_allclose(together.vectors[i], alone.vectors[0], rtol=1e-5, atol=1e-6)
        assert together.candidates[i] == alone.candidates[0]


def test_the_fitted_folder_carries_the_choices(fitted, tmp_path):
    found = store.load(fitted)
    choice = choices.Choice("votes and cosine", tuple(f"way {i}" for i in range(5)))
    store.save(tmp_path, found._replace(choices={"bounded_sum": {"10": choice}}))
    assert store.load(tmp_path).choices == {"bounded_sum": {"10": choice}}
