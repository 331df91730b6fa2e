"""Nothing on the default path makes the host wait for the device."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from hdi_callback.core import (
    AttentionSums,
    ContributionSums,
    HeadMoments,
    ImportanceSums,
    NormSums,
    circuits,
    diversity,
    diversity_penalty,
    head_covariance,
    head_diversity,
    head_update,
    kernels,
    logit_bound,
    noise_covariance,
    ov_circuits,
    principal_cosines,
    qk_circuits,
    token_spread,
    whitening,
)
from hdi_callback.core import head_diversity_from_covariance as from_covariance
from hdi_callback.core.head_sums import HeadSums
from hdi_callback.core.tensors import may_decide_on_host
from tests.core.no_sync import NoSync
from tests.core.test_subspaces import CASES, gaussian
from tests.skips import NEEDS_CUDA_BUILD, NEEDS_GPU

SILENT = {
    "head_diversity": (head_diversity, [gaussian(3, 4, 8, 32)]),
    "head_diversity, exact": (partial(head_diversity, method="exact"), [gaussian(4, 8, 32)]),
    "head_diversity, bfloat16": (head_diversity, [gaussian(4, 8, 32).bfloat16()]),
    "head_diversity, in a metric": (
        lambda weight, S: head_diversity(weight, metric=S, tokens=100, memory_budget=5000),
        [gaussian(3, 4, 8, 32), gaussian(32, 32) @ gaussian(32, 32).mT],
    ),
    "from covariance": (partial(from_covariance, tokens=100), [gaussian(4, 8, 4, 8)]),
    "penalty": (diversity_penalty, [gaussian(4, 8, 32)]),
    "penalty, float16": (diversity_penalty, [gaussian(4, 8, 32).half()]),
    "head_covariance": (partial(head_covariance, lengths=[5, 15]), [gaussian(20, 4, 8), gaussian(4, 8, 32)]),
    "query-key circuits": (qk_circuits, [gaussian(3, 4, 8, 32), gaussian(3, 2, 8, 24)]),
    "output-value circuits": (
        lambda value, output, S, heads: ov_circuits(value, output, value_covariance=S, key_head=heads),
        [gaussian(2, 8, 32), gaussian(4, 8, 32), gaussian(32, 32) @ gaussian(32, 32).mT, torch.tensor([0, 1, 0, 1])],
    ),
    "attention rows": (
        lambda rows, visible, first: (
            AttentionSums.of(rows, visible, logits=rows, first=first) + AttentionSums.of(rows[..., :9])
        ).rows(),
        [gaussian(2, 4, 8, 16).softmax(-1), gaussian(2, 1, 8, 16) > 0, torch.tensor([[[0]], [[1]]])],
    ),
    "norms": (
        lambda query, key, valid: logit_bound(NormSums.of(query, valid) + NormSums.of(query), NormSums.of(key), 0.5),
        [gaussian(2, 4, 8, 16), gaussian(2, 2, 8, 16), gaussian(2, 1, 8) > 0],
    ),
    "noise": (
        lambda product, value, output: noise_covariance(product, ov_circuits(value, output)),
        [gaussian(4, 4), gaussian(4, 8, 32), gaussian(4, 8, 32)],
    ),
    "contribution": (
        lambda outputs, weight, valid: ContributionSums.of(outputs, weight, valid=valid).relative,
        [gaussian(20, 4, 8), gaussian(4, 8, 32), gaussian(20) > 0],
    ),
    "importance": (
        lambda o, g: (ImportanceSums.of(o, g).pair_cost, ImportanceSums.of(o, g).importance),
        [gaussian(5, 20, 4, 8), gaussian(5, 20, 4, 8)],
    ),
    "tokens": (token_spread, [gaussian(3, 20, 32), gaussian(3, 20) > 0]),
    "update": (head_update, [gaussian(3, 4, 8, 32), gaussian(3, 4, 8, 32, seed=1)]),
    "sums over ranks": (
        lambda outputs, weight: [
            HeadSums.of(outputs, None, outputs.mean(0), with_scatter=True).mixed(weight).covariance().output_overlap,
            HeadSums.of(outputs, weight, outputs.mean(0), weights=outputs[:, 0, 0]).covariance().trace,
        ],
        [gaussian(20, 4, 8), gaussian(4, 8, 32)],
    ),
    "streaming": (lambda first, second: HeadMoments.of(first).update(second), [gaussian(9, 4, 8), gaussian(9, 4, 8)]),
}


def test_only_plain_cpu_tensors_with_float32_results_may_be_read_on_the_host():
    weight = torch.ones(2)
    assert all(map(may_decide_on_host, (weight, torch.nn.Parameter(weight), weight.bfloat16())))
    others = weight.to("meta"), weight.double(), weight.as_subclass(type("Wrapped", (torch.Tensor,), {}))
    assert not any(map(may_decide_on_host, others))


@pytest.mark.parametrize("what", SILENT)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_default_path_never_reads_a_value(what, device, monkeypatch):
    for module in (circuits, diversity, kernels, whitening):
        monkeypatch.setattr(module, "may_decide_on_host", lambda weight: False)  # as on an accelerator
    read, tensors = SILENT[what]
    tensors = [tensor.to(device) for tensor in tensors]
    with NoSync():
        read(*tensors)


@pytest.mark.parametrize(
    "loud",
    [
        lambda x: head_diversity(x, method="svd"),
        principal_cosines,
        lambda x: float(x.sum()),
        lambda x: x[x > 0],
        lambda x: bool((x > 0).all()),
        lambda x: x.nonzero(),
        lambda x: torch.linalg.eigh(x @ x.mT),
        torch.unique,
        lambda x: torch.repeat_interleave(x[0, 0], torch.ones(32, dtype=torch.int64)),
        lambda x: torch.bincount(x.flatten().abs().long()),
        lambda x: torch.index_put(x, (torch.ones(4, dtype=torch.bool),), x.clone()),
    ],
)
def test_an_operation_that_reads_a_value_is_detected(loud):
    with pytest.raises(AssertionError, match="makes the host wait"), NoSync():
        loud(gaussian(4, 8, 32))


@pytest.mark.parametrize("what", SILENT)
def test_no_value_is_read_on_the_host_without_fast_float64(what, monkeypatch):
    monkeypatch.setattr(whitening, "has_fast_float64", lambda device: False)
    for module in (circuits, diversity, kernels, whitening):
        monkeypatch.setattr(module, "may_decide_on_host", lambda weight: False)  # as on an accelerator
    read, tensors = SILENT[what]
    with NoSync():
        read(*(tensor.float() if tensor.is_floating_point() else tensor for tensor in tensors))


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason=NEEDS_CUDA_BUILD)
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("what", SILENT)
def test_fake_tensors_on_cuda_go_through_with_their_devices_and_shapes(what, fast, monkeypatch):
    monkeypatch.setattr(whitening, "has_fast_float64", lambda device: fast)
    read, tensors = SILENT[what]
    with FakeTensorMode():
        results = read(*(torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda") for tensor in tensors))
    results = list(vars(results).values()) if hasattr(results, "__dataclass_fields__") else results
    found = [result for result in tree_leaves(results) if isinstance(result, torch.Tensor)]
    assert found
    assert all(result.device.type == "cuda" for result in found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason=NEEDS_GPU)
@pytest.mark.parametrize("what", SILENT)
def test_no_operation_synchronises_on_cuda(what):
    read, tensors = SILENT[what]
    tensors = [tensor.cuda() for tensor in tensors]
    read(*tensors)  # libraries are loaded in the first call, and may wait there
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        read(*tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason=NEEDS_GPU)
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_cuda_results_agree_with_the_cpu(case, tf32, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", tf32)
    weight = CASES[case].float()
    host, device = head_diversity(weight.double(), method="exact"), head_diversity(weight.cuda())
    assert torch.allclose(device.overlap.cpu().double(), host.overlap, atol=1e-3 if tf32 else 1e-5)
