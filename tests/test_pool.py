"""harness/pool.py and harness/worker.py: workers that are recycled, outcomes that are no JSON, infrastructure failures injected one by one
in processes of one thread as LIBERO's are, and which worker gets which task.

test_adapters.py, test_stop.py and test_run_faults.py have the same failures in processes of several threads.
"""

import argparse
import asyncio
import collections
import itertools
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT

import adapters
import harness.pool
import protocol
import records
from harness.pool import WorkerPool
from harness.teacher import ScriptedTeacher
from records import BadInput
from upstream import UpstreamError

ECHO = """
import json, os, sys, time
for line in sys.stdin:
    job = json.loads(line)
    if job.get("die"):
        os._exit(3)
    time.sleep(job.get("sleep", 0))
    print(json.dumps({"episode_id": job["episode_id"], "pid": os.getpid()}), flush=True)
"""


def stand_in(folder, monkeypatch, code):
    """Harness processes run `code` in place of harness/worker.py; it starts in a few hundredths of a second."""
    (folder / "code.py").write_text(code)
    script = folder / "worker"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} -S -E {folder}/code.py\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


def pooled(work, *pool, **options):
    """Runs work(pool) -> its result and the pool, closed."""
    async def go():
        p = WorkerPool(*pool, **options)
        await p.start()
        try:
            return await work(p), p
        finally:
            await p.close()
    return asyncio.run(asyncio.wait_for(go(), 120))


async def one(pool, name, **job):
    """One job by whichever worker is free -> its outcome and the worker's number"""
    k = await pool.take()
    try:
        return await pool.run(k, {"episode_id": name, **job}, 60), k
    finally:
        pool.give(k)


# ---------------------------------------------------------------------------------------------- recycling

@pytest.mark.parametrize("processes, recycle", [(1, 3), (2, 2), (1, 1)])
def test_a_worker_is_replaced_after_so_many_episodes_and_no_job_is_lost(processes, recycle, tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, ECHO)

    async def work(pool):
        async def feed(names):
            return [await one(pool, n) for n in names]
        names = [f"e{i}" for i in range(12)]
        return sum(await asyncio.gather(*(feed(names[k::processes]) for k in range(processes))), [])
    outcomes, pool = pooled(work, processes, 1, recycle=recycle)
    assert sorted(o["episode_id"] for o, _ in outcomes) == sorted(f"e{i}" for i in range(12))
    by_process = collections.Counter(o["pid"] for o, _ in outcomes)
    assert max(by_process.values()) == recycle and len(by_process) >= 12 // recycle
    assert pool.restarts == 0 and not pool.broken                        # wear is no failure
    assert len(by_process) - processes <= pool.recycled <= 12 // recycle


def test_without_a_limit_a_worker_stays(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, ECHO)

    async def work(pool):
        return {(await one(pool, f"e{i}"))[0]["pid"] for i in range(10)}
    pids, pool = pooled(work, 1, 1)
    assert len(pids) == 1 and pool.recycled == pool.restarts == 0


def test_a_worker_with_an_episode_in_it_is_not_recycled(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, ECHO)

    async def work(pool):
        quick, slow = await asyncio.gather(one(pool, "quick"), one(pool, "slow", sleep=1))       # the limit of 2 is reached by "quick"
        return quick[0], slow[0]
    (quick, slow), pool = pooled(work, 1, 2, recycle=2)
    assert quick["pid"] == slow["pid"] and slow["episode_id"] == "slow" and pool.restarts == 0


def test_a_worker_that_dies_is_a_restart_also_where_workers_are_recycled(tmp_path, monkeypatch, capsys):
    stand_in(tmp_path, monkeypatch, ECHO)

    async def work(pool):
        return [(await one(pool, f"e{i}", die=i == 1))[0] for i in range(6)]
    outcomes, pool = pooled(work, 1, 1, recycle=3)
    assert [o.get("lost", False) for o in outcomes] == [False, True, False, False, False, False]
    assert pool.restarts == 1 and "harness worker 0 ended (exit 3); starting another" in capsys.readouterr().err
    pids = [o.get("pid") for o in outcomes]
    assert pool.recycled == 1 and pids[2] == pids[4] and len({pids[0], pids[2], pids[5]}) == 3           # the successor counts anew


def test_the_successor_has_done_nothing_yet(tmp_path, monkeypatch):
    """`last` says what the process did last: nothing from when it is told to end, so that nobody chooses by it."""
    stand_in(tmp_path, monkeypatch, ECHO)

    async def work(pool):
        pool.last[0] = "A"
        await one(pool, "e0")
        return dict(pool.last)
    last, pool = pooled(work, 1, 1, recycle=1)
    assert last == {}


def test_a_worker_that_was_told_to_end_and_does_not_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(harness.pool, "PATIENCE", 0.5)
    stand_in(tmp_path, monkeypatch, ECHO + "if not os.path.exists(sys.argv[0] + '.once'):\n    open(sys.argv[0] + '.once', 'w')\n    time.sleep(1000)\n")

    async def work(pool):
        first, _ = await one(pool, "e0")
        return first, (await asyncio.wait_for(one(pool, "e1"), 8))[0]
    (first, second), pool = pooled(work, 1, 1, recycle=1)
    assert first["pid"] != second["pid"] and pool.recycled >= 1


# ---------------------------------------------------------------------------------------------- a real worker and what it is given

BROKEN = """
import sys
sys.path.insert(0, {root!r})
import harness.worker as worker

class Episode:
    def __init__(self, world, job, pool):
        self.job, self.world = job, world

    def run(self):
        name = self.job["episode_id"]
        if name == "object":
            return {{"end": "finish", "world": object()}}
        if name == "key":
            return {{"end": "finish", (1, 2): 3}}
        if name == "raises":
            raise RuntimeError("the simulator diverged")
        return {{"end": "finish", "built": self.world}}

built = []
worker.skills.Episode = Episode
worker.make_world = lambda name: built.append(name) or len(built)
worker.main()
"""


def test_an_outcome_that_is_no_json_is_a_crash_and_the_worker_goes_on(tmp_path, monkeypatch):
    script = tmp_path / "worker"
    (tmp_path / "code.py").write_text(BROKEN.format(root=str(ROOT)))
    script.write_text(f"#!/bin/sh\nshift 2\nexec {sys.executable} {tmp_path}/code.py \"$@\"\n")       # without "-m harness.worker"
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))

    async def work(pool):
        pid = pool.workers[0]["process"].pid
        outcomes = [(await one(pool, name, suite="tabletop_base", harness="skills"))[0] for name in ("fine", "object", "key", "raises", "again", "last")]
        return outcomes, pool.workers[0]["process"].pid == pid
    ((fine, no_json, key, raised, again, last), same), pool = pooled(work, 1, 1)
    assert "not JSON serializable" in no_json["crash"] and "TypeError" in key["crash"] and "the simulator diverged" in raised["crash"]
    for name, crash in (("object", no_json), ("key", key), ("raises", raised)):
        assert crash.keys() == {"episode_id", "crash"} and crash["episode_id"] == name
        invalid = adapters.SkillsAdapter().episode({"suite": "tabletop_base", "index": 0, "init": 11, "attempt": 0, "episode_id": name},
                                                   crash, [], "v")
        assert (invalid.valid, invalid.reward, invalid.reason) == (False, None, "simulator_crash")
    assert same and pool.restarts == 0
    assert (fine["built"], again["built"], last["built"]) == (1, 4, 4)         # after each crash a new world, else the same


# ---------------------------------------------------------------------------------------------- failures, one thread a process

def arguments(output, **changes):
    p = argparse.ArgumentParser()
    adapters.add_rollout_arguments(p, sampling="train")
    return argparse.Namespace(**{**vars(p.parse_args([])), "output": str(output), "workers": 2, "concurrency": 1, "turns": 12, **changes})


def specs(n):
    return [{"suite": "tabletop_base", "index": i, "init": 100, "attempt": 0} for i in range(n)]


def workers():
    """pids of this process's harness workers"""
    found = subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", "harness.worker"], capture_output=True, text=True).stdout.split()
    return [int(pid) for pid in found]


class Faulty(ScriptedTeacher):
    """Does `fault` to every worker (signal) or to the episode's calls (exception) in the third call of task 2's first try."""
    def __init__(self, fault):
        super().__init__()
        self.fault, self.hit = fault, None

    async def chat(self, body, episode_id=""):
        if self.hit is None and episode_id.startswith("tabletop_base-2.") and sum(m["role"] == "assistant" for m in body["messages"]) == 2:
            self.hit = episode_id
            if isinstance(self.fault, int):
                for pid in workers():
                    os.kill(pid, self.fault)
        if self.hit == episode_id and isinstance(self.fault, UpstreamError):
            raise self.fault
        return await super().chat(body, episode_id)


@pytest.fixture
def crashing_world(tmp_path, monkeypatch):
    """The real harness worker on the real tabletop, whose `place` raises in its third reset, once for all processes."""
    (tmp_path / "code.py").write_text(f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
import harness.worker
from harness.tabletop import Tabletop
place = Tabletop.place
def crashing(self, *args, **kwargs):
    if self.task.index == 2 and not os.path.exists({str(tmp_path)!r} + "/crashed"):
        open({str(tmp_path)!r} + "/crashed", "w")
        raise FloatingPointError("constraint solver diverged")
    return place(self, *args, **kwargs)
Tabletop.place = crashing
harness.worker.main()
""")
    script = tmp_path / "worker"
    script.write_text(f"#!/bin/sh\nshift 2\nexec {sys.executable} {tmp_path}/code.py \"$@\"\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


@pytest.mark.parametrize("reason, fault, restarts", [("worker_lost", signal.SIGKILL, 1), ("worker_timeout", signal.SIGSTOP, 1),
                                                     ("model_server", UpstreamError(500, "no weights"), 0), ("simulator_crash", None, 0)])
def test_each_failure_is_invalid_counted_and_run_again_under_a_new_id(reason, fault, restarts, tmp_path, monkeypatch, request, capsys):
    if reason == "simulator_crash":
        request.getfixturevalue("crashing_world")
    if reason == "worker_timeout":
        run = WorkerPool.run
        monkeypatch.setattr(WorkerPool, "run", lambda self, k, job, seconds: run(self, k, job, 6))
    episodes, folder = adapters.run(arguments(tmp_path / "run", workers=1), specs(4), "test", Faulty(fault))
    bad, = [e for e in episodes if not e.valid]
    assert (bad.episode_id, bad.reason, bad.reward) == ("tabletop_base-2.i100.a0.r0", reason, None)
    good = {e.task: e for e in episodes if e.valid}
    assert len(good) == 4 == len(episodes) - 1 and good["tabletop_base/2"].episode_id == "tabletop_base-2.i100.a0.r1"
    assert all(e.reward == 1 for e in good.values())
    counts = records.read_json(folder / "manifest.json")["counts"]
    assert (counts["valid"], counts["successes"], counts["invalid"], counts["worker_restarts"]) == (4, 4, {reason: 1}, restarts)
    said = capsys.readouterr()
    assert "test: 4 of 4 valid episodes succeeded, 1 invalid" in said.out
    assert f"test: first invalid episode tabletop_base-2.i100.a0.r0: {reason}: " in said.err
    owners = {c.call_id: c.episode_id for c in records.read_calls(folder / "calls.jsonl")}
    assert all(owners[c] == e.episode_id for e in episodes for c in e.calls)             # no call of the lost try counts for the new one


def test_a_failure_that_stays_leaves_the_rate_and_the_others_go_on(tmp_path):
    class Dead(ScriptedTeacher):
        async def chat(self, body, episode_id=""):
            if episode_id.startswith("tabletop_base-2."):
                raise UpstreamError(500, "no weights")
            return await super().chat(body, episode_id)
    episodes, folder = adapters.run(arguments(tmp_path, retries=0), specs(4), "test", Dead())
    counts = records.read_json(folder / "manifest.json")["counts"]
    assert (counts["valid"], counts["successes"], counts["invalid"]) == (3, 3, {"model_server": 1})


def test_a_run_whose_workers_are_recycled_is_the_same_run(tmp_path, monkeypatch):
    """As on LIBERO, where RECYCLE is 250: here tabletop, one thread, a new process every two episodes."""
    init, pools = WorkerPool.__init__, []

    def recycling(self, processes, threads, recycle=None):
        init(self, processes, threads, 2)
        pools.append(self)
    plain, _ = adapters.run(arguments(tmp_path / "plain"), specs(5), "test", ScriptedTeacher())
    monkeypatch.setattr(WorkerPool, "__init__", recycling)
    episodes, folder = adapters.run(arguments(tmp_path / "recycled"), specs(5), "test", ScriptedTeacher())
    assert {(e.task, e.reward, e.start_state, e.valid) for e in episodes} == {(e.task, e.reward, e.start_state, e.valid) for e in plain}
    assert pools[0].recycled >= 1 and records.read_json(folder / "manifest.json")["counts"]["worker_restarts"] == 0


# ---------------------------------------------------------------------------------------------- which worker gets which task

def chosen_by(order, processes, by_task=True, states=3, seconds=lambda task, k: 1):
    """Plays Run.next_for with `processes` workers -> [(worker, task)] in the order of their starts. seconds(task, worker): an episode's."""
    run = adapters.Run.__new__(adapters.Run)
    run.todo, run.by_task, run.pool = collections.deque(order), by_task, SimpleNamespace(last={})
    done, free_at = [], {k: 0.0 for k in range(processes)}
    while run.todo:
        k = min(free_at, key=lambda k: (free_at[k], k))
        spec = run.next_for(k)
        done.append((k, spec["index"]))
        free_at[k] += seconds(spec["index"], k)
    return done


def builds(done):
    """How often each task's scene is built: once for each change of a worker's task."""
    count, last = collections.Counter(), {}
    for k, task in done:
        count[task] += last.get(k) != task
        last[k] = task
    return count


def states_outermost(tasks, states=4):
    return [{"suite": "libero_goal_swap", "index": t, "init": 11 + i} for i in range(states) for t in tasks]


@pytest.mark.parametrize("tasks", [*itertools.permutations((0, 1, 2))])
@pytest.mark.parametrize("tasks_outermost", [False, True])
def test_two_workers_build_each_of_three_scenes_once(tasks, tasks_outermost):
    order = states_outermost(tasks)
    if tasks_outermost:
        order.sort(key=lambda s: tasks.index(s["index"]))
    done = chosen_by(order, 2)
    assert len(done) == 12 and builds(done)[tasks[0]] == builds(done)[tasks[1]] == 1
    assert builds(done)[tasks[2]] <= 2                   # the last may be shared: nobody waits while there is work
    assert {k for k, _ in done} == {0, 1}


def test_each_scene_is_built_once_however_long_episodes_take():
    for slow in range(4):
        done = chosen_by(states_outermost(range(4)), 2, seconds=lambda task, k, slow=slow: 5 if task == slow else 1)
        assert sum(builds(done).values()) <= 4 + 1, (slow, done)


def test_a_worker_without_a_scene_of_its_own_helps_with_the_first_to_do():
    done = chosen_by(states_outermost([0], states=4), 3)
    assert {k for k, _ in done} == {0, 1, 2} and len(done) == 4


def test_with_an_early_end_the_order_is_untouched():
    order = states_outermost((0, 1, 2))
    assert [t for _, t in chosen_by(order, 2, by_task=False)] == [s["index"] for s in order]


@pytest.mark.parametrize("suite, enough, by_task, threads, recycle", [
    ("libero_goal_swap", None, True, 1, adapters.RECYCLE), ("libero_goal_swap", lambda episodes: False, False, 1, adapters.RECYCLE),
    ("tabletop_base", None, False, 8, None)])
def test_by_task_is_for_libero_without_an_early_end(suite, enough, by_task, threads, recycle, tmp_path, monkeypatch):
    made = []

    class Pool:
        restarts = 0

        def __init__(self, processes, threads, recycle=None):
            made.append((threads, recycle))
            raise BadInput("far enough")
    monkeypatch.setattr(adapters, "WorkerPool", Pool)
    order = [{"suite": suite, "index": t, "init": 11, "attempt": 0} for t in (1, 0, 1)]
    run = adapters.Run(arguments(tmp_path, concurrency=8), order, "test", ScriptedTeacher(), enough, tmp_path)

    async def go():
        try:
            await run.work()
        finally:
            await run.close()
    with pytest.raises(BadInput, match="far enough"):
        asyncio.run(go())
    assert made == [(threads, recycle)] and run.by_task is by_task


class Echoes(adapters.SkillsAdapter):
    """An adapter whose jobs the stand-in answers: every episode is valid, and its start state says which process ran it."""
    def job(self, spec, *_):
        return {"episode_id": spec["episode_id"], "die": spec["init"] == 12 and spec["episode_id"].endswith("-1.i12.a0.r0")}

    def episode(self, spec, outcome, calls, policy_version):
        valid = "pid" in outcome
        return records.Episode(spec["episode_id"], "skills", f"{spec['suite']}/{spec['index']}", spec["init"], 0, float(valid) if valid else None, valid,
                               reason=None if valid else "worker_lost", start_state=str(outcome.get("pid")), policy_version=policy_version)


def played(tmp_path, monkeypatch, order, recycle, processes=1):
    """LIBERO's specs in stand-in processes -> their tasks, one list for each process in the order of their first episodes"""
    stand_in(tmp_path, monkeypatch, ECHO)
    monkeypatch.setattr(adapters, "RECYCLE", recycle)
    monkeypatch.setattr(adapters, "ADAPTERS", {"skills": Echoes})
    monkeypatch.setattr(protocol, "check_states", lambda specs: None)                     # LIBERO need not be installed
    episodes, _ = adapters.run(arguments(tmp_path / "run", workers=processes), order, "test", ScriptedTeacher())
    assert sum(e.valid for e in episodes) == len(order)
    found = collections.defaultdict(list)
    for e in episodes:
        if e.valid:
            found[e.start_state].append(int(e.task[-1]))
    return list(found.values())


def test_a_scene_that_a_recycled_workers_successor_builds_is_remembered(tmp_path, monkeypatch):
    order = [{**s, "attempt": 0} for s in states_outermost((0, 2, 3), states=6)]
    found = played(tmp_path, monkeypatch, order, 4)
    assert [len(tasks) for tasks in found] == [4, 4, 4, 4, 2]
    # three tasks of six episodes: a process of four builds one scene, but for the one that gets the rest of two tasks
    assert sorted(sum(a != b for a, b in itertools.pairwise([None, *tasks])) for tasks in found) == [1, 1, 1, 1, 2], found


def test_a_scene_that_a_dead_workers_successor_builds_is_remembered(tmp_path, monkeypatch):
    order = [{**s, "attempt": 0} for s in states_outermost((1, 2), states=5)]             # the worker dies in task 1, state 12
    assert played(tmp_path, monkeypatch, order, None) == [[1], [1, 1, 1, 1, 2, 2, 2, 2, 2]]
