"""Stage 2a: one round of rollouts. Groups of attempts share (task, initial state), each with its own seeds, at temperature 1.

Reads   a checkpoint (served in process, by vLLM started here with --engine vllm, or by servers at --engine-url; serving.py)
Writes  OUTPUT/calls.jsonl, episodes.jsonl, arrivals.jsonl, images/, args.json, manifest.json

Departures from the paper
  1. (ours) Groups are drawn per round: task and initial state without replacement from --inits, seeded by (--seed, --round), so that
     rounds differ and a repeated command draws the same groups.
  2. (ours) --pool-report (an eval.py report.json on validation states) keeps only tasks that are neither always nor never solved,
     and weighs them by p(1-p); without it all tasks are drawn alike.

    python rollout.py --model run/sft --suites tabletop_swap --inits 11-44 --groups 64 --attempts 6 --round 1 --output run/round-1
    torchrun --nproc_per_node 4 rollout.py …   each rank does its shard, with its own replicas (--engine vllm) or on shared --engine-url
(all attempts of a group lie in one shard: one prefix to keep, and a shard's count of groups with both outcomes is exact)
"""

import argparse
import random

import adapters
import protocol
import serving
import template_kwargs
from records import at_least, BadInput, Formatter, read_json, run_main, STOPPED


def parse_args():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    p.add_argument("--output", required=True, help="folder to write (one per round)")
    serving.add_engine_arguments(p)
    g = p.add_argument_group("tasks")
    g.add_argument("--suites", default="tabletop_base,tabletop_swap,tabletop_task", help="suites, comma-separated")
    g.add_argument("--inits", default="11-44", help="initial states to draw from, e.g. 11-44,100-9999 (evaluation states are refused)")
    g.add_argument("--groups", type=at_least(1), default=64, help="groups this round (count)")
    g.add_argument("--attempts", type=int, default=6, help="attempts per group, G (count)")
    g.add_argument("--round", type=at_least(1), default=1, help="round number; with --seed it draws the groups")
    g.add_argument("--pool-report", default=None, help="report.json on validation states that chooses the tasks")
    adapters.add_rollout_arguments(p, sampling="train")
    args = p.parse_args()
    if args.sampling != "train":
        p.error("rollouts for RL are sampled from the policy itself: --sampling train (eval.py takes other profiles)")
    if args.attempts < 2:
        p.error("--attempts must be at least 2: leave-one-out needs another member")
    return args


def draw_groups(args, suites, inits):
    """-> list of (suite, index, init), args.groups of them, all different."""
    rng = random.Random(f"{args.seed}/groups/{args.round}")
    weights = {(s, t.index): 1.0 for s, tasks in suites.items() for t in tasks}
    if args.pool_report:
        report = read_json(args.pool_report)
        if not isinstance(report.get("tasks"), dict) or "inits" not in report:
            raise BadInput(f"{args.pool_report}: fields 'tasks' and 'inits' expected; give the report.json of an eval.py run")
        if any(i in protocol.EVALUATION_STATES for i in protocol.parse_inits(report["inits"], args.pool_report)):
            raise BadInput(f"{args.pool_report}: measured on evaluation states ({report['inits']}); "
                           "tasks are chosen on validation states 45-49")
        rates = report["tasks"]
        weights = {k: p * (1 - p) for k in weights if (p := rates.get(f"{k[0]}/{k[1]}", {}).get("success")) not in (None, 0, 1)}
        if not weights:
            raise BadInput(f"{args.pool_report}: every task of {args.suites} is always or never solved there; nothing to learn from")
        print(f"rollout: {len(weights)} tasks are neither always nor never solved in {args.pool_report}")
    if args.groups > len(weights) * len(inits):
        raise BadInput(f"--groups {args.groups}: only {len(weights)} tasks x {len(inits)} states exist")
    tasks, groups = list(weights), {}
    while len(groups) < args.groups:
        task = rng.choices(tasks, [weights[t] for t in tasks])[0]
        groups[(*task, rng.choice(inits))] = None
    return list(groups)


def main():
    args = parse_args()
    inits = protocol.parse_inits(args.inits)
    protocol.refuse_evaluation_states(inits, "rollout.py")
    groups = draw_groups(args, protocol.parse_suites(args.suites, "rollout.py"), inits)
    template_kwargs.check(args.chat_template_kwargs, args.model)
    template_kwargs.note_training(args.chat_template_kwargs, args.model)
    specs = [{"suite": s, "index": i, "init": init, "attempt": a} for s, i, init in groups for a in range(args.attempts)]
    episodes, folder = adapters.run(args, specs, "rollout", serving.make_upstream(args))
    if not (folder / "manifest.json").exists():
        return STOPPED
    rewards = {}
    for e in episodes:
        if e.valid:
            rewards.setdefault((e.task, e.init), []).append(e.reward)
    mixed = sum(0 < sum(r) < len(r) for r in rewards.values())
    print(f"rollout: {mixed} of {len(rewards)} groups have both outcomes (only they carry a gradient)")


if __name__ == "__main__":
    run_main(main)
