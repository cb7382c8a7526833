"""Adapters: failed, invalid and gated told apart; resume after SIGKILL; workers that die or hang; arguments that are refused."""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest

import adapters
import protocol
import records
from conftest import ROOT
from harness.teacher import ScriptedTeacher, read_goal
from records import BadInput, Call

SPEC = {"suite": "tabletop_base", "index": 1, "init": 100, "attempt": 0, "episode_id": "e.r0"}


def outcome(**changes):
    return {"episode_id": "e.r0", "end": "finish", "detail": "", "start_state": "s", "success_latched": False, "success_final": False,
            "success_turn": None, "finished": True, "turns": 2, "seconds": 10.0, "failure": "grasp", **changes}


def calls(n=2, **changes):
    return [Call(f"c{k}", "e.r0", k, **{"delivered": True, "seconds": 1.0, **changes}) for k in range(n)]


@pytest.mark.parametrize("out, recorded, valid, reward, reason", [
    (outcome(), calls(), True, 0, None),                                                   # an honest failure
    (outcome(success_latched=True, success_final=False, success_turn=0), calls(), True, 1, None),    # latched counts
    (outcome(end="turns"), calls(), True, 0, None),
    (outcome(end="malformed"), calls(), True, 0, None),
    (outcome(end="unrecoverable"), calls(), True, 0, None),
    (outcome(end="time"), calls(), True, 0, None),                                         # slow planner: its own doing …
    (outcome(end="time"), calls(2, error="upstream 500: x", delivered=False), False, None, "incomplete_record"),
    (outcome(end="time", turns=0), calls(6, error="upstream timeout"), False, None, "model_server"),
    (outcome(end="time"), calls(2, extra={"queue_seconds": 4.0}), False, None, "model_server"),      # … unless it stood in a queue
    (outcome(end="infrastructure", turns=0), [], False, None, "model_server"),
    (outcome(), calls(1), False, None, "incomplete_record"),                               # answered twice, recorded once
    ({"crash": "Traceback …"}, calls(), False, None, "simulator_crash"),
    ({"lost": True}, calls(), False, None, "worker_lost"),
    ({"timeout": True}, calls(), False, None, "worker_timeout"),
])
def test_five_fields(out, recorded, valid, reward, reason):
    e = adapters.SkillsAdapter().episode(SPEC, out, recorded, "v1")
    assert (e.task, e.init, e.attempt, e.reward, e.valid, e.reason) == ("tabletop_base/1", 100, 0, reward, valid, reason)
    assert e.calls == [c.call_id for c in recorded] and e.policy_version == "v1"
    assert reason is None or reason in records.REASONS
    assert e.end in records.ENDS


def test_calls_after_success_are_post_success():
    e = adapters.SkillsAdapter().episode(SPEC, outcome(success_latched=True, success_turn=1, turns=4), calls(4), "v1")
    assert [adapters.post_success(e, c) for c in calls(4)] == [False, False, True, True]
    failed = adapters.SkillsAdapter().episode(SPEC, outcome(turns=4), calls(4), "v1")
    assert not any(adapters.post_success(failed, c) for c in calls(4))


def test_lists_and_shards_are_parsed_or_refused():
    assert protocol.parse_inits("1-3,7") == [1, 2, 3, 7]
    for wrong in ("1-", "a", "3,3", "1-2,2", "44-11"):
        with pytest.raises(BadInput, match="--inits"):
            protocol.parse_inits(wrong)
    assert adapters.parse_shard("1/4") == (1, 4)
    for wrong in ("4/4", "x", "1"):
        with pytest.raises(BadInput, match="--shard"):
            adapters.parse_shard(wrong)
    with pytest.raises(BadInput, match="tabletop_base"):
        protocol.parse_suites("tabletop_bass")
    for init in (0, 1, 10, 45, 49):
        with pytest.raises(BadInput, match="must not use states"):
            protocol.refuse_evaluation_states([11, init], "rl")
    protocol.refuse_evaluation_states([11, 44, 100, 5000], "rl")


@pytest.mark.parametrize("rank, size, shard", [(None, None, (0, 1)), (None, "1", (0, 1)), ("0", "1", (0, 1)), ("2", "4", (2, 4)), ("3", None, None),
                                               ("0", None, None), ("4", "4", None), ("5", "2", None), (None, "4", None), ("x", "2", None),
                                               ("0", "0", None), ("-1", "2", None), ("0", "two", None), ("", "2", None)])
def test_torchruns_rank_is_honoured_or_refused_and_never_guessed(rank, size, shard, monkeypatch):
    for name, value in (("RANK", rank), ("WORLD_SIZE", size)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    if shard:
        assert adapters.parse_shard(None) == shard
    else:
        with pytest.raises(BadInput, match=f"RANK/WORLD_SIZE '{rank}/{size}': expected I/N with I < N"):
            adapters.parse_shard(None)
    if size not in (None, "1"):                            # every rank would do the same part
        with pytest.raises(BadInput, match=f"--shard 0/2: WORLD_SIZE is {size}, .* leave --shard out"):
            adapters.parse_shard("0/2")
    else:
        assert adapters.parse_shard("0/2") == (0, 2)


def arguments(output, **changes):
    p = argparse.ArgumentParser()
    adapters.add_rollout_arguments(p, sampling="train")
    args = p.parse_args([])
    args.output, args.workers, args.concurrency, args.turns = str(output), 2, 2, 12
    for k, v in changes.items():
        setattr(args, k, v)
    return args


def specs(n=8):
    return [{"suite": "tabletop_base", "index": i, "init": 100, "attempt": 0} for i in range(n)]


def test_a_run_is_recorded_whole_and_repeating_it_changes_nothing(tmp_path):
    args = arguments(tmp_path)
    episodes, folder = adapters.run(args, specs(), "test", ScriptedTeacher())
    assert len(episodes) == 8 and all(e.valid and e.reward == 1 and e.end == "finish" for e in episodes)
    recorded = {c.call_id: c for c in records.read_calls(folder / "calls.jsonl")}
    for e in episodes:
        assert len(e.calls) == 4 and all(recorded[c].episode_id == e.episode_id and recorded[c].delivered for c in e.calls)
        assert [recorded[c].turn for c in e.calls] == [0, 1, 2, 3]
    seeds = [c.sampling["seed"] for c in recorded.values()]
    assert len(set(seeds)) == len(seeds)
    before = (folder / "episodes.jsonl").read_bytes()
    adapters.run(args, specs(), "test", ScriptedTeacher())
    assert (folder / "episodes.jsonl").read_bytes() == before
    with pytest.raises(BadInput, match="turns=12, this command says 13"):
        adapters.run(arguments(tmp_path, turns=13), specs(), "test", ScriptedTeacher())
    with pytest.raises(BadInput, match="policy_version='teacher-1-0.1-0.12'"):
        adapters.run(args, specs(), "test", ScriptedTeacher(grasp_skill=0.5))


def test_stop_file_ends_between_episodes_and_the_same_command_goes_on(tmp_path):
    (tmp_path / "STOP").touch()
    args = arguments(tmp_path)
    episodes, folder = adapters.run(args, specs(), "test", ScriptedTeacher())
    assert episodes == [] and not (folder / "manifest.json").exists()
    (tmp_path / "STOP").unlink()
    episodes, _ = adapters.run(args, specs(), "test", ScriptedTeacher())
    assert len(episodes) == 8 and (folder / "manifest.json").exists()


def test_a_second_process_in_the_same_folder_is_refused(tmp_path):
    import fcntl
    with open(tmp_path / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BadInput, match="another process is running there"):
            adapters.run(arguments(tmp_path), specs(1), "test", ScriptedTeacher())


class KillsOnce(ScriptedTeacher):
    """Kills every harness worker in the middle of the first episodes, once."""
    done = False

    async def chat(self, body, episode_id=""):
        if self.requests > 9 and not KillsOnce.done:
            KillsOnce.done = True
            for pid in subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", "harness.worker"], capture_output=True, text=True).stdout.split():
                os.kill(int(pid), signal.SIGKILL)
        return await super().chat(body, episode_id)


def test_a_killed_worker_makes_invalid_episodes_that_are_run_again(tmp_path):
    KillsOnce.done = False
    episodes, folder = adapters.run(arguments(tmp_path), specs(), "test", KillsOnce())
    invalid = [e for e in episodes if not e.valid]
    assert invalid and {e.reason for e in invalid} == {"worker_lost"} and all(e.reward is None for e in invalid)
    assert Counter((e.task, e.valid) for e in episodes if e.valid) == Counter({(f"tabletop_base/{i}", True): 1 for i in range(8)})
    assert records.read_json(folder / "manifest.json")["counts"]["invalid"] == {"worker_lost": len(invalid)}


class Fails(ScriptedTeacher):
    async def chat(self, body, episode_id=""):
        from proxy import UpstreamError
        raise UpstreamError(500, "no weights")


def test_a_dead_model_server_is_infrastructure_never_a_failure(tmp_path, capsys):
    with pytest.raises(BadInput, match="all 2 episodes of this command are invalid"):
        adapters.run(arguments(tmp_path, retries=0), specs(2), "test", Fails())
    assert "model_server: HTTP 502: " in capsys.readouterr().err              # the cause is shown
    folder, episodes = tmp_path, list(records.read_episodes(tmp_path / "episodes.jsonl"))
    assert not (folder / "manifest.json").exists()
    assert [(e.valid, e.reward, e.reason, e.end) for e in episodes] == [(False, None, "model_server", "infrastructure")] * 2
    recorded = list(records.read_calls(folder / "calls.jsonl"))
    assert len(recorded) == 6 and all("upstream 500: no weights" in c.error for c in recorded)      # three tries each, all written down


def test_a_hanging_worker_is_killed_and_replaced():
    async def go():
        pool = adapters.WorkerPool(1, 1)
        await pool.start()
        os.kill(pool.workers[0]["process"].pid, signal.SIGSTOP)
        job = adapters.SkillsAdapter().job(SPEC, "http://127.0.0.1:9/v1", arguments("x"), "m")
        first = await pool.run(0, job, 0.5)
        for _ in range(100):
            if pool.restarts:
                break
            await asyncio.sleep(0.1)
        second = await pool.run(0, {**job, "request_timeout": 1}, 60)             # nothing listens on port 9
        await pool.close()
        return first, second, pool.restarts
    first, second, restarts = asyncio.run(go())
    assert first == {"timeout": True} and restarts == 1 and second["end"] == "infrastructure"


@pytest.mark.parametrize("how", ["timeout", "lost"])
def test_what_a_worker_started_ends_with_it(how, tmp_path, monkeypatch):
    """Here a child that holds the worker's output open, so that no end of file tells of the worker's end."""
    script = tmp_path / "worker"
    script.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! >> {tmp_path}/children\ncat > /dev/null\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))

    async def go():
        pool = adapters.WorkerPool(1, 1)
        await pool.start()
        job = asyncio.create_task(pool.run(0, {"episode_id": "e"}, 0.5 if how == "timeout" else 60))
        while not (tmp_path / "children").exists() or not (tmp_path / "children").read_text().endswith("\n"):
            await asyncio.sleep(0.02)
        if how == "lost":
            os.kill(pool.workers[0]["process"].pid, signal.SIGKILL)
        outcome = await job
        while not pool.restarts:                             # its output has ended: nobody holds it any more
            await asyncio.sleep(0.02)
        await pool.close()
        return outcome
    assert asyncio.run(asyncio.wait_for(go(), 60)) == {how: True}


def test_repeating_the_command_after_the_server_is_back_tries_again(tmp_path):
    class Dead(Fails):
        policy_version = ScriptedTeacher().policy_version
    with pytest.raises(BadInput, match="mend the cause"):
        adapters.run(arguments(tmp_path, retries=0), specs(2), "test", Dead())
    episodes, folder = adapters.run(arguments(tmp_path, retries=0), specs(2), "test", ScriptedTeacher())
    assert [e.valid for e in episodes] == [False, False, True, True] and (folder / "manifest.json").exists()


def test_a_hopeless_run_ends_early(tmp_path):
    with pytest.raises(BadInput, match="are invalid"):
        adapters.run(arguments(tmp_path, retries=0), specs(20) * 5, "test", Fails())
    assert 12 <= len(list(records.read_episodes(tmp_path / "episodes.jsonl"))) < 30


def test_states_that_do_not_exist_and_empty_runs_are_refused(tmp_path):
    for wrong in (50, 99):
        with pytest.raises(BadInput, match=f"initial state {wrong} .* does not exist; valid: 0-49"):
            adapters.run(arguments(tmp_path), [{**SPEC, "init": wrong}], "test", ScriptedTeacher())
    with pytest.raises(BadInput, match="no episode to run"):
        adapters.run(arguments(tmp_path), [], "test", ScriptedTeacher())


def test_growing_a_finished_run_takes_its_manifest_away_first(tmp_path):
    adapters.run(arguments(tmp_path), specs(2), "test", ScriptedTeacher())
    assert (tmp_path / "manifest.json").exists()
    (tmp_path / "STOP").touch()
    adapters.run(arguments(tmp_path), specs(4), "test", ScriptedTeacher())
    assert not (tmp_path / "manifest.json").exists()


def test_a_served_model_is_asked_for_by_its_name(tmp_path, tiny_dir):
    """The path of --engine-url: a server on HTTP that knows its model by name, as vLLM does (here engine.py alone)."""
    from upstream import HttpUpstream
    server = subprocess.Popen([sys.executable, "engine.py", "--model", str(tiny_dir), "--port", "0"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        line = next(line for line in server.stdout if line.startswith("engine:"))
        upstream = HttpUpstream(line.split(" on ")[1].strip(), records.policy_version(tiny_dir))
        episodes, folder = adapters.run(arguments(tmp_path, max_tokens=8, turns=2), specs(2), "test", upstream)
        assert all(e.valid for e in episodes)
        recorded = list(records.read_calls(folder / "calls.jsonl"))
        assert recorded and {c.model for c in recorded} == {tiny_dir.name} and all(records.call_problem(c) is None for c in recorded)
    finally:
        server.kill()
        server.wait()
    with pytest.raises(BadInput, match="no model server at"):
        adapters.run(arguments(tmp_path / "x"), specs(1), "test", HttpUpstream(upstream.url, "v"))


def test_collect_killed_and_repeated_loses_and_doubles_nothing(tmp_path):
    command = [sys.executable, "collect.py", "--suites", "tabletop_base", "--inits", "100-105", "--no-memory", "--output", str(tmp_path / "t"),
               "--workers", "1", "--concurrency", "4"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    episodes = tmp_path / "t" / "episodes.jsonl"
    for _ in range(600):
        if episodes.exists() and episodes.read_bytes().count(b"\n") >= 15:
            break
        time.sleep(0.05)
    process.kill()
    process.wait()
    done = episodes.read_bytes().count(b"\n")
    assert 15 <= done < 120 and not (tmp_path / "t" / "manifest.json").exists()
    with open(episodes, "ab") as f:
        f.write(b'{"episode_id": "half a li')                                   # and the disk caught half a line
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "truncated last line" in result.stderr
    rows = list(records.read_episodes(episodes))
    assert Counter((e.task, e.init) for e in rows if e.valid) == Counter({(f"tabletop_base/{i}", s): 1 for i in range(20) for s in range(100, 106)})
    by_id = {c.call_id: c for c in records.read_calls(tmp_path / "t" / "calls.jsonl")}
    used = [c for e in rows for c in e.calls]
    assert len(set(used)) == len(used) and all(c in by_id for c in used)
    assert {c.error for c in by_id.values() if c.call_id not in set(used)} <= {None, "interrupted", "client gone"}
    manifest = json.loads((tmp_path / "t" / "manifest.json").read_text())
    assert manifest["counts"]["resumed"] == done and manifest["counts"]["valid"] == 120


@pytest.mark.parametrize("sentence, goal", [
    ("Put the red mug on the blue tray.", [("red mug", "blue tray")]),
    ("Put the red mug on the blue tray, then put the white jar in the red bowl.", [("red mug", "blue tray"), ("white jar", "red bowl")]),
    ("Pick up the alphabet soup and place it in the basket", [("alphabet soup", "basket")]),
    ("Pick the milk and place it in the basket", [("milk", "basket")]),
])
def test_the_teacher_reads_instructions(sentence, goal):
    assert read_goal(sentence) == goal
