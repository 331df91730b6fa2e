"""The mathematics of head diversity: tensors in, tensors out."""

from hdi_callback.core.allocation import (
    AllocationChoice,
    AllocationRanking,
    HeadAllocation,
    allocate_heads,
    rank_allocations,
)
from hdi_callback.core.chance import chance_of_overlap
from hdi_callback.core.circuits import CircuitSimilarity, ov_circuits, qk_circuits
from hdi_callback.core.contribution import ContributionSums, ImportanceSums, head_slopes
from hdi_callback.core.covariance import HeadCovariance, head_covariance
from hdi_callback.core.diversity import (
    DiversityLens,
    HeadDiversity,
    head_diversity,
    head_diversity_from_covariance,
)
from hdi_callback.core.error_decomposition import BiasVarianceCovariance, bias_variance_covariance
from hdi_callback.core.head_sums import HeadMoments
from hdi_callback.core.kernels import AttentionRows, AttentionSums, noise_covariance
from hdi_callback.core.norms import NormSums, logit_bound
from hdi_callback.core.penalties import diversity_penalty
from hdi_callback.core.separation import Folding, attention_agreement, fold_head, folding_error, fresh_head
from hdi_callback.core.subspaces import HeadBases, head_overlap, orthonormal_bases, principal_cosines
from hdi_callback.core.tokens import TokenSpread, token_spread
from hdi_callback.core.updates import HeadUpdate, head_movement, head_update, spectral_entropy, weight_update
from hdi_callback.deprecation import renamed

__all__ = [
    "AllocationChoice",
    "AllocationRanking",
    "AttentionRows",
    "AttentionSums",
    "BiasVarianceCovariance",
    "CircuitSimilarity",
    "ContributionSums",
    "DiversityLens",
    "Folding",
    "HeadAllocation",
    "HeadBases",
    "HeadCovariance",
    "HeadDiversity",
    "HeadMoments",
    "HeadUpdate",
    "ImportanceSums",
    "NormSums",
    "TokenSpread",
    "allocate_heads",
    "attention_agreement",
    "bias_variance_covariance",
    "chance_of_overlap",
    "diversity_penalty",
    "fold_head",
    "folding_error",
    "fresh_head",
    "head_covariance",
    "head_diversity",
    "head_diversity_from_covariance",
    "head_movement",
    "head_overlap",
    "head_slopes",
    "head_update",
    "logit_bound",
    "noise_covariance",
    "orthonormal_bases",
    "ov_circuits",
    "principal_cosines",
    "qk_circuits",
    "rank_allocations",
    "spectral_entropy",
    "token_spread",
    "weight_update",
]

__getattr__ = renamed(__name__, {"handover_loss": "hdi_callback.core.separation:folding_error"})
