"""Sandbox: what honest programs see of it, and what the worker can rely on. test_hostile.py has the others."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from harness.code_api import ApiError, EpisodeOver
from harness.sandbox import Sandbox

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
SPECS = [("goto_pose", "goto_pose(position, quaternion_wxyz, z_approach=0.0)", "Moves the hand.\n\nposition: m"),
         ("get_pose", "get_pose(name)", "Pose of a thing."), ("echo", "echo(*args, **kwargs)", "Gives back what it was given.")]
VALUES = {"array": np.arange(6, dtype=np.float32).reshape(2, 3), "pose": (np.zeros(3), [0.0, 1.0]), "names": {"mug": (1, None), 5: True},
          "scalar": np.float64(0.5), "nan": float("nan"), "text": "é", "empty": np.zeros((0, 3)), "flags": np.array([True, False])}


def reply(name, args, kwargs):
    if name == "get_pose" and args[0] not in VALUES:
        raise ApiError("KeyError", f"there is no {args[0]!r}")
    return VALUES[args[0]] if name == "get_pose" else [args, kwargs] if name == "echo" else None


@pytest.fixture(scope="module")
def box():
    s = Sandbox(weak=sys.platform != "linux")
    yield s
    s.close()


@pytest.fixture
def session(box):
    s = box.session(SPECS)
    yield s
    s.close()


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until(true, seconds=10.0):
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    return true()


# ---------------------------------------------------------------------------------------------- programs

def test_variables_live_from_block_to_block(session):
    first = session.run("import math\nx = np.zeros(2)\ndef f(a): return a + x\nprint(__name__, numpy is np)", reply)
    assert (first.stdout, first.stderr, first.error, first.lost, first.calls) == ("__main__ True\n", "", None, False, 0)
    assert session.run("print(f(math.floor(1.5)))", reply).stdout == "[1. 1.]\n"


def test_classes_and_dataclasses_of_a_program_work(session):
    code = ("from dataclasses import dataclass\nimport pickle, copy\n@dataclass\nclass P:\n  x: float\n"
            "print(pickle.loads(pickle.dumps(P(1.0))), copy.deepcopy(P(2.0)))")
    assert session.run(code, reply).stdout == "P(x=1.0) P(x=2.0)\n"


def test_arguments_arrive_plain(session):
    session.run("import enum\nclass E(enum.IntEnum):\n  A = 7", reply)
    block = session.run("print(echo(np.arange(3.0), (1, np.int8(2)), [np.float32(0.5), True], {'a': None}, E.A, 'é', np.str_('s'), k=np.eye(2)))",
                        reply)
    assert block.stdout == ("[[[0.0, 1.0, 2.0], [1, 2], [0.5, True], {'a': None}, 7, 'é', 's'], {'k': [[1.0, 0.0], [0.0, 1.0]]}]\n")
    assert block.calls == 1


def test_the_caller_is_given_plain_python(session):
    seen = []
    session.run("goto_pose(np.array([0.1, 0.2, 0.3]), (0, 1, 0, 0), z_approach=np.float64(0.1))", lambda *a: seen.append((a, threading.get_ident())))
    assert seen == [(("goto_pose", [[0.1, 0.2, 0.3], [0, 1, 0, 0]], {"z_approach": 0.1}), threading.get_ident())]
    assert type(seen[0][0][2]["z_approach"]) is float


def test_values_arrive_as_they_are(session):
    code = "a = get_pose('array')\nprint(a.dtype, a.tolist(), a.flags.writeable)\np, q = get_pose('pose')\nprint(type(p).__name__, q)\n" \
           "print(get_pose('names'), get_pose('scalar'), get_pose('nan'), get_pose('text'), get_pose('empty').shape, get_pose('flags'))\n" \
           "print(goto_pose([0, 0, 0], [0, 1, 0, 0]))"
    assert session.run(code, reply).stdout == ("float32 [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]] True\nndarray [0.0, 1.0]\n"
                                               "{'mug': (1, None), 5: True} 0.5 nan é (0, 3) [ True False]\nNone\n")


def test_a_value_that_programs_cannot_be_given_is_our_own_error(session):
    with pytest.raises(TypeError, match="returned a set"):
        session.run("echo()", lambda *a: {1, 2})
    with pytest.raises(TypeError, match="ndarray"):
        session.run("echo()", lambda *a: np.array([object()]))


def test_an_api_error_is_an_exception_of_the_program(session):
    block = session.run("def look():\n    return get_pose('cup')\nlook()", reply)
    assert block.stderr == ('Traceback (most recent call last):\n  File "<block 1>", line 3, in <module>\n    look()\n'
                            '  File "<block 1>", line 2, in look\n    return get_pose(\'cup\')\nKeyError: "there is no \'cup\'"\n')
    assert block.error == "KeyError" and not block.lost
    assert session.run("try: get_pose('cup')\nexcept KeyError as e: print('caught', e)", reply).stdout == 'caught "there is no \'cup\'"\n'


def test_frames_of_libraries_are_left_out_and_chains_are_shown(session):
    block = session.run("import json\ntry: json.loads('{')\nexcept ValueError as e: raise RuntimeError('no') from e", reply)
    assert block.stderr.count("File") == 2 and "json/" not in block.stderr and "direct cause" in block.stderr
    assert block.error == "RuntimeError"


def test_syntax_errors_look_like_pythons(session):
    block = session.run("x = 1\ny = (1,\nz = 2", reply)
    assert block.error == "SyntaxError" and block.stderr.startswith('  File "<block 1>", line 2\n    y = (1,\n        ^\nSyntaxError:')


@pytest.mark.parametrize("code, error, text", [
    ("import sys; sys.exit(2)", "SystemExit", "SystemExit: 2"), ("input('name? ')", "EOFError", "EOF"), ("raise KeyboardInterrupt", "KeyboardInterrupt", ""),
    ("1 / 0", "ZeroDivisionError", "division by zero"), ("pritn(1)", "NameError", "'pritn' is not defined"),
    ("import nothing_like_that", "ModuleNotFoundError", "nothing_like_that"), ("np.ones(1 << 40)", "MemoryError", "Unable to allocate"),
    ("def f(): f()\nf()", "RecursionError", "Previous line repeated"), ("goto_pose({1, 2})", "TypeError", "type set"),
    ("open('/etc/hostname')", "PermissionError", "/etc/hostname"), ("raise type('', (Exception,), {})('no name')", "Exception", "no name")])
def test_exceptions_end_a_block_and_no_session(session, code, error, text):
    block = session.run(code, reply)
    assert block.error == error and text in block.stderr and not block.lost
    assert session.run("print('next')", reply).stdout == "next\n"


def test_help_shows_signature_and_docstring(session):
    block = session.run("help(goto_pose)\nimport inspect\nprint(inspect.signature(goto_pose), goto_pose.__doc__.splitlines()[0])", reply)
    assert "goto_pose(position, quaternion_wxyz, z_approach=0.0)\n    Moves the hand." in block.stdout
    assert block.stdout.endswith("(position, quaternion_wxyz, z_approach=0.0) Moves the hand.\n")


def test_output_is_capped_per_stream_and_block(session):
    block = session.run("import sys\nprint('a' * 9000)\nprint('é' * 20000, file=sys.stderr)\n1 / 0", reply)
    assert block.stdout == "a" * 8000 + "\n[... 1001 more characters left out ...]\n"
    assert block.stderr.startswith("é" * 7000) and "more characters left out" in block.stderr and len(block.stderr) < 8100
    assert block.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert session.run("print('b')", reply).stdout == "b\n"


def test_output_of_threads_and_of_a_killed_block_is_kept(session):
    block = session.run("import threading, time\nt = threading.Thread(target=print, args=('from a thread',))\nt.start()\nt.join()\ntime.sleep(99)",
                        reply, seconds=0.5)
    assert block.stdout == "from a thread\n" and block.error == "TimeoutError" and block.lost
    assert block.stderr == ("TimeoutError: the program was ended: it ran for more than 0.5 s\n"
                            "The session ended; variables and imports of earlier blocks are gone.\n")


def test_what_is_preloaded_can_be_imported(session):
    code = "import math, random, time, json, re, itertools, functools, collections, statistics, dataclasses, typing, copy, heapq, bisect\n" \
           "import string, textwrap, operator, asyncio, unittest, decimal, sqlite3, mmap, fractions\nfrom scipy.spatial.transform import Rotation\n" \
           "import scipy.optimize, scipy.interpolate, scipy.linalg\nprint(Rotation.from_euler('z', 90, degrees=True).as_quat().round(3))\n" \
           "print(scipy.optimize.minimize(lambda x: (x[0] - 1) ** 2, [0]).x.round(3), np.linalg.inv(np.eye(2) * 2)[0], np.unique([2, 1, 2]))\n" \
           "import datetime\nprint(datetime.datetime.strptime('2020', '%Y').year, 'ä'.encode('latin-1'), sorted(np.random.default_rng(1).permutation(3)))"
    block = session.run(code, reply)
    assert block.error is None and block.stdout.startswith("[0.    0.    0.707 0.707]\n[1.] [0.5 0. ] [1 2]\n2020 b'\\xe4'"), block


def test_the_same_program_draws_the_same_numbers(box):
    drawn = []
    for _ in range(2):
        s = box.session(SPECS)
        drawn.append(s.run("import random\nprint(random.random(), np.random.rand())", reply).stdout)
        s.close()
    assert drawn[0] == drawn[1] != "\n"


# ---------------------------------------------------------------------------------------------- what the caller relies on

@pytest.mark.parametrize("error", [EpisodeOver("turns", "over"), RuntimeError("the simulator broke"), KeyboardInterrupt()])
def test_what_call_raises_comes_out_after_the_session_is_killed(session, error):
    session.run("x = 1", reply)
    pid = session.process.pid

    def call(*_):
        raise error
    with pytest.raises(type(error)) as caught:
        session.run("try: get_pose('x')\nexcept BaseException: print('mine')", call)
    assert caught.value is error and session.process is None and not alive(pid)
    assert session.run("print('x' in globals())", reply).stdout == "False\n"


def test_time_inside_a_call_is_the_simulators(session):
    block = session.run("goto_pose(1, 2)\ngoto_pose(1, 2)", lambda *a: time.sleep(0.4), seconds=0.5)
    assert block.error is None and block.calls == 2 and block.seconds < 0.5


def test_the_deadline_counts_everything(session):
    block = session.run("while True: goto_pose(1, 2)", lambda *a: time.sleep(0.1), deadline=time.monotonic() + 0.5)
    assert block.error == "TimeoutError" and block.lost and "time of the episode" in block.stderr and 2 <= block.calls <= 6


def test_cpu_time_ends_a_block_and_each_block_has_its_own(session):
    for _ in range(3):
        assert session.run("import time\nt = time.process_time()\nwhile time.process_time() - t < 0.25: pass", reply, cpu_seconds=0.5).error is None
    block = session.run("while True: pass", reply, cpu_seconds=0.3)
    assert block.error == "TimeoutError" and "0.3 s of CPU time" in block.stderr and block.lost


def test_after_a_loss_the_next_block_starts_afresh(session):
    session.run("x = 1\nopen('file', 'w').write('x')", reply)
    assert "variables and imports of earlier blocks are gone" in session.run("import os\nos._exit(0)", reply).stderr
    block = session.run("import os\nprint(os.listdir('.'))\nx", reply)
    assert block.error == "NameError" and block.stdout == "[]\n" and 'File "<block 3>", line 3' in block.stderr


@linux
def test_a_session_that_dies_between_blocks_is_told_with_the_next(session):
    session.run("x = 1", reply)
    pid = session.process.pid
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not alive(pid))
    block = session.run("print('here')", reply)
    assert block.stdout == "here\n" and block.error is None and not block.lost
    assert block.stderr == "The session ended; variables and imports of earlier blocks are gone.\n"


@linux
def test_threads_left_running_use_nothing_between_blocks(session):
    session.run("import threading\nn = [0]\ndef f():\n    while True: n[0] += 1\nthreading.Thread(target=f, daemon=True).start()", reply)
    assert wait_until(lambda: session.process.stat()[0] == "T")
    before = session.process.cpu()
    time.sleep(0.3)
    assert session.process.cpu() == before
    assert session.run("a = n[0]\nimport time\ntime.sleep(0.2)\nprint(n[0] > a)", reply).stdout == "True\n"


def test_threads_of_a_program_may_call(session):
    code = "import concurrent.futures as c\nwith c.ThreadPoolExecutor(16) as e: print(sorted(r[0][0] for r in e.map(echo, range(40))) == list(range(40)))"
    assert session.run(code, reply).stdout == "True\n"


def test_scratch_folder(box, tmp_path):
    own, given = box.session(SPECS), box.session(SPECS, scratch=tmp_path)
    code = "with open('a.txt', 'w') as f: f.write('hello')\nimport os\nos.rename('a.txt', 'b.txt')\n" \
           "import tempfile\nwith tempfile.NamedTemporaryFile() as f: np.save(f, np.eye(2))\nprint(open('b.txt').read(), os.listdir('.'))"
    for s in (own, given):
        assert s.run(code, reply).stdout == "hello ['b.txt']\n"
        assert (Path(s.scratch) / "b.txt").read_text() == "hello"
        s.close()
        s.close()
    assert not Path(own.scratch).exists() and list(tmp_path.iterdir()) == []


def test_sessions_of_many_threads_at_once(box):
    seen = []

    def play(k):
        s = box.session(SPECS)
        for n in range(3):
            s.run(f"x = {k}\ny = globals().get('y', 0) + echo({n})[0][0]", reply)
        seen.append(s.run("print(x, y)", reply).stdout == f"{k} 3\n")
        s.close()
    threads = [threading.Thread(target=play, args=(k,)) for k in range(12)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert seen == [True] * 12
