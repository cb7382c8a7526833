"""Stage 0: teacher episodes. A teacher with memory solves tasks in the harness; every model call is recorded by the proxy.

First the teacher explores initial state 0 of each task and writes task memory (memory_write); global memory is given. Then it runs the
training states with both to read. Successful and failed episodes are both recorded; rewrite.py picks. With --harness code there is no
memory and no exploration, and reuse.py picks.

Reads   nothing (a scripted expert), an OpenAI-compatible teacher at a URL, or a checkpoint that is served here
Writes  OUTPUT/calls.jsonl, episodes.jsonl, arrivals.jsonl, images/, memory/, args.json, manifest.json (OUTPUT/explore/ for state 0)

Departures from the paper
  1. The teacher here is a scripted expert by default; the paper's is Qwen3.8-27B. --teacher URL takes any model, --teacher model
     serves one.
  2. The expert is handicapped on purpose: --grasp-skill is the chance that it knows the right grasp offset. With 1.0 RL has nothing to
     find in grasping on tabletop (README shows that arm too).

    python collect.py --suites tabletop_base,tabletop_swap,tabletop_task --inits 100-199 --output run/teacher
    python collect.py --harness code --inits 100-199 --grasp-skill 0.3 --output run/teacher
    python collect.py … --teacher http://127.0.0.1:8000/v1 [--teacher-model NAME]       (key: OPENAI_API_KEY)
    python collect.py … --teacher model --model CKPT --engine vllm
    torchrun --nproc_per_node 4 collect.py …        each rank does its shard, OUTPUT/shard-<i>-of-<n>
"""

import argparse
import asyncio
import copy
from pathlib import Path

import adapters
import endpoint
import protocol
import serving
import template_kwargs
from records import at_least, BadInput, Formatter, run_main, STOPPED, writing


def parse_args():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    p.add_argument("--output", required=True, help="folder to write")
    g = p.add_argument_group("tasks")
    g.add_argument("--suites", default="tabletop_base,tabletop_swap,tabletop_task", help="suites, comma-separated")
    g.add_argument("--tasks", default=None, help="task indices, e.g. 0-4; default: all of each suite")
    g.add_argument("--inits", default="11-44", help="initial states, e.g. 11-44,100-199 (evaluation states are refused)")
    g.add_argument("--attempts", type=at_least(1), default=1, help="attempts per (task, initial state)")
    g.add_argument("--target-successes", type=at_least(1), default=None,
                   help="stop once so many episodes have succeeded (count, per shard); default: run all")
    g = p.add_argument_group("teacher")
    g.add_argument("--teacher", default="scripted", metavar="{scripted,URL,model}",
                   help="scripted; URLs of one OpenAI-compatible model (comma-separated; key OPENAI_API_KEY); model: serve --model here")
    g.add_argument("--teacher-name", default="teacher", help="URL: version name that is recorded")
    g.add_argument("--teacher-model", default="", help="URL: name of the model; default: the one that the server offers")
    g.add_argument("--teacher-api", choices=["openai", "vllm"], default="openai",
                   help="URL: openai sends what any server takes (top_k, … stay the server's own); vllm sends all, records token ids")
    g.add_argument("--grasp-skill", type=float, default=1.0,
                   help="scripted: chance of the right grasp per pick (LIBERO: of the one that memory names; 0 to 1)")
    g.add_argument("--gives-up", type=float, default=0.1, help="scripted: chance to give up after a failed pick (0 to 1)")
    g.add_argument("--leans", type=float, default=None,
                   help="scripted, skills: chance that a reply leans on memory (0 to 1; in 1/12 of it a pick uses remembered coordinates); "
                        "default: 0.12")
    g.add_argument("--mistakes", type=float, default=None,
                   help="scripted, code: chance that a first program holds a programming error, which the second repairs (0 to 1); "
                        "default: 0.1")
    g.add_argument("--no-memory", action="store_true", help="neither write nor read memory (--harness code has none)")
    adapters.add_rollout_arguments(p, sampling="train")
    serving.add_engine_arguments(p, required=False)
    args = p.parse_args()
    if args.teacher == "model" and not args.model:
        p.error("--teacher model: --model names its checkpoint")
    if args.teacher != "model":
        serving.without_engine(p, args, f"--teacher {args.teacher}")
        if args.teacher != "scripted" and not all(url.startswith(("http://", "https://")) for url in args.teacher.split(",")):
            p.error(f"--teacher {args.teacher!r}: expected 'scripted', 'model' or URLs (http://…/v1)")
    code = args.harness == "code"
    for name, belongs, default in (("leans", not code, 0.12), ("mistakes", code, 0.1)):
        if getattr(args, name) is None:
            setattr(args, name, default if belongs else 0.0)
        elif not belongs:
            p.error(f"--{name}: --harness {args.harness} does not honour it")
    args.no_memory = args.no_memory or code                  # its planner sees two messages and no tools
    for name in ("grasp_skill", "gives_up", "leans", "mistakes"):
        if not 0 <= getattr(args, name) <= 1:
            p.error(f"--{name.replace('_', '-')} is a chance, expected 0 to 1, found {getattr(args, name)}")
    return args


def make_teacher(args, server=None):
    """The upstream of one run. server: what serves --teacher model, shared by the runs of this command."""
    if server is not None:
        return endpoint.Shared(server)
    if args.teacher == "scripted":
        from harness.teacher import expert_for
        return expert_for(args.suites.split(","), args.grasp_skill, args.gives_up, args.leans, harness=args.harness, mistakes=args.mistakes)
    return endpoint.Endpoint(args.teacher, args.teacher_name, args.teacher_model, args.teacher_api)


def memory_folder(args):
    return Path(args.output).resolve() / "memory"


async def explore(args, tasks, teacher):
    """State 0 of every task, once, with memory_write; teacher(args) -> upstream. True if whole. Never becomes training data."""
    from harness.teacher import global_memory
    memory = memory_folder(args)
    with writing(memory):
        memory.mkdir(parents=True, exist_ok=True)
        (memory / "global.md").write_text(global_memory(args.suites.split(",")) + "\n")
    first = copy.copy(args)
    first.output, first.target_successes = str(Path(args.output) / "explore"), None
    first.grasp_skill, first.leans = 1.0, 0.0
    first.turns = 2 * (args.turns or adapters.SkillsAdapter.turns)              # exploring has time; the handicap is for training
    shard, shards = adapters.parse_shard(args.shard)
    if shards > 1:
        first.output += f"-{shard}"
    specs = [{"suite": s, "index": i, "init": 0, "attempt": 0, "memory": str(memory), "memory_write": True} for s, i in tasks]
    # Every shard explores all tasks for itself: its teacher may need any of them.
    _, folder = await adapters.run_in_loop(first, specs, "explore", teacher(first), None, shard=(0, 1), stop_in=args.output)
    written = sum((memory / f"{s}-{i}.md").exists() for s, i in tasks)
    print(f"explore: task memory of {written} of {len(tasks)} tasks is written", flush=True)
    return (folder / "manifest.json").exists()


async def collect(args, tasks, inits):
    """Exploration and collection in one event loop, before one server. -> exit code"""
    server, paid = serving.make_upstream(args) if args.teacher == "model" else None, {}

    def teacher(stage):
        def make(args):
            upstream = paid[stage] = make_teacher(args, server)
            return upstream
        return make
    try:
        adapters.check_split(args.output, adapters.parse_shard(args.shard)[1])       # before exploring: it costs, and writes memory
        memory = None if args.no_memory else str(memory_folder(args))
        # States outermost: an early stop still has seen every task.
        specs = [{"suite": s, "index": i, "init": init, "attempt": a, "memory": memory}
                 for init in inits for a in range(args.attempts) for s, i in tasks]
        protocol.check_states(specs)                                                 # before exploring, too
        adapters.settle(args, {s for s, _ in tasks})
        if not args.no_memory and not await explore(args, tasks, teacher("explore")):
            return STOPPED
        enough = None
        if args.target_successes:
            def enough(episodes):
                return sum(e.reward or 0 for e in episodes) >= args.target_successes
        episodes, folder = await adapters.run_in_loop(args, specs, "collect", teacher("collect")(args), enough)
    finally:
        if server is not None:
            await server.close()
        for stage, upstream in paid.items():             # however the command ends: money was spent
            if hasattr(upstream, "counts"):
                print(f"{stage}: teacher {upstream.model}: {endpoint.told(upstream.counts)}", flush=True)
    if not (folder / "manifest.json").exists():
        return STOPPED
    if enough and not enough(episodes):
        print(f"collect: fewer than --target-successes {args.target_successes} succeeded in all {len(specs)} episodes")


def main():
    args = parse_args()
    if args.teacher != "scripted" and args.teacher != "model":
        endpoint.check_profile(args.sampling, args.teacher_api)
    if args.teacher == "model":
        template_kwargs.check(args.chat_template_kwargs, args.model)
    elif args.chat_template_kwargs and (args.teacher == "scripted" or args.teacher_api == "openai"):
        # api.openai.com answers 400 to the field and others ignore it, so endpoint.py does not send it: the record would be wrong.
        what = "scripted" if args.teacher == "scripted" else "with --teacher-api openai"
        raise BadInput(f"{template_kwargs.OPTION}: a teacher {what} has no chat template that takes it; give it to rewrite.py for the "
                       "student's contexts, or --teacher-api vllm where the server is vLLM")
    inits = protocol.parse_inits(args.inits)
    protocol.refuse_evaluation_states(inits, "collect.py")
    suites = protocol.parse_suites(args.suites, "collect.py")
    if args.teacher == "scripted" or not args.no_memory:
        protocol.one_world(suites)
    if args.teacher == "scripted" and args.grasp_skill != 1.0 and "robosuite" in suites:
        raise BadInput(f"--grasp-skill {args.grasp_skill:g}: the expert's programs for robosuite have one grasp each, the right one; "
                       "leave the option out")
    return asyncio.run(collect(args, protocol.parse_tasks(args.tasks, suites), inits))


if __name__ == "__main__":
    run_main(main)
