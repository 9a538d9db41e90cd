"""The unrewritten graph on its way through AOTAutograd, which ``verify`` compares with."""

from collections.abc import Sequence

from torch import fx

from fxremat.passes.gradients import drop_gradients_of_writes
from fxremat.passes.reference import reference_partition
from fxremat.passes.tracing import joint_of
from fxremat.trace import Trace


class ReferenceTrace(Trace):
    """The unrewritten graph on its way through AOTAutograd: no plan, torch's own partition."""

    def partition(
        self,
        module: fx.GraphModule,
        _inputs: object,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        drop_gradients_of_writes(module, num_fwd_outputs, self.leaves)
        self.know(joint_of(module, num_fwd_outputs))
        return reference_partition(
            module,
            _inputs,
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=static_lifetime_input_indices,
        )
