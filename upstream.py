"""What the proxy may stand before: a model server over HTTP (here), several (serving.Fleet), the in-process engine (engine.py).

All have
    await ready()                   returns when calls may be sent; waits while new weights are being loaded
    await chat(body, episode_id)    -> chat.completion dict as vLLM's, with token ids and log-probs; the body is left unchanged
    await close()
    policy_version, model           of what answers at this moment
and raise UpstreamError, which the proxy records as the call's error.
"""

import asyncio
import os

import aiohttp

import records


class UpstreamError(Exception):
    """The model server failed. `kind` ("timeout", "connection", …; default: the status) names it in the record.

    retry_after: the server's Retry-After header, as sent.
    """

    def __init__(self, status, message, kind=None, retry_after=None):
        super().__init__(f"upstream {kind or status}: {message}")
        self.status, self.message, self.kind, self.retry_after = status, message, kind, retry_after


class HttpUpstream:
    """An OpenAI-compatible server (vLLM). `url` with or without /v1; `policy_version` of the checkpoint it serves."""

    def __init__(self, url, policy_version="", model=""):
        url = url.rstrip("/").removesuffix("/chat/completions")
        self.url = url if url.endswith("/v1") else url + "/v1"
        self.policy_version, self.model, self.session = policy_version, model, None

    async def ask(self, method, url, data=None, plain=False):
        """One exchange with an absolute URL -> its JSON; UpstreamError otherwise. plain: a reply that is no JSON is returned as text."""
        if self.session is None:
            # Idle connections go after 2 s: uvicorn closes its end after 5, and a POST into that closing is lost.
            key = os.environ.get("OPENAI_API_KEY")
            self.session = aiohttp.ClientSession(
                headers={"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {}),
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10))      # the total is Proxy's `timeout`
        try:
            async with self.session.request(method, url, data=data) as response:
                raw, status, retry_after = await response.read(), response.status, response.headers.get("Retry-After")
                if status >= 500:
                    response.close()                       # vLLM closes its end after a 500 without saying so: the next call would be lost
        except (aiohttp.ClientError, OSError) as e:
            raise UpstreamError(502, f"{type(e).__name__}: {e}", "connection") from None
        try:
            reply = records.from_json(raw)
        except ValueError as e:
            if status == 200 and not plain:
                raise UpstreamError(502, f"reply is not JSON ({e})") from None
            reply = raw[:500].decode(errors="replace")
        if status != 200:
            error = reply.get("error", reply) if isinstance(reply, dict) else reply
            message = str(error.get("message", error) if isinstance(error, dict) else error)
            raise UpstreamError(status, message[:2000], retry_after=retry_after)       # vLLM's may repeat the request
        return reply

    async def find_model(self):
        """Learns the served model's name from /v1/models."""
        reply = await self.ask("GET", self.url + "/models")
        if isinstance(reply, dict) and reply.get("data"):
            self.model = reply["data"][0]["id"]

    async def ready(self):
        if not self.model:
            try:
                async with asyncio.timeout(10):            # one that listens and never answers would hold calls for ever
                    await self.find_model()
            except TimeoutError:
                raise UpstreamError(504, "no answer to GET /models within 10 s", "timeout") from None

    async def chat(self, body, episode_id=""):
        return await self.ask("POST", self.url + "/chat/completions", records.to_json(body))

    async def close(self):
        if self.session is not None:
            session, self.session = self.session, None
            await session.close()
