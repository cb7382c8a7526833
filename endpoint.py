"""A model that is used and not trained, behind an OpenAI-compatible URL: teacher (collect.py), rewriter and judge (rewrite.py).

Nothing is asked of it that only training needs: a strict server answers 400 to token ids, log-probs, top_k, …. What fails for a while
(429, 5xx, lost connections) is sent again a bounded number of times. Calls, retries and tokens are counted.

Reads   OPENAI_API_KEY, sent as Bearer if it is set
Writes  (Answers) a JSONL of paid answers, so that a killed command does not pay twice: key, role, model, content, usage
"""

import asyncio
import collections
import email.utils
import fcntl
import hashlib
import json
import re
import threading
import time
import zlib
from concurrent.futures import Future
from pathlib import Path

from harness.chat import CONTEXT
from records import BadInput, JsonlWriter, PROFILES, read_jsonl, TRAIN_SAMPLING, writing
from upstream import HttpUpstream, UpstreamError

TRIES = 5                   # of one call
BACKOFF = 1.0               # seconds before the first retry, doubled each time, unless the server says Retry-After
MAX_WAIT = 120.0            # seconds: a longer Retry-After is not waited for
MODELS_WAIT = 10.0          # seconds per server for GET /models: one may listen and never answer
OPENAI_FIELDS = {  # of a chat completion's body, as api.openai.com takes them; other fields get 400 there
    "model", "messages", "tools", "tool_choice", "parallel_tool_calls", "temperature", "top_p", "presence_penalty", "frequency_penalty",
    "seed", "max_completion_tokens", "stop", "response_format",
}
REFUSALS = 5                # of a command's first so many requests, all refused with 400: it is the command's fault, not the requests'


def openai_body(body):
    """The same request in fields of the OpenAI API alone. Values stay explicit: a server's own defaults may be anything."""
    body = {**body, "max_completion_tokens": body.get("max_completion_tokens") or body.get("max_tokens")}
    return {k: v for k, v in body.items() if k in OPENAI_FIELDS and v is not None}


def check_profile(name, api):
    """BadInput if the sampling profile says what the API cannot: the record must not name a value that was never sent."""
    lost = {k: v for k, v in PROFILES[name].items() if api == "openai" and k not in OPENAI_FIELDS and v != TRAIN_SAMPLING[k]}
    if lost:
        raise BadInput(f"--sampling {name} sets {', '.join(f'{k}={v}' for k, v in lost.items())}, which the OpenAI API does not take; "
                       "choose another profile, or --teacher-api vllm where the server is vLLM")


def wait_before(retry, error):
    """Seconds to wait before retry 0, 1, …: what the server's Retry-After says (seconds or a date), else doubling."""
    said = error.retry_after or ""
    if re.fullmatch(r"\d+(\.\d+)?", said):
        return float(said)
    try:
        if date := email.utils.parsedate_tz(said):
            return max(0.0, email.utils.mktime_tz(date) - time.time())
    except (ValueError, OverflowError):                    # a year that no calendar has
        return float("inf")
    return BACKOFF * 2 ** retry


def nothing_paid():
    return collections.Counter(calls=0, retries=0, failed=0, prompt_tokens=0, completion_tokens=0, without_usage=0)


def usage_of(reply):
    """What a reply says it has cost: {"prompt_tokens", "completion_tokens"}, or {} if it does not say both."""
    usage = reply["usage"] if isinstance(reply.get("usage"), dict) else {}
    told = {k: usage.get(k) for k in ("prompt_tokens", "completion_tokens")}
    return told if all(isinstance(n, int) for n in told.values()) else {}


def count(counts, reply):
    counts.update(usage_of(reply), calls=1, without_usage=int(not usage_of(reply)))


class Endpoint:
    """One model behind one or several URLs (comma-separated), with upstream.py's face.

    An episode stays on its URL (its prefix is cached there); a retry goes to the next one. timeout: seconds for one try; None where the
    caller has its own (the proxy). `counts` is what was paid.
    """
    version_is_a_name = True                               # given by the user, not derived from weights (adapters.Run.check_served)

    def __init__(self, urls, policy_version="", model="", api="openai", timeout=None):
        self.servers = [HttpUpstream(url.strip(), policy_version, model) for url in urls.split(",")]
        self.url, self.policy_version, self.model, self.api, self.timeout = urls, policy_version, model, api, timeout
        self.counts = nothing_paid()

    async def find_model(self):
        """Learns the name from /v1/models; BadInput if they offer a choice or differ."""
        names = []
        for server in self.servers:
            reply = await server.ask("GET", server.url + "/models")
            found = [m.get("id") for m in reply.get("data") or []] if isinstance(reply, dict) else []
            if len(found) != 1:
                raise BadInput(f"{server.url}/models offers {len(found)} models {found[:5]}; name one (--teacher-model, --rewriter-model, "
                               "--judge-model)")
            names += found
        if len(set(names)) > 1:
            raise BadInput(f"{self.url}: different models {names}; give URLs of one model")
        self.model = names[0]

    async def ready(self):
        if not self.model:
            try:
                async with asyncio.timeout(MODELS_WAIT * len(self.servers)):
                    await self.find_model()
            except (UpstreamError, TimeoutError) as e:
                raise BadInput(f"no model server at {self.url} ({str(e) or 'no answer to GET /models'})") from None

    async def chat(self, body, episode_id=""):
        body = {**(openai_body(body) if self.api == "openai" else body), "model": self.model}
        first, waited = zlib.crc32(episode_id.encode()), 0.0
        for k in range(TRIES):
            try:
                async with asyncio.timeout(self.timeout):
                    reply = await self.servers[(first + k) % len(self.servers)].chat(body, episode_id)
                if not isinstance(reply, dict) or not reply.get("choices"):
                    raise UpstreamError(502, f"reply is no chat completion: {str(reply)[:100]}")
                break
            except TimeoutError:
                error = UpstreamError(504, f"no reply within {self.timeout:g} s", "timeout")
            except UpstreamError as e:
                error = e
            wait = wait_before(k, error)
            if not (error.status in (408, 429) or error.status >= 500) or k + 1 == TRIES or wait > MAX_WAIT:
                self.counts["failed"] += 1
                raise error
            self.counts["retries"] += 1
            waited += wait
            await asyncio.sleep(wait)
        count(self.counts, reply)
        return {**reply, "queue_seconds": waited} if waited else reply     # adapters tell slow serving from a slow planner by it

    async def close(self):
        for server in self.servers:
            await server.close()


class Shared:
    """An upstream that several runs use one after the other, in one event loop: adapters.run closes what it is given, this stays open.

    Counts what its own run asks for; whoever made `upstream` closes it.
    """

    def __init__(self, upstream):
        self.upstream, self.paid = upstream, nothing_paid()

    def __getattr__(self, name):
        return getattr(self.upstream, name)

    @property
    def counts(self):
        return {**getattr(self.upstream, "counts", {}), **self.paid}

    async def chat(self, body, episode_id=""):
        try:
            reply = await self.upstream.chat(body, episode_id)
        except UpstreamError:
            self.paid["failed"] += 1
            raise
        count(self.paid, reply)
        return reply

    async def close(self):
        pass


def told(counts):
    """Counts of an Endpoint as words."""
    return f"{counts['calls']} calls ({counts['retries']} retries, {counts['failed']} failed), {tokens(counts)}"


def tokens(counts):
    """Tokens as words, and how far the sum can be trusted."""
    silent = f" ({counts['without_usage']} replies did not say what they cost)" if counts["without_usage"] else ""
    return f"{counts['prompt_tokens']} prompt + {counts['completion_tokens']} completion tokens{silent}"


class Answers:
    """Endpoints by role for threads: ask(role, chat messages) -> answer. What was paid for is kept in a file and never asked again.

    The key is a hash of the whole request (model, messages, temperature, limit), so that the same question gives the same answer in every
    run. After the first endpoint that is down nothing more is asked: the command ends, and its repetition continues from the file.
    """

    def __init__(self, path, urls, max_tokens, timeout):
        """urls: {role: (URL, model name or "")}; max_tokens of an answer; timeout of one try (s)."""
        self.endpoints = {role: Endpoint(url, model=model, timeout=timeout) for role, (url, model) in urls.items()}
        self.path, self.max_tokens = Path(path), max_tokens
        self.lock, self.futures, self.used, self.broken = threading.Lock(), {}, {}, None      # futures: key -> row, paid or on its way
        self.first, self.refused, self.known = collections.defaultdict(set), set(), set()     # role -> keys; keys; (role, model)
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.held = open(self.path, "ab")
        try:
            fcntl.flock(self.held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadInput(f"{self.path}: another process writes its answers there; wait for it, or give another --answers") from None
        self.writer = JsonlWriter(self.path)
        for _, row in read_jsonl(self.path, ("key", "role", "content", "usage")):
            self.futures[row["key"]] = Future()
            self.futures[row["key"]].set_result(row)
            self.known.add((row["role"], row.get("model")))
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True, name="answers")
        self.thread.start()

    def __enter__(self):
        try:
            for endpoint in self.endpoints.values():
                asyncio.run_coroutine_threadsafe(endpoint.ready(), self.loop).result()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_):
        self.close()
        for role, cost in self.cost().items():             # however the command ends: money was spent
            print(f"{role} {cost['model']}: this command paid {told(cost['this_command'])}; {cost['answers']} answers used, paid now or "
                  f"before: {tokens(cost)}", flush=True)

    def ask(self, role, messages):
        """-> (the answer's text, None), or (None, why this request gets none: request_too_long | request_refused). BadInput: the endpoint
        is down, refuses whatever it is asked, or the answer cannot be kept."""
        endpoint = self.endpoints[role]
        body = {"model": endpoint.model, "messages": messages, "temperature": 0, "max_tokens": self.max_tokens}
        key = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        with self.lock:
            if self.broken:
                raise self.broken
            if key not in self.futures:
                if len(self.first[role]) < REFUSALS:
                    self.first[role].add(key)
                self.futures[key] = asyncio.run_coroutine_threadsafe(self._pay(key, role, body), self.loop)
        try:
            row = self.futures[key].result()
        except UpstreamError as e:
            if e.status in (400, 413) and CONTEXT.search(e.message):
                return None, "request_too_long"
            if e.status == 400 and not self._hopeless(role, key):      # e.g. a content filter
                return None, "request_refused"
            self.broken = BadInput(f"--{role} {endpoint.url}: {e}; paid answers are kept in {self.path}: mend the cause and repeat the "
                                   "command")
            raise self.broken from None
        except OSError as e:
            self.broken = BadInput(f"{self.path}: cannot keep a paid answer ({e.strerror}); make room and repeat the command")
            raise self.broken from None
        with self.lock:
            self.used[key] = row
        return row["content"], None

    def _hopeless(self, role, key):
        """Notes a refusal; True if the model has refused the command's first requests and never answered one, nor in earlier commands."""
        with self.lock:
            self.refused.add(key)
            unknown = (role, self.endpoints[role].model) not in self.known
            return unknown and len(self.first[role]) == REFUSALS and self.first[role] <= self.refused

    async def _pay(self, key, role, body):
        reply = await self.endpoints[role].chat(body, key)
        try:
            content = reply["choices"][0]["message"].get("content")
        except (LookupError, TypeError, AttributeError) as e:
            raise UpstreamError(502, f"malformed reply ({type(e).__name__}: {e})") from None
        content = content if isinstance(content, str) else ""      # reasoning alone, or parts: read as no answer
        row = {"key": key, "role": role, "model": body["model"], "content": content, "usage": usage_of(reply)}
        self.writer.append(row)
        return row

    def cost(self):
        """{role: what the answers that were used have cost, whenever they were paid, and what this command asked for}."""
        out = {}
        for role, endpoint in self.endpoints.items():
            rows = [row["usage"] for row in self.used.values() if row["role"] == role]
            out[role] = {"model": endpoint.model, "answers": len(rows),
                         **{k: sum(u.get(k) or 0 for u in rows) for k in ("prompt_tokens", "completion_tokens")},
                         "without_usage": sum(not u for u in rows),
                         "this_command": dict(endpoint.counts)}
        return out

    def close(self):
        """Ends what is under way: threads that wait for an answer get CancelledError, later ones BadInput."""
        with self.lock:
            self.broken = self.broken or BadInput("the command ends")
            running = [future for future in self.futures.values() if not future.done()]
        for future in running:
            future.cancel()

        async def close():
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)
            for endpoint in self.endpoints.values():
                await endpoint.close()
        asyncio.run_coroutine_threadsafe(close(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()
        self.writer.close()
        self.held.close()
