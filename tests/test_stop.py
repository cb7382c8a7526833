"""Stopped, killed, broken and continued: collect.py, rollout.py, eval.py by signals and STOP files, in shards, and with a disk, a worker or
every engine gone. Whatever happens, no record is lost, doubled or attributed to another episode, and the same command goes on."""

import argparse
import asyncio
import contextlib
import errno
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import adapters
import collect
import eval as ev
import records
import rollout
from conftest import ROOT
from harness.pool import WorkerPool
from harness.teacher import ScriptedTeacher
from records import BadInput, STOPPED
from upstream import UpstreamError

SMALL = ["--workers", "1", "--concurrency", "4", "--suites", "tabletop_base"]
MAINS = {"collect.py": collect.main, "rollout.py": rollout.main, "eval.py": ev.main}


def command(stage, output, model):
    """A run of 60 episodes (collect.py: 80) by the scripted teacher or a random planner."""
    planner = ["--model", str(model), "--turns", "2", "--max-tokens", "100", "--output", str(output), *SMALL]
    return {"collect.py": ["collect.py", "--no-memory", "--inits", "100-103", "--output", str(output), *SMALL],
            "rollout.py": ["rollout.py", "--inits", "100-120", "--groups", "30", "--attempts", "2", *planner],
            "eval.py": ["eval.py", "run", "--inits", "1-3", *planner]}[stage]


@pytest.fixture
def here(monkeypatch):
    """Runs a stage's command in this process -> exit code; BadInput passes."""
    def run(argv):
        monkeypatch.setattr(sys, "argv", list(map(str, argv)))
        return MAINS[argv[0]]() or 0
    return run


def keys(folder):
    """Counter of the attempts of a run's valid episodes."""
    return Counter((e.task, e.init, e.attempt) for f in records.folders(folder) for e in records.read_episodes(f / "episodes.jsonl") if e.valid)


def check_record(folder):
    """Every call of every episode is there, once, and is that episode's own; every arrival has become a call. -> attempts, all once"""
    episodes = list(records.read_episodes(folder / "episodes.jsonl"))
    calls = list(records.read_calls(folder / "calls.jsonl"))
    by_id = {c.call_id: c for c in calls}
    assert len(by_id) == len(calls) and len({e.episode_id for e in episodes}) == len(episodes)
    named = {c: e.episode_id for e in episodes for c in e.calls}
    assert len(named) == sum(len(e.calls) for e in episodes) and named.keys() <= by_id.keys()
    ended = {e.episode_id for e in episodes}
    assert all(named.get(c.call_id) == (c.episode_id if c.episode_id in ended else None) for c in calls)
    assert {row["call_id"] for _, row in records.read_jsonl(folder / "arrivals.jsonl")} == by_id.keys()
    for e in episodes:
        if e.valid:
            assert [by_id[c].turn for c in e.calls] == list(range(len(e.calls)))
    found = keys(folder)
    assert set(found.values()) <= {1}, f"doubled: {[k for k, n in found.items() if n > 1]}"
    return set(found)


def content(folder):
    return {p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def children(pid):
    return [int(c) for task in Path(f"/proc/{pid}/task").glob("*") for c in (task / "children").read_text().split()]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"      # an orphan that nobody reaps
    except FileNotFoundError:
        return False


def wait_for(what, seconds=120):
    end = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)
    return value


def lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def start(argv, **options):
    return subprocess.Popen([sys.executable, *argv], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            start_new_session=True, **options)


# ---------------------------------------------------------------------------------------------- STOP, SIGINT, SIGTERM, SIGKILL

@pytest.mark.slow
@pytest.mark.parametrize("stage", MAINS)
def test_stopped_in_every_way_and_repeated_it_is_the_uninterrupted_run(stage, tiny_dir, tmp_path, here):
    out = tmp_path / "out"
    argv = [a for a in command(stage, out, tiny_dir) if a != "--no-memory"]
    for how in ("SIGKILL", "SIGTERM", "SIGINT", "STOP"):
        before = lines(out / "episodes.jsonl")
        process = start(argv)
        wait_for(lambda: lines(out / "episodes.jsonl") >= before + 4 or process.poll() is not None)
        workers = children(process.pid)
        assert workers, how
        if how == "STOP":
            (out / "STOP").touch()
        elif how == "SIGINT":
            os.killpg(process.pid, signal.SIGINT)              # as a terminal does: to the whole group
        else:
            process.send_signal(signal.Signals[how])
        stdout, stderr = process.communicate(timeout=60)
        (out / "STOP").unlink(missing_ok=True)
        wait_for(lambda: not any(map(alive, workers)), 10)
        assert process.returncode == (-signal.SIGKILL if how == "SIGKILL" else STOPPED), (how, stderr)
        assert not (out / "manifest.json").exists() and "Traceback" not in stderr
        if how != "SIGKILL":
            assert f"stopped by {how}, " in stdout or "ended by a STOP file" in stdout, stdout
            assert " valid episodes succeeded" in stdout
            check_record(out)
    assert here(argv) == 0 and (out / "manifest.json").exists()
    assert here(command(stage, tmp_path / "whole", tiny_dir)) == 0
    assert check_record(out) == check_record(tmp_path / "whole")
    assert len(keys(out)) == (80 if stage == "collect.py" else 60)
    assert {c.error for c in records.read_calls(out / "calls.jsonl")} <= {None, "interrupted"}


@pytest.mark.parametrize("stage", MAINS)
def test_other_arguments_or_another_checkpoint_are_refused_and_nothing_changes(stage, tiny_dir, tmp_path, here):
    out = tmp_path / "out"
    argv = [a for a in command(stage, out, tiny_dir) if a != "--no-memory"] + ["--tasks" if stage != "rollout.py" else "--groups", "1"]
    assert here(argv) == 0
    before = content(out)
    with pytest.raises(BadInput, match="holds a run with history_budget=60000, this command says 70000; repeat the first command"):
        here([*argv, "--history-budget", "70000"])
    other = tmp_path / "other"
    shutil.copytree(tiny_dir, other)
    config = records.read_json(other / "config.json")
    records.write_json(other / "config.json", {**config, "note": "another content"})
    change = ["--grasp-skill", "0.5"] if stage == "collect.py" else ["--model", other]
    with pytest.raises(BadInput, match="holds a run with (grasp_skill=1.0, this command says 0.5|policy_version='[0-9a-f]{12}', this command)"):
        here([*argv, *change])
    assert content(out) == before
    assert here([*argv, "--workers", "2", "--retries", "3"]) == 0         # what may differ


class Signals(ScriptedTeacher):
    """Answers no more after 10 calls, and sends SIGTERM to the stage once all four episodes at a time wait for it."""
    waiting = 0

    async def chat(self, body, episode_id=""):
        if self.requests >= 10:
            self.waiting += 1
            if self.waiting == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        return await super().chat(body, episode_id)


def arguments(folder, **changes):
    p = argparse.ArgumentParser()
    adapters.add_rollout_arguments(p, sampling="train")
    args = p.parse_args([])
    for k, v in {"output": str(folder), "workers": 2, "concurrency": 2, "turns": 12, **changes}.items():
        setattr(args, k, v)
    return args


def specs(n=8):
    return [{"suite": "tabletop_base", "index": i, "init": 100, "attempt": 0} for i in range(n)]


def test_a_signal_abandons_episodes_in_flight_and_leaves_the_handlers_as_they_were(tmp_path, capsys):
    numbers, ours = (signal.SIGINT, signal.SIGTERM), lambda *_: None
    before = [signal.signal(n, ours) for n in numbers]
    try:
        episodes, _ = adapters.run(arguments(tmp_path), specs(), "test", Signals())
        assert [signal.getsignal(n) for n in numbers] == [ours, ours]
    finally:
        for n, handler in zip(numbers, before, strict=True):
            signal.signal(n, handler)
    assert all(e.valid for e in episodes) and not (tmp_path / "manifest.json").exists()
    assert "test: stopped by SIGTERM, 4 episodes in flight abandoned; repeat the command" in capsys.readouterr().out
    cut = [c for c in records.read_calls(tmp_path / "calls.jsonl") if c.error]
    assert {c.error for c in cut} == {"interrupted"} and len({c.episode_id for c in cut}) == 4
    episodes, _ = adapters.run(arguments(tmp_path), specs(), "test", ScriptedTeacher())
    assert len(check_record(tmp_path)) == 8
    assert {e.episode_id for e in episodes}.isdisjoint(c.episode_id for c in cut)          # run again under a new id


class Starts(ScriptedTeacher):
    """A server that takes its time to start, and SIGINT meanwhile."""
    closed = 0

    async def ready(self):
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    async def close(self):
        self.closed += 1


def test_a_signal_while_the_server_starts_ends_the_run_and_the_server(tmp_path, capsys):
    server = Starts()
    episodes, _ = adapters.run(arguments(tmp_path), specs(), "test", server)
    assert episodes == [] and server.closed == 1 and not (tmp_path / "manifest.json").exists()
    assert "test: stopped by SIGINT, 0 episodes in flight abandoned" in capsys.readouterr().out


def test_only_a_second_signal_some_time_after_the_first_ends_the_process_hard(monkeypatch):
    exits = []
    monkeypatch.setattr(os, "_exit", exits.append)

    async def go():
        with adapters.Signals() as signals:
            signals.arrived(signal.SIGINT)
            signals.arrived(signal.SIGTERM)                   # e.g. timeout(1): to the process, then to its group
            assert signals.name == "SIGINT" and exits == []
            signals.first -= 3
            signals.arrived(signal.SIGTERM)
    asyncio.run(go())
    assert exits == [128 + signal.SIGTERM]


# ---------------------------------------------------------------------------------------------- shards

def test_all_attempts_of_a_start_lie_in_one_shard_and_the_shards_are_the_whole():
    whole = [{"suite": "s", "index": i, "init": init, "attempt": a} for a in range(3) for init in (1, 2) for i in range(4)]
    parts = [adapters.shard_of(whole, k, 3) for k in range(3)]
    assert sorted(map(str, sum(parts, []))) == sorted(map(str, whole))
    starts = [{(s["index"], s["init"]) for s in part} for part in parts]
    assert sum(map(len, starts)) == 8 and [len(p) for p in parts] == [9, 9, 6]


@pytest.mark.parametrize("stage", MAINS)
def test_shards_together_are_the_unsharded_run(stage, tiny_dir, tmp_path, here):
    few = ["--tasks", "0-2"] if stage != "rollout.py" else ["--groups", "5"]
    assert here([*command(stage, tmp_path / "whole", tiny_dir), *few]) == 0
    for shard in ("0/2", "1/2"):
        argv = [*command(stage, tmp_path / "parts", tiny_dir), *few, "--shard", shard]
        assert here(argv) == 0
        if shard == "0/2":
            with pytest.raises(BadInput, match="missing shard-1-of-2"):
                records.folders(tmp_path / "parts")
            with pytest.raises(BadInput, match="1 of 2 shards are there; run the missing stage --shard 1/2"):
                ev.parts_of(tmp_path / "parts", "manifest.json", "stage")
    assert keys(tmp_path / "parts") == keys(tmp_path / "whole") and set(keys(tmp_path / "whole").values()) == {1}
    before = content(tmp_path)
    with pytest.raises(BadInput, match="holds shard-0-of-2, but this command runs 1 of 3 parts"):
        here([*argv[:-1], "0/3"])
    with pytest.raises(BadInput, match="holds episodes.jsonl of a run in one part, but this command runs 1 of 2 parts"):
        here([*command(stage, tmp_path / "whole", tiny_dir), *few, "--shard", "0/2"])
    assert content(tmp_path) == before


def test_a_report_over_shards_is_the_report_of_the_same_episodes_in_one_run(tiny_dir, tmp_path, here):
    here([*command("eval.py", tmp_path / "whole", tiny_dir), "--tasks", "0-3", "--attempts", "2"])
    rows = (tmp_path / "whole/episodes.jsonl").read_text().splitlines(keepends=True)
    for k in range(3):
        shutil.copytree(tmp_path / "whole", tmp_path / f"parts/shard-{k}-of-3")
        (tmp_path / f"parts/shard-{k}-of-3/episodes.jsonl").write_text("".join(rows[k::3]))
    report = records.read_json(tmp_path / "whole/report.json")
    merged = json.loads(json.dumps(ev.summarize(ev.load(tmp_path / "parts").episodes)))
    times = ("mean_calls", "mean_seconds")                                     # sums of floats in another order
    assert {k: v for k, v in merged.items() if k not in times} == {k: report[k] for k in merged if k not in times}
    assert [merged[k] for k in times] == pytest.approx([report[k] for k in times])


def test_a_shard_without_a_start_is_whole_and_empty(tiny_dir, tmp_path, here):
    argv = [*command("eval.py", tmp_path, tiny_dir), "--tasks", "0", "--inits", "1"]
    for k in range(2):
        assert here([*argv, "--shard", f"{k}/2"]) == 0
    assert len(ev.load(tmp_path).episodes) == 1


@pytest.mark.slow
def test_torchrun_and_shard_agree(tiny_dir, tmp_path, here):
    argv = [*command("rollout.py", tmp_path / "ranks", tiny_dir), "--groups", "5"]
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", *argv], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for k in range(2):
        assert here([*command("rollout.py", tmp_path / "shards", tiny_dir), "--groups", "5", "--shard", f"{k}/2"]) == 0
        part = f"shard-{k}-of-2"
        assert check_record(tmp_path / "ranks" / part) == check_record(tmp_path / "shards" / part)
        seeds = [sorted((c.episode_id, c.turn, c.sampling["seed"]) for c in records.read_calls(tmp_path / f / part / "calls.jsonl") if c.turn == 0)
                 for f in ("ranks", "shards")]
        assert seeds[0] == seeds[1] != []
    assert sorted(p.name for p in (tmp_path / "ranks").iterdir()) == sorted(p.name for p in (tmp_path / "shards").iterdir())


# ---------------------------------------------------------------------------------------------- disk, folder, clock

def test_a_full_disk_ends_the_run_in_one_line_and_the_same_command_goes_on(tmp_path):
    argv = command("collect.py", tmp_path / "out", None)
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))      # bytes a file: write() fails above
    done = subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, preexec_fn=limit)
    assert done.returncode == 2, done.stderr[-3000:]
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ")] == [done.stderr.splitlines()[-1]]
    assert ".jsonl: File too large; make room" in done.stderr and "Traceback" not in done.stderr
    assert "episodes in flight abandoned" in done.stdout and not (tmp_path / "out/manifest.json").exists()
    for path in (tmp_path / "out").glob("*.jsonl"):
        assert path.read_bytes().endswith(b"\n") and list(records.read_jsonl(path))
    assert all(e.valid for e in records.read_episodes(tmp_path / "out/episodes.jsonl"))
    done = subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(check_record(tmp_path / "out")) == 80


@pytest.mark.parametrize("file", ["args.json", "episodes.jsonl", "manifest.json"])
def test_a_file_that_cannot_be_written_is_named_and_the_same_command_goes_on(file, tmp_path, monkeypatch):
    write, append = records.write_json, records.JsonlWriter.append

    def full(do):
        def write_or_fail(where, *args):
            path = Path(getattr(where, "path", where))
            if path.name == file and (file != "episodes.jsonl" or path.stat().st_size > 900):
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            return do(where, *args)
        return write_or_fail
    with monkeypatch.context() as patch:
        patch.setattr(records, "write_json", full(write))
        patch.setattr(records.JsonlWriter, "append", full(append))
        with pytest.raises(BadInput, match=f"{file}: No space left on device; make room"):
            adapters.run(arguments(tmp_path), specs(), "test", ScriptedTeacher())
    assert not (tmp_path / "manifest.json").exists()
    adapters.run(arguments(tmp_path), specs(), "test", ScriptedTeacher())
    assert len(check_record(tmp_path)) == 8 and (tmp_path / "manifest.json").exists()


@pytest.mark.parametrize("kept", [(.3, .7, .9), (.9, .5, .9), (.5, .5, .2), (0, .8, .6)])
def test_a_folder_copied_while_it_was_written_goes_on(kept, tmp_path, capsys):
    adapters.run(arguments(tmp_path / "first"), specs(), "test", ScriptedTeacher())
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "first", copy)
    (copy / "manifest.json").unlink()
    for name, share in zip(("arrivals", "calls", "episodes"), kept, strict=True):       # each breaks off within a line
        path = copy / f"{name}.jsonl"
        path.write_bytes(path.read_bytes()[:int(share * path.stat().st_size)])
    adapters.run(arguments(copy), specs(), "test", ScriptedTeacher())
    episodes = list(records.read_episodes(copy / "episodes.jsonl"))
    calls = {c.call_id: c for c in records.read_calls(copy / "calls.jsonl")}
    assert set(keys(copy)) == set(keys(tmp_path / "first")) and set(keys(copy).values()) == {1}
    assert all(calls[c].episode_id == e.episode_id for e in episodes for c in e.calls)
    listed = {c for e in episodes for c in e.calls}
    assert not {e.episode_id for e in episodes} & {c.episode_id for c in calls.values() if c.call_id not in listed}
    torn = copy / "episodes.torn.jsonl"
    assert torn.exists() == (kept[1] < kept[2]) and ("name calls that calls.jsonl lacks" in capsys.readouterr().err) == torn.exists()


def test_a_second_process_is_refused_and_the_first_goes_on(tmp_path, here):
    argv = [*command("collect.py", tmp_path / "out", None), "--inits", "100"]
    first = start(argv)
    wait_for(lambda: lines(tmp_path / "out/episodes.jsonl") >= 2)
    try:
        first.send_signal(signal.SIGSTOP)
        before = content(tmp_path / "out")
        with pytest.raises(BadInput, match="out: another process is running there; wait for it, or give another folder"):
            here(argv)
        assert content(tmp_path / "out") == before
    finally:
        first.send_signal(signal.SIGCONT)                  # a test that fails must not leave a stopped process for ever
    first.communicate(timeout=120)
    assert first.returncode == 0 and len(check_record(tmp_path / "out")) == 20


def test_a_jumping_clock_changes_nothing(tmp_path, monkeypatch):
    jumps = iter(range(10**9, 0, -10**4))
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    episodes, _ = adapters.run(arguments(tmp_path), specs(), "test", ScriptedTeacher())
    assert len(check_record(tmp_path)) == 8 and all(0 <= e.seconds < 60 for e in episodes)
    assert all(0 <= c.seconds < 60 for c in records.read_calls(tmp_path / "calls.jsonl"))
    assert 0 <= records.read_json(tmp_path / "manifest.json")["counts"]["seconds"] < 60


# ---------------------------------------------------------------------------------------------- engines

class Dies(ScriptedTeacher):
    """The last engine dies after some calls; those in flight fail, as do all later ones."""
    async def chat(self, body, episode_id=""):
        if self.requests >= 20:
            raise UpstreamError(403, "gone")               # a 4xx: the harness gives up at once, before anybody has looked
        return await super().chat(body, episode_id)

    def dead(self):
        return "no engine is left: http://n1:8000 exited with code 1" if self.requests >= 20 else None


def test_no_engine_left_ends_the_run_and_fails_no_episode(tmp_path, capsys):
    with pytest.raises(BadInput, match="test: no engine is left: http://n1:8000 exited with code 1; mend it and repeat the command"):
        adapters.run(arguments(tmp_path), specs(), "test", Dies())
    episodes = list(records.read_episodes(tmp_path / "episodes.jsonl"))
    assert len(episodes) < 8 and all(e.valid and e.reward == 1 for e in episodes)
    assert "test: 4 episodes in flight abandoned" in capsys.readouterr().out
    adapters.run(arguments(tmp_path), specs(), "test", ScriptedTeacher())
    assert len(check_record(tmp_path)) == 8 and all(e.valid for e in records.read_episodes(tmp_path / "episodes.jsonl"))


class Counts(ScriptedTeacher):
    closed = 0

    async def close(self):
        self.closed += 1


class NoServer(Counts):
    async def ready(self):
        raise BadInput("vLLM did not start")


class Breaks(Counts):
    def dead(self):
        raise ZeroDivisionError


@pytest.mark.parametrize("upstream, changes, todo, error", [
    (Counts(), {}, specs(1), None), (Counts(), {}, [], BadInput), (Counts(), {}, [{**specs(1)[0], "init": 77}], BadInput),
    (Counts(), {"shard": "2/2"}, specs(1), BadInput), (Counts(), {"output": "/dev/null/x"}, specs(1), BadInput),
    (NoServer(), {}, specs(1), BadInput), (Breaks(), {}, specs(2), ZeroDivisionError)])
def test_the_upstream_is_closed_on_every_path(upstream, changes, todo, error, tmp_path):
    with pytest.raises(error) if error else contextlib.nullcontext():
        adapters.run(arguments(tmp_path, **changes), todo, "test", upstream)
    assert upstream.closed == 1


# ---------------------------------------------------------------------------------------------- workers

class Freezes(ScriptedTeacher):
    """Stops every harness process in the middle of an episode, once."""
    frozen = ()

    async def chat(self, body, episode_id=""):
        if self.requests == 6:
            self.frozen = [p for p in children(os.getpid()) if b"harness.worker" in Path(f"/proc/{p}/cmdline").read_bytes()]
            for pid in self.frozen:
                os.kill(pid, signal.SIGSTOP)
        return await super().chat(body, episode_id)


@pytest.mark.slow
def test_hung_workers_are_killed_and_replaced_and_their_episodes_run_again(tmp_path, monkeypatch):
    run = WorkerPool.run
    monkeypatch.setattr(WorkerPool, "run", lambda self, k, job, seconds: run(self, k, job, 8))
    teacher = Freezes()
    episodes, _ = adapters.run(arguments(tmp_path, workers=1), specs(4), "test", teacher)
    invalid = [e for e in episodes if not e.valid]
    assert invalid and {e.reason for e in invalid} <= {"worker_timeout", "worker_lost"} and "worker_timeout" in {e.reason for e in invalid}
    assert all(e.reward is None for e in invalid) and len(check_record(tmp_path)) == 4
    assert records.read_json(tmp_path / "manifest.json")["counts"]["worker_restarts"] >= 1
    assert teacher.frozen and not any(map(alive, teacher.frozen))


def test_workers_that_keep_dying_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(BadInput, match="test: harness workers died 21 times; their messages stand above; mend the cause and repeat"):
        adapters.run(arguments(tmp_path, workers=1, retries=1000), specs(1), "test", ScriptedTeacher())
    assert {e.reason for e in records.read_episodes(tmp_path / "episodes.jsonl")} <= {"worker_lost"}


def test_a_retry_never_goes_to_the_worker_that_was_just_killed(tmp_path):
    async def go():
        pool = WorkerPool(1, 1)
        await pool.start()
        os.kill(pool.workers[0]["process"].pid, signal.SIGSTOP)
        job = adapters.SkillsAdapter().job({**specs(1)[0], "episode_id": "e"}, "http://127.0.0.1:9/v1", arguments("x", request_timeout=1), "m")
        outcomes = [await pool.run(0, job, seconds) for seconds in (0.2, 60)]
        await pool.close()
        return outcomes
    first, second = asyncio.run(go())
    assert first == {"timeout": True} and second["end"] == "infrastructure"          # it ran: nothing listens on port 9


def test_a_worker_in_the_middle_of_an_episode_ends_when_its_stdin_closes(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:                    # takes calls and never answers
        worker = subprocess.Popen([sys.executable, "-m", "harness.worker", "--threads", "2"], cwd=ROOT, stdin=subprocess.PIPE,
                                  stdout=subprocess.PIPE, start_new_session=True)
        url = f"http://127.0.0.1:{server.getsockname()[1]}/v1"
        job = adapters.SkillsAdapter().job({**specs(1)[0], "episode_id": "e"}, url, arguments("x"), "m")
        worker.stdin.write(json.dumps(job).encode() + b"\n")
        worker.stdin.flush()
        connection, _ = server.accept()                                       # its thread now waits for up to 600 s
        worker.stdin.close()
        assert worker.wait(20) == -signal.SIGKILL and worker.stdout.read() == b""
        connection.close()
