"""The Dynamo backend: what happens to one graph that Dynamo has captured."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd

from fxremat.errors import CaptureError, UnsupportedGraphError
from fxremat.passes.aliases import input_name
from fxremat.passes.contexts import watched
from fxremat.passes.cublas import cublas_bytes
from fxremat.passes.leaves import refuse_visible
from fxremat.passes.recurrent import plain_recurrence, refuse_lost_dropout
from fxremat.passes.resampling import whole_resampling
from fxremat.passes.select import detach_the_rest
from fxremat.passes.shared import shared_outputs
from fxremat.passes.storages import round_up
from fxremat.passes.symbolic import places, sizes_of
from fxremat.passes.tracing import compiling, current_frame
from fxremat.passes.writes import refuse_writes
from fxremat.records import Piece
from fxremat.reserve import reserve_bytes
from fxremat.session import Session
from fxremat.together import seen
from fxremat.trace import Trace
from fxremat.trial import compile_and_try
from fxremat.unplanned import refuse_subclasses


class Backend:
    """Compiles graphs for one session.

    Args:
        session: Where plans are kept.
        held: Tensors that the step's device holds besides the graph's inputs.
        with_gradients: Parameters have gradients when the step begins; False: count those that
            are there when the graph is compiled, unless the options say that they are freed.
        trace: What takes a graph through AOTAutograd.
        outside_bytes: What is known to stay on the device besides tensors. [bytes]
    """

    def __init__(
        self,
        session: Session,
        held: Callable[[], Iterable[torch.Tensor]] = tuple,
        with_gradients: bool = False,
        trace: "type[Trace] | None" = None,
        outside_bytes: int = 0,
    ) -> None:
        self.session = session
        self.outside_bytes = outside_bytes
        self.trace = trace or Trace
        self.held = held
        self.with_gradients = with_gradients
        self.__name__ = "fxremat"  # Dynamo shows it in its messages

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph that Dynamo captured."""
        options = self.session.options
        refuse_visible(graph.graph)
        refuse_subclasses(self.session.name, inputs)
        if options.keys is not None:
            graph = detach_the_rest(graph, options.keys)
        names = [node.name for node in graph.graph.find_nodes(op="placeholder")]
        found = zip(names, inputs, strict=True)
        self.session.on_inputs([f for f in found if not self.session.shares or _is_given(f[1])])
        device = device_of([value for value in inputs if isinstance(value, torch.Tensor)])
        total_bytes, piece = self.around(device, inputs, current_frame())
        trace = self.trace(self.session, device, total_bytes, piece, self.held)
        trace.around = functools.partial(self.around, device)
        trace.places = places(graph)
        trace.sizes = sizes_of(trace.places, inputs)
        trace.num_inputs = len(inputs)
        placeholders = graph.graph.find_nodes(op="placeholder")
        trace.inputs = list(zip(map(input_name, placeholders), inputs, strict=True))
        trace.leaves = frozenset(
            i for i, v in enumerate(inputs) if isinstance(v, torch.Tensor) and v.is_leaf
        )
        refuse_writes(graph)
        trace.shared = shared_outputs(graph)
        refuse_lost_dropout(graph.graph)
        eager = options.executor == "eager"
        with (
            self.session.giving_way(),
            compiling(),
            plain_recurrence(graph.graph),
            whole_resampling(wanted=eager),
        ):
            if options.executor == "inductor":
                code = compile_and_try(graph, inputs, trace, _identity(options))
            else:
                code = self.compile(graph, inputs, trace)
        trace.inputs = ()
        return watched(code, trace)

    def around(self, device: torch.device, inputs: Sequence[Any], frame: int) -> tuple[int, Piece]:
        """What is held while a graph runs, and what of it is not the graph's own. [bytes]"""
        given = [value for value in inputs if isinstance(value, torch.Tensor)]
        options, resident = self.session.options, [*given, *self.held()]
        existing_bytes = 0
        if self.with_gradients:
            existing_bytes = expected_gradient_bytes(device, resident)
        elif options.gradients == "auto":
            existing_bytes = bytes_on(device, gradients_of(resident))
            existing_bytes = max(existing_bytes, self.session.existing_bytes)
        fixed_bytes = reserve_bytes(options.reserve) + existing_bytes + cublas_bytes(device)
        fixed_bytes += self.outside_bytes
        piece = self.piece(device, given, existing_bytes, fixed_bytes, frame)
        resident_bytes = self._resident_bytes(device, resident)
        return resident_bytes + fixed_bytes + piece.others_bytes, piece

    def _resident_bytes(self, device: torch.device, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes of tensors, and of what earlier pieces of the call were given. [bytes]

        What those pieces made is not among them: they hold it themselves.
        """
        call = self.session.call
        made = call.made if self.session.options.outputs == "held" else {}
        sizes = {one.key: one.size_bytes for one in seen(tensors, device)}
        return sum(n for key, n in {**call.external_bytes, **sizes}.items() if key not in made)

    def piece(
        self,
        device: torch.device,
        given: list[torch.Tensor],
        existing_bytes: int,
        fixed_bytes: int,
        frame: int,
    ) -> Piece:
        """What other pieces of the same call hold while this one runs forward or back."""
        earlier = sum(record.held_bytes for record in self.session.earlier(frame))
        mine = {id(tensor) for tensor in given}
        breaks = not self.session.options.fullgraph
        outside = [t for t in self.held() if id(t) not in mine] if breaks else []
        return Piece(
            frame,
            others_bytes=earlier + gradient_bytes(device, outside),
            earlier_bytes=earlier,
            gradient_bytes=gradient_bytes(device, given),
            existing_bytes=existing_bytes,
            fixed_bytes=fixed_bytes,
        )

    def compile(
        self, graph: fx.GraphModule, inputs: Sequence[Any], trace: "Trace"
    ) -> Callable[..., Any]:
        """Hand a graph to the eager executor."""
        compiler = aot_autograd(
            fw_compiler=trace.forward_compiler,
            bw_compiler=trace.backward_compiler,
            inference_compiler=trace.inference_compiler,
            partition_fn=trace.partition,
        )
        compiled: Callable[..., Any] = compiler(graph, inputs)
        return compiled


def _is_given(value: object) -> bool:
    """Is it certain that no piece of the same call has made it?"""
    return isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad


def require_device(tensors: Iterable[torch.Tensor]) -> None:
    """Refuse to trace for CUDA where torch has no such device.

    A trace runs autograd on fake tensors, and its engine asks the device for streams: without one
    it raises, or ends the process where torch was built for the CPU.

    Raises:
        CaptureError: It would.
    """
    if any(tensor.device.type == "cuda" for tensor in tensors) and not torch.cuda.is_available():
        raise CaptureError(
            "the model or its arguments are on 'cuda', and torch sees no CUDA device here; "
            "its autograd "
            "cannot trace a backward for one, not even of fake tensors. Capture on a machine "
            "that has one "
            "and save the problem, or put the fake tensors on 'cpu'."
        )


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    """The one device that a step runs on.

    Host scalars are allowed beside a device: operators take them as arguments.

    Raises:
        UnsupportedGraphError: There are two.
    """
    found: dict[torch.device, str] = {}
    for tensor in tensors:
        if tensor.dim() > 0:
            found.setdefault(tensor.device, f"a tensor of shape {tuple(tensor.shape)}")
    if len(found) > 1:
        where = "; ".join(f"{name} on {device}" for device, name in found.items())
        raise UnsupportedGraphError(
            f"the step uses {len(found)} devices ({where}), and a budget speaks of one. "
            "Move the model and its arguments to one device, or optimise the part on each by "
            "itself."
        )
    return next(iter(found), torch.device("cpu"))


def bytes_on(device: torch.device, tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages on a device, as its allocator counts them. [bytes]"""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if tensor.device == device and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            sizes[storage._cdata] = round_up(storage.nbytes(), device)
    return sum(sizes.values())


def gradients_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients that exist now."""
    return [t.grad for t in tensors if t.is_leaf and t.grad is not None]


def gradient_bytes(device: torch.device, tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of a gradient for every leaf that takes one. [bytes]"""
    wanted = {id(t): t for t in tensors if t.is_leaf and t.requires_grad and t.device == device}
    return sum(round_up(t.numel() * t.element_size(), device) for t in wanted.values())


def expected_gradient_bytes(device: torch.device, tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of a gradient for every parameter, and of those that other tensors have now. [bytes]"""
    kept = (t for t in tensors if t.is_leaf)
    return gradient_bytes(
        device, [t for t in kept if isinstance(t, torch.nn.Parameter) or t.grad is not None]
    )


def _identity(options: Any) -> str:
    """What a compiled graph depends on besides itself, for Inductor's cache."""
    return repr(replace(options, progress=None))
