"""Programs that mean harm, in the sandbox: what is seen of each, that nothing outside is touched, and that the next program works."""

import os
import platform
import signal
import socket
import sys
import threading
import uuid

import pytest

from harness import confine
from harness.sandbox import Sandbox

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the confinement is Linux's")
SECRET = "reward-" + uuid.uuid4().hex
SPECS = [("move", "move(position, slow=False)", "Moves."), ("pose", "pose(name)", "Pose of a thing.")]
os.environ["HOSTILE_SECRET"] = SECRET

# Tries each line and says what came of it; `raw` is a system call by number.
TRY = '''
import ctypes, fcntl, gc, mmap, os, resource, select, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def raw(number, *args):
    result = libc.syscall(number, *(ctypes.c_long(a) if isinstance(a, int) else a for a in args))
    if result < 0: raise OSError(ctypes.get_errno(), "raw")
    return result
def attempt(*lines):
    for line in lines:
        try: print("DID", line, repr(eval(line))[:80])
        except BaseException as e: print("refused", type(e).__name__, line)
'''
FRAME = '''
import json, os, struct, time
def frame(message):
    data = json.dumps(message).encode() if not isinstance(message, bytes) else message
    return struct.pack(">I", len(data)) + data
def write(data):
    while data: data = data[os.write(3, data):]
'''


def attempt(*lines):
    return TRY + f"attempt(*{list(lines)!r})"


def spend(code, error="TimeoutError", text="CPU time"):
    """A program that has to be ended for its CPU time."""
    return dict(code=code, error=error, lost=True, err=text, cpu=0.3)


def refused(*lines):
    return dict(code=attempt(*lines), refused=len(lines))


def ends(code, error, text="", out=""):
    """A program that an exception ends; the session lives on."""
    return dict(code=code, error=error, err=text, out=out)


def killed(code, error, text="", **limits):
    return dict(code=code, error=error, err=text, lost=True) | limits


def forged(code):
    return killed(FRAME + code, "RuntimeError", "the program was ended")


# Numbers that no session needs, with arguments that do no harm if one passes; 335 and 336 pass by any filter (uprobes) and kill the caller.
LISTED = {v[confine.MACHINES[platform.machine()][0]] for v in (confine.ALWAYS | confine.PATHS | confine.LOOKS | confine.CHECKED).values()}
CALLS = f'''
passed = []
for number in [*(n for n in range(600) if n not in {LISTED} and n not in (335, 336)), *range(1 << 30, (1 << 30) + 600), 1 << 31]:
    ctypes.set_errno(0)
    if (libc.syscall(ctypes.c_long(number), *[ctypes.c_long(-1)] * 6), ctypes.get_errno()) not in ((-1, 1), (-1, 38)):
        passed.append(number)
print(passed)
'''

HOSTILE = {
    "infinite loop": spend("while True: pass"),
    "catches everything": spend("while True:\n  try:\n    while True: pass\n  except BaseException: pass"),
    "ignores signals": spend("import signal\nfor s in (24, 15, 2, 1): signal.signal(s, signal.SIG_IGN)\nwhile True: pass"),
    "huge power": spend("10**10**8"),
    "huge number printed": ends("x = 7 << 100_000\nprint(x)", "ValueError", "limit"),
    "slow regex": spend("import re\nre.match(r'(a+)+$', 'a' * 40 + 'b')"),
    "endless list": killed("def f():\n  x = []\n  while True: x.append(x)\nf()", ("TimeoutError", "MemoryError"), cpu=1.0, lost=None),
    "endless argument": ends("import itertools\nmove(itertools.count())", "TypeError", "type count"),
    "generator as argument": ends("move(i for i in iter(int, 1))", "TypeError", "generator"),
    "busy threads": spend("import threading\ndef f():\n  while True: pass\nfor _ in range(8): threading.Thread(target=f).start()\nf()"),
    "too many threads": killed("import threading, time\nthreading.stack_size(32768)\nwhile True: threading.Thread(target=time.sleep, "
                               "args=(99,)).start()", ("RuntimeError", "MemoryError"), "threads"),
    "threads left running": dict(code="import threading\ndef f():\n  while True: pass\nthreading.Thread(target=f).start()"),
    "sleeps": killed("import time\ntime.sleep(10**9)", "TimeoutError", "ran for more", wall=0.3),
    "waits for nothing": killed("import threading\nl = threading.Lock()\nl.acquire()\nl.acquire()",
                                "TimeoutError", "ran for more", wall=0.3),
    "fork": refused("os.fork()", "os.forkpty()", "os.posix_spawn('/bin/true', ['true'], {})", "subprocess.run(['true'])", "os.popen('true').read()",
                    "__import__('multiprocessing').Process(target=print).start()"),
    "shell": dict(code="import os\nprint(os.system('touch shell') != 0, os.listdir('.'))", out="True []"),
    "fork bomb": ends("import os\nwhile True: os.fork()", "PermissionError"),
    "exec": refused("os.execv('/bin/sh', ['sh'])", "os.execve('/bin/sh', ['sh'], {})", "os.execv(sys.executable, ['python'])"),
    "memory bomb": ends("def f():\n  x = bytearray(1 << 34)\nf()", "MemoryError"),
    "doubling": ends("def f():\n  x = bytearray(1 << 20)\n  while True: x = x + x\nf()", "MemoryError"),
    "numpy bomb": ends("np.ones((1 << 34,))", "MemoryError", "Unable to allocate"),
    "variables fill the memory": killed("x = []\ndef f():\n  while True: x.append(bytearray(1 << 12))\nf()", "MemoryError", "fill the memory",
                                        cpu=9.0),
    "huge mmap": refused("mmap.mmap(-1, 1 << 34)", "raw(9, 0, 1 << 36, 3, 0x22, -1, 0)"),
    "code made at run time": refused("mmap.mmap(-1, 4096, prot=7)", "raw(9, 0, 4096, 7, 0x22, -1, 0)", "raw(10, id(raw) & ~4095, 4096, 7)"),
    "gigabytes printed": dict(code="for _ in range(64): print('x' * (1 << 24))", out="more characters left out", length=8100),
    "endless output": spend("while True: print('spam')") | dict(out="spam\nspam", length=8100),
    "output by os.write": dict(code="import os\nfor _ in range(99): os.write(1, b'x' * 10**7), os.write(2, b'y' * 10**7)", length=1),
    "endless errors": spend("import sys\nwhile True: sys.stderr.write('e' * 999)"),
    "output by the pipes": dict(code="import os\nfor fd in (4, 5):\n  try:\n    while True: os.write(fd, b'\\xff' * 4096)\n  except OSError: pass",
                                out="left out", length=8100),
    "environment": dict(code="import os\nprint(dict(os.environ))", out="OMP_NUM_THREADS"),
    "command line": dict(code="import sys\nprint(sys.argv, sys.orig_argv[-1])", out="['']"),
    "memory searched": dict(code="import gc, sys\nall = [o for o in gc.get_objects()]\nprint(any('rew' + 'ard-' in repr(o)[:100000] "
                                 "for o in list(sys._current_frames().values()) + list(sys.modules)), 'harness.code_api' in sys.modules)\n"
                                 "f = sys._getframe()\nwhile f: print(f.f_code.co_name); f = f.f_back", out="False False", cpu=3.0),
    "/proc": refused("open(f'/proc/{os.getppid()}/mem', 'rb')", "open('/proc/self/environ')", "open(f'/proc/{os.getppid()}/environ').read()",
                     "open('/proc/1/environ')", "os.listdir('/proc')", "open('/proc/self/maps')", "open('/proc/self/mem', 'r+b')",
                     "open('/proc/cpuinfo')", "os.listdir('/proc/self/fd')", "os.readlink(f'/proc/{os.getppid()}/cwd')",
                     "open('/proc/self/oom_score_adj', 'w')", "open('/sys/kernel/mm/transparent_hugepage/enabled')"),
    "files of the system": refused("open('/etc/passwd')", "open('/etc/shadow')", "os.listdir('/etc')", "os.listdir('/')", "os.listdir('/root')",
                                   "open('/dev/zero')", "open('/dev/null', 'w')", "open('/dev/mem')", "open('/dev/vda')", "os.listdir('/tmp')",
                                   "open('/usr/bin/env', 'rb')", "open('/run/x')"),
    "files of ours": refused(f"open({os.path.abspath('harness/code_api.py')!r})", f"os.listdir({os.getcwd()!r})",
                             f"open({os.path.abspath('harness/sandbox_child.py')!r})", "__import__('harness')", "open('../../etc/passwd')",
                             f"open({os.path.join(sys.prefix, 'lib')!r} + '/python3.11/site-packages/mujoco/__init__.py')"),
    "writes outside": refused("open('/tmp/hostile', 'w')", "open('../hostile', 'w')", f"open({os.path.abspath('hostile')!r}, 'w')",
                              "open(np.__file__, 'a')", "open(os.__file__, 'r+')", "open(os.path.expanduser('~') + '/hostile', 'w')",
                              "os.rename(os.__file__, 'x')", "os.unlink(np.__file__)", "os.truncate(np.__file__, 0)", "os.chmod('/tmp', 0)",
                              "os.mkdir('/tmp/hostile')", "os.utime('/tmp')", "os.setxattr('/tmp', 'user.x', b'')"),
    "links": dict(code=TRY + "open('a', 'w').close()\nattempt(*['os.symlink(\"/etc/passwd\", \"b\")', 'os.link(\"a\", \"c\")', "
                             "'os.link(\"/etc/passwd\", \"d\")', 'os.mkfifo(\"e\")', 'os.mknod(\"f\")', 'os.mkdir(\"g\")', "
                             "'os.chdir(\"/\")', 'os.chroot(\"/\")', 'os.fchdir(0)', 'os.rename(\"a\", \"/tmp/a\")'])", refused=10),
    "many files": killed("i = 0\nwhile True:\n  open(str(i), 'w').close()\n  i += 1", "OSError", "256 files", cpu=9.0),
    "many files and done": killed("for i in range(300): open(str(i), 'w').close()", "OSError", "256 files"),
    "big file": ends("f = open('big', 'wb')\nwhile True: f.write(bytes(1 << 16))", "OSError", "too large"),
    "big files": killed("for i in range(20): open(str(i), 'wb').write(bytes(1 << 20))", "OSError", "16 MB"),
    "many open files": ends("f = [open('a', 'w') for _ in range(99)]", "OSError", "Too many open files"),
    "every other system call": dict(code=TRY + CALLS, out="[]", cpu=9.0),
    "signals": refused("os.kill(os.getppid(), 9)", "os.kill(1, 0)", "os.kill(0, 0)", "os.kill(-1, 0)", "os.killpg(os.getpgrp(), 0)",
                       "os.kill(os.getpid(), 19)", "raw(234, os.getppid(), os.getppid(), 9)", "raw(62, 1, 0)", "raw(62, -1, 0)", "raw(434, os.getppid(), 0)",
                       f"os.kill({os.getpid()}, 9)", f"raw(234, {os.getpid()}, {os.getpid()}, 9)", f"raw(129, {os.getpid()}, 9, 0)",
                       f"fcntl.fcntl(3, fcntl.F_SETOWN, {os.getpid()})", "fcntl.fcntl(3, 10, 9)", "raw(157, 1, 0, 0, 0, 0)",
                       "fcntl.ioctl(3, 0x8901, b'1234')", "raw(16, 3, 0x5421, 1)"),
    "stops itself": killed(TRY + "raw(234, os.getpid(), os.getpid(), 19)\ntime.sleep(1)", "TimeoutError", wall=0.3),
    "kills itself": killed("import signal\nsignal.raise_signal(9)", "MemoryError", "SIGKILL"),
    "sockets": refused("socket.socket()", "socket.socket(socket.AF_UNIX)", "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
                       "socket.socketpair()", "socket.create_connection(('127.0.0.1', 80), 1)", "socket.getaddrinfo('example.org', 80)",
                       "socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)", "socket.fromfd(3, 1, 1).connect('\\0x')", "socket.gethostbyname('a.b')",
                       "socket.socket(fileno=3).send(b'x')", "socket.send_fds(socket.socket(fileno=3), [b'x'], [3])"),
    "limits": refused("resource.setrlimit(resource.RLIMIT_CPU, (9999, 9999))", "resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))",
                      "resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))", "os.nice(-5)", "os.sched_setaffinity(0, {0})",
                      "os.setpriority(0, 0, -5)", "os.setuid(0)", "os.setsid()", "os.unshare(0) if hasattr(os, 'unshare') else raw(272, 0)"),
    "memfd": refused("os.memfd_create('x')", "os.pipe()", "os.eventfd(0)"),
    "shared memory": refused("__import__('multiprocessing.shared_memory').shared_memory.SharedMemory(create=True, size=9)"),
    "os._exit": killed("import os\nos._exit(3)", "SystemExit", "os._exit(3)"),
    "sys.exit": ends("import sys\nsys.exit('bye')", "SystemExit", "bye"),
    "quit": ends("quit()", "SystemExit"),
    "KeyboardInterrupt": ends("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "GeneratorExit": ends("raise GeneratorExit", "GeneratorExit"),
    "exception that cannot be shown": ends("class E(Exception):\n  def __str__(self): raise SystemExit\nraise E", "E"),
    "exception with a false name": ends("class M(type):\n  __name__ = property(lambda c: 1 / 0)\nclass E(Exception, metaclass=M): pass\nraise E",
                                        None, "") | dict(lost=None),
    "long exception": ends("raise ValueError('x' * 10**6)", "ValueError", "left out") | dict(length=9000),
    "chained for ever": ends("e = None\nfor i in range(5000):\n  n = ValueError(str(i)); n.__cause__ = e; e = n\nraise e", "ValueError"),
    "atexit": dict(code="import atexit, os\natexit.register(lambda: os._exit(1))"),
    "API patched": dict(code="move = pose = None\nnp.array = np.zeros = None"),
    "builtins patched": killed("import builtins\nbuiltins.len = lambda x: 10**9", "RuntimeError", "the program was ended"),
    "builtins deleted": killed("import builtins\nbuiltins.__dict__.clear()", ("SystemExit", "RuntimeError", "SystemError")),
    "link patched": killed("import json\njson.dumps = lambda *a, **k: 'garbage'", "RuntimeError", "the program was ended"),
    "stdout replaced": dict(code="import sys, io\nsys.stdout = sys.stderr = None\nsys.stdout = io.StringIO()\nprint('gone')", length=1),
    "stdout closed": dict(code="import sys\nsys.stdout.close()\nsys.stdin.close()"),
    "settrace": ends("import sys\ndef t(*a): raise SystemExit\nsys.settrace(t)\nsys._getframe(1).f_trace = t\n(lambda: 1)()", "SystemExit")
    | dict(lost=None),
    "setprofile": dict(code="import sys\ndef t(*a): raise ValueError\nsys.setprofile(t)", error="ValueError", lost=None),
    "deep recursion": killed("import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()", None, cpu=0.5, lost=None),
    "deep recursion in C": killed("import sys\nsys.setrecursionlimit(10**9)\nclass A:\n  def __repr__(self): return repr(self)\nrepr(A())", None,
                                  cpu=1.5, lost=None),
    "crash": killed("import ctypes\nctypes.string_at(0)", "SystemError", "SIGSEGV"),
    "abort": killed("import os\nos.abort()", "SystemError", "SIG"),
    "file descriptors closed": killed("import os\nos.closerange(0, 99)", ("RuntimeError", "SystemExit", "OSError")),
    "socket closed, alive": killed("import os, time\nos.close(3)\ntime.sleep(9)", "RuntimeError", "connection was closed"),
    "reads its own socket": killed("import os\nos.read(3, 100)", "TimeoutError", wall=0.3),
    "pickle": ends("class P:\n  def __reduce__(self): return (print, ('hacked',))\nmove(P())", "TypeError", "type P"),
    "str of its own": dict(code="class S(str):\n  def __str__(self): return 'evil'\n  def encode(self, *a): return b'evil'\nprint(pose(S('mug')))",
                           out="('pose', ['mug']"),
    "objects in disguise": dict(code=TRY + "class F:\n  __class__ = float\n  def __float__(self): return 1.0\n  def __index__(self): return 1\n"
                                     "class L:\n  def __iter__(self):\n    while True: yield 1\n  def __array__(self, *a): return np.zeros(3)\n  def "
                                     "__len__(self): return 3\nattempt('move(F())', 'move(L())', 'move(object)', 'move({1: 2})', 'move(b\"x\")')",
                                refused=5),
    "numbers that are none": dict(code="print(move([float('nan'), float('inf'), 1e400]))", out="[nan, inf, inf]"),
    "integers too big": ends("move(10**5000)", "ValueError", "too big"),
    "nested deep": ends("x = []\nfor _ in range(100_000): x = [x]\nmove(x)", "ValueError", "nested"),
    "its own element": ends("x = []\nx.append(x)\nmove(x)", "ValueError", "nested"),
    "long string": ends("pose('x' * 10**7)", "ValueError", "too long"),
    "huge array": ends("move(np.zeros((1000, 1000)))", "ValueError", "items"),
    "half a character": ends("pose('\\ud800')", "UnicodeEncodeError"),
    "half characters printed": dict(code="print('\\ud800 \\x00 \\udfff')", out="\\ud800"),
    "NUL in the code": ends("x = 1\0", ("ValueError", "SyntaxError"), "null bytes"),
    "half a character in the code": ends("x = '\ud800'", "UnicodeEncodeError"),
    "5 MB of code": dict(code="x = 1\n" * 900_000, cpu=30.0, lost=None, error=("any",)),
    "code nested deep": ends("(" * 5000 + ")" * 5000, ("SyntaxError", "MemoryError")) | dict(lost=None),
    "minus for ever": ends("x = " + "-" * 100_000 + "1", ("RecursionError", "MemoryError", "SystemError")) | dict(lost=None),
    "input": ends("input()", "EOFError"),
    "installed package": ends("import pytest", "ModuleNotFoundError", "No module named 'pytest'"),
    "missing module": ends("import torch_that_is_not_there", "ModuleNotFoundError"),
    "code in scratch": refused("open('evil.so', 'wb').write(b'\\x7fELF') and ctypes.CDLL('./evil.so')"),
    "garbage sent": forged("write(b'garbage' * 999)"),
    "huge length sent": forged("write(struct.pack('>I', 1 << 31))\ntime.sleep(9)"),
    "half a frame": killed(FRAME + "write(struct.pack('>I', 99) + b'{')\ntime.sleep(9)", "TimeoutError", wall=0.3),
    "false end, then more": forged("end = frame({'done': 1, 'error': None, 'trace': '', 'left': [0, 0]})\nwrite(end + end)\ntime.sleep(9)"),
    "end of another block": forged("write(frame({'done': 2, 'error': None, 'trace': '', 'left': [0, 0]}))\ntime.sleep(9)"),
    "ready again": forged("write(frame({'ready': True}))\ntime.sleep(9)"),
    "call of something else": forged("write(frame({'call': 'reward', 'args': [], 'kwargs': {}}))\ntime.sleep(9)"),
    "call of a strange kind": forged("write(frame({'call': ['move'], 'args': {}, 'kwargs': 1}))\ntime.sleep(9)"),
    "number too long sent": forged("write(frame(b'{\"call\": \"move\", \"args\": [' + b'9' * 5000 + b'], \"kwargs\": {}}'))\ntime.sleep(9)"),
    "nested deep sent": forged("write(frame(b'{\"call\": \"move\", \"args\": ' + b'[' * 90_000 + b']' * 90_000 + b', \"kwargs\": {}}'))\ntime.sleep(9)"),
    "half a character sent": forged("write(frame(b'{\"call\": \"move\", \"args\": [\"\\\\ud800\"], \"kwargs\": {}}'))\ntime.sleep(9)"),
    "5000 calls": killed("for _ in range(5000): pose('mug')", "RuntimeError", "2000 API calls", cpu=9.0),
    "calls without reading": killed(FRAME + "while True: write(frame({'call': 'pose', 'args': ['x' * 9000], 'kwargs': {}}))",
                                    ("RuntimeError", "TimeoutError"), wall=1.0, cpu=2.0),
}


def reply(name, args, kwargs):
    return repr((name, args, kwargs))


@pytest.fixture(scope="module")
def sandbox():
    s = Sandbox()
    yield s
    s.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(sandbox, name):
    row = {"error": None, "lost": False, "out": "", "err": "", "cpu": 2.0, "wall": 30.0} | HOSTILE[name]
    session, before = sandbox.session(SPECS), threading.active_count()
    try:
        block = session.run(row["code"], reply, seconds=row["wall"], cpu_seconds=row["cpu"])
        shown = f"{block}"[:3000]
        if row["lost"] is not None:
            assert block.lost == row["lost"], shown
        wanted = row["error"] if isinstance(row["error"], tuple) else (row["error"],)
        assert block.error in wanted or wanted == ("any",) or row["lost"] is None and block.error, shown
        assert row["out"] in block.stdout and row["err"] in block.stderr, shown
        assert "DID" not in block.stdout and block.stdout.count("refused") == row.get("refused", 0), shown
        assert len(block.stdout) <= row.get("length", 10_000) and len(block.stderr) < 9000
        assert SECRET not in shown and "/work" not in block.stderr and "sandbox_child" not in block.stderr, shown
        (block.stdout + block.stderr).encode()                # what a planner reads can be sent
        after = session.run("alive = 1", reply)
        assert after.error is None and not after.lost, (shown, after)
    finally:
        session.close()
    assert not os.path.exists(session.scratch) and threading.active_count() == before
    other = sandbox.session(SPECS)
    assert other.run("print(pose('mug'), np.zeros(2))", reply).stdout == "('pose', ['mug'], {}) [0. 0.]\n"
    other.close()


def test_no_signal_arrives_and_nothing_is_left(sandbox):
    """After all of the above, run in this process: no handler was called, no session is left, and the zygote is the same."""
    seen = []
    old = signal.signal(signal.SIGIO, lambda *a: seen.append(a))
    session = sandbox.session(SPECS)
    session.run(TRY + f"attempt('fcntl.fcntl(3, 8, {os.getpid()})', 'fcntl.fcntl(3, 4, 0o20000 | 0o4000)')", reply)
    session.close()
    signal.signal(signal.SIGIO, old)
    children = open(f"/proc/{sandbox.zygote.process.pid}/task/{sandbox.zygote.process.pid}/children").read().split()
    assert not seen and children == []


def test_a_session_does_not_reach_another(sandbox):
    """Two sessions of one worker: same user, same namespaces, and yet out of each other's reach."""
    one, two = sandbox.session(SPECS), sandbox.session(SPECS)
    one.run("secret = 1\nopen('mine', 'w').write('x')", reply)
    pid = one.process.pid
    block = two.run(attempt(f"os.kill({pid}, 9)", f"raw(234, {pid}, {pid}, 9)", f"open('{one.scratch}/mine')", f"open('/proc/{pid}/mem', 'rb')",
                            f"raw(101, 16, {pid}, 0, 0)", f"os.listdir('{one.scratch}')", f"open('{one.scratch}/new', 'w')"), reply)
    assert block.stdout.count("refused") == 7 and "DID" not in block.stdout, block
    assert one.run("print(secret)", reply).stdout == "1\n"
    one.close()
    two.close()


def test_the_filter_alone_refuses_sockets(sandbox):
    """A server here that a program could reach if anything were open: nobody calls."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        session = sandbox.session(SPECS)
        block = session.run(f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1)", reply)
        session.close()
        assert block.error == "PermissionError"
        with pytest.raises(TimeoutError):
            server.accept()
