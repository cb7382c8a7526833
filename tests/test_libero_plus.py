"""LIBERO-Plus through the LIBERO world: counts, what cannot run and why, perturbed starts, cameras, textures, refusals.

Needs requirements-libero.txt and requirements-libero-plus.txt. Each configuration has one state, 0, for evaluation: here they are reset
and looked at, nothing is tuned on them.
"""

import ast
import collections
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from harness import libero_plus
from harness.libero import Libero, suites
from harness.libero_plus import CATEGORIES, configurations, reason, STILL, SUITES

pytestmark = pytest.mark.libero
ROOT = Path(__file__).resolve().parent.parent
ALL = [c for suite in SUITES for c in configurations(suite)]


def some(category, suite="libero_plus_object", k=0):
    """The kth configuration of a category that runs."""
    return [c for c in configurations(suite) if c.category == category and not reason(c)][k]


def task(configuration):
    return Libero.tasks(configuration.suite)[configuration.index]


def child(code, **env):
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120,
                          env={**os.environ, "OMP_NUM_THREADS": "1", **env})


@pytest.fixture(scope="module")
def world():
    made = Libero()
    yield made
    made.close()


# ---------------------------------------------------------------------------------------------- the list

def test_ten_thousand_and_thirty_configurations_in_seven_categories():
    assert [len(configurations(s)) for s in SUITES] == [2402, 2518, 2591, 2519] and len({(c.suite, c.name) for c in ALL}) == 10_030
    # as in the authors' task_classification.json, which the package does not bring
    assert collections.Counter(c.category for c in ALL) == {
        "Camera Viewpoints": 1599, "Robot Initial States": 1550, "Language Instructions": 1537, "Light Conditions": 1142,
        "Background Textures": 1076, "Sensor Noise": 1601, "Objects Layout": 1525}
    assert all(c.index == k for s in SUITES for k, c in enumerate(configurations(s)))
    assert {len({c.base for c in configurations(s)}) for s in SUITES} == {10}
    for c in ALL:                       # each has its own perturbation and no other
        assert (c.view != STILL) == (c.category == "Camera Viewpoints") and (c.robot > 0) == (c.category == "Robot Initial States")
        assert (c.noise > 0) == (c.category == "Sensor Noise")


def test_7045_run_and_each_of_the_others_says_what_no_package_has():
    runs = collections.Counter(c.category for c in ALL if not reason(c))
    assert runs == {"Camera Viewpoints": 1599, "Robot Initial States": 1550, "Language Instructions": 1537, "Sensor Noise": 1601,
                    "Objects Layout": 696, "Background Textures": 62}
    _, assets = libero_plus._pro()
    objects = "".join(p.read_text() for p in (libero_plus._pro()[0] / "envs" / "objects").glob("*.py")).lower()
    for c in ALL:
        if why := reason(c):
            what, which = why.split(": ")
            folder = {"the scene file is in no package": "scenes", "the texture is in no package": "textures"}.get(what)
            assert folder or what == "the object is in no package", why
            for name in which.split(", "):
                if folder:
                    assert not (assets / folder / name).exists() and "." in name
                else:
                    assert f"class {name.replace('_', '')}(" not in objects
        assert bool(reason(c, pictures=True)) == bool(why or c.noise)


def test_the_command_prints_the_table_and_the_lists(tmp_path):
    done = subprocess.run([sys.executable, "-m", "harness.libero_plus"], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "HOME": str(tmp_path)})
    rows = done.stdout.splitlines()
    assert done.returncode == 0 and len(rows) == 1 + 28 + 7 + 2 and rows[-2].split() == ["total", "10030", "7045"]
    assert any(row.split() == "libero_plus_object Background Textures 248 62 186: the texture is in no package".split() for row in rows)
    listed = subprocess.run([sys.executable, "-m", "harness.libero_plus", "--list", "Light Conditions"], cwd=ROOT, capture_output=True,
                            text=True).stdout.splitlines()
    assert len(listed) == 1142 and all("\tthe scene file is in no package: lights/" in line for line in listed)
    assert not list(tmp_path.iterdir()), "~/.liberoplus"


def test_without_the_package_one_line_says_how_to_install_it():
    absent = "import importlib.util as u, sys; f = u.find_spec; u.find_spec = lambda n, *a: None if n == 'liberoplus' else f(n, *a); "
    done = child(absent + "from harness.libero_plus import main; sys.argv = ['libero_plus']; sys.exit(main())")
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == f"error: LIBERO-Plus is not installed; run: {libero_plus.INSTALL}\n"
    done = child(absent + "from harness.libero import Libero; Libero.tasks('libero_plus_goal')")
    assert "'libero_plus_goal' (LIBERO-Plus is not installed; run: pip install --no-deps" in done.stderr


def test_tasks_have_the_base_goal_and_the_sentence_of_the_configuration():
    assert set(SUITES) <= set(suites())
    for suite in SUITES:
        goals, sentences, tasks = collections.defaultdict(set), collections.defaultdict(set), Libero.tasks(suite)
        for c, t in zip(configurations(suite), tasks, strict=True):
            assert t.id == f"{suite}/{c.index}" and libero_plus.category_of(t.id) == c.category
            goals[c.base].add(t.goal)
            sentences[c.base, c.category == "Language Instructions"].add(t.instruction)
        assert all(len(g) == 1 for g in goals.values())
        assert all((len(s) > 10) if language else (len(s) == 1) for (_, language), s in sentences.items())
    stove = next(c for c in configurations("libero_plus_goal") if c.name.startswith("turn_on_the_stove_language_3_"))
    assert task(stove).instruction == "lets make some magic happen start by turning on the stove"


def test_indices_and_states_never_wrap():
    for index in (-1, 2591):
        with pytest.raises(ValueError, match=f"libero_plus_goal/{index} does not exist; valid: libero_plus_goal/0 to libero_plus_goal/2590"):
            libero_plus.of_task(f"libero_plus_goal/{index}")
    with pytest.raises(ValueError, match="initial state 1 of libero_plus_object/.* does not exist; valid: 0-0"):
        Libero.check_init(task(some("Sensor Noise")), 1)
    assert libero_plus.of_task("libero_goal/3") is None and libero_plus.category_of("tabletop_base/1") is None


def test_arrays_are_read_and_nothing_else_is_unpickled():
    with pytest.raises(pickle.UnpicklingError, match="posix.system|nt.system"):
        libero_plus._Arrays(__import__("io").BytesIO(pickle.dumps(os.system))).load()


# ---------------------------------------------------------------------------------------------- in the world

def test_views_are_those_of_the_packages_own_code():
    tree = ast.parse((libero_plus._package() / "envs" / "problems" / "libero_tabletop_manipulation.py").read_text())
    base = next(n for n in tree.body if isinstance(n, ast.ClassDef))
    parts = [n for n in (*tree.body, *base.body) if isinstance(n, ast.FunctionDef)
             and n.name in ("rotate_around_y", "rotate_around_z", "scale_distance_from_pivot", "_setup_camera")]
    theirs = {"np": np, "Rotation": Rotation}
    exec(compile(ast.Module(parts, []), "package", "exec"), theirs)

    class Problem:
        def set_camera(self, camera_name, pos, quat):
            if camera_name == "agentview":
                self.pose = pos, np.array(quat) / np.linalg.norm(quat)

    start = [.6586131746834771, 0, 1.6103500240372423], [.6380177736282349, .3048497438430786, .30484986305236816, .6380177736282349]
    for view in sorted({c.view for c in ALL} - {STILL})[::3]:
        p = Problem()
        p.horizon_view, p.vertical_view, percent, p.end_point_rot, p.end_point_vertical = view
        p.scale_factor = percent / 100
        theirs["_setup_camera"](p, p)
        position, quaternion = libero_plus.view(*start, view)
        assert np.abs(position - p.pose[0]).max() < 1.1e-4 and abs(quaternion @ p.pose[1]) > 1 - 1e-7, view     # both round to 1e-4


@pytest.mark.slow
def test_every_category_that_runs_is_reset_as_it_says_and_another_process_starts_alike(world):
    chosen = [some(c, k=k) for c in CATEGORIES if c != "Light Conditions" for k in (0, 40)]
    hashes = {}
    for c in chosen:
        world.reset(task(c), 0)
        hashes[f"{c.suite}/{c.index}"] = world.state_hash()
        assert not world.latched and not world.success() and np.isfinite(world.data.qpos).all() and len(world.objects()) > 5
        base = next(x for x in configurations(c.suite) if x.base == c.base and x.category == "Sensor Noise")
        arm = libero_plus.initial_states(base)[0, 1:8]
        if c.robot:
            assert np.linalg.norm(world.data.qpos[:7] - libero_plus._joints()[c.robot]) < .01       # after ten steps it is still there
            assert np.linalg.norm(arm - libero_plus._joints()[c.robot]) > .05
        elif c.category != "Objects Layout":
            assert np.linalg.norm(world.data.qpos[:7] - arm) < .05
    assert len(set(hashes.values())) == len(chosen)
    few = [chosen[k] for k in (3, 11)]
    done = child("from harness.libero import Libero\nw = Libero()\n" + "".join(
        f"w.reset(Libero.tasks({c.suite!r})[{c.index}], 0); print(w.state_hash())\n" for c in few) + "w.close()")
    assert done.stdout.split() == [hashes[f"{c.suite}/{c.index}"] for c in few], done.stderr


@pytest.mark.slow
def test_pictures_show_the_view_and_the_textures_and_are_refused_where_noise_is_not_ported(world):
    noise = some("Sensor Noise")
    floor = next(c for c in configurations(noise.suite) if c.category == "Background Textures" and c.base == noise.base and not reason(c))
    camera = next(c for c in configurations(noise.suite) if c.category == "Camera Viewpoints" and c.base == noise.base)
    language = next(c for c in configurations(noise.suite) if c.category == "Language Instructions" and c.base == noise.base)
    pictures = []
    for c in (language, floor, camera):
        world.reset(task(c), 0)
        pictures.append(world.render(64, 64))
    assert len(set(pictures)) == 3
    world.reset(task(noise), 0)
    with pytest.raises(RuntimeError, match=f"no picture of {noise.suite}/{noise.index}: its picture noise is not ported: noise {noise.noise}"):
        world.render(64, 64)


def test_what_cannot_run_is_refused_by_name_and_left_out_aloud(world, capsys):
    light = next(c for c in configurations("libero_plus_goal") if c.category == "Light Conditions")
    for act in (lambda: world.reset(task(light), 0), lambda: Libero.check_init(task(light), 0)):
        with pytest.raises(ValueError, match=f"libero_plus_goal/{light.index} cannot run here: the scene file is in no package: lights/"):
            act()
    noise = some("Sensor Noise", "libero_plus_goal")
    named = [("libero_goal", 0), ("libero_plus_goal", light.index), ("libero_plus_goal", noise.index)]
    assert libero_plus.runnable(named) == [named[0], named[2]] and libero_plus.runnable(named, pictures=True) == named[:1]
    out = capsys.readouterr().out
    assert "1 configurations of libero_plus_goal are left out: the scene file is in no package" in out and "noise is not ported" in out


# ---------------------------------------------------------------------------------------------- evaluation only

def test_training_commands_refuse_the_suites():
    for command in ("collect.py", "rollout.py"):
        done = subprocess.run([sys.executable, command, "--suites", "libero_plus_goal", "--inits", "11", "--output", "unused",
                               *(["--model", "unused"] if command == "rollout.py" else [])], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 2 and "must not use libero_plus_goal: LIBERO-Plus is for evaluation alone" in done.stderr, done.stderr
    assert not (ROOT / "unused").exists()


def test_reports_count_by_category():
    import eval as evaluation
    from records import Episode
    chosen = [some("Sensor Noise"), some("Sensor Noise", "libero_plus_goal"), some("Objects Layout")]
    episodes = [Episode(f"e{k}", "skills", task(c).id, 0, 0, float(k > 0), True) for k, c in enumerate(chosen)]
    groups = evaluation.by_suite(episodes)
    assert {name: len(part) for name, part in groups.items()} == {
        "all": 3, "libero_plus_goal": 1, "libero_plus_object": 2, "Objects Layout": 1, "Sensor Noise": 2}
