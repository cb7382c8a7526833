"""Skills harness: ends of an episode, history rewriting, memory tools, malformed calls, retries of the client. A fake world and planner."""

import copy
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest

from harness.chat import ChatClient, ModelServerError
from harness.skills import recorded, CALL_UNREAD, Episode, rewrite_history
from harness.world import Receipt, Skill, Task, World


class ToyWorld(World):
    """One skill, push(n): n = 3 succeeds, n = 9 breaks the world, n = 7 raises."""
    name = "toy"
    skills = (Skill("push", "Push n times.", {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}, "push"),)

    @classmethod
    def tasks(cls, suite):
        return [Task("toy", 0, "Push three times.", (("in", "a", "b"),))]

    def reset(self, task, init):
        self.task, self.n, self.latched = task, 0, False

    def state_hash(self):
        return "h0"

    def push(self, n):
        if n == 7:
            raise RuntimeError("simulator fault")
        self.n = n
        return Receipt(True, "Pushed " + "far " * 40, {"event": "pushed"})

    def success(self):
        self.latched |= self.n == 3
        return self.n == 3

    def unrecoverable(self):
        return "it broke" if self.n == 9 else None

    def objects(self):
        return [{"name": "a", "x": 1, "y": 2, "z": 3}]


def call(name, **arguments):
    return {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}]}


@pytest.fixture
def planner():
    """A server that answers from `script`: messages, or (status, text) for an error. Keeps the bodies and retry headers it got."""
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.server.bodies.append(json.loads(body))
            self.server.retries.append(self.headers["x-stainless-retry-count"])
            answer = self.server.script.pop(0)
            status, data = (200, {"choices": [{"message": answer}]}) if isinstance(answer, dict) else (answer[0], {"error": {"message": answer[1]}})
            data = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.script, server.bodies, server.retries = [], [], []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def run(planner, script, **job):
    planner.script[:] = copy.deepcopy(script)
    base = {"episode_id": "e", "base_url": f"http://127.0.0.1:{planner.server_port}/v1", "suite": "toy", "index": 0, "init": 1, "model": "m",
            "max_tokens": 50, "turns": 5, "seconds": 60, "history_budget": 100_000, "pictures": False, "request_timeout": 5,
            "memory": None, "memory_write": False}
    return Episode(ToyWorld(), {**base, **job}).run()


@pytest.mark.parametrize("script, end, success, turn", [
    ([call("push", n=3), call("finish", status="success")], "finish", True, 0),
    ([call("push", n=1), call("push", n=3), call("push", n=1), call("finish", status="x")], "finish", True, 1),
    ([call("finish", status="success")], "finish", False, None),                          # a false finish is an honest failure
    ([{"role": "assistant", "content": "I am done."}], "text", False, None),
    ([call("push", n=1)] * 5, "turns", False, None),
    ([call("push", n=9)], "unrecoverable", False, None),
    ([call("push", n="three"), call("pull", n=1)], "malformed", False, None),
    ([{"role": "assistant", "content": "<tool_call>{oops"}] * 2, "malformed", False, None),
    ([(400, "maximum context length is 100 tokens")], "infrastructure", False, None),      # the first prompt is the harness's own
    ([call("push", n=1), (400, "maximum context length is 100 tokens")], "turns", False, None),
    ([call("push", n=1), (400, "Invalid chat template: 'context' is undefined")], "infrastructure", False, None),
])
def test_ends(planner, script, end, success, turn):
    out = run(planner, script)
    assert (out["end"], out["success_latched"], out["success_turn"]) == (end, success, turn)
    assert out["start_state"] == "h0" and out["turns"] == sum(isinstance(s, dict) for s in script)


def test_one_malformed_call_is_answered_and_forgiven(planner):
    out = run(planner, [call("push", n="x"), call("push", n=3), {"role": "assistant", "content": "<tool_call>{"}, call("finish", status="success")])
    assert out["end"] == "finish" and out["success_latched"]
    texts = [m.get("content") for m in planner.bodies[-1]["messages"]]
    assert any("Bad arguments for push" in (t or "") for t in texts) and CALL_UNREAD in texts


@pytest.mark.parametrize("arguments", ['{"n": "\\ud800"}', '{"n": ' + "[" * 2000 + "]" * 2000 + "}", '{"n": 3'])
def test_arguments_that_no_server_or_parser_takes_are_the_planners_malformed_call(planner, arguments):
    bad = call("push", n=1)
    bad["tool_calls"][0]["function"]["arguments"] = arguments
    out = run(planner, [bad, bad])
    assert out["end"] == "malformed" and out["failure"] == "format" and out["turns"] == 2
    reply, receipt = planner.bodies[1]["messages"][-2:]
    assert "The arguments of push are no JSON." in receipt["content"] and receipt["content"].encode()
    assert reply["tool_calls"][0]["function"] == {"name": "push", "arguments": "{}"}         # what a server can render
    assert run(planner, [bad, call("push", n=3), call("finish", status="success")])["success_latched"]        # forgiven once


def test_a_clock_that_jumps_changes_no_episodes_seconds(planner, monkeypatch):
    jumps = iter(range(10**9, 0, -10**4))
    monkeypatch.setattr(time, "time", lambda: next(jumps))                        # the module's own, which harness/skills.py uses
    out = run(planner, [call("push", n=3), call("finish", status="success")], seconds=60)
    assert out["end"] == "finish" and 0 <= out["seconds"] < 60


def test_final_and_latched_differ_when_success_is_undone(planner):
    out = run(planner, [call("push", n=3), call("push", n=1), call("finish", status="success")])
    assert out["success_latched"] and not out["success_final"] and out["success_turn"] == 0


def test_only_the_first_of_parallel_calls_runs(planner):
    both = call("push", n=1)
    both["tool_calls"].append({"id": "c2", "type": "function", "function": {"name": "push", "arguments": '{"n": 3}'}})
    out = run(planner, [both, call("finish", status="failure")])
    assert not out["success_latched"]
    replies = [m for m in planner.bodies[1]["messages"] if m["role"] == "tool"]
    assert [m["tool_call_id"] for m in replies] == ["c1", "c2"] and "Not run" in replies[1]["content"]


def test_server_errors_are_sent_again_byte_for_byte_then_infrastructure(planner):
    out = run(planner, [(500, "x"), call("push", n=3), (503, "y"), call("finish", status="success")])
    assert out["end"] == "finish" and planner.retries == ["0", "1", "0", "1"] and planner.bodies[0] == planner.bodies[1]
    out = run(planner, [(500, "x")] * 3)
    assert out["end"] == "infrastructure" and "HTTP 500" in out["detail"]
    with pytest.raises(ModelServerError, match="HTTP 404"):
        planner.script[:] = [(404, "no such model")]
        ChatClient(f"http://127.0.0.1:{planner.server_port}/v1", 5).chat({})


def test_simulator_exceptions_come_out(planner):
    with pytest.raises(RuntimeError, match="simulator fault"):
        run(planner, [call("push", n=7)])


def test_facts_are_recorded_as_plain_json_to_a_tenth_of_a_millimetre():
    facts = {"pos": np.array([0.123456, -1.0]), "n": np.int64(3), "ok": np.bool_(True), "far": np.float32(0.5), "lift": 0.00016, "held": None,
             "name": "red mug", "limits": (0.25, 0.123449)}
    plain = recorded(facts)
    assert plain == {"pos": [0.1235, -1.0], "n": 3, "ok": True, "far": 0.5, "lift": 0.0002, "held": None, "name": "red mug", "limits": [0.25, 0.1234]}
    assert json.loads(json.dumps(plain)) == plain and isinstance(facts["pos"], np.ndarray)        # the world keeps its own
    with pytest.raises((TypeError, AttributeError)):                                                # the worker tells it as a crash
        recorded({"thing": object()})


OPEN_AND_PUT = (("open", "top drawer"), ("in", "bowl", "top drawer"))


@pytest.mark.parametrize("goal, events, failure, done", [
    (OPEN_AND_PUT, [], "other", 0),
    (OPEN_AND_PUT, [("open", "opened", "top drawer", None)], "second_step", 1),
    (OPEN_AND_PUT, [("open", "opened", "bottom drawer", None)], "language", 0),                    # another drawer
    (OPEN_AND_PUT, [("open", "missed", "bottom drawer", None)], "other", 0),                       # tried in vain: nothing was turned
    (OPEN_AND_PUT, [("release", "opened", None, None)], "other", 0),                               # the empty hand is no drawer
    (OPEN_AND_PUT, [("pick", "no_handle", "bowl", None)], "grasp", 0),
    (OPEN_AND_PUT, [("pick", "held", "bowl", None), ("place", "placed", "bowl", "plate")], "language", 0),
    (OPEN_AND_PUT, [("pick", "slip", "bowl", None)], "grasp", 0),
    (OPEN_AND_PUT, [("pick", "slip", "plate", None)], "language", 0),
    ((("in", "bowl", "top drawer"),), [("open", "opened", "top drawer", None)], "other", 0),       # a help on the way, no goal of its own
    ((("on", "plate", "stove front"),), [("push", "pushed", "plate", "stove front")], "other", 1),
    ((("on", "plate", "stove front"),), [("push", "pushed", "bowl", "stove front")], "language", 0),
    ((("turnon", "stove"),), [("turn", "turned", "stove", None)], "other", 1),
])
def test_what_a_failed_episode_failed_on(goal, events, failure, done):
    episode = Episode.__new__(Episode)
    episode.events = [{"tool": tool, "ok": event in ("opened", "held", "placed", "pushed", "turned"), "event": event, "object": thing,
                       **({"target" if tool == "push" else "container": where} if where else {})} for tool, event, thing, where in events]
    told = episode._summary(Task("toy", 0, "", goal), "finish", False)
    assert (told["failure"], told["goals_done"]) == (failure, done) and told["receipts"] == episode.events
    assert told["picks"] == sum(tool == "pick" for tool, *_ in events) and told["picks_right"] == sum(e[:2] == ("pick", "held") for e in events)
    assert episode._summary(Task("toy", 0, "", goal), "finish", True)["failure"] is None
    assert episode._summary(Task("toy", 0, "", goal), "malformed", False)["failure"] == "format"


def test_the_student_sees_no_memory_and_the_teacher_writes_and_reads_it(planner, tmp_path):
    run(planner, [call("finish", status="success")])
    tools = [t["function"]["name"] for t in planner.bodies[0]["tools"]]
    assert tools == ["push", "look", "finish"] and "memory" not in json.dumps(planner.bodies[0])
    memory = str(tmp_path / "memory")
    run(planner, [call("memory_write", text="push thrice"), call("finish", status="success")], memory=memory, memory_write=True)
    run(planner, [call("memory_read", scope="task"), call("memory_read", scope="global"), call("finish", status="success")], memory=memory)
    texts = [m["content"] for m in planner.bodies[-1]["messages"] if m["role"] == "tool"]
    assert "push thrice" in texts[0] and "Nothing is written there" in texts[1]
    assert "[memory]" in planner.bodies[-1]["messages"][0]["content"]
    assert "memory_write" not in [t["function"]["name"] for t in planner.bodies[-1]["tools"]]


def long_history():
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    for k in range(8):
        messages += [{"role": "assistant", "content": None, "reasoning": f"because {k}", "tool_calls": []},
                     {"role": "tool", "tool_call_id": "c", "content": f"Task: t.\n{k} " + "x" * 200},
                     {"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"data:{k}"}}]}]
    return messages


def test_history_is_left_alone_under_its_budget_and_edited_above_it():
    messages = long_history()
    assert rewrite_history(messages, 10**6) is messages
    before = copy.deepcopy(messages)
    out = rewrite_history(messages, 5000)
    assert messages == before and len(out) == len(messages)                       # never in place, no message lost
    pictures = [p for m in out if isinstance(m.get("content"), list) for p in m["content"]]
    assert [p["type"] for p in pictures] == ["text"] * 6 + ["image_url"] * 2
    outputs = [m["content"] for m in out if m["role"] == "tool"]
    assert all(o.endswith("[shortened]") and len(o) < 85 and o.startswith("Task: t.\n") for o in outputs[:4]) and all(len(o) > 200 for o in outputs[4:])
    assert [m.get("reasoning") for m in out if m["role"] == "assistant"] == [None] * 7 + ["because 7"]
    assert rewrite_history(out, 5000) == out                                      # editing twice changes nothing more


def test_short_episodes_are_append_only_and_long_ones_are_not(planner):
    script = [call("push", n=1)] * 6 + [call("finish", status="x")]
    run(planner, script, turns=10)
    bodies = planner.bodies
    assert all(a["messages"] == b["messages"][:len(a["messages"])] for a, b in zip(bodies, bodies[1:], strict=False))
    planner.bodies.clear()
    run(planner, script, turns=10, history_budget=600)
    assert planner.bodies[-2]["messages"] != planner.bodies[-1]["messages"][:len(planner.bodies[-2]["messages"])]
