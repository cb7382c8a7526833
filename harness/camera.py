"""Off-screen pictures of MuJoCo scenes, for worlds whose simulator was imported without OpenGL.

Rendering is optional: OpenGL is loaded when a Camera is made and not before. The error names the Debian packages.

    python -m harness.camera        what `available` runs: prints the back end, or what to install (exit code 1)
"""

import atexit
import importlib
import os
import subprocess
import sys
from pathlib import Path

import mujoco
import numpy as np

BACKENDS = ("egl", "osmesa")            # in this order
INSTALL = ("no off-screen OpenGL; install the Debian packages libegl1 libgl1 libgles2 libgl1-mesa-dri, "
           "or libosmesa6")


class Camera:
    """Off-screen pictures of a MuJoCo model through EGL, else OSMesa, whatever MUJOCO_GL was at import.

    `backend` says which. The model's state is only read; its size of off-screen buffers is set.
    """

    def __init__(self, model, width, height):
        problems = []
        model.vis.global_.offwidth, model.vis.global_.offheight = width, height
        for backend in BACKENDS:
            os.environ.setdefault("PYOPENGL_PLATFORM", backend)
            try:
                self._open(backend, model, width, height)
                break
            # whatever it is, the next one is tried and all are told: the libraries raise classes of their own, which
            # can be named only where they load
            except Exception as error:
                problems.append(f"{backend}: {' '.join(str(error).split())}")
                os.environ.pop("PYOPENGL_PLATFORM")
                for name in [n for n in sys.modules if n == "OpenGL" or n.startswith("OpenGL.")]:
                    del sys.modules[name]
        else:
            raise RuntimeError(f"{INSTALL} ({'; '.join(problems)})")
        self.backend, self.size = backend, (width, height)
        atexit.register(self.close)     # before the interpreter takes OpenGL apart
        self.scene = mujoco.MjvScene(model, 2000)
        self.option = mujoco.MjvOption()
        self.option.geomgroup[0] = 0    # collision boxes
        self.view = mujoco.MjvCamera()
        self.view.type = mujoco.mjtCamera.mjCAMERA_FIXED

    def _open(self, backend, model, width, height):
        gl = importlib.import_module(f"mujoco.{backend}").GLContext(width, height)
        try:
            gl.make_current()
            self.context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        except Exception:
            gl.free()
            raise
        self.gl = gl
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self.context)

    def picture(self, model, data, camera):
        """(height, width, 3) uint8."""
        self.gl.make_current()
        self.view.fixedcamid = model.camera(camera).id
        everything = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(model, data, self.option, None, self.view, everything, self.scene)
        pixels = np.empty((self.size[1], self.size[0], 3), np.uint8)
        rect = mujoco.MjrRect(0, 0, *self.size)
        mujoco.mjr_render(rect, self.scene, self.context)
        mujoco.mjr_readPixels(pixels, None, rect, self.context)
        return pixels[::-1]

    def close(self):
        atexit.unregister(self.close)
        self.gl.make_current()          # atexit runs in another thread than the one that made the pictures
        self.context.free()
        self.gl.free()


def available():
    """-> 'egl' or 'osmesa': what renders pictures here; RuntimeError, one line, if nothing does.

    Found out in a process of its own: OpenGL stays out of this one, and a driver that crashes ends only that one.
    """
    done = subprocess.run([sys.executable, "-m", "harness.camera"], cwd=Path(__file__).resolve().parent.parent,
                          capture_output=True, text=True)
    if done.returncode == 0:
        return done.stdout.split()[-1]
    raise RuntimeError((done.stderr.strip().splitlines() or [f"{INSTALL} (exit code {done.returncode})"])[-1])


def try_out():
    """Renders a small scene -> the back end that did; RuntimeError if none does, or the picture is empty."""
    model = mujoco.MjModel.from_xml_string("""<mujoco><worldbody><light pos="0 0 3"/><camera name="above" pos="0 0 3"/>
        <geom type="box" size=".5 .5 .5" group="1"/></worldbody></mujoco>""")
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    camera = Camera(model, 64, 64)
    picture = camera.picture(model, data, "above")
    camera.close()
    if np.ptp(picture) == 0:
        raise RuntimeError(f"{camera.backend} renders empty pictures; {INSTALL}")
    return camera.backend


if __name__ == "__main__":
    try:
        print(try_out())
    except RuntimeError as error:
        sys.exit(str(error))
