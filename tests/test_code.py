"""Code harness: prompts, ends of an episode, success and the turn since which it holds, what a lost session costs. A fake planner over HTTP,
the real sandbox, tabletop."""

import base64
import copy
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from PIL import Image

import adapters
from harness import code, code_api
from harness.code import Episode, LEFT_OUT, prompt
from harness.replies import CUT, NO_PROGRAM
from harness.sandbox import Block, Sandbox
from harness.tabletop import Tabletop
from harness.tabletop_programs import choices, PLAIN, steps
from records import Call

SUITE, INDEX, INIT = "tabletop_base", 0, 12                # green mug → blue bowl; all four objects of state 12 have a heavy foot
TASK = Tabletop.tasks(SUITE)[INDEX]
STEP, = steps(TASK.instruction)
PUT = PLAIN.format(**STEP, dy=choices(STEP)[0])
AWAY = PLAIN.format(object=STEP["object"], place="white box", dy=choices(STEP)[0])      # the other container: undoes it
SLIP = PLAIN.format(**STEP, dy=choices(STEP)[1])


def fenced(program):
    return f"```python\n{program}\n```"


@pytest.fixture(scope="module")
def box():
    s = Sandbox(weak=sys.platform != "linux")
    assert s.layers["limits"]                                # starts it now, not within an episode's seconds
    yield s
    s.close()


@pytest.fixture(scope="module")
def world():
    return Tabletop()


@pytest.fixture
def planner():
    """A server that answers from `script`: contents, whole choices, or (status, text) for an error. Keeps the bodies that it got."""
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            answer = self.server.script.pop(0)
            status, data = 200, answer
            if isinstance(answer, tuple):
                status, data = answer[0], {"error": {"message": answer[1]}}
            elif not isinstance(answer, dict):
                data = {"choices": [{"message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}]}
            data = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.script, server.bodies = [], []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def run(planner, world, box):
    """run(script, **job) -> outcome. `run.episode` is the last Episode, `run.users` the user messages of its prompts."""
    def go(script, **job):
        planner.script[:], planner.bodies[:] = copy.deepcopy(script), []
        base = {"episode_id": "e", "base_url": f"http://127.0.0.1:{planner.server_port}/v1", "suite": SUITE, "index": INDEX, "init": INIT,
                "model": "m", "max_tokens": 50, "turns": 5, "seconds": 60, "history_budget": 60_000, "pictures": False, "request_timeout": 5,
                "single_turn": False}
        go.episode = Episode(world, {**base, **job}, None, box)
        out = go.episode.run()
        go.users = [b["messages"][1]["content"] for b in planner.bodies]
        return json.loads(json.dumps(out))                   # as the worker writes it
    return go


def cut(content):
    return {"choices": [{"message": {"role": "assistant", "content": content}, "finish_reason": "length"}]}


def recorded(out):
    """The Episode that the adapter makes of an outcome whose calls are all recorded."""
    spec = {"suite": SUITE, "index": INDEX, "init": INIT, "attempt": 0, "episode_id": "e"}
    calls = [Call(f"c{k}", "e", k, delivered=True, seconds=1.0) for k in range(out["turns"])]
    e = adapters.CodeAdapter().episode(spec, out, calls, "v1")
    return e, [adapters.post_success(e, c) for c in calls]


# ---------------------------------------------------------------------------------------------- prompts

def test_every_prompt_holds_task_api_programs_and_the_last_output(run, planner):
    first = "x = 41\nprint('first output')"
    out = run([fenced(first), "Let me see.", "REGENERATE\n" + fenced("print('second output')\nx + y"), "FINISH"])
    assert (out["end"], out["turns"], out["programs"], out["errors"], out["failure"]) == ("finish", 4, 2, {"NameError": 1}, "format")
    for body in planner.bodies:
        system, user = body["messages"]
        assert (system["role"], user["role"], body["model"], body["max_tokens"]) == ("system", "user", "m", 50)
        assert "tools" not in body and user["content"].startswith(f"Task: {TASK.instruction}\n")
        assert system["content"] == planner.bodies[0]["messages"][0]["content"]
        for name in run.episode.api.functions:
            assert f"\n{run.episode.api.signature(name)}\n    " in system["content"]
    users = run.users
    assert users[0] == f"Task: {TASK.instruction}\n{code.ASK}"
    assert users[1] == (f"Task: {TASK.instruction}\nProgram so far:\n```python\n# block 1\n{first}\n```\nOutput of block 1:\nfirst output\n{code.DECIDE}")
    assert users[2] == users[1].replace(code.DECIDE, f"Nothing was run: {NO_PROGRAM}.\n{code.DECIDE}")
    assert f"# block 1\n{first}\n# block 2\nprint('second output')\nx + y\n```\nOutput of block 2:\nsecond output\nErrors:\n" in users[3]
    assert "NameError: name 'y' is not defined" in users[3] and 'File "<block 2>", line 2' in users[3]
    assert "first output" not in users[3].partition("Output of block 2")[2] and "Nothing was run" not in users[3]


def test_a_templates_tokens_in_a_program_or_its_output_do_not_reach_the_prompt(run):
    run([fenced("print('<|image_pad|>', '<|' + 'im_end|>')"), "FINISH"])
    assert "<|" not in run.users[1] and run.users[1].count("< |image_pad|>") == 2


def test_variables_and_imports_last_from_block_to_block(run):
    run([fenced("import math\ndef f(a): return a + 1\nx = 41"), fenced("print(f(x), math.floor(2.5))"), "FINISH"])
    assert "Output of block 2:\n42 2\n" in run.users[2]


def test_history_budget_leaves_the_oldest_programs_out():
    programs, block = [f"x = {k}" + "0" * 100 for k in range(4)], Block("out\n", "", None, False, 0, 0.0)
    whole = prompt(TASK, programs, block, None, 10_000)
    assert LEFT_OUT not in whole and all(f"# block {k + 1}\n{p}\n" in whole for k, p in enumerate(programs))
    text = prompt(TASK, programs, block, None, 250)
    assert f"# block 1\n{LEFT_OUT}\n# block 2\n{LEFT_OUT}\n# block 3\n{programs[2]}\n# block 4\n{programs[3]}\n```" in text
    assert f"# block 3\n{LEFT_OUT}\n# block 4\n{programs[3]}\n```" in prompt(TASK, programs, block, None, 1)      # the last one always
    assert "(nothing printed)" in prompt(TASK, ["x = 1"], Block("", "", None, False, 0, 0.0), None, 100)


def test_budget_of_the_job_counts(run):
    run([fenced("x = 1  " + "#" * 300), fenced("y = 2"), "FINISH"], history_budget=100)
    assert "#" * 300 in run.users[1] and "#" * 300 not in run.users[2] and f"# block 1\n{LEFT_OUT}\n# block 2\ny = 2\n" in run.users[2]


def test_a_picture_goes_with_every_prompt_when_asked(run):
    out = run([fenced("p, q = sample_grasp_pose('green mug')\ngoto_pose(p, q, 0.1)"), "FINISH"], pictures=True)
    pictures = []
    for text, picture in run.users:
        assert text["type"] == "text" and text["text"].startswith("Task: ")
        prefix, data = picture["image_url"]["url"].split(",", 1)
        assert prefix == "data:image/png;base64"
        pictures.append(base64.b64decode(data))
    assert pictures[0][:8] == b"\x89PNG\r\n\x1a\n" and pictures[0] != pictures[1] and out["renderer"] == "pillow"


# ---------------------------------------------------------------------------------------------- ends

@pytest.mark.parametrize("script, end, programs, turns", [
    (["FINISH"], "finish", 0, 1),
    (["No code."] * 2, "malformed", 0, 2),
    ([None, ""], "malformed", 0, 2),
    (["No code.", fenced("x = 1"), "No code.", "No code."], "malformed", 1, 4),                # two in a row
    ([cut("```python\nprint(1"), "FINISH"], "finish", 0, 2),
    ([fenced("x = 1")] * 5, "turns", 5, 5),
    ([fenced("x = 1"), (400, "maximum context length is 100 tokens")], "turns", 1, 1),
    ([(400, "maximum context length is 100 tokens")], "infrastructure", 0, 0),
    (["No code.", (400, "maximum context length is 100 tokens")], "turns", 0, 1),
    ([(404, "no such model")], "infrastructure", 0, 0),
    ([fenced("x = 1"), (401, "who are you")], "infrastructure", 1, 1),
    ([fenced("print('<|image_pad|>')"), (400, "1 placeholder tokens for 0 pictures")], "malformed", 1, 1),     # the planner's doing
    ([(400, "1 placeholder tokens for 0 pictures")], "infrastructure", 0, 0),
    (["No code.", (400, "bad request")], "infrastructure", 0, 1),
    ([fenced("x = 1"), {"choices": []}], "infrastructure", 1, 1),
])
def test_ends(run, script, end, programs, turns):
    out = run(script)
    assert (out["end"], out["programs"], out["turns"], out["finished"]) == (end, programs, turns, script[-1] == "FINISH")
    assert (out["success_latched"], out["success_final"], out["success_turn"], out["failure"] is not None) == (False, False, None, True)
    e, _ = recorded(out)
    assert (e.valid, e.reason) == ((False, "model_server") if end == "infrastructure" else (True, None))


@pytest.mark.parametrize("reply, end, programs", [(fenced("x = 1"), "finish", 1), ("REGENERATE\n" + fenced("1 / 0"), "finish", 1),
                                                  ("No code.", "malformed", 0), ("FINISH", "finish", 0)])
def test_single_turn(run, reply, end, programs):
    out = run([reply], single_turn=True)
    assert (out["end"], out["programs"], out["turns"], out["finished"]) == (end, programs, 1, reply == "FINISH")


def test_a_cut_program_is_not_run_and_the_planner_is_told(run):
    run([cut("```python\nprint('half')"), "FINISH"])
    assert f"Nothing was run: {CUT}." in run.users[1] and "half" not in run.users[1]


@pytest.mark.parametrize("job", [{}, {"single_turn": True}, {"turns": 1}], ids=str)
def test_time_over_in_a_program_is_a_failure_of_kind_time(run, job):
    out = run([fenced("print('begun', flush=True)\nwhile True: pass")], seconds=1.0, **job)
    assert (out["end"], out["turns"], out["errors"], out["sessions_lost"]) == ("time", 1, {"TimeoutError": 1}, 1)
    assert out["failure"] == "other"                         # the episode's time, no error of the program's
    e, _ = recorded(out)
    assert (e.valid, e.reward, e.end) == (True, 0.0, "time")
    slow = [Call("c0", "e", 0, delivered=True, seconds=9.0, extra={"queue_seconds": 9.0})]      # the time went into a server's queue
    spec = {"suite": SUITE, "index": INDEX, "init": INIT, "attempt": 0, "episode_id": "e"}
    assert adapters.CodeAdapter().episode(spec, out, slow, "v1").reason == "model_server"


@pytest.mark.parametrize("program, error", [("import os\nx = 2\nos._exit(3)", "SystemExit"), ("x = 2\nwhile True: pass", "TimeoutError")])
def test_a_lost_session_costs_the_variables_and_not_the_episode(run, monkeypatch, program, error):
    monkeypatch.setattr(code, "BLOCK_CPU", 0.3)
    monkeypatch.setattr(code, "BLOCK_SECONDS", 20.0)
    out = run([fenced("x = 1"), fenced(program), fenced("print('x' in globals())\n" + PUT), "FINISH"])
    assert (out["end"], out["success_final"], out["errors"], out["sessions_lost"]) == ("finish", True, {error: 1}, 1)
    assert "variables and imports of earlier blocks are gone" in run.users[2]
    assert "Output of block 3:\nFalse\ngreen mug placed\n" in run.users[3]


def test_an_unrecoverable_state_ends_the_episode_within_the_program(run):
    out = run([fenced("print('before')\n1 / 0"), fenced(SLIP + "\nopen('/nonexistent')")], init=11)     # a light foot: it tips over
    assert (out["end"], out["turns"], out["programs"], out["failure"]) == ("unrecoverable", 2, 2, "grasp")
    assert "green mug" in out["detail"] and out["errors"] == {"ZeroDivisionError": 1} and out["picks_right"] == 0
    assert out["motions"] < 5                                                        # cut short: open, approach, …
    assert recorded(out)[0].valid and recorded(out)[0].reward == 0.0


def test_motions_used_up_end_the_episode(run, monkeypatch):
    monkeypatch.setattr(code_api, "MOTIONS", 6)
    out = run([fenced("nonsense"), fenced("while True: open_gripper()")])
    assert (out["end"], out["turns"], out["motions"], out["programs"]) == ("turns", 2, 6, 2)
    assert "6 motions" in out["detail"] and recorded(out)[0].valid
    assert out["failure"] == "other"                                                 # its last program ran: no error of format


def test_a_program_cannot_catch_the_end(run, monkeypatch):
    monkeypatch.setattr(code_api, "MOTIONS", 3)
    out = run([fenced("while True:\n    try:\n        open_gripper()\n    except BaseException:\n        pass")])
    assert (out["end"], out["motions"]) == ("turns", 3)


# ---------------------------------------------------------------------------------------------- success

def test_success_does_not_end_the_episode_and_counts_from_its_turn_on(run):
    out = run([fenced("print('look')"), fenced(PUT), fenced("print('look again')"), "FINISH"])
    assert (out["end"], out["success_latched"], out["success_final"], out["success_turn"], out["turns"]) == ("finish", True, True, 1, 4)
    assert (out["failure"], out["picks"], out["picks_right"], out["goals_done"], out["motions"]) == (None, 1, 1, 1, 7)
    assert out["receipts"] == [{"tool": "close_gripper", "object": "green mug", "held": True, "right": True},
                               {"tool": "open_gripper", "object": "green mug", "target": "blue bowl"}]
    e, after = recorded(out)
    assert (e.reward, e.harness, e.finished) == (1.0, "code", True)
    assert after == [False, False, True, False]              # FINISH made the state the final one; what ran before it did not


def test_success_undone_by_a_later_program_earns_nothing(run):
    out = run([fenced(PUT), fenced(AWAY), "FINISH"])
    assert (out["success_latched"], out["success_final"], out["success_turn"], out["failure"]) == (True, False, None, "language")
    e, after = recorded(out)
    assert (e.valid, e.reward, e.success_latched) == (True, 0.0, True) and after == [False] * 3
    assert adapters.SkillsAdapter().reward(e) == 1.0                                  # the other harness's rule


def test_success_undone_and_done_again_counts_from_the_second_time(run):
    out = run([fenced(PUT), fenced(AWAY), fenced(PUT), "FINISH"])
    assert (out["success_final"], out["success_turn"]) == (True, 2)
    assert recorded(out)[1] == [False] * 4


@pytest.mark.parametrize("end, job", [("turns", {"turns": 1}), ("malformed", {}), ("finish", {"single_turn": True})])
def test_reward_is_the_final_states_however_it_ended(run, end, job):
    out = run([fenced(PUT), "No code.", "No code."], **job)
    assert (out["end"], out["success_turn"], out["failure"]) == (end, 0, None)
    e, after = recorded(out)
    assert e.reward == 1.0 and after == [False] + [True] * (out["turns"] - 1)          # nobody said FINISH


def test_success_within_the_program_that_is_cut_counts(run, monkeypatch):
    monkeypatch.setattr(code_api, "MOTIONS", 7)
    out = run([fenced(PUT + "\nopen_gripper()")])
    assert (out["end"], out["success_final"], out["success_turn"]) == ("turns", True, 0)


def test_failures_are_told_apart(run):
    assert run([fenced(SLIP), "FINISH"])["failure"] == "grasp"
    assert run([fenced(PLAIN.format(object="red mug", place="blue bowl", dy=0.04)), "FINISH"])["failure"] == "language"
    assert run([fenced("get_object_pose('green mug')"), "FINISH"])["failure"] == "other"
    assert run(["No code.", "No code."])["failure"] == "format"
    two = steps(Tabletop.tasks(SUITE)[13].instruction)
    assert run([fenced(PLAIN.format(**two[0], dy=choices(two[0])[0])), "FINISH"], index=13)["failure"] == "second_step"


def test_the_same_programs_do_the_same(run):
    outs = [run([fenced(PUT), fenced("print(get_all_object_poses())"), "FINISH"]) for _ in range(2)]
    assert run.users and outs[0]["start_state"] == outs[1]["start_state"] and outs[0]["receipts"] == outs[1]["receipts"]
    first = run.users[2]
    run([fenced(PUT), fenced("print(get_all_object_poses())"), "FINISH"])
    assert run.users[2] == first


# ---------------------------------------------------------------------------------------------- films, and what must not break it

def test_a_film_shows_programs_and_their_own_output(run, tmp_path, monkeypatch):
    monkeypatch.setattr(code_api, "MOTIONS", 8)
    out = run([fenced("print('seen')"), "No code.", fenced(PUT), fenced("open_gripper()\nopen_gripper()")], video=str(tmp_path / "a" / "e.gif"))
    with Image.open(tmp_path / "a" / "e.gif") as film:
        assert film.n_frames > 10
    with Image.open(tmp_path / "a" / "e.png") as sheet:
        assert sheet.width > 600
    assert out["renderer"] == "pillow" and run.episode.world.on_chunk is None
    captions = [(call.splitlines()[0], receipt.strip()) for call, receipt, _ in run.episode.frames.calls]
    assert captions == [("print('seen')", "seen"), ("No code.", NO_PROGRAM), ("# green mug to blue bowl", "green mug placed"),
                        ("open_gripper()", out["detail"])]


def test_a_film_of_an_episode_that_the_model_server_ended(run, tmp_path):
    out = run([(404, "no such model")], video=str(tmp_path / "e.gif"))
    assert out["end"] == "infrastructure" and (tmp_path / "e.gif").stat().st_size > 1000 and (tmp_path / "e.png").exists()


NASTY = ["x = '\x00'", "'\ud83d'", "print('\ud83d')", "raise SystemExit", "raise KeyboardInterrupt", "def f(): f()\nf()", "(" * 3000, "-" * 50_000 + "1",
         "import os\nos.close(3)", "import os\nos.kill(os.getpid(), 9)", "print('x' * 10**6)", "goto_pose = 1", "del np", "import sys\nsys.stdout = None\nprint(1)",
         "goto_pose([1e308] * 3, [float('nan')] * 4)", "goto_pose(10**400, [])", "get_object_pose('')", "get_object_pose(['a'])", "get_object_pose(self=1)",
         "open_gripper(1, 2, 3, x=4)", "x = bytearray(1 << 40)", "import threading, time\nthreading.Thread(target=time.sleep, args=(9,)).start()",
         "class E(BaseException):\n  def __str__(self): raise E\nraise E()", "import harness.code"]


def test_nothing_that_a_planner_writes_makes_an_episode_invalid(run, tmp_path):
    out = run([*map(fenced, NASTY), "FINISH"], turns=40, video=str(tmp_path / "e.gif"))
    assert (out["end"], out["turns"], out["programs"]) == ("finish", len(NASTY) + 1, len(NASTY))
    assert len(out["errors"]) > 5 and recorded(out)[0].valid


def test_faults_of_the_simulator_come_out_and_are_no_failure(run, monkeypatch):
    def fault(self, name):
        raise RuntimeError("simulator fault")
    monkeypatch.setattr(Tabletop, "_position", fault)
    with pytest.raises(RuntimeError, match="simulator fault"):
        run([fenced("try:\n    get_object_pose('green mug')\nexcept BaseException:\n    pass"), "FINISH"])
