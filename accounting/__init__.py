"""What a private mechanism guarantees: sensitivity, zCDP, (epsilon, delta), statements.

>>> import accounting
>>> run = accounting.TreeAggregation(
...     noise_multiplier=7.0, num_rounds=2000, rounds_between=313, max_participations=6, adjacency="zero-out"
... )
>>> accounting.squared_sensitivity(run)
79
>>> round(accounting.rho(run), 6)
0.806122
>>> round(accounting.epsilon(run, delta=1e-10), 6)
8.526093
"""

from accounting import strategies
from accounting.comparison import compare
from accounting.conversions import (
    delta_from_rho,
    epsilon_curve,
    epsilon_from_rho,
    pure_to_rho,
)
from accounting.errors import prefix_error
from accounting.guarantees import (
    Guarantee,
    compose,
    default_count_stddev,
    delta,
    document_epsilon,
    epsilon,
    rho,
    rho_from_sensitivity,
    sensitivity_of,
    squared_sensitivity,
    value_noise_multiplier,
)
from accounting.histograms import histogram_delta, histogram_epsilon, histogram_threshold
from accounting.mechanisms import (
    DistributedDiscreteGaussian,
    MatrixMechanism,
    PureDP,
    QuantileEstimation,
    SecureAggregation,
    TreeAggregation,
    inflated_norm,
)
from accounting.planning import calibrate, plan
from accounting.record import ParticipationLog, RunRecord, write_mechanism, write_stages
from accounting.reporting import at_deployment, max_separation, report
from accounting.statement import PrivacyStatement, in_full, no_guarantee, round_up, statement

__all__ = [
    "DistributedDiscreteGaussian",
    "Guarantee",
    "MatrixMechanism",
    "ParticipationLog",
    "PrivacyStatement",
    "PureDP",
    "QuantileEstimation",
    "RunRecord",
    "SecureAggregation",
    "TreeAggregation",
    "at_deployment",
    "calibrate",
    "compare",
    "compose",
    "default_count_stddev",
    "delta",
    "delta_from_rho",
    "document_epsilon",
    "epsilon",
    "epsilon_curve",
    "epsilon_from_rho",
    "histogram_delta",
    "histogram_epsilon",
    "histogram_threshold",
    "in_full",
    "inflated_norm",
    "max_separation",
    "no_guarantee",
    "plan",
    "prefix_error",
    "pure_to_rho",
    "report",
    "rho",
    "rho_from_sensitivity",
    "round_up",
    "sensitivity_of",
    "squared_sensitivity",
    "statement",
    "strategies",
    "value_noise_multiplier",
    "write_mechanism",
    "write_stages",
]
