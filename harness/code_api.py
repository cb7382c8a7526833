"""The API that a planner's program calls: a few documented functions on a world's privileged state, in CaP-X's privileged setting.

An `Api` belongs to one episode and lives in the process that holds the simulator. The program runs elsewhere (sandbox.py) and its
calls arrive here as a name and JSON values; nothing that arrives is trusted. What is wrong with a call becomes an `ApiError`, which
the program meets as an ordinary Python exception.

Units: metres, radians, quaternions as w, x, y, z. Frames: see each world's API.

Each function is a method with a docstring (the prompt shows it; a missing one is an error at start) whose annotations are the
checks below: `def goto_pose(self, position: point, quaternion_wxyz: quaternion, z_approach: length = 0.0)`.
"""

import inspect
import math

import numpy as np

from harness.world import world_of

MOTIONS = 200           # motions per episode (count): a program that loops for ever ends there, not after hours of simulation
FAR = 5.0               # m: no length of a call is longer
DOWN = (0.0, 1.0, 0.0, 0.0)     # quaternion of a hand that points straight down; its x axis is the frame's


class ApiError(Exception):
    """A call that cannot be done. kind: name of the builtin exception that the program sees."""

    def __init__(self, kind, text):
        super().__init__(text)
        self.kind = kind


class EpisodeOver(Exception):
    """Nothing more can be done in this episode: the block that runs is cut short. end: one of records.ENDS."""

    def __init__(self, end, text):
        super().__init__(text)
        self.end = end


# ---------------------------------------------------------------------------------------------- checks, used as annotations

def _numbers(value, what, n):
    """n finite numbers -> (n,) float array."""
    found = value if isinstance(value, list) else [value]
    if len(found) != n or not all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in found):
        raise ApiError("TypeError", f"{what} must be {n} numbers, found {_short(value)}")
    if not all(abs(v) < 1e9 and math.isfinite(v) for v in found):            # the first for integers too big for a float
        raise ApiError("ValueError", f"{what} must be finite, found {_short(value)}")
    return np.array(found, float)


def _short(value):
    """A value as an error shows it: never long."""
    if isinstance(value, str):
        return repr(value[:60])
    if isinstance(value, (list, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    return "a huge integer" if isinstance(value, int) and abs(value) > 10**15 else repr(value)


def point(value, what):
    """-> (3,) m"""
    p = _numbers(value, what, 3)
    if np.abs(p).max() > FAR:
        raise ApiError("ValueError", f"{what} must be within {FAR:g} m, found {np.round(p, 3).tolist()}")
    return p


def quaternion(value, what):
    """-> (4,) w x y z of length 1"""
    q = _numbers(value, what, 4)
    if not 0.5 < np.linalg.norm(q) < 2:
        raise ApiError("ValueError", f"{what} must be a unit quaternion (w, x, y, z), found {np.round(q, 3).tolist()}")
    return q / np.linalg.norm(q)


def length(value, what):
    """-> m, 0 to FAR"""
    d = float(_numbers(value, what, 1)[0])
    if isinstance(value, list) or not 0 <= d <= FAR:
        raise ApiError("ValueError", f"{what} must be a length from 0 to {FAR:g} m, found {_short(value)}")
    return d


def text(value, what):
    """-> str, at most 200 characters"""
    if not isinstance(value, str):
        raise ApiError("TypeError", f"{what} must be a string, found {_short(value)}")
    return value[:200]


def flag(value, what):
    if not isinstance(value, bool):
        raise ApiError("TypeError", f"{what} must be True or False, found {_short(value)}")
    return value


def find(name, names):
    """The name meant: the same, or the same but for case, "_" and spaces, or the only one that contains it (from three letters);
    KeyError lists them all."""
    plain = lambda s: "".join(s.lower().replace("_", " ").split())
    for alike in (lambda n: n == name, lambda n: plain(n) == plain(name), lambda n: len(plain(name)) > 2 and plain(name) in plain(n)):
        found = [n for n in names if alike(n)]
        if len(found) == 1:
            return found[0]
        if found:
            raise ApiError("KeyError", f"{name[:60]!r} could be {', '.join(found)}")
    raise ApiError("KeyError", f"there is no {name[:60]!r}; there are: {', '.join(names)}")


# ---------------------------------------------------------------------------------------------- the interface

def moves(method):
    """Marks a function that moves the robot: it counts against MOTIONS, and the task is looked at after it."""
    method.moves = True
    return method


class Api:
    """One episode's functions. A subclass for each world gives `functions` (names in the prompt's order), the methods, and `notes`.

    events: what happened, plain dicts for reports (never shown to the planner). motions: how many motions were made.
    """
    functions = ()
    notes = ""              # a line or two on frames and gripper, before the functions

    def __init__(self, world):
        self.world, self.events, self.motions = world, [], 0
        self.check()

    @classmethod
    def check(cls):
        """ValueError unless every function exists and is documented: the prompt is all that a planner knows of it."""
        for name in cls.functions:
            method = getattr(cls, name, None)
            if not callable(method) or not (method.__doc__ or "").strip():
                raise ValueError(f"{cls.__name__}.{name} has no docstring: the prompt would say nothing of it; write one")
            for parameter in list(inspect.signature(method).parameters.values())[1:]:
                if not callable(parameter.annotation) or parameter.annotation is inspect.Parameter.empty:
                    raise ValueError(f"{cls.__name__}.{name}: argument {parameter.name} has no check; annotate it with one of code_api.py")

    @classmethod
    def signature(cls, name):
        """"goto_pose(position, quaternion_wxyz, z_approach=0.0)", as the prompt and the session's help() show it."""
        signature = inspect.signature(getattr(cls, name))
        return name + str(signature.replace(parameters=[p.replace(annotation=inspect.Parameter.empty)
                                                        for p in list(signature.parameters.values())[1:]],
                                            return_annotation=inspect.Signature.empty))

    @classmethod
    def specs(cls):
        """[(name, signature, docstring)]: what the sandboxed session builds its stand-ins from."""
        return [(name, cls.signature(name), inspect.getdoc(getattr(cls, name))) for name in cls.functions]

    @classmethod
    def prompt(cls):
        """Signatures and docstrings, as the prompt shows them."""
        indent = lambda doc: "\n".join("    " + line for line in doc.splitlines())
        return cls.notes + "\n" * bool(cls.notes) + "\n".join(f"{signature}\n{indent(doc)}" for _, signature, doc in cls.specs())

    def call(self, name, args, kwargs):
        """What the program's call returns (numbers, strings, arrays, tuples, lists, dicts). ApiError: the program did something wrong.
        EpisodeOver: the block ends here. Anything else that is raised is the simulator's."""
        if name not in self.functions:
            raise ApiError("NameError", f"name {str(name)[:60]!r} is not defined")
        method = getattr(self, name)
        signature = inspect.signature(method)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as e:
            raise ApiError("TypeError", f"{name}() {e}") from None
        checked = {k: signature.parameters[k].annotation(v, f"{name}(): {k}") for k, v in bound.arguments.items()}
        if not getattr(method, "moves", False):
            return method(**checked)
        if self.motions >= MOTIONS:
            raise EpisodeOver("turns", f"the episode's {MOTIONS} motions are used up")
        self.motions += 1
        value = method(**checked)
        if not self.world.success() and (what := self.world.unrecoverable()):        # now, not latched: the final state is what counts
            raise EpisodeOver("unrecoverable", what)
        return value


def api_class(task):
    """Task -> its Api class; imports only what its world needs."""
    world = world_of(task.suite)
    if world == "tabletop":
        from harness.tabletop_api import TabletopApi
        return TabletopApi
    if world == "libero":
        from harness.libero_api import LiberoApi
        return LiberoApi
    from harness.robosuite_api import api_of
    return api_of(task)
