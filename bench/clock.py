"""What an episode costs apart from generation: physics per episode, and a recorded call against the same call unrecorded.

    python bench/clock.py            about a minute; prints CPU milliseconds and, for calls, the ratio to a bare HTTP exchange

The demo's bar hangs on these two (issue: at most 50 ms of physics an episode, 3 ms a recorded call). CPU time of the processes involved,
not wall time, so that another program on the machine does not show.
"""

import argparse
import asyncio
import json
import resource
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from aiohttp import web

from harness.chat import ChatClient
from harness.tabletop import GRASP, SUITES, Tabletop
from proxy import Proxy
from records import TRAIN_SAMPLING


def physics(repeats):
    """CPU ms per episode: reset, and per goal locate + pick + place with the right grasp; all 60 tasks."""
    world, began, n = Tabletop(), time.process_time(), 0
    for init in range(100, 100 + repeats):
        for suite in SUITES:
            for task in Tabletop.tasks(suite):
                world.reset(task, init)
                for _, thing, container in task.goal:
                    words = world.locate(thing).text.split()
                    world.pick(int(words[-3]), int(words[-1]), GRASP[thing.split()[1]])
                    world.place(container)
                n += 1
    return 1000 * (time.process_time() - began) / n, n


REPLY = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "prompt_token_ids": list(range(300)),
         "choices": [{"index": 0, "finish_reason": "tool_calls", "token_ids": list(range(20)),
                      "logprobs": {"content": [{"token": "t", "logprob": -0.1}] * 20},
                      "message": {"role": "assistant", "content": "Find it.", "tool_calls": [
                          {"id": "c", "type": "function", "function": {"name": "locate", "arguments": '{"name": "red mug"}'}}]}}]}


class Instant:
    policy_version, model = "v", "m"

    async def ready(self):
        pass

    async def chat(self, body, episode_id=""):
        return json.loads(json.dumps(REPLY))


def calls(n, threads, recorded):
    """CPU ms per call, client and server side together, of `n` calls by `threads` clients."""
    started, ports, loop = threading.Event(), [], asyncio.new_event_loop()

    async def serve():
        if recorded:
            server = Proxy(Instant(), tempfile.mkdtemp(), TRAIN_SAMPLING, 64, 0)
            ports.append(await server.start())
        else:
            app = web.Application(client_max_size=64 << 20)

            async def bare(request):
                await request.json()
                return web.json_response(REPLY)
            app.router.add_post("/ep/{id}/v1/chat/completions", bare)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            ports.append(runner.addresses[0][1])
        started.set()

    loop.create_task(serve())
    threading.Thread(target=loop.run_forever, daemon=True).start()
    started.wait()
    world = Tabletop()
    tools = [{"type": "function", "function": {"name": s.name, "description": s.description, "parameters": s.parameters}}
             for s in world.skills]
    history = [{"role": "user", "content": "Task: Put the red mug on the blue tray, then put the white pot in the red bowl."}] * 8

    def client(k):
        chat = ChatClient(f"http://127.0.0.1:{ports[0]}/ep/e{k}/v1", 30)
        for i in range(n // threads):
            chat.chat({"model": "m", "messages": history + [{"role": "user", "content": str(i)}], "tools": tools})

    before = resource.getrusage(resource.RUSAGE_SELF)
    workers = [threading.Thread(target=client, args=(k,)) for k in range(threads)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    after = resource.getrusage(resource.RUSAGE_SELF)
    loop.call_soon_threadsafe(loop.stop)
    return 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / n


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--repeats", type=int, default=4, help="states per task for physics (count, default 4)")
    p.add_argument("--calls", type=int, default=4000, help="HTTP calls per arm (count, default 4000)")
    args = p.parse_args()
    ms, n = physics(args.repeats)
    print(f"physics: {ms:.1f} ms CPU per episode over {n} solved episodes (bar: 50)")
    bare, recorded = (calls(args.calls, 8, r) for r in (False, True))
    print(f"call: {recorded:.2f} ms CPU recorded, {bare:.2f} ms bare HTTP, client included; ratio {recorded / bare:.2f}, recording adds "
          f"{recorded - bare:.2f} ms (bar: 3 in all)")


if __name__ == "__main__":
    main()
