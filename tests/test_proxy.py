"""The recording proxy: what it records, what it refuses, how it tells a retry from a new turn.

Nothing here loads a model. Blocking clients run in threads; the proxy runs in the test's event loop. Real client libraries are in
test_clients.py, all that breaks in test_faults.py.
"""

import argparse
import asyncio
import base64
import socket
import subprocess
import time
import zlib

import aiohttp
import openai
import pytest
import requests

import records
import serving
from conftest import ROOT
from fakes import HEADER, MESSAGES, TOOLS, Fake, ask, client, png, post, reply, run, turns
from proxy import Proxy, UpstreamError, derive_seed, make_upstream


# ---------------------------------------------------------------------------------------------- what is recorded

USAGE = {"prompt_tokens": 3, "completion_tokens": 3}       # what the fakes say


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
    assert call.extra == {"request": {"tool_choice": "auto"}, "usage": USAGE} and records.call_problem(call) is None
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
    assert call.sampling["max_tokens"] == 64 and call.extra == {"asked": {"max_tokens": 20480}, "usage": USAGE}


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
    forced = ("n", "stream", "logprobs", "return_token_ids", "return_weight_versions", "include_reasoning")
    assert [sent[k] for k in forced] == [1, False, True, True, True, True]
    assert "max_completion_tokens" not in sent


def test_what_vllm_makes_of_reasoning_effort_and_of_no_tools_is_recorded_as_what_it_is(tmp_path):
    upstream = Fake()

    async def test(proxy, url):
        for extra in ({"reasoning_effort": "none"}, {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False, "a": 1}}):
            assert (await post(url, {"messages": MESSAGES, "tools": [], **extra}))[0] == 200

    calls = run(test, upstream, tmp_path)
    expected = [{"enable_thinking": False, "reasoning_effort": "none"}, {"enable_thinking": False, "reasoning_effort": "low", "a": 1}]
    assert [c.chat_template_kwargs for c in calls] == expected == [b["chat_template_kwargs"] for b in upstream.seen]
    assert all("tools" not in b for b in upstream.seen)


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
    {"n": 2}, {"add_generation_prompt": False}, {"continue_final_message": True}, {"chat_template": "x"}, {"truncate_prompt_tokens": 5},
    {"documents": [{"text": "x"}]}, {"kv_transfer_params": {"a": 1}}, {"chat_template_kwargs": {"tools": []}},
    {"chat_template_kwargs": {"tokenize": False}}, {"vllm_xargs": {"a": 1}}, {"stream": "yes"}, {"stream_options": {"include_usage": True}}, {"logit_bias": {"5": 1}}, {"allowed_token_ids": [4]}, {"tool_choice": "required"},
    {"max_tokens": 0}, {"max_completion_tokens": "9"}, {"messages": []}, {"messages": None}, {"tools": {}}, {"model": 3},
    {"chat_template_kwargs": []}, {"response_format": {"type": "json_object"}}])
def test_what_cannot_be_recorded_is_refused_with_an_openai_error(tmp_path, fields):
    async def test(proxy, url):
        status, answer = await post(url, {"messages": MESSAGES, **fields})
        error = answer["error"]
        assert status == error["code"] == 400 and error["type"] == "invalid_request_error"
        assert next(iter(fields)) in error["message"]
        assert (await post(url, {"messages": MESSAGES, "n": 1, "stream": False, "logit_bias": None}))[0] == 200

    assert turns(run(test, Fake(), tmp_path)) == [(0, None, True)]


def test_routes(tmp_path):
    async def get(url):
        r = await asyncio.to_thread(requests.get, url)
        return r.status_code, r.json()

    async def test(proxy, url):
        for prefix in ("/v1", "/ep/e/v1"):
            assert (await get(url + prefix + "/models"))[1]["data"][0]["id"] == "planner"
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


# ---------------------------------------------------------------------------------------------- many

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


def test_an_in_process_proxy_starts_a_repeated_attempt_at_turn_0(tmp_path):
    async def test(proxy, url):
        await ask(url)

    run(test, Fake(), tmp_path)
    calls = run(test, Fake(), tmp_path)
    assert [c.turn for c in calls] == [0, 0] and len({c.call_id for c in calls}) == 2


# ---------------------------------------------------------------------------------------------- the command

def test_the_upstream_is_any_server_unproved_or_a_proved_fleet(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    options = dict.fromkeys(serving.DEFAULTS)
    fleet = make_upstream(argparse.Namespace(upstream=None, engine=None, engine_url="http://127.0.0.1:9,http://127.0.0.1:8", out=str(tmp_path),
                                             model=str(tmp_path), **options))
    assert fleet.policy_version == records.policy_version(tmp_path) and fleet.args.probe == "full" and fleet.log_dir == tmp_path
    one = make_upstream(argparse.Namespace(upstream="http://127.0.0.1:9", engine=None, engine_url=None, model=None))
    assert (one.url, one.policy_version) == ("http://127.0.0.1:9/v1", "")


def test_command_line_errors(tmp_path, python):
    (tmp_path / "config.json").touch()

    def call(*args):
        return subprocess.run([*python, str(ROOT / "proxy.py"), *args], capture_output=True, text=True, timeout=20)

    help_text = call("--help")
    assert help_text.returncode == 0 and "Retries" in help_text.stdout and "seconds to wait" in help_text.stdout
    wrong = call("--upstream", "http://127.0.0.1:9", "--out", str(tmp_path / "o"), "--model", str(tmp_path / "o"))
    assert wrong.returncode == 2 and "not a checkpoint folder" in wrong.stderr and "Traceback" not in wrong.stderr
    both = call("--upstream", "http://127.0.0.1:9", "--engine", "vllm", "--out", str(tmp_path / "o"))
    assert both.returncode == 2 and "give one of them" in both.stderr
    none = call("--out", str(tmp_path / "o"))
    assert none.returncode == 2 and none.stderr.startswith("error: give --upstream URL")
    fleet = ("--out", str(tmp_path / "o"), "--model", str(tmp_path), "--engine-url", "http://127.0.0.1:9", "--port", "0")
    empty = call(*fleet)
    assert empty.returncode == 2 and "cannot be loaded" in empty.stderr and "Traceback" not in empty.stderr
    gone = call(*fleet, "--probe", "light")
    assert gone.returncode == 2 and "no usable model server" in gone.stderr and "Traceback" not in gone.stderr
    nowhere = call("--upstream", "http://127.0.0.1:9", "--out", str(tmp_path / "config.json" / "o"))
    assert nowhere.returncode == 2 and "Not a directory" in nowhere.stderr and nowhere.stderr.count("\n") == 1
