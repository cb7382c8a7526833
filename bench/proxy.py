"""What the recording proxy costs: throughput and latency through it against the same engine hit directly, in one run.

    python bench/proxy.py                                     about 6 minutes; bench/fake_vllm.py is the engine
    python bench/proxy.py --engine-url http://127.0.0.1:8000/v1 --bodies plain --scale 0.1     a real vLLM of short context, otherwise idle

Engine, `python proxy.py --upstream … --out …` and the clients (this process) are three processes. Direct and proxied segments alternate
(A B A B …, the order turning every round), so that drift of the machine cancels; both send the same bodies, ask for token ids and
log-probs, and with the default engine wait the same drawn time (0.5 s on average), so calls are compared in pairs.
    plain     3k-token prompt: 12 kB of messages and 12 tools; reply: 60 tokens, 3k prompt token ids
    pictures  the same with the last two pictures of an episode, 256 kB each (a new one every call, the older one sent again)
    long      30k-token prompt: 120 kB of messages; reply: 60 tokens, 30k prompt token ids
Throughput is the sum over clients of calls / own time: a client that ends early leaves no idle tail in it. Added median: of the
paired differences. Added p95: difference of the two 95th percentiles. CPU: of the proxy's process, which other load moves least.
"""

import argparse
import asyncio
import base64
import hashlib
import json
import os
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import aiohttp

import records
from fake_vllm import start_engine, start_proxy

IDS = {"plain": 3000, "pictures": 3600, "long": 30000}     # prompt token ids that the reply carries
AIM_RATIO, AIM_MS = 0.97, 3.0
WORDS = ("the red mug is at x 412 y -133 ; I will pick it up with dy 20 and place on blue tray , then look again . Held : white pot "
         "Placed Nothing was found near that point Task Put in bowl finish success").split()


# ---------------------------------------------------------------------------------------------- bodies

def text(chars, draw):
    return " ".join(draw.choices(WORDS, k=chars // 4))[:chars]


def tool(i, draw):
    return {"type": "function", "function": {"name": f"skill_{i}", "description": text(150, draw), "parameters": {
        "type": "object", "properties": {"x": {"type": "integer"}, "name": {"type": "string", "description": text(60, draw)}}}}}


def template(kind, ids, scale=1.0):
    """-> body bytes, cut where a picture (its first 24 base64 digits) or the ask goes."""
    draw = random.Random(kind)
    messages = [{"role": "system", "content": text(int(3000 * scale), draw)}]
    length = int((7500 if kind == "long" else 560) * scale)
    messages += [{"role": ("user", "assistant")[i % 2], "content": text(length, draw)} for i in range(16)]
    if kind == "pictures":
        rest = base64.b64encode(draw.randbytes(256 * 1024 - 18)).decode()
        for name in ("OLDER", "NEWER"):
            picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,@{name}@{rest}"}}
            messages.append({"role": "user", "content": [{"type": "text", "text": "Now:"}, picture]})
    messages.append({"role": "user", "content": f"ask=@ASK@ ids={ids}"})
    body = {"model": "policy", "messages": messages, "tools": [tool(i, draw) for i in range(round(12 * scale))], "temperature": 1.0,
            "max_tokens": 60, "logprobs": True, "return_token_ids": True, "skip_special_tokens": True}
    return re.split(b"@(ASK|OLDER|NEWER)@", json.dumps(body).encode())


def picture(client, i):
    """First 24 base64 digits of a picture of its own: PNG magic and 10 bytes."""
    unique = hashlib.blake2b(f"{client}/{i}".encode(), digest_size=10).digest()
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + unique)


def fill(parts, client, i):
    ask = hashlib.blake2b(f"{client}/{i}".encode(), digest_size=8).hexdigest().encode()
    values = {b"ASK": ask, b"OLDER": picture(client, i - 1), b"NEWER": picture(client, i)}
    return ask, b"".join(values.get(part, part) for part in parts)


# ---------------------------------------------------------------------------------------------- measuring

def cpu_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def segment(url, parts, clients, calls, name, check):
    """`clients` closed-loop clients make `calls` calls each -> ({(client, i): seconds}, calls/s)."""
    seconds, rates = {}, []

    async def client(k):
        await asyncio.sleep(0.5 * k / clients)             # else all requests of a round arrive at one moment
        path = url.format(episode=f"{name}-{k}")
        began = time.perf_counter()
        for i in range(calls):
            ask, body = fill(parts, f"{name}-{k}", i)
            clock = time.perf_counter()
            async with session.post(path, data=body, headers={"Content-Type": "application/json"}) as response:
                data = await response.read()
            seconds[k, i] = time.perf_counter() - clock
            if response.status != 200 or (check and ask not in data):
                raise SystemExit(f"error: {path} answered {response.status}: {data[:300].decode(errors='replace')}")
        rates.append(calls / (time.perf_counter() - began))

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*map(client, range(clients)))
    return seconds, sum(rates)


def quantile(values, q):
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


async def measure(kind, clients, args, direct, proxied, pid, synthetic):
    parts = template(kind, args.ids or IDS[kind], args.scale)
    rate, all_seconds, cpu = {"direct": [], "proxied": []}, {"direct": [], "proxied": []}, 0.0
    urls = {"direct": direct, "proxied": proxied}
    for arm in urls:                                       # connections, imports, caches; not counted
        await segment(urls[arm], parts, min(clients, 4), 1, f"warm-{kind}-{clients}", synthetic)
    added = []
    for r in range(args.rounds):
        seconds = {}
        for arm in ("direct", "proxied") if r % 2 == 0 else ("proxied", "direct"):
            before = cpu_seconds(pid)
            seconds[arm], value = await segment(urls[arm], parts, clients, args.calls, f"{kind}-{clients}-{r}", synthetic)
            cpu += cpu_seconds(pid) - before if arm == "proxied" else 0.0
            rate[arm].append(value)
            all_seconds[arm] += seconds[arm].values()
        added += [seconds["proxied"][key] - seconds["direct"][key] for key in seconds["direct"]]
    mean = {arm: statistics.mean(values) for arm, values in rate.items()}
    p95 = [quantile(all_seconds[arm], 0.95) for arm in ("proxied", "direct")]
    return {**mean, "ratio": mean["proxied"] / mean["direct"],
            "median": 1000 * statistics.median(all_seconds["direct"]), "added": 1000 * statistics.median(added),
            "p95": 1000 * (p95[0] - p95[1]), "cpu": 1000 * cpu / len(added)}


async def bench(args, engine_url, pid, proxy_port, out):
    direct = engine_url + "/chat/completions"
    proxied = f"http://127.0.0.1:{proxy_port}/ep/{{episode}}/v1/chat/completions"
    print("| body | clients | calls/s direct | proxied | ratio | median ms direct | added median | added p95 | proxy CPU ms/call |")
    print("|---" * 9 + "|", flush=True)
    rows = []
    for kind in args.bodies:
        for clients in args.clients:
            row = await measure(kind, clients, args, direct, proxied, pid, not args.engine_url)
            rows.append(row)
            print(f"| {kind} | {clients} | {row['direct']:.1f} | {row['proxied']:.1f} | {row['ratio']:.3f} | {row['median']:.1f} | "
                  f"{row['added']:+.2f} | {row['p95']:+.2f} | {row['cpu']:.2f} |", flush=True)
            for path in (out / "images").glob("*.png"):    # a run writes hundreds of MB of them
                path.unlink()
    met = [row["ratio"] >= AIM_RATIO and row["added"] < AIM_MS for row in rows]
    print(f"load average at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores (this bench alone: about 1)")
    print(f"aim (ratio ≥ {AIM_RATIO}, added median < {AIM_MS:g} ms): met in {sum(met)} of {len(met)} rows")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=records.Formatter)
    p.add_argument("--engine-url", help="a running vLLM with the model name `policy` (default: starts bench/fake_vllm.py)")
    p.add_argument("--bodies", nargs="+", choices=sorted(IDS), default=list(IDS), help="which of the three")
    p.add_argument("--clients", nargs="+", type=int, default=[1, 4, 16, 64], help="concurrent clients")
    p.add_argument("--calls", type=int, default=8, help="calls per client and segment (count)")
    p.add_argument("--rounds", type=int, default=3, help="segments per arm (count)")
    p.add_argument("--ids", type=int, default=0, help="prompt token ids in a reply of the fake engine; 0: by body")
    p.add_argument("--scale", type=float, default=1.0, help="size of messages and tools, for a model with a short context")
    p.add_argument("--token-time", type=float, default=0.008, help="of the fake engine: seconds per sampled token")
    args = p.parse_args()
    out, processes = Path(tempfile.mkdtemp(prefix="bench-proxy-")), []
    try:
        engine_url = args.engine_url
        if not engine_url:
            engine, engine_url = start_engine(out / "engine.log", "--token-time", str(args.token_time))
            processes.append(engine)
        proxy, port = start_proxy(engine_url, out)
        processes.append(proxy)
        asyncio.run(bench(args, engine_url.rstrip("/"), proxy.pid, port, out))
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait()
        shutil.rmtree(out)


if __name__ == "__main__":
    main()
