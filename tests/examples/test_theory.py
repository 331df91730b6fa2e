"""The claims of the paper, small: identities to machine precision, closed forms against simulation, counterexamples."""

from __future__ import annotations

import importlib
import json
from functools import cache

import matplotlib
import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.stats import binomtest

from examples.theory import CLAIMS
from examples.theory.__main__ import main
from examples.theory.claim import Claim, Number, shown

matplotlib.use("Agg")


@cache
def claim(name: str) -> Claim:
    return importlib.import_module(f"examples.theory.{name}").run("small")


def verdicts(name: str) -> list[str]:
    return [part.verdict for part in claim(name).parts]


# --- 1. Softmax attention is the Nadaraya-Watson estimator


def test_softmax_attention_is_the_nadaraya_watson_average_to_machine_precision():
    from examples.theory.softmax_is_nadaraya_watson import largest_errors

    exponential, even, prior = largest_errors(5)
    assert max(exponential, even, prior) < 1e-13


@pytest.mark.slow
def test_the_page_of_softmax_measures_how_uneven_trained_keys_are():
    found = claim("softmax_is_nadaraya_watson")
    assert [part.verdict for part in found.parts[:2]] == ["holds", "holds if"]
    assert 0 < found["variation of key norms, small GPT"].value < 1


# --- 2. Sparse kernels


def test_every_attention_of_the_table_is_its_kernel():
    from examples.theory.sparse_kernels import ENTRIES, compare

    for entry in ENTRIES:
        worst, empty = compare(entry, draws=2)
        assert worst < 1e-7, entry.attention
        assert (empty > 0) == entry.compact, entry.attention


def test_sparsemax_is_the_projection_onto_the_simplex():
    from examples.theory.sparse_kernels import compact

    draw = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, generator=draw, dtype=torch.float64)
    k = torch.nn.functional.normalize(torch.randn(6, 4, generator=draw, dtype=torch.float64), dim=-1)
    scores = (q @ k.mT / 2)[0].numpy()
    simplex = {"type": "eq", "fun": lambda p: p.sum() - 1}
    found = minimize(
        lambda p: ((p - scores) ** 2).sum(), np.full(6, 1 / 6), bounds=[(0, 1)] * 6, constraints=simplex, tol=1e-14
    )
    assert compact(2)(q, k)[0].numpy() == pytest.approx(found.x, abs=1e-6)


def test_keys_of_many_norms_are_not_weighted_by_distance():
    from examples.theory.sparse_kernels import compact, entmax

    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(n, 6, generator=draw, dtype=torch.float64) for n in (9, 60))
    assert float((entmax(2)(q, k) - compact(2)(q, k)).abs().max()) > 0.01


# --- 3. Decompositions


def test_both_decompositions_close_to_machine_precision():
    from examples.theory.error_decompositions import gaps

    assert max(gaps(20, 50)) < 1e-12


def test_the_variance_against_heads_follows_the_closed_form():
    from examples.theory.error_decompositions import BANDWIDTH, SPREAD, noise_variance
    from examples.theory.estimators import aligned_heads, noise_covariance, orthogonal_heads
    from examples.theory.intervals import mean_of

    for make in (aligned_heads, orthogonal_heads):
        for H in (1, 4):
            bases = make(H, 2, 8)
            number = mean_of("", noise_variance(bases, 8, 2500, 5), "")
            closed = float(noise_covariance(bases, BANDWIDTH, SPREAD).mean())
            assert number.low * 0.97 < closed < number.high * 1.03
    # aligned heads reduce nothing
    single, many = (noise_covariance(aligned_heads(H, 2, 8), 1.0, 0.5).mean() for H in (1, 4))
    assert float(single) == pytest.approx(float(many), rel=1e-12)


# --- 4. Weights


def test_best_weights_agree_with_a_solver():
    from examples.theory.estimators import noise_covariance, random_heads
    from examples.theory.weighted_ensembles import best_weights, error

    C = noise_covariance(random_heads(4, 2, 6, torch.Generator().manual_seed(2)), 1.0, 0.5)
    C = C + torch.diag(torch.tensor([0.0, 0.5, 1.0, 0.2], dtype=torch.float64))
    adds_up = {"type": "eq", "fun": lambda w: w.sum() - 1}
    found = minimize(lambda w: w @ C.numpy() @ w, np.full(4, 0.25), constraints=adds_up, tol=1e-14)
    assert best_weights(C).numpy() == pytest.approx(found.x, abs=1e-6)
    assert error(C, best_weights(C)) == pytest.approx(1 / float(torch.linalg.inv(C).sum()))


def test_a_copied_head_costs_nothing_under_best_weights_and_hdi_does_not_order_layers():
    from examples.theory.weighted_ensembles import counterexample

    found = claim("weighted_ensembles")
    assert found["error under best weights, largest relative change"].value < 1e-9
    assert found["error of the mean, from none to six copies, relative change"].value > 0.05
    index, best = counterexample()
    assert index[0] > index[1]
    assert best[0] > 1.01 * best[1]
    assert verdicts("weighted_ensembles")[:2] == ["fails", "holds"]


# --- 5. The error and HDI


def test_the_noise_falls_with_hdi_and_rises_in_the_counterexample():
    found = claim("error_falls_with_diversity")
    closed = [number.value for number in found.numbers if number.name.startswith("closed form")]
    assert (np.diff(closed) < 0).all()
    rising = [number for number in found.numbers if "shared directions" in number.name]
    assert rising[0].high < rising[-1].low
    assert found.verdict == "holds if"
    assert verdicts("error_falls_with_diversity")[3:] == ["fails", "fails"]


def test_heads_at_an_angle_have_the_stated_index():
    from scipy.linalg import subspace_angles

    from examples.theory.estimators import heads_at_angle
    from hdi_callback.core import head_diversity

    for angle in (0.0, 0.4, 1.1, np.pi / 2):
        bases = heads_at_angle(3, 2, angle)
        assert float(head_diversity(bases).index) == pytest.approx(1 - np.cos(angle) ** 4, abs=1e-6)
        assert np.cos(subspace_angles(bases[0].T.numpy(), bases[2].T.numpy())) == pytest.approx(
            np.cos(angle) ** 2, abs=1e-9
        )


# --- 6. The floor


def test_orthogonal_heads_are_correlated_by_the_share_of_tokens_that_they_average():
    from examples.theory.floor_of_shared_tokens import correlation_and_samples

    rho, samples = np.mean([correlation_and_samples(1.0, 4, 1500, seed) for seed in range(6)], axis=0)
    assert 0 < rho < 1
    assert rho == pytest.approx(samples, rel=0.1)


# --- 7. The best allocation


def test_the_closed_form_of_the_allocation_is_the_minimum_of_its_model():
    from examples.theory.best_allocation import closed_form_gap

    worst, wrong = closed_form_gap(20)
    assert worst < 0.01
    assert wrong == 0


@pytest.mark.slow
def test_a_trained_layer_gives_constants_that_can_be_ranked():
    found = claim("best_allocation")
    assert found.verdict == "holds if"
    assert "GPT layer 1" in next(iter(found.tables.values()))


# --- 8. The scaling law


def test_the_best_width_grows_with_log_n_at_a_fixed_bandwidth_and_not_when_it_is_scaled():
    from examples.theory.scaling_law import slopes

    sizes = [2**p for p in range(6, 12)]
    _, fixed = slopes(sizes, 3, scaled=False)
    _, scaled = slopes(sizes, 3, scaled=True)
    assert min(fixed) > 0.2
    assert max(scaled) < min(fixed)


@pytest.mark.slow
def test_trained_models_are_compared_with_both_rules():
    found = claim("scaling_law")
    hits = [number.value for number in found.numbers if number.name.startswith("hits of")]
    assert all(0 <= share <= 1 for share in hits[:-1])
    assert found.verdict == "holds if"


# --- 9. Specialisation


@pytest.mark.slow
def test_specialisation_stays_open_with_too_few_seeds_for_the_sign_test():
    found = claim("specialisation")
    assert {part.verdict for part in found.parts} == {"open"}, "two seeds have p = 0.5 at least"
    assert found["p-value, with noise"].value >= 0.5


# --- 10. Collapses


@pytest.mark.parametrize(
    ("fault", "name", "sign"),
    [
        ("rank collapse", "token_rank", -1),
        ("entropy collapse", "attention_entropy", -1),
        ("same heads", "head_output_overlap", 1),
    ],
)
def test_each_fault_moves_its_named_reading(fault, name, sign):
    from examples.theory.collapses import FAULTS, LAYER
    from examples.theory.models import LENGTH, recorded_gpt
    from examples.theory.readings import readings
    from examples.train_gpt import GPT

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT(layers=2, heads=4, width=64, length=LENGTH)
    with torch.no_grad():
        model.blocks[LAYER].attention.q_proj.weight.mul_(30)  # as if trained: scores that tell tokens apart
        before = readings(recorded_gpt(model, 2)[LAYER])
        FAULTS[fault](model, 1.0)
        after = readings(recorded_gpt(model, 2)[LAYER])
    assert sign * (after[name] - before[name]) > 0.1
    if fault == "same heads":
        assert after["head_output_overlap"] == pytest.approx(1, abs=1e-6)
        assert abs(after["head_correlation"]) < 0.2


# --- 11. Merging key heads


def test_the_merging_error_is_the_tail_energy_and_is_minimal():
    from examples.theory.merging_key_heads import merge, pooled, score_error

    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 50, 3, generator=draw, dtype=torch.float64) for _ in range(2))
    mapped, tail = merge(k, q)
    error = score_error(k, q, mapped)
    assert error == pytest.approx(tail, rel=1e-9)
    assert torch.linalg.matrix_rank(mapped, rtol=1e-9) == 3
    written_out = sum(
        float((q[h] @ (k[h] - (torch.cat(list(k), -1) @ mapped)[:, 3 * h : 3 * h + 3]).mT).square().sum())
        for h in range(2)
    )
    assert error == pytest.approx(written_out / sum(float((q[h] @ k[h].mT).square().sum()) for h in range(2)))
    assert error < score_error(k, q, pooled(3))
    for _ in range(50):
        nearby = mapped + 0.05 * torch.randn(6, 6, generator=draw, dtype=torch.float64)
        u, s, v = torch.linalg.svd(nearby)
        assert score_error(k, q, (u[:, :3] * s[:3]) @ v[:3]) >= error - 1e-12


def test_equal_heads_merge_without_error():
    from examples.theory.merging_key_heads import merge, pooled, score_error

    draw = torch.Generator().manual_seed(1)
    q, k = (
        torch.randn(2, 50, 3, generator=draw, dtype=torch.float64),
        torch.randn(1, 50, 3, generator=draw, dtype=torch.float64),
    )
    twins = k.expand(2, -1, -1)
    assert merge(twins, q)[1] == pytest.approx(0, abs=1e-12)
    assert score_error(twins, q, pooled(3)) == pytest.approx(0, abs=1e-12)


@pytest.mark.slow
def test_every_pair_of_a_layer_is_merged():
    found = claim("merging_key_heads")
    assert found["pairs in which the closed form is better"].value > 0.9
    assert "56 pairs" in found.numbers[0].of


# --- 12. Neighbours


@pytest.mark.slow
def test_the_claims_about_every_related_attention_are_exact_and_none_is_misread():
    from examples.theory.neighbours import EXACT, NEIGHBOURS

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        for neighbour in NEIGHBOURS:
            finding = neighbour()
            assert finding.gap < EXACT, finding
            assert finding.read != "misread", finding


def test_mixing_heads_changes_the_index():
    from examples.theory.neighbours import index

    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 6, 24, generator=draw)
    mixed = torch.einsum("hg,gkd->hkd", torch.eye(4) + 0.5, weight)
    assert abs(index(mixed) - index(weight)) > 0.05


# --- 13. Rank and what cannot be told apart


def test_the_stated_number_of_directions_is_hidden_by_a_mean_over_heads():
    from examples.theory.rank_and_identifiability import (
        hidden_by_jacobian,
        hidden_directions,
        mean_of_heads,
        movement_behind,
    )

    assert hidden_by_jacobian(mean_of_heads(3, 2), 4) == hidden_directions(mean_of_heads(3, 2), 4) == 4 * (3 - 1) * 2
    square = torch.randn(3, 2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert hidden_by_jacobian(square, 4) == hidden_directions(square, 4) == 0
    moved, shows = movement_behind(mean_of_heads(3, 2), 0)
    assert shows < 1e-12 < moved


def test_a_layer_norm_keeps_the_rank_and_not_the_affine_rank():
    from examples.theory.rank_and_identifiability import ranks_through_norm

    changed, changed_affine, most = ranks_through_norm(60)
    assert changed == 0
    assert changed_affine > 0
    assert most == 1


def test_tokens_become_one_without_residuals_and_not_with_them():
    from examples.theory.rank_and_identifiability import rank_over_depth

    plain, added = (rank_over_depth(10, 0, residual=residual) for residual in (False, True))
    assert plain[-1] < 0.5 * added[-1]


# --- pages


def test_a_page_of_a_claim_has_its_numbers_rules_and_command(tmp_path):
    main(["sparse_kernels", "--size", "small", "--results", str(tmp_path / "runs"), "--docs", str(tmp_path / "docs")])
    page = (tmp_path / "docs" / "claims" / "sparse_kernels.md").read_text()
    assert "make theory ARGS=sparse_kernels" in page
    assert claim("sparse_kernels").parts[0].rule in page
    assert "sparse_kernels.md" in (tmp_path / "docs" / "claims" / "index.md").read_text()
    assert (tmp_path / "docs" / "images" / "claims" / "sparse_kernels.png").stat().st_size < 100_000


def test_a_claim_is_not_run_again_unless_requested_or_changed(tmp_path, capsys):
    arguments = ["sparse_kernels", "--size", "small", "--results", str(tmp_path), "--docs", str(tmp_path)]
    main(arguments)
    stored = tmp_path / "sparse_kernels-small.json"
    marked = json.loads(stored.read_text()) | {"left": "marked"}
    stored.write_text(json.dumps(marked))
    main(arguments)
    assert json.loads(stored.read_text())["left"] == "marked"
    assert "marked" in (tmp_path / "claims" / "sparse_kernels.md").read_text()
    stored.write_text(json.dumps(marked | {"source": "another"}))
    main(arguments)
    assert json.loads(stored.read_text())["left"] != "marked"


def test_an_unknown_claim_is_an_error_that_lists_the_claims(capsys):
    with pytest.raises(SystemExit):
        main(["nothing"])
    assert "sparse_kernels" in capsys.readouterr().err


def test_a_claim_survives_json():
    found = claim("sparse_kernels")
    again = Claim.from_json(json.loads(json.dumps(found.to_json())))
    assert again.page() == found.page()


@pytest.mark.parametrize(
    ("value", "text"), [(0.12345, "0.123"), (12.345, "12.3"), (1234.6, "1,235"), (2e-16, "2.0e-16"), (3.0, "3")]
)
def test_numbers_are_written_with_three_digits(value, text):
    assert shown(value) == text
    assert text in Number("n", value).row()


def test_intervals_are_those_of_scipy_and_cover():
    from examples.theory.intervals import bootstrap, mean_of, share_of, sign_test

    draw = np.random.default_rng(0)
    covered = [mean_of("", draw.normal(1.0, 2.0, 10), "") for _ in range(400)]
    inside = sum(number.low < 1.0 < number.high for number in covered)
    assert binomtest(inside, 400, 0.95).pvalue > 0.001
    assert share_of("", 3, 10, "").low == pytest.approx(binomtest(3, 10).proportion_ci(method="wilson").low)
    assert sign_test([1.0, 2.0, 0.0, 3.0, 1.0, 1.0]) == pytest.approx(2 * 0.5**5)
    number = bootstrap("", draw.normal(size=200), np.mean, "")
    assert number.high - number.low == pytest.approx(2 * 1.96 / 200**0.5, rel=0.2)


def test_every_claim_of_the_paper_has_a_module():
    for name in CLAIMS:
        assert callable(importlib.import_module(f"examples.theory.{name}").run)
