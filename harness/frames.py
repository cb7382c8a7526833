"""Films an episode while it runs: a GIF or an MP4 with the planner's calls and receipts, and a contact sheet beside it.

    episode.gif | .mp4  the instruction above, call and receipt below the picture, an end card; its own clock: motions
                        are shown faster than they are, and a caption stays long enough to be read
    episode.png         one picture per call, taken after it; of more than 12 calls the first, the last, some between

Rendering is passive: it reads the simulator and writes nothing to it (tests/test_frames.py). MP4 needs OpenCV, which
LIBERO brings; the codec is VP9: browsers play it, and opencv-python's wheels can write it (H.264 they cannot).
"""

import importlib.util
import io
import json
import tempfile
import textwrap
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

FORMATS = ("gif", "mp4")
WIDTH, HEIGHT = 480, 360                # pixels of a picture
EVERY = 4                               # a picture per so many pieces of motion (LIBERO: 0.05 s, so twice real time)
TICK, CALL, RECEIPT, END = 100, 1000, 1800, 2800     # ms that a picture in motion, a call, a receipt, the end card stay
TILES, COLUMNS, TILE = 12, 3, (320, 240)            # of the contact sheet
LINES = 12                              # of a caption, at most; what is cut ends with "…"
DARK, LIGHT, GREY = (20, 20, 20), (240, 240, 240), (170, 170, 170)
GREEN, RED = (120, 220, 120), (250, 120, 110)


# ---------------------------------------------------------------------------------------------- text

def _font(size):
    """Monospaced (0.6 of its size wide), with more than Latin letters; matplotlib brings it."""
    folder = importlib.util.find_spec("matplotlib").submodule_search_locations[0]
    return ImageFont.truetype(f"{folder}/mpl-data/fonts/ttf/DejaVuSansMono.ttf", size)


def wrap(text, font, width, most=LINES):
    """Text -> lines of `width` pixels, at most `most` of them; words longer than a line are broken."""
    columns = int(width / font.getlength("m"))
    text = text.encode(errors="replace").decode()               # half of a surrogate pair becomes "?"
    lines = [line for paragraph in text.splitlines() for line in textwrap.wrap(paragraph, columns)]
    return lines if len(lines) <= most else [*lines[:most - 1], lines[most - 1][:columns - 2] + " …"]


def call_text(message):
    """A planner's reply as a caption: locate(name="red mug"), or its words if it called nothing."""
    if not message.get("tool_calls"):
        return message.get("content") or "(no answer)"
    call = message["tool_calls"][0]["function"]                 # the others are not run
    try:
        given = json.loads(call["arguments"] or "{}").items()
    except (ValueError, AttributeError, RecursionError):        # malformed: shown as it came
        return f"{call['name']}({call['arguments']})"
    return f"{call['name']}({', '.join(f'{k}={json.dumps(v, ensure_ascii=False)}' for k, v in given)})"


def _caption(call, receipt, font, width, most=LINES):
    """[(line, colour)]: the call light, its receipt grey; together at most `most` lines, half of them for the call."""
    above = wrap(call, font, width, most // 2)
    below = wrap(receipt, font, width, most - len(above))
    return [(line, LIGHT) for line in above] + [(line, GREY) for line in below]


def _write(draw, lines, x, y, font, step):
    for k, (line, colour) in enumerate(lines):
        draw.text((x, y + k * step), line, fill=colour, font=font)


# ---------------------------------------------------------------------------------------------- filming

def renderer(world):
    """'egl' or 'osmesa' once this world took a picture; 'pillow' where no OpenGL is needed."""
    camera = getattr(world, "camera", None)
    return camera.backend if camera else "pillow"


class Frames:
    """Pictures of one episode, as PNGs; `save` draws the captions and writes the files.

    `call` is told each reply of the planner, `receipt` what the harness answered to it; skills call `world.on_chunk`.
    """

    def __init__(self, world, instruction):
        self.world, self.instruction = world, instruction
        self.shots = []                 # (PNG, call, receipt, ms)
        self.calls = []                 # [call, receipt, PNG]
        self.count, self.png = 0, None  # pieces of motion; the last picture, while nothing has moved since
        world.on_chunk = self._chunk

    def _chunk(self, world):
        self.png = None
        self.count += 1
        if self.count % EVERY == 0:
            self._take(TICK)

    def _take(self, ms):
        self.png = self.png or self.world.render(WIDTH, HEIGHT)
        call, receipt = self.calls[-1][:2] if self.calls else ("", "")
        self.shots.append((self.png, call, receipt, ms))

    def call(self, message):
        self.calls.append([call_text(message), "", None])
        self._take(CALL)
        self.calls[-1][2] = self.png

    def receipt(self, text):
        self.calls[-1][1] = text
        self._take(RECEIPT)
        self.calls[-1][2] = self.png

    def save(self, path, success, how):
        """Writes `path` (.gif or .mp4) and the sheet beside it. success: None if invalid. how: it ended, a line."""
        self.world.on_chunk = None
        path = Path(path)
        if not self.shots:                                              # no call came back
            self._take(CALL)
        word = {True: ("Success", GREEN), False: ("Failure", RED), None: ("Invalid", RED)}[success]
        path.parent.mkdir(parents=True, exist_ok=True)
        self._sheet(word, how).save(path.with_suffix(".png"))
        part = path.with_name(f"{path.stem}.part{path.suffix}")         # whole or not there
        {".gif": write_gif, ".mp4": write_mp4}[path.suffix](part, self._film(word, how))
        part.rename(path)

    def _film(self, word, how):
        """Yields (picture, ms); all pictures have one size, given by the longest caption."""
        font, step, margin, inner = _font(14), 18, 8, WIDTH - 16
        title = [(line, LIGHT) for line in wrap(self.instruction, font, inner, 3)]
        captions = {(c, r): _caption(c, r, font, inner) for _, c, r, _ in self.shots}
        top = len(title) * step + 2 * margin
        height = top + HEIGHT + max(2, *map(len, captions.values())) * step + 2 * margin
        size = WIDTH, height + height % 2                               # codecs want even numbers
        for png, call, receipt, ms in self.shots:
            frame = Image.new("RGB", size, DARK)
            frame.paste(Image.open(io.BytesIO(png)), (0, top))
            for lines, y in ((title, margin), (captions[call, receipt], top + HEIGHT + margin)):
                _write(ImageDraw.Draw(frame), lines, margin, y, font, step)
            yield frame, ms
        card = Image.blend(frame, Image.new("RGB", size, DARK), .7)
        for text, colour, big, y in ((*word, 44, HEIGHT / 2 - 20), (how, LIGHT, 14, HEIGHT / 2 + 22)):
            ImageDraw.Draw(card).text((WIDTH / 2, top + y), text, fill=colour, font=_font(big), anchor="mm")
        yield card, END

    def _sheet(self, word, how):
        """One picture: up to TILES tiles, each a call's picture with call and receipt below it."""
        font, step, gap, n = _font(12), 16, 8, len(self.calls)
        chosen = range(n) if n <= TILES else [round(k * (n - 1) / (TILES - 1)) for k in range(TILES)]
        calls = [(f"{k + 1}. {self.calls[k][0]}", *self.calls[k][1:]) for k in chosen] or [("", "", self.shots[0][0])]
        tiles = [(png, _caption(call, receipt, font, TILE[0], 9)) for call, receipt, png in calls]
        rows = [tiles[k:k + COLUMNS] for k in range(0, len(tiles), COLUMNS)]
        width = gap + len(rows[0]) * (TILE[0] + gap)
        title = [(line, LIGHT) for line in wrap(self.instruction, font, width - 2 * gap, 3)]
        title += [(line, word[1]) for line in wrap(f"{word[0]}: {how}", font, width - 2 * gap, 3)]
        heights = [TILE[1] + 4 + max(len(lines) for _, lines in row) * step + gap for row in rows]
        y = 2 * gap + len(title) * step
        sheet = Image.new("RGB", (width, y + sum(heights)), DARK)
        draw = ImageDraw.Draw(sheet)
        _write(draw, title, gap, gap, font, step)
        for row, height in zip(rows, heights, strict=True):
            for k, (png, lines) in enumerate(row):
                x = gap + k * (TILE[0] + gap)
                sheet.paste(Image.open(io.BytesIO(png)).resize(TILE, Image.LANCZOS), (x, y))
                _write(draw, lines, x, y + TILE[1] + 4, font, step)
            y += height
        return sheet


# ---------------------------------------------------------------------------------------------- files

def write_gif(path, film):
    frames, ms = zip(*((frame.quantize(256, Image.Quantize.FASTOCTREE), ms) for frame, ms in film), strict=True)
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=list(ms), loop=0)


def write_mp4(path, film):
    try:
        import cv2
    except ImportError as error:
        raise RuntimeError(f"mp4 needs OpenCV; run: pip install -r requirements-libero.txt ({error})") from None
    writer = None
    for frame, ms in film:
        writer = writer or cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"vp09"), 1000 / TICK, frame.size)
        for _ in range(max(1, round(ms / TICK))):
            writer.write(np.ascontiguousarray(np.asarray(frame)[..., ::-1]))        # OpenCV's order is blue, green, red
    if not writer.isOpened():
        raise RuntimeError("mp4: this OpenCV cannot write VP9; choose gif")
    writer.release()


def check(world, form=None):
    """World name -> its renderer. RuntimeError, one line, if nothing can be rendered here or no such film written."""
    if form == "mp4":
        with tempfile.TemporaryDirectory() as folder:
            write_mp4(f"{folder}/x.mp4", [(Image.new("RGB", (WIDTH, HEIGHT)), TICK)])
    if world == "tabletop":
        return "pillow"
    from harness.camera import available
    return available()
