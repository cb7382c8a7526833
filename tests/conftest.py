"""Shared fixtures. Everything runs on a CPU without network."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pytest
import torch

torch.set_num_threads(1)

TEXTS = [
    "Task: Put the red mug on the blue tray.", "Task: Put the green pot on the white tray, then the red mug on the blue tray.",
    "red mug at x 412 y -133", "I will pick up the red mug.", "Held: red mug.", "Placed the red mug on the blue tray.",
    '{"name": "locate", "arguments": {"name": "red mug"}}', '{"name": "pick", "arguments": {"x": 412, "y": -133, "dy": 20}}',
    '{"name": "place", "arguments": {"name": "blue tray"}}', '{"name": "finish", "arguments": {"status": "success"}}',
]


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory):
    """A tiny random Qwen3 checkpoint (2 layers, 64 wide, 400 tokens) with the tiny chat template."""
    from tiny import SCAFFOLD, make_model, train_tokenizer
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = train_tokenizer((TEXTS + SCAFFOLD) * 20, 400, ["red", "blue", "green", "white", "mug", "pot", "tray"])
    make_model(len(tokenizer), 64, 2, 2, 1, 128, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def python():
    """argv prefix that runs a script of the repository in this interpreter."""
    return [sys.executable]
