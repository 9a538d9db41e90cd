"""Made-up problems for tests: small random ones, and training steps shaped like real models.

All sizes are distinct primes (in the small problems exactly, in the large ones nearly), so that no
two sums of bytes agree by chance.
"""

import random
from collections.abc import Iterator, Sequence
from itertools import count

from fxremat.problem import Kind, Operation, RematProblem, Replay, Storage


def primes(start: int = 2) -> Iterator[int]:
    """Primes from ``start`` on."""
    for n in count(max(2, start)):
        if all(n % d for d in range(2, int(n**0.5) + 1)):
            yield n


class Tape:
    """Records a forward; the caller then records the backward operations in order."""

    def __init__(self, state_bytes: int = 5056) -> None:
        self.storages: list[Storage] = []
        self.operations: list[Operation] = []
        self.replays: list[Replay] = []
        self.num_forward = -1
        self.state_bytes = state_bytes

    def given(self, name: str, size_bytes: int, kind: Kind = Kind.PRIMAL) -> int:
        """A primal or a tangent."""
        self.storages.append(Storage(name, size_bytes, kind))
        return len(self.storages) - 1

    def run(
        self,
        name: str,
        reads: Sequence[int],
        sizes_bytes: Sequence[int],
        cost_ns: int,
        *,
        workspace_bytes: int = 0,
        replayable: bool = True,
        must_run: bool = False,
        module: str = "",
    ) -> tuple[int, ...]:
        """An operation, in the forward until ``turn`` was called, with a plain replay."""
        index = len(self.operations)
        creates = tuple(range(len(self.storages), len(self.storages) + len(sizes_bytes)))
        for position, size_bytes in enumerate(sizes_bytes):
            label = name if position == 0 else f"{name}_{position}"
            self.storages.append(Storage(label, size_bytes, Kind.VALUE, index))
        inputs = tuple(sorted(set(reads)))
        self.operations.append(
            Operation(
                name, name, inputs, creates, cost_ns, workspace_bytes, must_run, module=module
            )
        )
        if self.num_forward < 0 and replayable and creates:
            self.replays.append(Replay(index, "same", inputs, creates, cost_ns, workspace_bytes))
        return creates

    def dropout(
        self, name: str, x: int, size_bytes: int, mask_bytes: int, cost_ns: int, module: str = ""
    ) -> tuple[int, int]:
        """A dropout: its output from the mask, or both drawn again from the saved state."""
        index = len(self.operations)
        out, mask, state = range(len(self.storages), len(self.storages) + 3)
        self.storages.append(Storage(name, size_bytes, Kind.VALUE, index))
        self.storages.append(Storage(f"{name}_mask", mask_bytes, Kind.VALUE, index))
        self.storages.append(
            Storage(f"{name}_state", self.state_bytes, Kind.VALUE, index, lazy=True)
        )
        self.operations.append(
            Operation(
                name, "dropout", (x,), (out, mask, state), cost_ns, must_run=True, module=module
            )
        )
        self.replays.append(
            Replay(index, "from_mask", tuple(sorted((x, mask))), (out,), max(1, cost_ns // 4))
        )
        self.replays.append(
            Replay(
                index,
                "redraw",
                tuple(sorted((x, state))),
                (out, mask),
                cost_ns + 20_000,
                self.state_bytes,
            )
        )
        return out, mask

    def turn(self) -> None:
        """The forward ends here."""
        self.num_forward = len(self.operations)

    def problem(
        self,
        outputs: Sequence[int],
        gradients: Sequence[int],
        *,
        resident_bytes: int = 0,
        outputs_held: bool = True,
        in_flight: int = 1,
        name: str = "",
    ) -> RematProblem:
        """What was recorded."""
        return RematProblem(
            storages=tuple(self.storages),
            operations=tuple(self.operations),
            num_forward=self.num_forward,
            replays=tuple(self.replays),
            outputs=tuple(outputs),
            gradients=tuple(gradients),
            resident_bytes=resident_bytes,
            outputs_held=outputs_held,
            in_flight=in_flight,
            name=name,
        )


def random_problem(seed: int, max_operations: int = 7) -> RematProblem:
    """A small training step: any graph of forward operations, backward in roughly reverse order."""
    rng = random.Random(seed)
    sizes = list(next_primes(40, 3))
    rng.shuffle(sizes)
    draw = iter(sizes)
    tape = Tape(state_bytes=next(draw) if rng.random() < 0.5 else 1)
    values = [tape.given("x", next(draw))]
    number = rng.randint(2, max_operations)
    made: list[tuple[int, ...]] = []
    for index in range(number):
        recent = values[-4:]
        reads = rng.sample(recent, min(len(recent), rng.randint(1, 2)))
        cost_ns = rng.randint(1, 30)
        if rng.random() < 0.2:
            made.append(tape.dropout(f"d{index}", reads[0], next(draw), next(draw), cost_ns))
        else:
            sizes_bytes = [next(draw) for _ in range(1 + (rng.random() < 0.2))]
            workspace_bytes = next(draw) if rng.random() < 0.2 else 0
            made.append(
                tape.run(
                    f"f{index}",
                    reads,
                    sizes_bytes,
                    cost_ns,
                    workspace_bytes=workspace_bytes,
                    replayable=rng.random() < 0.9,
                )
            )
        values.extend(made[-1])
    tape.turn()
    tangent = tape.given("tangent", next(draw), Kind.TANGENT)
    gradient = tangent
    gradients: list[int] = []
    for index in reversed(range(number)):
        readable = [g for g in values[1:] if tape.storages[g].producer <= index]
        wanted = rng.sample(readable, min(len(readable), rng.randint(0, 2)))
        near = rng.choice(made[index])
        reads = [gradient, *wanted, *([near] if rng.random() < 0.7 else [])]
        workspace_bytes = next(draw) if rng.random() < 0.1 else 0
        sizes_bytes = [next(draw)]
        parameter = rng.random() < 0.5
        if parameter:
            sizes_bytes.append(next(draw))
        created = tape.run(
            f"b{index}", reads, sizes_bytes, rng.randint(1, 30), workspace_bytes=workspace_bytes
        )
        gradient = created[0]
        gradients.extend(created[1:])
    gradients.append(gradient)
    return tape.problem(
        outputs=[made[-1][0]],
        gradients=gradients,
        resident_bytes=rng.choice((0, 101)),
        outputs_held=rng.random() < 0.7,
        in_flight=1 + (rng.random() < 0.15),
        name=f"random {seed}",
    )


def next_primes(number: int, start: int) -> list[int]:
    """The first primes from ``start`` on."""
    found = primes(start)
    return [next(found) for _ in range(number)]


class _Layers:
    """Layers of a transformer that know their own backward."""

    def __init__(self, tokens: int, width: int, ns_per_mib: int = 250_000) -> None:
        self.tape = Tape()
        self.unit_bytes = 4 * tokens * width
        self.width, self.tokens = width, tokens
        self.ns_per_mib = ns_per_mib
        self.prime = primes(3)
        self.gradients: list[int] = []

    def odd(self, size_bytes: float) -> int:
        """About that many bytes, made distinct by a prime."""
        return max(1, int(size_bytes)) + next(self.prime)

    def elementwise_ns(self, size_bytes: float) -> int:
        """Time to read and write that many bytes."""
        return max(2_000, int(size_bytes / 2**20 * self.ns_per_mib))

    def matmul_ns(self, rows: float, inner: float, columns: float) -> int:
        """Time of a product at 50 GFLOP/s."""
        return max(2_000, int(2 * rows * inner * columns / 50))

    def unary(self, name: str, reads: Sequence[int], factor: float, module: str) -> int:
        """An elementwise operation on ``factor`` units."""
        size_bytes = factor * self.unit_bytes
        cost_ns = self.elementwise_ns(size_bytes)
        return self.tape.run(name, reads, [self.odd(size_bytes)], cost_ns, module=module)[0]

    def linear(self, name: str, reads: Sequence[int], inner: float, out: float, module: str) -> int:
        """A matrix product; ``inner`` and ``out`` in widths."""
        cost_ns = self.matmul_ns(self.tokens, inner * self.width, out * self.width)
        size_bytes = out * self.unit_bytes
        return self.tape.run(name, reads, [self.odd(size_bytes)], cost_ns, module=module)[0]

    def weight_gradient(self, name: str, reads: Sequence[int], inner: float, out: float) -> None:
        """The product that makes the gradient of a weight, and that of its bias."""
        cost_ns = self.matmul_ns(self.tokens, inner * self.width, out * self.width)
        size_bytes = 4 * inner * out * self.width**2
        self.gradients += self.tape.run(f"{name}_w", reads, [self.odd(size_bytes)], cost_ns)
        self.gradients += self.tape.run(
            f"{name}_b", reads[:1], [self.odd(4 * out * self.width)], cost_ns // 50
        )

    def norm(self, name: str, x: int, module: str) -> tuple[int, int, int]:
        """A layer norm: output, mean, deviation."""
        small = 4 * self.tokens
        cost_ns = self.elementwise_ns(2 * self.unit_bytes)
        sizes = [self.odd(self.unit_bytes), self.odd(small), self.odd(small)]
        out, mean, deviation = self.tape.run(name, [x], sizes, cost_ns, module=module)
        return out, mean, deviation

    def norm_backward(self, name: str, grad: int, x: int, mean: int, deviation: int) -> int:
        """Its backward: gradient of the input, of weight and bias."""
        sizes = [self.odd(self.unit_bytes), self.odd(4 * self.width), self.odd(4 * self.width)]
        cost_ns = self.elementwise_ns(4 * self.unit_bytes)
        out, weight, bias = self.tape.run(name, [grad, x, mean, deviation], sizes, cost_ns)
        self.gradients += [weight, bias]
        return out


def transformer(
    layers: int = 12,
    *,
    tokens: int = 1024,
    width: int = 256,
    heads: int = 4,
    context: int = 256,
    vocabulary: int = 8192,
    resident_bytes: int = 100 * 2**20,
) -> RematProblem:
    """A training step shaped like GPT-2's: dropout, residuals, ``gelu_new`` op by op."""
    model = _Layers(tokens, width)
    tape, unit = model.tape, model.unit_bytes
    scores = heads * context / width  # units of one attention matrix
    tokens_in = tape.given("tokens", 0)
    embedded = model.unary("embed", [tokens_in], 1, "transformer.wte")
    mask_bytes = unit // 4

    def dropout(name: str, x: int, factor: float, module: str) -> tuple[int, int]:
        size_bytes = factor * unit
        return tape.dropout(
            name,
            x,
            model.odd(size_bytes),
            model.odd(factor * mask_bytes),
            4 * model.elementwise_ns(size_bytes),
            module,
        )

    x, embed_mask = dropout("embed_drop", embedded, 1, "transformer.drop")
    kept: list[dict[str, int]] = []
    for layer in range(layers):
        block = f"transformer.h.{layer}"
        v: dict[str, int] = {"x": x}
        v["ln1"], v["mean1"], v["dev1"] = model.norm(f"ln1_{layer}", x, f"{block}.ln_1")
        v["qkv"] = model.linear(f"qkv_{layer}", [v["ln1"]], 1, 3, f"{block}.attn.c_attn")
        for part in ("q", "k", "v"):
            v[part] = model.unary(f"{part}_{layer}", [v["qkv"]], 1, f"{block}.attn")
        score_ns = model.matmul_ns(tokens, width, context)
        score_bytes = model.odd(scores * unit)
        (v["s"],) = tape.run(
            f"scores_{layer}", [v["q"], v["k"]], [score_bytes], score_ns, module=f"{block}.attn"
        )
        v["p"] = model.unary(f"softmax_{layer}", [v["s"]], scores, f"{block}.attn")
        v["pd"], v["pm"] = dropout(f"attn_drop_{layer}", v["p"], scores, f"{block}.attn")
        (v["a"],) = tape.run(
            f"attend_{layer}",
            [v["pd"], v["v"]],
            [model.odd(unit)],
            score_ns,
            module=f"{block}.attn",
        )
        v["c"] = model.unary(f"merge_{layer}", [v["a"]], 1, f"{block}.attn")
        v["proj"] = model.linear(f"proj_{layer}", [v["c"]], 1, 1, f"{block}.attn.c_proj")
        v["d1"], v["m1"] = dropout(f"drop1_{layer}", v["proj"], 1, f"{block}.attn")
        v["r"] = model.unary(f"res1_{layer}", [v["d1"], x], 1, block)
        v["ln2"], v["mean2"], v["dev2"] = model.norm(f"ln2_{layer}", v["r"], f"{block}.ln_2")
        mlp = f"{block}.mlp"
        v["fc"] = model.linear(f"fc_{layer}", [v["ln2"]], 1, 4, f"{mlp}.c_fc")
        v["half"] = model.unary(f"half_{layer}", [v["fc"]], 4, mlp)
        v["pow"] = model.unary(f"pow_{layer}", [v["fc"]], 4, mlp)
        v["mul1"] = model.unary(f"mul1_{layer}", [v["pow"]], 4, mlp)
        v["add1"] = model.unary(f"add1_{layer}", [v["fc"], v["mul1"]], 4, mlp)
        v["mul2"] = model.unary(f"mul2_{layer}", [v["add1"]], 4, mlp)
        v["tanh"] = model.unary(f"tanh_{layer}", [v["mul2"]], 4, mlp)
        v["add2"] = model.unary(f"add2_{layer}", [v["tanh"]], 4, mlp)
        v["gelu"] = model.unary(f"gelu_{layer}", [v["half"], v["add2"]], 4, mlp)
        v["fc2"] = model.linear(f"fc2_{layer}", [v["gelu"]], 4, 1, f"{mlp}.c_proj")
        v["d2"], v["m2"] = dropout(f"drop2_{layer}", v["fc2"], 1, mlp)
        x = model.unary(f"res2_{layer}", [v["d2"], v["r"]], 1, block)
        kept.append(v)
    final, mean, deviation = model.norm("ln_f", x, "transformer.ln_f")
    logits = model.linear("logits", [final], 1, vocabulary / width, "lm_head")
    shape = vocabulary / width
    soft = model.unary("log_softmax", [logits], shape, "")
    (loss,) = tape.run("nll", [soft], [512], 20_000)
    tape.turn()

    tangent = tape.given("tangent", 512, Kind.TANGENT)
    grad_logits = model.unary("nll_backward", [tangent], shape, "")
    grad_logits = model.unary("log_softmax_backward", [grad_logits, soft], shape, "")
    model.weight_gradient("lm_head_grad", [grad_logits, final], 1, shape)
    grad = model.linear("lm_head_back", [grad_logits], shape, 1, "")
    grad = model.norm_backward("ln_f_back", grad, x, mean, deviation)
    for layer in reversed(range(layers)):
        grad = _layer_backward(model, layer, kept[layer], grad, scores, context)
    grad = model.unary("embed_drop_back", [grad, embed_mask], 1, "")
    model.gradients += tape.run("embed_back", [grad], [model.odd(4 * vocabulary * width)], 300_000)
    return tape.problem(
        [loss],
        model.gradients,
        resident_bytes=resident_bytes,
        name=f"transformer {layers} layers",
    )


def _layer_backward(
    model: _Layers, layer: int, v: dict[str, int], grad: int, scores: float, context: int
) -> int:
    """The backward of one block, reading what autograd reads."""
    tape = model.tape
    score_ns = model.matmul_ns(model.tokens, model.width, context)

    def unary(name: str, reads: Sequence[int], factor: float) -> int:
        return model.unary(f"{name}_back_{layer}", reads, factor, "")

    def product(name: str, reads: Sequence[int], factor: float) -> int:
        size_bytes = model.odd(factor * model.unit_bytes)
        return tape.run(f"{name}_back_{layer}", reads, [size_bytes], score_ns)[0]

    through = unary("drop2", [grad, v["m2"]], 1)
    model.weight_gradient(f"fc2_back_{layer}", [through, v["gelu"]], 4, 1)
    through = model.linear(f"fc2_back_{layer}", [through], 1, 4, "")
    left = unary("gelu_l", [through, v["add2"]], 4)
    right = unary("gelu_r", [through, v["half"]], 4)
    right = unary("tanh", [right, v["tanh"]], 4)
    right = unary("mul2", [right], 4)
    cubed = unary("mul1", [right], 4)
    square = unary("square", [v["fc"]], 4)
    cubed = unary("pow", [cubed, square], 4)
    left = unary("half", [left], 4)
    total = unary("sum1", [left, right], 4)
    total = unary("sum2", [total, cubed], 4)
    model.weight_gradient(f"fc_back_{layer}", [total, v["ln2"]], 1, 4)
    through = model.linear(f"fc_back_{layer}", [total], 4, 1, "")
    through = model.norm_backward(f"ln2_back_{layer}", through, v["r"], v["mean2"], v["dev2"])
    grad = unary("res2", [grad, through], 1)
    through = unary("drop1", [grad, v["m1"]], 1)
    model.weight_gradient(f"proj_back_{layer}", [through, v["c"]], 1, 1)
    through = model.linear(f"proj_back_{layer}", [through], 1, 1, "")
    through = unary("merge", [through], 1)
    grad_v = product("attend_v", [through, v["pd"]], 1)
    grad_p = product("attend_p", [through, v["v"]], scores)
    grad_p = unary("attn_drop", [grad_p, v["pm"]], scores)
    grad_p = unary("softmax", [grad_p, v["p"]], scores)
    grad_q = product("scores_q", [grad_p, v["k"]], 1)
    grad_k = product("scores_k", [grad_p, v["q"]], 1)
    through = unary("cat", [grad_q, grad_k, grad_v], 3)
    model.weight_gradient(f"qkv_back_{layer}", [through, v["ln1"]], 1, 3)
    through = model.linear(f"qkv_back_{layer}", [through], 3, 1, "")
    through = model.norm_backward(f"ln1_back_{layer}", through, v["x"], v["mean1"], v["dev1"])
    return unary("res1", [grad, through], 1)
