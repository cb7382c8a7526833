"""Recording proxy: stands between a harness and the model server and keeps one `records.Call` per model call.

    harness -- POST /ep/<episode_id>/v1/chat/completions --> proxy --> upstream (vLLM, or an in-process engine)

Reads   chat completions of any unmodified OpenAI client; the path names the episode (or the header x-episode-id
        on /v1/chat/completions; with neither, every call is an episode "anon-…" of its own).
Writes  OUT/arrivals.jsonl  one line when a request arrives, so that a kill loses none
        OUT/calls.jsonl     the complete Call, once its reply has been written to the client (or could not be)
        OUT/images/         pictures by content hash; messages in both files name the hash in their place
No manifest: only the stage or the harness's owner knows when a run is whole. Two processes on one folder: the second is
refused (DIR/.lock; a stage holds it itself). Once a write fails (disk full), nothing more is recorded and every call is
answered 507: `Proxy.failure` says why, and whoever runs the proxy ends the run.

On the way up (wire.py) every sampling field comes from the run's profile and is sent explicitly (what the client asked
otherwise is kept as `asked`), max_tokens is the smaller of the client's and the run's, each call has its own seed,
token ids and log-probs are requested. On the way down what the client did not ask for is taken away again.
A client that asked for a stream gets server-sent events, all at once when the whole reply is there: upstream is never
streamed from, and an upstream error keeps its HTTP status, so that client libraries retry it.

While upstream exchanges its weights (`ready()`), calls are held. A call carries the policy version at sending and at the
reply; where the two differ, it is never trained on.

Retries: client libraries send the same body again (openai counts in x-stainless-retry-count). A request is a
retry if its episode has seen that body before and (a) that header is above 0, or (b) it was the episode's
previous call and that call failed, was not delivered, or its client has gone. A retry keeps the turn, and so the
seed, of the call that it repeats, names it in `retry_of`, and is never a second turn:
  1. that call failed, was undelivered, or its client has gone: a fresh upstream call; its record keeps its error
  2. it is in flight, its client still connected: both wait for the one upstream request; its record becomes
     "superseded by a retry" and counts as undelivered
  3. it was delivered as far as we could see, and no new turn since: that reply is sent again; nothing is recorded
The same body without (a) or (b), e.g. sent again after a delivered reply, is a new turn with a new seed.

    python proxy.py --out run/calls --model run/sft --engine vllm --replicas 2                  (one process, no torchrun)
    python proxy.py --out run/calls --model run/sft --engine-url http://127.0.0.1:8000,http://127.0.0.1:8001
    curl -X POST http://127.0.0.1:8001/policy -d '{"model": "run/rl-1"}'       the next checkpoint, without a restart; calls wait meanwhile

Exit codes: 0 ended by SIGINT or SIGTERM; 2 bad input, the folder is in use, or a write failed (the same command goes on).
"""

import argparse
import asyncio
import collections
import contextlib
import hashlib
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
import serving
from upstream import HttpUpstream, UpstreamError
from wire import (
    Refused, asked_otherwise, client_reply, derive_seed, engine_request, error_response, json_response, parse_body, read_reply,
    refuse_other_api, reply_response, store_pictures, upstream_error_response)

MAX_BODY = 64 * 2**20       # bytes; RPent's requests with pictures reach 5.6 MB
EPISODE_ID = re.compile(r"[A-Za-z0-9._~-]{1,128}")


@dataclass(eq=False)
class Flight:
    """What retries need to know of a call; small, since it stays until its episode is forgotten."""
    call_id: str
    turn: int
    number: int = 0                         # of arrival in its episode; clocks jump, numbers do not
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
    arrived: int = 0
    last: Flight | None = None
    by_digest: dict = field(default_factory=dict)      # sha256 of the body -> the latest Flight that sent it
    flying: set = field(default_factory=set)
    calls: list = field(default_factory=list)          # (turn, number of arrival, finished Call), until taken
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
        self.failure, self.failed = None, asyncio.Event()          # OSError of the first write that failed

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
        if self.standalone:                            # a stage serves one checkpoint from its first call to its last
            app.router.add_post("/policy", self._policy)
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
        return [call for *_, call in sorted(log.calls, key=lambda item: item[:2])] if log else []

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

    def _write(self, write, *args):
        """write(*args) puts something on disk. The first that fails ends the recording: 507 here, for calls in flight, and from now on."""
        if self.failure is None:
            try:
                return write(*args)
            except OSError as e:
                self.failure = e
                self.failed.set()
                print(f"proxy: {e.filename}: {e.strerror}: nothing more is recorded", file=sys.stderr)
                for flight in [flight for log in self.episodes.values() for flight in log.flying]:
                    flight.task.cancel()
        raise self._full()

    def _full(self):
        return Refused(507, f"{self.failure.filename}: {self.failure.strerror}: calls cannot be recorded any more, so none is answered")

    # ------------------------------------------------------------------ one call: arrive, generate, reply, record

    async def _chat(self, request):
        raw = await request.read()
        named = request.match_info.get("episode_id") or request.headers.get("x-episode-id")
        episode_id = named or f"anon-{uuid.uuid4().hex}"
        if not EPISODE_ID.fullmatch(episode_id):
            raise Refused(400, f"episode id {episode_id[:160]!r} must match {EPISODE_ID.pattern}")
        body = parse_body(raw)
        messages = self._write(store_pictures, body["messages"], self.images)
        # No await from here until the flight is registered: turns follow arrival.
        log = self.episodes.setdefault(episode_id, EpisodeLog())
        digest = hashlib.sha256(records.to_json({**body, "messages": messages})).hexdigest()       # pictures are hashed already
        count = request.headers.get("x-stainless-retry-count", "0")
        earlier = self._earlier(log, digest, count.isdigit() and int(count) > 0)
        if earlier and earlier.ok and earlier.reply:
            self.counts["replayed"] += 1
            return reply_response(earlier.reply, body.get("stream"))
        call, sent = self._arrive(episode_id, log, body, messages, digest, earlier)
        flight = Flight(call.call_id, call.turn, log.arrived, request)
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
        log.turns, log.arrived = max(log.turns, turn + 1), log.arrived + 1
        asked_max = body.get("max_completion_tokens") or body.get("max_tokens") or self.max_tokens
        sampling = {**self.sampling, "max_tokens": min(asked_max, self.max_tokens),
                    "seed": derive_seed(self.seed, episode_id, turn)}
        extra = {**asked_otherwise(body, sampling, asked_max), "retry_of": earlier.call_id if earlier else None}
        call = records.Call(
            uuid.uuid4().hex, episode_id, turn, policy_version=self.upstream.policy_version,
            model=body.get("model") or self.upstream.model, messages=messages, tools=body.get("tools") or [],
            chat_template_kwargs=body.get("chat_template_kwargs") or {}, sampling=sampling, started=time.time(),
            extra={k: v for k, v in extra.items() if v})
        self._write(self.arrivals.append, {**records.to_line(call), "body_sha256": digest})
        return call, engine_request(body, call.model, sampling)

    async def _generate(self, episode_id, sent):
        """-> (reply, policy versions at sending and at its end, seconds held). Waiting for new weights is no waiting for a reply."""
        clock = time.perf_counter()
        try:
            await self.upstream.ready()
            held = int(1000 * (time.perf_counter() - clock)) / 1000            # 0 unless something was awaited
            version = self.upstream.policy_version
            sent["model"] = sent["model"] or self.upstream.model       # ready() may have been the first to reach it
            async with asyncio.timeout(self.timeout):
                reply = await self.upstream.chat(sent, episode_id)
            return reply, version, self.upstream.policy_version, held          # before anybody can exchange weights
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
                reply, *versions, held = await asyncio.shield(flight.task)     # a retry may wait for the same request
                call.policy_version, call.policy_version_end = versions
            except asyncio.CancelledError:
                if asyncio.current_task().cancelling():        # our own client has gone
                    raise
                raise UpstreamError(503, "the request was cancelled", "connection") from None
            finally:
                call.policy_version_end = call.policy_version_end or self.upstream.policy_version
            read_reply(call, reply)
            if held:                                   # to adapters it is time in a queue: not the planner's own
                call.extra["queue_seconds"] = call.extra.get("queue_seconds", 0) + held
            data = client_reply(call, reply, body)
        except UpstreamError as e:
            self.counts["upstream errors"] += 1
            call.error = "interrupted" if self.stopping else str(e)
            response = upstream_error_response(e)
        if self.failure:                               # while we waited
            call.error = "interrupted"
            raise self._full()
        if call.error:
            return response, b""
        call.error = "superseded by a retry" if flight.superseded else None
        return reply_response(data, body.get("stream")), data

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
            log.calls.append((call.turn, flight.number, call))
        if not log.flying:
            log.idle.set()
        try:
            self._write(self.calls.append, records.to_line(call))
        except Refused:
            self.counts["unrecorded"] += 1             # its arrival is on disk: "interrupted" when the run goes on

    # ------------------------------------------------------------------ other routes

    @web.middleware
    async def _errors(self, request, handler):
        try:
            return await handler(request)
        except Refused as e:
            self.counts["refused"] += 1
            print(f"proxy: refused {request.method} {request.path}: {e.args[0]} {e.args[1]}", file=sys.stderr)
            return error_response(*e.args, path=request.path)
        except UpstreamError as e:                     # of /v1/models; a call's are handled where they are recorded
            return upstream_error_response(e)
        except web.HTTPException as e:                 # 413: body above MAX_BODY
            return error_response(e.status, e.text or e.reason)

    async def _models(self, request):
        if not self.upstream.model:
            await self.upstream.ready()
        model = {"id": self.upstream.model, "object": "model", "created": 0, "owned_by": "upstream"}
        return json_response({"object": "list", "data": [model]})

    async def _health(self, request):
        flying = sum(len(log.flying) for log in self.episodes.values())
        dead = getattr(self.upstream, "dead", lambda: None)()
        return json_response({"status": dead or "ok", "policy_version": self.upstream.policy_version, "in_flight": flying,
                              "counts": self.counts}, 503 if dead else 200)

    async def _policy(self, request):
        """POST {"model": CKPT}: the servers exchange their weights for the checkpoint's; calls wait meanwhile. -> {"policy_version": …}"""
        try:
            body = records.from_json(await request.read() or b"null")
        except (ValueError, RecursionError):
            body = None
        folder = body.get("model") if isinstance(body, dict) else None
        if not isinstance(folder, str) or not hasattr(self.upstream, "roll"):
            raise Refused(400, 'POST /policy wants {"model": CKPT}, and a proxy started with --engine vllm or --engine-url')
        try:
            self.rolling = asyncio.create_task(self.upstream.roll(folder))       # goes on when its client leaves
            return json_response({"policy_version": await asyncio.shield(self.rolling)})
        except records.BadInput as e:
            raise Refused(409, str(e)) from None

    async def _unknown(self, request):
        refuse_other_api(request.path)
        raise Refused(404, f"no route {request.method} {request.path}; routes: GET /health, and under "
                           f"/ep/<episode_id>/v1 or /v1: POST chat/completions, GET models")


# ---------------------------------------------------------------------------------------- command

def make_upstream(args):
    if args.upstream:
        given = [n for n in ("engine", "engine_url", *serving.DEFAULTS) if getattr(args, n, None) is not None]
        if given:
            raise records.BadInput(f"--{given[0].replace('_', '-')}: --upstream names any server, unproved, and does not honour it: give "
                                   "one of them (--engine and --engine-url prove their servers)")
        if not args.model:
            print("proxy: no --model: calls carry no policy version, so rl.py will not train on them", file=sys.stderr)
        return HttpUpstream(args.upstream, records.policy_version(args.model) if args.model else "")
    if not args.model:
        raise records.BadInput("give --upstream URL (any server), or --model CKPT with --engine vllm or --engine-url URL[,URL…]")
    return serving.make_upstream(args)


async def serve(args):
    upstream = make_upstream(args)
    proxy = Proxy(upstream, args.out, records.PROFILES[args.sampling], args.max_tokens, args.seed, args.timeout, True)
    with records.writing(args.out):
        port = await proxy.start(args.port)
    stop = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    starting, *ends = (asyncio.create_task(wait) for wait in (upstream.ready(), stop.wait(), proxy.failed.wait()))
    try:
        await asyncio.wait([starting, *ends], return_when=asyncio.FIRST_COMPLETED)
        try:
            starting.done() and starting.result()
        except UpstreamError as e:                     # it may still be loading; calls would say so themselves
            print(f"proxy: warning: {args.upstream}: {e}", file=sys.stderr)
        where = args.upstream or args.engine_url or f"--engine {args.engine or 'transformers'}"
        print(f"proxy: http://127.0.0.1:{port}/ep/<episode_id>/v1 -> {where} (model {upstream.model!r})", flush=True)
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        starting.cancel()
        await proxy.stop()
        await upstream.close()                         # it may own processes
    print("proxy: " + (", ".join(f"{n} {name}" for name, n in proxy.counts.items()) or "no calls"), flush=True)
    if proxy.failure:
        with records.writing(args.out):
            raise proxy.failure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=records.Formatter)
    group = parser.add_argument_group("where")
    group.add_argument("--upstream", metavar="URL", help="any OpenAI-compatible server, not proved (OPENAI_API_KEY is sent if set)")
    group.add_argument("--out", required=True, metavar="DIR", help="folder of calls.jsonl and images/")
    group.add_argument("--port", type=int, default=8001, help="on 127.0.0.1; 0: any free one (printed)")
    group = parser.add_argument_group("sampling")
    group.add_argument("--sampling", choices=sorted(records.PROFILES), default="train", help="profile of every call")
    group.add_argument("--max-tokens", type=records.at_least(1), default=8192, help="tokens per response at most")
    group.add_argument("--seed", type=int, default=0, help="of the run; each call derives its own")
    group.add_argument("--timeout", type=records.at_least(1.0, float), default=1800.0, help="seconds to wait for one reply")
    serving.add_engine_arguments(parser, required=False)
    args = parser.parse_args()
    with contextlib.ExitStack() as held:
        records.lock_folder(args.out, held)
        with records.writing(args.out):
            records.save_args(args.out, "proxy", args)
        asyncio.run(serve(args))


if __name__ == "__main__":
    records.run_main(main)
