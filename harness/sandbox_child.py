"""What runs in the child processes of sandbox.py: the zygote, and the sessions that it forks. Run as a file, never imported by us.

    python -I -B -X no_debug_ranges sandbox_child.py FD         FD: control socket of the zygote

Zygote: imports what programs use, gives up power, then waits for commands: {"start": scratch} with three file descriptors → {"pid": n};
{"end": pid} → kills and reaps it → {"status": wait status}. It reaps no session before that, so that a pid never means another process.
Session: {"specs": …} → confines itself for good → {"ready": true}; then runs blocks: {"block": n, "code": text, "cpu": seconds} → any
number of {"call": name, "args": [], "kwargs": {}}, each answered → {"done": n, "error": name of the exception or null, "trace": text,
"left": [characters of output not kept, of errors not kept]}.

Whatever is here, the program can read and change: it shares the process. So nothing here protects; the confinement and the strictness of
the other side do. What is here must only work for programs that mean no harm, and fail in a way that hurts nobody else.
"""

import base64
import builtins
import gc
import importlib
import importlib.util
import inspect
import io
import json
import linecache
import os
import random
import resource
import signal
import socket
import struct
import sys
import sysconfig
import threading
import traceback
import types
from pathlib import Path

import numpy as np

PRELOADED = """
    abc array base64 bisect calendar cmath codecs collections collections.abc colorsys contextlib contextvars copy csv ctypes dataclasses
    datetime decimal difflib encodings.ascii encodings.idna encodings.latin_1 encodings.utf_8 encodings.unicode_escape enum errno fractions
    functools gc graphlib hashlib heapq html inspect io itertools json keyword linecache locale logging math numbers numpy numpy.fft
    numpy.linalg numpy.ma numpy.polynomial numpy.random operator pathlib pickle platform pprint pydoc queue random re reprlib
    secrets shutil signal statistics string struct sys tempfile textwrap threading time timeit tokenize traceback types typing unicodedata
    uuid warnings weakref zlib zoneinfo _strptime concurrent.futures concurrent.futures.thread asyncio
    scipy.spatial scipy.spatial.transform scipy.linalg scipy.optimize scipy.interpolate
""".split()
LINK, OUT, ERR = 3, 4, 5        # file descriptors of a session
KEPT = 8000                     # characters of output kept per block and stream; sandbox.py cuts again
TRACE, LAST = 4000, 1100        # characters of a traceback; frames, from the last: the recursion limit is 1000
SENT = 200_000                  # characters of a call's arguments as JSON
DEPTH, ITEMS, BITS = 16, 20_000, 1024       # of arguments: nesting, items of an array, size of an integer
FULL = 77                       # exit code of a session whose program left it no memory to go on with
name_of = type.__dict__["__name__"].__get__         # of a class, whatever its metaclass says
BALLAST = bytearray(1 << 20)  # given back when memory runs out, so that the error can still be told


# ---------------------------------------------------------------------------------------------- values

def plain(value, depth=0):
    """A program's argument as JSON can carry it. TypeError, ValueError: it cannot. By the exact type, never by asking the object."""
    kind = type(value)
    if depth > DEPTH:
        raise ValueError(f"an argument is nested more than {DEPTH} deep")
    if value is None or kind is bool or kind is float:
        return value
    if kind is str:
        value.encode()                                          # half a character: a ValueError
        return value
    if kind is int:
        if value.bit_length() > BITS:
            raise ValueError("an integer in the arguments is too big")
        return value
    if kind in (list, tuple):
        return [plain(v, depth + 1) for v in value]
    if kind is dict:
        return {plain_key(k): plain(v, depth + 1) for k, v in value.items()}
    if issubclass(kind, np.ndarray):
        if value.size > ITEMS:
            raise ValueError(f"an array in the arguments has {value.size} items, more than {ITEMS}")
        return plain(np.ndarray.tolist(value), depth + 1)
    if issubclass(kind, np.generic):
        item = np.generic.item(value)
        if type(item) is not kind:
            return plain(item, depth + 1)
    for base, convert in ((str, str.__str__), (float, float.__float__), (int, int.__int__)):
        if issubclass(kind, base):                              # enumerations and the like: the value under them
            return plain(convert(value), depth + 1)
    raise TypeError(f"an argument of type {name_of(kind)} cannot be passed on: use numbers, strings, lists or arrays")


def plain_key(key):
    if type(key) is not str:
        raise TypeError(f"keys of a dict in the arguments must be strings, found {name_of(type(key))}")
    key.encode()
    return key


def value_of(wire):
    """What sandbox.wire() encoded."""
    if isinstance(wire, list):
        return [value_of(v) for v in wire]
    if not isinstance(wire, dict):
        return wire
    (kind, content), = wire.items()
    if kind == "tuple":
        return tuple(value_of(v) for v in content)
    if kind == "dict":
        return {value_of(k): value_of(v) for k, v in content}
    dtype, shape, data = content
    return np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()


# ---------------------------------------------------------------------------------------------- session

class Capture(io.TextIOBase):
    """sys.stdout or sys.stderr: the first KEPT characters of a block go into a pipe, which survives this process; the rest is counted."""

    encoding = "utf-8"

    def __init__(self, fd):
        super().__init__()
        self.fd, self.room, self.left = fd, KEPT, 0

    def writable(self):
        return True

    def write(self, text):
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        kept = text[:self.room]
        if kept:
            try:
                os.write(self.fd, kept.encode("utf-8", "backslashreplace"))
                self.room -= len(kept)
            except OSError:
                kept = ""
        self.left += len(text) - len(kept)
        return len(text)

    def renew(self):
        """-> characters not kept since the last time."""
        left, self.left, self.room = self.left, 0, KEPT
        return left


class Link:
    """Frames to and from sandbox.py: 4 bytes of length, big-endian, then JSON."""

    def __init__(self):
        self.lock = threading.RLock()

    def send(self, text):
        data = text.encode()
        data = struct.pack(">I", len(data)) + data
        while data:
            data = data[os.write(LINK, data):]

    def receive(self):
        return json.loads(self.exactly(struct.unpack(">I", self.exactly(4))[0]))

    def exactly(self, n):
        data = bytearray()
        while len(data) < n:
            more = os.read(LINK, min(n - len(data), 1 << 20))
            if not more:
                os._exit(0)                                     # nobody is there any more
            data += more
        return bytes(data)

    def call(self, name, args, kwargs):
        message = json.dumps({"call": name, "args": plain(args), "kwargs": plain(kwargs)})
        if len(message) > SENT:
            raise ValueError(f"the arguments of {name}() are too long")
        with self.lock:                                         # threads of a program take turns
            self.send(message)
            answer = self.receive()
        if "error" in answer:
            kind, text = answer["error"]
            raise getattr(builtins, kind, RuntimeError)(text)
        return value_of(answer["value"])


def stand_in(link, name, signature, doc):
    """An ordinary function that asks sandbox.py; help() shows what it is."""
    def function(*args, **kwargs):
        return link.call(name, args, kwargs)
    function.__name__ = function.__qualname__ = name
    function.__doc__, function.__module__ = doc, "__main__"
    shape = {}
    exec(f"def {signature}: pass", shape)                       # ours, not the program's
    function.__signature__ = inspect.signature(shape[name])
    return function


def only_theirs(told):
    """Takes our own frames out of a TracebackException and of those that it was raised from."""
    todo = [told]
    while todo:
        one = todo.pop()
        one.stack = traceback.StackSummary.from_list([f for f in one.stack if f.filename.startswith("<block ")])
        todo += [t for t in (one.__cause__, one.__context__, *(getattr(one, "exceptions", None) or ())) if t is not None]
    return told


def shortened(text, n):
    return text if len(text) <= n else f"{text[:n // 2]}\n[... {len(text) - n} characters left out ...]\n{text[-(n - n // 2):]}"


def run_block(namespace, number, code):
    """-> (name of the exception that ended it or None, traceback as text)"""
    name = f"<block {number}>"
    try:
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        exec(compile(code, name, "exec", dont_inherit=True), namespace)
        return None, ""
    except BaseException as e:
        sys.settrace(None)
        sys.setprofile(None)
        if isinstance(e, MemoryError):
            BALLAST.clear()
        kind = name_of(type(e))[:60] or "Exception"             # a class may have no name
        try:
            told = only_theirs(traceback.TracebackException.from_exception(e, limit=-LAST))
            text = "".join(told.format())
            for place in (sys.prefix, sys.base_prefix):         # messages of import errors name files
                text = text.replace(place, "python")
            return kind, shortened(text, TRACE)
        except BaseException as worse:                          # an exception whose own text fails, or no memory to tell it
            return kind, f"{kind} (its text cannot be shown: {type(worse).__name__})\n"


def session(weak):
    """Runs blocks until the other side closes. Never returns."""
    link = Link()
    out, err = sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__ = Capture(OUT), Capture(ERR)
    sys.stdin = sys.__stdin__ = io.StringIO()
    sys.argv = [""]
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    np.random.seed(0)
    random.seed(0)                                              # the same program does the same thing in each episode
    namespace = module.__dict__
    namespace.update({name: stand_in(link, name, signature, doc) for name, signature, doc in link.receive()["specs"]},
                     np=np, numpy=np, __builtins__=builtins)
    link.send(json.dumps({"ready": True}))
    try:
        blocks(link, namespace, out, err, weak)
    except MemoryError:
        os._exit(FULL)
    finally:
        os._exit(1)                                             # a program broke what is here: nothing of ours goes to the planner


def blocks(link, namespace, out, err, weak):
    """Block after block, until the program or the other side ends it."""
    while True:
        task = link.receive()
        sys.stdout, sys.stderr, sys.stdin = out, err, io.StringIO()
        sys.setrecursionlimit(1000)
        out.renew(), err.renew()
        if weak:                                                # nobody outside may be able to see what the block uses
            used = resource.getrusage(resource.RUSAGE_SELF)
            resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + task["cpu"]) + 1,
                                                     resource.getrlimit(resource.RLIMIT_CPU)[1]))
        ended = run_block(namespace, task["block"], task["code"])
        sys.settrace(None)
        sys.setprofile(None)
        if ended[0] == "MemoryError":
            bytearray(16 << 20)                                 # variables that leave no room for the next block end the session
        with link.lock:
            link.send(json.dumps({"done": task["block"], "error": ended[0], "trace": ended[1], "left": [out.renew(), err.renew()]}))


# ---------------------------------------------------------------------------------------------- zygote

def become_session(confine, fds, scratch, parent, able, memory, readable):
    """In the fresh fork: nothing but its own file descriptors, then confined, then blocks."""
    confine.die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)                # Ctrl-C is for the worker
    high = [os.dup2(fd, 100 + k) for k, fd in enumerate(fds)]   # out of the way of the places they are to have
    for fd, place in zip(high, (LINK, OUT, ERR), strict=True):
        os.dup2(fd, place)
    os.closerange(ERR + 1, 4096)
    os.set_blocking(OUT, False)
    os.set_blocking(ERR, False)
    os.chdir(scratch)
    confine.limit(memory, able["namespaces"])
    if sys.platform == "linux":
        confine.no_new_privileges()
    if able["landlock"]:
        confine.landlock(able["landlock"], readable, scratch)
    if able["seccomp"]:
        confine.seccomp(files=bool(able["landlock"]))
    session(weak=not able["seccomp"])


def readable():
    """What lazy imports of the standard library, numpy and scipy read. Not "platstdlib": in a venv that is where all packages lie."""
    paths = sysconfig.get_paths()
    found = {paths["stdlib"], "/usr/share/zoneinfo"}
    for site in (paths["purelib"], paths["platlib"]):
        found |= {f"{site}/{name}" for name in ("numpy", "scipy")}
    return sorted(p for p in found if os.path.isdir(p))


def preload():
    """Imports what programs may want: extension modules above all, since no session can load one (code cannot be mapped there)."""
    place = sysconfig.get_config_var("DESTSHARED") or ""
    extensions = {f.split(".")[0] for f in os.listdir(place)} if os.path.isdir(place) else set()
    for name in [*PRELOADED, *sorted(e for e in extensions if not e.startswith(("_test", "xx", "_tkinter", "_curses", "readline")))]:
        try:
            importlib.import_module(name)
        except ImportError:
            pass                                                # scipy may be missing: a program that imports it is told so
    sys.path = [sysconfig.get_paths()["stdlib"]]                # other packages are missing, rather than there and not readable


def zygote(control):
    """Forks a session per command until the control socket closes, then ends all sessions."""
    spec = importlib.util.spec_from_file_location("confine", Path(__file__).with_name("confine.py"))
    confine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(confine)
    preload()
    paths, able = readable(), confine.layers()
    memory = None
    if sys.platform == "linux":
        with open("/proc/self/oom_score_adj", "w") as f:
            f.write("1000")                                     # a machine short of memory ends sessions first
        memory = confine.address_space() + confine.MEMORY
        able["namespaces"] = confine.leave_power()
        confine.no_new_privileges()
    else:
        able["namespaces"] = False
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    answers, me = control.makefile("wb"), os.getpid()

    def tell(message):
        answers.write(json.dumps(message).encode() + b"\n")
        answers.flush()

    tell({"layers": able, "uid": os.getuid() if not able["namespaces"] else None})
    sessions = set()
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1 << 16, 3)
        if not data:
            break
        command = json.loads(data)
        if "end" in command:
            os.kill(command["end"], signal.SIGKILL)
            _, status = os.waitpid(command["end"], 0)
            sessions.discard(command["end"])
            tell({"status": status})
            continue
        pid = os.fork()
        if pid == 0:
            try:
                become_session(confine, fds, command["start"], me, able, memory, paths)
            except BaseException:                               # before any program ran: what it says is ours
                text = traceback.format_exc()
                with open(ERR, "wb", closefd=False) as f:
                    f.write(text.encode()[-4000:])
                os._exit(98)
        for fd in fds:
            os.close(fd)
        sessions.add(pid)
        tell({"pid": pid})
    for pid in sessions:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    control = socket.socket(fileno=int(sys.argv[1]))
    try:
        zygote(control)
    except BaseException as e:                                  # told to sandbox.py, for whoever runs the worker
        control.sendall(json.dumps({"error": f"{type(e).__name__}: {e}"}).encode() + b"\n")
        os._exit(1)
