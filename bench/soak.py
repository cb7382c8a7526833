"""Soak of the recording proxy: many episodes at once before an engine that fails, by clients that retry, leave and stream.

    python bench/soak.py                         100 episodes × 50 turns; prints counts, then "soak: ok" or what is wrong (exit code 1)
    python bench/soak.py --engine-url http://127.0.0.1:8000/v1 --episodes 20 --turns 5          before a real vLLM

The engine (bench/fake_vllm.py: 500, 503, dropped connection, half a reply, slow), `python proxy.py` and the clients are three processes.
Every request ends in an ask of its own; the engine's text, token ids and log-probs are made of it, and the clients keep what they got.
At the end the folder that the proxy wrote must say the same:
    every reply that a client got stands in calls.jsonl exactly once, delivered, under its episode, with the ids and log-probs it came with
    no ask stands under another episode, no reply at another's ask; turns are 0 … n-1, no turn has two asks, and the received asks have one
    turn each, in the order of asking (a request whose client left at once may reach the proxy after the next one: a turn of its own)
    arrivals.jsonl and calls.jsonl hold the same calls; each picture is one file with the right bytes
    the proxy's memory grew by less than --memory between a quarter of the calls and the end
"""

import argparse
import asyncio
import base64
import collections
import hashlib
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import aiohttp

import records
from fake_vllm import ASK, signature, start_engine, start_proxy

RETRIED = (408, 409, 429)                                  # and 5xx, as the openai client does
HISTORY = 12                                               # messages of the past that a request carries


def ask_of(seed, episode, turn):
    return hashlib.blake2b(f"{seed}/{episode}/{turn}".encode(), digest_size=8).hexdigest()


def picture_of(ask):
    return b"\x89PNG\r\n\x1a\n" + hashlib.shake_128(ask.encode()).digest(3000)


def read_events(data):
    """Server-sent events -> the message text, token ids, log-probs that they add up to."""
    text, ids, logprobs, lines = "", None, None, data.decode().split("\n\n")
    assert lines[-2] == "data: [DONE]", f"a stream ended with {lines[-2]!r}"
    for line in lines[:-2]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            text += choice["delta"].get("content") or ""
            ids, logprobs = choice.get("token_ids") or ids, choice.get("logprobs") or logprobs
    return text, ids, [entry["logprob"] for entry in logprobs["content"]]


def read_answer(data):
    choice = json.loads(data)["choices"][0]
    return choice["message"]["content"] or "", choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]


class Client:
    """One episode. `log`: per turn (ask, what came of it: received | left | given up, the answer)."""

    def __init__(self, number, url, args, counts, answered):
        self.episode, self.args, self.counts, self.answered = f"soak-{args.seed}-e{number}", args, counts, answered
        self.url, self.log, self.history = f"{url}/ep/{self.episode}/v1/chat/completions", [], []
        self.draw = random.Random(f"{args.seed}/{number}")
        self.counted = number % 3 > 0                      # an openai client; every third is one that does not count its retries

    async def play(self, session):
        for turn in range(self.args.turns):
            ask = ask_of(self.args.seed, self.episode, turn)
            content = [{"type": "text", "text": f"Turn {turn} of {self.episode}. ask={ask} ids={40 + turn}"}]
            if self.draw.random() < self.args.pictures:
                url = "data:image/png;base64," + base64.b64encode(picture_of(ask)).decode()
                content.insert(0, {"type": "image_url", "image_url": {"url": url}})
            messages = [{"role": "system", "content": "You move things."}, *self.history[-HISTORY:], {"role": "user", "content": content}]
            stream = self.draw.random() < self.args.streams
            body = {"model": "policy", "messages": messages, "logprobs": True, "return_token_ids": True, "max_tokens": 60}
            outcome, answer = await self.call(session, json.dumps(body | ({"stream": True} if stream else {})).encode(), stream)
            self.counts[outcome] += 1
            self.counts["received as streams"] += stream and outcome == "received"
            self.log.append((ask, outcome, answer))
            self.answered(outcome)
            if outcome == "received":
                self.history += [messages[-1], {"role": "assistant", "content": answer[0]}]

    async def call(self, session, body, stream):
        """-> (outcome, answer): tries as the openai client does, but may leave in the middle and not come back."""
        for attempt in range(self.args.retries + 1):
            headers = {"Content-Type": "application/json"} | ({"x-stainless-retry-count": str(attempt)} if self.counted else {})
            leaving = self.draw.random() < self.args.leavers
            limit = self.draw.uniform(0, self.args.service) if leaving else self.args.timeout
            try:
                async with asyncio.timeout(limit):
                    async with session.post(self.url, data=body, headers=headers) as response:
                        data, status = await response.read(), response.status
            except TimeoutError:
                self.counts["left in mid-call" if leaving else "left at the time limit"] += 1
                if not self.counted or (leaving and self.draw.random() < 0.5):
                    return "left", None
                status = "timeout"
            except aiohttp.ClientError as e:               # the proxy itself must never drop a connection
                return f"broken connection ({type(e).__name__})", None
            if status == 200:
                return "received", (read_events if stream else read_answer)(data)
            if status != "timeout" and status not in RETRIED and status < 500:
                return f"refused with {status}: {data[:200]!r}", None
            self.counts["tries after a failure"] += 1
            await asyncio.sleep(self.args.service * self.draw.uniform(0.5, 2) * min(2 ** attempt, 8))
        return "given up", None


# ---------------------------------------------------------------------------------------------- what must hold afterwards

def check(out, logs, fake=True):
    """Compares what the clients saw ({episode_id: Client.log}) with what the proxy wrote -> (list of what is wrong, counts)."""
    wrong, counts = [], collections.Counter()
    owner = {ask: (episode, i) for episode, log in logs.items() for i, (ask, _, _) in enumerate(log)}
    calls, arrivals = list(records.read_calls(out / "calls.jsonl")), [row for _, row in records.read_jsonl(out / "arrivals.jsonl")]
    by_ask, pictures = collections.defaultdict(list), set()
    for call in calls:
        last = call.messages[-1]["content"]
        ask = ASK.findall(last[-1]["text"].encode())[-1][0].decode()
        by_ask[ask].append(call)
        parts = [part for m in call.messages if isinstance(m["content"], list) for part in m["content"]]
        pictures.update(part["sha256"] for part in parts if part["type"] == "image")
        if owner.get(ask, ("nobody", 0))[0] != call.episode_id:
            wrong.append(f"call {call.call_id}: ask {ask} of {owner.get(ask, ('nobody', 0))[0]} stands under {call.episode_id}")
        if fake and call.message and (call.token_ids[:4], call.logprobs[:4]) != signature(ask):
            wrong.append(f"call {call.call_id}: its reply is not the one to its ask {ask}")
        counts["calls"] += 1
        counts["delivered"] += call.delivered
        counts["client gone"] += call.error == "client gone"
        counts["retries"] += "retry_of" in call.extra

    for episode, log in logs.items():
        for ask, outcome, answer in log:
            good = [call for call in by_ask[ask] if call.delivered and call.error is None]
            if outcome == "received":
                counts["received"] += 1
                if len(good) != 1:
                    wrong.append(f"{episode}: the reply to {ask} was received and is delivered in {len(good)} calls of {len(by_ask[ask])}")
                elif (good[0].message["content"] or "", good[0].token_ids, good[0].logprobs) != answer:
                    wrong.append(f"{episode}: the reply to {ask} differs between client and record")
            elif len(good) > 1:
                wrong.append(f"{episode}: {ask} was {outcome} and is delivered {len(good)} times")
            counts["delivered to a client that had left"] += outcome != "received" and len(good)
        turns = [(sorted({call.turn for call in by_ask[ask]}), outcome) for ask, outcome, _ in log]
        taken = sorted(turn for found, _ in turns for turn in found)
        received = [found for found, outcome in turns if outcome == "received"]
        if taken != list(range(len(taken))) or received != sorted(received) or any(len(found) > 1 for found in received):
            wrong.append(f"{episode}: turns are {turns}, expected 0 … {len(taken) - 1}, and one, rising, for each received ask")

    lines = {"calls": collections.Counter((c.call_id, c.episode_id, c.turn) for c in calls),
             "arrivals": collections.Counter((row["call_id"], row["episode_id"], row["turn"]) for row in arrivals)}
    for name, other in (("calls", "arrivals"), ("arrivals", "calls")):
        for key in lines[name] - lines[other]:
            wrong.append(f"{name}.jsonl has {key} {lines[name][key]} times, {other}.jsonl {lines[other][key]}")
    wrong += [f"{name}.jsonl has call {key[0]} {n} times" for name in lines for key, n in lines[name].items() if n > 1]
    files = {path.name for path in (out / "images").glob("*")}
    if files != {f"{sha}.png" for sha in pictures}:
        wrong.append(f"images/ has {len(files)} files, the calls name {len(pictures)} pictures")
    wrong += [f"images/{name}: wrong bytes" for name in files if records.sha256_file(out / "images" / name) != name.split(".")[0]]
    counts["pictures"] = len(files)
    return wrong, counts


def memory(pid):
    """Resident MB of a process."""
    return next(int(line.split()[1]) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")) / 1024


async def soak(args, url, pid):
    """-> ({episode_id: log}, outcome counts, resident MB of the proxy at every twentieth of the calls)"""
    counts, total, done, sizes = collections.Counter(), args.episodes * args.turns, 0, []

    def answered(outcome):
        nonlocal done
        done += 1
        if done * 20 // total > (done - 1) * 20 // total:
            sizes.append(memory(pid))

    clients = [Client(k, url, args, counts, answered) for k in range(args.episodes)]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(client.play(session) for client in clients))
    return {client.episode: client.log for client in clients}, counts, sizes


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=records.Formatter)
    p.add_argument("--episodes", type=int, default=100, help="at once")
    p.add_argument("--turns", type=int, default=50, help="asks per episode")
    p.add_argument("--seed", type=int, default=0, help="of clients and engine")
    p.add_argument("--engine-url", metavar="URL", help="a running vLLM with the model name `policy`; default: bench/fake_vllm.py")
    p.add_argument("--service", type=float, default=0.1, help="seconds that the fake engine takes; clients wait this long between tries")
    p.add_argument("--faults", type=float, default=0.1, help="part of requests at which the fake engine fails")
    p.add_argument("--leavers", type=float, default=0.05, help="part of requests whose client leaves before the reply")
    p.add_argument("--streams", type=float, default=0.25, help="part of asks that are streamed")
    p.add_argument("--pictures", type=float, default=0.2, help="part of asks with a new picture")
    p.add_argument("--timeout", type=float, default=5.0, help="seconds that a client waits; slow replies take longer")
    p.add_argument("--retries", type=int, default=8, help="of a client, at most")
    p.add_argument("--memory", type=float, default=16.0, help="MB that the proxy may grow from a quarter of the calls to the end")
    p.add_argument("--out", metavar="DIR", help="keep what the proxy wrote here; default: a temporary folder")
    args = p.parse_args()
    out, processes, began = Path(args.out or tempfile.mkdtemp(prefix="bench-soak-")), [], time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    if (out / "calls.jsonl").exists():
        raise records.BadInput(f"{out}: has a calls.jsonl; a soak needs an empty folder")
    try:
        url = args.engine_url
        if not url:
            options = {"prefill": args.service, "token-time": 0, "faults": args.faults, "slow": args.timeout + 1, "seed": args.seed}
            engine, url = start_engine(out / "engine.log", *(f"--{name}={value}" for name, value in options.items()))
            processes.append(engine)
        proxy, port = start_proxy(url, out)
        processes.append(proxy)
        logs, counts, sizes = asyncio.run(soak(args, f"http://127.0.0.1:{port}", proxy.pid))
        processes.pop()
        proxy.terminate()
        code = proxy.wait()
        wrong, recorded = check(out, logs, fake=not args.engine_url)
        if code != 0:
            wrong.append(f"the proxy ended with exit code {code}")
        wrong += [f"{n} calls ended with: {outcome}" for outcome, n in counts.items() if outcome.startswith(("broken", "refused"))]
        grown = sizes[-1] - sizes[len(sizes) // 4]
        if grown > args.memory:
            wrong.append(f"the proxy grew by {grown:.1f} MB from a quarter of the calls to the end, expected at most {args.memory:g}")
        print("clients: " + ", ".join(f"{n} {name}" for name, n in counts.items()))
        print("record:  " + ", ".join(f"{n} {name}" for name, n in recorded.items()))
        print(f"proxy:   {sizes[0]:.1f} MB at first, {sizes[-1]:.1f} MB at the end; {time.perf_counter() - began:.1f} s in all")
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait()
        if not args.out:
            shutil.rmtree(out)
    for line in wrong[:20]:
        print("wrong:   " + line)
    print(f"soak: {len(wrong)} things are wrong" if wrong else "soak: ok")
    return 1 if wrong else 0


if __name__ == "__main__":
    records.run_main(main)
