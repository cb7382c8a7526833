"""The model server of a stage: the in-process engine, vLLM replicas started here, or servers that already run.

    --engine transformers      engine.py in this process (the default; tiny planners, no server, no GPU)
    --engine vllm              --replicas N vLLM processes, each on its own GPUs, ended with the stage (also when it is killed)
    --engine-url URL[,URL…]    vLLM servers that already run, on this machine or others

Several servers form a `Fleet`: an episode stays on its server (its prefix cache is there), a server that died or hangs gets no more
calls, and the rest go on. Every server is proved before the first call (vllm_server.prove). `Fleet.roll` loads another checkpoint
into all of them while calls wait; a server of ours that cannot do it is restarted.

As a command, for servers that outlive the stages:

    python serving.py command --model run/sft --replicas 2                             the lines that start them, to be typed
    python serving.py probe --model run/sft --engine-url http://n1:8000,http://n2:8000     do they serve this checkpoint, and rightly?
    python serving.py roll  --model run/rl-1 --engine-url http://n1:8000,http://n2:8000    load the next one, between two rounds
(torchrun is for the stages; under it every rank starts its own replicas on its own GPUs.)
"""

import argparse
import asyncio
import contextlib
import os
import re
import shlex
import sys
import time
from collections import Counter
from pathlib import Path

import records
from records import BadInput, Formatter, at_least, run_main
from upstream import UpstreamError
from vllm_server import ROOT, Server, fingerprint, free_port, prove, reference, replica_gpus, typed, vllm_command

STUCK = 3               # calls in a row that a server lost (connection, or abandoned after PATIENCE) before it counts as hung
PATIENCE = 300.0        # s; a call that its client abandons after this long counts as lost
DEFAULTS = {  # option -> (engines that honour it, default)
    "slots": (("transformers",), 64), "batch": (("transformers", "vllm"), 32), "max_length": (("transformers", "vllm"), 2048),
    "replicas": (("vllm",), 1), "tensor_parallel": (("vllm",), 1), "gpu_memory": (("vllm",), 0.9), "max_images": (("vllm",), None),
    "tool_parser": (("vllm",), None), "reasoning_parser": (("vllm",), None), "vllm_python": (("vllm",), None),
    "vllm_args": (("vllm",), None), "startup": (("vllm",), 1800.0), "probe": (("vllm", "url"), "full"),
}


def add_engine_arguments(p, required=True):
    """Arguments of every stage that samples from a checkpoint. None stands for "not given": resolve() fills in and refuses."""
    g = p.add_argument_group("model server")
    g.add_argument("--model", required=required, help="checkpoint folder of the policy (its content gives the policy version)")
    g.add_argument("--engine", choices=("transformers", "vllm"), default=None, help="which engine to start; default: transformers")
    g.add_argument("--engine-url", metavar="URL[,URL…]", default=None, help="running vLLM servers of --model, instead of starting one")
    g.add_argument("--slots", type=at_least(1), default=None, help="transformers: episodes whose prefix is kept (count); default 64")
    g.add_argument("--batch", type=at_least(1), default=None,
                   help="requests generated together (count, per replica); default: transformers 32, vllm its own")
    g.add_argument("--max-length", type=at_least(2), default=None,
                   help="prompt plus response (tokens); default: transformers 2048, vllm the model's own")
    g.add_argument("--replicas", type=at_least(1), default=None, help="vllm: independent servers (count, per torchrun rank); default 1")
    g.add_argument("--tensor-parallel", type=at_least(1), default=None, help="vllm: GPUs per replica (count); default 1")
    g.add_argument("--gpu-memory", type=float, default=None, help="vllm: share of each GPU's memory (0 to 1); default 0.9")
    g.add_argument("--max-images", type=at_least(1), default=None, help="vllm: pictures per prompt (count); default: vLLM's own")
    g.add_argument("--tool-parser", default=None, help="vllm: tool-call parser; default: by model family")
    g.add_argument("--reasoning-parser", default=None,
                   help="vllm: reasoning parser, or 'none'; default: by model family, if the template thinks")
    g.add_argument("--vllm-python", default=None, help="python that has vLLM; default: .venv-vllm/bin/python, else this one")
    g.add_argument("--vllm-args", default=None, help="further arguments of vLLM, e.g. --vllm-args='--quantization fp8'")
    g.add_argument("--startup", type=at_least(1.0, float), default=None, help="vllm: longest wait for a replica (s); default 1800")
    g.add_argument("--probe", choices=("full", "light", "off"), default=None,
                   help="vllm, URL: proof before the first call; full compares log-probs with a forward of --model here (CPU), "
                        "light does not; default full")


def without_engine(p, args, who):
    """No checkpoint is served: refuses an engine's option that was given, and takes them all out of `args`."""
    engine = argparse.ArgumentParser(add_help=False)
    add_engine_arguments(engine, required=False)
    for name, default in vars(engine.parse_args([])).items():
        if getattr(args, name) != default:
            p.error(f"--{name.replace('_', '-')} {getattr(args, name)}: {who} does not honour it")
        delattr(args, name)


def urls(text):
    """--engine-url as a list of base URLs; BadInput for an empty one, one without a scheme, or one that stands twice."""
    found = [url.strip().rstrip("/").removesuffix("/v1") for url in text.split(",")]
    if wrong := [url for url in found if not re.fullmatch(r"https?://[^/\s]+.*", url) or found.count(url) > 1]:
        raise BadInput(f"--engine-url {text!r}: expected different URLs (http://HOST:PORT), found {wrong[0]!r}")
    return found


def resolve(args):
    """Fills the engine's options in place; BadInput for one that the chosen engine does not honour. -> transformers | vllm | url"""
    if args.engine_url is not None:
        args.engine_url = ",".join(urls(args.engine_url))
    if args.engine_url and args.engine:
        raise BadInput(f"--engine {args.engine} starts a server, --engine-url {args.engine_url} names a running one: give one of them")
    kind = "url" if args.engine_url else args.engine or "transformers"
    for name, (kinds, default) in DEFAULTS.items():
        option = "--" + name.replace("_", "-")
        if getattr(args, name) is None:
            own = name in ("batch", "max_length") and kind == "vllm"
            setattr(args, name, default if kind in kinds and not own else None)
        elif kind not in kinds:
            where = {"transformers": "the in-process engine", "vllm": "--engine vllm", "url": "--engine-url"}
            raise BadInput(f"{option} {getattr(args, name)}: {where[kind]} does not honour it; it is for "
                           f"{' and '.join(where[k] for k in kinds)}")
    if kind == "vllm":
        own = ROOT / ".venv-vllm/bin/python"
        args.vllm_python = args.vllm_python or (str(own) if own.exists() else sys.executable)
        if not 0 < args.gpu_memory <= 1:
            raise BadInput(f"--gpu-memory {args.gpu_memory:g}: expected a share above 0, at most 1")
        try:
            shlex.split(args.vllm_args or "")
        except ValueError as e:
            raise BadInput(f"--vllm-args {args.vllm_args!r}: {e}") from None
    return kind


def make_upstream(args):
    """The upstream of a stage, by its arguments. Servers are started at the first `await upstream.ready()`."""
    kind = resolve(args)
    version = records.policy_version(args.model)
    if kind == "transformers":
        from engine import Engine
        return Engine(args.model, args.slots, args.batch, args.max_length)
    return Fleet(args, version)


async def together(*coroutines):
    """gather() that ends the others when one fails."""
    tasks = [asyncio.ensure_future(c) for c in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


# ---------------------------------------------------------------------------------------------- the fleet

class Fleet:
    """Several servers of one checkpoint behind the face that upstream.py describes. args: resolved ones."""

    def __init__(self, args, policy_version):
        self.args, self.policy_version, self.folder, self.model = args, policy_version, args.model, ""
        self.log_dir = Path(vars(args).get("output") or vars(args).get("out") or ".")
        self.servers, self.home, self.counts = [], {}, Counter()
        self.patience = min(PATIENCE, 0.9 * (vars(args).get("request_timeout") or vars(args).get("timeout") or PATIENCE))
        self.started, self.open, self.lock = False, asyncio.Event(), asyncio.Lock()

    # ------------------------------------------------------------ starting and proving

    async def ready(self):
        """Starts (once) and proves all servers; afterwards waits while weights are being exchanged."""
        if not self.started:
            async with self.lock:
                if not self.started:
                    await self._start()
        await self.open.wait()

    async def _start(self):
        args, began = self.args, time.monotonic()
        if args.engine_url:
            self.servers = [Server(url, self.policy_version) for url in args.engine_url.split(",")]
        else:
            self.servers = []                              # of a start that failed
            shard = f"-{os.environ['RANK']}" if "RANK" in os.environ else ""
            for k, gpus in enumerate(replica_gpus(args.replicas, args.tensor_parallel)):
                port = free_port()
                server = Server(f"http://127.0.0.1:{port}", self.policy_version, self.log_dir / f"vllm{shard}-{k}.log")
                server.place, server.command = (port, gpus), vllm_command(args, port, gpus)
                self.servers.append(server)
        logp = asyncio.create_task(self._reference(self.folder))       # loads while they start
        try:
            await together(*(s.launch(*s.command) for s in self.servers if s.log))
            await together(logp, *(s.wait_ready(args.startup) for s in self.servers if s.log))
            for server in self.servers:
                await self._admit(server, self.folder, self.policy_version, logp.result())
        except BaseException as e:
            logp.cancel()
            await self.close()                             # or a second try would start more of them
            if isinstance(e, UpstreamError):
                raise BadInput(f"no usable model server: {e}; 'python serving.py command --model {self.folder}' says how to start one"
                               ) from None
            raise
        self.model, self.started = self.servers[0].http.model, True
        self.open.set()
        print(f"serving: {len(self.servers)} server(s) ready after {time.monotonic() - began:.0f} s", flush=True)

    async def _reference(self, folder):
        return await asyncio.to_thread(reference, folder) if self.args.probe == "full" else None

    async def _admit(self, server, folder, version, logp, before=None):
        """Proves that `server` serves `folder` and labels it; a server of ours is labelled first, by what it was started with."""
        await server.http.find_model()
        server.http.policy_version = version
        if self.args.probe == "off":
            print(f"serving: {server.url}: not proved (--probe off)", flush=True)
            return
        if server.process is not None:
            argv = server.command[1]
            if (root := await server.root()) != argv[argv.index("--model") + 1]:
                raise BadInput(f"{server.url}: a server of {root} answers there, not ours: its port was taken; repeat the command")
            await server.label(version)
        print(f"serving: {await prove(server, folder, version, logp, before)}", flush=True)
        with contextlib.suppress(UpstreamError):           # no dev mode: nothing tells of a restart behind the URL
            await server.label(version)
        server.proved = await server.current_label()

    # ------------------------------------------------------------ calls

    def dead(self):
        """None, or a sentence when no server is left."""
        if not self.servers or any(s.dead is None for s in self.servers):
            return None
        return "no model server left: " + "; ".join(f"{s.url}: {s.dead}" for s in self.servers)

    def _server_of(self, episode_id):
        """The episode's server; a new one, or one whose server died, goes where the fewest calls are."""
        server = self.home.get(episode_id)
        if server is None or server.dead:
            alive = [s for s in self.servers if s.dead is None]
            if not alive:
                raise UpstreamError(503, self.dead() or "no model server", "infrastructure")
            self.counts["moved episodes"] += server is not None
            server = self.home[episode_id] = min(alive, key=lambda s: (s.in_flight, s.calls))
        return server

    async def chat(self, body, episode_id=""):
        before, server = self.home.get(episode_id), self._server_of(episode_id)
        server.in_flight += 1
        server.calls += 1
        began = time.monotonic()
        try:
            if server is not before:
                await self._still(server)
            reply = await server.http.chat(body)
            server.failures = 0
            return reply
        except UpstreamError as e:
            if e.status >= 500:
                if e.kind == "connection" and began >= server.lost:        # what one event cuts off at once counts once
                    server.failures, server.lost = server.failures + 1, time.monotonic()
                await self._examine(server, str(e))
            raise
        except asyncio.CancelledError:                     # its client gave up
            server.failures += time.monotonic() - began > self.patience
            if server.failures >= STUCK and self.open.is_set():
                self._drain(server, f"{STUCK} calls in a row without an answer in {self.patience:g} s")
            raise
        finally:
            server.in_flight -= 1

    async def _still(self, server):
        """Once an episode: somebody may have restarted the server, or rolled it, behind its URL. Calls until then carry our version."""
        if server.proved and (label := await server.current_label()) not in (None, server.proved) and self.open.is_set():
            self._drain(server, f"it says {label or 'default'} now, {server.proved} was proved: restarted, or rolled by another command")
            raise UpstreamError(503, server.dead)          # its client's retry goes to another

    async def _examine(self, server, what):
        """After a failed call: a server that has ended, is not healthy, or keeps losing connections gets no more."""
        if server.failures < STUCK and await server.healthy():
            return
        if self.open.is_set():                             # else roll() is at it: it restarts the server, or drains it itself
            if server.process is not None:
                with contextlib.suppress(TimeoutError):    # its connections break a moment before the system tells that it ended
                    await asyncio.wait_for(server.process.wait(), 1)
            ended = server.process is not None and server.process.returncode is not None
            self._drain(server, f"vLLM ended (exit {server.process.returncode}): {server.last_error()}" if ended else what)

    def _drain(self, server, why):
        if server.dead is None:
            server.dead = why
            self.counts["servers lost"] += 1
            print(f"serving: {server.url} gets no more calls ({why}); {sum(s.dead is None for s in self.servers)} server(s) left",
                  file=sys.stderr)

    # ------------------------------------------------------------ weights

    async def roll(self, folder, patience=60.0):
        """All servers exchange their weights for those of `folder`; new calls wait meanwhile, those in flight get `patience` s to end.

        What is still in flight then ends as aborted (an error that its client may retry). A server that fails is restarted if it is
        ours, else drained. BadInput if none is left.
        """
        version = await asyncio.to_thread(records.policy_version, folder)       # 18 GB take a minute
        await self.ready()
        async with self.lock:
            from gate import load_tokenizer                # late: transformers takes seconds to import
            await asyncio.to_thread(load_tokenizer, folder)                     # what is wrong there is told before anything is touched
            logp = await self._reference(folder)
            began = time.monotonic()
            self.open.clear()
            try:
                while any(s.in_flight for s in self.servers if s.dead is None) and time.monotonic() - began < patience:
                    await asyncio.sleep(0.02)
                self.policy_version = version              # now: what is in flight still gets two versions
                await together(*(self._roll_one(s, folder, version, logp) for s in self.servers if s.dead is None))
            except BaseException as e:                     # cancelled, or a bug: nobody knows what they serve
                for s in self.servers:
                    self._drain(s, f"its exchange of weights was cut short ({type(e).__name__})")
                raise
            finally:
                self.open.set()                            # where none is left, calls get that sentence
            if sentence := self.dead():
                raise BadInput(sentence)
            self.folder, self.args.model = folder, folder
            self.counts["rolls"] += 1
            print(f"serving: policy {version} ({folder}) after {time.monotonic() - began:.1f} s", flush=True)
        return version

    async def _roll_one(self, server, folder, version, logp):
        try:
            if await server.current_label() == version:    # the command was repeated
                return await self._admit(server, folder, version, logp)
            await server.abort()
            before = await fingerprint(server) if self.args.probe != "off" else None
            await server.exchange(folder, version)
            return await self._admit(server, folder, version, logp, before)
        except (UpstreamError, BadInput) as e:
            why = str(e)
        if server.process is None:
            with contextlib.suppress(UpstreamError):       # out of reach: then its label deceives nobody
                await server.label("unproved")
            return self._drain(server, f"could not exchange its weights ({why}); restart it")
        print(f"serving: {server.url}: restarting, could not exchange its weights ({why})", file=sys.stderr)
        self.counts["restarts"] += 1
        await server.stop()
        try:
            server.command = vllm_command(argparse.Namespace(**{**vars(self.args), "model": folder}), *server.place)
            await server.launch(*server.command)
            await server.wait_ready(self.args.startup)
            await self._admit(server, folder, version, logp)
            server.failures = 0
        except (UpstreamError, BadInput) as e:
            self._drain(server, f"could not be restarted ({e})")

    async def close(self):
        self.open.clear()
        await asyncio.gather(*(s.stop() for s in self.servers))
        await asyncio.gather(*(s.http.close() for s in self.servers))


# ---------------------------------------------------------------------------------------------- command

def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("command", "print the command line of each replica"), ("probe", "prove that running servers serve --model"),
                       ("roll", "load --model into running servers")):
        add_engine_arguments(commands.add_parser(name, help=text, formatter_class=Formatter))
    args = parser.parse_args()
    if args.command == "command":
        if args.engine_url:
            parser.error("command: --engine-url names servers that already run; this prints how to start them")
        if args.engine == "transformers":
            parser.error("command: prints vLLM's command line; the in-process engine has none")
        args.engine = "vllm"
    elif not args.engine_url:
        parser.error(f"{args.command}: --engine-url is needed: the servers to {args.command}")
    return args


async def work(args):
    fleet = Fleet(args, records.policy_version(args.model))
    try:
        if args.command == "probe":
            return await fleet.ready()
        fleet.servers = [Server(url, "") for url in args.engine_url.split(",")]
        fleet.started = True
        fleet.open.set()
        for server in fleet.servers:
            await server.http.find_model()
        await fleet.roll(args.model)
        if lost := [f"{s.url}: {s.dead}" for s in fleet.servers if s.dead]:
            raise BadInput(f"roll: {len(lost)} of {len(fleet.servers)} servers do not serve {args.model}: " + "; ".join(lost))
    except UpstreamError as e:
        raise BadInput(f"{args.command}: {e}") from None
    finally:
        await fleet.close()


def main():
    args = parse_args()
    resolve(args)
    if args.command == "command":
        for k, gpus in enumerate(replica_gpus(args.replicas, args.tensor_parallel)):
            print(typed(*vllm_command(args, 8000 + k, gpus)))
        return
    asyncio.run(work(args))


if __name__ == "__main__":
    run_main(main)
