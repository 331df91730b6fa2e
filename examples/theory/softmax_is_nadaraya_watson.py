"""Claim 1: softmax attention is the Nadaraya-Watson estimator; the Gaussian kernel where key norms are constant."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.metrics.pairwise import rbf_kernel
from torch import Tensor
from torch.nn import functional as F

from examples.theory.claim import Claim, Number, Part, Size
from examples.theory.intervals import bootstrap
from examples.theory.models import NO_ENCODER, Recorded, recorded_encoder, recorded_gpt, trained_gpt

EXACT = 1e-12  # float64, rows of some hundred keys
NEAR = 0.05  # mean total variation up to which we call a head's kernel Gaussian


def nadaraya_watson(kernel: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Average of the targets, weighted by the kernel: its definition, in NumPy."""
    return (kernel @ targets) / kernel.sum(-1, keepdims=True)


def gaussian_rows(q: Tensor, k: Tensor) -> Tensor:
    """Rows of the Gaussian kernel with the bandwidth that the scale of attention gives, bandwidth^2 = sqrt(d_k)."""
    gamma = 1 / (2 * q.shape[-1] ** 0.5)
    return (-gamma * torch.cdist(q, k).square()).softmax(-1)


def largest_errors(draws: int) -> tuple[float, float, float]:
    """Attention against the three kernels: exponential; Gaussian at constant key norms; Gaussian with prior weights."""
    draw = torch.Generator().manual_seed(0)
    worst = [0.0, 0.0, 0.0]
    for _ in range(draws):
        q, k, v = (torch.randn(n, d, generator=draw, dtype=torch.float64) for n, d in ((7, 8), (200, 8), (200, 3)))
        scale = 8**-0.5
        plain = F.scaled_dot_product_attention(q[None], k[None], v[None])[0].numpy()
        worst[0] = max(worst[0], abs(plain - nadaraya_watson(np.exp(scale * (q @ k.mT).numpy()), v.numpy())).max())
        even = 3 * F.normalize(k, dim=-1)
        plain = F.scaled_dot_product_attention(q[None], even[None], v[None])[0].numpy()
        gaussian = rbf_kernel(q.numpy(), even.numpy(), gamma=scale / 2)  # scikit-learn's
        worst[1] = max(worst[1], abs(plain - nadaraya_watson(gaussian, v.numpy())).max())
        plain = F.scaled_dot_product_attention(q[None], k[None], v[None])[0].numpy()
        prior = np.exp(scale / 2 * k.square().sum(-1).numpy())
        gaussian = rbf_kernel(q.numpy(), k.numpy(), gamma=scale / 2) * prior
        worst[2] = max(worst[2], abs(plain - nadaraya_watson(gaussian, v.numpy())).max())
    return worst[0], worst[1], worst[2]


def distance_by_head(layer: Recorded) -> tuple[Tensor, Tensor]:
    """(sequences, H): coefficient of variation of the keys' norms, and total variation between both kernels' rows."""
    q, k = layer.features(layer.query), layer.features(layer.key)
    norms = k.norm(dim=-1)
    soft = layer.scores().softmax(-1)
    gamma = 1 / (2 * q.shape[-1] ** 0.5)
    gaussian = layer.masked(-gamma * torch.cdist(q, k).square()).softmax(-1)
    return norms.std(-1) / norms.mean(-1), (soft - gaussian).abs().sum(-1).mean(-1) / 2


def run(size: Size) -> Claim:
    exponential, even, prior = largest_errors(3 if size == "small" else 50)
    sequences, steps = (4, 30) if size == "small" else (32, 400)
    models = {"small GPT": recorded_gpt(trained_gpt(steps), sequences), "trained encoder": []}
    if size == "full":
        models["trained encoder"] = recorded_encoder(sequences)
    numbers = [
        Number("softmax against the Nadaraya-Watson average, largest difference", exponential),
        Number("against scikit-learn's Gaussian kernel, keys of one norm", even),
        Number("against the Gaussian kernel with prior weights, any keys", prior),
    ]
    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    shares = []
    for name, layers in models.items():
        if not layers:
            continue
        both = [distance_by_head(layer) for layer in layers]
        spread, away = (torch.cat([pair[i] for pair in both], 1) for i in (0, 1))  # (sequences, all heads)
        of = f"{spread.shape[0]} sequences, {spread.shape[1]} heads"
        numbers.append(bootstrap(f"variation of key norms, {name}", spread.mean(1), np.mean, of))
        numbers.append(bootstrap(f"distance from the Gaussian kernel, {name}", away.mean(1), np.mean, of))
        by_head = away.mean(0)
        shares.append(float((by_head < NEAR).double().mean()))
        numbers.append(Number(f"heads nearer to it than {NEAR}, {name}", shares[-1], of=of))
        axis.scatter(spread.mean(0), by_head, s=14, label=name)
    axis.axhline(NEAR, color="grey", linestyle="--", linewidth=1)
    axis.set(xlabel="coefficient of variation of the keys' norms", ylabel="total variation from the Gaussian kernel")
    axis.legend()
    is_exact = exponential < EXACT
    gaussian = "holds if" if max(even, prior) < EXACT else "fails"
    trained = "holds" if shares and min(shares) > 0.9 else "fails" if shares and max(shares) < 0.9 else "open"
    return Claim(
        name="softmax_is_nadaraya_watson",
        title="Softmax attention is the Nadaraya-Watson estimator",
        words=[
            "A Nadaraya-Watson estimator predicts at a point by averaging the targets around it, with weights from a "
            "kernel: $\\hat f(q) = \\sum_j K(q, k_j) v_j / \\sum_j K(q, k_j)$ (Nadaraya 1964, Watson 1964). Softmax "
            "attention is that with $K(q, k) = \\exp(q^\\top k / \\sqrt{d_k})$: the keys are the points and the "
            "values are the targets.",
            "This kernel also gives long keys more weight. As $q^\\top k = -\\frac12 \\lVert q - k \\rVert^2 + "
            "\\frac12 "
            "\\lVert q \\rVert^2 + \\frac12 \\lVert k \\rVert^2$, it is the Gaussian kernel of bandwidth $d_k^{1/4}$ "
            "with the prior weight $\\exp(\\lVert k_j \\rVert^2 / 2 \\sqrt{d_k})$ on key $j$, and the plain Gaussian "
            "kernel if all keys have one norm. Whether keys of trained heads do is measured: the distance "
            "between both kernels' rows is the total variation, 0 if they are the same and 1 if they put their weight "
            "on different tokens.",
        ],
        parts=[
            Part(
                "softmax attention is a Nadaraya-Watson estimator",
                f"holds if the largest difference is below {EXACT:g}",
                "holds" if is_exact else "fails",
                f"The largest difference is {exponential:.1e}.",
            ),
            Part(
                "its kernel is Gaussian",
                f"holds if, where keys have one norm or the prior weights are kept, the difference is below {EXACT:g}",
                gaussian,
                f"keys have one norm, or keep their prior weight: difference {max(even, prior):.1e}",
            ),
            Part(
                "the kernels of trained heads are Gaussian",
                f"holds if in every model over 90 % of heads are nearer than {NEAR} in total variation, fails if in "
                "none",
                trained,
                "share of such heads: " + ", ".join(f"{share:.0%}" for share in shares),
            ),
        ],
        numbers=numbers,
        seeds="0 (keys, queries, the GPT), 1 (its text)",
        left="Rotary positions and norms of queries and keys, with which the kernel also depends on the distance "
        "of two tokens." + ("" if models["trained encoder"] else f" {NO_ENCODER}"),
        caption="How uneven the keys' norms are in each head, and how far its attention is from the Gaussian kernel",
        figure=figure,
    )
