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


def resolve(args):
    """Fills the engine's options in place; BadInput for one that the chosen engine does not honour. -> transformers | vllm | url"""
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
    return kind


def make_upstream(args):
    """The upstream of a stage, by its arguments. Servers are started at the first `await upstream.ready()`."""
    kind = resolve(args)
    version = records.policy_version(args.model)
    if kind == "transformers":
        from engine import Engine
        return Engine(args.model, args.slots, args.batch, args.max_length)
    return Fleet(args, version)


# ---------------------------------------------------------------------------------------------- the fleet

class Fleet:
    """Several servers of one checkpoint behind the face that upstream.py describes. args: resolved ones."""

    def __init__(self, args, policy_version):
        self.args, self.policy_version, self.folder, self.model = args, policy_version, args.model, ""
        self.log_dir = Path(vars(args).get("output") or vars(args).get("out") or ".")
        self.servers, self.home, self.counts = [], {}, Counter()
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
            self.servers = [Server(url, self.policy_version) for url in args.engine_url.split(",") if url]
        else:
            shard = f"-{os.environ['RANK']}" if "RANK" in os.environ else ""
            for k, gpus in enumerate(replica_gpus(args.replicas, args.tensor_parallel)):
                port = free_port()
                server = Server(f"http://127.0.0.1:{port}", self.policy_version, self.log_dir / f"vllm{shard}-{k}.log")
                server.command = vllm_command(args, port, gpus)
                self.servers.append(server)
        logp = asyncio.create_task(self._reference(self.folder))       # loads while they start
        try:
            await asyncio.gather(*(s.launch(*s.command) for s in self.servers if s.log))
            await asyncio.gather(*(s.wait_ready(args.startup) for s in self.servers if s.log))
            for server in self.servers:
                await self._admit(server, self.folder, await logp)
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

    async def _admit(self, server, folder, logp, before=None):
        """Proves that `server` serves `folder` and labels it; a server of ours is labelled first, by what it was started with."""
        version = records.policy_version(folder)
        await server.http.find_model()
        server.http.policy_version = version
        if self.args.probe == "off":
            print(f"serving: {server.url}: not proved (--probe off)", flush=True)
            return
        if server.process is not None:
            await server.label(version)
        print(f"serving: {await prove(server, folder, version, logp, before)}", flush=True)

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
        server = self._server_of(episode_id)
        server.in_flight += 1
        server.calls += 1
        began = time.monotonic()
        try:
            reply = await server.http.chat(body)
            server.failures = 0
            return reply
        except UpstreamError as e:
            if e.status >= 500:
                server.failures += e.kind == "connection"
                await self._examine(server, str(e))
            raise
        except asyncio.CancelledError:                     # its client gave up
            server.failures += time.monotonic() - began > PATIENCE
            if server.failures >= STUCK:
                self._drain(server, f"{STUCK} calls in a row without an answer in {PATIENCE:g} s")
            raise
        finally:
            server.in_flight -= 1

    async def _examine(self, server, what):
        """After a failed call: a server that has ended, is not healthy, or keeps losing connections gets no more."""
        if server.dead is None and (server.failures >= STUCK or not await server.healthy()):
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
        ours, else drained. BadInput if none is left, with the calls still waiting: nobody may answer them.
        """
        version = records.policy_version(folder)
        await self.ready()
        async with self.lock:
            self.open.clear()
            began = time.monotonic()
            logp = await self._reference(folder)
            while any(s.in_flight for s in self.servers if s.dead is None) and time.monotonic() - began < patience:
                await asyncio.sleep(0.02)
            await asyncio.gather(*(self._roll_one(s, folder, version, logp) for s in self.servers if s.dead is None))
            if sentence := self.dead():
                self.open.set()                            # they get the sentence
                raise BadInput(sentence)
            self.folder, self.args.model, self.policy_version = folder, folder, version
            self.counts["rolls"] += 1
            self.open.set()
            print(f"serving: policy {version} ({folder}) after {time.monotonic() - began:.1f} s", flush=True)
        return version

    async def _roll_one(self, server, folder, version, logp):
        try:
            await server.reset_prefixes()
            before = await fingerprint(server) if self.args.probe != "off" else None
            await server.exchange(folder, version)
            return await self._admit(server, folder, logp, before)
        except (UpstreamError, BadInput) as e:
            why = str(e)
        if server.process is None:
            with contextlib.suppress(UpstreamError):       # out of reach: then its label deceives nobody
                await server.label("unproved")
            return self._drain(server, f"could not exchange its weights ({why}); restart it")
        print(f"serving: {server.url}: restarting, could not exchange its weights ({why})", file=sys.stderr)
        self.counts["restarts"] += 1
        await server.stop()
        env, argv = server.command
        argv[argv.index("--model") + 1] = str(Path(folder).resolve())
        try:
            await server.launch(env, argv)
            await server.wait_ready(self.args.startup)
            await self._admit(server, folder, logp)
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
        args.engine = "vllm"
    elif not args.engine_url:
        parser.error(f"{args.command}: --engine-url is needed: the servers to {args.command}")
    return args


async def work(args):
    fleet = Fleet(args, records.policy_version(args.model))
    try:
        if args.command == "probe":
            return await fleet.ready()
        fleet.servers = [Server(url, "") for url in args.engine_url.split(",") if url]
        fleet.started = True
        fleet.open.set()
        for server in fleet.servers:
            await server.http.find_model()
        await fleet.roll(args.model)
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
