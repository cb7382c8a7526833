"""Every equation of the recipe as a pure function of tensors (SPEC.md §1-2; the numbers (1)-(6) are this file's).

Nothing here knows a model, a file, a command line or a process group, and nothing is written into an argument.
The trainer calls these on micro-batches: sums over tokens come from here, while every denominator
(`total_tokens`, `total_u`) is a number of the WHOLE optimizer batch, over all micro-batches and ranks, that the
caller counts first. So a batch may be cut in any way, and the losses of the pieces add up to the loss of the batch.
(FSDP2 averages gradients over ranks: multiply by the world size there, not here.)

Shapes:  G attempts of one group | S responses | N target tokens, the responses of a micro-batch laid end to end:
         there is no padding, so none can count. Log-probs are natural logs; ratios and weights are plain numbers.
Symbols: R reward | A advantage | K, u response weight | q, b, π token probability when sampled, in the training
         forward before the update, and now | ρ = π/q | w truncated weight | L_s tokens of response s.

Departure from the usual form, on purpose: see `truncated_weight`.
"""

import torch

# The paper's numbers. rl.py's arguments take their defaults from here, so that each stands in one place.
C = 2.0           # cap of w
EPS_LO = 0.2      # clip of ρ below 1
EPS_HI = 0.28     # … and above
D = 3.0           # dual clip, in units of |A|
# |log ρ| and log(q/b) are clamped to this before exp, so that float32 cannot overflow (e^20 = 4.9e8). Where the
# clamp acts, the clips have already zeroed the gradient, or it is below e^-20 |A|: it changes no decision.
LOG_LIMIT = 20.0


# (1)  A_i = R_i - 1/(G_g - 1) Σ_{k in V_g, k != i} R_k  =  1/(G_g - 1) Σ_{k in V_g} (R_i - R_k)
def leave_one_out(rewards, valid):
    """Advantage of each attempt against the mean of the other valid ones of its group (SPEC §2); no std anywhere.

    rewards (G,) float, 0 or 1 (whatever stands at an invalid member, NaN too, is ignored); valid (G,) bool.
    Returns advantage (G,) and counted (G,) bool. With fewer than two valid members nobody is counted.
    An invalid member has advantage 0 and is not counted: it is no failure, it was not measured.
    Written as differences, so that a group of equal rewards gives exactly 0 for any reward, not a rounding residue.
    """
    assert rewards.dim() == 1 and rewards.shape == valid.shape, f"{tuple(rewards.shape)}, {tuple(valid.shape)}"
    assert valid.dtype == torch.bool, f"valid must be bool, is {valid.dtype}"
    R = torch.where(valid, rewards, 0.0)                            # (G,)
    others = int(valid.sum()) - 1                                   # G_g - 1
    counted = valid & (others >= 1)                                 # (G,)
    gap = (R[:, None] - R[None, :]) * valid                         # (G, G) R_i - R_k over valid k; k = i adds 0
    A = torch.where(counted, gap.sum(1) / max(others, 1), 0.0)      # (G,)
    return A, counted


# (2)  u_s = 1 / K_i(s)
def response_weights(k):
    """Weight of each response, so that an episode weighs 1 however many calls it made (SPEC §2).

    k (S,) int: how many responses of the response's episode are trained: eligible, not gated, after the cap of 16.
    Returns u (S,). A response of an episode with k = 0 cannot exist.
    """
    assert bool((k >= 1).all()), f"K counts the response itself, smallest given is {int(k.min())}"
    return 1.0 / k.float()                                          # (S,)


def token_weights(lengths, u):
    """u_s / L_s, laid out per token: what `rl_loss` takes as `weight`.

    lengths (S,) int, in tokens; u (S,). Returns (N,), N = Σ L_s.

    An empty response has no tokens to spread its weight over; the caller drops it before it counts K (SPEC §2).
    """
    assert lengths.shape == u.shape, f"lengths {tuple(lengths.shape)}, u {tuple(u.shape)}"
    assert bool((lengths >= 1).all()), f"empty response: smallest length {int(lengths.min())}"
    return torch.repeat_interleave(u / lengths, lengths)            # (N,)


# (3)  L_SFT = - Σ_s Σ_j log π(y_sj | c_s, y_s<j) / Σ_s L_s
def sft_loss(logp, mask, total_tokens):
    """This micro-batch's part of the SFT loss, in nats per target token (SPEC §2).

    logp (N,) or any shape, log π of each token; mask, same shape, bool: True on target tokens (end token included).
    total_tokens: number of target tokens of the whole optimizer batch, at least 1.
    Returns (loss scalar, metrics); what stands outside the mask (padding, context, even NaN) does not count.
    """
    assert logp.shape == mask.shape, f"logp {tuple(logp.shape)}, mask {tuple(mask.shape)}"
    assert mask.dtype == torch.bool, f"mask must be bool, is {mask.dtype}"
    assert total_tokens >= 1, f"total_tokens is {total_tokens}; a batch without targets makes no step"
    nll = -torch.where(mask, logp, 0.0)                             # like logp
    loss = nll.sum() / total_tokens                                 # ()
    return loss, {"tokens": mask.sum().double(), "nll": nll.detach().double().sum()}


# (4)  w = sg[ min(q / b, C) ]
def truncated_weight(log_q, log_b, cap=C):
    """Truncated importance weight of each token, without gradient. log_q, log_b (N,). Returns (N,) in [0, cap].

    Both sources give q/b, with ρ = π/q, so that w·ρ = π/b while the cap does not act. The usual truncated importance
    sampling is b/q with ρ = π/b. We follow the sources (SPEC §2), and `rl_loss` reports both log-gaps.
    Worked: q = .2, b = .1, π = .1 gives w = 2, ρ = .5, w·ρ = 1.
    """
    gap = (log_q - log_b).detach().clamp(max=LOG_LIMIT)             # (N,) log(q/b); far below 0, exp gives 0
    return gap.exp().clamp(max=cap)                                 # (N,)


# (5)  l_PPO = max( -ρA, -clip(ρ, 1-eps_lo, 1+eps_hi) A );   l_DC = min( l_PPO, -d A ) if A < 0, else l_PPO
def dual_clip(ratio, advantage, eps_lo=EPS_LO, eps_hi=EPS_HI, d=D):
    """The clipped loss of each token (SPEC §2). ratio, advantage (N,). Returns (N,).

    A > 0: slope -A below 1+eps_hi, flat above. A < 0: flat below 1-eps_lo, slope |A| between, flat again above d, so
    that one token which the old policy found very unlikely cannot swamp a batch.
    """
    assert ratio.shape == advantage.shape, f"ratio {tuple(ratio.shape)}, advantage {tuple(advantage.shape)}"
    assert 0 <= eps_lo < 1 and eps_hi >= 0 and d > 1 + eps_hi, f"eps_lo {eps_lo}, eps_hi {eps_hi}, d {d}"
    clipped = ratio.clamp(1 - eps_lo, 1 + eps_hi)                   # (N,)
    ppo = torch.maximum(-ratio * advantage, -clipped * advantage)   # (N,)
    return torch.where(advantage < 0, torch.minimum(ppo, -d * advantage), ppo)   # (N,)


# (6)  L_RL = Σ_s (u_s / L_s) Σ_j w_sj l_DC(ρ_sj, A_i(s)) / Σ_s u_s
def rl_loss(logp, log_q, log_b, advantage, weight, total_u, cap=C, eps_lo=EPS_LO, eps_hi=EPS_HI, d=D):
    """This micro-batch's part of the RL loss (SPEC §2), over the target tokens of its responses laid end to end.

    logp (N,): log π, carries the gradient; log_q, log_b (N,): as recorded, and the trainer's own before the update;
    advantage (N,): A of the token's episode; weight (N,): u_s / L_s (`token_weights`); a token of weight 0 (padding, a
    filler row) counts in nothing. total_u: Σ_s u_s of the whole optimizer batch, above 0.
    Returns (loss scalar, metrics): metrics are detached sums, or extremes named *_min and *_max, for `merge_metrics`.
    """
    N = logp.numel()
    for name, x in (("log_q", log_q), ("log_b", log_b), ("advantage", advantage), ("weight", weight)):
        assert x.shape == logp.shape == (N,), f"{name} {tuple(x.shape)}, logp {tuple(logp.shape)}: must be flat (N,)"
        assert not x.requires_grad, f"{name} requires a gradient; only logp may"
    assert total_u > 0, f"total_u is {total_u}; a batch without responses makes no step"

    used = weight > 0                                               # (N,)
    log_ratio = torch.where(used, logp - log_q, 0.0)                # (N,) log(π/q)
    ratio = log_ratio.clamp(-LOG_LIMIT, LOG_LIMIT).exp()            # (N,) ρ
    w = truncated_weight(log_q, log_b, cap)                         # (N,)
    loss_token = w * dual_clip(ratio, advantage, eps_lo, eps_hi, d) # (N,)
    loss = (weight * torch.where(used, loss_token, 0.0)).sum() / total_u   # ()

    with torch.no_grad():
        A = advantage                                               # (N,)
        qb = torch.where(used, log_b - log_q, 0.0).double()         # (N,) log(b/q): engine against trainer
        bp = torch.where(used, logp - log_b, 0.0).double()          # (N,) log(π/b): this update so far
        pi_b = bp.clamp(-LOG_LIMIT, LOG_LIMIT).exp()                # (N,) π/b
        sums = {                                                    # (N,) each; unused tokens are dropped below
            "tokens": used, "ratio": ratio, "w": w, "w_capped": w >= cap,
            "clip_low": (A < 0) & (ratio < 1 - eps_lo), "clip_high": (A > 0) & (ratio > 1 + eps_hi),
            "clip_dual": (A < 0) & (ratio > d),
            "gap_qb_abs": qb.abs(), "gap_qb_k1": -qb, "gap_qb_k3": _k3(qb),     # estimates of KL(q || b)
            "gap_bp_abs": bp.abs(), "gap_bp_k1": -bp, "gap_bp_k3": _k3(bp)}     # … and KL(b || π)
        metrics = {name: torch.where(used, x, 0).double().sum() for name, x in sums.items()}
        for name, x in (("ratio", ratio.double()), ("pi_b", pi_b), ("gap_qb_abs", qb.abs())):
            nothing = x.new_tensor([torch.inf])                     # (1,) makes the extremes of zero tokens ±inf
            metrics[name + "_min"] = torch.cat((torch.where(used, x, torch.inf), nothing)).amin()
            metrics[name + "_max"] = torch.cat((torch.where(used, x, -torch.inf), -nothing)).amax()
    return loss, metrics


def _k3(x):
    """Schulman's k3: e^x - 1 - x >= 0, x = log(new/old) at tokens drawn from old; a KL estimate of low variance."""
    return x.clamp(-LOG_LIMIT, LOG_LIMIT).exp() - 1 - x             # (N,)


def merge_metrics(parts):
    """Metrics of micro-batches or ranks -> one dict of floats: *_min and *_max fold, everything else adds."""
    assert all(part.keys() == parts[0].keys() for part in parts), f"different metrics: {[sorted(p) for p in parts]}"
    merged = {}
    for name in parts[0] if parts else ():
        fold = min if name.endswith("_min") else max if name.endswith("_max") else sum
        merged[name] = fold([float(part[name]) for part in parts])
    return merged


def per_token(merged):
    """A merged dict -> what is logged: sums divided by `tokens` (counts become fractions); extremes as they are."""
    n = max(merged["tokens"], 1.0)
    return {k: v if k == "tokens" or k.endswith(("_min", "_max")) else v / n for k, v in merged.items()}
