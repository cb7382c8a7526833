"""The boundary to the harnesses: how an attempt is launched, and the five fields that come back: task, init, attempt, reward, valid.

Three ways not to count, never mixed (SPEC.md §2):
    invalid   infrastructure (simulator crash, lost worker, model server, incomplete record): no reward, leaves its group and every rate
    failed    reward 0: the planner's own doing, running out of turns or time included
    gated     one call's weight is 0 (gate.py); its episode still counts. Not decided here.

`run` is what collect.py, rollout.py and eval.py share: proxy up, harness processes up, attempts through them, one `Episode` line each,
resumable by the same command, ended between episodes by a file named STOP, at once by SIGINT or SIGTERM.
"""

import asyncio
import collections
import contextlib
import json
import sys
import time
from pathlib import Path

from tqdm import tqdm

import protocol
import records
import template_kwargs
from harness import confine, world
from harness.code_api import api_class
from harness.pool import WorkerPool, WorkersKeepDying
from interrupts import Signals
from upstream import UpstreamError
from records import at_least, BadInput, Episode, JsonlWriter, lock_folder, PROFILES, writing
from runfolder import check_split, parse_shard, shard_of, used_ids, whole_episodes

RECYCLE = 250           # LIBERO or robosuite episodes of a harness process before another takes its place: robosuite's memory grows
HOPELESS = 12           # invalid episodes in a row from the start: the run ends, something is broken that no retry mends
SLOW_SHARE = 0.5        # of a timed-out episode's seconds: more than this in upstream errors or queueing makes it invalid, not failed


class SkillsAdapter:
    """Our skills harness (RPent's shape), run by harness/worker.py."""
    harness = "skills"
    turns, max_tokens = 100, 8192           # --turns and --max-tokens where they are not given: RPent's
    worlds = ("tabletop", "libero")         # that offer skills
    final = False                           # the reward is the predicate in the final state

    def settle(self, args, suites):
        """Fills in what is not given, so that args.json says it; BadInput for an option that this harness would not honour."""
        if args.single_turn:
            raise BadInput("--single-turn belongs to --harness code: the skills harness goes on until the planner calls finish")
        protocol.settle_noise(args, suites)

    def reward(self, episode):
        """RPent's: the predicate, latched."""
        return 1.0 if episode.success_latched else 0.0

    def job(self, spec, base_url, args, model):
        """What one attempt needs to know, in plain JSON (harness/skills.py). The planner sees nothing that differs within a group."""
        return {"harness": self.harness, "episode_id": spec["episode_id"], "base_url": base_url,
                "suite": spec["suite"], "index": spec["index"], "init": spec["init"], "model": model,
                "max_tokens": args.max_tokens, "turns": args.turns, "seconds": args.seconds,
                "history_budget": args.history_budget, "pictures": args.pictures, "request_timeout": args.request_timeout,
                "chat_template_kwargs": args.chat_template_kwargs,
                "noise": args.noise if spec["suite"].startswith("libero") else None,
                "noise_seed": f"{getattr(args, 'round', 0)}/{args.seed}/{spec['episode_id'].rsplit('.', 1)[0]}",
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
            e.reward = self.reward(e)
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


class CodeAdapter(SkillsAdapter):
    """Our code harness (CaP-X's shape), run by harness/worker.py."""
    harness = "code"
    turns, max_tokens = 11, 32_768          # CaP-X's: the first program and ten regenerations; its longest response
    worlds = ("tabletop", "libero", "robosuite")
    final = True

    def settle(self, args, suites):
        if args.noise is not None:
            raise BadInput(f"--noise {args.noise:g}: --harness code reads exact poses (CaP-X's privileged setting); leave the option out")
        if not confine.layers()["seccomp"]:
            raise BadInput("--harness code: this machine cannot filter system calls (seccomp), so a planner's programs do not run here "
                           "(harness/sandbox.py)")
        for suite in sorted(suites):
            for task in world.task_list(suite):
                try:
                    api_class(task).check()
                except (ImportError, ValueError) as e:
                    raise BadInput(f"--harness code: {task.id}: {e}") from None

    def job(self, spec, base_url, args, model):
        return {**super().job(spec, base_url, args, model), "noise": None, "single_turn": args.single_turn}

    def reward(self, episode):
        """CaP-X's: the predicate in the final state. success_turn is the turn since which it holds: what came after earned nothing."""
        return 1.0 if episode.success_final else 0.0


ADAPTERS = {"skills": SkillsAdapter, "code": CodeAdapter}


def settle(args, suites):
    """What the chosen harness makes of the arguments, before anything is run. Repeating it changes nothing."""
    adapter = ADAPTERS[args.harness]()
    if other := sorted({world.world_of(s) for s in suites} - set(adapter.worlds)):
        raise BadInput(f"--harness {args.harness}: does not run on {', '.join(other)}; valid suites are of {', '.join(adapter.worlds)}")
    args.turns = adapter.turns if args.turns is None else args.turns
    args.max_tokens = adapter.max_tokens if args.max_tokens is None else args.max_tokens
    adapter.settle(args, suites)


def after_success(episode, call):
    """True if this call was made when the success that the reward tells of was there already."""
    return episode.success_turn is not None and call.turn > episode.success_turn


def post_success(episode, call):
    """True if this call's action cannot have earned the reward (SPEC.md §2, post-success filter): it came after success.

    Not so (ours) the FINISH of a harness whose reward is the final state's: it is what makes that state the final one. Without it, FINISH
    is trained by failed episodes alone, and RL unlearns it (README, "Control code")."""
    adapter = ADAPTERS.get(episode.harness)
    makes_final = adapter is not None and adapter.final and episode.finished and call.turn == episode.extra.get("turns", 0) - 1
    return after_success(episode, call) and not makes_final


# ---------------------------------------------------------------------------------------------- arguments that stages share

def add_rollout_arguments(p, *, sampling):
    """Arguments of every stage that runs episodes; their one source of defaults."""
    g = p.add_argument_group("harness")
    g.add_argument("--harness", choices=sorted(ADAPTERS), default="skills", help="which harness runs the episodes")
    defaults = lambda name: "; default: " + ", ".join(f"{getattr(a, name):,} ({k})" for k, a in ADAPTERS.items())
    g.add_argument("--turns", type=at_least(1), default=None,
                   help="planner turns per episode; code: programs that are run" + defaults("turns") + ", RPent's and CaP-X's")
    g.add_argument("--single-turn", action="store_true", help="code: the first program is the only one")
    g.add_argument("--seconds", type=at_least(1.0, float), default=7200, help="wall time per episode (s; RPent's limit)")
    g.add_argument("--history-budget", type=at_least(1), default=60_000,
                   help="characters of history (code: of programs) before the harness edits it (a picture counts 1,000)")
    g.add_argument("--noise", type=at_least(0.0, float), default=None,
                   help="LIBERO: standard deviation of perceived positions and of grasp points (mm, seeded per attempt; 0: the executor's "
                        f"ceiling); default: {world.LIBERO_NOISE:g}")
    g.add_argument("--pictures", action="store_true",
                   help="send a picture after each motion (code: with each prompt); needs a planner that takes pictures")
    g.add_argument("--workers", type=at_least(1), default=2, help="harness processes")
    g.add_argument("--concurrency", type=at_least(1), default=16,
                   help="episodes at a time per process (LIBERO and robosuite allow 1: one environment a process)")
    g.add_argument("--retries", type=at_least(0), default=1, help="times an invalid episode is run again")
    g = p.add_argument_group("generation")
    g.add_argument("--sampling", choices=sorted(PROFILES), default=sampling, help="sampling profile; rl.py accepts 'train' alone")
    g.add_argument("--max-tokens", type=at_least(1), default=None, help="tokens per response" + defaults("max_tokens"))
    template_kwargs.add_argument(g, "sent with every request of the planner; give rewrite.py, rollout.py and eval.py the same "
                                    "(template_kwargs.py); default: none, the template's own defaults")
    g.add_argument("--request-timeout", type=at_least(1.0, float), default=600, help="time-out of one try of a call (s; three tries)")
    g.add_argument("--seed", type=int, default=0, help="run seed: with the episode id and the turn it makes each call's own seed")
    g.add_argument("--shard", default=None, metavar="I/N",
                   help="do every Nth start (task, initial state), with all its attempts, from the Ith; "
                        "default: RANK/WORLD_SIZE under torchrun, else all")


# ---------------------------------------------------------------------------------------------- running attempts

FREE = {  # arguments that may differ between a killed run and the one that continues it
    "workers", "concurrency", "retries", "shard", "teacher", "slots", "batch", "request_timeout", "video", "video_format",
    "target_successes", "limit",
    "engine", "engine_url", "replicas", "tensor_parallel", "vllm_python", "gpu_memory", "probe", "startup"}
ENGINE_OPTIONS = {"max_length", "max_images", "tool_parser", "reasoning_parser"}


def check_resume(folder, stage, args, policy_version):
    """The same command continues a run; another checkpoint or other arguments are refused by name. -> what args.json shall say"""
    path = folder / "args.json"
    now = json.loads(json.dumps({"stage": stage, "policy_version": policy_version, **vars(args)}, default=str))
    if path.exists():
        before = records.read_json(path)
        now |= {k: before[k] for k in ("served",) if k in before}
        for name in ("stage", *sorted(now.keys() | before.keys())):
            other_engine = name in ENGINE_OPTIONS and None in (before.get(name), now.get(name))      # it has no such option
            younger = name not in before and not now[name]                       # an option younger than the run, and not used
            if name not in FREE and name not in ("model", "output") and before.get(name) != now.get(name) and not (other_engine or younger):
                raise BadInput(f"{folder}: holds a run with {name}={before.get(name)!r}, this command says {now.get(name)!r}; "
                               "repeat the first command, or give another --output")
    elif (folder / "episodes.jsonl").exists():
        for e in records.read_episodes(folder / "episodes.jsonl"):
            if e.policy_version != policy_version:
                raise BadInput(f"{folder}: args.json is lost, and episode {e.episode_id} is by policy_version={e.policy_version!r}, this "
                               f"command's is {policy_version!r}; repeat the first command, or give another --output")
    return now


def run(args, specs, stage, upstream, enough=None):
    """Runs every spec {suite, index, init, attempt, …} once and for all; -> (all Episodes of this run folder, invalid ones too; folder).

    enough(episodes) -> True ends the run early and whole (collect.py's --target-successes). Prints and writes counts. Writes the
    manifest unless a STOP file (between episodes), SIGINT or SIGTERM (at once) ended the run: so the manifest says whether it is whole.
    Closes the upstream, whatever happens.
    """
    return asyncio.run(run_in_loop(args, specs, stage, upstream, enough))


async def run_in_loop(args, specs, stage, upstream, enough, shard=None, stop_in=None):
    """`run`, in the caller's event loop. shard: (shard, shards) in place of the arguments'. stop_in: a STOP file there counts, too."""
    with contextlib.ExitStack() as held:
        signals = held.enter_context(Signals())
        try:
            if not specs:
                raise BadInput(f"{stage}: no episode to run; check --suites, --tasks, --inits, --attempts")
            protocol.check_states(specs)
            settle(args, {s["suite"] for s in specs})
            protocol.check_pictures(args, {s["suite"] for s in specs})
            shard, shards = shard or parse_shard(args.shard)
            check_split(args.output, shards)
            folder = Path(args.output) / (f"shard-{shard}-of-{shards}" if shards > 1 else "")
            lock_folder(folder, held)
            with writing(folder):
                resolved = check_resume(folder, stage, args, upstream.policy_version)
                run = Run(args, shard_of(specs, shard, shards), stage, upstream, enough, folder, stop_in)
                records.write_json(folder / "args.json", resolved)
            print(f"{stage}: " + " ".join(f"{k}={v}" for k, v in resolved.items() if k != "stage"), flush=True)
            signals.task = asyncio.create_task(run.work())
            if signals.name:
                signals.task.cancel()
            try:
                await asyncio.wait([signals.task])
            finally:
                signals.task.cancel()                        # still going only if this coroutine itself was cancelled
                await run.close()
            return run.finish(signals), folder
        finally:
            await upstream.close()                           # it may own processes


class Run:
    """The episodes of one command in one run folder: those of earlier commands are read, the others are run."""

    def __init__(self, args, specs, stage, upstream, enough, folder, stop_in=None):
        self.args, self.stage, self.upstream, self.folder = args, stage, upstream, folder
        self.adapter, self.began = ADAPTERS[args.harness](), time.monotonic()
        self.tries = used_ids(folder)                        # how many episode ids each attempt has used up, killed ones included
        self.episodes = whole_episodes(folder)
        self.failures = collections.Counter()                # of this command: repeating it tries invalid attempts again
        done = {(e.task, e.init, e.attempt) for e in self.episodes if e.valid}
        if strange := done - {self.key(s) for s in specs}:
            raise BadInput(f"{folder}: holds {len(strange)} episodes that this command does not run, e.g. {min(strange)}; repeat the first "
                           "command (with the same --pool-report, …), or give another --output")
        self.writer = JsonlWriter(folder / "episodes.jsonl")
        self.todo = collections.deque(s for s in specs if self.key(s) not in done)
        self.total, self.resumed, self.already = len(specs), len(specs) - len(self.todo), len(self.episodes)
        self.ask_enough, self.enough = enough, lambda: enough is not None and enough(self.episodes)
        self.proxy = self.pool = self.bar = None
        self.stop_file, self.abandoned, self.stop_places = False, 0, [folder, args.output, *filter(None, [stop_in])]

    @staticmethod
    def key(spec):
        return (f"{spec['suite']}/{spec['index']}", spec["init"], spec["attempt"])

    async def work(self):
        """Starts proxy and harness processes and runs what is to do. A signal cancels it: episodes in flight are abandoned."""
        from proxy import Proxy
        args, upstream, more = self.args, self.upstream, self.todo and not self.enough()
        try:
            if more:
                await upstream.ready()                       # starts and proves servers: what is wrong there ends the run here
                self.check_served()
        except UpstreamError as e:
            raise BadInput(f"{self.stage}: no model server at {getattr(upstream, 'url', upstream.model)} ({e})") from None
        # Episode ids recur from stage to stage and round to round; seeds of calls must not.
        proxy = Proxy(upstream, self.folder, PROFILES[args.sampling], args.max_tokens,
                      f"{self.stage}/{args.seed}/{getattr(args, 'round', 0)}")
        with writing(self.folder):
            if more:
                for name in ("manifest.json", "report.json"):        # what they say is no longer true
                    (self.folder / name).unlink(missing_ok=True)
            self.port, self.proxy = await proxy.start(), proxy       # also records what a killed run left in flight
        if not more:
            return
        alone = any(world.world_of(s["suite"]) != "tabletop" for s in self.todo)         # robosuite's environments: one a process
        threads = 1 if alone else args.concurrency
        self.by_task = alone and self.ask_enough is None    # an early end shall have seen every task; else: build each scene once
        self.pool = WorkerPool(min(args.workers, max(1, len(self.todo))), threads, RECYCLE if alone else None)
        self.bar = tqdm(total=self.total, initial=self.resumed, desc=self.stage, unit="episode", file=sys.stdout, dynamic_ncols=True,
                        mininterval=1.0 if sys.stdout.isatty() else 20.0)     # in a log file, a line now and then
        await self.pool.start()
        try:
            async with asyncio.TaskGroup() as group:         # one that fails ends the others
                watch = group.create_task(self.watch())
                await asyncio.wait([group.create_task(self.feed()) for _ in range(self.pool.processes * self.pool.threads)])
                watch.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def check_served(self):
        """An endpoint's policy version is only a name that the user chose: the same model must go on."""
        if not getattr(self.upstream, "version_is_a_name", False):
            return
        saved = records.read_json(self.folder / "args.json")
        if saved.get("served") not in (None, self.upstream.model):
            raise BadInput(f"{self.folder}: holds a run by the model {saved['served']!r}, {self.upstream.url} now serves "
                           f"{self.upstream.model!r}; serve the first again, or give another --output")
        with writing(self.folder):
            records.write_json(self.folder / "args.json", {**saved, "served": self.upstream.model})

    async def watch(self):
        while True:
            self.check_usable()
            await asyncio.sleep(1)

    def check_usable(self):
        """BadInput if nothing more can be recorded, or no engine is left: outcomes from then on tell of that and of no planner."""
        if failure := getattr(self.proxy, "failure", None):
            with writing(self.folder):
                raise failure
        if dead := getattr(self.upstream, "dead", lambda: None)():
            raise BadInput(f"{self.stage}: {dead}; mend it and repeat the command")

    async def feed(self):
        while self.todo and not self.stop_file:
            now = self.episodes[self.already:]
            if (len(now) >= HOPELESS and not any(e.valid for e in now)) or self.enough():      # hopeless: told in finish()
                return
            if any((Path(place) / "STOP").exists() for place in self.stop_places):
                self.stop_file = True
                return
            worker = await self.pool.take()
            if not self.todo:
                self.pool.give(worker)
                return
            try:
                await self.attempt(self.next_for(worker), worker)
            except (asyncio.CancelledError, BadInput):
                self.abandoned += 1                          # no line: the repeated command runs it again under a new id
                raise

    def next_for(self, worker):
        """The first spec to do; LIBERO, robosuite: the first of the task that this worker did last, else of one that none does, if any."""
        task, spec = lambda s: (s["suite"], s["index"]), self.todo[0]
        if self.by_task:
            mine, all_of_them = self.pool.last.get(worker), set(self.pool.last.values())
            spec = next((s for s in self.todo if task(s) == mine), None) or \
                next((s for s in self.todo if task(s) not in all_of_them), spec)
        self.todo.remove(spec)
        self.pool.last[worker] = task(spec)
        return spec

    async def attempt(self, spec, worker):
        try:
            await self.tries_of(spec, worker)
        finally:
            self.pool.give(worker)

    async def tries_of(self, spec, worker):
        name = f"{spec['suite']}-{spec['index']}.i{spec['init']}.a{spec['attempt']}"
        while self.failures[self.key(spec)] <= self.args.retries:
            spec = {**spec, "episode_id": f"{name}.r{self.tries[name]}"}
            self.tries[name] += 1
            job = self.adapter.job(spec, f"http://127.0.0.1:{self.port}/ep/{spec['episode_id']}/v1", self.args, self.upstream.model)
            try:
                outcome = await self.pool.run(worker, job, self.args.seconds + 3 * self.args.request_timeout + 60)   # three tries of a call
            except WorkersKeepDying as e:
                raise BadInput(f"{self.stage}: {e}; mend the cause and repeat the command") from None
            await self.proxy.settle(spec["episode_id"])
            self.check_usable()
            calls = self.proxy.take(spec["episode_id"], forget=True)
            episode = self.adapter.episode(spec, outcome, calls, self.upstream.policy_version)
            with writing(self.writer.path):
                self.writer.append(records.to_line(episode))
            self.episodes.append(episode)
            if episode.valid:
                self.pool.last[worker] = (spec["suite"], spec["index"])      # said again: a successor may have built the scene
                break
            self.pool.last.pop(worker, None)                 # the scene went with the process, or with the crash in it
            self.failures[self.key(spec)] += 1
        valid = [e for e in self.episodes if e.valid]
        self.bar.update()
        rate = sum(e.reward for e in valid) / max(len(valid), 1)
        self.bar.set_postfix_str(f"success {rate:.3f} invalid {len(self.episodes) - len(valid)}", refresh=False)

    async def close(self):
        """The proxy first: it records calls in flight as interrupted. Then the harness processes, however far they are."""
        try:
            if self.proxy:
                await self.proxy.stop()
        finally:
            if self.pool:
                await self.pool.close()
            self.writer.close()
            if self.bar is not None:
                self.bar.close()

    def finish(self, signals):
        """Tells what was done and how it ended; writes the manifest if that was the whole."""
        task, stage, episodes = signals.task, self.stage, self.episodes
        error = None if task.cancelled() else task.exception()
        if error and (self.bar is None or not isinstance(error, BadInput)):
            raise error
        new, valid = episodes[self.already:], [e for e in episodes if e.valid]
        invalid = [e for e in new if not e.valid]
        counts = {"episodes": len(episodes), "valid": len(valid), "successes": sum(e.reward for e in valid), "resumed": self.resumed,
                  "calls": sum(len(e.calls) for e in episodes), "seconds": round(time.monotonic() - self.began, 1),
                  "invalid": dict(collections.Counter(e.reason for e in episodes if not e.valid)),
                  "ends": dict(collections.Counter(e.end for e in valid)), "worker_restarts": self.pool.restarts if self.pool else 0,
                  "proxy": dict(self.proxy.counts) if self.proxy else {}}
        if hasattr(self.upstream, "counts"):
            counts["engine"] = dict(self.upstream.counts)
        print(f"{stage}: {counts['successes']:.0f} of {counts['valid']} valid episodes succeeded, {len(episodes) - len(valid)} invalid "
              f"{counts['invalid'] or ''}, {counts['calls']} calls, {counts['seconds']} s; ends {counts['ends']}", flush=True)
        if invalid:
            why = next((e for e in invalid if e.extra.get("crash") or e.extra.get("detail")), invalid[0])
            text = (why.extra.get("crash") or why.extra.get("detail") or "").strip().splitlines() or ["no message"]
            print(f"{stage}: first invalid episode {why.episode_id}: {why.reason}: {text[-1]}", file=sys.stderr)
        if error:
            print(f"{stage}: {self.abandoned} episodes in flight abandoned", flush=True)
            raise error
        if task.cancelled():
            print(f"{stage}: stopped by {signals.name}, {self.abandoned} episodes in flight abandoned; repeat the command to go on",
                  flush=True)
            return episodes
        if new and len(invalid) == len(new):
            raise BadInput(f"{stage}: all {len(invalid)} episodes of this command are invalid (infrastructure); mend the cause shown above "
                           "and repeat the command")
        if self.stop_file:
            print(f"{stage}: ended by a STOP file; delete it and repeat the command to go on", flush=True)
            return episodes
        if (self.folder / "manifest.json").exists():          # a finished command was repeated: it ran nothing
            return episodes
        with writing(self.folder):
            records.write_manifest(self.folder, stage, self.args, {**counts, "policy_version": self.upstream.policy_version},
                                   files=("episodes.jsonl", "calls.jsonl"))
        return episodes
