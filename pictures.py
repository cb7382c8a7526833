"""Pictures of a prompt, as the checkpoint sees them: placeholder tokens, patches (pixel values) and their grid.

A vision-language checkpoint's template writes one placeholder token per picture; its processor repeats it once per merged patch, and the
model puts the picture's features there. Both come from this very checkpoint's files, config.json and preprocessor_config.json. Only the
picture half of the processor is loaded, with its PIL backend: the rest wants torchvision, for videos.

Supported: processors that give image_grid_thw (Qwen2-VL, 2.5-VL, 3-VL, 3.5). vLLM resizes with torchvision, which calls torch's bicubic
filter; so does this, bit for bit. Pillow's own differs: noise of 641 x 483 pixels in 31 % of the values, by up to 23 of 255. What is left
is the order of the normalisation's two operations: below 3e-7, nothing in bfloat16.
"""

import contextlib
import functools
import hashlib
import io
import struct
import threading
import zlib
from collections import OrderedDict

import torch
from PIL import Image, ImageOps
from transformers import PretrainedConfig
from transformers.image_processing_backends import PilBackend
from transformers.models.auto.image_processing_auto import AutoImageProcessor      # at the top level it wants torchvision

from records import BadInput

FORMATS = ("PNG", "JPEG", "WEBP")                          # what an ImageStore takes
BROKEN = (OSError, ValueError, SyntaxError, EOFError, IndexError, struct.error, zlib.error, Image.DecompressionBombError)
KEPT, COUNTS = 8, 1 << 16                                  # newest pictures whose patches (one of 1 Mpx: 24 MB) and counts are kept


def decode(data):
    """Bytes -> PIL picture in RGB, as vLLM 0.32 makes it (multimodal/media/image.py). ValueError if they are no whole picture.

    The orientation of EXIF is applied; whatever has transparency (alpha, or a transparent colour in grey and palette files) is laid
    on white; the rest is converted, so that grey is repeated. An RGB picture with a transparent colour keeps it: it is RGB already.
    """
    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS)
        picture.load()
        with contextlib.suppress(*BROKEN):                 # broken EXIF: the picture as it lies
            picture = ImageOps.exif_transpose(picture)
        if picture.mode == "RGB" or (picture.mode not in ("RGBA", "LA", "PA") and "transparency" not in picture.info):
            return picture.convert("RGB")
        picture, white = picture.convert("RGBA"), Image.new("RGB", picture.size, (255, 255, 255))
        white.paste(picture, mask=picture.getchannel("A"))
        return white
    except BROKEN as e:
        raise ValueError(f"the picture cannot be decoded ({type(e).__name__}: {e})") from None


class TorchResize(PilBackend):
    """Stands between a PIL processor and its base class, and resizes in the base's place as torchvision does."""

    def resize(self, image, size, resample=None, **kwargs):
        """(C, H, W) uint8 array -> (C, size.height, size.width) uint8 array; filters other than bicubic are Pillow's."""
        if resample != Image.Resampling.BICUBIC or not (size.height and size.width):
            return super().resize(image, size, resample, **kwargs)
        small = torch.nn.functional.interpolate(torch.from_numpy(image)[None], (size.height, size.width), mode="bicubic",
                                                align_corners=False, antialias=True)                      # (1, C, h, w) uint8
        return small[0].numpy()


class Pictures:
    """Placeholders and patches of one checkpoint. The processor is loaded at first use (BadInput if it is none of ours); thread-safe."""

    def __init__(self, folder, config):
        self.folder, self.vision, self.token = str(folder), config["vision_config"], config.get("image_token_id")
        self.patches, self.counts, self.lock = OrderedDict(), OrderedDict(), threading.RLock()

    @functools.cached_property
    def processor(self):
        try:
            processor = AutoImageProcessor.from_pretrained(self.folder, backend="pil")
        except (OSError, ValueError, KeyError) as e:
            raise BadInput(f"{self.folder}: the checkpoint sees pictures, but its preprocessor_config.json cannot be loaded "
                           f"({str(e).strip().splitlines()[0]}); copy it from the model's original checkpoint") from None
        if not isinstance(self.token, int) or "image_grid_thw" not in processor.model_input_names:
            raise BadInput(f"{self.folder}: pictures of {type(processor).__name__} are not supported; expected image_token_id in "
                           "config.json and a processor that gives image_grid_thw (Qwen2-VL, 2.5-VL, 3-VL, 3.5)")
        for ours, name in (("merge_size", "spatial_merge_size"), ("patch_size", "patch_size"), ("temporal_patch_size",) * 2):
            if getattr(processor, ours) != self.vision.get(name, getattr(processor, ours)):
                raise BadInput(f"{self.folder}: {ours} {getattr(processor, ours)} in preprocessor_config.json, but {name} "
                               f"{self.vision[name]} in config.json; copy both from one checkpoint")
        if processor.do_resize and None in (processor.size.get("shortest_edge"), processor.size.get("longest_edge")):
            raise BadInput(f"{self.folder}: size in preprocessor_config.json has no shortest_edge and longest_edge (pixels in all); copy "
                           "that file from the model's original checkpoint")
        if isinstance(processor, PilBackend):
            processor.__class__ = type(type(processor).__name__, (type(processor), TorchResize), {})
        return processor

    def inputs(self, data):
        """Bytes -> (pixel_values (P, D) float32, grid (3,) int64: frames, rows, columns of patches), P = grid.prod(). Shared: do not edit.

        D = channels · temporal_patch_size · patch_size². ValueError if the bytes do not decode, or are longer than 200 times wide.
        """
        return self._kept(self.patches, KEPT, data, self._inputs)

    def count(self, data):
        """Bytes -> number of placeholder tokens of this picture, from its size alone. ValueError as inputs()."""
        return self._kept(self.counts, COUNTS, data, self._count)

    def expand(self, ids, counts):
        """Prompt ids with one placeholder per picture -> ids with counts[i] copies of the i-th. ValueError if their numbers differ."""
        found = ids.count(self.token)
        if found != len(counts):
            raise ValueError(f"{found} placeholder tokens for {len(counts)} pictures; text must not hold the template's placeholder")
        left = iter(counts)
        return [i for i in ids for _ in range(next(left) if i == self.token else 1)]

    def _inputs(self, data):
        out = self.processor(images=[decode(data)], return_tensors="pt")
        return out["pixel_values"], out["image_grid_thw"][0]                                # (P, D), (3,)

    def _count(self, data):
        p, (width, height) = self.processor, decode(data).size
        if p.do_resize and hasattr(p, "get_number_of_image_patches"):                       # no pixel is touched
            return int(p.get_number_of_image_patches(height, width)) // p.merge_size ** 2
        return int(self.inputs(data)[1].prod()) // p.merge_size ** 2

    def _kept(self, kept, limit, data, make):
        """make(data), the newest `limit` kept by content. Errors are not kept."""
        key = hashlib.sha256(data).digest()
        with self.lock:
            kept[key] = value = kept.pop(key) if key in kept else make(data)               # the newest stands last
            if len(kept) > limit:
                kept.popitem(last=False)
        return value


def load_pictures(folder):
    """Checkpoint folder (or hub name) -> Pictures, or None for a text-only one: no config.json (a tokenizer alone), or no vision_config."""
    try:
        config, _ = PretrainedConfig.get_config_dict(str(folder))
    except (OSError, ValueError) as e:
        raise BadInput(f"{folder}: config.json cannot be read ({str(e).splitlines()[0]})") from None
    return Pictures(folder, config) if config.get("vision_config") else None
