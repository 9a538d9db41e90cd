"""Runs random training programs: ``python -m tests.fuzz --programs 2000 --seed 0 --jobs 2``.

Each is run by eager and by fxremat at three budgets, in processes of their own; a failure is made
smaller and printed with its seed and its source. The exit status is 1 if there was one.
"""

import argparse
import collections
import gc
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from tests.fuzzing.growing import program_of
from tests.fuzzing.holding import Outcome, Verdict, hold
from tests.fuzzing.program import Program
from tests.fuzzing.shrinking import shrink

HANGING_S = 1800.0  # torch alone takes minutes to trace 301 steps of a recurrence; longer hangs [s]
BATCH = 100  # programs for one process at most; a new one begins without what torch keeps

Found = tuple[int, Verdict, Program | None]
"""A seed, what became of its program, and the program where it failed."""


@dataclass
class Worker:
    """A process, with what it still has to do."""

    process: Any
    results: Connection
    seeds: list[int]
    since_s: float = field(default_factory=time.monotonic)
    ended: bool = False


def judge(seed: int, options: dict[str, Any], tries: int) -> Found:
    """Run the program of a seed; one that fails is made smaller."""
    program = program_of(seed)
    if program is None:
        return seed, Verdict(Outcome.SKIPPED, "nothing to differentiate"), None
    verdict = hold(program, options)
    if verdict.outcome is not Outcome.FAULT:
        return seed, verdict, None

    def fails(smaller: Program) -> bool:
        found = hold(smaller, options)
        return (found.outcome, found.kind) == (verdict.outcome, verdict.kind)

    small = shrink(program, fails, tries)
    again = hold(small, options)
    return seed, again if again.outcome is Outcome.FAULT else verdict, small


def work(results: Connection, seeds: Sequence[int], options: dict[str, Any], tries: int) -> None:
    """What a process does."""
    torch.set_num_threads(1)
    gc.freeze()  # or every measurement looks through all of torch
    for seed in seeds:
        results.send(judge(seed, options, tries))


def launch(seeds: list[int], options: dict[str, Any], tries: int) -> Worker:
    """Start a process."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(sender, seeds, options, tries), daemon=True)
    process.start()
    sender.close()  # so that its end is seen here
    return Worker(process, receiver, list(seeds))


def results(
    seeds: Sequence[int], jobs: int, options: dict[str, Any], tries: int
) -> Iterator[Found]:
    """What became of the programs of some seeds, in the order in which they end."""
    size = min(BATCH, -(-len(seeds) // jobs))
    waiting = [list(seeds[start : start + size]) for start in range(0, len(seeds), size)][::-1]
    workers: list[Worker] = []
    while waiting or workers:
        while waiting and len(workers) < jobs:
            workers.append(launch(waiting.pop(), options, tries))
        ready = wait([worker.results for worker in workers], timeout=1.0)
        for worker in list(workers):
            if worker.results in ready:
                found = _received(worker)
            elif time.monotonic() - worker.since_s > HANGING_S:
                worker.process.kill()
                found = _lost(worker, f"it ran for more than {HANGING_S:.0f} s")
            else:
                continue
            if found is not None:
                yield found
            if worker.ended:
                workers.remove(worker)
                waiting += [worker.seeds] if worker.seeds else []


def _received(worker: Worker) -> Found | None:
    """The next result of a process; None at its end."""
    try:
        found: Found = worker.results.recv()
    except EOFError:
        worker.process.join()
        worker.ended = True
        code = worker.process.exitcode
        return _lost(worker, f"its process ended with code {code}") if worker.seeds else None
    worker.seeds.remove(found[0])
    worker.since_s = time.monotonic()
    return found


def _lost(worker: Worker, words: str) -> Found:
    """The program that a process was running when it was lost."""
    worker.ended = True
    seed = worker.seeds.pop(0)
    return seed, Verdict(Outcome.FAULT, "process", words), program_of(seed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run programs and say what became of them."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--tries", type=int, default=60, help="to make a failing program smaller")
    given = parser.parse_args(arguments)
    counts: collections.Counter[str] = collections.Counter()
    seeds = range(given.seed, given.seed + given.programs)
    with tempfile.TemporaryDirectory(prefix="fxremat-fuzz-") as folder:
        options = {"costs": "uniform", "cache_dir": folder, "progress": False}
        for number, found in enumerate(results(seeds, given.jobs, options, given.tries), 1):
            seed, verdict, program = found
            counts[_label(verdict)] += 1
            if verdict.outcome is Outcome.FAULT and program is not None:
                print(f"\nseed {seed}: {verdict.kind}\n{verdict.words}\n\n{program.source}")
            elif verdict.traced:
                print(f"\nseed {seed} is as torch traces it")
            elif verdict.outcome is Outcome.REFUSED:
                print(f"\nseed {seed} is refused: {verdict.words.splitlines()[0]}")
            print(f"\r{number} of {given.programs}: {_counted(counts)}", end="", flush=True)
    print()
    return int(any(label.startswith("fault") for label in counts))


def _label(verdict: Verdict) -> str:
    notes = " as torch traces it" * verdict.traced + " without its peak" * verdict.unmeasured
    notes += " below its prediction" * verdict.below
    kind = f" ({verdict.kind})" if verdict.kind else ""
    return f"{verdict.outcome}{notes}{kind}"


def _counted(counts: collections.Counter[str]) -> str:
    return ", ".join(f"{number} {label}" for label, number in counts.most_common())


if __name__ == "__main__":
    sys.exit(main())
