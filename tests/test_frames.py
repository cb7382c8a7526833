"""Films of episodes: captions with calls and receipts, end card, contact sheet, GIF and MP4; filming changes nothing."""

import io
import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from conftest import ROOT
from harness import frames
from harness.frames import CALL, END, RECEIPT, TICK, Frames, call_text, wrap
from harness.tabletop import GRASP, Tabletop


def call(tool, **arguments):
    return {"role": "assistant", "content": "I will.", "tool_calls": [{"function": {"name": tool, "arguments": json.dumps(arguments)}}]}


def wrong_arguments(text):
    return {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "pick", "arguments": text}}]}


def solve(world, film=None):
    """Locates, picks and places the first goal of the task; a film is told what a harness would tell it."""
    _, thing, container = world.task.goal[0]

    def act(tool, **arguments):
        if film:
            film.call(call(tool, **arguments))
        receipt = getattr(world, tool)(**arguments)
        if film:
            film.receipt(receipt.text)
        return receipt

    words = act("locate", name=thing).text.split()
    where = {k: int(words[words.index(k) + 1]) for k in "xy"}
    grasp = {"dy": GRASP[thing.split()[1]]} if world.name == "tabletop" else {"grasp": "top"}
    act("pick", **where, **grasp)
    act("place", name=container)


@pytest.fixture
def solved():
    """A filmed episode of tabletop_base/0, not yet saved."""
    world = Tabletop()
    world.reset(Tabletop.tasks("tabletop_base")[0], 100)
    film = Frames(world, "Task: " + world.task.instruction)
    solve(world, film)
    return film


# ---------------------------------------------------------------------------------------------- text

FONT = frames._font(14)


def test_captions_are_wrapped_not_cut():
    text = "\n".join(f"object {k} x {k} y -133 z 12 size 60 60 112 and so on, and so on, and so on" for k in range(4))
    lines = wrap(text, FONT, 464)
    assert " ".join(lines).split() == text.split() and all(FONT.getlength(line) <= 464 for line in lines) and len(lines) == 8
    assert wrap("x" * 200, FONT, 464) == ["x" * 55] * 3 + ["x" * 35]
    assert wrap("", FONT, 464) == []
    long = wrap("word " * 1000, FONT, 464, 5)
    assert len(long) == 5 and long[-1].endswith(" …") and FONT.getlength(long[-1]) <= 464


@pytest.mark.parametrize("message, text", [
    (call("locate", name="red mug"), 'locate(name="red mug")'),
    (call("pick", x=1, y=-2), "pick(x=1, y=-2)"),
    (call("look"), "look()"),
    (wrong_arguments("{oops"), "pick({oops)"),
    (wrong_arguments("[1]"), "pick([1])"),
    (wrong_arguments(None), "pick()"),
    ({"content": "I am done."}, "I am done."),
    ({"content": None}, "(no answer)"),
])
def test_a_reply_as_a_caption(message, text):
    assert call_text(message) == text


def test_no_text_of_a_planner_breaks_a_film(solved, tmp_path):
    for text in ('{"name": "\\ud800"}', "\x00\x1b", "é 红色 🤖 " * 99, "[" * 100_000):
        solved.call(wrong_arguments(text))
        solved.receipt(text)
    solved.save(tmp_path / "x.gif", False, "")
    assert (tmp_path / "x.gif").exists()


# ---------------------------------------------------------------------------------------------- the film

def test_every_call_and_receipt_has_its_time_and_the_end_card_comes_last(solved):
    film = list(solved._film(("Success", (0, 255, 0)), "3 calls"))
    ms = [t for _, t in film]
    assert ms.count(CALL) == ms.count(RECEIPT) == 3 and ms.count(TICK) > 5 and ms[-1] == END and ms.count(END) == 1
    assert len({frame.size for frame, _ in film}) == 1 and film[0][0].size[1] % 2 == 0
    card = np.asarray(film[-1][0])
    assert ((card[..., 1] > 200) & (card[..., 0] < 90)).sum() > 500            # green letters
    shown = [(c, r) for _, c, r, t in solved.shots if t == RECEIPT]
    assert shown[0][0].startswith("locate(name=") and " x " in shown[0][1]
    assert shown[1][0].startswith("pick(x=") and shown[1][1].startswith("Held: ")
    assert [r for _, c, r, t in solved.shots if t == TICK and c.startswith("pick")].count("") > 3      # while it runs: none yet


def test_what_has_not_moved_is_not_rendered_again(solved):
    film, rendered = solved, []
    film.world.render = lambda *size: rendered.append(size) or b"png"
    film.png = None
    film.call(call("look"))
    film.receipt("The hand holds nothing.")
    film.call(call("finish", status="success"))
    assert rendered == [(frames.WIDTH, frames.HEIGHT)]


def test_gif(solved, tmp_path):
    solved.save(tmp_path / "deep/episode.gif", True, "3 calls, end: finish")
    gif = Image.open(tmp_path / "deep/episode.gif")
    ms = []
    for k in range(gif.n_frames):
        gif.seek(k)
        ms.append(gif.info["duration"])
    assert sum(ms) == sum(t for *_, t in solved.shots) + END and ms[-1] == END and gif.info["loop"] == 0
    assert sorted(p.name for p in (tmp_path / "deep").iterdir()) == ["episode.gif", "episode.png"]
    assert solved.world.on_chunk is None


def test_mp4_can_be_played(solved, tmp_path):
    cv2 = pytest.importorskip("cv2")
    solved.save(tmp_path / "episode.mp4", False, "3 calls, end: turns")
    video, pictures = cv2.VideoCapture(str(tmp_path / "episode.mp4")), []
    while (read := video.read())[0]:
        pictures.append(read[1])
    film = list(solved._film(("Failure", frames.RED), "3 calls, end: turns"))
    wanted = sum(max(1, round(t / TICK)) for _, t in film)
    assert len(pictures) == wanted and video.get(cv2.CAP_PROP_FPS) == 1000 / TICK
    for picture, (frame, _) in ((pictures[0], film[0]), (pictures[-1], film[-1])):      # the right colours, too
        assert np.abs(picture[..., ::-1].astype(int) - np.asarray(frame)).mean() < 6
    assert sorted(p.name for p in tmp_path.iterdir()) == ["episode.mp4", "episode.png"]


@pytest.mark.parametrize("calls, tiles", [(0, 1), (1, 1), (5, 5), (12, 12), (13, 12), (40, 12)])
def test_contact_sheet(calls, tiles):
    class Still:
        on_chunk = None

        def render(self, width, height):
            out = io.BytesIO()
            Image.new("RGB", (width, height), (250, 0, 250)).save(out, "PNG")
            return out.getvalue()

    film = Frames(Still(), "Task: nothing.")
    for k in range(calls):
        film.call(call("look"))
        film.receipt(f"Seen {k}.")
    if not calls:
        film._take(CALL)
    sheet = film._sheet(("Success", frames.GREEN), f"{calls} calls")
    pixels = (np.asarray(sheet) == (250, 0, 250)).all(-1)
    rows, columns = -(-tiles // 3), min(tiles, 3)
    assert sheet.width == 8 + columns * 328 and pixels.sum() == tiles * 320 * 240
    assert pixels.any(1).sum() == rows * 240 and pixels.any(0).sum() == columns * 320


def test_a_film_without_any_call(tmp_path):
    world = Tabletop()
    world.reset(Tabletop.tasks("tabletop_base")[0], 100)
    Frames(world, "Task: " + world.task.instruction).save(tmp_path / "e.gif", None, "0 calls, end: infrastructure")
    assert Image.open(tmp_path / "e.gif").n_frames == 2 and (tmp_path / "e.png").exists()


# ---------------------------------------------------------------------------------------------- rendering is passive

class Recorded(Tabletop):
    """Keeps the state after every piece of motion."""
    def reset(self, task, init):
        super().reset(task, init)
        self.trail = []

    def _run(self, seconds):
        super()._run(seconds)
        self.trail.append(np.concatenate([self.data.qpos, self.data.qvel, self.data.ctrl]))


def outcome(world, filmed):
    """(hash of the start, of the end, success, trail) of one scripted episode."""
    film = Frames(world, "Task.") if filmed else None
    start = world.state_hash()
    solve(world, film)
    return start, world.state_hash(), world.success(), np.array(world.trail)


def test_filming_changes_no_physics():
    results = []
    for filmed in (False, True, False):
        world = Recorded()
        world.reset(Tabletop.tasks("tabletop_base")[0], 100)
        results.append(outcome(world, filmed))
    plain, filmed, again = results
    assert plain[:3] == filmed[:3] == again[:3] and plain[2]
    assert plain[3].shape == filmed[3].shape and (plain[3] == filmed[3]).all()


@pytest.mark.libero
@pytest.mark.slow
def test_filming_changes_no_physics_of_libero():
    from harness.camera import available
    from harness.libero import Libero
    used = available()                                  # setup.sh has installed what it needs

    class RecordedLibero(Libero):
        def reset(self, task, init):
            self.trail = []
            super().reset(task, init)

        def _step(self, arm, grip):
            super()._step(arm, grip)
            self.trail.append(np.concatenate([self.data.qpos, self.data.qvel]))

    world, results = RecordedLibero(), []
    world.disturb(0.0, "")
    for filmed in (False, True, False):                     # the last in a world that has a camera
        world.reset(Libero.tasks("libero_object_swap")[4], 11)
        results.append(outcome(world, filmed))
        world.on_chunk = None
    plain, filmed, again = results
    assert frames.renderer(world) == used
    world.close()
    assert plain[:3] == filmed[:3] == again[:3] and len(plain[3]) > 60
    assert (plain[3] == filmed[3]).all() and (plain[3] == again[3]).all()


# ---------------------------------------------------------------------------------------------- the command

@pytest.fixture
def evaluate(tiny_dir, tmp_path):
    def run(*more, suite="tabletop_base", output="out", code=None):
        argv = [sys.executable, *([f"{ROOT}/eval.py"] if code is None else ["-c", code]), "run", "--model", tiny_dir, "--suites", suite,
                "--tasks", "0", "--inits", "11", "--attempts", 2, "--max-tokens", 16, "--turns", 3, "--output", tmp_path / output, *more]
        return subprocess.run(list(map(str, argv)), cwd=ROOT, capture_output=True, text=True, timeout=300)
    return run


@pytest.mark.slow
def test_eval_films_the_attempt_that_is_named(evaluate, tmp_path):
    done = evaluate("--video", "tabletop_base/0:11:1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("rendered by pillow") == 1 and f"filmed: {tmp_path / 'out/episode.gif'}" in done.stdout
    rows = {row["attempt"]: row for row in map(json.loads, open(tmp_path / "out/episodes.jsonl"))}
    extra = {k: row.get("extra", row).get("renderer") for k, row in rows.items()}
    assert extra == {0: None, 1: "pillow"}
    assert Image.open(tmp_path / "out/episode.gif").n_frames >= 2 and Image.open(tmp_path / "out/episode.png").width > 300
    before = (tmp_path / "out/episode.gif").read_bytes()
    assert "nothing was filmed" not in evaluate("--video", "tabletop_base/0:11:1").stdout
    assert (tmp_path / "out/episode.gif").read_bytes() == before


WITHOUT = """
import subprocess, sys
sys.path.insert(0, {root!r})
sys.modules["cv2"] = None                                   # not installed
import harness.camera
real = subprocess.run
def run(argv, **options):                                   # no EGL and no OSMesa, in the process that tries them
    if argv[1:] == ["-m", "harness.camera"]:
        code = "import sys, runpy; sys.modules['mujoco.egl'] = sys.modules['mujoco.osmesa'] = None; "
        argv = [argv[0], "-c", code + "runpy.run_module('harness.camera', run_name='__main__')"]
    return real(argv, **options)
harness.camera.subprocess.run = run
import eval, records
records.run_main(eval.main)
"""


@pytest.mark.parametrize("suite, options, what", [
    ("tabletop_base", ["--video", "tabletop_base/0:11", "--video-format", "mp4"], "mp4 needs OpenCV; run: pip install"),
    ("tabletop_base", ["--video", "tabletop_base/0:11:2"], "not among this run's episodes; expected SUITE/INDEX:INIT"),
    ("tabletop_base", ["--video-format", "mp4"], "there is no --video"),
    pytest.param("libero_object_swap", ["--video", "libero_object_swap/0:11"], "libosmesa6", marks=pytest.mark.libero),
    pytest.param("libero_object_swap", ["--pictures"], "libosmesa6", marks=pytest.mark.libero),
])
def test_what_cannot_be_filmed_ends_the_command_before_any_episode(evaluate, tmp_path, suite, options, what):
    done = evaluate(*options, suite=suite, code=WITHOUT.format(root=str(ROOT)))
    assert done.returncode == 2, done.stdout + done.stderr
    line = done.stderr.strip().splitlines()[-1]             # before it, the engine's progress bar
    assert line.startswith("error: ") and what in line
    assert not (tmp_path / "out").exists()


@pytest.mark.libero
def test_the_camera_says_what_to_install():
    code = ("import sys; sys.modules['mujoco.egl'] = sys.modules['mujoco.osmesa'] = None; "
            "import runpy; runpy.run_module('harness.camera', run_name='__main__')")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    line, = done.stderr.strip().splitlines()
    assert done.returncode == 1 and "libegl1" in line and "libosmesa6" in line and "egl: " in line and "osmesa: " in line
