"""A stand-in for vLLM that costs little: answers chat completions after a drawn time, with token ids and log-probs; fails if told to.

    python bench/fake_vllm.py --port 0           used by bench/proxy.py and bench/soak.py, which start it themselves

A request is answered by the last `ask=<16 hex digits> ids=<n>` in its bytes (its last message ends so): the text repeats the ask,
the first four sampled tokens and their log-probs are made of it, n prompt token ids stand before them; so a reply that reaches
the wrong call shows. The body is not parsed, replies are joined from encoded pieces: what is measured is to be the proxy, not this.
The time is --prefill + --tokens × --token-time, times a factor in [0.8, 1.2] that the ask fixes: two arms of a comparison wait equally.
"""

import argparse
import asyncio
import functools
import hashlib
import random
import re
import subprocess
import sys
from pathlib import Path

from aiohttp import web

ASK = re.compile(rb"ask=([0-9a-f]{16}) ids=([0-9]+)")
VOCABULARY = 151_000                                       # ids as wide as Qwen3's
ROOT = Path(__file__).resolve().parent.parent


def start(script, pattern, log, *options):
    """Starts a server of this repository -> (process, what `pattern` finds in the line that says where it listens)."""
    with open(log, "w") as errors:
        process = subprocess.Popen([sys.executable, script, *options], cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True)
    for line in process.stdout:
        if found := re.search(pattern, line):
            return process, found[1]
    sys.exit(f"error: {script} ended with {process.wait()} before it listened: {Path(log).read_text()[-2000:]}")


def start_engine(log, *options):
    return start("bench/fake_vllm.py", r"(http://\S+/v1)", log, *options)


def start_proxy(engine_url, out, *options):
    """`python proxy.py --upstream … --out …` -> (process, port); `out` gets its log too."""
    return start("proxy.py", r"http://127\.0\.0\.1:(\d+)/ep/", out / "proxy.log",
                 "--upstream", engine_url, "--out", str(out), "--port", "0", "--max-tokens", "60", *options)


def signature(ask):
    """The four token ids and log-probs that a reply to this ask starts with."""
    ids = [int(ask[i:i + 4], 16) for i in (0, 4, 8, 12)]
    return ids, [-i / 2**16 for i in ids]                  # exact in binary, so they survive any JSON writer


@functools.cache
def numbers(n, seed):
    return b",".join(b"%d" % i for i in random.Random(seed).choices(range(VOCABULARY), k=n))


@functools.cache
def entries(n):
    draw = random.Random(n)
    return b",".join(b'{"token":"tok","logprob":%.16g,"bytes":[116,111,107],"top_logprobs":[]}' % -draw.random() for _ in range(n))


def reply(ask, prompt, tokens):
    """vLLM's chat.completion as bytes: a tool call, `tokens` sampled tokens, `prompt` prompt token ids."""
    ids, logprobs = signature(ask)
    first = b",".join(b'{"token":"tok","logprob":%.16g,"bytes":[116,111,107],"top_logprobs":[]}' % p for p in logprobs)
    return b"".join([
        b'{"id":"chatcmpl-', ask, b'","object":"chat.completion","created":1700000000,"model":"policy","choices":[{"index":0,'
        b'"message":{"role":"assistant","content":"answer to ', ask, b'","refusal":null,"tool_calls":[{"id":"call-', ask,
        b'","type":"function","function":{"name":"locate","arguments":"{\\"name\\": \\"red mug\\"}"}}]},"logprobs":{"content":[',
        first, b",", entries(tokens - 4), b']},"finish_reason":"tool_calls","stop_reason":null,"token_ids":[',
        b",".join(b"%d" % i for i in ids), b",", numbers(tokens - 4, 1), b']}],"usage":{"prompt_tokens":%d,"completion_tokens":%d,'
        b'"total_tokens":%d},"prompt_token_ids":[' % (prompt, tokens, prompt + tokens), numbers(prompt, 0), b"]}"])


def application(args):
    chance = random.Random(args.seed)
    base = args.prefill + args.tokens * args.token_time

    async def chat(request):
        raw = await request.read()
        found = ASK.findall(raw, max(0, raw.rfind(b"ask=")))
        if not found:
            return web.json_response({"error": {"message": "no ask=… ids=… in the request"}}, status=400)
        ask, prompt = found[-1]
        wait = base * (0.8 + 0.4 * hashlib.blake2b(ask, digest_size=1).digest()[0] / 255)
        fault = chance.choice(("500", "503", "drop", "truncate", "slow")) if chance.random() < args.faults else None
        if fault in ("500", "503"):
            return web.json_response({"error": {"message": f"made to fail: {fault}"}}, status=int(fault))
        await asyncio.sleep(wait if fault != "slow" else args.slow)
        data = reply(ask, int(prompt), args.tokens)
        if fault in ("drop", "truncate"):                  # the connection breaks before the reply, or in the middle of it
            if fault == "truncate":
                request.transport.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data)
                                        + data[:len(data) // 2])
            request.transport.close()
        return web.Response(body=data, content_type="application/json")

    async def models(request):
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "fake"}]})

    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/v1/models", models)
    return app


async def serve(args):
    runner = web.AppRunner(application(args), access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", args.port, backlog=1024).start()
    print(f"engine: http://127.0.0.1:{runner.addresses[0][1]}/v1", flush=True)
    await asyncio.Event().wait()                           # until it is killed


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--port", type=int, default=0, help="on 127.0.0.1; 0: any free one, printed (default 0)")
    p.add_argument("--tokens", type=int, default=60, help="sampled tokens per reply (count ≥ 5, default 60)")
    p.add_argument("--prefill", type=float, default=0.02, help="seconds before the first token (default 0.02)")
    p.add_argument("--token-time", type=float, default=0.008, help="seconds per token (default 0.008)")
    p.add_argument("--faults", type=float, default=0.0, help="part of requests: 500, 503, no reply, half a reply, slow (default 0)")
    p.add_argument("--slow", type=float, default=2.0, help="seconds that a slow reply takes (default 2)")
    p.add_argument("--seed", type=int, default=0, help="of the faults (default 0)")
    asyncio.run(serve(p.parse_args()))


if __name__ == "__main__":
    main()
