"""Unmodified clients against the proxy, plain and streamed: openai (sync and async), pydantic-ai (what RPent uses), requests (what CaP-X uses)."""

import asyncio
import base64
import json
import os

import openai
import pydantic_ai
import pytest
import requests
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

import records
from fakes import HEADER, MESSAGES, TOOLS, Fake, ask, client, png, post, reply, run, turns
from proxy import UpstreamError

CALLS = [{"id": f"call-{i}", "type": "function", "function": {"name": name, "arguments": json.dumps({"name": thing})}}
         for i, (name, thing) in enumerate([("locate", "red mug"), ("locate", "blue tray"), ("look", "é \"quoted\"\n")])]


def calling(body):
    """A reply with reasoning, text and three tool calls side by side."""
    answer = reply(body)
    answer["choices"][0].update(finish_reason="tool_calls", stop_reason=None, message={
        "role": "assistant", "content": "Two things to find.", "reasoning": "Hm — first the mug.", "refusal": None, "tool_calls": CALLS})
    return answer


def silent(body):
    """… with a tool call alone."""
    answer = reply(body)
    answer["choices"][0].update(finish_reason="tool_calls", message={"role": "assistant", "content": None, "tool_calls": CALLS[:1]})
    return answer


def lines(raw):
    """The events of a stream, parsed; [DONE] must be the last."""
    *events, done, rest = raw.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


async def stream(url, headers=None, **fields):
    """-> (status, content type, bytes) by requests, in a thread."""
    r = await asyncio.to_thread(requests.post, f"{url}/ep/e/v1/chat/completions", headers=headers,
                                json={"model": "planner", "messages": MESSAGES, "stream": True, **fields})
    return r.status_code, r.headers["content-type"], r.content


# ---------------------------------------------------------------------------------------------- streams, as bytes

def test_a_stream_has_the_chunks_of_openai_and_vllm_in_their_order(tmp_path):
    upstream, got = Fake(calling, calling, silent), []

    async def test(proxy, url):
        got.append(await stream(url, tools=TOOLS, stream_options={"include_usage": True}, logprobs=True, return_token_ids=True))
        got.append(await stream(url, tools=TOOLS, user="another"))
        got.append(await stream(url, tools=TOOLS, user="a third"))

    calls = run(test, upstream, tmp_path)
    assert [(status, kind) for status, kind, _ in got] == [(200, "text/event-stream")] * 3
    full, bare, alone = (lines(raw) for *_, raw in got)
    assert {(c["id"], c["object"], c["model"], c["created"]) for c in full} == {("chatcmpl-1", "chat.completion.chunk", "planner", 5)}
    *chunks, usage = full
    choices = [c["choices"][0] for c in chunks]
    assert all(len(c["choices"]) == 1 and "usage" not in c for c in chunks) and all(c["index"] == 0 for c in choices)
    assert [c["delta"] for c in choices] == [
        {"role": "assistant", "content": ""}, {"reasoning": "Hm — first the mug."}, {"content": "Two things to find."},
        *({"tool_calls": [{"index": i, **call}]} for i, call in enumerate(CALLS)), {}]
    assert [c["finish_reason"] for c in choices] == [None] * 6 + ["tool_calls"]
    assert usage["choices"] == [] and usage["usage"]["total_tokens"] == 6
    assert chunks[0]["prompt_token_ids"] == [1, 2, 3] and choices[-1]["token_ids"] == [10, 11, 12]
    assert [entry["logprob"] for entry in choices[-1]["logprobs"]["content"]] == [0, -0.5, -1.0]

    assert len(bare) == 7 and not any("prompt_token_ids" in c or "usage" in c for c in bare)       # nothing that was not asked for
    assert all(c["choices"][0]["logprobs"] is None and "token_ids" not in c["choices"][0] for c in bare)
    assert [c["choices"][0]["delta"] for c in alone] == [
        {"role": "assistant", "content": None}, {"tool_calls": [{"index": 0, **CALLS[0]}]}, {}]

    assert [body["stream"] for body in upstream.seen] == [False] * 3 and not any("stream_options" in body for body in upstream.seen)
    assert calls[0].extra["asked"] == {"stream": True, "stream_options": {"include_usage": True}}
    assert calls[1].extra["asked"] == {"stream": True} and [records.call_problem(c) for c in calls] == [None] * 3
    assert calls[0].message == calling({})["choices"][0]["message"]          # the record does not know how it was delivered


def test_a_streamed_retry_joins_or_repeats_and_gets_the_same_bytes(tmp_path):
    release, got = asyncio.Event(), []

    async def slow(body):
        await release.wait()
        return calling(body)

    upstream = Fake(slow)

    async def test(proxy, url):
        first = asyncio.create_task(stream(url))
        await upstream.called.get()
        second = asyncio.create_task(stream(url, {HEADER: "1"}))
        while len(proxy.episodes["e"].flying) < 2:         # the retry has joined the first
            await asyncio.sleep(0.01)
        release.set()
        got.extend([await first, await second, await stream(url, {HEADER: "2"})])
        assert proxy.counts["replayed"] == 1

    calls = run(test, upstream, tmp_path)
    assert got[0] == got[1] == got[2] and len(lines(got[0][2])) == 7 and len(upstream.seen) == 1
    assert sorted(turns(calls), key=str) == [(0, "superseded by a retry", False), (0, None, True)]


def test_a_stream_that_the_client_does_not_read_to_its_end_is_not_delivered(tmp_path):
    upstream = Fake(lambda body: reply(body, "x" * 30_000_000))

    async def test(proxy, url):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        body = json.dumps({"messages": MESSAGES, "stream": True}).encode()
        writer.write(b"POST /ep/e/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert b"200 OK" in await reader.read(1000)
        writer.transport.abort()
        await proxy.settle("e")
        status, _, raw = await stream(url)                 # other bytes (a model is named), so a turn of its own
        assert status == 200 and lines(raw)

    calls = run(test, upstream, tmp_path)
    assert turns(calls) == [(0, "client gone", False), (1, None, True)]


def test_an_upstream_error_keeps_its_status_in_a_stream_and_the_client_retries(tmp_path):
    upstream = Fake(UpstreamError(503, "busy"))

    async def test(proxy, url):
        def work():
            with client(url, max_retries=1) as c:
                return [chunk for chunk in c.chat.completions.create(model="planner", messages=MESSAGES, stream=True)]
        assert "".join(c.choices[0].delta.content or "" for c in await asyncio.to_thread(work)) == "ok"
        upstream.script = [UpstreamError(400, "maximum context length is 9")]
        status, kind, raw = await stream(url)
        assert (status, kind) == (400, "application/json") and "maximum context" in json.loads(raw)["error"]["message"]

    assert turns(run(test, upstream, tmp_path)) == [
        (0, "upstream 503: busy", False), (0, None, True), (1, "upstream 400: maximum context length is 9", False)]


# ---------------------------------------------------------------------------------------------- openai

def test_openai_sync_and_async_put_a_stream_together_to_the_plain_reply(tmp_path):
    upstream = Fake(calling, calling, calling, silent, silent)
    fields = {"model": "planner", "messages": MESSAGES, "tools": TOOLS}
    plain, streamed = [], []

    async def test(proxy, url):
        def work(episode):
            with client(url, episode) as c, c.chat.completions.stream(**fields, stream_options={"include_usage": True}) as events:
                return events.get_final_completion()

        plain.append(await ask(url, "a", tools=TOOLS))
        streamed.append(await asyncio.to_thread(work, "b"))
        async with openai.AsyncOpenAI(base_url=f"{url}/ep/c/v1", api_key="any", max_retries=0) as c:
            async with c.chat.completions.stream(**fields) as events:
                streamed.append(await events.get_final_completion())
            plain.append(await c.chat.completions.create(**fields, user="x"))
            chunks = [chunk async for chunk in await c.chat.completions.create(**fields, user="y", stream=True)]
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "tool_calls"]

    calls = run(test, upstream, tmp_path)
    expected = plain[0].choices[0]
    for completion in streamed:
        choice = completion.choices[0]
        assert choice.finish_reason == expected.finish_reason == "tool_calls"
        assert choice.message.content == expected.message.content == "Two things to find."
        assert [(t.id, t.function.name, t.function.arguments) for t in choice.message.tool_calls] == [
            (t.id, t.function.name, t.function.arguments) for t in expected.message.tool_calls] == [
            (t["id"], t["function"]["name"], t["function"]["arguments"]) for t in CALLS]
    assert streamed[0].usage.total_tokens == plain[0].usage.total_tokens == 6 and streamed[1].usage is None
    assert plain[1].choices[0].message.content is None
    assert len(calls) == 5 and not any(records.call_problem(c) for c in calls)


def test_openai_gets_logprobs_and_parallel_tool_choice_passes(tmp_path):
    upstream = Fake(calling)

    async def test(proxy, url):
        def work():
            with client(url) as c:
                return list(c.chat.completions.create(model="planner", messages=MESSAGES, tools=TOOLS, stream=True, logprobs=True,
                                                      top_logprobs=2, parallel_tool_calls=True))
        chunks = await asyncio.to_thread(work)
        assert [t.logprob for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content] == [0, -0.5, -1.0]

    [call] = run(test, upstream, tmp_path)
    assert call.extra["request"] == {"parallel_tool_calls": True} and upstream.seen[0]["top_logprobs"] == 2


# ---------------------------------------------------------------------------------------------- pydantic-ai, as RPent uses it

def agent(url, episode, found):
    model = OpenAIChatModel("planner", provider=OpenAIProvider(base_url=f"{url}/ep/{episode}/v1", api_key="any"))
    made = pydantic_ai.Agent(model, system_prompt="You move things.")

    @made.tool_plain
    def locate(name: str) -> str:
        found.append(name)
        return f"{name} at x 1 y 2"

    @made.tool_plain
    def look(name: str) -> str:
        found.append(name)
        return "nothing"

    return made


@pytest.mark.parametrize("way", ["run", "run_stream", "run with a handler of events"])
def test_pydantic_ai_runs_its_tools_side_by_side_with_a_picture(tmp_path, way):
    def first(body):
        answer = calling(body)
        if way == "run_stream":                              # it takes the first text that it meets for the final answer
            answer["choices"][0]["message"]["content"] = None
        return answer

    upstream, found, picture = Fake(first, lambda body: reply(body, "Done: both found.")), [], png()
    prompt = ["Find them.", pydantic_ai.BinaryContent(picture, media_type="image/png")]

    async def handler(context, events):
        async for _ in events:
            pass

    async def test(proxy, url):
        made = agent(url, "e", found)
        if way == "run_stream":
            async with made.run_stream(prompt) as result:
                output = "".join([piece async for piece in result.stream_text(delta=True)])
        else:
            output = (await made.run(prompt, event_stream_handler=handler if "handler" in way else None)).output
        assert output == "Done: both found."

    calls = run(test, upstream, tmp_path)
    assert turns(calls) == [(0, None, True), (1, None, True)] and not any(records.call_problem(c) for c in calls)
    assert sorted(found) == sorted(["red mug", "blue tray", "é \"quoted\"\n"])
    assert [b["stream"] for b in upstream.seen] == [False, False]
    assert [c.extra.get("asked", {}).get("stream", False) for c in calls] == [way != "run"] * 2
    sha = records.ImageStore(tmp_path / "images").put(picture)
    assert {"type": "image", "sha256": sha} in calls[0].messages[-1]["content"]
    after = calls[1].messages[len(calls[0].messages):]       # the history that it made of our reply: the same, streamed or not
    assert [m["role"] for m in after] == ["assistant", "tool", "tool", "tool"]
    assert [(c["id"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in after[0]["tool_calls"]] == [
        (c["id"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in CALLS]
    assert after[0]["content"] == (None if way == "run_stream" else "Two things to find.")
    assert after[0]["reasoning"] == "Hm — first the mug."
    assert [m["tool_call_id"] for m in after[1:]] == [c["id"] for c in CALLS]


def test_pydantic_ai_s_retries_are_one_turn(tmp_path):
    upstream = Fake(UpstreamError(500, "boom"), UpstreamError(429, "slow down", retry_after="0"))

    async def test(proxy, url):
        assert (await agent(url, "e", []).run("Hello")).output == "ok"

    calls = run(test, upstream, tmp_path)
    assert turns(calls) == [(0, "upstream 500: boom", False), (0, "upstream 429: slow down", False), (0, None, True)]


# ---------------------------------------------------------------------------------------------- large bodies, other APIs

def test_16_megabytes_of_pictures_by_openai_and_requests(tmp_path):
    pictures = [png(i) + os.urandom(4_000_000) for i in range(3)]
    content = [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(p).decode()}} for p in pictures]
    messages, upstream = [{"role": "user", "content": content}], Fake()
    body = {"model": "planner", "messages": messages}
    assert len(json.dumps(body)) > 16_000_000

    async def test(proxy, url):
        assert (await ask(url, "a", messages=messages)).choices[0].message.content == "ok"
        r = await asyncio.to_thread(requests.post, f"{url}/ep/b/v1/chat/completions", json={**body, "stream": True})
        assert r.status_code == 200 and lines(r.content)

    calls = run(test, upstream, tmp_path)
    assert [c.delivered for c in calls] == [True, True] and all(b["messages"] == messages for b in upstream.seen)
    store = records.ImageStore(tmp_path / "images")
    assert [store.get(part["sha256"]) for part in calls[1].messages[0]["content"]] == pictures
    assert (tmp_path / "calls.jsonl").stat().st_size < 10_000


@pytest.mark.parametrize("prefix", ["/v1", "/ep/e/v1"])
@pytest.mark.parametrize("api", ["responses", "responses/resp_1/cancel", "messages", "messages/count_tokens", "completions"])
def test_another_api_gets_a_501_in_its_own_form_that_names_the_way_out(tmp_path, prefix, api):
    async def test(proxy, url):
        status, answer = await post(url, {"model": "x"}, path=f"{prefix}/{api}")
        assert status == 501
        for word in ("chat/completions", "chat.completions.create", "OpenAIChatModel", "openai-chat:<name>"):
            assert word in answer["error"]["message"]
        if api.startswith("messages"):
            assert answer["type"] == "error" and set(answer["error"]) == {"type", "message"}
        else:
            assert set(answer) == {"error"} and answer["error"]["code"] == 501

    assert run(test, Fake(), tmp_path) == []


def test_the_openai_client_s_responses_api_fails_once_and_says_why(tmp_path):
    async def test(proxy, url):
        def work():
            with client(url, max_retries=2) as c:
                c.responses.create(model="planner", input="Hello")
        with pytest.raises(openai.APIStatusError, match="chat.completions.create") as caught:
            await asyncio.to_thread(work)
        assert caught.value.status_code == 501 and proxy.counts["refused"] == 1          # no retry of what cannot work

    assert run(test, Fake(), tmp_path) == []
