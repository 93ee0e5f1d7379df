"""A round of our trainer on a `workload`: what the benchmarks that time one have in common."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.bench import workload
from trainers.keyboard import batches, model
from trainers.keyboard import round as rounds


class Setup(NamedTuple):
    """config, sizes, server: what `rounds.make_round` takes. params: the start. clients: all, by number.
    packing: the settings of `batches.pack_round`; `pack_parts` takes them too."""

    config: rounds.RoundConfig
    sizes: model.ModelConfig
    server: optax.GradientTransformation
    params: model.Params
    clients: list[np.ndarray]
    packing: dict[str, Any]

    def pack(self, chosen: list[int]) -> batches.RoundBatch:
        """The round's batch of these clients."""
        return batches.pack_round(chosen, [self.clients[i] for i in chosen], **self.packing)


def make(w: workload.Workload, *, private: bool, chunk_size: int = 1) -> Setup:
    """Without privacy a mean weighted by examples; with it clipping to 1, noise of half the clip norm, the clip norm
    following the median update."""
    adaptive = rounds.AdaptiveClip(target=0.5, learning_rate=0.2, count_stddev=0.1 * w.clients_per_round)
    return Setup(
        config=rounds.RoundConfig(
            report_goal=w.clients_per_round,
            client_learning_rate=w.client_lr,
            local_epochs=1,
            clip_norm=1.0 if private else None,
            noise_multiplier=0.5 if private else 0.0,
            adaptive=adaptive if private else None,
            weigh_by_examples=not private,
        ),
        sizes=model.ModelConfig(
            num_tokens=w.vocab,
            embedding_size=w.embed,
            hidden_size=w.hidden,
            cell="lstm",
            shared_embeddings=True,
        ),
        server=optax.sgd(w.server_lr, momentum=w.server_momentum),
        params=jax.tree.map(jnp.asarray, workload.init_params(w)),
        clients=workload.make_clients(w),
        packing={
            "batch_size": w.batch_size,
            "max_examples": w.max_examples,
            "chunk_size": chunk_size,
            "num_clients": w.clients_per_round,
            "width": w.seq_len + 1,
        },
    )
