"""The recording proxy against real clients (openai, requests), a fake in-process upstream and a fake model server.

Nothing here loads a model. Blocking clients run in threads; the proxy runs in the test's event loop, except where it is
killed: there it is its own process.
"""

import asyncio
import base64
import json
import math
import signal
import socket
import subprocess
import time
import zlib

import aiohttp
import openai
import pytest
import requests
from aiohttp import web

import records
from conftest import ROOT
from proxy import HttpUpstream, Proxy, UpstreamError, derive_seed

TOOLS = [{"type": "function", "function": {"name": "pick", "description": "", "parameters": {"type": "object"}}}]
MESSAGES = [{"role": "system", "content": "You move things."}, {"role": "user", "content": "Pick the mug."}]
HEADER = "x-stainless-retry-count"


def reply(body, text="ok", n=3, **changes):
    """A vLLM-like reply that names the request it answers (so that misattribution shows)."""
    return {"id": "chatcmpl-1", "object": "chat.completion", "created": 5, "model": body.get("model") or "m",
            "prompt_token_ids": [1, 2, 3], "usage": {"prompt_tokens": 3, "completion_tokens": n, "total_tokens": 3 + n},
            "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text},
                         "token_ids": list(range(10, 10 + n)),
                         "logprobs": {"content": [{"token": "t", "logprob": -0.5 * i} for i in range(n)]}}], **changes}


class Fake:
    """In-process upstream: `script` says what successive calls do (an exception, a reply, a function); then `reply`."""
    model, policy_version = "planner", "v1"

    def __init__(self, *script, delay=0.0):
        self.script, self.delay, self.seen, self.cancelled = list(script), delay, [], 0

    async def ready(self):
        pass

    async def chat(self, body, episode_id=""):
        self.seen.append(body)
        step = self.script.pop(0) if self.script else reply
        try:
            await asyncio.sleep(self.delay)
            step = await step(body) if asyncio.iscoroutinefunction(step) else step
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(step, Exception):
            raise step
        return step(body) if callable(step) else step

    async def close(self):
        pass


def run(test, upstream, folder, **options):
    """Starts a proxy on `folder`, awaits test(proxy, base url), stops it, returns the Calls on disk."""
    async def main():
        sampling = records.PROFILES[options.pop("profile", "train")]
        proxy = Proxy(upstream, folder, sampling, options.pop("max_tokens", 64), 7, **options)
        port = await proxy.start()
        try:
            await asyncio.wait_for(test(proxy, f"http://127.0.0.1:{port}"), 25)
        finally:
            await proxy.stop()
            await upstream.close()
    asyncio.run(main())
    return list(records.read_calls(folder / "calls.jsonl"))


def client(url, episode="e", **options):
    return openai.OpenAI(base_url=f"{url}/ep/{episode}/v1", api_key="any", **{"max_retries": 0, **options})


async def ask(url, episode="e", **fields):
    """One completion by the real openai client, in a thread."""
    options = {k: fields.pop(k) for k in ("max_retries", "timeout") if k in fields}
    with client(url, episode, **options) as c:
        return await asyncio.to_thread(c.chat.completions.create, **{"model": "planner", "messages": MESSAGES, **fields})


async def post(url, body, headers=None, path="/ep/e/v1/chat/completions"):
    """-> (status, parsed reply)"""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with aiohttp.ClientSession() as session:
        async with session.post(url + path, data=data, headers=headers) as r:
            return r.status, json.loads(await r.read())


def turns(calls):
    return [(c.turn, c.error, c.delivered) for c in calls]


def png(seed=0):
    """A tiny valid PNG."""
    def chunk(kind, data):
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", b"\0\0\0\1\0\0\0\1\x08\0\0\0\0")
            + chunk(b"IDAT", zlib.compress(bytes([0, seed]))) + chunk(b"IEND", b""))


# ---------------------------------------------------------------------------------------------- what is recorded

def test_every_field_is_recorded_and_the_openai_client_notices_nothing(tmp_path):
    upstream, answers = Fake(), []

    async def test(proxy, url):
        answers.append(await ask(url, tools=TOOLS, tool_choice="auto", max_completion_tokens=50,
                                 extra_body={"chat_template_kwargs": {"enable_thinking": False}}))
        assert [c.call_id for c in proxy.take("e", forget=True)] and proxy.take("e") == []

    [call] = run(test, upstream, tmp_path)
    assert (call.episode_id, call.turn, call.policy_version, call.policy_version_end) == ("e", 0, "v1", "v1")
    assert (call.model, call.messages, call.tools) == ("planner", MESSAGES, TOOLS)
    assert call.chat_template_kwargs == {"enable_thinking": False}
    assert call.sampling == {**records.TRAIN_SAMPLING, "max_tokens": 50, "seed": derive_seed(7, "e", 0)}
    assert (call.prompt_token_ids, call.token_ids, call.logprobs) == ([1, 2, 3], [10, 11, 12], [0, -0.5, -1.0])
    assert (call.finish_reason, call.message) == ("stop", {"role": "assistant", "content": "ok"})
    assert call.delivered and call.error is None and abs(call.started - time.time()) < 60 and 0 < call.seconds < 20
    assert call.extra == {"request": {"tool_choice": "auto"}} and records.call_problem(call) is None
    [answer] = answers
    assert answer.choices[0].message.content == "ok" and answer.usage.total_tokens == 6
    raw = answer.model_dump()
    assert raw["id"] == "chatcmpl-1" and raw["created"] == 5 and raw["choices"][0]["logprobs"] is None
    assert not {"prompt_token_ids", "policy_version"} & set(raw) and "token_ids" not in raw["choices"][0]
    [arrival] = [row for _, row in records.read_jsonl(tmp_path / "arrivals.jsonl")]
    assert arrival["call_id"] == call.call_id and arrival["messages"] == MESSAGES and len(arrival["body_sha256"]) == 64


def test_requests_works_too_and_gets_ids_and_logprobs_if_it_asks(tmp_path):
    async def test(proxy, url):
        body = {"model": "x", "messages": MESSAGES, "temperature": 1.0, "max_tokens": 20480, "logprobs": True,
                "return_token_ids": True}
        r = await asyncio.to_thread(requests.post, url + "/ep/e/v1/chat/completions", json=body)
        choice = r.json()["choices"][0]
        assert r.json()["prompt_token_ids"] == [1, 2, 3] and choice["token_ids"] == [10, 11, 12]
        assert choice["logprobs"]["content"][1]["logprob"] == -0.5

    [call] = run(test, Fake(), tmp_path)
    assert call.sampling["max_tokens"] == 64 and call.extra == {"asked": {"max_tokens": 20480}}


def test_the_clients_sampling_is_overridden_by_the_profile(tmp_path):
    upstream = Fake()
    asked = {"temperature": 0.2, "top_p": 0.9, "seed": 3, "frequency_penalty": 1.0}

    async def test(proxy, url):
        more = {"top_k": 5, "min_p": 0.1, "include_reasoning": False, "return_token_ids": False}
        await ask(url, **asked, extra_body=more)

    [call] = run(test, upstream, tmp_path, profile="eval")
    [sent] = upstream.seen
    expected = {"temperature": 1.0, "top_p": 0.95, "top_k": 20, "min_p": 0.0, "presence_penalty": 1.5,
                "frequency_penalty": 0.0, "repetition_penalty": 1.0, "max_tokens": 64, "seed": derive_seed(7, "e", 0)}
    assert call.sampling == expected and {k: sent[k] for k in expected} == expected
    assert call.extra["asked"] == {**asked, "top_k": 5, "min_p": 0.1}
    forced = ("n", "stream", "logprobs", "return_token_ids", "include_reasoning")
    assert [sent[k] for k in forced] == [1, False, True, True, True]
    assert "max_completion_tokens" not in sent


def test_no_two_calls_of_a_group_share_a_seed(tmp_path):
    async def test(proxy, url):
        for attempt in range(6):
            for turn in range(3):
                await post(url, {"messages": MESSAGES + [{"role": "user", "content": str(turn)}], "seed": 1},
                           path=f"/ep/swap-7-i3-a{attempt}/v1/chat/completions")

    calls = run(test, Fake(), tmp_path)
    assert len({c.sampling["seed"] for c in calls}) == len(calls) == 18
    assert derive_seed(1, "e", 0) != derive_seed(2, "e", 0) and 0 <= derive_seed(1, "e", 0) < 2**53


def test_pictures_are_stored_once_and_go_upstream_whole(tmp_path):
    upstream, picture = Fake(), png()
    uri = "data:image/png;base64," + base64.b64encode(picture).decode()
    gif = "data:image/png;base64," + base64.b64encode(b"GIF89a").decode()
    part = {"type": "image_url", "image_url": {"url": uri}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "Look:"}, part, part]}]

    async def test(proxy, url):
        await ask(url, messages=messages)
        await ask(url, messages=messages + MESSAGES)
        bad = [{"type": "image_url", "image_url": {"url": "http://example.org/a.png"}},
               {"type": "image_url", "image_url": {"url": "data:image/png;base64,@@@"}},
               {"type": "image_url", "image_url": {"url": gif}},
               {"type": "image_url"}, {"type": "input_audio", "input_audio": {}}]
        for wrong in bad:
            status, answer = await post(url, {"messages": [{"role": "user", "content": [wrong]}]})
            assert status == 400 and answer["error"]["message"], wrong

    calls = run(test, upstream, tmp_path)
    sha = records.ImageStore(tmp_path / "images").put(picture)
    image = {"type": "image", "sha256": sha}
    assert len(calls) == 2 and calls[0].messages[0]["content"] == [{"type": "text", "text": "Look:"}, image, image]
    assert upstream.seen[0]["messages"] == messages
    assert [p.name for p in (tmp_path / "images").iterdir()] == [sha + ".png"]
    assert "base64" not in (tmp_path / "arrivals.jsonl").read_text() + (tmp_path / "calls.jsonl").read_text()


def test_a_large_body_passes_and_one_above_the_limit_is_refused(tmp_path):
    async def test(proxy, url):
        assert (await post(url, {"messages": [{"role": "user", "content": "x" * 6_000_000}]}))[0] == 200
        assert (await post(url, b" " * (64 * 2**20 + 1)))[0] == 413

    [call] = run(test, Fake(), tmp_path)
    assert len(call.messages[0]["content"]) == 6_000_000


def test_a_lone_surrogate_of_the_harness_is_recorded_not_lost(tmp_path):
    async def test(proxy, url):
        assert (await post(url, b'{"messages": [{"role": "user", "content": "\\udc80"}]}'))[0] == 200

    [call] = run(test, Fake(), tmp_path)
    assert call.messages[0]["content"] == "\udc80" and call.delivered


def test_episode_by_header_or_anonymous(tmp_path):
    async def test(proxy, url):
        await post(url, {"messages": MESSAGES}, {"x-episode-id": "named"}, "/v1/chat/completions")
        await post(url, {"messages": MESSAGES}, None, "/v1/chat/completions")

    named, anonymous = run(test, Fake(), tmp_path)
    assert named.episode_id == "named" and anonymous.episode_id.startswith("anon-")


def test_the_policy_version_is_taken_at_both_ends(tmp_path):
    upstream = Fake()

    async def swap(body):
        upstream.policy_version = "v2"
        return reply(body)

    async def test(proxy, url):
        upstream.script = [swap, lambda body: reply(body, policy_version="v2", queue_seconds=0.5)]
        await ask(url)
        await ask(url, messages=MESSAGES[1:])

    first, second = run(test, upstream, tmp_path)
    assert records.call_problem(first) == "policy version changed during the call"
    assert (second.policy_version, second.policy_version_end) == ("v2", "v2") and second.extra["queue_seconds"] == 0.5


# ---------------------------------------------------------------------------------------------- what is refused

@pytest.mark.parametrize("fields", [
    {"n": 2}, {"stream": True}, {"logit_bias": {"5": 1}}, {"allowed_token_ids": [4]}, {"tool_choice": "required"},
    {"max_tokens": 0}, {"max_completion_tokens": "9"}, {"messages": []}, {"messages": None}, {"tools": {}}, {"model": 3},
    {"chat_template_kwargs": []}, {"response_format": {"type": "json_object"}}])
def test_what_cannot_be_recorded_is_refused_with_an_openai_error(tmp_path, fields):
    async def test(proxy, url):
        status, answer = await post(url, {"messages": MESSAGES, **fields})
        error = answer["error"]
        assert status == error["code"] == 400 and error["type"] == "invalid_request_error"
        assert next(iter(fields)) in error["message"]
        if "stream" in fields:
            assert "stream: false" in error["message"]
        assert (await post(url, {"messages": MESSAGES, "n": 1, "stream": False, "logit_bias": None}))[0] == 200

    assert turns(run(test, Fake(), tmp_path)) == [(0, None, True)]


def test_routes(tmp_path):
    async def get(url):
        r = await asyncio.to_thread(requests.get, url)
        return r.status_code, r.json()

    async def test(proxy, url):
        for prefix in ("/v1", "/ep/e/v1"):
            assert (await get(url + prefix + "/models"))[1]["data"][0]["id"] == "planner"
            for api in ("responses", "messages"):
                status, answer = await post(url, {}, path=f"{prefix}/{api}")
                assert status == 501 and "chat/completions" in answer["error"]["message"]
        assert (await get(url + "/health"))[1]["status"] == "ok"
        assert [m.id for m in await asyncio.to_thread(lambda: list(client(url).models.list()))] == ["planner"]
        for path in ("/nothing", "/v1/chat/completions", "/ep/e/v1/embeddings"):
            status, answer = await get(url + path)
            assert status == 404 and "routes" in answer["error"]["message"]
        for raw in (b"{", b"[1]", b"\xff\xfe", b"", b"[" * 100_000):
            assert (await post(url, raw))[0] == 400
        for episode in ("a%20b", "x" * 129, "a%2Fb", "%C3%A9"):
            assert (await post(url, {"messages": MESSAGES}, path=f"/ep/{episode}/v1/chat/completions"))[0] == 400
        assert proxy.counts["refused"] > 10

    assert run(test, Fake(), tmp_path) == []


def test_only_the_loopback_interface_is_bound(tmp_path):
    async def test(proxy, url):
        port = int(url.rsplit(":", 1)[1])
        assert [a[0] for a in proxy.runner.addresses] == ["127.0.0.1"]
        with socket.socket() as other:                 # would fail, were the port bound on all interfaces
            other.bind(("127.0.0.2", port))
        with pytest.raises(records.BadInput, match=f"port {port}"):
            await Proxy(Fake(), tmp_path / "other", records.TRAIN_SAMPLING, 8, 0).start(port)

    run(test, Fake(), tmp_path)


# ---------------------------------------------------------------------------------------------- retries

def test_openai_retry_after_500_is_one_turn(tmp_path):
    upstream = Fake(UpstreamError(500, "boom"), UpstreamError(503, "busy"))

    async def test(proxy, url):
        assert (await ask(url, max_retries=2)).choices[0].message.content == "ok"
        await ask(url, messages=MESSAGES + [{"role": "user", "content": "next"}])
        assert proxy.counts["retries"] == 2

    calls = run(test, upstream, tmp_path)
    assert turns(calls) == [(0, "upstream 500: boom", False), (0, "upstream 503: busy", False),
                            (0, None, True), (1, None, True)]
    assert calls[2].extra["retry_of"] == calls[1].call_id and len({c.sampling["seed"] for c in calls[:3]}) == 1
    assert len({c.call_id for c in calls}) == 4


def test_same_body_after_an_error_is_a_retry_without_any_header(tmp_path):      # CaP-X: requests, own retry loop
    async def test(proxy, url):
        statuses = [(await post(url, {"messages": MESSAGES}))[0] for _ in range(2)]
        assert statuses == [502, 200]

    calls = run(test, Fake(UpstreamError(500, "boom")), tmp_path)
    assert turns(calls) == [(0, "upstream 500: boom", False), (0, None, True)]


def test_same_body_after_a_delivered_reply_is_a_new_turn_with_a_new_seed(tmp_path):
    async def test(proxy, url):
        for _ in range(2):
            await post(url, {"messages": MESSAGES}, {HEADER: "0"})
        assert [c.turn for c in proxy.take("e")] == [0, 1]

    first, second = run(test, Fake(), tmp_path)
    assert (first.turn, second.turn) == (0, 1) and first.sampling["seed"] != second.sampling["seed"]


def test_retry_after_a_delivered_reply_gets_the_same_reply_and_no_record(tmp_path):
    upstream = Fake()

    async def test(proxy, url):
        first = await post(url, {"messages": MESSAGES})
        assert await post(url, {"messages": MESSAGES}, {HEADER: "1"}) == first and proxy.counts["replayed"] == 1

    assert turns(run(test, upstream, tmp_path)) == [(0, None, True)] and len(upstream.seen) == 1


def test_client_timeout_then_retry(tmp_path):
    async def slow(body):
        await asyncio.sleep(20)

    upstream = Fake(slow)

    async def test(proxy, url):
        assert (await ask(url, max_retries=1, timeout=1.0)).choices[0].message.content == "ok"

    calls = run(test, upstream, tmp_path)
    assert turns(calls) == [(0, "client gone", False), (0, None, True)] and 0.5 < calls[0].seconds < 5
    assert upstream.cancelled == 1                     # the server need not finish what nobody reads


def test_client_gone_mid_call_is_recorded_at_once_and_settles(tmp_path):
    async def never(body):
        await asyncio.sleep(60)

    async def test(proxy, url):
        with pytest.raises(openai.APITimeoutError):
            await ask(url, timeout=0.5)
        await asyncio.wait_for(proxy.settle("e"), 2)
        assert turns(proxy.take("e")) == [(0, "client gone", False)]

    [call] = run(test, Fake(never), tmp_path)
    assert call.messages == MESSAGES and call.token_ids == [] and records.call_problem(call) == "error: client gone"


def test_a_retry_while_the_first_is_in_flight_joins_it(tmp_path):
    upstream = Fake(delay=0.3)

    async def test(proxy, url):
        body = {"messages": MESSAGES}
        first = asyncio.create_task(post(url, body))
        await asyncio.sleep(0.1)
        second = asyncio.create_task(post(url, body, {HEADER: "1"}))
        assert (await first)[0] == (await second)[0] == 200

    calls = sorted(run(test, upstream, tmp_path), key=lambda c: c.started)
    assert turns(calls) == [(0, "superseded by a retry", False), (0, None, True)] and len(upstream.seen) == 1
    assert calls[1].extra["retry_of"] == calls[0].call_id


def test_a_joined_request_survives_the_first_client_leaving(tmp_path):
    upstream = Fake(delay=0.5)

    async def test(proxy, url):
        first = asyncio.create_task(post(url, {"messages": MESSAGES}))
        await asyncio.sleep(0.1)
        second = asyncio.create_task(post(url, {"messages": MESSAGES}, {HEADER: "1"}))
        await asyncio.sleep(0.1)
        first.cancel()
        assert (await second)[0] == 200

    assert turns(run(test, upstream, tmp_path)) == [(0, "client gone", False), (0, None, True)]
    assert len(upstream.seen) == 1 and upstream.cancelled == 0


def test_same_body_in_flight_without_a_retry_header_is_its_own_turn(tmp_path):
    async def test(proxy, url):
        await asyncio.gather(post(url, {"messages": MESSAGES}), post(url, {"messages": MESSAGES}))

    calls = run(test, Fake(delay=0.1), tmp_path)
    assert sorted(turns(calls)) == [(0, None, True), (1, None, True)]


# ---------------------------------------------------------------------------------------------- failing upstreams

def test_an_upstream_that_answers_nonsense_or_breaks(tmp_path):
    aborted = {"choices": [{"message": {}, "finish_reason": "abort"}]}
    upstream = Fake({"choices": []}, {"choices": [{"message": None}]}, [1], aborted, ValueError("a bug"), TimeoutError())

    async def test(proxy, url):
        statuses = [(await post(url, {"messages": MESSAGES, "user": str(i)}))[0] for i in range(6)]
        assert statuses == [502, 502, 502, 503, 502, 504]

    calls = run(test, upstream, tmp_path)
    assert [c.turn for c in calls] == list(range(6)) and not any(c.delivered for c in calls)
    assert ["malformed reply" in c.error for c in calls[:3]] == [True] * 3
    assert "abort" in calls[3].error and calls[4].error == "upstream exception: ValueError: a bug"
    assert calls[5].error.startswith("upstream timeout")


def test_a_reply_without_ids_or_logprobs_reaches_the_harness_and_is_incomplete(tmp_path):
    def teacher(body):
        return {"choices": [{"message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]}

    def no_logprobs(body):
        answer = reply(body)
        answer["choices"][0]["logprobs"] = None
        return answer

    def nan(body):
        answer = reply(body, n=1)
        answer["choices"][0]["logprobs"]["content"][0]["logprob"] = math.nan
        return answer

    async def test(proxy, url):
        for i in range(3):
            assert (await ask(url, user=str(i))).choices[0].message.content

    calls = run(test, Fake(teacher, no_logprobs, nan), tmp_path)
    assert all(c.delivered for c in calls) and [records.call_problem(c) for c in calls] == [
        "no prompt token ids", "3 token ids but 0 logprobs", "log-prob nan"]
    assert calls[0].message == {"role": "assistant", "content": "hi"} and calls[0].model == "planner"


async def serve_model(handler):
    """A fake model server over HTTP -> (runner, url)."""
    async def models(request):
        return web.json_response({"data": [{"id": "served"}]})

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v1/chat/completions", handler)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


def test_http_upstream_good_and_bad(tmp_path):
    seen = []

    async def handler(request):
        body = await request.json()
        seen.append(body)
        match body["user"]:
            case "500" | "503" | "429" as status:
                return web.json_response({"error": {"message": f"status {status}"}}, status=int(status))
            case "400":
                return web.json_response({"object": "error", "message": "maximum context length is 9"}, status=400)
            case "html":
                return web.Response(text="<h1>Bad gateway</h1>", status=502)
            case "slow":
                await asyncio.sleep(5)
            case "drop":
                request.transport.close()
            case "cut":
                return web.Response(text='{"choices": [', content_type="application/json")
            case "short":
                response = web.StreamResponse(headers={"Content-Length": "900"})
                await response.prepare(request)
                await response.write(b'{"choi')
                request.transport.close()
                return response
        return web.json_response(reply(body))

    expected = [("ok", 200, None), ("400", 400, "upstream 400: maximum context length is 9"),
                ("429", 429, "upstream 429: status 429"),
                ("500", 502, "upstream 500: status 500"), ("503", 503, "upstream 503: status 503"),
                ("html", 502, "upstream 502: <h1>Bad gateway</h1>"), ("slow", 504, "upstream timeout: "),
                ("drop", 502, "upstream connection: "), ("cut", 502, "upstream 502: reply is not JSON"),
                ("short", 502, "upstream connection: ")]
    upstream = HttpUpstream("http://127.0.0.1:9", "v9")

    async def test(proxy, url):
        status, answer = await post(url, {"messages": MESSAGES, "user": "down"})       # nothing listens on port 9
        assert status == 502 and "connection" in answer["error"]["message"]
        runner, base = await serve_model(handler)
        upstream.url = HttpUpstream(base + "/v1/").url
        assert upstream.url == HttpUpstream(base).url == HttpUpstream(base + "/v1/chat/completions").url == base + "/v1"
        for user, status, _ in expected:
            assert (await post(url, {"messages": MESSAGES, "user": user}))[0] == status, user
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await ask(url, user="400", max_retries=2)
        r = await asyncio.to_thread(requests.get, url + "/v1/models")
        assert r.json()["data"][0]["id"] == "served"
        await runner.cleanup()

    calls = run(test, upstream, tmp_path, timeout=0.5)
    assert calls[0].error.startswith("upstream connection: ")
    for call, (user, _, error) in zip(calls[1:], expected, strict=False):
        assert call.error == error or (error and call.error.startswith(error)), (user, call.error)
        assert call.extra["request"] == {"user": user} and call.delivered == (error is None)
        assert call.policy_version == call.policy_version_end == "v9"
    assert len(calls) == 12 and seen[0]["messages"] == MESSAGES and seen[0]["seed"] == calls[1].sampling["seed"]


# ---------------------------------------------------------------------------------------------- many, and kills

def test_fifty_episodes_at_once_none_lost_or_misattributed(tmp_path):
    async def echo(body):
        await asyncio.sleep(0.002 * (body["seed"] % 5))
        text = body["messages"][-1]["content"]
        return reply(body, text, prompt_token_ids=[zlib.crc32(text.encode())])

    upstream = Fake(*[echo] * 200)

    async def test(proxy, url):
        async with aiohttp.ClientSession() as session:
            async def episode(i):
                for turn in range(4):
                    text = f"episode {i} turn {turn}"
                    async with session.post(f"{url}/ep/e-{i}/v1/chat/completions",
                                            json={"messages": [{"role": "user", "content": text}]}) as r:
                        assert (await r.json())["choices"][0]["message"]["content"] == text
                await proxy.settle(f"e-{i}")
                assert [c.turn for c in proxy.take(f"e-{i}", forget=True)] == [0, 1, 2, 3]
            await asyncio.gather(*(episode(i) for i in range(50)))
        assert not proxy.episodes

    calls = run(test, upstream, tmp_path)
    assert len(calls) == len({c.call_id for c in calls}) == 200
    for c in calls:
        text = f"episode {c.episode_id[2:]} turn {c.turn}"
        assert c.messages[0]["content"] == c.message["content"] == text
        assert c.prompt_token_ids == [zlib.crc32(text.encode())] and c.delivered and records.call_problem(c) is None


def test_stop_records_calls_in_flight_as_interrupted(tmp_path):
    async def test(proxy, url):
        task = asyncio.create_task(post(url, {"messages": MESSAGES}))
        await asyncio.sleep(0.2)
        await proxy.stop()
        assert (await task)[0] == 503

    assert turns(run(test, Fake(delay=30), tmp_path)) == [(0, "interrupted", False)]


def test_kill_the_standalone_proxy_mid_call_and_start_it_again(tmp_path, python):
    """Two delivered calls, one in flight at SIGKILL, a torn last line; the client's retry then is the same turn."""
    checkpoint, hanging = tmp_path / "checkpoint", [True]
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")

    async def main():
        async def handler(request):
            body = await request.json()
            if hanging and body.get("user") == "hang":
                await asyncio.sleep(30)
            return web.json_response(reply(body))

        runner, base = await serve_model(handler)
        command = [*python, str(ROOT / "proxy.py"), "--upstream", base, "--out", str(tmp_path / "out"), "--port", "0",
                   "--model", str(checkpoint), "--max-tokens", "32", "--sampling", "greedy", "--seed", "5"]

        def launch():
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            while not (line := process.stdout.readline()).startswith("proxy: http"):
                assert line, process.stderr.read()
            return process, line.split("/ep/")[0].removeprefix("proxy: ")

        process, url = await asyncio.to_thread(launch)
        for user in ("a", "b"):
            assert (await post(url, {"messages": MESSAGES, "user": user}))[0] == 200
        pending = asyncio.create_task(post(url, {"messages": MESSAGES, "user": "hang"}))
        await asyncio.sleep(0.3)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with pytest.raises(aiohttp.ClientError):
            await pending
        process.stdout.close(), process.stderr.close()
        with open(tmp_path / "out" / "calls.jsonl", "ab") as f:        # as if it had died within a write
            f.write(b'{"call_id": "to')
        hanging.clear()
        process, url = await asyncio.to_thread(launch)
        assert (await post(url, {"messages": MESSAGES, "user": "hang"}))[0] == 200
        assert (await post(url, {"messages": MESSAGES, "user": "c"}))[0] == 200
        process.send_signal(signal.SIGTERM)
        out, err = await asyncio.to_thread(process.communicate)
        assert process.returncode == 0 and "repaired" in err and "1 calls of an earlier run were cut short" in err
        assert "2 calls" in out and "1 retries" in out
        await runner.cleanup()

    asyncio.run(main())
    calls = list(records.read_calls(tmp_path / "out" / "calls.jsonl"))
    assert turns(calls) == [(0, None, True), (1, None, True), (2, "interrupted", False), (2, None, True), (3, None, True)]
    assert calls[2].messages == MESSAGES and calls[2].sampling == calls[3].sampling
    assert calls[3].extra["retry_of"] == calls[2].call_id and calls[0].sampling["temperature"] == 0.0
    assert {c.policy_version for c in calls} == {records.policy_version(checkpoint)}


def test_an_in_process_proxy_starts_a_repeated_attempt_at_turn_0(tmp_path):
    async def test(proxy, url):
        await ask(url)

    run(test, Fake(), tmp_path)
    calls = run(test, Fake(), tmp_path)
    assert [c.turn for c in calls] == [0, 0] and len({c.call_id for c in calls}) == 2


def test_command_line_errors(tmp_path, python):
    def call(*args):
        return subprocess.run([*python, str(ROOT / "proxy.py"), *args], capture_output=True, text=True, timeout=20)

    help_text = call("--help")
    assert help_text.returncode == 0 and "Retries" in help_text.stdout and "seconds to wait" in help_text.stdout
    wrong = call("--upstream", "http://127.0.0.1:9", "--out", str(tmp_path / "o"), "--model", str(tmp_path))
    assert wrong.returncode == 2 and "not a checkpoint folder" in wrong.stderr and "Traceback" not in wrong.stderr
