"""What the sandbox costs: a program run in it against the same program run by exec in this process, in the same run.

    python bench/sandbox.py            about 15 seconds; wall milliseconds, medians, and the ratio to exec

A program with 0, 5 or 50 calls of an API function that returns a pose at once, so that all that is seen is the way there and back; then
what a session costs (start to ready, and its end), once per episode; then programs of --sessions sessions at once, one thread each, where
the cost of one program is the wall time of all divided by their number. On a busy machine all of it is slower, exec too: see the ratio.
The bar (issue): less than 15 ms over exec for a program with a handful of calls.
"""

import argparse
import statistics
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from harness.sandbox import Sandbox

BAR = 15.0
SPECS = [("get_object_pose", "get_object_pose(object_name)", "Position (3,) and quaternion (4,) of an object.")]
PROGRAM = """
home = np.array([0.5, 0.0, 0.4])
total = 0.0
for k in range({calls}):
    position, quaternion = get_object_pose("red mug")
    above = position + np.array([0.0, 0.0, 0.1])
    total += float(np.linalg.norm(above - home))
print(f"total {{total:.3f}} m")
"""


def call(name, args, kwargs):
    """The API function: as quick as can be."""
    return np.array([0.4, 0.1, 0.02]), np.array([0.0, 1.0, 0.0, 0.0])


class InProcess:
    """exec in this process, as CaP-X does it: the baseline."""

    def __init__(self):
        self.namespace = {"np": np, "get_object_pose": lambda *args: call("get_object_pose", list(args), {}), "print": lambda *_: None}

    def run(self, code, _):
        exec(compile(code, "<block>", "exec"), self.namespace)


def milliseconds(do, n):
    """Median wall ms of n times."""
    times = []
    for _ in range(n):
        began = time.perf_counter()
        do()
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


def at_once(runners, code, n):
    """Wall ms per program of n programs for each runner, a thread each."""
    threads = [threading.Thread(target=lambda r=r: [r.run(code, call) for _ in range(n)]) for r in runners]
    began = time.perf_counter()
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return 1000 * (time.perf_counter() - began) / (n * len(runners))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--repeats", type=int, default=300, help="programs per arm (count, default 300)")
    p.add_argument("--sessions", type=int, default=24, help="sessions at once (count, default 24)")
    p.add_argument("--starts", type=int, default=50, help="sessions started one after the other (count, default 50)")
    args = p.parse_args()
    box, exec_here = Sandbox(weak=sys.platform != "linux"), InProcess()
    began = time.perf_counter()
    layers = box.layers
    print(f"layers: {layers}; zygote started once per worker in {time.perf_counter() - began:.2f} s")
    session = box.session(SPECS)
    worst = 0.0
    for calls in (0, 5, 50):
        code = PROGRAM.format(calls=calls)
        assert session.run(code, call).error is None
        boxed, here = (milliseconds(lambda r=r: r.run(code, call), args.repeats) for r in (session, exec_here))
        worst = max(worst, boxed - here) if calls < 50 else worst
        print(f"{calls:3} calls: {boxed:.2f} ms in the sandbox, {here:.2f} ms by exec; ratio {boxed / here:.1f}, {boxed - here:.2f} more")
    session.close()

    starts, ends = [], []
    for _ in range(args.starts):
        began = time.perf_counter()
        session = box.session(SPECS)
        session.run("", call)
        ready = time.perf_counter()
        session.close()
        starts.append(1000 * (ready - began))
        ends.append(1000 * (time.perf_counter() - ready))
    print(f"session: {statistics.median(starts):.1f} ms to the end of its first, empty program; {statistics.median(ends):.1f} ms to close")

    code, sessions = PROGRAM.format(calls=5), [box.session(SPECS) for _ in range(args.sessions)]
    at_once(sessions, code, 1)
    n = max(1, args.repeats // 10)
    boxed, here = at_once(sessions, code, n), at_once([InProcess() for _ in sessions], code, n)
    print(f"{args.sessions} sessions at once, 5 calls: {boxed:.2f} ms per program, {here:.2f} ms by exec; {boxed - here:.2f} ms more")
    for s in sessions:
        s.close()
    box.close()
    print(f"the most that a program of at most 5 calls takes longer than by exec: {max(worst, boxed - here):.2f} ms (bar: {BAR:g})")


if __name__ == "__main__":
    main()
