"""Off-screen pictures of MuJoCo scenes, for worlds whose simulator was imported without OpenGL.

Rendering is optional: OpenGL is loaded when a Camera is made and not before. The error names the Debian packages.
"""

import atexit
import importlib
import os
import sys

import mujoco
import numpy as np


class Camera:
    """Off-screen pictures of a MuJoCo model through EGL, else OSMesa, whatever MUJOCO_GL was at import."""

    def __init__(self, model, width, height):
        problems = []
        for backend in ("egl", "osmesa"):
            os.environ.setdefault("PYOPENGL_PLATFORM", backend)
            try:
                self.gl = importlib.import_module(f"mujoco.{backend}").GLContext(width, height)
                break
            except (ImportError, AttributeError, RuntimeError, OSError) as error:       # no such library here
                problems.append(f"{backend}: {error}")
                os.environ.pop("PYOPENGL_PLATFORM")
                for name in [n for n in sys.modules if n == "OpenGL" or n.startswith("OpenGL.")]:
                    del sys.modules[name]
        else:
            raise RuntimeError("no off-screen OpenGL; install the Debian packages libegl1 libgl1 libgles2 "
                               f"libgl1-mesa-dri, or libosmesa6 ({'; '.join(problems)})")
        self.backend, self.size = backend, (width, height)
        atexit.register(self.close)     # before the interpreter takes OpenGL apart
        self.gl.make_current()
        model.vis.global_.offwidth, model.vis.global_.offheight = width, height
        self.scene = mujoco.MjvScene(model, 2000)
        self.context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self.context)
        self.option = mujoco.MjvOption()
        self.option.geomgroup[0] = 0    # collision boxes
        self.view = mujoco.MjvCamera()
        self.view.type = mujoco.mjtCamera.mjCAMERA_FIXED

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
        self.context.free()
        self.gl.free()
