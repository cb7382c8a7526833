"""Frames and processes of the sandbox, seen from the worker: what sandbox.py builds its sessions from.

A session's process is hostile: decode() takes nothing but the frames that sandbox_child.py sends, Process never waits for it without a
Watch, and a Watch ends a block that passes a limit. Frames: 4 bytes of length, big-endian, then JSON. Seconds and bytes throughout.
"""

import base64
import contextlib
import json
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

CHILD = Path(__file__).with_name("sandbox_child.py")
FRAME = 256 << 10       # bytes: longest frame from a session
DEPTH, DIGITS = 32, 400     # of arguments: nesting, digits of an integer
THREADS = 32
SCRATCH_BYTES, SCRATCH_FILES = 16 << 20, 256
POLLS = (0.02, 0.05)    # s between looks at the process, first and later
START = 60.0            # s for the zygote or a session to be ready, on a machine that is busy
ENVIRONMENT = ("LANG", "OPENBLAS_CORETYPE", "OPENBLAS_VERBOSE")      # all that is inherited
BAD = "the program was ended: it sent something that is no API call"


class Ended(Exception):
    """The session is to be killed. error: name for Block.error; text: why, for the planner."""

    def __init__(self, error, text):
        super().__init__(text)
        self.error = error


class Died(Exception):
    """The session's process closed its socket: it is dead, or as good as."""


# ---------------------------------------------------------------------------------------------- frames

def wire(value):
    """An API function's value as JSON that keeps tuples, arrays and keys; sandbox_child.value_of() decodes it. TypeError: another type."""
    if value is None or isinstance(value, (bool, str, int, float)):
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, np.generic):
        return wire(value.item())
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {"array": [value.dtype.str, value.shape, base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()]}
    if isinstance(value, list):
        return [wire(v) for v in value]
    if isinstance(value, tuple):
        return {"tuple": [wire(v) for v in value]}
    if isinstance(value, dict):
        return {"dict": [[wire(k), wire(v)] for k, v in value.items()]}
    raise TypeError(f"an API function returned a {type(value).__name__}, which programs cannot be given")


def _integer(digits):
    if len(digits) > DIGITS:
        raise ValueError("an integer is too long")
    return int(digits)


def _check(value, depth=0):
    """ValueError for values nested too deep and strings that are no text."""
    if depth > DEPTH:
        raise ValueError("nested too deep")
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, list):
        for v in value:
            _check(v, depth + 1)
    elif isinstance(value, dict):
        for k, v in value.items():
            k.encode()
            _check(v, depth + 1)


def decode(data, names):
    """A frame of a session -> {"call", "args", "kwargs"}, {"done", …} or {"ready"}; ValueError unless it is exactly one."""
    try:
        frame = json.loads(data.decode(), parse_int=_integer)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(frame, dict):
        raise ValueError("no object")
    kind = set(frame)
    if kind == {"call", "args", "kwargs"}:
        if not isinstance(frame["call"], str) or frame["call"] not in names or not isinstance(frame["args"], list) \
                or not isinstance(frame["kwargs"], dict):
            raise ValueError("no call of an API function")
        _check(frame["args"])
        _check(frame["kwargs"])
    elif kind == {"done", "error", "trace", "left"}:
        error, left = frame["error"], frame["left"]
        if not (error is None or isinstance(error, str) and error) or not isinstance(frame["trace"], str) or not isinstance(left, list) \
                or len(left) != 2 or not all(type(n) is int and 0 <= n < 1 << 60 for n in left):
            raise ValueError("no end of a block")
    elif frame != {"ready": True}:
        raise ValueError("of no known kind")
    return frame


# ---------------------------------------------------------------------------------------------- a session's process

class Watch:
    """Limits of one block, looked at while it runs. Raises Ended."""

    def __init__(self, process, scratch, seconds, cpu_seconds, deadline):
        self.process, self.scratch, self.seconds, self.cpu_seconds, self.deadline = process, scratch, seconds, cpu_seconds, deadline
        self.cpu_began, self.looked = process.cpu(), time.monotonic()
        self.began, self.outside = self.looked, 0.0

    def own(self):
        """Wall seconds of the program itself."""
        return time.monotonic() - self.began - self.outside

    @contextlib.contextmanager
    def aside(self):
        """Time spent here is not the program's."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.outside += time.monotonic() - began

    def look(self, force=False):
        """At the clocks; at the process too if it is time for that."""
        now = time.monotonic()
        if self.deadline is not None and now > self.deadline:
            raise Ended("TimeoutError", "the program was ended: the time of the episode is over")
        if self.own() > self.seconds:
            raise Ended("TimeoutError", f"the program was ended: it ran for more than {self.seconds:g} s")
        if now - self.looked < POLLS[0] and not force:
            return
        self.looked = now
        _, cpu, threads = self.process.stat()
        if cpu - self.cpu_began > self.cpu_seconds:
            raise Ended("TimeoutError", f"the program was ended: it used more than {self.cpu_seconds:g} s of CPU time")
        if threads > THREADS:
            raise Ended("RuntimeError", f"the program was ended: it had more than {THREADS} threads")
        self.folder()

    def folder(self):
        """Size and number of the files in the scratch folder."""
        size = n = 0
        with os.scandir(self.scratch) as entries:
            for entry in entries:
                n += 1
                with contextlib.suppress(FileNotFoundError):
                    size += entry.stat(follow_symlinks=False).st_size
                if n > SCRATCH_FILES or size > SCRATCH_BYTES:
                    raise Ended("OSError", f"the program was ended: it wrote more than {SCRATCH_FILES} files or "
                                            f"{SCRATCH_BYTES >> 20} MB")

    def wait(self, sock, event):
        """Until the socket is ready."""
        poll = select.poll()
        poll.register(sock, event)
        step = POLLS[0]
        while not poll.poll(1000 * step):
            self.look(force=True)
            step = POLLS[1]
        self.look()


class Process:
    """A session's process as seen from here: pid, socket, and the reading ends of its output."""

    def __init__(self, zygote, pid, sock, out, err):
        self.zygote, self.pid, self.sock, self.pipes, self.buffer, self.ended = zygote, pid, sock, (out, err), bytearray(), False
        sock.setblocking(False)

    def stat(self):
        """-> (state letter, CPU seconds of all its threads, threads); ("?", 0, 1) where there is no /proc."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as f:
                fields = f.read().rpartition(b")")[2].split()
        except FileNotFoundError:
            return "?", 0.0, 1
        return fields[0].decode(), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), int(fields[17])

    def cpu(self):
        """CPU seconds so far."""
        return self.stat()[1]

    def signal(self, number):
        """Safe: the zygote does not reap it before end(), so the pid is its own."""
        os.kill(self.pid, number)

    def send(self, message, watch):
        """A frame to it. Ended: a limit is passed before it has taken it all. Died."""
        data = json.dumps(message).encode()
        data = memoryview(struct.pack(">I", len(data)) + data)
        while data:
            try:
                data = data[self.sock.send(data):]
            except BlockingIOError:
                watch.wait(self.sock, select.POLLOUT)
            except (BrokenPipeError, ConnectionResetError):
                raise Died() from None

    def receive(self, watch, names):
        """The next frame, decoded. Ended: it is none, or a limit is passed. Died."""
        while True:
            if len(self.buffer) >= 4:
                size = struct.unpack_from(">I", self.buffer)[0]
                if size > FRAME:
                    raise Ended("RuntimeError", BAD)
                if len(self.buffer) >= 4 + size:
                    data = bytes(self.buffer[4:4 + size])
                    del self.buffer[:4 + size]
                    watch.look()
                    try:
                        return decode(data, names)
                    except ValueError:
                        raise Ended("RuntimeError", BAD) from None
            try:
                more = self.sock.recv(1 << 16)
            except BlockingIOError:
                watch.wait(self.sock, select.POLLIN)
                continue
            except ConnectionResetError:
                raise Died() from None
            if not more:
                raise Died()
            self.buffer += more

    def idle(self):
        """Whether it sent nothing since its last frame, and is alive. Died where it is not."""
        try:
            more = self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return not self.buffer
        except ConnectionResetError:
            raise Died() from None
        if not more:
            raise Died()
        return False

    def output(self):
        """What was printed since the last time -> (stdout, stderr)"""
        found = []
        for fd in self.pipes:
            data = b""
            with contextlib.suppress(BlockingIOError):
                while len(data) < 1 << 17 and (more := os.read(fd, 1 << 16)):
                    data += more
            found.append(data.decode("utf-8", "backslashreplace"))
        return found

    def end(self, died=False):
        """Kills it -> its wait status if it had ended by itself (died: it is about to have), else None. RuntimeError: no zygote."""
        patience = time.monotonic() + 0.2
        while died and self.stat()[0] not in "ZX?" and time.monotonic() < patience:
            time.sleep(0.001)                                   # a dying process closes its files before it is a zombie
        alone, self.ended = died and self.stat()[0] in "ZX?", True
        status = self.zygote.ask({"end": self.pid})["status"]
        return status if alone else None

    def close(self):
        """Kills it if need be, and closes what belongs to it."""
        if not self.ended:
            with contextlib.suppress(RuntimeError):             # no zygote any more: the kernel killed its sessions with it
                self.end()
        self.sock.close()
        for fd in self.pipes:
            os.close(fd)


class Zygote:
    """The process that sessions are forked from. RuntimeError: it cannot be started, or is gone."""

    def __init__(self, weak):
        self.control, theirs = socket.socketpair()
        self.control.settimeout(START)
        self.lock = threading.Lock()
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        environment |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1",
                        "MALLOC_ARENA_MAX": "1"}                # else a thread takes 128 MB of address space, of 512
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-B", "-X", "no_debug_ranges", str(CHILD), str(theirs.fileno())],
                cwd="/", env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL)
        try:
            hello = self.answer()
            self.layers, self.uid = hello["layers"], hello["uid"]
            if not self.layers["seccomp"] and not weak:
                raise RuntimeError("this machine cannot filter system calls (seccomp), so programs of a planner do not run here; "
                                   "Sandbox(weak=True) runs them nearly unconfined")
        except BaseException:
            self.close()
            raise

    def answer(self):
        """The zygote's next line."""
        data = b""
        while not data.endswith(b"\n"):
            try:
                more = self.control.recv(1 << 16)
            except TimeoutError:
                raise RuntimeError(f"the sandbox did not answer for {START:g} s") from None
            if not more:
                raise RuntimeError("the process that starts sandbox sessions has ended")
            data += more
        answer = json.loads(data)
        if "error" in answer:
            raise RuntimeError(f"the sandbox cannot start: {answer['error']}")
        return answer

    def ask(self, command, fds=()):
        """A command, with file descriptors to pass -> its answer. After a RuntimeError the zygote is dead."""
        with self.lock:
            try:
                socket.send_fds(self.control, [json.dumps(command).encode() + b"\n"], fds)
                return self.answer()
            except (OSError, RuntimeError) as e:
                self.process.kill()                             # a late answer would be taken for the next one's
                self.process.wait()
                raise RuntimeError(str(e)) from None

    def start(self, scratch):
        """-> Process of a fresh session that works in the folder `scratch`."""
        if self.uid is not None and self.uid != os.getuid():
            os.chown(scratch, self.uid, -1)
        ours, theirs = socket.socketpair()
        out, their_out = os.pipe()
        err, their_err = os.pipe()
        os.set_blocking(out, False)
        os.set_blocking(err, False)
        try:
            pid = self.ask({"start": scratch}, [theirs.fileno(), their_out, their_err])["pid"]
        except BaseException:
            ours.close(), os.close(out), os.close(err)
            raise
        finally:
            theirs.close(), os.close(their_out), os.close(their_err)
        return Process(self, pid, ours, out, err)

    def close(self):
        """It ends its sessions and itself once its socket closes."""
        self.control.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


