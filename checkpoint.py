"""What the trainer leaves on disk: resume points, the state for the next round, and checkpoints that others load.

Three folders, of which each is whole or does not exist under its name:
    OUTPUT/                 a checkpoint for transformers and vLLM; config.json moves in last
    OUTPUT/state/           float32 weights and optimizer state, for the next round of RL
    OUTPUT/resume/step-N/   the same in the middle of a run; deleted when the run is whole
State is written by torch.distributed.checkpoint: every rank writes its own shards, any number of ranks reads them. So
with several nodes OUTPUT must lie on a file system that all of them see.

Nothing is drawn at random while training (batches come from seeds, dropout is off) and the learning rate is a function
of the step: weights, optimizer state and the count of steps are a whole state, and on one CPU process a resumed run
repeats the uninterrupted one bit for bit.
"""

import json
import re
import shutil
import warnings
from pathlib import Path

import torch

from records import BadInput, policy_version, read_json, STOPPED, write_json
from trainer import FREE, full

# What transformers and vLLM take for granted where a request does not say otherwise: the policy itself, nothing cut off.
NEUTRAL = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
# Arguments that decide which tensors an optimizer keeps: a state of other ones cannot be continued.
SHAPE = ("optimizer", "train_vision")


def already_whole(output, stage, args):
    """True (and says so) if `output` holds this very run, finished. BadInput if it holds one with other arguments."""
    if not (output / "manifest.json").exists():
        return False
    before = read_json(output / "manifest.json")["arguments"]
    now = json.loads(json.dumps(vars(args), default=str))
    for name in sorted(before.keys() | now.keys()):
        if name not in FREE and before.get(name) != now.get(name):
            raise BadInput(f"{output}: holds a finished run with {name}={before.get(name)!r}, this command says {now.get(name)!r}; "
                           "give another --output")
    shutil.rmtree(output / "resume", ignore_errors=True)                   # killed between its manifest and this
    print(f"{stage}: {output} is already whole")
    return True


def check_shared(output, ranks):
    """BadInput unless every rank sees what rank 0 wrote (args.json of save_args). On a folder of its own each node would keep its
    shards to itself, and only the resumption would find them missing."""
    def seen():
        if not (Path(output) / "args.json").exists():
            raise BadInput(f"{output}: rank {ranks.rank} does not see what rank 0 wrote there; with several nodes --output must lie on "
                           "a file system that all of them share")
    ranks.barrier()                                                       # rank 0 has written
    ranks.on_all(seen)


# ---------------------------------------------------------------------------------------------- state

def save_state(folder, run, extra):
    """Weights (float32) and optimizer state; then trainer_state.json with `extra`, the step count and the last learning
    rate. All ranks call it. run: trainer.Trainer."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    model, optim = get_state_dict(run.model, run.optimizers)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")   # one process, on purpose
        dcp.save({"model": model, "optim": optim}, checkpoint_id=str(folder))
    if run.ranks.main:
        shape = {name: getattr(run.args, name) for name in SHAPE}
        write_json(Path(folder) / "trainer_state.json", {"steps": run.steps, "lr": run.lr, **shape, **extra})


def load_state(folder, run):
    """Restores what save_state wrote, on any number of ranks; returns its `extra`."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    extra = read_json(Path(folder) / "trainer_state.json")
    settings = [{k: v for k, v in group.items() if k != "params"} for o in run.optimizers for group in o.param_groups]
    model, optim = get_state_dict(run.model, run.optimizers)              # gives an optimizer without state its zeros
    state = {"model": model, "optim": optim}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, checkpoint_id=str(folder))
    set_state_dict(run.model, run.optimizers, model_state_dict=state["model"], optim_state_dict=state["optim"])
    for group, now in zip((group for o in run.optimizers for group in o.param_groups), settings, strict=True):
        group.update(now)               # weight decay and betas are this command's, not those of the round before
    run.steps, run.lr = extra["steps"], extra["lr"]
    return extra


def save_resume(output, run, step, identity):
    """<output>/resume/step-N, renamed into place when it is whole; the newest --keep stay. step: optimizer steps of this
    stage done; identity: what the run was computed from, for `newest_resume`."""
    folder = Path(output) / "resume"
    # A name of its own each time: an NFS client that remembers `part` from the save before would write into what it became.
    part, final = folder / f"part-{step:08d}", folder / f"step-{step:08d}"
    if run.ranks.main:
        for old in (*folder.glob("part*"), final):
            shutil.rmtree(old, ignore_errors=True)
        part.mkdir(parents=True)
    run.ranks.barrier()
    save_state(part, run, {"step": step, "identity": identity})
    run.ranks.barrier()
    if run.ranks.main:
        part.rename(final)
        for _, old in resume_points(output)[:-run.args.keep]:
            shutil.rmtree(old)
    run.ranks.barrier()


def resume_points(output):
    """[(step, folder)] of the whole resume points, oldest first; whatever else lies in resume/ is not ours."""
    found = (p for p in (Path(output) / "resume").glob("step-*")
             if re.fullmatch(r"step-\d{8,}", p.name) and (p / "trainer_state.json").exists())
    return sorted((int(p.name[5:]), p) for p in found)


def newest_resume(output, identity):
    """(folder, step) of the newest whole resume point, or (None, 0). BadInput if it belongs to another run: other
    arguments, another data file, another checkpoint."""
    _, folder = max(resume_points(output), default=(0, None))
    if folder is None:
        return None, 0
    saved = read_json(folder / "trainer_state.json")
    changed = sorted(k for k in saved["identity"].keys() | identity.keys() if saved["identity"].get(k) != identity.get(k))
    if changed:
        raise BadInput(f"{folder}: the interrupted run had other {', '.join(changed)}; give the same command and data, or "
                       f"delete {Path(output) / 'resume'} to start again")
    return folder, saved["step"]


def stop(output, run, steps, identity):
    """The end of a stage that was stopped between two steps: a resume point (unless nothing was done), one line, and the
    exit code. steps: trainer.Steps."""
    if steps.done > steps.first:
        save_resume(output, run, steps.done, identity)
    if run.ranks.main:
        print(f"{steps.stage}: ended by {steps.stopped} after step {steps.done} of {steps.total}; repeat the command to go on", flush=True)
    run.ranks.close()
    steps.release()
    return STOPPED


def run_identity(args, **data):
    """What may not change between a run and its resumption: all arguments but the FREE ones, and hashes of its data."""
    return {**{k: str(v) for k, v in sorted(vars(args).items()) if k not in FREE}, **data}


# ---------------------------------------------------------------------------------------------- checkpoints

def gather_weights(run, dtype):
    """{name: CPU tensor of `dtype`} on rank 0, {} elsewhere; one weight at a time is whole on a GPU. All ranks call it."""
    weights = {}
    for name, p in run.model.state_dict().items():
        whole = full(p.detach().to(dtype))                                # a collective
        if run.ranks.main:
            weights[name] = whole.cpu()
    return weights


def save_checkpoint(output, run, source, extra):
    """<output>/: a checkpoint for transformers and vLLM, and <output>/state/ for the next round. Returns the policy
    version.

    All is written to <output>/part/ first; config.json moves last, and without it a folder is no checkpoint to anybody.
    source: the folder the model came from; tokenizer, template and processor files are copied byte for byte, sampling
    defaults are made neutral.
    """
    output, model, ranks, dtype = Path(output), run.model, run.ranks, run.args.save_dtype
    if dtype == "auto":
        dtype = "bfloat16" if ranks.device.type == "cuda" else "float32"
    part, version = output / "part", None
    weights = gather_weights(run, getattr(torch, dtype))
    if ranks.main:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight    # a config says it twice, and may disagree
        for alias, name in (getattr(model, "_tied_weights_keys", None) or {}).items():
            if tied and alias in weights:
                assert torch.equal(weights[alias], weights[name]), f"{alias} and {name} are tied but differ"
                del weights[alias]
        model.save_pretrained(part, state_dict=weights)
        config = read_json(part / "config.json")           # transformers wrote the dtype of the model in memory
        for section in [config, *(v for v in config.values() if isinstance(v, dict) and "dtype" in v)]:
            section["dtype"] = dtype
        write_json(part / "config.json", config)
        ours = ("config.json", "manifest.json", "args.json", "round.json", "model.safetensors.index.json")
        for path in Path(source).iterdir():
            if path.suffix in (".json", ".jinja", ".txt", ".model") and path.name not in ours:
                shutil.copyfile(path, part / path.name)
        write_json(part / "generation_config.json", neutral_generation(part))
        version = policy_version(part)
    ranks.barrier()
    save_state(part / "state", run, {**extra, "policy_version": version})
    ranks.barrier()
    if ranks.main:
        shutil.rmtree(output / "state", ignore_errors=True)
        for path in sorted(part.iterdir(), key=lambda p: p.name == "config.json"):
            path.replace(output / path.name)
        part.rmdir()
    ranks.barrier()
    return version


def neutral_generation(folder):
    """The source's generation config with its token ids, without its sampling: a served policy must be the trained one.
    Where it names no end of turn, the tokenizer does (Qwen3.5's config.json would only name the end of a text)."""
    from transformers import AutoTokenizer
    path = folder / "generation_config.json"
    before = read_json(path) if path.exists() else {}
    if before.get("eos_token_id") is None:
        before["eos_token_id"] = AutoTokenizer.from_pretrained(folder).eos_token_id
    kept = ("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version")
    return {**{k: before[k] for k in kept if before.get(k) is not None}, **NEUTRAL}
