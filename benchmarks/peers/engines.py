"""The engines, and what each is asked to do in one round. One engine runs at a time: start, warm up, measure, stop."""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType

import httpx2
import msgspec

from benchmarks.peers import bf16_gguf, engines_served, names
from benchmarks.peers.budget import Budget
from benchmarks.peers.closed_loop import closed_loop, warm_up
from benchmarks.peers.environments import LLAMA_CPP, VLLM, NotInstalled, python_of
from benchmarks.peers.kv_waste import WasteMeter
from benchmarks.peers.library import SCRIPTS, LibraryJob, measure_library
from benchmarks.peers.measurement import Part
from benchmarks.peers.open_loop import open_loop
from benchmarks.peers.prompts import Prompts
from benchmarks.peers.server import ServerCommand, serving
from benchmarks.peers.stages import StageMeter
from common.errors import BatonError


@dataclass(frozen=True, slots=True)
class Round:
    """What all engines of one round have in common."""

    number: int
    budget: Budget
    model: Path
    home: Path
    """Folder of environments, converted models and logs."""

    @property
    def is_open(self) -> bool:
        """Whether open-loop traffic is sent in this round."""
        return self.number < self.budget.open_rounds

    def prompts(self, engine: str) -> Prompts:
        """Return what draws the engine's prompts: the same in every run, others in every round."""
        return Prompts(f"{self.number} {engine.removesuffix('-1t')}")

    def log(self, engine: str) -> Path:
        """Return the file for what the engine says."""
        return self.home.absolute() / "logs" / f"{engine}-{self.number}.log"


Measure = Callable[[Round], Iterator[Part]]


def measure_engine(engine: str, this: Round) -> Iterator[Part]:
    """Yield what one engine does; whatever it fails at is a part that says why."""
    try:
        yield from ENGINES[engine](this)
    except NotInstalled as error:
        yield Part(names.START, error=str(error))
    except BatonError as error:
        yield Part(names.START, error=error.message)
    except (httpx2.HTTPError, OSError, msgspec.MsgspecError) as error:
        yield Part(names.START, error=f"{type(error).__name__}: {error}")


# ---- servers ----


def _baton(this: Round) -> Iterator[Part]:
    command = engines_served.baton(this.model, this.budget.threads, this.home.absolute() / "logs" / names.BATON)
    yield from _served(names.BATON, command, this, is_open=False, is_cluster=True)


def _baton_split(this: Round) -> Iterator[Part]:
    command = engines_served.baton(this.model, 1, this.home.absolute() / "logs" / names.BATON_SPLIT)
    yield from _served(names.BATON_SPLIT, command, this, is_open=this.is_open, is_cluster=True, batches=(1,))


def _vllm(this: Round) -> Iterator[Part]:
    python = python_of(VLLM, this.home)
    command = engines_served.vllm(python, this.model, this.budget.threads, this.home.absolute() / "vllm-cache")
    yield from _served(names.VLLM, command, this, is_open=this.is_open)


def _served(
    engine: str,
    command: ServerCommand,
    this: Round,
    *,
    is_open: bool,
    is_cluster: bool = False,
    batches: tuple[int, ...] | None = None,
) -> Iterator[Part]:
    prompts, budget = this.prompts(engine), this.budget
    with serving(command, this.log(engine)) as server:
        yield Part(names.START, {"seconds": server.start_s})
        warm_up(server, prompts, budget)
        closed = closed_loop(server, prompts, budget, batches or budget.batches)
        if not is_cluster:
            yield from closed
            yield from open_loop(server, prompts, budget) if is_open else ()
            return
        stages, waste = StageMeter(server.url), WasteMeter(server.url)
        traffic = open_loop(server, prompts, budget, waste.look) if is_open else ()
        for part in chain(closed, traffic):
            yield msgspec.structs.replace(part, figures=part.figures | stages.look())
        if waste.share is not None:
            yield Part(names.KV_WASTE, {"share": waste.share})


# ---- libraries ----


def _llama(engine: str, threads: int) -> Measure:
    def measure(this: Round) -> Iterator[Part]:
        python = python_of(LLAMA_CPP, this.home)
        file = this.home.absolute() / f"{this.model.name}-bf16.gguf"
        if not file.is_file():
            bf16_gguf.write(this.model, file)
        argv = (str(python), str(SCRIPTS / "llama_cpp_run.py"))
        yield from _library(engine, argv, str(file), threads, (1,), this.budget.decode_tokens, this)

    return measure


def _transformers(engine: str) -> Measure:
    def measure(this: Round) -> Iterator[Part]:
        budget = this.budget
        if engine == names.CONTINUOUS and not this.is_open:
            return
        argv = (sys.executable, "-m", "benchmarks.peers.libraries.transformers_run", engine)
        yield from _library(engine, argv, str(this.model), budget.threads, budget.batches, budget.library_tokens, this)

    return measure


def _baton_model(this: Round) -> Iterator[Part]:
    argv = (sys.executable, "-m", "benchmarks.peers.libraries.baton_model_run")
    budget = this.budget
    waiting = {"OMP_WAIT_POLICY": "passive"}  # as `baton up` sets for its workers
    yield from _library(names.BATON_MODEL, argv, str(this.model), budget.threads, budget.batches, 0, this, waiting)


def _hand_over(this: Round) -> Iterator[Part]:
    argv = (sys.executable, "-m", "benchmarks.peers.hand_over")
    yield from measure_library(argv, {}, LibraryJob(str(this.model), 1, (), (), (), 0), this.log(names.HAND_OVER))


def _library(
    engine: str,
    argv: tuple[str, ...],
    model: str,
    threads: int,
    batches: tuple[int, ...],
    answer: int,
    this: Round,
    env: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Part]:
    prompts, budget = this.prompts(engine), this.budget
    job = LibraryJob(
        model,
        threads,
        prefills=[prompts.tokens(length) for length in budget.library_prefills],
        contexts=[prompts.tokens(budget.context) for _ in range(max(batches))],
        batches=batches,
        answer=answer,
    )
    yield from measure_library(argv, {"HF_HUB_OFFLINE": "1"} | dict(env), job, this.log(engine))


ENGINES: Mapping[str, Measure] = {
    names.BATON: _baton,
    names.VLLM: _vllm,
    names.LLAMA: _llama(names.LLAMA, 2),
    names.BATON_SPLIT: _baton_split,
    names.LLAMA_1T: _llama(names.LLAMA_1T, 1),
    names.GENERATE: _transformers(names.GENERATE),
    names.BATON_MODEL: _baton_model,
    names.CONTINUOUS: _transformers(names.CONTINUOUS),
    names.HAND_OVER: _hand_over,
}
