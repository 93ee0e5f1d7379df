"""One round of federated training as one jitted function whose state is donated.

    clipped sum over clients  ->  + correlated noise  ->  / report goal  ->  server optimizer

The divisor is the fixed report goal, never the number of clients that came. What is released (the noised mean, and
with adaptive clipping the noised fraction of small updates) and what only the operator may see come back
apart.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Key

from jaxpriv import cohort, keys, quantile, sharding
from jaxpriv.noise import NoiseMechanism
from trainers.keyboard import client, secure_sum
from trainers.keyboard.batches import RoundBatch
from trainers.keyboard.model import ModelConfig, Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveClip:
    """Follow a quantile of the update norms, privately (Andrew et al. 2021, arXiv:1905.03871).

    target: the quantile, between 0 and 1.
    learning_rate: geometric step of the estimate.
    count_stddev: standard deviation of one underlying Gaussian on the count of small updates (sigma_b).
    """

    target: float
    learning_rate: float
    count_stddev: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundConfig:
    """Everything about a round that stays the same.

    report_goal: fixed divisor of every sum.
    client_learning_rate, local_epochs: of the clients' SGD.
    clip_norm: bound C on a client's update (with `adaptive` the first one); None: no clipping, hence no privacy.
    noise_multiplier: standard deviation of one underlying Gaussian on the sum of updates, divided by the clip
      norm: z, or z_delta where bits are released beside the updates.
    adaptive: None for a fixed clip norm. The noise scale is fixed within a segment of the mechanism, so the clip norm
      becomes the estimate only where one starts (in every round if the mechanism is independent or None).
    weigh_by_examples: weigh updates by examples and divide by all of them; only without clipping and noise.
    secure: None sums the clipped updates as they are; else each client's goes through secure aggregation's
      integers (and, where the clients add the noise, the mechanism adds none).
    """

    report_goal: int
    client_learning_rate: float
    local_epochs: int
    clip_norm: float | None
    noise_multiplier: float
    adaptive: AdaptiveClip | None
    weigh_by_examples: bool = False
    secure: secure_sum.SecureSum | None = None

    def __post_init__(self):
        if self.report_goal < 1 or self.local_epochs < 1:
            raise ValueError(
                "report_goal and local_epochs must be at least 1, got"
                f" {self.report_goal=}, {self.local_epochs=}"
            )
        if not 0 <= self.noise_multiplier < float("inf"):
            raise ValueError(f"noise_multiplier must be a number from 0, got {self.noise_multiplier}")
        if self.clip_norm is None and (self.noise_multiplier > 0 or self.adaptive):
            raise ValueError(
                "without a clip_norm nothing bounds a client: noise and adaptive clipping need one"
            )
        if self.clip_norm is not None and not 0 < self.clip_norm < float("inf"):
            raise ValueError(f"clip_norm must be a finite number above 0, got {self.clip_norm}")
        if self.weigh_by_examples and self.clip_norm is not None:
            raise ValueError(
                "weigh_by_examples lets one client own nearly the whole sum; use equal weights, or clip_norm=None"
                " without privacy"
            )
        if self.secure is not None:
            if self.clip_norm is None:
                raise ValueError("secure aggregation scales updates by their bound: it needs a clip_norm")
            if self.secure.distributed and self.adaptive is not None:
                raise ValueError("noise in shares of the clients serves a fixed clip norm only")


class RoundState(NamedTuple):
    """What the next round needs; private as a whole, since the noise states hold secret keys.

    params, server: the model and the server optimizer's state (both releasable).
    noise, bit_noise: states of the noise mechanism for updates and for bits; () where there is none.
    quantile: state of the estimate, () with a fixed clip norm.
    clip_norm: bound in force; inf without clipping.
    step: released rounds so far.
    rounding: secret key of the clients' roundings and shares of noise; () without secure aggregation.
    """

    params: Params
    server: Any
    noise: Any
    bit_noise: Any
    quantile: Any
    clip_norm: Float[Array, ""]
    step: Int[Array, ""]
    rounding: Any = ()


class Released(NamedTuple):
    """Outputs of the mechanism and what follows from them: covered by the guarantee.

    clip_norm: the bound in force in this round.
    estimate: the quantile estimate after this round (the clip norm where clipping is fixed).
    fraction: noised fraction of updates within the estimate before this round; NaN where clipping is fixed.
    update_norm: L2 norm of the noised mean that the server optimizer was given.
    """

    clip_norm: Float[Array, ""]
    estimate: Float[Array, ""]
    fraction: Float[Array, ""]
    update_norm: Float[Array, ""]


class RoundInfo(NamedTuple):
    """released: may be published. operator: computed from client data, not covered by the guarantee."""

    released: Released
    operator: cohort.CohortInfo


def init(
    config: RoundConfig,
    params: Params,
    server: optax.GradientTransformation,
    mechanism: NoiseMechanism | None,
    noise_key: Key[Array, ""] | None,
) -> RoundState:
    """The state before the first round; `params` are copied, so donating the state leaves the caller's alone.

    Args:
      mechanism: None for no noise at all (and no guarantee).
      noise_key: secret root of the noise, of rounding and of the clients' shares; None only with `mechanism`
        None and without secure aggregation.
    """
    params = jax.tree.map(jnp.array, params)
    clip_norm = float("inf") if config.clip_norm is None else config.clip_norm
    noise = bit_noise = estimate = ()
    if config.adaptive is not None:
        estimate = quantile.init(clip_norm)
    if mechanism is not None:
        if noise_key is None:
            raise ValueError("a noise mechanism needs a noise_key")
        noise = mechanism.init(keys.stream(noise_key, "updates"), params)
        if config.adaptive is not None:
            bit_noise = mechanism.init(keys.stream(noise_key, "bits"), jnp.float32(0.0))
    rounding = ()
    if config.secure is not None:
        if noise_key is None:
            raise ValueError("secure aggregation rounds with secret randomness and needs a noise_key")
        rounding = keys.stream(noise_key, "secure aggregation")
    return RoundState(
        params=params,
        server=server.init(params),
        noise=noise,
        bit_noise=bit_noise,
        quantile=estimate,
        clip_norm=jnp.float32(clip_norm),
        step=jnp.int32(0),
        rounding=rounding,
    )


def make_round(
    config: RoundConfig,
    model: ModelConfig,
    server: optax.GradientTransformation,
    mechanism: NoiseMechanism | None,
    mesh: Mesh | None = None,
) -> Callable[[RoundState, RoundBatch], tuple[RoundState, RoundInfo]]:
    """The jitted `(state, batch) -> (state, info)`; the state passed in is donated and must not be used again.

    Memory beside the state, in copies of the model: the sum (two with more than 32 chunks), and for every client
    of a chunk its local model and its update; the noise mechanism adds what its own state says (a tree none).

    Args:
      server: any optax transform; it is given the negated noised mean of the updates as gradient.
      mechanism: adds its increment to the sum; None adds nothing.
      mesh: spreads the clients over its devices, each of which runs through its own part of the batch
        (`sharding.place_parts`) by itself; the state is replicated, and noise is the same to the bit.
    """
    if mechanism is None and config.noise_multiplier > 0:
        raise ValueError(f"noise_multiplier={config.noise_multiplier} without a mechanism; pass one, or 0")
    if mechanism is not None and config.clip_norm is None:
        raise ValueError("noise without a clip_norm guarantees nothing; give one")
    shares = config.secure is not None and config.secure.distributed
    if shares and mechanism is None:
        raise ValueError("the clients' shares are independent noise; pass noise.independent()")

    def step(state: RoundState, batch: RoundBatch) -> tuple[RoundState, RoundInfo]:
        clip_norm, estimate = state.clip_norm, None
        if config.adaptive is not None:
            estimate = state.quantile.clip
            latches = jnp.bool_(True) if mechanism is None else mechanism.starts_segment(state.noise)
            clip_norm = jnp.where(latches, estimate, clip_norm)

        def sum_of(shared, part: RoundBatch):
            params, clip_norm, estimate, rounding, signs, step = shared
            one_at_a_time = part.cohort.present.shape[1] == 1

            def client_fn(params, span, key):
                del key  # a device draws nothing
                return client.local_sgd(
                    params,
                    part.store,
                    span,
                    learning_rate=config.client_learning_rate,
                    epochs=config.local_epochs,
                    cell=model.cell,
                    one_at_a_time=one_at_a_time,
                )

            encode: Any = None
            if config.secure is not None:
                encode = secure_sum.encoder(config.secure, rounding, signs, step, clip_norm)
            return cohort.clipped_sum(
                client_fn,
                params,
                part.cohort,
                None,
                max_norm=None if config.clip_norm is None else clip_norm,
                estimate=estimate,
                weigh_by_examples=config.weigh_by_examples,
                encode=encode,
            )

        signs: Any = None if config.secure is None else secure_sum.signs(config.secure, state.step)
        shared = (state.params, clip_norm, estimate, state.rounding, signs, state.step)
        if mesh is None:
            sums, operator = sum_of(shared, batch)
        else:
            sums, operator = sharding.sum_parts(sum_of, shared, batch, mesh)
        if config.secure is not None:
            sums = secure_sum.recover(config.secure, sums, signs, clip_norm, like=state.params)
        noise_state, total = state.noise, sums.update
        if mechanism is not None and not shares:
            noise_state, noise = mechanism.step(state.noise, stddev=config.noise_multiplier * clip_norm)
            total = jax.tree.map(jnp.add, total, noise)
        divisor = config.report_goal
        if config.weigh_by_examples:
            divisor = jnp.maximum(operator.num_examples, 1).astype(jnp.float32)
        mean = jax.tree.map(lambda x: x / divisor, total)
        updates, server_state = server.update(jax.tree.map(jnp.negative, mean), state.server, state.params)
        params: Params = optax.apply_updates(state.params, updates)  # type: ignore[assignment]

        quantile_state, bit_noise = state.quantile, state.bit_noise
        new_estimate, fraction = clip_norm, jnp.float32(jnp.nan)
        if config.adaptive is not None:
            noise = jnp.float32(0.0)
            if mechanism is not None:
                bit_noise, noise = mechanism.step(
                    state.bit_noise, stddev=jnp.float32(config.adaptive.count_stddev)
                )
            quantile_state, fraction = quantile.step(
                state.quantile,
                sums.below,
                noise,
                target=config.adaptive.target,
                learning_rate=config.adaptive.learning_rate,
                cohort_size=config.report_goal,
            )
            new_estimate = quantile_state.clip
        new = RoundState(
            params,
            server_state,
            noise_state,
            bit_noise,
            quantile_state,
            clip_norm,
            state.step + 1,
            state.rounding,
        )
        released = Released(clip_norm, new_estimate, fraction, optax.tree.norm(mean))
        return new, RoundInfo(released, operator)

    everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return jax.jit(step, donate_argnums=0, out_shardings=everywhere)


def diverged(info: RoundInfo) -> bool:
    """Whether every client with examples sent a non-finite update (three such rounds running should stop a run)."""
    tried = int(info.operator.num_present) - int(info.operator.num_empty)
    return tried > 0 and int(info.operator.num_non_finite) == tried
