"""rewrite.py as a command: whole teacher runs, sharded or not, killed and repeated; input that is refused."""

import json
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT
from test_rewrite import episode, play

import rewrite
from records import Call, JsonlWriter, read_jsonl, run_main, to_line


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command in this process: (exit code, stdout, stderr)."""
    def run(*args):
        monkeypatch.setattr(sys, "argv", ["rewrite.py", *map(str, args)])
        with pytest.raises(SystemExit) as end:
            run_main(rewrite.main)
        return end.value.code, *capsys.readouterr()
    return run


def write_teacher(folder):
    """Six usable or unusable episodes, their calls interleaved as concurrent workers write them."""
    kinds = {"e0": {}, "e1": {"reward": 0},
             "e2": {"reward": None, "valid": False, "reason": "worker_lost", "end": "infrastructure"},
             "e3": {"end": "turns"}, "e4": {}, "e5": {}}
    calls = {e: play(e) for e in kinds}
    calls["e4"][2].delivered = False                       # the harness never saw it
    calls["e0"].append(Call("e0/retry", "e0", 2, message={"role": "assistant", "content": "x"}, delivered=True))
    with JsonlWriter(folder / "calls.jsonl") as w:
        for turn in range(8):
            for e in kinds:
                if turn < len(calls[e]) and (e, turn) != ("e5", 6):     # the file lost a call of e5
                    w.append(to_line(calls[e][turn]))
        w.append(to_line(Call("stray", "nobody", 0)))
    with JsonlWriter(folder / "episodes.jsonl") as w:
        for e, kw in kinds.items():
            w.append(to_line(episode(e, [c for c in calls[e] if c.call_id != "e0/retry"], **kw)))
    return folder


def test_command(run, tmp_path, tiny_dir):
    teacher = write_teacher(tmp_path / "teacher")
    args = ["--teacher", teacher, "--student", tiny_dir, "--output", tmp_path / "out"]
    code, out, err = run(*args)
    assert code == 0, err
    report = json.loads((tmp_path / "out" / "rewrite-report.json").read_text())
    total = sum(1 for _ in read_jsonl(teacher / "calls.jsonl"))
    assert total == 6 * 7 - 1 + 1 + 1 and report["calls"] == total == sum(report["outcomes"].values())
    assert {k: v for k, v in report["outcomes"].items() if k.startswith("dropped")} == {
        "dropped: episode_failed": 7, "dropped: episode_invalid": 7, "dropped: episode_abnormal_end": 7,
        "dropped: episode_incomplete": 6, "dropped: no_episode": 1, "dropped: not_in_episode": 1,
        "dropped: not_delivered": 1, "dropped: memory_only": 2, "dropped: after_success": 2}
    rows = [r for _, r in read_jsonl(tmp_path / "out" / "sft.jsonl")]
    assert report["targets"] == len(rows) == report["outcomes"]["kept"] + report["outcomes"]["rewritten"]
    assert report["episodes"]["used"] == 2 and report["examples"].keys() == {"word", "number", "argument"}
    assert rows[0].keys() >= {"messages", "tools", "prompt_token_ids", "token_ids", "source", "episode_id", "turn",
                              "evidence"}
    assert "kept" in out and "before: " in out
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["counts"]["targets"] == len(rows) and not (tmp_path / "out" / "sft.jsonl.part").exists()

    first = (tmp_path / "out" / "sft.jsonl").read_bytes()
    assert run(*args)[0] == 0 and (tmp_path / "out" / "sft.jsonl").read_bytes() == first     # again: the same file
    assert run(*args, "--limit-episodes", 1)[0] == 0
    report = json.loads((tmp_path / "out" / "rewrite-report.json").read_text())
    assert report["episodes"]["used"] == 1 and report["calls"] == total
    assert report["outcomes"]["dropped: episode_limit"] == 13


def shard(teacher, folder, n):
    """The same run as n shard folders: every nth episode and its calls."""
    episodes = [row for _, row in read_jsonl(teacher / "episodes.jsonl")]
    calls = [row for _, row in read_jsonl(teacher / "calls.jsonl")]
    for i in range(n):
        ids = {e["episode_id"] for e in episodes[i::n]} | ({"nobody"} if i == 0 else set())
        for name, rows in (("episodes", episodes[i::n]), ("calls", [c for c in calls if c["episode_id"] in ids])):
            with JsonlWriter(folder / f"shard-{i}-of-{n}" / f"{name}.jsonl") as w:
                for row in rows:
                    w.append(row)
    return folder


def test_sharded_teacher_gives_the_rows_of_the_whole_one(run, tmp_path, tiny_dir):
    teacher = write_teacher(tmp_path / "teacher")
    shards = shard(teacher, tmp_path / "shards", 4)
    made = []
    for name, folder, more in (("a", teacher, ()), ("b", shards, ()), ("c", shards, ("--limit-episodes", 1))):
        code, _, err = run("--teacher", folder, "--student", tiny_dir, "--output", tmp_path / name, *more)
        assert code == 0, err
        rows = sorted((r for _, r in read_jsonl(tmp_path / name / "sft.jsonl")), key=lambda r: r["call_id"])
        made.append((rows, json.loads((tmp_path / name / "rewrite-report.json").read_text())))
    (a, report_a), (b, report_b), (c, report_c) = made
    assert a == b and len({r["episode_id"] for r in b}) == 2
    for key in ("calls", "targets", "outcomes", "evidence", "numbers", "episodes"):
        assert report_a[key] == report_b[key], key
    assert report_c["outcomes"]["dropped: episode_limit"] == 13        # one episode of all shards, not one of each
    with JsonlWriter(shards / "shard-1-of-4" / "calls.jsonl") as w:    # an episode that shard 0 has whole
        w.append(next(row for _, row in read_jsonl(shards / "shard-0-of-4" / "calls.jsonl")))
    code, _, err = run("--teacher", shards, "--student", tiny_dir, "--output", tmp_path / "d")
    assert code == 2 and "stands there twice" in err
    (shards / "shard-3-of-4" / "calls.jsonl").unlink()
    assert run("--teacher", shards, "--student", tiny_dir, "--output", tmp_path / "d")[0] == 2


def test_sigkill_leaves_nothing_that_looks_whole_and_the_same_command_repairs_it(run, tmp_path, tiny_dir):
    teacher, n = tmp_path / "teacher", 400
    with JsonlWriter(teacher / "calls.jsonl") as calls, JsonlWriter(teacher / "episodes.jsonl") as episodes:
        for e in range(n):
            mine = play(f"e{e}")
            for c in mine:
                calls.append(to_line(c))
            episodes.append(to_line(episode(f"e{e}", mine)))
    args = ["--teacher", teacher, "--student", tiny_dir, "--output"]
    assert run(*args, tmp_path / "whole")[0] == 0
    files, output = ("sft.jsonl", "rewrite-report.json", "manifest.json"), tmp_path / "out"
    process = subprocess.Popen([sys.executable, str(ROOT / "rewrite.py"), *map(str, args), str(output)],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    part, deadline = output / "sft.jsonl.part", time.monotonic() + 60
    while not part.exists() or not part.stat().st_size:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not any((output / name).exists() for name in files)
    assert 0 < part.stat().st_size < (tmp_path / "whole" / "sft.jsonl").stat().st_size
    assert run(*args, output)[0] == 0
    assert (output / "sft.jsonl").read_bytes() == (tmp_path / "whole" / "sft.jsonl").read_bytes() and not part.exists()
    a, b = (json.loads((o / "manifest.json").read_text())["counts"] for o in (tmp_path / "whole", output))
    assert a == b and all((output / name).exists() for name in files)


def test_command_bad_input(run, tmp_path, tiny_dir):
    teacher = write_teacher(tmp_path / "teacher")

    def fails(words, teacher=teacher, student=tiny_dir):
        code, _, err = run("--teacher", teacher, "--student", student, "--output", tmp_path / "out")
        assert code == 2 and words in err and err.strip().count("\n") == 0, err
        assert not (tmp_path / "out" / "manifest.json").exists()
    (tmp_path / "empty").mkdir()
    fails("no tokenizer.json", student=tmp_path / "empty")
    fails("episodes.jsonl: no such file", teacher=tmp_path / "none")
    lines = (teacher / "calls.jsonl").read_text().splitlines(keepends=True)

    def with_line(n, line):
        (tmp_path / "bad").mkdir(exist_ok=True)
        (tmp_path / "bad" / "episodes.jsonl").write_bytes((teacher / "episodes.jsonl").read_bytes())
        (tmp_path / "bad" / "calls.jsonl").write_text("".join([*lines[:n], line, *lines[n + 1:]]))
        return tmp_path / "bad"
    fails("calls.jsonl:3: not JSON", teacher=with_line(2, lines[2][:50] + "\n"))
    fails("calls.jsonl:1: field 'messages' is missing",
          teacher=with_line(0, '{"call_id": "a", "episode_id": "b", "turn": 0}\n'))
    fails("stands there twice", teacher=with_line(6, lines[0]))
    broken = json.loads(lines[0])
    broken["message"]["tool_calls"] = [{"id": "x"}]
    fails("episode e0: a message or tool is not in OpenAI's chat format", teacher=with_line(0, json.dumps(broken) + "\n"))
    failed = (teacher / "episodes.jsonl").read_text().splitlines(keepends=True)[1]
    (teacher / "episodes.jsonl").write_text(failed)
    fails("no target in 43 calls")


def test_help_runs_as_a_script(python):
    r = subprocess.run([*python, str(ROOT / "rewrite.py"), "--help"], capture_output=True, text=True)
    assert r.returncode == 0 and "--after-success" in r.stdout and "Departures" in r.stdout
