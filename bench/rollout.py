"""What the skills harness costs on LIBERO: its steps against plain robosuite stepping of the same actions, and where rollout time goes.

    python bench/rollout.py            about 10 minutes on two quiet cores; --states 11 is a quarter of it
    python bench/rollout.py --suites libero_object_swap --tasks 4 --states 11 --workers 1      half a minute: does it run?

Steps, in this process: the scripted expert (perfect plan) plays every start through the harness, without a server, and every action is
recorded. Then LIBERO's own env.step repeats the actions from the same restored start state, first as our environment is set up (its
observables, which nobody reads, are off), then with observables on, as LIBERO ships it. The final states must be the same, bit for bit:
that is the proof that the harness's quicker step is exact (exit code 1 if not). In seconds of CPU time of one thread, so that another
program on the machine shows less; the harness's include its skills' geometry and its perception, not the expert's own time.
Rollout: the same episodes through adapters.run, with its proxy and its worker processes. Worker time = workers × wall time:
    simulation   inside skills                    reset   building a scene (once per task and worker) and restoring a start state
    generation   waiting for the model server: here --latency alone, the scripted expert takes no time
    proxy        the rest of an episode: HTTP, recording, the harness's own text
    idle         the rest of the run: start and end of processes, a worker without an episode
"""

import argparse
import asyncio
import contextlib
import io
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")               # before numpy: CPU seconds of one thread
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import adapters
import protocol
import records
from harness.skills import Episode
from harness.teacher import expert_for
from records import BadInput

AIM_RATIO = 0.95
SHARES = ("simulation", "reset", "generation", "proxy", "idle")


class Expert:
    """The perfect scripted expert as an upstream that takes `latency` seconds per call, and counts the seconds that calls took."""

    def __init__(self, suites, latency=0.0):
        self.inner, self.latency, self.seconds = expert_for(suites, 1.0, 0.0, 0.0, perfect=True), latency, 0.0
        self.model, self.policy_version = self.inner.model, self.inner.policy_version

    async def ready(self):
        pass

    async def chat(self, body, episode_id=""):
        began = time.perf_counter()
        await asyncio.sleep(self.latency)
        reply = await self.inner.chat(body, episode_id)
        self.seconds += time.perf_counter() - began
        return reply

    async def close(self):
        pass


def rollout_args(args, workers, output):
    """What rollout.py would be told; a short limit of turns, so that one endless retry is not most of the steps."""
    p = argparse.ArgumentParser()
    adapters.add_rollout_arguments(p, sampling="train")
    told = p.parse_args(["--workers", str(workers), "--noise", str(args.noise), "--turns", "30"])
    told.output = str(output)
    return told


# ---------------------------------------------------------------------------------------------- steps

class Recorder:
    """Keeps the start state that a world restores and all actions from then on; `began`: CPU time (s) when it was restored."""

    def __init__(self, world):
        self.start, self.actions, self.began = None, [], 0.0
        restore, step = world._restore, world._step

        def restoring(state):
            restore(state)
            self.start, self.actions, self.began = state.copy(), [], time.process_time()

        def stepping(arm, grip):
            self.actions.append([*arm, grip])
            step(arm, grip)
        world._restore, world._step = restoring, stepping


class Client:
    """In place of the harness's HTTP client: asks the expert in this process; `seconds` of CPU time that it took."""

    def __init__(self, expert):
        self.expert, self.seconds = expert, 0.0

    def chat(self, body):
        began = time.process_time()
        message = asyncio.run(self.expert.chat({**body, "seed": 0}))["choices"][0]["message"]
        self.seconds += time.process_time() - began
        return message


def repeat(world, recorder, observables):
    """LIBERO's env.step for each recorded action -> (CPU seconds, hash of the final state)."""
    import numpy as np
    actions = np.array(recorder.actions)
    world._restore(recorder.start)
    for observable in world.env.env._observables.values():
        observable.set_enabled(observables)
    began = time.process_time()
    for action in actions:
        world.env.step(action)
    seconds = time.process_time() - began
    for observable in world.env.env._observables.values():
        observable.set_enabled(False)
    return seconds, world.state_hash()


def measure_steps(specs, args):
    """-> a row per start: steps, CPU seconds of the harness and of both repetitions, whether the final states are the same."""
    from harness.libero import Libero
    world, rows, told = Libero(), [], rollout_args(args, 1, "")
    recorder, expert = Recorder(world), Expert(args.suites)
    for spec in specs:
        spec = {**spec, "episode_id": "{suite}-{index}.i{init}.a{attempt}.r0".format(**spec)}
        episode = Episode(world, adapters.SkillsAdapter().job(spec, "http://none", told, "expert"))
        client = episode.client = Client(expert)
        outcome = episode.run()
        seconds = time.process_time() - recorder.began - client.seconds
        hashes, actions = [world.state_hash()], recorder.actions
        row = {**spec, "steps": len(actions), "harness": seconds, "success": outcome["success_latched"], "end": outcome["end"]}
        for name, observables in (("plain", False), ("shipped", True)):
            row[name], final = repeat(world, recorder, observables)
            recorder.actions = actions                      # restoring has put an empty list there
            hashes.append(final)
        rows.append({**row, "same": len(set(hashes)) == 1})
    world.close()
    return rows


def show_steps(rows):
    print("| suite | episodes | steps | harness steps/s | plain env.step | as shipped | ratio to plain | to shipped | final states |\n"
          + "|---" * 9 + "|")
    groups = {s: [r for r in rows if r["suite"] == s] for s in dict.fromkeys(r["suite"] for r in rows)}
    summary = {}
    for name, part in {**groups, **({"all": rows} if len(groups) > 1 else {})}.items():
        steps = sum(r["steps"] for r in part)
        rate = {k: steps / sum(r[k] for r in part) for k in ("harness", "plain", "shipped")}
        same = sum(r["same"] for r in part)
        summary[name] = {**rate, "steps": steps, "episodes": len(part), "same": same, "ratio": rate["harness"] / rate["plain"]}
        ratios = " | ".join(f"{rate['harness'] / rate[k]:.2f}" for k in ("plain", "shipped"))
        print(f"| {name} | {len(part)} | {steps} | " + " | ".join(f"{v:.0f}" for v in rate.values())
              + f" | {ratios} | {same} of {len(part)} the same |", flush=True)
    return summary


# ---------------------------------------------------------------------------------------------- rollout

def measure_rollout(specs, args, workers, steps):
    """The specs through the real stack -> rates per second of wall time, and shares of the workers' time (they add to 1)."""
    expert = Expert(args.suites, args.latency)
    with tempfile.TemporaryDirectory(prefix="bench-rollout-") as folder, contextlib.redirect_stdout(io.StringIO()):
        began = time.perf_counter()
        episodes, _ = adapters.run(rollout_args(args, workers, folder), [dict(s) for s in specs], "rollout", expert)
        wall = time.perf_counter() - began
        calls = list(records.read_calls(Path(folder) / "calls.jsonl"))
    valid = [e for e in episodes if e.valid]
    busy = sum(e.seconds for e in episodes)
    seconds = {"simulation": sum(e.extra.get("skill_seconds", 0) for e in valid), "generation": expert.seconds,
               "reset": sum(e.extra.get("reset_seconds", 0) for e in valid)}
    seconds["proxy"] = busy - sum(seconds.values())
    seconds["idle"] = workers * wall - busy
    return {"workers": workers, "episodes": len(episodes), "invalid": len(episodes) - len(valid), "wall": wall, "calls": len(calls),
            "successes": sum(e.success_latched for e in valid), "episodes_per_second": len(valid) / wall, "steps_per_second": steps / wall,
            "call_ms": 1000 * statistics.median(c.seconds for c in calls),
            "shares": {k: seconds[k] / (workers * wall) for k in SHARES}}


def show_rollout(row):
    shares = " | ".join(f"{100 * row['shares'][k]:.1f} %" for k in SHARES)
    print(f"| {row['workers']} | {row['wall']:.0f} | {row['episodes_per_second']:.3f} | {row['steps_per_second']:.0f} | {shares} | "
          f"{row['call_ms']:.1f} | {row['successes']} of {row['episodes']} |", flush=True)


# ---------------------------------------------------------------------------------------------- main

def bench(args):
    args.suites, inits = args.suites.split(","), protocol.parse_inits(args.states, "--states")
    protocol.refuse_evaluation_states(inits, "this bench", "--states")
    tasks = {s: {t.index for t in ts} for s, ts in protocol.parse_suites(",".join(args.suites)).items()}
    chosen = protocol.parse_inits(args.tasks, "--tasks")
    for suite, known in tasks.items():
        if missing := set(chosen) - known:
            raise BadInput(f"--tasks {args.tasks}: {suite} has no task {min(missing)}; valid: 0-{max(known)}")
        if not suite.startswith("libero"):
            raise BadInput(f"--suites: {suite} is no LIBERO suite; bench/clock.py is tabletop's")
    specs = [{"suite": s, "index": i, "init": init, "attempt": 0} for s in args.suites for i in chosen for init in inits]
    protocol.check_states(specs, "--states")
    rows = measure_steps(specs, args)
    summary, total, rollouts = show_steps(rows), sum(r["steps"] for r in rows), []
    print("\n| workers | wall s | episodes/s | steps/s | " + " | ".join(SHARES) + " | median ms/call | successes |\n" + "|---" * 11 + "|")
    for workers in args.workers:
        rollouts.append(measure_rollout(specs, args, workers, total))
        show_rollout(rollouts[-1])
    whole, different = summary.get("all") or summary[args.suites[0]], [r["episode_id"] for r in rows if not r["same"]]
    print(f"load average at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n"
          f"aim (harness ≥ {AIM_RATIO} of plain env.step): {'met' if whole['ratio'] >= AIM_RATIO else 'missed'}, {whole['ratio']:.2f}")
    if args.output:
        args.output.write_text(json.dumps({"steps": summary, "rollout": rollouts, "starts": rows}, indent=1) + "\n")
    if different:
        print(f"error: other final states than plain env.step: {', '.join(different)}", file=sys.stderr)
        return 1
    return 0


def main():
    from harness.world import LIBERO_NOISE
    p = argparse.ArgumentParser(description=__doc__, formatter_class=records.Formatter)
    p.add_argument("--suites", default="libero_object_swap,libero_goal_swap", help="LIBERO suites, comma-separated")
    p.add_argument("--tasks", default="1,2,4,6,8", help="task indices of each suite (these are picks and places)")
    p.add_argument("--states", default="11-14", help="initial states of each task (evaluation states are refused)")
    p.add_argument("--workers", nargs="+", type=records.at_least(1), default=[1, 2], help="harness processes, a rollout for each")
    p.add_argument("--latency", type=records.at_least(0.0, float), default=0.0, help="of the model server: seconds per call")
    p.add_argument("--noise", type=records.at_least(0.0, float), default=LIBERO_NOISE, help="of the executor (mm)")
    p.add_argument("--output", type=Path, help="JSON file for all numbers")
    return bench(p.parse_args())


if __name__ == "__main__":
    records.run_main(main)
