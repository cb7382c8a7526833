"""The boundary to the harnesses: how an attempt is launched, and the five fields that come back: task, init, attempt, reward, valid.

Three ways not to count, never mixed (SPEC.md §2):
    invalid   infrastructure (simulator crash, lost worker, model server, incomplete record): no reward, leaves its group and every rate
    failed    reward 0: the planner's own doing, running out of turns or time included
    gated     one call's weight is 0 (gate.py); its episode still counts. Not decided here.

`run` is what collect.py, rollout.py and eval.py share: proxy up, harness processes up, attempts through them, one `Episode` line each,
resumable by the same command, ended between episodes by a file named STOP.
"""

import asyncio
import collections
import fcntl
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

from tqdm import tqdm

import records
from upstream import UpstreamError
from records import at_least, BadInput, Episode, JsonlWriter, PROFILES

ROOT = Path(__file__).resolve().parent
HOPELESS = 12           # invalid episodes in a row from the start: the run ends, something is broken that no retry mends
SLOW_SHARE = 0.5        # of a timed-out episode's seconds: more than this in upstream errors or queueing makes it invalid, not failed


class SkillsAdapter:
    """Our skills harness (RPent's shape), run by harness/worker.py."""
    harness = "skills"

    def job(self, spec, base_url, args, model):
        """What one attempt needs to know, in plain JSON (harness/skills.py). The planner sees nothing that differs within a group."""
        return {"episode_id": spec["episode_id"], "base_url": base_url,
                "suite": spec["suite"], "index": spec["index"], "init": spec["init"], "model": model,
                "max_tokens": args.max_tokens, "turns": args.turns, "seconds": args.seconds,
                "history_budget": args.history_budget, "pictures": args.pictures, "request_timeout": args.request_timeout,
                "memory": spec.get("memory"), "memory_write": spec.get("memory_write", False), "video": spec.get("video")}

    def episode(self, spec, outcome, calls, policy_version):
        """Harness outcome and recorded calls -> Episode. `calls`: what the proxy recorded for this episode, in order."""
        e = Episode(spec["episode_id"], self.harness, f"{spec['suite']}/{spec['index']}", spec["init"], spec["attempt"], None, False,
                    policy_version=policy_version, calls=[c.call_id for c in calls])
        if "end" in outcome:
            known = ("end", "start_state", "success_latched", "success_final", "success_turn", "finished", "seconds")
            for name in known:
                setattr(e, name, outcome[name])
            e.extra = {k: v for k, v in outcome.items() if k not in known and k != "episode_id"}
        else:
            e.extra = {k: v for k, v in outcome.items() if k != "episode_id"}
        e.reason = self.invalid(outcome, calls)
        e.valid = e.reason is None
        if e.valid:
            e.reward = 1.0 if e.success_latched else 0.0     # RPent's reward: the predicate, latched
        return e

    def invalid(self, outcome, calls):
        """None, or one of records.REASONS."""
        if outcome.get("lost"):
            return "worker_lost"
        if outcome.get("timeout"):
            return "worker_timeout"
        if "crash" in outcome:
            return "simulator_crash"
        if outcome["end"] == "infrastructure":
            return "model_server"
        turns = {c.turn for c in calls if c.delivered}
        if len(turns) < outcome["turns"]:
            return "incomplete_record"                       # the planner answered more often than the proxy wrote down
        if outcome["end"] == "time":
            slow = sum(c.seconds if c.error else c.extra.get("queue_seconds", 0.0) for c in calls)
            if slow > SLOW_SHARE * outcome["seconds"]:
                return "model_server"
        return None


ADAPTERS = {"skills": SkillsAdapter}


def post_success(episode, call):
    """True if this call was made after success: its action cannot have earned the reward (SPEC.md §2, post-success filter)."""
    return episode.success_turn is not None and call.turn > episode.success_turn


# ---------------------------------------------------------------------------------------------- harness processes

class WorkerPool:
    """`processes` harness workers with `threads` episodes each. One that dies or hangs loses its episodes (invalid) and is replaced."""

    def __init__(self, processes, threads):
        self.processes, self.threads = processes, threads
        self.workers, self.free, self.closing, self.broken, self.restarts = [], asyncio.Queue(), False, False, 0

    async def start(self):
        for k in range(self.processes):
            self.workers.append(await self._spawn(k))
            for _ in range(self.threads):
                self.free.put_nowait(k)

    async def _spawn(self, k):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "harness.worker", "--threads", str(self.threads), cwd=ROOT, env=env, start_new_session=True,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=64 << 20)
        worker = {"process": process, "waiting": {}}
        worker["reader"] = asyncio.create_task(self._read(k, worker))
        return worker

    async def _read(self, k, worker):
        while line := await worker["process"].stdout.readline():
            outcome = json.loads(line)
            future = worker["waiting"].pop(outcome["episode_id"], None)
            if future and not future.done():
                future.set_result(outcome)
        if not self.closing:                                 # a successor first, so that whoever is told "lost" can run again at once
            self.restarts += 1
            print(f"harness worker {k} ended (exit {await worker['process'].wait()}); starting another", file=sys.stderr)
            if self.restarts <= 20 * self.processes:
                self.workers[k] = await self._spawn(k)
            else:
                self.broken = True
        for future in worker["waiting"].values():            # the process ended with episodes in it
            if not future.done():
                future.set_result({"lost": True})

    async def run(self, job, seconds):
        """-> outcome; {"lost": True} if the worker died, {"timeout": True} if it said nothing for `seconds`."""
        k = await self.free.get()
        try:
            while (worker := self.workers[k])["process"].returncode is not None or worker["reader"].done():
                if self.broken:
                    raise RuntimeError("harness workers keep dying; see their messages above")
                await asyncio.sleep(0.05)                    # its successor is on the way
            future = worker["waiting"][job["episode_id"]] = asyncio.get_running_loop().create_future()
            try:
                worker["process"].stdin.write(json.dumps(job).encode() + b"\n")
                await worker["process"].stdin.drain()
                return await asyncio.wait_for(future, seconds)
            except TimeoutError:
                self._kill(worker)
                return {"timeout": True}
            except ConnectionError:
                return {"lost": True}
        finally:
            self.free.put_nowait(k)

    def _kill(self, worker):
        try:
            os.killpg(worker["process"].pid, signal.SIGKILL)
        except ProcessLookupError:
            return                                           # already gone: what we wanted

    async def close(self):
        self.closing = True
        for worker in self.workers:
            worker["process"].stdin.close()
        for worker in self.workers:
            try:
                await asyncio.wait_for(worker["process"].wait(), 10)
            except TimeoutError:
                self._kill(worker)
            await worker["reader"]


# ---------------------------------------------------------------------------------------------- arguments that stages share

def add_rollout_arguments(p, *, sampling):
    """Arguments of every stage that runs episodes; their one source of defaults."""
    g = p.add_argument_group("harness")
    g.add_argument("--harness", choices=sorted(ADAPTERS), default="skills", help="which harness runs the episodes")
    g.add_argument("--turns", type=at_least(1), default=100, help="planner turns per episode (RPent's limit)")
    g.add_argument("--seconds", type=at_least(1.0, float), default=7200, help="wall time per episode (s; RPent's limit)")
    g.add_argument("--history-budget", type=at_least(1), default=60_000,
                   help="characters of history before the harness edits it (a picture counts 1,000)")
    g.add_argument("--pictures", action="store_true", help="send a picture after each motion (needs a planner that takes pictures)")
    g.add_argument("--workers", type=at_least(1), default=2, help="harness processes")
    g.add_argument("--concurrency", type=at_least(1), default=16,
                   help="episodes at a time per process (LIBERO allows 1: one environment a process)")
    g.add_argument("--retries", type=at_least(0), default=1, help="times an invalid episode is run again")
    g = p.add_argument_group("generation")
    g.add_argument("--sampling", choices=sorted(PROFILES), default=sampling, help="sampling profile; rl.py accepts 'train' alone")
    g.add_argument("--max-tokens", type=at_least(1), default=8192, help="tokens per response")
    g.add_argument("--request-timeout", type=at_least(1.0, float), default=600, help="time-out of one try of a call (s; three tries)")
    g.add_argument("--seed", type=int, default=0, help="run seed: with the episode id and the turn it makes each call's own seed")
    g.add_argument("--shard", default=None, metavar="I/N",
                   help="do every Nth episode from the Ith; default: RANK/WORLD_SIZE under torchrun, else all")


def parse_suites(text):
    """'a,b' -> {suite: [Task]}; BadInput for an unknown one."""
    from harness.world import task_list
    suites = {}
    for suite in text.split(","):
        try:
            suites[suite] = task_list(suite)
        except (ValueError, ImportError) as e:
            raise BadInput(f"--suites: {e}") from None
    return suites


def parse_inits(text, option="--inits"):
    """'1-10,45,100-199' -> [1, …]; duplicates and backward ranges refused."""
    inits = []
    for part in text.split(","):
        m = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if not m:
            raise BadInput(f"{option} {text!r}: expected numbers and ranges such as 1-10,45, found {part!r}")
        if int(m[2] or m[1]) < int(m[1]):
            raise BadInput(f"{option} {text!r}: {part.strip()!r} runs backwards")
        inits += range(int(m[1]), int(m[2] or m[1]) + 1)
    if len(set(inits)) != len(inits):
        raise BadInput(f"{option} {text!r}: a number stands twice")
    return inits


EVALUATION_STATES = range(1, 11)        # of every task: never collected from, never trained on
MEMORY_STATES = range(0, 1)
VALIDATION_STATES = range(45, 50)


def check_states(specs):
    """BadInput if a spec names an initial state that its world does not have."""
    from harness.world import task_list, world_class
    for suite, index, init in {(s["suite"], s["index"], s["init"]) for s in specs}:
        try:
            world_class(suite).check_init(task_list(suite)[index], init)
        except ValueError as e:
            raise BadInput(f"--inits: {e}") from None


def refuse_evaluation_states(inits, stage):
    bad = [i for i in inits if i in EVALUATION_STATES or i in VALIDATION_STATES or i in MEMORY_STATES]
    if bad:
        raise BadInput(f"--inits: {stage} must not use states {bad[:12]}: 0 is for memory, 1-10 for evaluation, 45-49 for validation; "
                       "training states are 11-44, and on tabletop also 100 upwards")


def parse_shard(text):
    if text is None:
        return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    m = re.fullmatch(r"(\d+)/(\d+)", text)
    if not m or not int(m[1]) < int(m[2]):
        raise BadInput(f"--shard {text!r}: expected I/N with I < N, e.g. 0/8")
    return int(m[1]), int(m[2])


# ---------------------------------------------------------------------------------------------- running attempts

FREE = {  # arguments that may differ between a killed run and the one that continues it
    "workers", "concurrency", "retries", "shard", "slots", "batch", "engine_url", "request_timeout", "video", "target_successes", "limit"}


def check_resume(folder, stage, args, policy_version):
    """The same command continues a run; another checkpoint or other arguments are refused with the difference named."""
    path = folder / "args.json"
    now = json.loads(json.dumps({"stage": stage, "policy_version": policy_version, **vars(args)}, default=str))
    if path.exists():
        before = records.read_json(path)
        for name in ("stage", *sorted(now.keys() | before.keys())):
            if name not in FREE and name not in ("model", "output") and before.get(name) != now.get(name):
                raise BadInput(f"{folder}: holds a run with {name}={before.get(name)!r}, this command says {now.get(name)!r}; "
                               "repeat the first command, or give another --output")
    records.write_json(path, now)
    print(f"{stage}: " + " ".join(f"{k}={v}" for k, v in now.items() if k != "stage"), flush=True)


def run(args, specs, stage, upstream, enough=None):
    """Runs every spec {suite, index, init, attempt, …} once and for all; -> (all Episodes of this run folder, invalid ones too; folder).

    enough(episodes) -> True ends the run early and whole (collect.py's --target-successes). Prints and writes counts; writes the
    manifest unless a STOP file ended the run.
    """
    if not specs:
        raise BadInput(f"{stage}: no episode to run; check --suites, --tasks, --inits, --attempts")
    check_states(specs)
    shard, shards = parse_shard(args.shard)
    folder = Path(args.output) / (f"shard-{shard}-of-{shards}" if shards > 1 else "")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:                # the system lets go of it when this process ends, however it ends
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadInput(f"{folder}: another process is running there; wait for it, or give another --output") from None
        check_resume(folder, stage, args, upstream.policy_version)
        return asyncio.run(_run(args, specs[shard::shards], stage, upstream, enough, folder)), folder


async def _run(args, specs, stage, upstream, enough, folder):
    from proxy import Proxy
    adapter = ADAPTERS[args.harness]()
    began = time.monotonic()
    writer = JsonlWriter(folder / "episodes.jsonl")
    episodes = list(records.read_episodes(folder / "episodes.jsonl"))
    def key(e):
        return (e.task, e.init, e.attempt)
    done = {key(e) for e in episodes if e.valid}
    failures = collections.Counter()                         # of this command: repeating it tries invalid attempts again
    tries = collections.Counter()                            # how many episode ids each attempt has used up, killed ones included
    if (folder / "arrivals.jsonl").exists():
        for _, row in records.read_jsonl(folder / "arrivals.jsonl", ("episode_id",)):
            name, _, r = row["episode_id"].rpartition(".r")
            tries[name] = max(tries[name], int(r) + 1)
    for e in episodes:
        name, _, r = e.episode_id.rpartition(".r")
        tries[name] = max(tries[name], int(r) + 1)

    def spec_key(s):
        return (f"{s['suite']}/{s['index']}", s["init"], s["attempt"])
    todo = collections.deque(s for s in specs if spec_key(s) not in done)
    resumed, already = len(specs) - len(todo), len(episodes)
    if todo and not (enough and enough(episodes)):
        for name in ("manifest.json", "report.json"):        # what they say is no longer true
            (folder / name).unlink(missing_ok=True)
    if hasattr(upstream, "find_model") and not upstream.model:
        try:
            await upstream.find_model()
        except UpstreamError as e:
            raise BadInput(f"{stage}: no model server at {upstream.url} ({e})") from None
    # Episode ids recur from stage to stage and round to round; seeds of calls must not.
    proxy = Proxy(upstream, folder, PROFILES[args.sampling], args.max_tokens, f"{stage}/{args.seed}/{getattr(args, 'round', 0)}")
    port = await proxy.start()
    threads = 1 if any(s["suite"].startswith("libero") for s in specs) else args.concurrency
    pool = WorkerPool(min(args.workers, max(1, len(todo))), threads)
    await pool.start()
    bar = tqdm(total=len(specs), initial=resumed, desc=stage, unit="episode", file=sys.stdout, dynamic_ncols=True,
               mininterval=1.0 if sys.stdout.isatty() else 20.0)     # in a log file, a line now and then
    stopped = False

    async def attempt(spec):
        name = f"{spec['suite']}-{spec['index']}.i{spec['init']}.a{spec['attempt']}"
        while True:
            spec = {**spec, "episode_id": f"{name}.r{tries[name]}"}
            tries[name] += 1
            job = adapter.job(spec, f"http://127.0.0.1:{port}/ep/{spec['episode_id']}/v1", args, upstream.model)
            outcome = await pool.run(job, args.seconds + 3 * args.request_timeout + 60)      # one call may be tried three times
            await proxy.settle(spec["episode_id"])
            calls = proxy.take(spec["episode_id"], forget=True)
            episode = adapter.episode(spec, outcome, calls, upstream.policy_version)
            writer.append(records.to_line(episode))
            episodes.append(episode)
            if episode.valid:
                break
            failures[spec_key(spec)] += 1
            if failures[spec_key(spec)] > args.retries:
                break
        valid = [e for e in episodes if e.valid]
        bar.update()
        rate = sum(e.reward for e in valid) / max(len(valid), 1)
        bar.set_postfix_str(f"success {rate:.3f} invalid {len(episodes) - len(valid)}", refresh=False)

    async def feed():
        nonlocal stopped
        while todo and not stopped:
            now = episodes[already:]
            if len(now) >= HOPELESS and not any(e.valid for e in now):
                return                                       # told below
            if (folder / "STOP").exists() or (Path(args.output) / "STOP").exists():
                stopped = True
            elif enough and enough(episodes):
                return
            else:
                await attempt(todo.popleft())

    try:
        await asyncio.gather(*[feed() for _ in range(pool.processes * pool.threads)])
    finally:
        await pool.close()
        await proxy.stop()
        writer.close()
        bar.close()
    valid, invalid = [e for e in episodes if e.valid], [e for e in episodes[already:] if not e.valid]
    counts = {"episodes": len(episodes), "valid": len(valid), "successes": sum(e.reward for e in valid), "resumed": resumed,
              "calls": sum(len(e.calls) for e in episodes), "seconds": round(time.monotonic() - began, 1),
              "invalid": dict(collections.Counter(e.reason for e in episodes if not e.valid)),
              "ends": dict(collections.Counter(e.end for e in valid)), "worker_restarts": pool.restarts, "proxy": dict(proxy.counts)}
    if hasattr(upstream, "counts"):
        counts["engine"] = dict(upstream.counts)
    await upstream.close()
    print(f"{stage}: {counts['successes']:.0f} of {counts['valid']} valid episodes succeeded, {len(episodes) - len(valid)} invalid "
          f"{counts['invalid'] or ''}, {counts['calls']} calls, {counts['seconds']} s; ends {counts['ends']}", flush=True)
    if invalid:
        why = next((e for e in invalid if e.extra.get("crash") or e.extra.get("detail")), invalid[0])
        text = (why.extra.get("crash") or why.extra.get("detail") or "").strip().splitlines() or ["no message"]
        print(f"{stage}: first invalid episode {why.episode_id}: {why.reason}: {text[-1]}", file=sys.stderr)
    if len(episodes) > already and not any(e.valid for e in episodes[already:]):
        raise BadInput(f"{stage}: all {len(invalid)} episodes of this command are invalid (infrastructure); mend the cause shown above "
                       "and repeat the command")
    if stopped:
        print(f"{stage}: ended by a STOP file; delete it and repeat the command to go on")
        return episodes
    records.write_manifest(folder, stage, args, {**counts, "policy_version": upstream.policy_version},
                           files=("episodes.jsonl", "calls.jsonl"))
    return episodes
