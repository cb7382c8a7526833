"""Recording proxy: stands between a harness and the model server and keeps one `records.Call` per model call.

    harness -- POST /ep/<episode_id>/v1/chat/completions --> proxy --> upstream (vLLM, or an in-process engine)

Reads   chat completions of any unmodified OpenAI client; the path names the episode (or the header x-episode-id
        on /v1/chat/completions; with neither, every call is an episode "anon-…" of its own).
Writes  OUT/arrivals.jsonl  one line when a request arrives, so that a kill loses none
        OUT/calls.jsonl     the complete Call, once its reply has been written to the client (or could not be)
        OUT/images/         pictures by content hash; messages in both files name the hash in their place
No manifest: only the stage or the harness's owner knows when a run is whole.

On the way up every sampling field comes from the run's profile and is sent explicitly (what the client asked
otherwise is kept as `asked`), max_tokens is the smaller of the client's and the run's, each call has its own seed,
token ids and log-probs are requested. On the way down what the client did not ask for is taken away again.

Retries: client libraries re-send a byte-identical body (openai counts in x-stainless-retry-count). A request is a
retry if its episode has seen the same bytes before and (a) that header is above 0, or (b) they were the episode's
previous call and that call failed, was not delivered, or its client has gone. A retry keeps the turn, and so the
seed, of the call that it repeats, names it in `retry_of`, and is never a second turn:
  1. that call failed, was undelivered, or its client has gone: a fresh upstream call; its record keeps its error
  2. it is in flight, its client still connected: both wait for the one upstream request; its record becomes
     "superseded by a retry" and counts as undelivered
  3. it was delivered as far as we could see, and no new turn since: that reply is sent again; nothing is recorded
The same bytes without (a) or (b), e.g. sent again after a delivered reply, are a new turn with a new seed.

    python proxy.py --upstream http://127.0.0.1:8000 --out run/calls --model run/sft     (one process, no torchrun)
"""

import argparse
import asyncio
import collections
import hashlib
import json
import re
import signal
import sys
import time
import traceback
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

import records
from upstream import HttpUpstream, UpstreamError

MAX_BODY = 64 * 2**20       # bytes; RPent's requests with pictures reach 5.6 MB
EPISODE_ID = re.compile(r"[A-Za-z0-9._~-]{1,128}")
PARTS = ("text", "refusal", "thinking", "image_url")       # content parts that can be recorded in full
NEUTRAL = {  # fields that bend the policy's own distribution (or the one-reply form), and their values that do not
    "n": (None, 1), "best_of": (None, 1), "stream": (None, False), "use_beam_search": (None, False),
    "ignore_eos": (None, False), "min_tokens": (None, 0), "logit_bias": (None, {}), "allowed_token_ids": (None, []),
    "bad_words": (None, []), "thinking_token_budget": (None,), "structured_outputs": (None,), "guided_json": (None,),
    "guided_regex": (None,), "guided_choice": (None,), "guided_grammar": (None,),
    "response_format": (None, {"type": "text"}), "tool_choice": (None, "auto", "none"),
}
KNOWN = {  # fields that a Call holds elsewhere or that the proxy sets itself; all others are kept as `request`
    "messages", "tools", "model", "chat_template_kwargs", "stream", "stream_options", "n", "logprobs", "top_logprobs",
    "return_token_ids", "include_reasoning", "skip_special_tokens", "max_tokens", "max_completion_tokens", "seed",
}


class Refused(Exception):
    """Refused(status, message): the request is wrong or cannot be recorded; an OpenAI-style error and no Call."""


# ---------------------------------------------------------------------------------------- requests and replies

def derive_seed(seed, episode_id, turn):
    """Own seed of a call, in [0, 2^53): exact in JSON. Episode ids may recur, so give each round its own `seed`."""
    digest = hashlib.blake2b(f"{seed}/{episode_id}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 11


def parse_body(raw):
    """Request bytes -> dict; Refused if it is no chat completion or cannot be recorded faithfully."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise Refused(400, f"request body is not JSON: {e}") from None
    messages = body.get("messages") if isinstance(body, dict) else None
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise Refused(400, "the body must be an object whose messages are a non-empty list of objects")
    for name, kind in (("tools", list), ("chat_template_kwargs", dict), ("model", str)):
        if not isinstance(body.get(name), (kind, type(None))):
            raise Refused(400, f"{name} must be a {kind.__name__} or null, found {type(body[name]).__name__}")
    if body.get("stream"):
        raise Refused(400, "stream: true is not recorded; send stream: false and read the whole reply")
    for name, neutral in NEUTRAL.items():
        if name in body and body[name] not in neutral:
            raise Refused(400, f"{name}={json.dumps(body[name])[:80]} is not supported: the recorded log-probs would "
                               f"not be the policy's; accepted: {', '.join(map(json.dumps, neutral))}")
    for name in ("max_tokens", "max_completion_tokens"):
        if body.get(name) is not None and (type(body[name]) is not int or body[name] < 1):
            raise Refused(400, f"{name} must be a positive integer, found {body[name]!r}")
    return body


def store_pictures(messages, images):
    """Messages with every picture put into `images` and replaced by its hash; the originals stay as they are."""
    return [{**m, "content": [_store_part(part, images) for part in m["content"]]}
            if isinstance(m.get("content"), list) else m for m in messages]


def _store_part(part, images):
    kind = part.get("type", "text") if isinstance(part, dict) else "text"
    if kind not in PARTS:
        raise Refused(400, f"content part of type {kind!r} cannot be recorded; supported: {', '.join(PARTS)}")
    if kind != "image_url":
        return part
    url = part.get("image_url")
    url = str(url.get("url") if isinstance(url, dict) else url)
    try:
        return {"type": "image", "sha256": images.put(records.decode_data_uri(url))}
    except ValueError as e:
        raise Refused(400, f"bad picture: {e}") from None


def read_reply(call, reply):
    """Fills a Call from an upstream reply. Missing ids or log-probs stay empty: records.call_problem() names them."""
    try:
        choice, call.prompt_token_ids = reply["choices"][0], reply.get("prompt_token_ids") or []
        call.message, call.finish_reason = dict(choice["message"]), choice.get("finish_reason")
        call.token_ids = choice.get("token_ids") or []
        call.logprobs = [entry.get("logprob") for entry in (choice.get("logprobs") or {}).get("content") or []]
        call.model = reply.get("model") or call.model
        if "queue_seconds" in reply:                       # of the in-process engine; adapters tell slow serving by it
            call.extra["queue_seconds"] = reply["queue_seconds"]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as e:
        raise UpstreamError(502, f"malformed reply ({type(e).__name__}: {e})") from None
    if call.finish_reason in ("abort", "error"):           # vLLM: the engine was paused or broke; a fragment
        raise UpstreamError(503, f"generation ended with finish_reason {call.finish_reason}")


def client_reply(call, reply, body):
    """The bytes that the harness gets: the engine's reply without what only the recording asked for."""
    hidden = {"policy_version", "queue_seconds"}
    if not body.get("return_token_ids"):
        hidden |= {"prompt_token_ids", "token_ids"}
    choice = {k: v for k, v in reply["choices"][0].items() if k not in hidden}
    if not body.get("logprobs"):
        choice["logprobs"] = None
    out = {"id": f"chatcmpl-{call.call_id}", "object": "chat.completion", "created": int(call.started)}
    out.update((k, v) for k, v in reply.items() if k not in hidden)
    return json.dumps({**out, "model": call.model, "choices": [choice]}).encode()


def json_response(value, status=200):
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return web.Response(body=body, status=status, content_type="application/json")


def error_response(status, message, kind="invalid_request_error"):
    return json_response({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)


def upstream_error_response(e):
    """4xx (context overflow) is the request's fault and passes as the engine said it; the rest: 502, 503 or 504."""
    if 400 <= e.status < 500:
        return error_response(e.status, e.message)
    return error_response(e.status if e.status in (503, 504) else 502, str(e), "upstream_error")


# ---------------------------------------------------------------------------------------- the proxy

@dataclass(eq=False)
class Flight:
    """What retries need to know of a call; small, since it stays until its episode is forgotten."""
    call_id: str
    turn: int
    request: web.Request | None = None      # while in flight
    task: asyncio.Task | None = None        # the upstream request, shared with a retry that joins it; while in flight
    ok: bool | None = None                  # None: in flight; else complete and delivered
    reply: bytes = b""                      # the delivered reply, kept for the episode's last call
    superseded: bool = False

    def client_gone(self):
        return self.request is None or self.request.transport is None or self.request.transport.is_closing()


@dataclass(eq=False)
class EpisodeLog:
    turns: int = 0
    last: Flight | None = None
    by_digest: dict = field(default_factory=dict)      # sha256 of the body -> the latest Flight that sent it
    flying: set = field(default_factory=set)
    calls: list = field(default_factory=list)          # finished Calls, until taken
    idle: asyncio.Event = field(default_factory=asyncio.Event)


class Proxy:
    """upstream: what upstream.py describes (the Call shares its messages with the body that is sent). sampling: a full
    profile. timeout: seconds for one reply.

    standalone: nobody takes calls, so none are kept in memory, and episodes already in `out_dir` go on at their next
    turn (else an episode that this process has not seen starts at turn 0, as a repeated attempt should).
    """

    def __init__(self, upstream, out_dir, sampling, max_tokens, seed, timeout=1800.0, standalone=False):
        missing = set(records.TRAIN_SAMPLING) - set(sampling)
        assert not missing, f"sampling profile lacks {sorted(missing)}"
        self.upstream, self.sampling, self.max_tokens, self.seed = upstream, dict(sampling), max_tokens, seed
        self.out, self.timeout, self.standalone = Path(out_dir), timeout, standalone
        self.images = records.ImageStore(self.out / "images")
        self.episodes, self.counts = {}, collections.Counter()     # episode_id -> EpisodeLog
        self.stopping, self.runner = False, None

    async def start(self, port=0):
        """Recovers `out_dir`, listens on the loopback interface, returns the port (0: any free one)."""
        self.arrivals = records.JsonlWriter(self.out / "arrivals.jsonl")
        self.calls = records.JsonlWriter(self.out / "calls.jsonl")
        self._recover()
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._errors])
        for prefix in ("/ep/{episode_id}/v1", "/v1"):
            app.router.add_post(prefix + "/chat/completions", self._chat)
            app.router.add_get(prefix + "/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_route("*", "/{path:.*}", self._unknown)
        # handler_cancellation: a client that leaves ends its call at once, and its upstream request with it.
        self.runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=2.0)
        await self.runner.setup()
        try:
            await web.TCPSite(self.runner, "127.0.0.1", port, backlog=1024).start()
        except OSError as e:
            raise records.BadInput(f"port {port}: {e.strerror}; choose another, or 0 for any free one") from None
        return self.runner.addresses[0][1]

    async def stop(self):
        """Calls in flight are recorded as interrupted. The upstream stays open: it belongs to the caller."""
        self.stopping = True
        for flight in [flight for log in self.episodes.values() for flight in log.flying]:
            flight.task.cancel()
        if self.runner:
            await self.runner.cleanup()
        self.arrivals.close()
        self.calls.close()

    def take(self, episode_id, forget=False):
        """Finished Calls of an episode by turn, then arrival, failed and retried ones too. forget: drop all we hold."""
        assert not self.standalone, "a standalone proxy keeps no calls in memory: read calls.jsonl"
        log = self.episodes.pop(episode_id, None) if forget else self.episodes.get(episode_id)
        return sorted(log.calls, key=lambda call: (call.turn, call.started)) if log else []

    async def settle(self, episode_id):
        """Waits until no call of the episode is in flight (a client that left ends its own)."""
        log = self.episodes.get(episode_id)
        if log and log.flying:
            await log.idle.wait()

    def _recover(self):
        """Arrivals of a killed proxy that have no Call get one with error "interrupted"."""
        ok = {call.call_id: call.delivered and not call.error for call in records.read_calls(self.calls.path)}
        for _, row in records.read_jsonl(self.arrivals.path, ("call_id", "episode_id", "turn", "body_sha256")):
            digest = row.pop("body_sha256")
            if row["call_id"] not in ok:
                self.calls.append({**row, "error": "interrupted"})
                ok[row["call_id"]] = False
                self.counts["interrupted"] += 1
            if self.standalone:
                log = self.episodes.setdefault(row["episode_id"], EpisodeLog())
                log.last = log.by_digest[digest] = Flight(row["call_id"], row["turn"], ok=ok[row["call_id"]])
                log.turns = max(log.turns, row["turn"] + 1)
        if self.counts["interrupted"]:
            print(f"proxy: {self.calls.path}: {self.counts['interrupted']} calls of an earlier run were cut short; "
                  f"recorded as interrupted", file=sys.stderr)

    # ------------------------------------------------------------------ one call: arrive, generate, reply, record

    async def _chat(self, request):
        raw = await request.read()
        named = request.match_info.get("episode_id") or request.headers.get("x-episode-id")
        episode_id = named or f"anon-{uuid.uuid4().hex}"
        if not EPISODE_ID.fullmatch(episode_id):
            raise Refused(400, f"episode id {episode_id[:160]!r} must match {EPISODE_ID.pattern}")
        body = parse_body(raw)
        messages = store_pictures(body["messages"], self.images)
        # No await from here until the flight is registered: turns follow arrival.
        log = self.episodes.setdefault(episode_id, EpisodeLog())
        digest, count = hashlib.sha256(raw).hexdigest(), request.headers.get("x-stainless-retry-count", "0")
        earlier = self._earlier(log, digest, count.isdigit() and int(count) > 0)
        if earlier and earlier.ok and earlier.reply:
            self.counts["replayed"] += 1
            return json_response(earlier.reply)
        call, sent = self._arrive(episode_id, log, body, messages, digest, earlier)
        flight = Flight(call.call_id, call.turn, request)
        if earlier and earlier.ok is None and not earlier.client_gone():
            earlier.superseded, flight.task = True, earlier.task
        else:
            flight.task = asyncio.create_task(self._generate(episode_id, sent))
        if log.last and not earlier:
            log.last.reply = b""                       # a new turn: the previous reply was read
        log.last = log.by_digest[digest] = flight
        log.flying.add(flight)
        log.idle.clear()
        clock = time.perf_counter()
        try:
            response, flight.reply = await self._answer(call, flight, body)
            await asyncio.sleep(0)                     # lets a disconnect that has already arrived be seen
            await response.prepare(request)
            await response.write_eof()
            call.delivered = call.error is None
            return response
        except ConnectionError:                        # the client left while we wrote
            call.error = call.error or "client gone"
            return response
        except asyncio.CancelledError:                 # … while we waited
            call.error = call.error or ("interrupted" if self.stopping else "client gone")
            raise
        finally:
            self._record(call, flight, log, time.perf_counter() - clock)

    def _earlier(self, log, digest, counted):
        """The Flight that this request repeats (rules (a) and (b) above), or None for a new turn."""
        flight = log.by_digest.get(digest)
        if flight is None or (flight.ok and not flight.reply):         # delivered, and the harness has gone on since
            return None
        failed = flight.ok is False or (flight.ok is None and flight.client_gone())
        return flight if counted or (failed and flight is log.last) else None

    def _arrive(self, episode_id, log, body, messages, digest, earlier):
        """New Call, its arrival line on disk, and the request as it goes upstream."""
        turn = earlier.turn if earlier else log.turns
        self.counts["retries"] += earlier is not None
        log.turns = max(log.turns, turn + 1)
        asked_max = body.get("max_completion_tokens") or body.get("max_tokens") or self.max_tokens
        sampling = {**self.sampling, "max_tokens": min(asked_max, self.max_tokens),
                    "seed": derive_seed(self.seed, episode_id, turn)}
        asked = {k: v for k, v in {**body, "max_tokens": asked_max}.items()
                 if k in sampling and v not in (None, sampling[k])}
        rest = {k: v for k, v in body.items() if k not in KNOWN and k not in sampling and v is not None}
        extra = {"asked": asked, "request": rest, "retry_of": earlier.call_id if earlier else None}
        call = records.Call(
            uuid.uuid4().hex, episode_id, turn, policy_version=self.upstream.policy_version,
            model=body.get("model") or self.upstream.model, messages=messages, tools=body.get("tools") or [],
            chat_template_kwargs=body.get("chat_template_kwargs") or {}, sampling=sampling, started=time.time(),
            extra={k: v for k, v in extra.items() if v})
        self.arrivals.append({**records.to_line(call), "body_sha256": digest})
        sent = {"skip_special_tokens": True, **body, "model": call.model, **sampling, "n": 1, "stream": False,
                "logprobs": True, "return_token_ids": True, "include_reasoning": True}
        for name in ("max_completion_tokens", "stream_options") + (() if body.get("logprobs") else ("top_logprobs",)):
            sent.pop(name, None)
        return call, sent

    async def _generate(self, episode_id, sent):
        """-> (reply, policy version that it was sent to). Waiting for new weights does not count as waiting for a reply."""
        try:
            await self.upstream.ready()
            version = self.upstream.policy_version
            async with asyncio.timeout(self.timeout):
                return await self.upstream.chat(sent, episode_id), version
        except TimeoutError:
            raise UpstreamError(504, f"no reply within {self.timeout:g} s", "timeout") from None
        except UpstreamError:
            raise
        except Exception as e:                         # a bug in an in-process engine must not lose the call
            traceback.print_exc()
            raise UpstreamError(500, f"{type(e).__name__}: {e}", "exception") from e

    async def _answer(self, call, flight, body):
        """Waits for upstream, fills the Call -> (response, its bytes if it is a reply and no error)."""
        try:
            try:
                reply, call.policy_version = await asyncio.shield(flight.task)     # a retry may wait for the same request
            except asyncio.CancelledError:
                if asyncio.current_task().cancelling():        # our own client has gone
                    raise
                raise UpstreamError(503, "the request was cancelled", "connection") from None
            finally:
                call.policy_version_end = self.upstream.policy_version
            read_reply(call, reply)
            if reply.get("policy_version") not in (None, call.policy_version):
                call.policy_version_end = reply["policy_version"]
            data = client_reply(call, reply, body)
        except UpstreamError as e:
            self.counts["upstream errors"] += 1
            call.error = "interrupted" if self.stopping else str(e)
            return upstream_error_response(e), b""
        call.error = "superseded by a retry" if flight.superseded else None
        return json_response(data), data

    def _record(self, call, flight, log, seconds):
        """All is known about the call: keep it, and stop the generation if nobody waits for it any more."""
        call.seconds = round(seconds, 6)
        log.flying.discard(flight)
        if not flight.task.done() and not any(other.task is flight.task for other in log.flying):
            flight.task.cancel()
        flight.ok, flight.request, flight.task = call.delivered, None, None
        flight.reply = flight.reply if flight.ok else b""
        self.counts["calls"] += 1
        self.counts["client gone"] += call.error == "client gone"
        if not self.standalone:
            log.calls.append(call)
        if not log.flying:
            log.idle.set()
        self.calls.append(records.to_line(call))

    # ------------------------------------------------------------------ other routes

    @web.middleware
    async def _errors(self, request, handler):
        try:
            return await handler(request)
        except Refused as e:
            self.counts["refused"] += 1
            print(f"proxy: refused {request.method} {request.path}: {e.args[0]} {e.args[1]}", file=sys.stderr)
            return error_response(*e.args)
        except UpstreamError as e:                     # of /v1/models; a call's are handled where they are recorded
            return upstream_error_response(e)
        except web.HTTPException as e:                 # 413: body above MAX_BODY
            return error_response(e.status, e.text or e.reason)

    async def _models(self, request):
        if not self.upstream.model and hasattr(self.upstream, "find_model"):
            await self.upstream.find_model()
        model = {"id": self.upstream.model, "object": "model", "created": 0, "owned_by": "upstream"}
        return json_response({"object": "list", "data": [model]})

    async def _health(self, request):
        flying = sum(len(log.flying) for log in self.episodes.values())
        return json_response({"status": "ok", "policy_version": self.upstream.policy_version, "in_flight": flying,
                              "counts": self.counts})

    async def _unknown(self, request):
        if request.path.endswith(("/v1/responses", "/v1/messages", "/v1/completions")):
            raise Refused(501, f"{request.path} is not recorded; use …/v1/chat/completions (RPent: openai-chat:<name>)")
        raise Refused(404, f"no route {request.method} {request.path}; routes: GET /health, and under "
                           f"/ep/<episode_id>/v1 or /v1: POST chat/completions, GET models")


# ---------------------------------------------------------------------------------------- command

async def serve(args):
    version = records.policy_version(args.model) if args.model else ""
    if not version:
        print("proxy: no --model: calls carry no policy version, so rl.py will not train on them", file=sys.stderr)
    upstream = HttpUpstream(args.upstream, version)
    proxy = Proxy(upstream, args.out, records.PROFILES[args.sampling], args.max_tokens, args.seed, args.timeout, True)
    stop = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    port = await proxy.start(args.port)
    try:
        await upstream.find_model()
    except UpstreamError as e:                         # it may still be loading; calls would say so themselves
        print(f"proxy: warning: {upstream.url}: {e}", file=sys.stderr)
    print(f"proxy: http://127.0.0.1:{port}/ep/<episode_id>/v1 -> {upstream.url} (model {upstream.model!r})", flush=True)
    await stop.wait()
    await proxy.stop()
    await upstream.close()
    print("proxy: " + (", ".join(f"{n} {name}" for name, n in proxy.counts.items()) or "no calls"), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=records.Formatter)
    group = parser.add_argument_group("where")
    group.add_argument("--upstream", required=True, metavar="URL", help="model server (OPENAI_API_KEY is sent if set)")
    group.add_argument("--out", required=True, metavar="DIR", help="folder of calls.jsonl and images/")
    group.add_argument("--port", type=int, default=8001, help="on 127.0.0.1; 0: any free one (printed)")
    group.add_argument("--model", metavar="CKPT", help="what the server serves; gives policy_version")
    group = parser.add_argument_group("sampling")
    group.add_argument("--sampling", choices=sorted(records.PROFILES), default="train", help="profile of every call")
    group.add_argument("--max-tokens", type=int, default=8192, help="tokens per response at most")
    group.add_argument("--seed", type=int, default=0, help="of the run; each call derives its own")
    group.add_argument("--timeout", type=float, default=1800.0, help="seconds to wait for one reply")
    args = parser.parse_args()
    records.save_args(args.out, "proxy", args)
    asyncio.run(serve(args))


if __name__ == "__main__":
    records.run_main(main)
