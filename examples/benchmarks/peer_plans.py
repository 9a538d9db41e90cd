"""The ways to run one step that the benchmark compares, and what each costs under one cost table.

All but per-block checkpointing come from the same joint graph and are run by the same executor,
that of ``fxremat.optimize``; only who divides the joint graph differs: torch's default partition,
torch's min-cut partition at a value of ``activation_memory_budget``, or fxremat inside a budget.
"""

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._functorch.config as functorch_config
from peer_models import Subject
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition

from fxremat import CostTable, Plan, RematProblem
from fxremat.install import Installed
from fxremat.options import Options, make_options
from fxremat.passes.calls import call_of
from fxremat.passes.costs import OpCall, cost_key, measure_costs
from fxremat.passes.effects import has_effect
from fxremat.passes.extract import analyse
from fxremat.passes.extract import calls as calls_of
from fxremat.passes.joint import tensors_of
from fxremat.passes.reference import reference_partition
from fxremat.passes.tracing import joint_of
from fxremat.pipeline import pose
from fxremat.progress import Progress
from fxremat.trace import Trace

Graphs = tuple[fx.GraphModule, fx.GraphModule]
Divide = Callable[..., Graphs]
UNLIMITED = 1 << 62  # the budget of what is not planned


class Prices:
    """One growing cost table: every call is measured once, whoever makes it.

    Attributes:
        table: What is known so far.
    """

    def __init__(self, limit_s: float = 60.0) -> None:
        self.limit_s = limit_s
        self.table = CostTable({}, "measured")

    def learn(self, calls: Sequence[OpCall]) -> None:
        """Measure what is not in the table."""
        missing = [call for call in calls if cost_key(call) not in self.table]
        if missing:
            self.table = self.table.merged(measure_costs(missing, limit_s=self.limit_s))

    def total_ns(self, counted: Counter[str]) -> int:
        """Cost of counted calls. [ns]"""
        return sum(count * self.table[key].cost_ns for key, count in counted.items())


def operations(module: fx.GraphModule) -> list[OpCall]:
    """The calls of one graph that allocate or have an effect; views cost nothing.

    A node allocates when a storage of its result is none of its inputs'.
    """
    found = []
    for node in module.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        given = {_key(t) for source in node.all_input_nodes for t in tensors_of(source)}
        if (
            "functional" in node.meta
            or has_effect(node)
            or any(_key(t) not in given for t in tensors_of(node))
        ):
            found.append(node.meta.get("functional") or call_of(node))
    return found


def _key(tensor: torch.Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def torch_partition(knob: float) -> Divide:
    """Partition as torch does with ``activation_memory_budget`` at a value."""

    def divide(module: fx.GraphModule, inputs: Any, **options: Any) -> Graphs:
        with functorch_config.patch(activation_memory_budget=knob):
            return min_cut_rematerialization_partition(module, inputs, **options)

    return divide


@dataclass
class Runner:
    """One way to run the step of a subject.

    Attributes:
        name: For the tables.
        subject: What is trained.
        options: Budget and what else ``fxremat.optimize`` takes.
        prices: Where costs come from.
        divide: Who divides the joint graph; None for fxremat.
        counted: The calls of both graphs, after the first step.
        problem: What the joint graph asks of a planner; only where torch's default divides it.
        plan: What fxremat planned.
    """

    name: str
    subject: Subject
    options: Options
    prices: Prices
    divide: Divide | None = None
    counted: Counter[str] = field(default_factory=Counter)
    problem: RematProblem | None = None
    plan: Plan | None = None

    def __post_init__(self) -> None:
        model = self.subject.model
        target = model._call_impl
        self.call = Installed(target, model, self.options, trace=_recording(self))

    def __call__(self) -> Any:
        """The forward."""
        return self.call(**self.subject.batch)

    @property
    def cost_ns(self) -> int:
        """Cost of the step's operations. [ns]"""
        return self.prices.total_ns(self.counted)


def _recording(runner: Runner) -> type[Trace]:
    """A trace that leaves the divided graphs' calls, or the problem, with a runner."""

    class Recording(Trace):
        def partition(
            self,
            module: fx.GraphModule,
            inputs: object,
            *,
            num_fwd_outputs: int,
            static_lifetime_input_indices: Sequence[int] | None = None,
        ) -> Graphs:
            divide = runner.divide or super().partition
            if divide is reference_partition:
                runner.problem = self.pose(module, num_fwd_outputs)
            forward, backward = divide(
                module,
                inputs,
                num_fwd_outputs=num_fwd_outputs,
                static_lifetime_input_indices=list(static_lifetime_input_indices or ()),
            )
            calls = [*operations(forward), *operations(backward)]
            runner.prices.learn(calls)
            runner.counted = Counter(cost_key(call) for call in calls)
            runner.plan = self.record.plan if self.record is not None else None
            return forward, backward

        def pose(self, module: fx.GraphModule, num_forward_outputs: int) -> RematProblem:
            """The problem of the joint graph, priced by the shared table."""
            joint = joint_of(module, num_forward_outputs)
            runner.prices.learn(calls_of(analyse(joint)))
            return pose(
                joint,
                make_options(UNLIMITED, {"costs": runner.prices.table}),
                resident_bytes=self.resident_bytes,
                device=self.device,
                progress=Progress(False),
            ).problem

    return Recording


class Ways:
    """Makes the runners of one subject.

    Args:
        subject: What is trained.
        differentiate: The entry of the output that backward goes through, or "all".
        time_limit_s: For solving, per budget. [s]
    """

    def __init__(self, subject: Subject, differentiate: str, time_limit_s: float) -> None:
        self.subject = subject
        self.differentiate = differentiate
        self.time_limit_s = time_limit_s
        self.prices = Prices()

    def unrewritten(self) -> Runner:
        """Divided by torch's default partition."""
        return self._runner("unrewritten graph", UNLIMITED, reference_partition)

    def torch(self, knob: float) -> Runner:
        """Divided by torch's min-cut partition with ``activation_memory_budget`` at a value."""
        return self._runner(f"torch at {knob}", UNLIMITED, torch_partition(knob))

    def fxremat(self, budget_bytes: int, name: str) -> Runner:
        """Divided by fxremat inside a budget, resident bytes included."""
        return self._runner(name, budget_bytes, None)

    def _runner(self, name: str, budget_bytes: int, divide: Divide | None) -> Runner:
        options = make_options(
            budget_bytes,
            {
                "differentiate": self.differentiate,
                "time_limit_s": self.time_limit_s,
                "costs": self.prices.table,
            },
        )
        return Runner(name, self.subject, options, self.prices, divide)
