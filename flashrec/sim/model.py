"""Transformers by their shapes: dense, grouped-query, gated (SwiGLU), mixture of experts with expert parallelism.

Formulas: parameters and FLOPs as in arXiv 2104.04473, section 5.1 and appendix; activations and the communication of
tensor and sequence parallelism as in arXiv 2205.05198, sections 4 and 5; experts as in arXiv 2101.03961.
"""

from dataclasses import dataclass

from flashrec.errors import UsageError
from flashrec.sim.architecture import Block, Division, Exchange, Gemm, Work
from flashrec.sim.choices import require_count, require_division

ELEMENT = 2  # bytes of an activation or a weight in bf16 or fp16


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A decoder-only transformer. Lengths are numbers of elements."""

    name: str = "transformer"
    num_layers: int
    hidden: int
    num_heads: int
    sequence: int
    vocabulary: int
    kv_heads: int | None = None
    """Heads of keys and values; fewer than num_heads is grouped-query attention. None: num_heads."""
    ffn_hidden: int | None = None
    """Inner size of the MLP (of one expert). None: 4 hidden."""
    gated: bool = False
    """SwiGLU and its like: three matrices in the MLP instead of two."""
    num_experts: int = 1
    """1: dense."""
    experts_per_token: int = 1
    biases: bool = True
    rms_norm: bool = False
    """Norms with a scale and no shift."""
    learned_positions: bool = True
    tied_embeddings: bool = True
    dropout: bool = True
    fused_attention: bool = False
    """Flash attention: scores never reach memory, and the masked half is not computed."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden", "num_heads", "sequence", "vocabulary", "num_experts"):
            require_count(getattr(self, name), f"model: {name}")
        require_count(self.experts_per_token, "model: experts_per_token")
        for name in ("kv_heads", "ffn_hidden"):
            if getattr(self, name) is not None:
                require_count(getattr(self, name), f"model: {name}")
        require_division(self.hidden, "hidden", self.num_heads, "num_heads")
        require_division(self.num_heads, "num_heads", self.num_kv_heads, "kv_heads")
        if self.experts_per_token > self.num_experts:
            raise UsageError(
                f"model: experts_per_token ({self.experts_per_token}) is more than num_experts ({self.num_experts}); "
                f"nearest valid: {self.num_experts}"
            )

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_heads if self.kv_heads is None else self.kv_heads

    @property
    def head_size(self) -> int:
        """Elements of one head."""
        return self.hidden // self.num_heads

    @property
    def kv_hidden(self) -> int:
        """Elements of all keys (or all values) of one token."""
        return self.num_kv_heads * self.head_size

    @property
    def ffn(self) -> int:
        """Inner size of the MLP."""
        return 4 * self.hidden if self.ffn_hidden is None else self.ffn_hidden

    @property
    def moe(self) -> bool:
        """Whether the MLPs are experts."""
        return self.num_experts > 1

    @property
    def tied_parameters(self) -> int:
        """Parameters that embedding and head share."""
        return self.vocabulary * self.hidden if self.tied_embeddings else 0

    @property
    def parameters(self) -> int:
        """All parameters, undivided."""
        return sum(b.parameters + b.expert_parameters for b in self.blocks(Division(micro_batch=1)))

    @property
    def active_parameters(self) -> int:
        """Parameters one token meets: of the experts only those it is sent to."""
        blocks = self.blocks(Division(micro_batch=1))
        experts = sum(b.expert_parameters for b in blocks)
        return self.parameters - experts + experts * self.experts_per_token // self.num_experts

    def check_division(self, tensor_parallel: int, expert_parallel: int) -> None:
        """Raises UsageError where heads, MLP, vocabulary or experts cannot be divided so."""
        require_division(self.num_heads, "num_heads", tensor_parallel, "tensor_parallel")
        require_division(self.num_kv_heads, "kv_heads", tensor_parallel, "tensor_parallel")
        require_division(self.ffn, "ffn_hidden", tensor_parallel, "tensor_parallel")
        require_division(self.num_experts, "num_experts", expert_parallel, "expert_parallel")

    def blocks(self, division: Division) -> tuple[Block, ...]:
        """Embedding, layers and loss head, as one device of a tensor (and expert) group sees them."""
        self.check_division(division.tensor_parallel, division.expert_parallel)
        layer = _Layer(self, division).block()
        return (_embedding(self, division), *[layer] * self.num_layers, _head(self, division))


def _padded_vocabulary(model: Transformer, tensor_parallel: int) -> int:
    """Rows of the vocabulary on one device, rounded up."""
    return -(-model.vocabulary // tensor_parallel)


def _around(collective: str, size: int, division: Division) -> tuple[Exchange, ...]:
    if division.tensor_parallel == 1:
        return ()
    return (Exchange(collective=collective, size_bytes=size),)


def _embedding(model: Transformer, division: Division) -> Block:
    tokens = division.micro_batch * model.sequence
    size = ELEMENT * tokens * model.hidden
    shared = division.tensor_parallel if division.sequence_parallel else 1
    rows = _padded_vocabulary(model, division.tensor_parallel)
    positions = model.sequence if model.learned_positions else 0
    kept = tokens * model.hidden // shared if model.dropout else 1
    collective = "reduce_scatter" if division.sequence_parallel else "all_reduce"
    gathered = "all_gather" if division.sequence_parallel else ""
    return Block(
        name="embedding",
        parameters=(rows + positions) * model.hidden,
        forward=Work(traffic=(2 * size, 2 * size // shared), exchanges=_around(collective, size, division)),
        backward_input=Work(
            traffic=(2 * size // shared,), exchanges=_around(gathered, size, division) if gathered else ()
        ),
        backward_weight=Work(traffic=(2 * size,)),
        saved_bytes=dict.fromkeys(("none", "selective", "full"), kept),
        output_bytes=size,
        recomputable=False,
    )


def _head(model: Transformer, division: Division) -> Block:
    """Last norm, product with the vocabulary, cross-entropy over logits that are divided by the vocabulary."""
    tokens, hidden = division.micro_batch * model.sequence, model.hidden
    size = ELEMENT * tokens * hidden
    shared = division.tensor_parallel if division.sequence_parallel else 1
    rows = _padded_vocabulary(model, division.tensor_parallel)
    logits = tokens * rows
    norm = hidden if model.rms_norm else 2 * hidden
    # The maximum, the sum of exponentials and the target's logit: a number a token each, in fp32.
    sums = _around("all_reduce", 4 * tokens, division) * 3
    before = _around("all_gather", size, division) if division.sequence_parallel else ()
    after = _around("reduce_scatter" if division.sequence_parallel else "all_reduce", size, division)
    weight_gradient = rows * hidden
    return Block(
        name="head",
        parameters=norm + (0 if model.tied_embeddings else weight_gradient),
        forward=Work(
            gemms=(Gemm(m=tokens, k=hidden, n=rows),),
            # to fp32; maximum; subtract and exponentiate; sum and divide
            traffic=(2 * size // shared, 6 * logits, 4 * logits, 8 * logits, 8 * logits),
            exchanges=before + sums,
        ),
        backward_input=Work(
            gemms=(Gemm(m=tokens, k=rows, n=hidden),),
            traffic=(8 * logits, 6 * logits, 3 * size // shared),
            exchanges=after,
        ),
        backward_weight=Work(
            gemms=(Gemm(m=hidden, k=tokens, n=rows),),
            traffic=((ELEMENT + 2 * division.gradient_bytes) * weight_gradient,),
        ),
        saved_bytes=dict.fromkeys(("none", "selective", "full"), 2 * size // shared + 4 * logits),
        output_bytes=4 * tokens,
        recomputable=False,
    )


class _Layer:
    """One layer's work, on one device of its tensor group."""

    def __init__(self, model: Transformer, division: Division):
        self.model = model
        self.division = division
        self.t = division.tensor_parallel
        self.shared = self.t if division.sequence_parallel else 1
        self.tokens = division.micro_batch * model.sequence
        self.size = ELEMENT * self.tokens * model.hidden
        self.scores = self.tokens * model.sequence * model.num_heads // self.t
        self.qkv = (model.hidden + 2 * model.kv_hidden) // self.t
        self.ffn = model.ffn // self.t
        self.inner = 2 if model.gated else 1  # products that make the inner activation
        # Each token goes to experts_per_token experts; with expert parallelism as many tokens arrive as leave.
        self.local_experts = model.num_experts // division.expert_parallel
        self.routed = self.tokens * (model.experts_per_token if model.moe else 1)

    def block(self) -> Block:
        model = self.model
        core_forward, core_backward = self._attention_core()
        forward = self._projections() + core_forward + self._mlp() + self._rest_forward()
        weight = self._weight_gradients()
        return Block(
            name="layer",
            parameters=self._shared_parameters(),
            expert_parameters=self._expert_parameters() if model.moe else 0,
            forward=forward + Work(exchanges=self._exchanges_forward()),
            backward_input=self._input_gradients()
            + core_backward
            + self._rest_backward()
            + Work(exchanges=self._exchanges_backward()),
            backward_weight=weight,
            selective=core_forward,
            saved_bytes=self._saved(),
            output_bytes=self.size,
        )

    def _expert_parameters(self) -> int:
        """The MLP's, of all experts on this device."""
        model = self.model
        biases = self.inner * self.ffn + model.hidden if model.biases else 0
        return self.local_experts * ((self.inner + 1) * model.hidden * self.ffn + biases)

    def _shared_parameters(self) -> int:
        model = self.model
        attention = model.hidden * self.qkv + model.hidden // self.t * model.hidden
        biases = self.qkv + model.hidden if model.biases else 0
        norms = 2 * (model.hidden if model.rms_norm else 2 * model.hidden)
        router = model.hidden * model.num_experts if model.moe else 0
        return attention + biases + norms + router + (0 if model.moe else self._expert_parameters())

    def _mlp_gemm(self, k: int, n: int) -> Gemm:
        rows = max(1, self.routed // self.local_experts)
        return Gemm(m=rows, k=k, n=n, batch=self.local_experts)

    def _projections(self) -> Work:
        hidden = self.model.hidden
        return Work(
            gemms=(
                Gemm(m=self.tokens, k=hidden, n=self.qkv),
                Gemm(m=self.tokens, k=hidden // self.t, n=hidden),
            )
        )

    def _mlp(self) -> Work:
        hidden = self.model.hidden
        gemms: tuple[Gemm, ...] = (
            self._mlp_gemm(hidden, self.inner * self.ffn),
            self._mlp_gemm(self.ffn, hidden),
        )
        if self.model.moe:
            gemms = (Gemm(m=self.tokens, k=hidden, n=self.model.num_experts), *gemms)
        return Work(gemms=gemms)

    def _attention_core(self) -> tuple[Work, Work]:
        """Scores, softmax, dropout and the product with the values; forward and backward."""
        model, sequence = self.model, self.model.sequence
        batch = self.division.micro_batch * model.num_heads // self.t
        seen = max(1, sequence // 2) if model.fused_attention else sequence
        inwards = Gemm(m=sequence, k=model.head_size, n=seen, batch=batch)
        outwards = Gemm(m=sequence, k=seen, n=model.head_size, batch=batch)
        if model.fused_attention:
            # The kernel's backward makes the scores again.
            return (
                Work(gemms=(inwards, outwards)),
                Work(gemms=(inwards, inwards, outwards, outwards, outwards)),
            )
        forward_traffic = [4 * self.scores]
        backward_traffic = [6 * self.scores]
        if model.dropout:  # the mask is a byte an element
            forward_traffic.append(5 * self.scores)
            backward_traffic.append(5 * self.scores)
        return (
            Work(gemms=(inwards, outwards), traffic=tuple(forward_traffic)),
            Work(gemms=(inwards, inwards, outwards, outwards), traffic=tuple(backward_traffic)),
        )

    def _rest_forward(self) -> Work:
        """Norms, bias + dropout + residual, the attention's transposition, the activation function."""
        own = self.size // self.shared
        mask = own // ELEMENT if self.model.dropout else 0
        inner = ELEMENT * self.routed * self.ffn
        add = 3 * own + mask
        return Work(traffic=(2 * own, 2 * own, add, add, 2 * self.size // self.t, (self.inner + 1) * inner))

    def _rest_backward(self) -> Work:
        own = self.size // self.shared
        mask = own // ELEMENT if self.model.dropout else 0
        inner = ELEMENT * self.routed * self.ffn
        return Work(
            traffic=(
                *(3 * own, 3 * own),  # norms
                *(2 * own + mask, 2 * own + mask),  # dropout
                *(3 * own, 3 * own),  # gradients of the two branches added
                2 * self.size // self.t,
                (2 * self.inner + 1) * inner,
            )
        )

    def _gemms_with_weights(self) -> tuple[Gemm, ...]:
        return self._projections().gemms + self._mlp().gemms

    def _input_gradients(self) -> Work:
        return Work(gemms=tuple(Gemm(m=g.m, k=g.n, n=g.k, batch=g.batch) for g in self._gemms_with_weights()))

    def _weight_gradients(self) -> Work:
        """The products, and adding each to the gradient accumulated so far."""
        gemms = self._gemms_with_weights()
        accumulate = ELEMENT + 2 * self.division.gradient_bytes
        return Work(
            gemms=tuple(Gemm(m=g.k, k=g.m, n=g.n, batch=g.batch) for g in gemms),
            traffic=tuple(accumulate * g.batch * g.k * g.n for g in gemms),
        )

    def _expert_exchanges(self) -> tuple[Exchange, ...]:
        """To the experts and back."""
        if not self.model.moe or self.division.expert_parallel == 1:
            return ()
        size = ELEMENT * self.routed * self.model.hidden // self.shared
        return (Exchange(collective="all_to_all", size_bytes=size, axis="expert"),) * 2

    def _exchanges_forward(self) -> tuple[Exchange, ...]:
        return self._tensor_exchanges() + self._expert_exchanges()

    def _exchanges_backward(self) -> tuple[Exchange, ...]:
        extra: tuple[Exchange, ...] = ()
        if self.division.sequence_parallel:
            # The input of the column-parallel products was kept divided, and is gathered again.
            extra = _around("all_gather", self.size, self.division) * 2
        return self._tensor_exchanges() + extra + self._expert_exchanges()

    def _tensor_exchanges(self) -> tuple[Exchange, ...]:
        if self.division.sequence_parallel:
            pair = _around("all_gather", self.size, self.division) + _around(
                "reduce_scatter", self.size, self.division
            )
            return pair * 2
        return _around("all_reduce", self.size, self.division) * 2

    def _saved(self) -> dict[str, int]:
        """arXiv 2205.05198, equations 1 to 4, with heads of keys, gates and experts as the model has them."""
        model, size = self.model, self.size
        masks = size // ELEMENT if model.dropout else 0
        outside = (2 * size + size + (0 if model.moe else size) + 2 * masks) // self.shared
        attention = ELEMENT * self.tokens * self.qkv + size // self.t
        inner = ELEMENT * self.routed * self.ffn * (self.inner + 1)
        routed_input = ELEMENT * self.routed * model.hidden if model.moe else 0
        if model.fused_attention:
            core = 4 * self.tokens * model.num_heads // self.t  # the logarithm of each row's sum
        else:
            core = (5 if model.dropout else 2) * self.scores
        selective = outside + attention + inner + routed_input
        return {"none": selective + core, "selective": selective, "full": size // self.shared}
