"""What the tests of the proxy share: an in-process upstream, a model server over HTTP, clients."""

import asyncio
import json
import zlib

import aiohttp
import openai
from aiohttp import web

import records
from proxy import Proxy

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
    """In-process upstream: `script` says what successive calls do (an exception, a reply, a function); then `reply`.

    gate: an Event that ready() waits for. held, called: queues that get an item when a call waits there, and when one comes through.
    """
    model, policy_version = "planner", "v1"

    def __init__(self, *script, delay=0.0, gate=None):
        self.script, self.delay, self.gate, self.seen, self.cancelled = list(script), delay, gate, [], 0
        self.held, self.called = asyncio.Queue(), asyncio.Queue()

    async def ready(self):
        if self.gate:
            self.held.put_nowait(None)
            await self.gate.wait()

    async def chat(self, body, episode_id=""):
        self.seen.append(body)
        self.called.put_nowait(None)
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


async def recorded(url):
    """Returns when every answered call is on disk: a client has its reply a moment before the Call is written."""
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(url + "/health") as r:
                if (await r.json())["in_flight"] == 0:
                    return


def turns(calls):
    return [(c.turn, c.error, c.delivered) for c in calls]


def png(seed=0):
    """A tiny valid PNG."""
    def chunk(kind, data):
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", b"\0\0\0\1\0\0\0\1\x08\0\0\0\0")
            + chunk(b"IDAT", zlib.compress(bytes([0, seed]))) + chunk(b"IEND", b""))


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
