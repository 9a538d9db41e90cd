"""Peaks, times and gradients of one kind of step."""

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from peer_models import SEED, Subject

import fxremat

Forward = Callable[[], Any]


def step(forward: Forward) -> Any:
    """Forward and backward of the loss; the output is held to the end."""
    output = forward()
    output.loss.backward()
    return output


def measure(subject: Subject, forward: Forward) -> int:
    """What a step holds above what is there when it starts, without gradients. [bytes]"""
    subject.model.zero_grad(set_to_none=True)
    gc.collect()
    return fxremat.measure_peak(lambda: step(forward)).peak_bytes


def gradients(subject: Subject, forward: Forward) -> list[torch.Tensor]:
    """Copies of the outputs and gradients of one step."""
    subject.model.zero_grad(set_to_none=True)
    torch.manual_seed(SEED)
    output = step(forward)
    found = [output.loss, output.logits]
    found += [p.grad for p in subject.model.parameters() if p.grad is not None]
    return [tensor.detach().clone() for tensor in found]


def time_in_turn(
    subject: Subject, forwards: Sequence[Forward], repeats: int
) -> list[tuple[float, ...]]:
    """Times of the steps of each, taken in turn; every second round goes backwards. [s]"""
    found: list[list[float]] = [[] for _ in forwards]
    order = list(range(len(forwards)))
    for _ in range(repeats):
        for index in order:
            found[index].append(_time(subject, forwards[index]))
        order.reverse()
    return [tuple(times_s) for times_s in found]


def _time(subject: Subject, forward: Forward) -> float:
    """Time of one step. [s]"""
    subject.model.zero_grad(set_to_none=True)
    _synchronise(subject)
    start_s = time.perf_counter()
    step(forward)
    _synchronise(subject)
    return time.perf_counter() - start_s


def _synchronise(subject: Subject) -> None:
    device = next(iter(subject.batch.values())).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
