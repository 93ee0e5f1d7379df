"""What a memory of a model and a codebook says of itself."""

from __future__ import annotations

from jaxpriv import pq
from trainers.common.errors import InputError
from trainers.translation import data, datastore


def facts_of(
    model: data.Model, codebook: pq.Codebook | pq.Projection | None, *, weighted: bool = False
) -> datastore.Facts:
    """What a memory of this model and codebook (of buckets with counts, if `weighted`) must say of itself."""
    dim = model.config.dim
    if codebook is None:
        coding, width, dtype, own = "none", dim, "float32", dim
    elif isinstance(codebook, pq.Codebook):
        coding, width, dtype = "pq", codebook.centroids.shape[0], "uint8"
        own = codebook.centroids.shape[0] * codebook.centroids.shape[2]
    else:
        coding, (width, own), dtype = "pca", codebook.components.shape, "float32"
    if own != dim:
        raise InputError(f"the codebook is for keys of {own} numbers, the model's have {dim}; use its own")
    return datastore.Facts(
        model=model.digest,
        dim=dim,
        width=int(width),
        dtype=dtype,
        coding=coding,
        codebook=datastore.codebook_digest(codebook),
        key=model.config.key,
        vocabulary_size=model.config.vocabulary_size,
        weighted=weighted,
    )
