"""Hard attention: samples, their log-probabilities, and the gradient of each estimator, computed by hand.

Scores are set directly: a zero query gives every key the score 0, and a bias adds the given score.
"""

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.testing import assert_close

import oracles
import regard
from cases import PLACES, SCORES, attend, paths, randn, slopes_like

BACKENDS = ["reference", "blocked"]
ESTIMATORS = ["straight_through", "reinforce", "gumbel"]
SCORES_GIVEN = torch.tensor([0.7, -0.4, 1.3, 0.1, -1.0], dtype=torch.float64)

every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS)


def draw(scores: Tensor, value: Tensor | None = None, **arguments: object) -> regard.Attended:
    """Compute hard attention with the given scores (…, q, k); without `value`, values are one-hot."""
    keys = scores.shape[-1]
    zeros = scores.new_zeros(*scores.shape[:-2], 1, scores.shape[-2], 1)
    value = torch.eye(keys, dtype=scores.dtype) if value is None else value
    arguments = {"normalize": regard.Hard(), "weights": regard.full()} | arguments
    attended = regard.attention(
        zeros, scores.new_zeros(1, keys, 1), value.unsqueeze(0), score=regard.Dot(), bias=scores.unsqueeze(-3),
        **arguments,
    )  # fmt: skip
    return attended


def distribution(scores: Tensor, temperature: float) -> Tensor:
    """Return the distribution of the sample, (q, k), for scores (1, q, k)."""
    rows = [oracles.softmax([score / temperature for score in row]) for row in scores[0].tolist()]
    return torch.tensor(rows, dtype=torch.float64)


def seeded(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Tests of the keys that hard attention samples.


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@every_estimator
@every_backend
def test_frequencies_are_those_of_softmax(backend: str, estimator: str, temperature: float) -> None:
    """Pearson's χ² with 3 degrees of freedom exceeds 30 once in a million seeds."""
    draws, open_keys = 20_000, [0, 2, 3, 4]
    mask = torch.tensor([True, False, True, True, True])
    attended = draw(
        SCORES_GIVEN.expand(draws, 5), normalize=regard.Hard(estimator, temperature=temperature), mask=mask,
        weights=regard.received(), generator=seeded(), backend=backend,
    )  # fmt: skip
    counts = attended.weights.squeeze()
    # The estimator "gumbel" uses the temperature in the gradient, not in the sampling.
    sharpness = 1.0 if estimator == "gumbel" else 1 / temperature
    expected = draws * torch.tensor(oracles.softmax([SCORES_GIVEN[j].item() * sharpness for j in open_keys]))

    assert counts.sum() == draws
    assert counts[1] == 0
    assert ((counts[open_keys] - expected) ** 2 / expected).sum() < 30


@every_estimator
@every_backend
def test_a_generator_makes_draws_repeatable(backend: str, estimator: str) -> None:
    def drawn(generator: torch.Generator) -> Tensor:
        hard = regard.Hard(estimator)
        return draw(SCORES_GIVEN.expand(300, 5), normalize=hard, generator=generator, backend=backend).weights

    generator = seeded()
    first, second = drawn(generator), drawn(generator)
    assert not torch.equal(first, second)
    assert torch.equal(first, drawn(seeded()))
    assert not torch.equal(first, drawn(seeded(8)))


@every_estimator
@every_backend
def test_without_a_generator_the_global_seed_decides(backend: str, estimator: str) -> None:
    def drawn(seed: int) -> Tensor:
        torch.manual_seed(seed)
        hard = regard.Hard(estimator, sample=True)
        return draw(SCORES_GIVEN.expand(300, 5), normalize=hard, backend=backend).weights

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))


@every_estimator
@every_backend
def test_when_it_samples(backend: str, estimator: str) -> None:
    """A key is sampled in training, with a generator, or on request; otherwise the best key is chosen."""

    def draws(learned: bool = False, sample: bool | None = None, generator: torch.Generator | None = None) -> bool:
        scores = SCORES_GIVEN.expand(300, 5).clone().requires_grad_(learned)
        hard = regard.Hard(estimator, sample=sample)
        weights = draw(scores, normalize=hard, generator=generator, backend=backend).weights
        return weights[..., SCORES_GIVEN.argmax()].sum() < 300

    assert not draws()
    assert draws(learned=True)
    assert draws(generator=seeded())
    assert draws(sample=True)
    assert not draws(sample=False)
    assert not draws(learned=True, sample=False)
    assert not draws(generator=seeded(), sample=False)
    with torch.no_grad():
        assert not draws(learned=True)


@every_backend
def test_weights_that_are_asked_for_are_those_drawn(backend: str) -> None:
    value = randn(5, 3, seed=1)
    attended = draw(SCORES_GIVEN.expand(300, 5), value, generator=seeded(), backend=backend)
    one_hot = attended.weights.squeeze(0)
    assert_close(one_hot.sum(dim=-1), torch.ones(300, dtype=torch.float64))
    assert ((one_hot == 0) | (one_hot == 1)).all()
    assert_close(attended.output.squeeze(0), value[one_hot.argmax(dim=-1)])


@pytest.mark.parametrize(
    ("request_name", "expected"),
    [
        ("rows", lambda one_hot, p: one_hot[..., [2, 0], :]),
        ("received", lambda one_hot, p: one_hot.sum(dim=-2)),
        ("entropy", lambda one_hot, p: -(p * p.log()).sum(dim=-1)),
    ],
)
@every_backend
def test_requests_are_of_the_draw_and_entropy_of_the_distribution(backend: str, request_name: str, expected) -> None:
    scores = randn(1, 7, 5, seed=2)
    request = {"rows": regard.rows([2, 0]), "received": regard.received(), "entropy": regard.entropy()}[request_name]
    hard = {"normalize": regard.Hard(temperature=2.0), "backend": backend}
    one_hot = draw(scores, generator=seeded(), **hard).weights
    asked = draw(scores, generator=seeded(), weights=request, **hard).weights
    assert_close(asked, expected(one_hot, distribution(scores, 2.0).reshape(1, 1, 7, 5)))


# Tests of the log-probabilities of sampled keys.


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@every_estimator
@every_backend
def test_log_prob_and_its_gradient(backend: str, estimator: str, temperature: float) -> None:
    """The gradient of the log-probability of key c is ∂ log p[c] / ∂s = (one_hot(c) − p) / T; for gumbel, T = 1."""
    scores = randn(1, 7, 5, seed=3).requires_grad_()
    mask = torch.ones(7, 5, dtype=torch.bool)
    mask[4] = False
    mask[2, 3] = False
    hard = regard.Hard(estimator, temperature=temperature)
    attended = draw(scores, normalize=hard, mask=mask, generator=seeded(), backend=backend)
    sharpness = 1.0 if estimator == "gumbel" else 1 / temperature

    p = torch.zeros(7, 5, dtype=torch.float64)
    for i, row in enumerate(scores[0].tolist()):
        if mask[i].any():
            p[i, mask[i]] = torch.tensor(
                oracles.softmax([s * sharpness for s, keep in zip(row, mask[i], strict=True) if keep]),
                dtype=torch.float64,
            )
    one_hot = attended.weights.squeeze()
    log_p = torch.where(one_hot.any(dim=-1), (one_hot * p).sum(dim=-1), 1).log()
    assert attended.log_prob.shape == (1, 1, 7)
    assert attended.log_prob[0, 0, 4] == 0
    assert_close(attended.log_prob.squeeze(), log_p)

    slopes = torch.linspace(-1, 2, 7, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((attended.log_prob.squeeze() * slopes).sum(), scores)
    assert_close(gradient.squeeze(), slopes.unsqueeze(1) * (one_hot - p) * sharpness)


@pytest.mark.parametrize("score", SCORES)
@every_backend
def test_the_best_key_s_log_prob_is_its_score_less_the_log_sum_exp(backend: str, score: str) -> None:
    inputs = SCORES[score].inputs()
    attended = attend(f"{backend}/{score}/hard", inputs, mask=PLACES["dense"].mask)
    query, key, value, *parameters = (tensor.tolist() for tensor in inputs)
    answer = oracles.attend(
        query, key, value, SCORES[score].oracle(*parameters), lambda scores: scores, PLACES["dense"].allowed
    )
    scores, totals = (torch.tensor(given, dtype=torch.float64) for given in (answer.weights, answer.log_sum_exp))
    best = scores.masked_fill(scores == 0, -math.inf).amax(dim=-1)  # the oracle returns scores of 0 for masked pairs
    assert_close(attended.log_prob, torch.where(totals > -math.inf, best - totals, 0))


@pytest.mark.parametrize("normalize", [regard.Softmax(), regard.Sparsemax(), regard.Sigmoid()])
def test_soft_attention_has_no_log_prob(normalize: object) -> None:
    assert regard.attention(*SCORES["scaled"].inputs(), normalize=normalize).log_prob is None


@pytest.mark.slow
@pytest.mark.parametrize("path", paths(normalizers=["hard"]))
def test_gradcheck_of_the_best_key(path: str) -> None:
    """Without sampling, REINFORCE is deterministic: values and log-probabilities have exact gradients."""
    inputs = SCORES[path.split("/")[1]].inputs(batch=1, heads=2, groups=1, queries=3, keys=4, size=2, value_size=2)
    leaves = [tensor.requires_grad_() for tensor in inputs]

    def best(*given: Tensor) -> tuple[Tensor, Tensor]:
        attended = attend(path, given, normalize=regard.Hard("reinforce", sample=False), mask=regard.causal(offset=1))
        return attended.output, attended.log_prob

    assert gradcheck(best, leaves, fast_mode=True)


# Tests of the gradients of each estimator of hard attention.


def hand_derived(p: Tensor, value: Tensor, slopes: Tensor) -> Tensor:
    """Return the gradient of slopes · (softmax(s) value) by s, which is p (a − Σ p a) with a = value · slopes."""
    a = slopes @ value.mT
    return p * (a - (p * a).sum(dim=-1, keepdim=True))


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@every_backend
def test_straight_through_has_the_gradient_of_the_expectation(backend: str, temperature: float) -> None:
    scores, value = randn(1, 7, 5, seed=4).requires_grad_(), randn(5, 3, seed=5).requires_grad_()
    attended = draw(scores, value, normalize=regard.Hard(temperature=temperature), backend=backend)
    slopes = slopes_like(attended.output)[0, 0]
    gradient, value_gradient = torch.autograd.grad((attended.output * slopes).sum(), (scores, value))

    p = distribution(scores, temperature)
    assert_close(gradient[0], hand_derived(p, value.detach(), slopes) / temperature)
    # The output is the value of the sampled key, so other values have no gradient.
    assert_close(value_gradient, attended.weights[0, 0].mT @ slopes)


@every_backend
def test_reinforce_sends_nothing_through_the_output_but_to_the_chosen_value(backend: str) -> None:
    scores, value = randn(1, 7, 5, seed=6).requires_grad_(), randn(5, 3, seed=7).requires_grad_()
    attended = draw(scores, value, normalize=regard.Hard("reinforce"), backend=backend)
    slopes = slopes_like(attended.output)[0, 0]
    gradient, value_gradient = torch.autograd.grad(
        (attended.output * slopes).sum(), (scores, value), materialize_grads=True
    )
    assert torch.count_nonzero(gradient) == 0
    assert_close(value_gradient, attended.weights[0, 0].mT @ slopes)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@every_backend
def test_gumbel_has_the_gradient_of_the_noisy_softmax(backend: str, temperature: float) -> None:
    """Recovers y, the softmax of noisy scores, from the Jacobian (diag(y) − y yᵀ) / T, and the Gumbel noise from y."""
    rows, keys = 4000, 3
    scores = SCORES_GIVEN[:keys].expand(rows, keys).clone().requires_grad_()
    hard = regard.Hard("gumbel", temperature=temperature)
    attended = draw(scores, normalize=hard, backend=backend)
    jacobian = torch.stack(
        [torch.autograd.grad(attended.output[..., c].sum(), scores, retain_graph=True)[0] for c in range(keys)], dim=1
    )
    # The Jacobian is (diag(y) − y yᵀ) / T, so the entries of this product off the diagonal are y_i y_j.
    product = -temperature * jacobian
    ab, ac, bc = product[:, 0, 1], product[:, 0, 2], product[:, 1, 2]
    y = torch.stack(((ab * ac / bc).sqrt(), (ab * bc / ac).sqrt(), (ac * bc / ab).sqrt()), dim=1)

    # Rows whose y is so close to one-hot that the Jacobian underflows are left out, because y cannot be recovered.
    sound = (product.abs() > 1e-100).all(dim=(1, 2))
    assert sound.sum() > 0.99 * rows
    y, chosen = y[sound], attended.weights.reshape(rows, keys)[sound].argmax(dim=-1)
    assert_close(y.sum(dim=-1), torch.ones(len(y), dtype=torch.float64), rtol=1e-5, atol=1e-5)
    assert torch.equal(y.argmax(dim=-1), chosen)
    diagonal = torch.diagonal(product[sound], dim1=1, dim2=2)
    assert_close(-diagonal, y - y.square(), rtol=1e-4, atol=1e-9)

    # The difference of two Gumbel draws is logistic: mean 0, variance π²/3.
    noise = temperature * (y[:, 0] / y[:, 1]).log() - (SCORES_GIVEN[0] - SCORES_GIVEN[1])
    assert abs(noise.mean()) < 5 * math.sqrt(math.pi**2 / 3 / rows)
    assert noise.var().item() == pytest.approx(math.pi**2 / 3, rel=0.15)


@every_estimator
@every_backend
def test_every_estimator_gives_values_the_same_gradient(backend: str, estimator: str) -> None:
    value = randn(5, 3, seed=8).requires_grad_()
    attended = draw(SCORES_GIVEN.expand(1, 7, 5), value, normalize=regard.Hard(estimator), backend=backend)
    slopes = slopes_like(attended.output)
    (gradient,) = torch.autograd.grad((attended.output * slopes).sum(), value)
    assert_close(gradient, attended.weights[0, 0].mT @ slopes[0, 0])


@pytest.mark.parametrize("path", paths(normalizers=["hard"]))
def test_straight_through_learns_as_softmax_does_for_every_score(path: str) -> None:
    """The scores are computed in several blocks; heads are grouped, and the mask has empty rows."""
    score = path.split("/")[1]
    sizes = {"queries": 11, "keys": 1301, "size": 3, "value_size": 2}
    mask = regard.causal(offset=1200) & regard.padding(torch.tensor([1301, 0]))

    def slopes(chosen: str, **arguments: object) -> list[Tensor]:
        query, key, value, *parameters = SCORES[score].inputs(**sizes)
        leaves = [tensor.requires_grad_() for tensor in (query, key, *parameters)]
        attended = attend(chosen, [query, key, value, *parameters], mask=mask, **arguments)
        return list(torch.autograd.grad((attended.output * slopes_like(attended.output)).sum(), leaves))

    sampled = slopes(path, normalize=regard.Hard())
    for gradient, expected in zip(sampled, slopes(f"reference/{score}/softmax"), strict=True):
        assert torch.count_nonzero(expected) > 0
        assert_close(gradient, expected)


# Tests of queries that use the expected value instead of a sample.


def test_queries_that_read_the_expected_value_by_hand() -> None:
    """Scores 0, 0, ln 2 give p = ¼, ¼, ½; the expectation of the values 4, 8, 2 is 4, with ∂/∂s = p (v − 4)."""
    scores = torch.tensor([0.0, 0.0, math.log(2)], dtype=torch.float64).expand(1, 4, 3).clone().requires_grad_()
    value = torch.tensor([[4.0], [8.0], [2.0]], dtype=torch.float64)
    reads = torch.tensor([True, False, True, False])
    attended = draw(scores, value, normalize=regard.Hard("reinforce", expected=reads), generator=seeded())

    assert_close(attended.output[0, 0, reads, 0].detach(), torch.tensor([4.0, 4.0], dtype=torch.float64))
    p = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)
    assert_close(attended.weights[0, 0, reads], p.expand(2, 3))
    assert set(attended.weights[0, 0, ~reads].unique().tolist()) == {0.0, 1.0}
    assert_close(attended.log_prob[0, 0, reads].detach(), torch.zeros(2, dtype=torch.float64))
    assert (attended.log_prob[0, 0, ~reads] <= math.log(0.5) + 1e-9).all()

    (gradient,) = torch.autograd.grad(attended.output.sum(), scores, retain_graph=True)
    assert_close(gradient[0, reads], torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64).expand(2, 3))
    assert torch.count_nonzero(gradient[0, ~reads]) == 0
    (gradient,) = torch.autograd.grad(attended.log_prob.sum(), scores)
    assert torch.count_nonzero(gradient[0, reads]) == 0
    assert_close(gradient[0, ~reads], attended.weights[0, 0, ~reads] - p)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@every_estimator
def test_expected_for_all_is_soft_attention(estimator: str, temperature: float) -> None:
    scores, value = randn(1, 7, 5, seed=9).requires_grad_(), randn(5, 3, seed=10)
    mask = torch.tensor([True, True, False, True, True])
    hard = regard.Hard(estimator, temperature=temperature, expected=1.0)
    attended = draw(scores, value, normalize=hard, mask=mask)
    sharp = scores if estimator == "gumbel" else scores / temperature
    soft = draw(sharp, value, normalize=regard.Softmax(), mask=mask)
    slopes = slopes_like(soft.output)
    assert_close(attended.output, soft.output)
    gradients = [torch.autograd.grad((one.output * slopes).sum(), scores)[0] for one in (attended, soft)]
    assert_close(*gradients)


def test_a_share_that_changes_between_calls() -> None:
    share = torch.ones(())
    hard = regard.Hard("reinforce", expected=share)
    scores = SCORES_GIVEN.expand(1, 7, 5)
    assert (draw(scores, normalize=hard, generator=seeded()).log_prob == 0).all()
    share.fill_(0.0)
    assert (draw(scores, normalize=hard, generator=seeded()).log_prob < 0).all()


@pytest.mark.parametrize("expected", [torch.zeros(3), torch.tensor(1)])
def test_a_share_is_one_float(expected: Tensor) -> None:
    with pytest.raises(TypeError, match="expected of Hard must be a bool tensor, a number or a float tensor"):
        regard.Hard("reinforce", expected=expected)


def test_a_share_of_the_queries_reads_the_expected_value() -> None:
    """With `expected=0.3`, the fraction of 20,000 queries that return the expected value is within five standard
    deviations of 0.3."""
    hard = regard.Hard("reinforce", expected=0.3)
    found = draw(SCORES_GIVEN.expand(20_000, 5), normalize=hard, generator=seeded()).log_prob == 0
    assert found.double().mean().item() == pytest.approx(0.3, abs=5 * math.sqrt(0.3 * 0.7 / 20_000))


@every_estimator
def test_the_best_key_is_read_in_inference_whatever_is_expected(estimator: str) -> None:
    weights = draw(SCORES_GIVEN.expand(1, 7, 5), normalize=regard.Hard(estimator, expected=1.0)).weights
    assert torch.equal(weights, draw(SCORES_GIVEN.expand(1, 7, 5), normalize=regard.Hard(estimator)).weights)


def test_the_expected_value_has_no_blockwise_form() -> None:
    hard = regard.Hard("reinforce", expected=0.5)
    with pytest.raises(ValueError, match="blockwise"):
        draw(SCORES_GIVEN.expand(1, 7, 5), normalize=hard, generator=seeded(), backend="blocked")


# Tests of `regard.reinforce`.


def test_reinforce_by_hand() -> None:
    log_prob = torch.tensor([[-1.0, -2.0], [-3.0, -0.5]], requires_grad=True)
    reward = torch.tensor([2.0, 0.5])
    # The REINFORCE term is −½ [(2 − 1)(−3) + (0.5 − 1)(−3.5)] = 0.625, the entropy term 0.1 · mean(1, 2, 3, 4) = 0.25.
    result = regard.reinforce(
        log_prob, reward, baseline=1.0, entropy=torch.tensor([[1.0, 2.0], [3.0, 4.0]]), decay=0.8, reward_weight=2.0,
        entropy_weight=0.1,
    )  # fmt: skip
    assert_close(result.loss, torch.tensor(2 * 0.625 - 0.25))
    assert_close(result.baseline, torch.tensor(0.8 * 1.0 + 0.2 * 1.25))
    (gradient,) = torch.autograd.grad(result.loss, log_prob)
    # The gradient is −λ (reward − baseline) / batch, with λ = reward_weight.
    assert_close(gradient, torch.tensor([[-1.0, -1.0], [0.5, 0.5]]))


def test_reinforce_leaves_out_what_is_masked() -> None:
    log_prob = torch.tensor([[-1.0, -2.0], [-3.0, -7.0]], requires_grad=True)
    reward = torch.tensor([[2.0, 1.0], [0.0, 9.0]])
    mask = torch.tensor([[True, True], [True, False]])
    # The first baseline is the mean of the rewards 2, 1 and 0; the loss is −⅓ [(2 − 1)(−1) + (1 − 1)(−2) + (0 − 1)(−3)]
    # = −⅔.
    result = regard.reinforce(log_prob, reward, mask=mask)
    assert_close(result.baseline, torch.tensor(1.0))
    assert_close(result.loss, torch.tensor(-2 / 3))
    (gradient,) = torch.autograd.grad(result.loss, log_prob)
    assert_close(gradient, torch.tensor([[-1 / 3, 0.0], [1 / 3, 0.0]]))


def test_the_first_baseline_is_the_mean_reward() -> None:
    log_prob, reward = torch.tensor([-1.0, -2.0]), torch.tensor([3.0, 1.0])
    result = regard.reinforce(log_prob, reward)
    assert_close(result.baseline, torch.tensor(2.0))
    assert_close(result.loss, torch.tensor(-0.5))  # the loss is the mean of −(reward − baseline) log_prob
    assert_close(regard.reinforce(log_prob, reward, baseline=result.baseline).baseline, torch.tensor(2.0))


@pytest.mark.usefixtures("as_installed")
@pytest.mark.parametrize(
    ("wrong", "given", "came"),
    [
        ("reward", torch.tensor([1, 2]), "torch.int64"),
        ("reward", [1.0, 2.0], "list"),
        ("log_prob", None, "None: attention with .*"),
        ("entropy", 0.5, "float"),
    ],
    ids=["integers", "list", "none", "number"],
)
def test_reinforce_refuses_what_is_no_float_tensor(wrong: str, given: object, came: str) -> None:
    arguments = {"log_prob": torch.zeros(2), "reward": torch.ones(2)} | {wrong: given}
    with pytest.raises(TypeError, match=f"^{wrong} must be a float tensor( of 16, 32 or 64 bits)?, got {came}$"):
        regard.reinforce(**arguments)


def test_a_reward_learns_nothing() -> None:
    reward = torch.tensor([3.0, 1.0], requires_grad=True)
    log_prob = torch.tensor([-1.0, -2.0], requires_grad=True)
    result = regard.reinforce(log_prob, reward)
    assert not result.baseline.requires_grad
    assert torch.autograd.grad(result.loss, reward, allow_unused=True)[0] is None


@pytest.mark.parametrize("baseline", [0.0, 0.4, None])
@every_backend
def test_reinforce_climbs_the_expected_reward(backend: str, baseline: float | None) -> None:
    """A bandit of five arms: the mean gradient of many samples is that of Σ p·reward, whatever the baseline."""
    pulls = 20_000
    rewards = torch.tensor([1.0, -0.5, 0.3, 2.0, 0.0], dtype=torch.float64)
    logits = SCORES_GIVEN.clone().requires_grad_()
    attended = draw(
        logits.expand(pulls, 1, 5), rewards.unsqueeze(1), normalize=regard.Hard("reinforce"), generator=seeded(),
        backend=backend,
    )  # fmt: skip
    result = regard.reinforce(attended.log_prob, attended.output.detach().flatten(), baseline=baseline)
    (gradient,) = torch.autograd.grad(result.loss, logits)

    p = torch.tensor(oracles.softmax(SCORES_GIVEN.tolist()), dtype=torch.float64)
    exact = p * (rewards - p @ rewards)
    level = p @ rewards if baseline is None else baseline
    # Row a of this matrix is the gradient of a sample that chooses arm a.
    one_pull = (rewards - level).unsqueeze(1) * (torch.eye(5, dtype=torch.float64) - p)
    spread = (p @ one_pull.square() - (p @ one_pull).square()).sqrt()
    assert (((-gradient - exact) / (spread / math.sqrt(pulls))).abs() < 5).all()


@pytest.mark.slow
@pytest.mark.usefixtures("as_installed")
@every_backend
def test_a_bandit_learns_its_best_arm(backend: str) -> None:
    """Training with REINFORCE uses a moving-average baseline and the entropy term, as in Show, Attend and Tell."""
    rewards = torch.tensor([0.0, 0.2, 1.0, 0.4], dtype=torch.float64)
    logits = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    optimizer, baseline, generator = torch.optim.Adam([logits], lr=0.1), None, seeded()
    for _ in range(100):
        scores = logits.expand(32, 1, 4)
        attended = draw(
            scores, rewards.unsqueeze(1), normalize=regard.Hard("reinforce"), weights=regard.entropy(),
            generator=generator, backend=backend,
        )  # fmt: skip
        loss, baseline = regard.reinforce(
            attended.log_prob, attended.output.detach().flatten(), baseline=baseline, entropy=attended.weights
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert logits.softmax(dim=-1)[2] > 0.9


def test_each_choice_may_have_a_reward_of_its_own() -> None:
    """The terms (reward − baseline) log_prob are (3 − 2)(−1) and (1 − 2)(−2); the loss is minus their mean, −½."""
    log_prob = torch.tensor([[[-1.0, -2.0]]], requires_grad=True)
    found = regard.reinforce(log_prob, torch.tensor([[[3.0, 1.0]]]))
    assert_close(found.loss, torch.tensor(-0.5))
    assert_close(found.baseline, torch.tensor(2.0))
    assert_close(torch.autograd.grad(found.loss, log_prob)[0], torch.tensor([[[-0.5, 0.5]]]))


# Tests of hard attention over short sequences at inference, which compiled loops compute on the CPU.


@pytest.mark.parametrize("request_", [None, regard.full(), regard.top(3), regard.received(), regard.entropy()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["all keys", "window of lengths"])
def test_the_best_key_of_short_sequences(masked: bool, dtype: torch.dtype, request_: regard.Request | None) -> None:
    """With a length of 2, later queries have no key in their window; NaN and Inf at masked keys have no effect."""
    torch.manual_seed(5)
    query, key, value = (torch.randn(3, heads, n, 20).to(dtype) for heads, n in ((4, 37), (2, 41), (2, 41)))
    lengths = torch.tensor([41, 2, 19])
    given: dict[str, object] = {"normalize": regard.Hard(), "weights": request_}
    if masked:
        given["mask"] = regard.window(5, 3) & regard.padding(lengths)
    right = regard.attention(query.double(), key.double(), value.double(), backend="reference", **given)
    if masked:
        key[1, :, 2:], value[1, :, 2:] = torch.nan, torch.inf
    for _ in range(2):  # the second call runs the kernel that the first call chose and stored
        found = regard.attention(query, key, value, **given)
        assert_close(found.output, right.output.to(dtype))
        assert_close(found.log_prob.double(), right.log_prob, rtol=1e-4, atol=1e-5)
        near = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
        if isinstance(right.weights, regard.Top):
            assert torch.equal(found.weights.indices[..., 0], right.weights.indices[..., 0])
        elif right.weights is not None:
            assert_close(found.weights.double(), right.weights, **near)


def test_the_best_key_keeps_nan_of_another_attended_value() -> None:
    query, key, value = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8), torch.ones(1, 2, 5, 8)
    value[:, :, 4] = torch.nan
    found = regard.attention(query, key, value, normalize=regard.Hard())
    right = regard.attention(query, key, value, normalize=regard.Hard(), backend="reference")
    assert_close(found.output, right.output, equal_nan=True)
