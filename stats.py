"""Rates with 95 % Wilson intervals, and the exact paired sign test, of eval.py."""

import math

from scipy.stats import binomtest


def wilson(k, n, z=1.959963984540054):
    """95 % Wilson score interval of k successes in n trials -> (low, high) in [0, 1]; (0, 1) for n = 0."""
    assert 0 <= k <= n, f"{k} of {n}"
    if n == 0:
        return 0.0, 1.0
    p, z2n = k / n, z * z / n
    middle, half = (p + z2n / 2) / (1 + z2n), z / (1 + z2n) * math.sqrt(p * (1 - p) / n + z2n / (4 * n))
    return 0.0 if k == 0 else middle - half, 1.0 if k == n else middle + half        # exact at the ends, where rounding is not


def sign_test(wins, losses):
    """Exact two-sided p of the paired sign test (McNemar's exact test): wins ~ Binomial(wins + losses, 1/2)."""
    return float(binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0


def rate(values):
    """Iterable of 0/1 -> {"success", "low", "high", "k", "n"}; success = k / n, null for n = 0."""
    values = [bool(v) for v in values]
    k, n = sum(values), len(values)
    low, high = wilson(k, n)
    return {"success": k / n if n else None, "low": low, "high": high, "k": k, "n": n}


def percent(r, invalid=0):
    """'61.2 % [58.0, 64.3] (n 800, 2 invalid)': a rate is never shown without what it leaves out."""
    if not r["n"]:
        return f"no valid episode ({invalid} invalid)"
    return f"{100 * r['success']:.1f} % [{100 * r['low']:.1f}, {100 * r['high']:.1f}] (n {r['n']}, {invalid} invalid)"
