"""Train inside a byte budget: the same bits, never over it, the least time that can be proved.

    model = fxremat.optimize(model, "8GiB")
    ...a step...
    print(fxremat.report(model))

``capture``, ``plan`` and ``frontier`` do the planning alone; ``verify`` and ``measure_peak`` check
it.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from fxremat.budget import Budget, parse_budget
from fxremat.costtable import Cost, CostTable
from fxremat.errors import (
    BudgetError,
    CaptureError,
    FxrematError,
    InfeasibleBudgetError,
    OptionError,
    SolverError,
    UnsupportedGraphError,
    VerificationError,
)
from fxremat.io import ProblemFileError, load
from fxremat.plans import Plan
from fxremat.problem import RematProblem
from fxremat.solvers import SOLVERS

if TYPE_CHECKING:
    import torch

    from fxremat.check import Check
    from fxremat.passes.meter import PeakMeasurement
    from fxremat.reporting import RematReport

__version__ = "0.1.0"

__all__ = [
    "SOLVERS",
    "Budget",
    "BudgetError",
    "CaptureError",
    "Cost",
    "CostTable",
    "FxrematError",
    "InfeasibleBudgetError",
    "OptionError",
    "Plan",
    "ProblemFileError",
    "RematProblem",
    "SolverError",
    "UnsupportedGraphError",
    "VerificationError",
    "capture",
    "frontier",
    "load",
    "measure_peak",
    "optimize",
    "plan",
    "report",
    "restore",
    "verify",
]

F = TypeVar("F", bound=Callable[..., Any])
Key = str | int
Executor = Literal["eager", "inductor"]


def optimize(
    target: F,
    budget: "int | str | Budget",
    *,
    executor: Executor = "eager",
    solver: str = "auto",
    costs: str | CostTable = "measured",
    reserve: "int | str | torch.optim.Optimizer" = 0,
    outputs: Literal["held", "released"] = "held",
    gradients: Literal["auto", "held", "freed"] = "auto",
    in_flight: int = 1,
    differentiate: Key | tuple[Key, ...] = "all",
    verify: bool = False,
    time_limit_s: float = 60.0,
    fullgraph: bool = True,
    dynamic: bool | None = None,
    replayable: tuple[str, ...] = (),
    cache_dir: Path | str | bool | None = None,
    progress: bool | None = None,
    **unknown: Any,
) -> F:
    """Make a module or function train inside a budget.

    The plan is made in the first call. A module comes back itself, with the same class and keys;
    of a function, another function comes back. Optimising again replaces the plan.

    Args:
        target: A module, or a callable that returns something to differentiate; best one that
            returns the loss, since what is computed outside it is not in the plan.
        budget: The most bytes that torch's allocator may hold on the device at any moment of
            forward and backward: parameters, buffers, inputs, gradients and ``reserve`` included.
            An ``int``, "8GiB", "8GB", "512 MiB", or "60%" of the unrewritten peak.
        executor: What runs the graphs: "eager" (bit for bit) or "inductor" (within a stated bound).
        solver: "auto", or a name in ``SOLVERS``.
        costs: "measured" on the device, "roofline", "uniform" (counts calls), or a table.
        reserve: Bytes that others hold meanwhile, or an optimizer: those of its state.
        outputs: Whether the caller keeps what the forward returned until the backward ends.
        gradients: Whether gradients exist when a step begins; "auto" plans without, and again with
            them when a call finds some and would pass the budget.
        in_flight: Forwards alive at once before their backwards.
        differentiate: The entries of the output (key, attribute or position) that backward goes
            through; the rest is detached, and costs no gradient.
        verify: Check the first step against the unrewritten graph.
        time_limit_s: For solving, per graph. [s]
        fullgraph: False accepts graph breaks.
        dynamic: None: static graphs for the first two shapes of a kind of call, then one symbolic
            graph for all others, planned for each size that it meets: by a schedule at hand where
            one fits, else by a new one. True: a symbolic graph from the start. False: a graph for
            each shape.
        replayable: Custom operators ("mylib::swish") that compute the same from the same inputs and
            do nothing else, so that a plan may run them again; others run once.
        cache_dir: Where measured costs are kept; None: the user's cache folder; False: nowhere.
        progress: A bar for long work; None: when standard error is a terminal.
        **unknown: Whatever else is named is refused, with the names that exist.

    Returns:
        The module itself, or a function like the one given.

    Raises:
        BudgetError: The budget cannot be read.
        OptionError: An option or its value does not exist.
        FxrematError: In the first call, before anything runs: ``InfeasibleBudgetError`` with the
            least budget that works, ``CaptureError``, ``UnsupportedGraphError``. A module is then
            as it was before.
    """
    from fxremat.install import optimize as install
    from fxremat.options import Options, check_names

    check_names(unknown)
    options = Options(
        budget=parse_budget(budget),
        executor=executor,
        solver=solver,
        costs=costs,
        reserve=reserve,
        outputs=outputs,
        gradients=gradients,
        in_flight=in_flight,
        differentiate=differentiate,
        verify=verify,
        time_limit_s=time_limit_s,
        fullgraph=fullgraph,
        dynamic=dynamic,
        replayable=replayable,
        cache_dir=cache_dir,
        progress=progress,
    )
    if verify:
        from fxremat.verifying import verify_call

        return install(target, options, verify_call)
    return install(target, options)


def restore(target: Any) -> Any:
    """Take a plan away.

    Args:
        target: What ``optimize`` returned.

    Returns:
        The module, or the function that was optimised, as it was.
    """
    from fxremat.install import restore as take_away

    return take_away(target)


def report(target: Any) -> "RematReport":
    """What was planned for the last call that ran.

    Args:
        target: What ``optimize`` or ``torch.compile(..., backend="fxremat")`` returned.

    Returns:
        The report; ``str()`` prints it as tables.

    Raises:
        FxrematError: There is no plan, or no call has run yet.
    """
    from fxremat.install import report as find

    return find(target)


def verify(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: "int | str | Budget",
    loss: "Callable[[Any], torch.Tensor] | None" = None,
    steps: int = 1,
    repeats: int = 5,
    **options: Any,
) -> "Check":
    """Run the unrewritten step and the planned one from the same state, compare bits, measure.

    Parameters, gradients, buffers, arguments and generators are put back afterwards.

    Args:
        fn: A module or callable.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        budget: As for ``optimize``.
        loss: Makes a scalar of the output; None: seeded weights for all differentiable outputs.
        steps: Steps to compare, with plain gradient descent between them.
        repeats: How often each of the two steps is timed, alternately.
        **options: Those of ``optimize``.

    Returns:
        The comparison; ``check.ok`` says whether everything promised holds.

    Raises:
        FxrematError: As ``optimize`` does.
    """
    from fxremat.options import check_arguments, make_options
    from fxremat.verifying import verify as run

    check_arguments(args, kwargs)
    return run(fn, args, kwargs, loss, steps, repeats, make_options(budget, options))


def measure_peak(
    step: Callable[[], object], *, device: "str | torch.device | None" = None
) -> "PeakMeasurement":
    """Measure what torch's allocator holds while something runs.

    Args:
        step: What to run, once.
        device: Whose allocator; None: CUDA where it is in use, else the CPU.

    Returns:
        Peak, end and timeline, in bytes above the start.
    """
    from fxremat.passes.meter import measure_peak as run

    return run(step, device=device)


def capture(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> RematProblem:
    """Trace a callable to a problem; nothing runs, and fake tensors serve.

    Args:
        fn: A module or callable.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        **options: Those of ``optimize``.

    Returns:
        The problem; it can be saved, and planned on a machine without torch's device.

    Raises:
        FxrematError: As ``optimize`` does.
    """
    from fxremat.capturing import capture as run
    from fxremat.options import check_arguments

    check_arguments(args, kwargs)
    return run(fn, args, kwargs, options)


def plan(
    problem: RematProblem,
    budget: "int | str | Budget",
    solver: str = "auto",
    time_limit_s: float = 60.0,
) -> Plan:
    """Plan a problem.

    Args:
        problem: What ``capture`` or ``load`` returned.
        budget: As for ``optimize``.
        solver: "auto", or a name in ``SOLVERS``.
        time_limit_s: For solving. [s]

    Returns:
        A plan whose simulated peak is within the budget.

    Raises:
        BudgetError: The budget cannot be read.
        OptionError: There is no such solver.
        InfeasibleBudgetError: The budget is under the floor, which the error names.
    """
    from fxremat.planning import make

    return make(problem, budget, solver=solver, time_limit_s=time_limit_s)


def frontier(problem: RematProblem, points: int = 16) -> list[Plan]:
    """Plans from the unrewritten peak down to the floor.

    Args:
        problem: What ``capture`` or ``load`` returned.
        points: How many; at least 2.

    Returns:
        Plans, the greatest budget first.
    """
    from fxremat.planning import frontier as sweep

    return sweep(problem, points)
