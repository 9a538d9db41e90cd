"""The command ``fxremat``: plans of saved problems, and checks of a user's own step.

Only ``capture`` and ``verify`` run the user's code; the others read a file that ``capture`` or
``RematProblem.save`` wrote, and need neither the model nor its device.
"""

import argparse
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxremat.budget import format_bytes
from fxremat.errors import FxrematError, InfeasibleBudgetError, OptionError

if TYPE_CHECKING:  # at run time the commands import what they use, so that --help stays fast
    from fxremat.plans import Plan

_TARGET_HELP = (
    "package.module:make or path.py:make; make() returns (fn, args) or (fn, args, kwargs)"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Its words, without the program's name; those of the process by default.

    Returns:
        0, 1 when ``verify`` found a difference, or 2 for an error.
    """
    arguments = _parser().parse_args(argv)
    try:
        run: Callable[[argparse.Namespace], int] = arguments.run
        return run(arguments)
    except FxrematError as error:
        print(f"fxremat: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fxremat", description="Plans a training step within a number of bytes."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[argparse.Namespace], int], text: str, *, reads: bool = True
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        if reads:
            added.add_argument("file", metavar="FILE", help="a saved problem")
        else:
            added.add_argument("target", metavar="TARGET", help=_TARGET_HELP)
        return added

    capture = command("capture", _capture, "save a step as a problem", reads=False)
    capture.add_argument("-o", "--output", required=True, metavar="FILE", help="where to write it")
    capture.add_argument("--costs", help="measured, roofline or uniform")
    capture.add_argument("--reserve", help='bytes that others hold meanwhile, such as "512 MiB"')
    capture.add_argument("--outputs", choices=("held", "released"), help="what the caller does")
    plan = command("plan", _plan, "plan a saved problem within a budget")
    _add_planning(plan)
    plan.add_argument("--json", action="store_true", help="print the numbers as JSON")
    frontier = command("frontier", _frontier, "plans from the baseline down to the floor")
    frontier.add_argument("--points", type=int, default=16, metavar="N", help="how many (16)")
    frontier.add_argument("--plot", metavar="PICTURE", help="draw them too; needs matplotlib")
    compare = command("compare", _compare, "what every solver makes of one budget")
    _add_planning(compare, solver=False)
    _add_planning(command("explain", _explain, "what a plan does with each value, and why"))
    _add_planning(command("timeline", _timeline, "bytes held while each operation runs"))
    verify = command("verify", _verify, "check a step against the unrewritten one", reads=False)
    verify.add_argument("--budget", required=True, help='such as "8GiB" or "60%%"')
    return parser


def _add_planning(parser: argparse.ArgumentParser, *, solver: bool = True) -> None:
    parser.add_argument("--budget", required=True, help='bytes, "8GiB", or "60%%" of the baseline')
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="S", help="seconds (60)")
    if solver:
        parser.add_argument("--solver", default="auto", help='a name in fxremat.SOLVERS, or "auto"')


def _capture(arguments: argparse.Namespace) -> int:
    import fxremat

    fn, args, kwargs = _make(arguments.target)
    options = {
        name: value
        for name in ("costs", "reserve", "outputs")
        if (value := getattr(arguments, name)) is not None
    }
    problem = fxremat.capture(fn, args, kwargs, **options)
    problem.save(arguments.output)
    print(
        f"{arguments.output}: {len(problem.operations):,} operations, "
        f"{len(problem.storages):,} storages, {format_bytes(problem.resident_bytes)} resident"
    )
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    plan = _planned(arguments, arguments.solver)
    if arguments.json:
        print(json.dumps(_plan_numbers(plan), indent=2))
        return 0
    from fxremat.tables import DECISION_HEADERS, decision_rows, format_cost

    costs = plan.problem.costs
    share = (
        f", {plan.recompute_ns / plan.problem.step_ns:.1%} of the step"
        if plan.problem.step_ns
        else ""
    )
    bound = "none proven"
    if plan.bound_class:
        bound = (
            f"{format_cost(plan.lower_bound_ns, costs)} ({plan.bound_class}), gap {plan.gap:.1%}"
        )
    rows = [
        ("budget", _bytes(plan.budget_bytes)),
        ("resident", _bytes(plan.problem.resident_bytes)),
        ("peak", _bytes(plan.peak_bytes)),
        ("saved", _bytes(plan.saved_bytes)),
        ("extra", format_cost(plan.recompute_ns, costs) + share),
        ("lower bound", bound),
        ("solver", f"{plan.solver}, {plan.solve_s:.2f} s"),
    ]
    _print_table(rows)
    from fxremat.decisions import decisions

    recomputed = decision_rows(decisions(plan), costs)
    if recomputed:
        print()
        _print_table(recomputed, DECISION_HEADERS)
    return 0


def _frontier(arguments: argparse.Namespace) -> int:
    import fxremat

    pyplot = _pyplot() if arguments.plot else None  # before the work, which may be long
    plans = fxremat.frontier(fxremat.load(arguments.file), points=arguments.points)
    _print_table([_plan_row(plan) for plan in plans], PLAN_HEADERS)
    if pyplot is not None:
        _draw(pyplot, plans, arguments.plot)
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    import fxremat

    rows: list[Sequence[str]] = []
    for name in fxremat.SOLVERS:
        try:
            rows.append((name, *_plan_row(_planned(arguments, name))))
        except InfeasibleBudgetError:
            rows.append((name, "none within the budget"))
    _print_table(rows, ("name", *PLAN_HEADERS))
    return 0


def _explain(arguments: argparse.Namespace) -> int:
    from fxremat.decisions import decisions
    from fxremat.tables import format_cost

    plan = _planned(arguments, arguments.solver)
    rows = [
        (
            row.value,
            row.operator,
            row.module,
            Path(row.source).name,
            format_bytes(row.bytes),
            format_cost(row.cost_ns, plan.problem.costs),
            row.decision,
            row.reason,
        )
        for row in decisions(plan)
    ]
    headers = ("value", "operator", "module", "source", "bytes", "cost", "decision", "reason")
    _print_table(rows, headers)
    return 0


def _timeline(arguments: argparse.Namespace) -> int:
    plan = _planned(arguments, arguments.solver)
    rows = [
        (
            point.phase,
            point.name,
            f"{point.live_bytes:,}",
            "#" * (40 * point.live_bytes // plan.peak_bytes),
        )
        for point in plan.timeline()
    ]
    _print_table(rows, ("phase", "operation", "bytes held", f"of {_bytes(plan.peak_bytes)}"))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    import fxremat

    fn, args, kwargs = _make(arguments.target)
    check = fxremat.verify(fn, args, kwargs, budget=arguments.budget)
    print(check)
    for name, difference in check.max_abs_diff.items():
        print(f"{name} differs by up to {difference:g}")
    return 0 if check.ok else 1


def _planned(arguments: argparse.Namespace, solver: str) -> "Plan":
    import fxremat

    problem = fxremat.load(arguments.file)
    return fxremat.plan(problem, arguments.budget, solver=solver, time_limit_s=arguments.time_limit)


PLAN_HEADERS = ("peak", "saved", "extra", "of the step", "gap", "solver", "solved in")


def _plan_row(plan: "Plan") -> tuple[str, ...]:
    from fxremat.tables import format_cost

    step_ns = plan.problem.step_ns
    return (
        format_bytes(plan.peak_bytes),
        format_bytes(plan.saved_bytes),
        format_cost(plan.recompute_ns, plan.problem.costs),
        f"{plan.recompute_ns / step_ns:.1%}" if step_ns else "",
        f"{plan.gap:.1%}" if plan.bound_class else "no bound",
        plan.solver,
        f"{plan.solve_s:.2f} s",
    )


def _plan_numbers(plan: "Plan") -> dict[str, object]:
    problem = plan.problem
    return {
        "budget_bytes": plan.budget_bytes,
        "resident_bytes": problem.resident_bytes,
        "peak_bytes": plan.peak_bytes,
        "saved_bytes": plan.saved_bytes,
        "entry_bytes": plan.simulation.entry_bytes,
        "step_ns": problem.step_ns,
        "recompute_ns": plan.recompute_ns,
        "lower_bound_ns": plan.lower_bound_ns,
        "bound_class": plan.bound_class,
        "gap": plan.gap,
        "costs": problem.costs,
        "solver": plan.solver,
        "solve_s": plan.solve_s,
        "saved": plan.saved,
    }


def _make(target: str) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]]:
    """Import ``module:function`` or ``path.py:function`` and call it."""
    name, colon, function = target.rpartition(":")
    if not (name and colon and function):
        raise OptionError(f"target {target!r} must be {_TARGET_HELP}.", "target", target)
    module = _import(name, target)
    make = getattr(module, function, None)
    if not callable(make):
        known = tuple(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise OptionError(
            f"{name!r} has no function {function!r}; it has {', '.join(known) or 'none'}.",
            "target",
            target,
            known,
        )
    made = make()
    if not (isinstance(made, tuple) and 2 <= len(made) <= 4 and isinstance(made[1], tuple)):
        raise OptionError(
            f"{target!r} must return (fn, args) or (fn, args, kwargs).", "target", target
        )
    return made[0], made[1], made[2] if len(made) > 2 else {}


def _import(name: str, target: str) -> object:
    """A module by its name, or a file by its path; what stands beside it can be imported by it."""
    path = Path(name)
    if path.suffix != ".py":
        sys.path.insert(0, str(Path.cwd()))
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise OptionError(f"cannot import {name!r}: {error}.", "target", target) from error
    if not path.is_file():
        raise OptionError(f"there is no file {name!r}.", "target", target)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None  # the suffix is .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module


def _pyplot() -> Any:
    """Import matplotlib without a screen, or a word on where to get it."""
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ModuleNotFoundError as error:
        message = "--plot needs matplotlib: pip install 'fxremat[plot]'."
        raise OptionError(message, "plot") from error
    matplotlib.use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def _draw(pyplot: Any, plans: Sequence["Plan"], path: str) -> None:
    """Extra cost over peak, with the proven bound."""
    problem = plans[0].problem
    scale = 100 / problem.step_ns if problem.step_ns else 0.0
    peaks_mib = [plan.peak_bytes / 2**20 for plan in plans]
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    axes.plot(peaks_mib, [scale * plan.recompute_ns for plan in plans], "o-", label="planned")
    bounded = [plan for plan in plans if plan.bound_class]
    if bounded:
        axes.plot(
            [plan.peak_bytes / 2**20 for plan in bounded],
            [scale * plan.lower_bound_ns for plan in bounded],
            "--",
            color="grey",
            label="lower bound",
        )
    axes.set_xlabel("peak, resident bytes included [MiB]")
    axes.set_ylabel(f"extra, % of the step ({problem.costs} costs)")
    axes.set_title(problem.name or Path(path).stem)
    axes.set_ylim(bottom=0)
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:  # no such folder; no such kind of picture
        raise OptionError(f"cannot write {path!r}: {error}", "plot", path) from error
    print(f"drawn: {path}")


def _bytes(size_bytes: int) -> str:
    return f"{format_bytes(size_bytes)} ({format_bytes(size_bytes, exact=True)})"


def _print_table(rows: Sequence[Sequence[object]], headers: Sequence[str] = ()) -> None:
    from fxremat.tables import table

    print(table(rows, headers))
