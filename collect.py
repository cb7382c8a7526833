"""Stage 0: teacher episodes. A teacher with memory solves tasks in the harness; every model call is recorded by the proxy.

First the teacher explores initial state 0 of each task and writes task memory (memory_write); global memory is given. Then it runs the
training states with both to read. Successful and failed episodes are both recorded; rewrite.py picks.

Reads   nothing (a scripted expert), or an OpenAI-compatible teacher at a URL
Writes  OUTPUT/calls.jsonl, episodes.jsonl, arrivals.jsonl, images/, memory/, args.json, manifest.json (OUTPUT/explore/ for state 0)

Departures from the paper
  1. The teacher here is a scripted expert by default; the paper's is Qwen3.8-27B. --teacher URL takes a model.
  2. The expert is handicapped on purpose: --grasp-skill is the chance that it knows the right grasp offset. With 1.0 RL has nothing to
     find in grasping on tabletop (README shows that arm too).

    python collect.py --suites tabletop_base,tabletop_swap,tabletop_task --inits 100-199 --output run/teacher
    torchrun --nproc_per_node 4 collect.py …        each rank does its shard, OUTPUT/shard-<i>-of-<n>
"""

import argparse
import copy
from pathlib import Path

import adapters
from records import at_least, BadInput, Formatter, run_main, STOPPED


def parse_args():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    p.add_argument("--output", required=True, help="folder to write")
    g = p.add_argument_group("tasks")
    g.add_argument("--suites", default="tabletop_base,tabletop_swap,tabletop_task", help="suites, comma-separated")
    g.add_argument("--tasks", default=None, help="task indices, e.g. 0-4; default: all of each suite")
    g.add_argument("--inits", default="11-44", help="initial states, e.g. 11-44,100-199 (evaluation states are refused)")
    g.add_argument("--attempts", type=at_least(1), default=1, help="attempts per (task, initial state)")
    g.add_argument("--target-successes", type=at_least(1), default=None,
                   help="stop once so many episodes have succeeded (count); default: run all")
    g = p.add_argument_group("teacher")
    g.add_argument("--teacher", default="scripted", help="'scripted', or the URL of an OpenAI-compatible server")
    g.add_argument("--teacher-name", default="teacher", help="version name recorded for a teacher at a URL")
    g.add_argument("--grasp-skill", type=float, default=1.0, help="scripted: chance of the right grasp offset per pick (0 to 1)")
    g.add_argument("--gives-up", type=float, default=0.1, help="scripted: chance to give up after a failed pick (0 to 1)")
    g.add_argument("--leans", type=float, default=0.12,
                   help="scripted: chance that a reply leans on memory (0 to 1); in 1/12 of it a pick uses remembered coordinates")
    g.add_argument("--no-memory", action="store_true", help="neither write nor read memory")
    adapters.add_rollout_arguments(p, sampling="train")
    args = p.parse_args()
    for name in ("grasp_skill", "gives_up", "leans"):
        if not 0 <= getattr(args, name) <= 1:
            p.error(f"--{name.replace('_', '-')} is a chance, expected 0 to 1, found {getattr(args, name)}")
    return args


def make_teacher(args):
    if args.teacher == "scripted":
        from harness.teacher import ScriptedTeacher
        return ScriptedTeacher(args.grasp_skill, args.gives_up, args.leans)
    if not args.teacher.startswith(("http://", "https://")):
        raise BadInput(f"--teacher {args.teacher!r}: expected 'scripted' or a URL")
    from upstream import HttpUpstream
    return HttpUpstream(args.teacher, args.teacher_name)


def explore(args, tasks):
    """State 0 of every task, once, with memory_write. Its episodes never become training data."""
    from harness.teacher import GLOBAL_MEMORY
    memory = Path(args.output) / "memory"
    memory.mkdir(parents=True, exist_ok=True)
    (memory / "global.md").write_text(GLOBAL_MEMORY + "\n")
    first = copy.copy(args)
    first.output, first.target_successes = str(Path(args.output) / "explore"), None
    first.grasp_skill, first.leans = 1.0, 0.0        # exploring has all the time it wants; the handicap is for the training states
    # Every shard explores all tasks for itself: its teacher may need any of them.
    first.shard = "0/1"
    shard, shards = adapters.parse_shard(args.shard)
    if shards > 1:
        first.output += f"-{shard}"
    specs = [{"suite": s, "index": i, "init": 0, "attempt": 0, "memory": str(memory.resolve()), "memory_write": True} for s, i in tasks]
    _, folder = adapters.run(first, specs, "explore", make_teacher(first))
    return str(memory.resolve()) if (folder / "manifest.json").exists() else None


def main():
    args = parse_args()
    inits = adapters.parse_inits(args.inits)
    adapters.refuse_evaluation_states(inits, "collect.py")
    suites = adapters.parse_suites(args.suites)
    chosen = adapters.parse_inits(args.tasks, "--tasks") if args.tasks else None
    tasks = [(s, t.index) for s, ts in suites.items() for t in ts if chosen is None or t.index in chosen]
    memory = None if args.no_memory else explore(args, tasks)
    if memory is None and not args.no_memory:
        return STOPPED
    # States outermost: an early stop still has seen every task.
    specs = [{"suite": s, "index": i, "init": init, "attempt": a, "memory": memory}
             for init in inits for a in range(args.attempts) for s, i in tasks]
    enough = None
    if args.target_successes:
        def enough(episodes):
            return sum(e.reward or 0 for e in episodes) >= args.target_successes
    episodes, folder = adapters.run(args, specs, "collect", make_teacher(args), enough)
    if not (folder / "manifest.json").exists():
        return STOPPED
    if enough and not enough(episodes):
        print(f"collect: fewer than --target-successes {args.target_successes} succeeded in all {len(specs)} episodes")


if __name__ == "__main__":
    run_main(main)
