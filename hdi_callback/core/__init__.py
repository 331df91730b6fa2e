"""The mathematics of head diversity: tensors in, tensors out."""

from hdi_callback.core.allocation import HeadAllocation, allocate_heads
from hdi_callback.core.chance import chance_of_overlap
from hdi_callback.core.circuits import CircuitSimilarity, ov_circuits, qk_circuits
from hdi_callback.core.covariance import (
    BiasVarianceCovariance,
    HeadCovariance,
    HeadMoments,
    bias_variance_covariance,
    head_covariance,
)
from hdi_callback.core.diversity import (
    HeadDiversity,
    diversity_penalty,
    head_diversity,
    head_diversity_from_covariance,
)
from hdi_callback.core.kernels import AttentionRows, AttentionSums, NormSums, logit_bound, noise_covariance
from hdi_callback.core.separation import Folding, fold_head, fresh_head
from hdi_callback.core.subspaces import HeadBases, head_overlap, orthonormal_bases, principal_cosines

__all__ = [
    "AttentionRows",
    "AttentionSums",
    "BiasVarianceCovariance",
    "CircuitSimilarity",
    "Folding",
    "HeadAllocation",
    "HeadBases",
    "HeadCovariance",
    "HeadDiversity",
    "HeadMoments",
    "NormSums",
    "allocate_heads",
    "bias_variance_covariance",
    "chance_of_overlap",
    "diversity_penalty",
    "fold_head",
    "fresh_head",
    "head_covariance",
    "head_diversity",
    "head_diversity_from_covariance",
    "head_overlap",
    "logit_bound",
    "noise_covariance",
    "orthonormal_bases",
    "ov_circuits",
    "principal_cosines",
    "qk_circuits",
]
