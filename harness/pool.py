"""The parent's side of worker.py: some harness processes, each with some episodes at a time. It knows nothing of what a job is.

A process that dies or hangs loses its episodes, is killed with all that it started, and is replaced.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path

PATIENCE = 10.0         # seconds for a process that was told to end, and again for the end of its output
ROOT = Path(__file__).resolve().parent.parent


class WorkersKeepDying(Exception):
    """So many restarts that something is broken that no restart mends."""


class WorkerPool:
    """`processes` harness workers with `threads` episodes each. One that dies or hangs loses its episodes (invalid) and is replaced.

    recycle: episodes after which an idle worker is replaced (count; None: never), for simulators whose memory grows.
    `last` is its user's: what each worker did last.
    """

    def __init__(self, processes, threads, recycle=None):
        self.processes, self.threads, self.recycle = processes, threads, recycle
        self.workers, self.free, self.closing, self.broken, self.restarts = [], asyncio.Queue(), False, False, 0
        self.last, self.recycled = {}, 0

    async def start(self):
        for k in range(self.processes):
            self.workers.append(await self._spawn(k))
            for _ in range(self.threads):
                self.free.put_nowait(k)

    async def _spawn(self, k):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "harness.worker", "--threads", str(self.threads), cwd=ROOT, env=env, start_new_session=True,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=64 << 20)
        worker = {"process": process, "waiting": {}, "dead": False, "episodes": 0, "retired": False}
        worker["reader"] = asyncio.create_task(self._read(k, worker))
        worker["reaper"] = asyncio.create_task(self._reap(worker))
        return worker

    async def _reap(self, worker):
        """A child that outlives its worker holds the output open, and asyncio's wait() waits for that: kill what is left, and it ends."""
        while worker["process"].returncode is None:
            await asyncio.sleep(0.5)
        self._kill(worker)

    async def _read(self, k, worker):
        try:
            while (line := await worker["process"].stdout.readline()).endswith(b"\n"):       # half a line: it died writing
                outcome = json.loads(line)
                future = worker["waiting"].pop(outcome["episode_id"], None)
                if future and not future.done():
                    future.set_result(outcome)
        except ValueError as e:                              # no JSON, or a line without end: not to be trusted any more
            print(f"harness worker {k} wrote no outcome ({e}); killed", file=sys.stderr)
        worker["reaper"].cancel()
        self._kill(worker)                                   # also what it started itself
        if not self.closing:                                 # a successor first, so that whoever is told "lost" can run again at once
            if worker["retired"]:
                self.recycled += 1
            else:
                self.last.pop(k, None)
                self.restarts += 1
                print(f"harness worker {k} ended (exit {await worker['process'].wait()}); starting another", file=sys.stderr)
            self.broken = self.broken or self.restarts > 20 * self.processes
            try:
                if not self.broken:
                    self.workers[k] = await self._spawn(k)
            except OSError as e:                             # no memory or no process id left
                self.broken = True
                print(f"harness worker {k} could not be started again: {e}", file=sys.stderr)
        for future in worker["waiting"].values():            # the process ended with episodes in it
            if not future.done():
                future.set_result({"lost": True})

    async def take(self):
        """-> the number of a worker that has a thread free; `give` it back."""
        return await self.free.get()

    def give(self, k):
        worker = self.workers[k]
        if self.recycle and worker["episodes"] >= self.recycle and not worker["waiting"] and not worker["dead"]:
            worker["dead"] = worker["retired"] = True        # it ends by itself, and its output with it: _read starts a successor
            self.last.pop(k, None)                           # now: the next job is chosen before the successor is there
            worker["process"].stdin.close()
            asyncio.get_running_loop().call_later(PATIENCE, self._end, worker)
        self.free.put_nowait(k)

    async def run(self, k, job, seconds):
        """Worker k -> outcome; {"lost": True} if the worker died, {"timeout": True} if it said nothing for `seconds`."""
        while (worker := self.workers[k])["dead"]:
            if self.broken:
                raise WorkersKeepDying(f"harness workers died {self.restarts} times; their messages stand above")
            await asyncio.sleep(0.05)                        # its successor is on the way
        future = worker["waiting"][job["episode_id"]] = asyncio.get_running_loop().create_future()
        worker["episodes"] += 1
        try:
            worker["process"].stdin.write(json.dumps(job).encode() + b"\n")
            await worker["process"].stdin.drain()
            return await asyncio.wait_for(future, seconds)
        except TimeoutError:
            self._kill(worker)
            return {"timeout": True}
        except ConnectionError:
            self._kill(worker)
            return {"lost": True}

    def _kill(self, worker):
        """The process and whatever it started: it leads a process group of its own."""
        worker["dead"] = True                                # no job goes there any more; a successor comes once its output has ended
        with contextlib.suppress(ProcessLookupError, PermissionError):       # already gone: what we wanted
            os.killpg(worker["process"].pid, signal.SIGKILL)

    def _end(self, worker):
        """Kills a worker that was told to end and has not."""
        if worker["process"].returncode is None:
            self._kill(worker)

    async def close(self):
        self.closing = True
        for k in range(len(self.workers)):
            worker = None
            while worker is not self.workers[k]:             # a successor may just be on its way
                worker = self.workers[k]
                worker["process"].stdin.close()
                if worker["waiting"]:                        # in the middle of episodes that nobody waits for
                    self._kill(worker)
                try:
                    await asyncio.wait_for(worker["process"].wait(), PATIENCE)
                except TimeoutError:
                    self._kill(worker)
                await asyncio.wait([worker["reader"]], timeout=PATIENCE)       # a child in a session of its own may hold it open
                worker["reader"].cancel()
                worker["process"]._transport.close()         # else its end of that output complains once the loop is closed
