"""loss.py against numbers worked out by hand, against finite differences, and against cutting a batch in other ways."""

import inspect
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import loss

F64 = torch.float64


def f64(*values):
    return torch.tensor(values, dtype=F64)


def logs(*values):
    return f64(*values).log()


# ------------------------------------------------------------------------------------------ (1) leave-one-out advantage

def test_six_attempts():
    A, counted = loss.leave_one_out(f64(1, 0, 1, 0, 0, 1), torch.ones(6, dtype=torch.bool))
    torch.testing.assert_close(A, f64(.6, -.6, .6, -.6, -.6, .6))
    assert counted.all()


def test_invalid_member_leaves_the_group():
    # [1, 0, 1, crash, 0, 0]: five valid, baseline of a 1 = 1/4, of a 0 = 2/4; the crash's reward (NaN) never votes
    valid = torch.tensor([True, True, True, False, True, True])
    A, counted = loss.leave_one_out(f64(1, 0, 1, math.nan, 0, 0), valid)
    torch.testing.assert_close(A, f64(.75, -.5, .75, 0, -.5, -.5))
    assert counted.tolist() == valid.tolist()


@pytest.mark.parametrize("valid", [[True], [False], [True, False, False], [False] * 3])
def test_fewer_than_two_valid_count_for_nothing(valid):
    A, counted = loss.leave_one_out(torch.ones(len(valid)), torch.tensor(valid))
    assert A.tolist() == [0.0] * len(valid) and not counted.any()


def test_two_valid():
    A, counted = loss.leave_one_out(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([True, True, False]))
    assert A.tolist() == [1.0, -1.0, 0.0] and counted.tolist() == [True, True, False]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.floats(-3, 3, width=32), st.booleans()), min_size=1, max_size=9))
def test_advantages_of_a_group_add_to_zero(members):
    rewards, valid = torch.tensor([m[0] for m in members]), torch.tensor([m[1] for m in members])
    A, counted = loss.leave_one_out(rewards, valid)
    assert abs(float(A.sum())) < 1e-4
    for i, (reward, ok) in enumerate(members):      # the definition, in plain Python
        others = [r for k, (r, v) in enumerate(members) if v and k != i]
        expected = reward - sum(others) / len(others) if ok and others else 0.0
        assert float(A[i]) == pytest.approx(expected, abs=1e-4)
        assert bool(counted[i]) == (ok and bool(others))


@given(st.floats(-1, 1, width=32), st.integers(2, 7))
def test_equal_rewards_give_exactly_zero(reward, size):
    A, _ = loss.leave_one_out(torch.full((size,), reward), torch.ones(size, dtype=torch.bool))
    assert A.tolist() == [0.0] * size               # .1 or -.3 leave no rounding residue


# ------------------------------------------------------------------------------------------ (2) weights

@pytest.mark.parametrize("made, trained", [(1, 1), (16, 16), (20, 16)])
def test_an_episode_weighs_one(made, trained):
    k = torch.full((min(made, 16),), trained)       # of 20 eligible responses 16 are drawn, and K is 16
    u = loss.response_weights(k)
    assert u.tolist() == [1 / trained] * trained
    assert float(u.sum()) == pytest.approx(1.0)


def test_response_weights_refuse_zero():
    with pytest.raises(AssertionError, match="smallest given is 0"):
        loss.response_weights(torch.tensor([3, 0]))


def test_token_weights():
    weight = loss.token_weights(torch.tensor([2, 4, 1]), torch.tensor([1.0, 0.5, 0.5]))
    assert weight.tolist() == [.5, .5, .125, .125, .125, .125, .5]
    with pytest.raises(AssertionError, match="empty response"):
        loss.token_weights(torch.tensor([2, 0]), torch.ones(2))


# ------------------------------------------------------------------------------------------ (3) SFT

def test_sft_known_answer():
    logp = logs(.5, .25, .9, .125)                  # the third is context
    value, metrics = loss.sft_loss(logp, torch.tensor([True, True, False, True]), 3)
    assert float(value) == pytest.approx((1 + 2 + 3) * math.log(2) / 3)
    assert float(metrics["tokens"]) == 3 and float(metrics["nll"]) == pytest.approx(6 * math.log(2))


def test_sft_denominator_across_unequal_micro_batches():
    torch.manual_seed(0)
    sizes, width = (1, 7, 3, 20), 5
    x = torch.randn(sum(sizes), width, dtype=F64)
    targets = torch.randint(0, width, (sum(sizes),))

    def grad(pieces, total):
        W = torch.eye(width, dtype=F64, requires_grad=True)
        losses = []
        for rows in pieces:
            logp = torch.log_softmax(x[rows] @ W, -1).gather(1, targets[rows, None])[:, 0]
            value, _ = loss.sft_loss(logp, torch.ones_like(logp, dtype=torch.bool), total)
            value.backward()
            losses.append(value.detach())
        return sum(losses), W.grad

    whole, g_whole = grad([slice(0, 31)], 31)
    starts = [sum(sizes[:i]) for i in range(4)]
    pieces = [slice(a, a + n) for a, n in zip(starts, sizes, strict=True)]
    split, g_split = grad(pieces, 31)
    torch.testing.assert_close(split, whole)
    torch.testing.assert_close(g_split, g_whole)
    mean_of_means = sum(grad([p], n)[1] for p, n in zip(pieces, sizes, strict=True)) / 4    # the classical bug
    assert (mean_of_means - g_whole).abs().max() > 1e-3


def test_sft_ignores_what_is_masked():
    logp = torch.tensor([[-1.0, -2.0, math.nan], [-3.0, -math.inf, math.nan]], requires_grad=True)    # (S, T), padded
    mask = torch.tensor([[True, True, False], [True, False, False]])
    value, _ = loss.sft_loss(logp, mask, 3)
    value.backward()
    assert float(value.detach()) == 2.0
    torch.testing.assert_close(logp.grad, mask.float() / -3)


# ------------------------------------------------------------------------------------------ (4) truncated weight

def test_worked_example():
    log_q, log_b, logp = logs(.2), logs(.1), logs(.1)
    w = loss.truncated_weight(log_q, log_b)
    rho = (logp - log_q).exp()
    torch.testing.assert_close(w, f64(2))
    torch.testing.assert_close(rho, f64(.5))
    torch.testing.assert_close(w * rho, f64(1))


def test_truncated_weight_caps_above_only():
    w = loss.truncated_weight(logs(.3, .1, .1, .09), logs(.1, .1, .4, .05))
    torch.testing.assert_close(w, f64(2, 1, .25, 1.8))
    assert float(loss.truncated_weight(logs(.3), logs(.1), cap=5.0)) == pytest.approx(3)


def test_truncated_weight_has_no_gradient_and_no_overflow():
    log_b = torch.tensor([-50.0, -500.0, -1e-3], requires_grad=True)
    w = loss.truncated_weight(torch.tensor([-.1, -.1, -500.0]), log_b)
    assert not w.requires_grad and w.tolist() == [2.0, 2.0, 0.0]


# ------------------------------------------------------------------------------------------ (5) dual clip

@pytest.mark.parametrize("A, rho, expected, slope", [
    # A > 0: -rho A until 1.28, then flat at -1.28 A; no clip on the low side
    (1.0, 0.10, -0.10, -1.0), (1.0, 0.79, -0.79, -1.0), (1.0, 0.81, -0.81, -1.0), (1.0, 1.27, -1.27, -1.0),
    (1.0, 1.29, -1.28, 0.0), (1.0, 9.00, -1.28, 0.0), (0.5, 1.00, -0.50, -0.5), (0.5, 2.00, -0.64, 0.0),
    # A < 0: flat at .8 |A| below .8, then rho |A|, no clip at 1.28, flat at 3 |A| above 3
    (-1.0, 0.10, 0.80, 0.0), (-1.0, 0.79, 0.80, 0.0), (-1.0, 0.81, 0.81, 1.0), (-1.0, 1.27, 1.27, 1.0),
    (-1.0, 1.29, 1.29, 1.0), (-1.0, 2.99, 2.99, 1.0), (-1.0, 3.01, 3.00, 0.0), (-1.0, 50.0, 3.00, 0.0),
    (-0.6, 1.00, 0.60, 0.6), (-0.6, 0.50, 0.48, 0.0), (-0.6, 4.00, 1.80, 0.0), (0.0, 7.00, 0.0, 0.0),
])
def test_dual_clip(A, rho, expected, slope):
    ratio = f64(rho).requires_grad_()
    value = loss.dual_clip(ratio, f64(A))
    value.sum().backward()
    assert float(value.detach()) == pytest.approx(expected, abs=1e-12)
    assert float(ratio.grad) == pytest.approx(slope, abs=1e-12)


def test_dual_clip_bounds_are_arguments():
    # eps_lo .1, eps_hi .5, d 2: A = -1 is flat at .9 below .9 and at 2 above 2, A = 1 flat at -1.5 above 1.5
    value = loss.dual_clip(f64(.5, 2.5, 1.4, 1.6), f64(-1, -1, 1, 1), eps_lo=.1, eps_hi=.5, d=2.0)
    torch.testing.assert_close(value, f64(.9, 2, -1.4, -1.5))


# ------------------------------------------------------------------------------------------ (6) the RL loss

def paper_batch():
    """Two episodes, three responses, six tokens; worked on paper:

    Episode 1, A = .6,  K = 2: response a (2 tokens), response b (1 token); u = 1/2 each.
    Episode 2, A = -.6, K = 1: response c (3 tokens); u = 1.                                     Σu = 2.

    token |  q    b    π  | w = min(q/b, 2) | ρ = π/q | l_DC                                   | w l_DC
    a1    | .5   .5   .5  | 1               | 1       | -1 · .6           = -.6                | -.6
    a2    | .2   .1   .1  | 2               | .5      | -.5 · .6          = -.3                | -.6
    b1    | .4   .5   .6  | .8              | 1.5     | clipped, -1.28·.6 = -.768              | -.6144
    c1    | .5   .5   .3  | 1               | .6      | low clip, .8 · .6 = .48                | .48
    c2    | .1   .025 .2  | 2 (4 capped)    | 2       | 2 · .6            = 1.2                | 2.4
    c3    | .1   .1   .5  | 1               | 5       | dual clip, 3 · .6 = 1.8                | 1.8

    L_RL = [ 1/2 · (-.6 - .6)/2  +  1/2 · (-.6144)/1  +  1 · (.48 + 2.4 + 1.8)/3 ] / 2
         = [ -.3 - .3072 + 1.56 ] / 2 = .4764
    """
    lengths = torch.tensor([2, 1, 3])
    u = loss.response_weights(torch.tensor([2, 2, 1])).double()
    return {"logp": logs(.5, .1, .6, .3, .2, .5), "log_q": logs(.5, .2, .4, .5, .1, .1),
            "log_b": logs(.5, .1, .5, .5, .025, .1), "advantage": f64(.6, .6, .6, -.6, -.6, -.6),
            "weight": loss.token_weights(lengths, u), "total_u": float(u.sum())}


def test_batch_on_paper():
    value, m = loss.rl_loss(**paper_batch())
    assert float(value) == pytest.approx(.4764, abs=1e-12)
    m = loss.merge_metrics([m])
    assert m["tokens"] == 6
    assert m["ratio"] == pytest.approx(1 + .5 + 1.5 + .6 + 2 + 5) and m["ratio_min"] == pytest.approx(.5)
    assert m["ratio_max"] == pytest.approx(5)
    assert (m["clip_low"], m["clip_high"], m["clip_dual"]) == (1, 1, 1)        # c1, b1, c3
    assert m["w"] == pytest.approx(1 + 2 + .8 + 1 + 2 + 1)
    assert m["gap_qb_abs"] == pytest.approx(math.log(2) + math.log(1.25) + math.log(4))
    assert m["gap_qb_abs_max"] == pytest.approx(math.log(4))
    # k1 and k3 of KL(q || b): log(q/b) and b/q - 1 + log(q/b) at a2 (b/q = 1/2), b1 (5/4), c2 (1/4)
    k1 = math.log(2) - math.log(1.25) + math.log(4)
    assert m["gap_qb_k1"] == pytest.approx(k1)
    assert m["gap_qb_k3"] == pytest.approx(-.5 + .25 - .75 + k1)
    # π/b: 1, 1, 1.2, .6, 8, 5
    assert m["pi_b_min"] == pytest.approx(.6) and m["pi_b_max"] == pytest.approx(8)
    assert m["gap_bp_k1"] == pytest.approx(-math.log(1.2 * .6 * 8 * 5))
    assert m["gap_bp_k3"] == pytest.approx((.2 - .4 + 7 + 4) - math.log(1.2 * .6 * 8 * 5))
    shown = loss.per_token(m)
    assert shown["tokens"] == 6 and shown["clip_low"] == pytest.approx(1 / 6) and shown["ratio_max"] == m["ratio_max"]


def test_capped_weights_are_counted():
    _, m = loss.rl_loss(f64(-1, -1, -1), f64(-1, -1, -1), f64(-1, -3, -1.5), f64(1, 1, 1), f64(1, 1, 1), 3.0)
    assert float(m["w_capped"]) == 1                # q/b is 1, e^2, e^.5


def test_gradient_on_paper():
    # d/dlogp of w l_DC: A > 0 inside the clip gives -w ρ A; each weighted by u/(L Σu): a 1/8, b 1/4, c 1/6
    batch = paper_batch()
    logp = batch["logp"].requires_grad_()
    loss.rl_loss(**batch)[0].backward()
    torch.testing.assert_close(logp.grad, f64(-.6 / 8, -2 * .5 * .6 / 8, 0, 0, 2 * 2 * .6 / 6, 0))


def test_gradients_against_finite_differences():
    generator = torch.Generator().manual_seed(1)
    n = 40
    log_q = -torch.rand(n, dtype=F64, generator=generator) * 3
    rho = torch.rand(n, dtype=F64, generator=generator) * 4
    kinks = f64(.8, 1.28, 3.0)
    rho = torch.where((rho[:, None] - kinks).abs().amin(1) < .02, rho + .05, rho).clamp(min=.05)
    log_b = log_q + .5 * torch.randn(n, dtype=F64, generator=generator)
    A = torch.randn(n, dtype=F64, generator=generator)
    weight = torch.rand(n, dtype=F64, generator=generator)
    logp = (log_q + rho.log()).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss.rl_loss(x, log_q, log_b, A, weight, 7.0)[0], (logp,), eps=1e-6)
    assert torch.autograd.gradcheck(lambda x: loss.sft_loss(x, A > 0, 40)[0], (logp,))


def cut(batch, pieces):
    """Sum of the losses, gradient of logp, merged metrics, over index lists that together hold every token."""
    logp = batch["logp"].clone().requires_grad_()
    parts, total = [], 0.0
    for rows in pieces:
        part = {k: v[rows] if torch.is_tensor(v) else v for k, v in batch.items()}
        value, metrics = loss.rl_loss(**{**part, "logp": logp[rows]})
        value.backward()
        total += float(value.detach())
        parts.append(metrics)
    return total, logp.grad, loss.merge_metrics(parts)


@settings(deadline=None, max_examples=30)
@given(st.permutations(range(6)), st.lists(st.integers(0, 6), max_size=4))
def test_any_cut_into_micro_batches_gives_the_same_step(order, borders):
    # an empty piece is among the cuts: a rank without rows adds nothing
    borders = [0, *sorted(borders), 6]
    pieces = [list(order[a:b]) for a, b in itertools.pairwise(borders)]
    value, grad, metrics = cut(paper_batch(), pieces)
    whole, g_whole, m_whole = cut(paper_batch(), [list(range(6))])
    assert value == pytest.approx(whole)
    torch.testing.assert_close(grad, g_whole)
    assert metrics == pytest.approx(m_whole)


def test_padding_and_filler_rows_change_nothing():
    batch, junk = paper_batch(), f64(math.nan, 5, -math.inf, -200)
    padded = {k: torch.cat((v, junk)) if torch.is_tensor(v) else v for k, v in batch.items()}
    padded["weight"] = torch.cat((batch["weight"], torch.zeros(4, dtype=F64)))
    value, grad, metrics = cut(padded, [list(range(10))])
    whole, g_whole, m_whole = cut(batch, [list(range(6))])
    assert value == pytest.approx(whole) and metrics == pytest.approx(m_whole)
    torch.testing.assert_close(grad, torch.cat((g_whole, torch.zeros(4, dtype=F64))))
    _, nothing = loss.rl_loss(f64(-1), f64(-2), f64(-3), f64(1), f64(0), 2.0)      # a micro-batch of filler alone
    assert nothing["tokens"] == 0 and nothing["ratio_min"] == math.inf and nothing["ratio_max"] == -math.inf
    assert loss.merge_metrics([m_whole, nothing]) == m_whole


def test_splitting_an_episode_into_more_calls_keeps_its_weight():
    # one episode as 1, 2 or 4 responses, every token with the same terms: the loss is the same number
    values = []
    for lengths in ([8], [3, 5], [1, 2, 1, 4]):
        u = loss.response_weights(torch.full((len(lengths),), len(lengths)))
        weight = loss.token_weights(torch.tensor(lengths), u)
        x = torch.full((8,), -1.0)
        values.append(float(loss.rl_loss(x, x - .1, x, torch.full((8,), -.6), weight, 1.0)[0]))
    assert values == pytest.approx([values[0]] * 3)


def test_pi_over_b_is_exactly_one_at_learning_rate_zero():
    # the same forward twice; q differs by the engines' gap. π/b must be exactly 1, ρ only up to that gap.
    torch.manual_seed(0)
    log_b = torch.log_softmax(torch.randn(500, 11), -1)[:, 0]
    log_q = log_b + 1e-5 * torch.randn(500)
    _, m = loss.rl_loss(log_b.clone(), log_q, log_b, torch.randn(500), torch.ones(500), 500.0)
    assert m["pi_b_min"] == 1.0 and m["pi_b_max"] == 1.0 and m["gap_bp_abs"] == 0.0
    assert m["ratio_min"] != 1.0 and abs(float(m["ratio_max"]) - 1) < 1e-4
    assert m["clip_low"] == m["clip_high"] == m["clip_dual"] == 0


def test_extreme_log_probs_stay_finite():
    ends = torch.tensor([-200.0, -50.0, -1e-6])     # e^200 overflows float32
    logp, log_q, log_b = (x.flatten() for x in torch.meshgrid(ends, ends, ends, indexing="ij"))
    for A in (1.0, -1.0):
        x = logp.clone().requires_grad_()
        value, metrics = loss.rl_loss(x, log_q, log_b, torch.full((27,), A), torch.ones(27), 27.0)
        value.backward()
        assert torch.isfinite(value) and torch.isfinite(x.grad).all()
        assert all(math.isfinite(v) for v in loss.merge_metrics([metrics]).values())
        assert abs(float(value.detach())) <= 2 * loss.D      # w <= C and l_DC <= d |A|, so no token can dominate


def test_the_clamp_changes_no_gradient_that_matters():
    # unclamped reference in float64, where exp(50) does not overflow
    for A in (1.0, -1.0):
        log_ratio = torch.tensor([-50., -25., -19., -1., .1, 2., 19., 25., 50.], dtype=F64)
        grads = []
        for limit in (loss.LOG_LIMIT, 1e9):
            x = log_ratio.clone().requires_grad_()
            loss.dual_clip(x.clamp(-limit, limit).exp(), torch.full_like(x, A)).sum().backward()
            grads.append(x.grad)
        assert (grads[0] - grads[1]).abs().max() <= math.exp(-loss.LOG_LIMIT)


def test_inputs_are_not_modified():
    batch = paper_batch()
    before = {k: v.clone() if torch.is_tensor(v) else v for k, v in batch.items()}
    batch["logp"].requires_grad_()
    loss.rl_loss(**batch)[0].backward()
    loss.sft_loss(batch["logp"], torch.ones(6, dtype=torch.bool), 6)
    rewards, valid = f64(1, 0, math.nan), torch.tensor([True, True, False])
    loss.leave_one_out(rewards, valid)
    assert rewards[:2].tolist() == [1, 0] and rewards[2].isnan() and valid.tolist() == [True, True, False]
    for name, value in before.items():
        assert torch.equal(batch[name].detach(), value) if torch.is_tensor(value) else batch[name] == value, name


def test_no_signal_no_gradient():
    batch = paper_batch()
    batch["advantage"] = torch.zeros(6, dtype=F64)
    logp = batch["logp"].requires_grad_()
    value, m = loss.rl_loss(**batch)
    value.backward()
    assert float(value.detach()) == 0 and logp.grad.abs().max() == 0
    assert m["clip_low"] == m["clip_high"] == m["clip_dual"] == 0      # a token without advantage is not "clipped"


def test_programmer_errors_carry_the_numbers():
    batch = paper_batch()
    with pytest.raises(AssertionError, match="total_u is 0"):
        loss.rl_loss(**{**batch, "total_u": 0.0})
    with pytest.raises(AssertionError, match=r"weight \(5,\), logp \(6,\)"):
        loss.rl_loss(**{**batch, "weight": batch["weight"][:5]})
    with pytest.raises(AssertionError, match="log_q requires a gradient"):
        loss.rl_loss(**{**batch, "log_q": batch["log_q"].requires_grad_()})
    with pytest.raises(AssertionError, match="total_tokens is 0"):
        loss.sft_loss(batch["logp"], torch.zeros(6, dtype=torch.bool), 0)
    with pytest.raises(AssertionError, match="different metrics"):
        loss.merge_metrics([{"a": 1}, {"b": 2}])
    assert loss.merge_metrics([]) == {}


def test_loss_imports_torch_alone():
    imports = [line for line in inspect.getsource(loss).splitlines() if line.startswith(("import ", "from "))]
    assert imports == ["import torch"]
