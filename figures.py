"""The figures of eval.py: success as bars with 95 % Wilson intervals, success by round."""

import math


def axes(width, height):
    from matplotlib.figure import Figure            # not pyplot: no display, no global state
    figure = Figure(figsize=(width, height), layout="constrained")
    ax = figure.subplots()
    ax.set_ylim(0, 100)
    ax.set_ylabel("success, % (bars: 95 % Wilson)")
    ax.grid(axis="y", alpha=.3)
    return figure, ax


def errors(rates):
    """Rates -> heights and the two rows of error-bar lengths, in %; nothing is drawn for a rate of n = 0."""
    height = [100 * r["success"] if r["n"] else math.nan for r in rates]
    return height, [[h - 100 * r["low"] for h, r in zip(height, rates, strict=True)],
                    [100 * r["high"] - h for h, r in zip(height, rates, strict=True)]]


def bar_figure(path, names, suites):
    """suites: {suite: [a rate per name]} -> a PNG, one cluster of bars per suite."""
    figure, ax = axes(max(4.8, 1.5 + .5 * len(suites) * len(names)), 3.6)
    for i, name in enumerate(names):
        height, error = errors([rates[i] for rates in suites.values()])
        width = .8 / len(names)
        left = [x + (i - (len(names) - 1) / 2) * width for x in range(len(suites))]
        ax.bar(left, height, width, yerr=error, capsize=3, label=name)
    ax.set_xticks(range(len(suites)), suites)
    ax.legend(frameon=False, ncols=len(names), loc="upper left")
    figure.savefig(path, dpi=140)


def learning_figure(path, rounds, evaluations):
    """rounds, evaluations: {name: summary}; training success by round -> a PNG, evaluations as dashed lines."""
    figure, ax = axes(6.4, 3.6)
    x = range(1, len(rounds) + 1)
    height, error = errors(list(rounds.values()))
    ax.errorbar(x, height, yerr=error, marker="o", capsize=3, label="training attempts")
    if all(s["picks_right"] is not None for s in rounds.values()):
        ax.plot(x, [100 * s["picks_right"] for s in rounds.values()], "s:", ms=4, label="right grasps, % of picks")
    for i, (name, s) in enumerate(evaluations.items()):
        if s["n"]:
            ax.axhline(100 * s["success"], ls="--", lw=1, color=f"C{i + 2}", label=f"{name}, evaluation")
    ax.set_xticks(x, ["".join(filter(str.isdigit, name)) or name for name in rounds])
    ax.set_xlabel("round")
    ax.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=140)
