"""Sandbox for the Python programs that a planner writes: the side of the worker process, which holds the simulator and the reward.

A zygote process (sandbox_child.py) with numpy and scipy loaded forks one process per session, that is per episode; variables live there
from block to block. Calls of API functions come back here as frames of JSON over a socket and are done in the caller's thread. The
session's process is taken for hostile: whatever it sends is checked, and a frame that is not as it must be ends the session, never the
episode. Between blocks it is stopped, so that threads left running use nothing. Output goes through pipes, so that what was printed
before a session was killed is still there.

What confines a session on Linux (`Sandbox.layers` says what acts on this machine):
    limits       512 MB of memory above the start, 120 s of CPU a session, files of 1 MB, 32 open files, no core dumps (setrlimit)
    watched      from here, every 20 to 50 ms: CPU and wall seconds of the block, 32 threads, 16 MB in 256 files in the scratch folder
    namespaces   no network, no capabilities, its own IPC and host name, where the machine lets a user make namespaces; where it does
                 not and the worker is root, the session is "nobody" (and a Python installed under a closed /root cannot import lazily)
    landlock     reads the standard library, numpy and scipy, writes its own flat scratch folder, opens no other file; no TCP, no signals
                 and no abstract sockets to the outside, where the kernel knows these. Without Landlock no file opens at all
    seccomp      an allow-list of system calls (confine.py): no process, socket, signal, mount, ptrace, limits, code made at run time
    never there  simulator, reward, environment, command line, file descriptors of the worker: the zygote is started without them
What stays possible: asking for existence, owner, size and times of a path (stat); the machine's clock and number of cores; using up
its own limits, the disk too: files deleted but still mapped, up to the memory limit, until the session ends.
Without seccomp (macOS, old kernels) sessions do not start, except with Sandbox(weak=True), for development only: then files, network and
other processes, the worker's included, are open to the program. What still acts on macOS: the limits but for memory, wall time, the
scratch folder's size, the caps on output, calls and frames, and CPU per block by SIGXCPU, which a program can ignore; threads and CPU
are not watched there, and a session whose worker was killed ends when it next reads or writes, or at its CPU limit.

What differs from exec for honest programs: random and np.random start from the same seed in each session; numpy, scipy and the standard
library are there, other packages and scipy's rarer extension modules (signal, stats, ndimage) are not; no asyncio, no subprocess.
"""

import contextlib
import os
import shutil
import signal
import tempfile
import threading
from dataclasses import dataclass

from harness.code_api import ApiError
from harness.sandbox_link import BAD, START, Died, Ended, Watch, Zygote, wire

SHOWN = 8000            # characters of output kept per stream and block
CALLS = 2000            # API calls per block
FULL = 77               # exit code of a session out of memory (sandbox_child.py)
GONE = "The session ended; variables and imports of earlier blocks are gone.\n"


@dataclass
class Block:
    """What became of one program. stdout, stderr: for the planner, each capped; stderr has the traceback of the program's own frames.

    error: name of the exception that ended it, None if it ran to its end. lost: the session is gone, with its variables.
    calls: API calls made. seconds: the program's own wall time, without the calls."""
    stdout: str
    stderr: str
    error: str | None
    lost: bool
    calls: int
    seconds: float


class Sandbox:
    """One per worker process, for any number of threads. Starts nothing before the first session. weak: see above."""

    def __init__(self, weak=False):
        self.weak, self.zygote, self.lock, self.closed = weak, None, threading.Lock(), False

    @property
    def layers(self):
        """What confines sessions on this machine: {"limits": True, "seccomp": bool, "landlock": ABI or 0, "namespaces": bool}."""
        return self._running().layers

    def session(self, specs, scratch=None):
        """A Session for one episode. specs: [(name, signature, docstring)] of the API functions; scratch: an empty folder for its files,
        which stays; None: a fresh one, removed at close. RuntimeError where the machine cannot confine it."""
        return Session(self, specs, scratch)

    def close(self):
        """Ends all sessions."""
        with self.lock:
            self.closed = True
            if self.zygote:
                self.zygote.close()
            self.zygote = None

    def _start(self, scratch):
        """A process for a session, by another zygote if the system has ended the one that there was."""
        zygote = self._running()
        try:
            return zygote.start(scratch)
        except RuntimeError:
            return self._running().start(scratch)

    def _running(self):
        with self.lock:
            if self.closed:
                raise RuntimeError("the sandbox is closed")
            if self.zygote and self.zygote.process.poll() is not None:
                self.zygote.close()
                self.zygote = None
            if not self.zygote:
                self.zygote = Zygote(self.weak)
            return self.zygote


class Session:
    """One episode's persistent Python session; for one thread at a time."""

    def __init__(self, sandbox, specs, scratch):
        self.sandbox, self.specs, self.names = sandbox, list(specs), {name for name, _, _ in specs}
        self.kept = scratch is not None
        self.scratch = str(scratch) if self.kept else tempfile.mkdtemp(prefix="session-")
        self.blocks, self.calls, self.process = 0, 0, None
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def run(self, code, call, seconds=30.0, cpu_seconds=10.0, deadline=None):
        """Runs a program -> Block. Never raises for what the program does.

        call(name, args, kwargs) -> value is asked here, in the caller's thread, for each API call; ApiError becomes an exception inside
        the program; whatever else it raises comes out of here, and the session is gone. seconds: wall time of the program itself;
        cpu_seconds: its CPU time; deadline: time.monotonic() after which it ends in any case, calls included, or None.
        RuntimeError: the sandbox itself failed, the session with it; another session can be started."""
        notice = self._ready()
        self.blocks, self.calls = self.blocks + 1, 0
        process, frame, ended, left = self.process, {"trace": ""}, "", (None, None)
        watch = Watch(process, self.scratch, seconds, cpu_seconds, deadline)
        try:
            process.send({"block": self.blocks, "code": code, "cpu": cpu_seconds}, watch)
            frame = self._serve(process, watch, call)
            process.signal(signal.SIGSTOP)
            watch.folder()
            if not process.idle():
                raise Ended("RuntimeError", "the program was ended: it made API calls after its end")
            error, left = frame["error"] and _text(frame["error"])[:60], frame["left"]
        except Ended as e:
            error, ended = e.error, str(e)
        except Died:
            error, ended = _fate(self._end())
        except BaseException:
            self._kill()
            raise
        own, (out, err) = watch.own(), process.output()
        told = notice + _cut(_text(frame["trace"]), SHOWN // 2, 0)
        if ended:
            told += f"{error}: {ended}\n{GONE}"
            self._kill()
        return Block(_cut(out, SHOWN, left[0]), _cut(err, SHOWN - len(told), left[1]) + told, error, bool(ended), self.calls, own)

    def close(self):
        """Ends the session and removes its files. It cannot be used again; safe to call twice."""
        self._kill()
        self._empty()
        if not self.kept:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def _start(self):
        self.fresh = True
        self.process = self.sandbox._start(self.scratch)

    def _ready(self):
        """A session that waits for a program, a new one if need be -> what the planner has to know of that."""
        notice = ""
        try:
            if self.process and not self.fresh and not self.process.idle():
                raise Died()
        except Died:
            self._end()
            self._kill()
            notice = GONE
        if not self.process:
            self._empty()
            self._start()
        if not self.fresh:
            self.process.signal(signal.SIGCONT)
            return notice
        watch = Watch(self.process, self.scratch, START, START, None)
        try:
            self.process.send({"specs": self.specs}, watch)
            self.fresh = "ready" not in self.process.receive(watch, ())
        except (Ended, Died) as e:
            text = self.process.output()[1] or str(e) or "its process ended"
            self._kill()
            raise RuntimeError(f"a sandbox session cannot start: {text}") from None
        return notice

    def _serve(self, process, watch, call):
        """Answers the program's API calls -> the frame that ends the block."""
        while "call" in (frame := process.receive(watch, self.names)):
            self.calls += 1
            if self.calls > CALLS:
                raise Ended("RuntimeError", f"the program was ended: it made more than {CALLS} API calls")
            with watch.aside():
                try:
                    answer = {"value": wire(call(frame["call"], frame["args"], frame["kwargs"]))}
                except ApiError as e:
                    answer = {"error": [e.kind, str(e)]}
            process.send(answer, watch)
        if frame.get("done") != self.blocks:
            raise Ended("RuntimeError", BAD)
        return frame

    def _end(self):
        """How the session's process ended -> wait status or None. RuntimeError: by a failure of the sandbox, not of the program."""
        try:
            return self.process.end(died=True)
        except RuntimeError:
            self._kill()
            raise

    def _kill(self):
        if self.process:
            self.process.close()
        self.process = None

    def _empty(self):
        """Takes the files away that programs left. The folder is flat (confine.py), except in weak sessions."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self.scratch) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    os.unlink(entry.path)


def _fate(status):
    """Wait status of a session that ended by itself, None if it had to be killed -> (name for Block.error, text for the planner)."""
    if status is None:
        return "RuntimeError", "the program was ended: its connection was closed"
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == FULL:
        return "MemoryError", "the program was ended: its variables fill the memory that it may use"
    if os.WIFEXITED(status):
        return "SystemExit", f"the program ended its own process (os._exit({os.WEXITSTATUS(status)}))"
    number = os.WTERMSIG(status)
    if number == signal.SIGXCPU:
        return "TimeoutError", "the program was ended: the CPU time of its session was used up"
    if number == signal.SIGKILL:
        return "MemoryError", "the system ended the program (SIGKILL): too little memory, or too much CPU time"
    known = {s.value: s.name for s in signal.Signals}
    return "SystemError", f"the program crashed ({known.get(number, number)})"


def _text(text):
    """Printable as UTF-8 whatever a program made of it."""
    return text.encode("utf-8", "backslashreplace").decode()


def _cut(text, n, left):
    """Text of at most n characters, then a line that says how much was left out. left: characters left out already; None: unknown."""
    if len(text) <= n and not left:
        if left is not None or len(text) < n:
            return text
        more = "more"
    else:
        more = f"{len(text[n:]) + (left or 0)} more characters"
    return text[:n] + f"\n[... {more} left out ...]\n"
