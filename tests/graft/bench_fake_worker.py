"""A worker that speaks the protocol and measures nothing: what the runner's tests run against.

A case's name says what happens: `crash`, `killed`, `hang`, `hang_with_gpu`, `wrong`, `oom`,
`oom_beside` (unless it prepares alone), `step_short_once` (oom, the first time), `short_twice`
(oom, a contender's first two times), `fatal`, `crash_timing`, `fault_beside` (a worker's first
time), and `slow...` (30 ms to prepare); anything else has a time.
`step...` has generated kernels and is timed as a training step. The log's `unchecked` is a request
for a preparation without checks.
FAKE_GPU_BROKEN names a GPU on which no worker starts, FAKE_GPU_DIES one whose workers end at the
first case and never start again (the others wait for that), FAKE_GPU_NAME the GPUs' name,
FAKE_PEER why Liger is absent; FAKE_SLOW makes every case slow; FAKE_LATE is the time of the one
that hangs after the other.

`python bench_fake_worker.py COUNT ARGS...` is `graft bench ARGS...` on COUNT such GPUs.
"""

import functools
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from graft.bench.gpu_lock import GpuLock
from graft.bench.protocol import serve

GPU = os.environ.get("CUDA_VISIBLE_DEVICES", "")


class Failure(Exception):
    def __init__(self, kind, message, fatal=False, facts=None):
        super().__init__(message)
        self.kind, self.fatal, self.facts = kind, fatal, facts or {}

    def __str__(self):
        return self.args[0]


class Fake:
    def __init__(self, waits):
        self.waits = waits
        self.case = ""
        self.us = 100.0
        self.turns = 0
        self.log = Path(os.environ["FAKE_LOG"])

    def __call__(self, message):
        verb = message.pop("do")
        self.note(verb, message.get("case", ""))
        if verb == "hello":
            seen = {"cores": sorted(os.sched_getaffinity(0)), "env": sorted(os.environ)}
            self.log.with_name(f"seen-{GPU}-{os.getpid()}.json").write_text(json.dumps(seen))
        return {"held_s": 0.25, **getattr(self, verb)(**message)}

    def note(self, what, case=""):
        with self.log.open("a") as log:
            log.write(f"{GPU} {os.getpid()} {what} {case}\n")

    def hello(self, impl, knobs, paths, autotune, lock):
        self.gpu = GpuLock(Path(lock), self.waits)
        marker = self.log.with_name(f"died-{GPU}")
        if os.environ.get("FAKE_GPU_BROKEN") == GPU or marker.exists():
            sys.exit("no such device")
        if "unknown" in knobs:
            raise Failure("knob", "torch._inductor.config has no unknown")
        if impl == "liger":
            return {"absent": os.environ.get("FAKE_PEER", "liger-kernel is not installed")}
        self.us = float(knobs.get("us", 100.0))
        name = os.environ.get("FAKE_GPU_NAME", "Fake")
        return {"gpu": name, "sms": 132, "driver": "1.0", "torch": "2.11.0", "triton": "3.6.0"}

    def copy(self):
        return {"median": 4000.0, "q1": 4000.0, "q3": 4000.0, "n": 30}

    def prepare(self, case, shape, dtype, corpus, seed, sources=None, checks=True):
        if not checks:
            self.note("unchecked", case)
        if case == "hang_with_gpu" and os.environ.get("FAKE_LATE") == str(self.us):
            time.sleep(0.5)
        with self.gpu:
            self.note("takes", case)
            if case == "hang_with_gpu":
                time.sleep(60)
            facts = self.prepared(case)
            self.note("lets-go", case)
        return facts

    def prepared(self, case):
        print("noise on standard output")
        self.case, self.turns = case, 0
        dies = os.environ.get("FAKE_GPU_DIES")
        if dies == GPU:
            self.log.with_name(f"died-{GPU}").touch()
            os.abort()
        patience = time.monotonic() + 20
        while dies and not self.log.with_name(f"died-{dies}").exists():
            if time.monotonic() > patience:
                raise Failure("crash", f"GPU {dies} did not die")
            time.sleep(0.01)
        self.note("lets-go", case)
        with self.gpu.lent():
            self.note("compiles", case)
            self.compile(case)
            self.note("compiled", case)
        self.note("takes", case)
        facts = {"bytes": 400_000, "kernels": 2, "mix_order": 1, "estimate_us": self.us}
        return facts | {"compile_s": 1.5}

    def compile(self, case):
        if case == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if case == "crash":
            print("the last words", file=sys.stderr, flush=True)
            os._exit(7)
        if case == "hang":
            time.sleep(60)
        if case == "wrong" and self.us == 200.0:
            raise Failure("wrong", "output 0: error 1", facts={"outputs": [{"error": 1.0}]})
        if case == "step_short_once":
            marker = self.log.with_name(f"short-{self.us}")
            if not marker.exists():
                marker.touch()
                raise Failure("oom", "CUDA out of memory")
        if case == "short_twice":
            with self.log.with_name(f"short-{self.us}").open("a") as times:
                times.write(".")
                if times.tell() <= 2:
                    raise Failure("oom", "CUDA out of memory")
        if case == "oom":
            raise Failure("oom", "CUDA out of memory")
        if case == "oom_beside":
            self.beside()
        if case == "fault_beside":
            marker = self.log.with_name(f"faulted-{self.us}")
            if not marker.exists():
                marker.touch()
                raise Failure("crash", "an illegal memory access", fatal=True)
        if case == "fatal":
            raise Failure("crash", "an illegal memory access", fatal=True)
        if case.startswith("slow") or "FAKE_SLOW" in os.environ:
            time.sleep(0.03)

    def beside(self):
        """Fail while another worker prepares: each holds a file while it does."""
        mine = self.log.with_name(f"holds-{os.getpid()}")
        mine.touch()
        time.sleep(0.3)
        others = [file for file in self.log.parent.glob("holds-*") if file != mine]
        time.sleep(0.3)
        mine.unlink()
        if others:
            raise Failure("oom", "CUDA out of memory")

    def measure(self, samples, last):
        self.turns += 1
        if last:
            self.note("last", self.case)
        if self.case == "crash_timing" and self.us == 100.0 and self.turns == 3:
            os._exit(9)
        drift = 1 + 0.1 * self.turns  # the same on both sides, as a clock's drift is
        reply = {"us": [self.us * drift + 0.01 * i for i in range(samples)]}
        if self.case.startswith("step"):
            generated = [
                {"name": "triton_poi_a_00000001", "launches": 2, "us": self.us, "bytes": 4000}
                | {"writes": ["f0:a"]}
            ]
            reply["facts"] = {"triton_us": self.us, "rest_us": 1.0, "generated": generated}
        return reply

    def release(self):
        return {}


def command(count, args):
    """`graft bench`, on `count` GPUs that are not there, with this file as its worker."""
    from graft import cli
    from graft.bench import runner
    from graft.cli import bench_command as bench
    from graft.stack.trees import tree

    bench.cuda_device_count = lambda: count
    tree.load = lambda prefix: SimpleNamespace(pin="v2.11.0", stack_hash="0" * 64, patches=())
    tree.pythons = lambda prefix: {side: [sys.executable] for side in ("stock", "patched")}
    runner.Settings = functools.partial(runner.Settings, worker=(__file__,))
    sys.argv[1:] = ["bench", *args]
    cli.main()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        command(int(sys.argv[1]), sys.argv[2:])
    else:
        serve(Fake)
