"""What breaks around the recording proxy, one test each, with the promised outcome.

The promise: the call is on disk with what went wrong; the client gets an HTTP status that its library understands; the same bytes sent
again are the same turn (and seed), not a second one; records.call_problem() refuses whatever is not whole, and rl.py trains on no call
that it refuses. Faults of workers and of whole runs are in test_adapters.py.
"""

import asyncio
import base64
import errno
import fcntl
import json
import math
import resource
import signal
import subprocess
import time

import aiohttp
import openai
import pytest
import requests
from aiohttp import web

import records
from conftest import ROOT
from fakes import MESSAGES, Fake, ask, client, post, png, recorded, reply, run, serve_model, turns
from proxy import HttpUpstream, Proxy, UpstreamError


@pytest.fixture
def launch(python):
    """Starts a standalone proxy process on a folder -> (process, url), once it says that it listens; ends it with the test."""
    processes = []

    def start(base, out, *arguments):
        command = [*python, str(ROOT / "proxy.py"), "--upstream", base, "--out", str(out), "--port", "0", *arguments]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        while not (line := processes[-1].stdout.readline()).startswith("proxy: http"):
            assert line, processes[-1].stderr.read()
        return processes[-1], line.split("/ep/")[0].removeprefix("proxy: ")

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def choice(**changes):
    """A step of a Fake: the usual reply, its choice changed."""
    def step(body):
        answer = reply(body)
        answer["choices"][0].update(changes)
        return answer
    return step


def logprobs(*values):
    return choice(logprobs={"content": [{"token": "t", "logprob": value} for value in values]})


def doubled(body):
    answer = reply(body)
    return {**answer, "choices": answer["choices"] * 2}


# ---------------------------------------------------------------------------------------------- replies that are not what they should be

@pytest.mark.parametrize("step, status, error", [
    ({"choices": []}, 502, "0 choices, expected 1"), (doubled, 502, "2 choices, expected 1"),
    ({"choices": [{"message": None}]}, 502, "malformed"), ([1], 502, "malformed"), (choice(logprobs={"content": [None]}), 502, "malformed"),
    (choice(token_ids=["1", "2", "3"]), 502, "malformed reply (ValidationError: Expected"), (choice(token_ids={"a": 1}), 502, "malformed reply (ValidationError: Expected"),
    (lambda body: reply(body, prompt_token_ids="123"), 502, "malformed reply (ValidationError: Expected"), (logprobs("x", -1, -1), 502, "malformed"),
    (choice(finish_reason="abort"), 503, "finish_reason abort"), (ValueError("a bug"), 502, "exception: ValueError: a bug"),
    (TimeoutError(), 504, "timeout")])
def test_a_reply_that_breaks_the_protocol_is_an_error_and_the_next_try_is_the_same_turn(tmp_path, step, status, error):
    async def test(proxy, url):
        assert [(await post(url, {"messages": MESSAGES}))[0] for _ in range(2)] == [status, 200]

    first, second = run(test, Fake(step), tmp_path)          # reading them back is part of the promise: one bad line ends a training run
    assert first.error.startswith("upstream ") and error in first.error and not first.delivered
    assert records.call_problem(first) == f"error: {first.error}" and records.call_problem(second) is None
    assert (first.turn, second.turn) == (0, 0) and first.sampling["seed"] == second.sampling["seed"]
    assert second.extra["retry_of"] == first.call_id


@pytest.mark.parametrize("step, problem", [
    (lambda body: {"choices": [{"message": {"role": "assistant", "content": "hi"}}]}, "no prompt token ids"),
    (choice(logprobs=None), "3 token ids but 0 logprobs"), (choice(token_ids=[1, 2]), "2 token ids but 3 logprobs"),
    (choice(token_ids=[]), "empty response"), (choice(token_ids=None), "empty response"),
    (logprobs(-0.1, -9999.0, -0.1), "log-prob -9999.0"), (logprobs(-0.1, None, -0.1), "log-prob None"),
    (logprobs(math.nan, -0.1, -0.1), "log-prob None"), (logprobs(0.5, -0.1, -0.1), "log-prob 0.5")])
def test_a_reply_without_sound_ids_and_logprobs_serves_the_harness_and_is_never_trained_on(tmp_path, step, problem):
    async def test(proxy, url):
        assert (await ask(url)).choices[0].message.content in ("ok", "hi")

    [call] = run(test, Fake(step), tmp_path)
    assert call.delivered and call.error is None and records.call_problem(call) == problem


# ---------------------------------------------------------------------------------------------- a model server that fails, over HTTP

HTTP_FAULTS = {  # what the server does -> the client's status, and how the recorded error begins
    "400": (400, "upstream 400: maximum context length is 9"), "429": (429, "upstream 429: status 429"),
    "500": (502, "upstream 500: status 500"), "503": (503, "upstream 503: status 503"), "html": (502, "upstream 502: <h1>Bad gateway</h1>"),
    "slow": (504, "upstream timeout: no reply within 0.2 s"), "drop": (502, "upstream connection: "),
    "cut": (502, "upstream 502: reply is not JSON"), "short": (502, "upstream connection: ClientPayloadError"),
    "chunks": (502, "upstream connection: ClientPayloadError"), "down": (502, "upstream connection: ")}


@pytest.mark.parametrize("fault", HTTP_FAULTS)
def test_a_model_server_that_fails_is_recorded_and_the_same_bytes_again_are_the_same_turn(tmp_path, fault):
    faults = [fault]

    async def handler(request):
        body = await request.json()
        match faults.pop() if faults else None:
            case "500" | "503" | "429" as status:
                return web.json_response({"error": {"message": f"status {status}"}}, status=int(status))
            case "400":
                return web.json_response({"object": "error", "message": "maximum context length is 9"}, status=400)
            case "html":
                return web.Response(text="<h1>Bad gateway</h1>", status=502)
            case "slow":
                await asyncio.Event().wait()
            case "drop":
                request.transport.close()
            case "cut":
                return web.Response(text='{"choices": [', content_type="application/json")
            case "short" | "chunks" as kind:               # fewer bytes than announced; no last chunk
                response = web.StreamResponse(headers={"Content-Length": "900"} if kind == "short" else {"Transfer-Encoding": "chunked"})
                await response.prepare(request)
                await response.write(b'{"choi')
                request.transport.close()
                return response
        return web.json_response(reply(body))

    upstream = HttpUpstream("http://127.0.0.1:9", "v9", "m")

    async def test(proxy, url):
        runner, base = await serve_model(handler)
        if fault != "down":
            upstream.url = base + "/v1"
        assert (await post(url, {"messages": MESSAGES}))[0] == HTTP_FAULTS[fault][0]
        upstream.url = base + "/v1"
        faults.clear()
        assert (await post(url, {"messages": MESSAGES}))[0] == 200
        await runner.cleanup()

    first, second = run(test, upstream, tmp_path, timeout=0.2)
    assert first.error.startswith(HTTP_FAULTS[fault][1]) and records.call_problem(first) == f"error: {first.error}"
    assert [c.turn for c in (first, second)] == [0, 0] and records.call_problem(second) is None
    assert second.extra["retry_of"] == first.call_id and second.sampling == first.sampling
    assert {c.policy_version_end for c in (first, second)} == {"v9"}


def test_a_url_may_be_given_with_or_without_v1_and_the_served_name_is_found(tmp_path):
    seen = []

    async def handler(request):
        seen.append(await request.json())
        return web.json_response(reply(seen[-1]))

    upstream = HttpUpstream("http://127.0.0.1:9", "v9")

    async def test(proxy, url):
        runner, base = await serve_model(handler)
        upstream.url = HttpUpstream(base + "/v1/").url
        assert upstream.url == HttpUpstream(base).url == HttpUpstream(base + "/v1/chat/completions").url == base + "/v1"
        assert (await post(url, {"messages": MESSAGES}))[0] == 200         # the first call finds the served model's name
        r = await asyncio.to_thread(requests.get, url + "/v1/models")
        assert r.json()["data"][0]["id"] == "served"
        await runner.cleanup()

    [call] = run(test, upstream, tmp_path)
    assert seen[0]["model"] == call.model == "served" and seen[0]["messages"] == MESSAGES and seen[0]["seed"] == call.sampling["seed"]


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_reaches_the_client(tmp_path, status):
    async def handler(request):
        return web.json_response({"error": {"message": "slow down"}}, status=status, headers={"Retry-After": "7"})

    async def test(proxy, url):
        runner, proxy.upstream.url = await serve_model(handler)
        proxy.upstream.url += "/v1"
        def work():
            with client(url) as c:
                c.chat.completions.create(model="m", messages=MESSAGES)
        with pytest.raises(openai.APIStatusError, match="slow down") as caught:
            await asyncio.to_thread(work)
        assert caught.value.status_code == status and caught.value.response.headers["retry-after"] == "7"
        proxy.upstream = Fake(UpstreamError(status, "as it came"))
        async with aiohttp.ClientSession() as session, session.post(url + "/ep/f/v1/chat/completions", json={"messages": MESSAGES}) as r:
            assert r.status == status and "Retry-After" not in r.headers
        await runner.cleanup()

    assert [c.error for c in run(test, HttpUpstream("http://127.0.0.1:9", "v", "m"), tmp_path)] == [
        f"upstream {status}: slow down", f"upstream {status}: as it came"]


# ---------------------------------------------------------------------------------------------- weights on the move

def test_calls_that_arrive_while_weights_are_exchanged_are_held_and_carry_the_new_version(tmp_path):
    upstream = Fake(gate=asyncio.Event())

    async def test(proxy, url):
        asked = []
        for i in range(3):
            asked.append(asyncio.create_task(post(url, {"messages": MESSAGES}, path=f"/ep/e{i}/v1/chat/completions")))
            await upstream.held.get()
        assert upstream.seen == [] and not any(task.done() for task in asked)
        await asyncio.sleep(0.01)                          # a hold of at least 10 ms: it is recorded in whole ones
        upstream.policy_version = "v2"
        upstream.gate.set()
        assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 3

    calls = run(test, upstream, tmp_path, timeout=5)
    assert [(c.policy_version, c.policy_version_end, records.call_problem(c)) for c in calls] == [("v2", "v2", None)] * 3
    first = next(c for c in calls if c.episode_id == "e0")
    assert 0.01 <= first.extra["queue_seconds"] <= first.seconds            # adapters count it against serving, not against the planner


def test_the_wait_for_new_weights_is_no_time_out_and_a_client_may_leave_it(tmp_path):
    upstream = Fake(gate=asyncio.Event())

    async def test(proxy, url):
        gone = asyncio.create_task(post(url, {"messages": MESSAGES}, path="/ep/gone/v1/chat/completions"))
        stays = asyncio.create_task(post(url, {"messages": MESSAGES}))
        for _ in range(2):
            await upstream.held.get()
        gone.cancel()
        await proxy.settle("gone")
        await asyncio.sleep(0.1)                           # ten times the proxy's `timeout`
        upstream.gate.set()
        assert (await stays)[0] == 200

    calls = run(test, upstream, tmp_path, timeout=0.01)
    assert turns(calls) == [(0, "client gone", False), (0, None, True)] and len(upstream.seen) == 1


def test_a_call_that_straddles_two_versions_is_marked_and_never_trained_on(tmp_path):
    async def swap(body):
        upstream.policy_version = "v2"
        return reply(body)

    spans = [{"version": "v1", "start": 0, "end": 2}, {"version": "v2", "start": 2, "end": 3}]
    upstream = Fake(swap, choice(weight_versions=spans), choice(weight_versions=[spans[1]]), lambda body: reply(body, policy_version="v3"))
    answers = []

    async def test(proxy, url):
        for i in range(4):
            answers.append((await post(url, {"messages": MESSAGES, "user": str(i)}))[1])

    calls = run(test, upstream, tmp_path)
    assert [(c.policy_version, c.policy_version_end) for c in calls] == [("v1", "v2"), ("v2", "v1+v2"), ("v2", "v2"), ("v2", "v3")]
    changed = "policy version changed during the call"
    assert [records.call_problem(c) for c in calls] == [changed, changed, None, changed]
    assert not any("weight_versions" in a["choices"][0] for a in answers)


# ---------------------------------------------------------------------------------------------- clients and clocks

@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_mid_call_is_recorded_and_its_generation_ends(tmp_path, stream):
    async def never(body):
        await asyncio.Event().wait()

    upstream = Fake(never)

    async def test(proxy, url):
        body = {"messages": MESSAGES, "stream": stream}
        left = asyncio.create_task(post(url, body))
        await upstream.called.get()
        left.cancel()
        await proxy.settle("e")
        assert turns(proxy.take("e")) == [(0, "client gone", False)]
        async with aiohttp.ClientSession() as session, session.post(url + "/ep/e/v1/chat/completions", json=body) as r:
            assert r.status == 200

    calls = run(test, upstream, tmp_path)
    assert turns(calls) == [(0, "client gone", False), (0, None, True)] and upstream.cancelled == 1
    assert records.call_problem(calls[0]) == "error: client gone"


def test_a_clock_that_jumps_back_an_hour_neither_reorders_calls_nor_makes_durations_negative(tmp_path, monkeypatch):
    shift, real = [0.0], time.time
    monkeypatch.setattr(time, "time", lambda: real() + shift[0])

    async def jump(body):
        shift[0] -= 3600
        return reply(body)

    async def test(proxy, url):
        for user in ("a", "a", "b", "b"):                  # a, its retry, b, its retry: the clock jumps within and between them
            await post(url, {"messages": MESSAGES, "user": user})
            shift[0] -= 3600
        assert [c.call_id for c in proxy.take("e")] == [row["call_id"] for _, row in records.read_jsonl(tmp_path / "arrivals.jsonl")]
        assert turns(proxy.take("e")) == [(0, "upstream 500: boom", False), (0, None, True), (1, "upstream 500: boom", False), (1, None, True)]

    calls = run(test, Fake(UpstreamError(500, "boom"), jump, UpstreamError(500, "boom"), jump), tmp_path)
    assert all(0 <= c.seconds < 20 for c in calls) and calls[0].started > calls[-1].started + 3600


# ---------------------------------------------------------------------------------------------- the disk

def test_after_a_failed_write_every_call_is_answered_507_and_nothing_more_is_written(tmp_path):
    async def never(body):
        await asyncio.Event().wait()

    upstream = Fake(reply, never)

    async def test(proxy, url):
        assert (await post(url, {"messages": MESSAGES}))[0] == 200
        await upstream.called.get()
        flying = asyncio.create_task(post(url, {"messages": MESSAGES}, path="/ep/flying/v1/chat/completions"))
        await upstream.called.get()
        lines = [(tmp_path / name).read_bytes() for name in ("arrivals.jsonl", "calls.jsonl")]

        def full(row):
            raise OSError(errno.ENOSPC, "No space left on device", "arrivals.jsonl")
        proxy.arrivals.append = full
        assert proxy.failure is None and not proxy.failed.is_set()
        with pytest.raises(openai.APIStatusError, match="No space left on device") as caught:
            await ask(url, "later", max_retries=2)
        assert caught.value.status_code == 507
        assert proxy.failed.is_set() and proxy.failure.errno == errno.ENOSPC
        status, answer = await flying
        assert status == 507 and "No space left on device" in answer["error"]["message"]
        assert proxy.counts["refused"] == 2                # both were told once: no retry can help
        proxy.arrivals.append = None                       # would be a TypeError
        assert (await post(url, {"messages": MESSAGES + MESSAGES}))[0] == 507
        assert lines == [(tmp_path / name).read_bytes() for name in ("arrivals.jsonl", "calls.jsonl")]

    assert turns(run(test, upstream, tmp_path)) == [(0, None, True)]
    assert turns(run(lambda proxy, url: asyncio.sleep(0), Fake(), tmp_path)) == [(0, None, True), (0, "interrupted", False)]     # flying


@pytest.mark.parametrize("where", ["arrivals.jsonl", "calls.jsonl", "images"])
def test_a_full_disk_leaves_whole_lines_ends_the_proxy_and_the_same_command_goes_on(tmp_path, launch, where):
    """RLIMIT_FSIZE cuts a real write in the middle, as a full disk does."""
    out = tmp_path / "out"
    long = [{"role": "user", "content": "x" * 5000}]
    if where == "images":
        data = base64.b64encode(png() + b"\0" * 300_000).decode()
        long = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + data}}]}]

    async def handler(request):
        return web.json_response(reply(await request.json(), "y" * 3000))

    async def main():
        runner, base = await serve_model(handler)
        process, url = await asyncio.to_thread(launch, base, out)
        assert (await post(url, {"messages": MESSAGES}))[0] == 200
        await recorded(url)
        size = {name: (out / name).stat().st_size for name in ("arrivals.jsonl", "calls.jsonl")}
        assert size["arrivals.jsonl"] + 5000 > size["calls.jsonl"] + 100        # the arrival would not reach the lower of the two limits
        limit = {"arrivals.jsonl": size["arrivals.jsonl"] + 100, "calls.jsonl": size["arrivals.jsonl"] + 7000, "images": 100_000}[where]
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, limit))
        assert (await post(url, {"messages": long}))[0] == (200 if where == "calls.jsonl" else 507)
        _, errors = await asyncio.to_thread(process.communicate, timeout=20)
        assert process.returncode == 2 and errors.splitlines()[-1].startswith("error: ") and "Traceback" not in errors
        assert where in errors.splitlines()[-1] and "File too large" in errors.splitlines()[-1]
        for name in size:                                  # before anything could repair them
            *whole, rest = (out / name).read_bytes().split(b"\n")
            assert rest == b"" and all(json.loads(line) for line in whole)
        assert not list(out.glob("images/*"))
        process, url = await asyncio.to_thread(launch, base, out)
        assert (await post(url, {"messages": long}))[0] == 200
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.communicate, timeout=20)
        assert process.returncode == 0
        await runner.cleanup()

    asyncio.run(main())
    last = [(1, "interrupted", False), (1, None, True)] if where == "calls.jsonl" else [(1, None, True)]
    assert turns(records.read_calls(out / "calls.jsonl")) == [(0, None, True), *last]


def test_a_line_that_did_not_fit_is_taken_back_whole(tmp_path, python):
    code = ("import records, resource\nwriter = records.JsonlWriter('lines.jsonl')\nwriter.append({'a': 1})\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (50, resource.RLIM_INFINITY))\n"
            "try:\n    writer.append({'b': 'x' * 100})\nexcept OSError as e:\n    print(e.filename, e.strerror)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\nwriter.append({'c': 2})\n")
    done = subprocess.run([*python, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.stdout == "lines.jsonl File too large\n" and done.stderr == ""
    assert (tmp_path / "lines.jsonl").read_text() == '{"a":1}\n{"c":2}\n'


# ---------------------------------------------------------------------------------------------- stops, kills, two at once

def test_stop_records_calls_in_flight_as_interrupted(tmp_path):
    async def test(proxy, url):
        task = asyncio.create_task(post(url, {"messages": MESSAGES}))
        await proxy.upstream.called.get()
        await proxy.stop()
        assert (await task)[0] == 503

    assert turns(run(test, Fake(delay=30), tmp_path)) == [(0, "interrupted", False)]


def test_kill_the_standalone_proxy_mid_call_and_start_it_again(tmp_path, launch):
    """Two delivered calls, one in flight at SIGKILL, a torn last line; the client's retry then is the same turn."""
    checkpoint, hanging, arrived = tmp_path / "checkpoint", [True], asyncio.Event()
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")

    async def main():
        async def handler(request):
            body = await request.json()
            if hanging and body.get("user") == "hang":
                arrived.set()
                await asyncio.Event().wait()
            return web.json_response(reply(body))

        runner, base = await serve_model(handler)
        arguments = ("--model", str(checkpoint), "--max-tokens", "32", "--sampling", "greedy", "--seed", "5")
        process, url = await asyncio.to_thread(launch, base, tmp_path / "out", *arguments)
        for user in ("a", "b"):
            assert (await post(url, {"messages": MESSAGES, "user": user}))[0] == 200
        pending = asyncio.create_task(post(url, {"messages": MESSAGES, "user": "hang"}))
        await arrived.wait()
        process.kill()
        with pytest.raises(aiohttp.ClientError):
            await pending
        await asyncio.to_thread(process.communicate, timeout=20)
        with open(tmp_path / "out" / "calls.jsonl", "ab") as f:        # as if it had died within a write
            f.write(b'{"call_id": "to')
        hanging.clear()
        process, url = await asyncio.to_thread(launch, base, tmp_path / "out", *arguments)
        assert (await post(url, {"messages": MESSAGES, "user": "hang"}))[0] == 200
        assert (await post(url, {"messages": MESSAGES, "user": "c"}))[0] == 200
        process.send_signal(signal.SIGTERM)
        out, err = await asyncio.to_thread(process.communicate, timeout=20)
        assert process.returncode == 0 and "repaired" in err and "1 calls of an earlier run were cut short" in err
        assert "2 calls" in out and "1 retries" in out
        await runner.cleanup()

    asyncio.run(main())
    calls = list(records.read_calls(tmp_path / "out" / "calls.jsonl"))
    assert turns(calls) == [(0, None, True), (1, None, True), (2, "interrupted", False), (2, None, True), (3, None, True)]
    assert calls[2].messages == MESSAGES and calls[2].sampling == calls[3].sampling
    assert calls[3].extra["retry_of"] == calls[2].call_id and calls[0].sampling["temperature"] == 0.0
    assert {c.policy_version for c in calls} == {records.policy_version(checkpoint)}


def test_the_second_of_two_processes_on_one_folder_is_refused_and_the_first_goes_on(tmp_path, launch, python):
    out = tmp_path / "out"

    async def main():
        async def handler(request):
            return web.json_response(reply(await request.json()))

        runner, base = await serve_model(handler)
        process, url = await asyncio.to_thread(launch, base, out)
        arguments = (out / "args.json").read_text()
        command = [*python, str(ROOT / "proxy.py"), "--upstream", base, "--out", str(out), "--port", "0", "--seed", "9"]
        second = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=20)
        assert second.returncode == 2 and second.stdout == "" and second.stderr.count("\n") == 1
        assert str(out) in second.stderr and "another process is running there" in second.stderr
        assert (out / "args.json").read_text() == arguments
        assert (await post(url, {"messages": MESSAGES}))[0] == 200
        await recorded(url)
        process.kill()                                     # its lock goes with it
        await asyncio.to_thread(process.communicate, timeout=20)
        process, url = await asyncio.to_thread(launch, base, out)
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.communicate, timeout=20)
        await runner.cleanup()
        with open(out / ".lock") as lock:                  # as a stage holds it, with a Proxy of its own inside
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            proxy = Proxy(Fake(), out, records.TRAIN_SAMPLING, 8, 0)
            await proxy.start()
            await proxy.stop()

    asyncio.run(main())
    assert turns(records.read_calls(out / "calls.jsonl")) == [(0, None, True)]
