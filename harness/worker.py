"""One harness process: reads jobs (a JSON object a line) on stdin, runs them in threads, writes outcomes (a line each) on stdout.

It holds worlds and nothing of training, and it speaks to the planner over HTTP alone; programs of a planner run elsewhere (sandbox.py).
Worlds that cannot share a process with another (LIBERO, robosuite) get one thread. A simulator exception becomes an outcome with
`crash`; the parent decides what that means. When stdin closes in the middle of an episode (the parent was killed), it ends at once,
with all its threads and children.

    python -m harness.worker --threads 8
"""

import argparse
import json
import os
import queue
import signal
import sys
import threading
import traceback

import urllib3

from harness import code, skills
from harness.sandbox import Sandbox
from harness.world import make_world, world_of


def end_now():
    """Nobody listens any more: no waiting for threads in the middle of a simulation or of a call."""
    if os.getpgrp() == os.getpid():                      # the parent made us lead a group: what we started is in it
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--threads", type=int, default=1, help="episodes at a time (count, default 1)")
    args = p.parse_args()
    out = os.fdopen(os.dup(1), "w", buffering=1)         # keep the real stdout for outcomes …
    os.dup2(2, 1)                                        # … and send whatever libraries print to stderr
    jobs, lock, pool = queue.SimpleQueue(), threading.Lock(), urllib3.PoolManager(maxsize=args.threads)
    sandbox = Sandbox()                                  # starts nothing before the first session

    taken = told = 0                                     # jobs read, outcomes written

    def work():
        nonlocal told
        worlds = {}
        while (job := jobs.get()) is not None:
            try:
                name = world_of(job["suite"])
                if name not in worlds:
                    worlds[name] = make_world(name)
                episode = skills.Episode(worlds[name], job, pool) if job["harness"] == "skills" else \
                    code.Episode(worlds[name], job, pool, sandbox)
                line = json.dumps({"episode_id": job["episode_id"], **episode.run()})
            except Exception:                            # reported whole, and the world is rebuilt: its state is not to be trusted
                line = json.dumps({"episode_id": job["episode_id"], "crash": traceback.format_exc()})
                worlds.clear()
            with lock:
                told += 1                                # first: once it is written, the parent may close stdin
                try:
                    out.write(line + "\n")
                except BrokenPipeError:
                    end_now()
        for world in worlds.values():
            world.close()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(args.threads)]
    for t in threads:
        t.start()
    for line in sys.stdin:
        taken += 1
        jobs.put(json.loads(line))
    if told < taken:                                     # the parent closes stdin once it has every outcome: so it was killed
        end_now()
    for _ in threads:
        jobs.put(None)
    for t in threads:
        t.join()
    sandbox.close()


if __name__ == "__main__":
    main()
