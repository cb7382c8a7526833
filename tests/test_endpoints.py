"""Models behind URLs: teacher, rewriter and judge, against a real HTTP server that misbehaves on purpose."""

import asyncio
import collections
import email.utils
import json
import subprocess
import sys
import threading
import time

import pytest
from aiohttp import web
from conftest import ROOT
from test_rewrite import NOTE, episode, play

import collect
import endpoint
import records
import rewrite
import serving
from evidence import Dependence, read_rewrite, read_verdict, rewrite_request, transcript
from harness.teacher import ScriptedTeacher
from upstream import UpstreamError


class Server:
    """A model server in a thread. `answer(body, n)` of the nth completion (from 0) -> text, (status, body, headers), a whole reply, or a
    coroutine of one of these."""

    def __init__(self, answer, models=("m",)):
        self.answer, self.models, self.bodies, self.keys = answer, models, [], []
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self.loop).result()

    async def _start(self):
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/chat/completions", self._completions)
        app.router.add_get("/v1/models", self._models)
        self.runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}/v1"

    async def _models(self, request):
        return web.json_response({"data": [{"id": m} for m in self.models]})

    async def _completions(self, request):
        body, n = await request.json(), len(self.bodies)
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization"))
        answer = self.answer(body, n)
        answer = await answer if asyncio.iscoroutine(answer) else answer
        if isinstance(answer, tuple):
            status, reply, headers = answer
            return web.json_response(reply, status=status, headers=headers)
        if isinstance(answer, str):
            answer = {"choices": [{"index": 0, "message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}],
                      "usage": {"prompt_tokens": 100, "completion_tokens": 7}}
        return web.json_response(answer)

    def close(self):
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()


@pytest.fixture
def serve():
    servers = []

    def serve(answer, **kw):
        servers.append(Server(answer, **kw))
        return servers[-1]
    yield serve
    for server in servers:
        server.close()


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a command in this process: (exit code, stdout, stderr)."""
    def run(module, *args):
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, args)])
        with pytest.raises(SystemExit) as end:
            records.run_main(module.main)
        return end.value.code, *capsys.readouterr()
    return run


def error(status, message="no", **headers):
    return status, {"error": {"message": message}}, headers


# ---------------------------------------------------------------------------------------------- rewriter and judge

def teacher_run(folder, n=2):
    """n whole episodes; in each, two responses lean on memory and may be rewritten, one has an argument that leans."""
    with records.JsonlWriter(folder / "calls.jsonl") as calls, records.JsonlWriter(folder / "episodes.jsonl") as episodes:
        for e in range(n):
            mine = play(f"e{e}")
            for c in mine:
                c.messages[1]["content"] += f" Table {e}."             # so that no two episodes ask the same
                calls.append(records.to_line(c))
            episodes.append(records.to_line(episode(f"e{e}", mine)))
    return folder


@pytest.fixture
def made(run, tmp_path, tiny_dir):
    """made(*options, output=, n=) runs rewrite.py -> (exit code, stdout, stderr, rows, report)."""
    def made(*options, output="out", n=2):
        teacher = tmp_path / f"teacher-{n}"
        if not teacher.exists():
            teacher_run(teacher, n)
        code, out, err = run(rewrite, "--teacher", teacher, "--student", tiny_dir, "--output", tmp_path / output, *options)
        rows = [r for _, r in records.read_jsonl(tmp_path / output / "sft.jsonl")] if code == 0 else []
        return code, out, err, rows, records.read_json(tmp_path / output / "rewrite-report.json") if code == 0 else {}
    return made


def asked(body):
    """The fields of the teacher's response in a rewriter's request."""
    return json.loads(body["messages"][1]["content"].split("Teacher's response:\n")[1].split("\n")[0])


def good(body, n=0):
    return json.dumps({k: f"The {k} that the student could write." for k in asked(body)})


def test_a_good_rewrite_becomes_the_target_and_tool_calls_stay_byte_for_byte(serve, made):
    writer, judge = serve(good), serve(lambda body, n: '```json\n{"accept": true, "reason": "fine"}\n```')
    code, out, err, rows, report = made("--rewriter", writer.url, "--judge", judge.url)
    assert code == 0, err
    rewritten = [r for r in rows if r["source"] == "rewritten"]
    assert [(r["episode_id"], r["turn"]) for r in rewritten] == [("e0", 2), ("e0", 6), ("e1", 2), ("e1", 6)]
    for r in rewritten:
        assert r["message"]["content"] == "The content that the student could write."
        original = next(c for c in play(r["episode_id"]) if c.turn == r["turn"]).message
        assert r["message"]["tool_calls"] == original["tool_calls"]
    assert rewritten[0]["message"]["reasoning"] == "The reasoning that the student could write."
    history = rewritten[1]["messages"]                                     # of a later call: the student's own words stand there
    assert [m["content"] for m in history if m.get("reasoning")] == ["The content that the student could write."]
    assert report["attempts"] == {"accepted": 4} and report["outcomes"]["history_only: argument"] == 2
    assert len(writer.bodies) == len(judge.bodies) == 4                    # the call whose argument leans was never sent
    for body in writer.bodies + judge.bodies:
        assert "approach from the left" not in json.dumps(body)            # nor is the removed text
        assert body["temperature"] == 0 and body["model"] == "m"
    paid = {"prompt_tokens": 400, "completion_tokens": 28, "without_usage": 0}
    cost = {"model": "m", "answers": 4, **paid, "this_command": {"calls": 4, "retries": 0, "failed": 0, **paid}}
    assert report["cost"] == {"rewriter": cost, "judge": cost} and "400 prompt + 28 completion tokens" in out


def test_a_refused_attempt_is_told_why_and_tried_again(serve, made):
    def answer(body, n):
        if len(body["messages"]) == 2:
            return json.dumps({k: "I grasp at dy 35 on a tray of 260 mm." for k in asked(body)})
        return good(body)
    server = serve(answer)
    code, _, err, rows, report = made("--rewriter", server.url, n=1)
    assert code == 0 and report["attempts"] == {"accepted": 2, "still_dependent": 2}, err
    assert sum(r["source"] == "rewritten" for r in rows) == 2
    again = [b["messages"][-1]["content"] for b in server.bodies if len(b["messages"]) == 4]
    assert len(again) == 2 and "number '35' in text" in again[0] and "Write the JSON object again" in again[0]


LEANS = json.dumps({"content": "Memory says so.", "reasoning": "The mug is red."})


@pytest.mark.parametrize("answer, verdict, text", [
    (LEANS, "still_dependent", None),
    ("I would rather not.", "rewrite_malformed", "no JSON object"),
    ('{"content": "I pick.", "reasoning"', "rewrite_malformed", "no JSON object"),
    ('{"content": "I pick."}', "rewrite_malformed", "expected text under the keys"),
    ('{"content": "I pick.", "reasoning": 7}', "rewrite_malformed", "expected text under the keys"),
    ('{"content": "<tool_call>{}</tool_call>", "reasoning": ""}', "rewrite_malformed", "<tool_call>"),
    ('{"content": "I pick.<|im_end|>", "reasoning": ""}', "rewrite_malformed", "<|im_end|>"),
    ('{"content": "\\ud800", "reasoning": ""}', "rewrite_malformed", "surrogates"),
    (json.dumps({"content": "I pick the mug up. " * 30, "reasoning": "Red."}), "rewrite_malformed", "keep about its length"),
    ('{"a":' * 100_000 + "1" + "}" * 100_000, "rewrite_malformed", "nested too deeply"),
    (json.dumps({"content": "I pick.", "reasoning": "Red.", "tool_calls": [
        {"id": "2.0", "type": "function", "function": {"name": "pick", "arguments": '{"x": 413, "y": -133}'}}]}), "tool_calls_changed", None),
])
def test_a_bad_rewrite_is_tried_three_times_and_then_history_only(serve, made, answer, verdict, text):
    server = serve(lambda body, n: answer if "reasoning" in asked(body) else good(body))
    code, _, err, rows, report = made("--rewriter", server.url, n=1)
    assert code == 0, err
    assert report["outcomes"][f"history_only: {verdict}"] == 1 and report["attempts"] == {"accepted": 1, verdict: 3}
    assert [r["turn"] for r in rows] == [1, 4, 6]
    assert rows[-1]["messages"][4]["content"] == "I pick up the red mug."              # what the rules leave of it
    assert rows[-1]["messages"][4]["tool_calls"][0]["function"]["arguments"] == '{"x": 412, "y": -133}'
    if text:
        assert any(text in b["messages"][-1]["content"] for b in server.bodies), server.bodies[1]["messages"][-1]


@pytest.mark.parametrize("answer, verdict", [('{"accept": false, "reason": "It adds a colour."}', "judge_refused"),
                                             ("yes", "judge_malformed"), ('{"accept": "true"}', "judge_malformed")])
@pytest.mark.parametrize("rewriter", ["rules", "model"])
def test_what_the_judge_does_not_accept_is_no_target(serve, made, answer, verdict, rewriter):
    writer, judge = serve(good), serve(lambda body, n: answer)
    options = ["--judge", judge.url] + (["--rewriter", writer.url, "--rewrite-attempts", 2] if rewriter == "model" else [])
    code, _, err, rows, report = made(*options, n=1)
    assert code == 0, err
    attempts = 4 if rewriter == "model" else 2                             # the rules would write the same again: one attempt each
    assert report["attempts"] == {verdict: attempts} and report["outcomes"][f"history_only: {verdict}"] == 2
    assert [r["source"] for r in rows] == ["kept", "kept"]
    if rewriter == "model" and verdict == "judge_refused":
        assert "It adds a colour." in writer.bodies[1]["messages"][-1]["content"]


def test_retry_after_is_honoured_and_retries_are_counted(serve, made, monkeypatch):
    monkeypatch.setattr(endpoint, "BACKOFF", 1e6)                          # without the header it would be given up
    server = serve(lambda body, n: error(429, "slow down", **{"Retry-After": "0"}) if n % 2 == 0 else good(body))
    code, _, err, _, report = made("--rewriter", server.url)
    assert code == 0, err
    paid = report["cost"]["rewriter"]["this_command"]
    assert (paid["calls"], paid["retries"], paid["failed"], paid["prompt_tokens"]) == (4, 4, 0, 400)


@pytest.mark.parametrize("said, seconds", [("7", 7), ("0.5", 0.5), (None, 8), ("soon", 8), (email.utils.formatdate(1), 0),
                                           ("in an hour", 3600), ("Mon, 01 Jan 99999 00:00:00 GMT", float("inf"))])
def test_wait_before_a_retry(said, seconds):
    said = email.utils.formatdate(time.time() + 3600) if said == "in an hour" else said     # not when the tests are collected
    assert endpoint.wait_before(3, UpstreamError(429, "x", retry_after=said)) == pytest.approx(seconds, abs=60 if seconds == 3600 else 0)


def test_an_endpoint_that_stays_down_is_exit_2_and_the_repeated_command_pays_only_for_the_rest(serve, made, monkeypatch, tmp_path):
    monkeypatch.setattr(endpoint, "BACKOFF", 0.0)
    healthy = [True]
    server = serve(lambda body, n: good(body) if n < 3 or healthy == ["again"] else error(500, "out of memory"))
    options = ["--rewriter", server.url, "--concurrency", 1]
    code, out, err, _, _ = made(*options)
    assert code == 2 and [line for line in err.splitlines() if line.startswith("error:")] == err.strip().splitlines()[-1:], err
    assert "upstream 500: out of memory" in err and "answers.jsonl" in err and "paid 3 calls (4 retries, 1 failed)" in out
    assert not any((tmp_path / "out" / name).exists() for name in ("sft.jsonl", "manifest.json", "rewrite-report.json"))
    assert len(server.bodies) == 3 + endpoint.TRIES
    healthy[:] = ["again"]
    code, _, err, rows, report = made(*options)
    assert code == 0 and len(server.bodies) == 3 + endpoint.TRIES + 1, err
    assert report["cost"]["rewriter"]["answers"] == 4 and report["cost"]["rewriter"]["this_command"]["calls"] == 1
    assert rows == made("--rewriter", server.url, output="fresh")[3]


def test_a_server_that_is_not_there_or_refuses_is_one_line(serve, made, monkeypatch):
    monkeypatch.setattr(endpoint, "BACKOFF", 0.0)
    code, _, err, _, _ = made("--rewriter", "http://127.0.0.1:9/v1")
    assert code == 2 and "no model server at http://127.0.0.1:9/v1" in err
    code, _, err, _, _ = made("--rewriter", "http://127.0.0.1:9/v1", "--rewriter-model", "m")
    assert code == 2 and "upstream connection" in err
    server = serve(lambda body, n: error(401, "Incorrect API key provided"))
    code, _, err, _, _ = made("--judge", server.url, "--concurrency", 1)
    assert code == 2 and "Incorrect API key provided" in err and len(server.bodies) == 1         # a 4xx is not sent again
    many = serve(good, models=("a", "b"))
    code, _, err, _, _ = made("--rewriter", many.url)
    assert code == 2 and "offers 2 models ['a', 'b']" in err
    code, _, err, _, _ = made("--rewriter", "gpt")
    assert code == 2 and "expected rules or a URL" in err


def test_a_request_that_does_not_fit_costs_its_response_and_not_the_run(serve, made):
    server = serve(lambda body, n: error(400, "This model's maximum context length is 10 tokens") if "reasoning" in asked(body) else good(body))
    code, _, err, rows, report = made("--rewriter", server.url, n=1)
    assert code == 0 and report["outcomes"]["history_only: request_too_long"] == 1 and [r["turn"] for r in rows] == [1, 4, 6], err


def test_a_repeated_command_and_the_mask_arm_pay_nothing(serve, made, tmp_path):
    server = serve(good)
    _, _, _, rows, first = made("--rewriter", server.url, "--judge", "rules")
    paid, data = len(server.bodies), (tmp_path / "out" / "sft.jsonl").read_bytes()
    code, out, _, _, again = made("--rewriter", server.url)
    assert code == 0 and len(server.bodies) == paid == 4 and (tmp_path / "out" / "sft.jsonl").read_bytes() == data
    assert again["cost"]["rewriter"] == {**first["cost"]["rewriter"], "this_command": dict(endpoint.nothing_paid())}
    code, _, _, masked, _ = made("--rewriter", server.url, "--mode", "mask", "--answers", tmp_path / "out" / "answers.jsonl", output="mask")
    assert code == 0 and len(server.bodies) == paid
    assert masked == [r for r in rows if r["source"] == "kept"]             # history, too, is that of the other arm
    lines = (tmp_path / "out" / "answers.jsonl").read_bytes()
    (tmp_path / "out" / "answers.jsonl").write_bytes(lines[:-20])           # a kill in the middle of a line: that answer is paid again
    code, _, err, _, _ = made("--rewriter", server.url)
    assert code == 0 and len(server.bodies) == paid + 1 and "truncated last line" in err
    assert (tmp_path / "out" / "sft.jsonl").read_bytes() == data


def test_two_commands_do_not_share_a_file_of_answers_at_a_time(serve, made, tmp_path):
    server = serve(good)
    with endpoint.Answers(tmp_path / "a.jsonl", {"rewriter": (server.url, "")}, 64, 10):
        code, _, err, _, _ = made("--rewriter", server.url, "--answers", tmp_path / "a.jsonl")
    assert code == 2 and "another process" in err


def test_the_order_of_rows_does_not_depend_on_the_order_of_answers(serve, made, tmp_path):
    others, done = [], asyncio.Event()

    async def answer(body, n):
        if "Table 0" in body["messages"][1]["content"]:
            await done.wait()                                              # the first episode is answered last
        else:
            others.append(n)
            if len(others) == 6:
                done.set()
        return good(body)
    server = serve(answer)
    assert made("--rewriter", server.url, "--concurrency", 4, n=4)[0] == 0
    assert made("--rewriter", server.url, "--concurrency", 1, output="one", n=4)[0] == 0
    assert (tmp_path / "out" / "sft.jsonl").read_bytes() == (tmp_path / "one" / "sft.jsonl").read_bytes()


def test_the_same_question_is_paid_for_once(serve, tmp_path):
    release, count = asyncio.Event(), []

    async def answer(body, n):
        await release.wait()
        return "yes"
    server = serve(answer)
    with endpoint.Answers(tmp_path / "a.jsonl", {"judge": (server.url, "")}, 64, 10) as answers:
        threads = [threading.Thread(target=lambda: count.append(answers.ask("judge", [{"role": "user", "content": "?"}]))) for _ in range(4)]
        for t in threads:
            t.start()
        server.loop.call_soon_threadsafe(release.set)
        for t in threads:
            t.join()
    assert count == [("yes", None)] * 4 and len(server.bodies) == 1 and answers.cost()["judge"]["answers"] == 1


def test_sigkill_while_models_answer_and_the_same_command_continues(serve, made, run, tmp_path, tiny_dir):
    third, hold = threading.Event(), asyncio.Event()

    async def answer(body, n):
        if n == 2:
            third.set()
            await hold.wait()
        return good(body)
    server = serve(answer)
    teacher_run(tmp_path / "teacher-2")
    process = subprocess.Popen([sys.executable, ROOT / "rewrite.py", "--teacher", tmp_path / "teacher-2", "--student", tiny_dir, "--output",
                                tmp_path / "out", "--rewriter", server.url, "--concurrency", "1"], stdout=subprocess.DEVNULL)
    assert third.wait(60)
    process.kill()
    process.wait()
    assert not (tmp_path / "out" / "sft.jsonl").exists() and (tmp_path / "out" / "answers.jsonl").read_bytes().count(b"\n") == 2
    server.loop.call_soon_threadsafe(hold.set)
    code, _, err, _, report = made("--rewriter", server.url)
    assert code == 0 and len(server.bodies) == 5 and report["cost"]["rewriter"]["this_command"]["calls"] == 2, err


def test_what_a_rewriter_reads():
    d = Dependence([NOTE], [NOTE], ["x 412"])
    message = {"role": "assistant", "content": "", "reasoning": "Memory says dy 35.", "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "pick", "arguments": '{"x":  412}'}}]}
    context = [{"role": "user", "content": [{"type": "text", "text": "Task"}, {"type": "image", "sha256": "00"}]}, {**message, "reasoning": "Old."}]
    assert transcript(context) == '[user]\nTask\n\n[assistant]\n(reasoning) Old.\n(calls pick with {"x":  412})'
    chat = rewrite_request(message, d, context, [])
    assert 'pick {"x":  412}' in chat[1]["content"] and chat[1]["content"].endswith("word 'Memory' in reasoning; number '35' in reasoning")
    assert read_rewrite('<think>{"a"}</think> Sure: {"reasoning": "Red."}', message) == {**message, "reasoning": "Red."}
    assert read_verdict('{"accept": false, "reason": "no"}') == (False, "no")


# ---------------------------------------------------------------------------------------------- teacher

STRICT = {"model", "messages", "tools", "tool_choice", "parallel_tool_calls", "temperature", "top_p", "presence_penalty", "frequency_penalty",
          "seed", "max_completion_tokens", "stop", "response_format", "n", "stream"}


def scripted(strict=True, fault=None):
    """A teacher over HTTP that plays the scripted one. strict: 400 for a field that is not OpenAI's; fault(n) -> an error or None."""
    teacher = ScriptedTeacher()

    async def answer(body, n):
        if strict and (unknown := set(body) - STRICT):
            return error(400, f"Unrecognized request arguments supplied: {sorted(unknown)}")
        if fault and (wrong := fault(n)):
            return wrong
        return {**await teacher.chat(body), "usage": {"prompt_tokens": 50, "completion_tokens": 5, "total_tokens": 55}}
    return answer


COLLECT = ["--suites", "tabletop_base", "--tasks", "0-2", "--inits", "100", "--workers", 1, "--concurrency", 3, "--output"]


def test_a_model_as_teacher_explores_writes_memory_and_solves_tasks(serve, run, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setattr(endpoint, "BACKOFF", 0.0)
    faults = {3: error(429, "slow", **{"Retry-After": "0"}), 5: error(503), 20: error(500)}
    a, b = (serve(scripted(fault=lambda n: faults.get(n))) for _ in range(2))
    code, out, err = run(collect, *COLLECT, tmp_path, "--teacher", f"{a.url},{b.url}")
    assert code == 0, err
    for folder, stage in ((tmp_path / "explore", "explore"), (tmp_path, "collect")):
        counts = records.read_json(folder / "manifest.json")["counts"]
        assert counts["successes"] == 3 and counts["calls"] == counts["engine"]["calls"] == counts["proxy"]["calls"]
        assert counts["engine"]["prompt_tokens"] == 50 * counts["calls"] and counts["engine"]["completion_tokens"] == 5 * counts["calls"]
        assert f"{stage}: teacher m: {counts['calls']} calls ({counts['engine']['retries']} retries" in out
    retried = sum(n in faults for s in (a, b) for n in range(len(s.bodies)))
    assert retried == sum(records.read_json(f / "manifest.json")["counts"]["engine"]["retries"] for f in (tmp_path, tmp_path / "explore"))
    assert retried >= 2 and "3 of 3 tasks is written" in out
    calls = list(records.read_calls(tmp_path / "calls.jsonl"))
    assert all(c.sampling.items() >= records.TRAIN_SAMPLING.items() and c.delivered and c.policy_version == "teacher" for c in calls)
    reads = [c for c in calls if c.message["tool_calls"][0]["function"]["name"] == "memory_read"]
    assert len(reads) >= 3 and any("In the first state I found" in json.dumps(c.messages) for c in calls)
    body = a.bodies[0]
    assert body["temperature"] == 1.0 and body["max_completion_tokens"] == 8192 and 0 <= body["seed"] < 2**53
    assert set(a.keys + b.keys) == {"Bearer secret"}
    homes = collections.defaultdict(set)
    for k, server in enumerate((a, b)):
        for body in server.bodies:
            homes[next(m["content"] for m in body["messages"] if m["role"] == "user"), len(body["tools"])].add(k)
    assert len(homes) == 6 and a.bodies and b.bodies
    assert sum(len(servers) == 2 for servers in homes.values()) <= retried               # an episode leaves its server for a retry alone


def test_the_vllm_api_sends_every_field_and_a_strict_server_refuses_them_in_one_line(serve, run, tmp_path):
    server = serve(scripted())
    one = ["--suites", "tabletop_base", "--tasks", "0", "--inits", "100", "--workers", 1, "--no-memory", "--retries", 0, "--output"]
    code, _, err = run(collect, *one, tmp_path / "a", "--teacher", server.url, "--teacher-api", "vllm")
    assert code == 2 and "Unrecognized request arguments" in err and "min_p" in err
    assert len(server.bodies) == 1                                          # a 400 is sent once
    lenient = serve(scripted(strict=False))
    code, _, err = run(collect, *one, tmp_path / "b", "--teacher", lenient.url, "--teacher-api", "vllm", "--sampling", "eval")
    assert code == 0 and lenient.bodies[0]["top_k"] == 20 and lenient.bodies[0]["return_token_ids"] is True, err
    code, _, err = run(collect, *one, tmp_path / "c", "--teacher", lenient.url, "--sampling", "eval")
    assert code == 2 and "top_k=20, which the OpenAI API does not take" in err


def test_a_teacher_that_stays_down_is_infrastructure_and_never_a_failure(serve, run, tmp_path, monkeypatch):
    monkeypatch.setattr(endpoint, "BACKOFF", 0.0)
    server = serve(lambda body, n: error(500, "boom"))
    code, out, err = run(collect, "--suites", "tabletop_base", "--tasks", "0", "--inits", "100", "--workers", 1, "--no-memory", "--retries", 0,
                         "--output", tmp_path, "--teacher", server.url, "--teacher-model", "m")
    assert code == 2 and "boom" in err and not (tmp_path / "manifest.json").exists()
    e, = records.read_episodes(tmp_path / "episodes.jsonl")
    assert (e.valid, e.reward, e.reason) == (False, None, "model_server")
    assert len(server.bodies) == 3 * endpoint.TRIES and "0 calls (12 retries, 3 failed)" in out      # the harness asks three times
    code, _, err = run(collect, *COLLECT, tmp_path / "x", "--teacher", "http://127.0.0.1:9/v1")
    assert code == 2 and "no model server at http://127.0.0.1:9/v1" in err.strip().splitlines()[-1]


def test_a_checkpoint_as_teacher_is_served_once_for_exploration_and_collection(run, tmp_path, tiny_dir, monkeypatch):
    made, closed, make = [], [], serving.make_upstream

    def counted(args):
        upstream = make(args)
        close = upstream.close

        async def noted():
            closed.append(len(made))
            await close()
        monkeypatch.setattr(upstream, "close", noted)
        made.append(upstream)
        return upstream
    monkeypatch.setattr(serving, "make_upstream", counted)
    code, out, err = run(collect, *COLLECT, tmp_path, "--teacher", "model", "--model", tiny_dir, "--turns", 2, "--max-tokens", 8)
    assert code == 0, err
    assert len(made) == 1 and closed == [1] and "0 of 3 tasks is written" in out
    counts = [records.read_json(f / "manifest.json")["counts"] for f in (tmp_path / "explore", tmp_path)]
    assert all(c["engine"]["calls"] == c["calls"] > 0 and c["engine"]["completion_tokens"] > 0 for c in counts)
    assert counts[1]["policy_version"] == records.policy_version(tiny_dir)
    (tmp_path / "STOP").touch()
    (tmp_path / "explore" / "episodes.jsonl").unlink()
    code, _, _ = run(collect, *COLLECT, tmp_path, "--teacher", "model", "--model", tiny_dir, "--turns", 2, "--max-tokens", 8)
    assert len(made) == len(closed) == 2                                    # closed, whatever way the command ends


@pytest.mark.parametrize("options, words", [
    (["--slots", "9"], "--slots 9: --teacher scripted does not honour it"), (["--model", "x"], "--model x: --teacher scripted"),
    (["--teacher", "http://127.0.0.1:9/v1", "--engine-url", "http://a"], "--engine-url http://a: --teacher http://127.0.0.1:9/v1 does not"),
    (["--teacher", "model"], "--model names its checkpoint"), (["--teacher", "gpt"], "expected 'scripted', 'model' or URLs"),
    (["--teacher", "model", "--model", "nowhere"], "not a checkpoint folder")])
def test_options_that_another_kind_of_teacher_takes_are_refused(run, tmp_path, options, words):
    code, _, err = run(collect, *COLLECT, tmp_path, *options)
    assert code == 2 and words in err, err
