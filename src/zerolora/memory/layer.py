"""A transformer layer on the memory tracer: norms, attention, MLP, experts.

Variables have the same lifetime as in the model code, since it decides when a tensor is freed.
Sources: transformers/models/*/modeling_*.py, integrations/sdpa_attention.py.
"""

import math

from zerolora.model.attention_kernels import computes_scores, has_flash
from zerolora.model.fused_kernels import COPIES, GRADIENT_COPIES
from zerolora.model.projections import ExpertLayer, ForwardSpec, Projections, Trained
from zerolora.model.spec import ModelSpec, Module
from zerolora.model.tracer import Parameter, Value

# Types in routers, by model_type: modeling_<model_type>.py, the class whose name ends in Router.
FP32_ROUTERS = ("deepseek_v2", "deepseek_v3")
"""The router's input and weight are converted to fp32."""
FP32_WEIGHTS = ("mixtral", *FP32_ROUTERS)
"""The weights of a token's experts stay in fp32."""
NARROW_ROUTERS = ("gpt_oss", *FP32_ROUTERS)
"""Scores have the type of the router's input."""


class Layer(Projections):
    """One layer of a model."""

    def __init__(self, model: ModelSpec, step: ForwardSpec, trained: Trained) -> None:
        super().__init__(model, step, trained)
        # phi3 and gpt_neox concatenate the rotated part of each head with the rest, even if that is empty.
        self.joined = model.family == "phi3" or 0 < model.rotary < 1
        self.returned: Value | None = None
        """What the last layer returned beside its result."""

    def layer(self, hidden: Value, mask: Value | None, kind: int = 0) -> Value:
        """Attention and MLP with norms and residuals, in a layer of one kind."""
        self.become(kind)
        if self.model.parallel:
            normed = self.norm(hidden)
            attended = self.attention(normed, mask)
            if self.model.norms_per_layer > 1:
                normed = self.norm(hidden)
            return self.add(self.add(self.mlp(normed), attended), hidden)
        residual = hidden
        hidden = self.norm(hidden)
        hidden = self.attention(hidden, mask)
        if self.model.norms_per_layer > 2:
            hidden = self.norm(hidden)
        hidden = self.add(residual, hidden)
        residual = hidden
        hidden = self.norm(hidden)
        hidden = self.experts(hidden, self.mixture) if self.mixture else self.mlp(hidden)
        if self.model.hidden_dropout:
            hidden = self.dropped(hidden)
        if self.model.norms_per_layer > 2:
            hidden = self.norm(hidden)
        return self.add(residual, hidden)

    def norm(self, value: Value, size: int = 0) -> Value:
        """Trace layer norm as one kernel, or RMS norm as several operations in fp32.

        size: numbers that are normed together, by default the hidden width.
        """
        full = self.trained.trains_base
        if "norm" in self.step.kernels:
            return self.fused_norm(value, size or self.model.hidden)
        new, count, width = self.tracer.new, value.count, value.width
        if self.model.norm == "layer":
            weights = [self.of(self.trained_weight(self.model.hidden))] if full else []
            result = new(count, width)
            result.source = self.tracer.node(
                [value, *weights],
                [value, *weights] if value.needs_gradient or full else [],
                lambda gradient: [new(count, width), new(self.model.hidden, width)][: 1 + full],
            )
            return result
        in_fp32 = self.cast(value, 4)
        if self.model.norm == "rms_gemma":
            scaled = self.scaled_by_root(in_fp32)
            return self.cast(self.by_weight(scaled), width)
        in_fp32 = self.scaled_by_root(in_fp32)
        return self.by_weight(self.cast(in_fp32, width))

    def fused_norm(self, value: Value, size: int) -> Value:
        """Trace a norm's fused kernel, which saves its input and an fp32 number for each token or head; most kernels
        write the input's gradient over the output's (liger_kernel/ops/rms_norm.py)."""
        full = self.trained.trains_base
        new, count, width = self.tracer.new, value.count, value.width
        weights = [self.of(self.trained_weight(size))] if full else []
        copied = self.model.family in GRADIENT_COPIES
        result, roots = new(count, width), new(count / size, 4)

        def backward(gradient: Value) -> list[Value]:
            of_input = new(count, width) if copied else Value(gradient.storage, count, width, None)
            return [of_input, new(size, width)][: 1 + full]

        result.source = self.tracer.node([value, *weights], [value, roots, *weights], backward)
        return result

    def scaled_by_root(self, value: Value) -> Value:
        """x · rsqrt(mean(x²)): saves x once, and a number per token."""
        new, count = self.tracer.new, value.count
        square = new(count, 4)  # freed as soon as its mean is computed
        del square
        result = new(count, 4)

        def backward(gradient: Value) -> list[Value]:
            through = new(count, 4)
            product = new(count, 4)  # gradient · x, summed to the root's gradient
            del product
            spread, power = new(count, 4), new(count, 4)
            squared = new(count, 4)
            del spread, power
            total = new(count, 4)
            del through, squared
            return [total]

        result.source = self.tracer.node([value], [value], backward)
        return result

    def by_weight(self, value: Value) -> Value:
        """Trace the product with the norm's weight."""
        if not self.trained.trains_base:
            return self.unary(value)
        new, count, width = self.tracer.new, value.count, value.width
        weight = self.of(self.trained_weight(self.model.hidden))
        result = new(count, width)
        result.source = self.tracer.node(
            [value, weight], [value, weight], lambda gradient: [new(count, width), new(self.model.hidden, width)]
        )
        return result

    def attention(self, hidden: Value, mask: Value | None) -> Value:
        """Query, key and value projections, rotary embedding, attention, output projection."""
        model, step = self.model, self.step
        if model.latent:
            query, key, value = self.latent(hidden, *model.latent)
        else:
            query, key, value = self.projections(hidden)
            if model.qk_norm:
                query, key = self.norm(query, model.head_dim), self.norm(key, model.head_dim)
            if "rotary" in step.kernels:
                query, key = self.rotated_in_place(query), self.rotated_in_place(key)
            elif model.rotary:
                query, key = self.rotated(query), self.rotated(key)
        groups = model.heads / model.key_heads
        if step.attention == "eager":
            output = self.eager(query, self.repeat(key, groups), self.repeat(value, groups), mask)
        else:
            if self.repeats_heads(mask):
                key, value = self.repeat(key, groups), self.repeat(value, groups)
            output = self.shared(query, key, value) if step.exchanges else self.by_kernel(query, key, value, mask)
        del query, key, value
        if self.joined and step.attention != "eager" and "rotary" not in step.kernels:
            output = self.unary(output)  # laid out by heads, as the query is, so it is copied before the projection
        output = self.projection("o", output)
        return self.dropped(output) if model.hidden_dropout else output

    def by_kernel(self, query: Value, key: Value, value: Value, mask: Value | None) -> Value:
        """Trace attention as one kernel, or with all scores where no kernel takes these heads."""
        model, step = self.model, self.step
        if not model.fused_attention and step.attention != "flash":
            return self.unfused(query, key, value, mask)
        half, masked = query.width == 2, mask is not None
        if step.on_cpu or not computes_scores(model, step.attention, step.capability, half, masked):
            return self.fused(query, key, value, mask)
        return self.unfused(query, key, value, mask, model.heads / model.key_heads)

    def repeats_heads(self, mask: Value | None) -> bool:
        """Whether keys and values are repeated for all heads before the kernel: by transformers' sdpa for a mask, by
        this project's flash where no kernel takes groups of heads (train/attention.py)."""
        model, step = self.model, self.step
        if step.attention == "sdpa":
            return mask is not None and model.fused_attention
        return not step.on_cpu and not has_flash(model, "flash", step.capability, step.width == 2, False)

    def projections(self, hidden: Value) -> tuple[Value, Value, Value]:
        """Query, key and value, from one projection or three."""
        if "qkv" not in self.roles:
            return self.projection("q", hidden), self.projection("k", hidden), self.projection("v", hidden)
        model = self.model
        joined = self.projection("qkv", hidden)
        heads = model.heads + 2 * model.key_heads
        shares = (model.heads / heads, model.key_heads / heads, model.key_heads / heads)
        query, key, value = (self.slice(joined, share) for share in shares)
        return query, key, value

    def rotated(self, value: Value) -> Value:
        """x·cos + rotate_half(x)·sin."""
        product = self.unary(value)
        halves = self.slice(value, 0.5), self.slice(value, 0.5)
        turned = self.cat(self.unary(halves[1]), halves[0])
        result = self.add(product, self.unary(turned))
        if self.joined:
            del product, turned, halves
            result = self.unary(result)  # concatenated with the unrotated part
        return result

    def rotated_in_place(self, value: Value) -> Value:
        """Trace the fused rotation, which writes over its input, or over a copy of a part of a joined projection, and
        its gradient over that of its output (liger_kernel/ops/rope.py)."""
        count, width = value.count, value.width
        result = self.tracer.new(count, width) if self.model.family in COPIES else self.view(value)
        result.source = self.tracer.node([value], [], lambda gradient: [Value(gradient.storage, count, width, None)])
        return result

    def eager(self, query: Value, key: Value, value: Value, mask: Value | None) -> Value:
        """Scores, softmax in fp32, weighted sum."""
        count = self.step.rows * self.model.heads * self.step.length**2
        weights = self.unary(self.matmul(query, key, count))
        scores = weights if self.model.returns_weights else None
        if self.model.softcap_attention:
            weights = self.unary(self.unary(self.unary(weights), "output"))
        if mask:
            weights = self.unary(weights)
        if self.model.sinks:
            # Concatenated with the sinks; then the maximum is subtracted.
            weights = self.unary(self.unary(weights))
        weights = self.softmax(weights) if self.model.softmax_in_fp32 else self.narrow_softmax(weights)
        if self.model.sinks:
            weights = self.slice(weights, 1)
        if self.model.attention_dropout:
            weights = self.dropped(weights)
        if self.model.returns_weights:
            self.returned = weights
        output = self.matmul(weights, value, self.attended(query))
        del scores
        return self.unary(output)  # transposed into one piece

    def softmax(self, value: Value) -> Value:
        """softmax(x, dtype=fp32).to(x.dtype): saves its fp32 result. CUDA's kernel reads fp16, other inputs are
        converted first (aten/src/ATen/native/SoftMax.cpp, softmax)."""
        width = value.width
        converted = value if self.step.half and not self.step.on_cpu else self.cast(value, 4)
        result = self.narrow_softmax(converted, 4)
        del value, converted
        return self.cast(result, width)

    def narrow_softmax(self, value: Value, width: float = 0) -> Value:
        """softmax(x) in `width`, by default that of x: saves its result. In the backward pass CUDA's kernel multiplies
        gradient and result into a tensor of its own, the CPU's does not (aten/src/ATen/native/cuda/SoftMax.cu,
        softmax_backward_cuda_out)."""
        new, count, before = self.tracer.new, value.count, value.width
        width = width or before
        cuda = not self.step.on_cpu
        result = new(count, width)

        def backward(gradient: Value) -> list[Value]:
            temporary = new(count, width) if cuda else None
            values = [new(count, before)]
            del temporary
            return values

        result.source = self.tracer.node([value], [result], backward)
        return result

    def attended(self, query: Value) -> float:
        """Elements of attention's result."""
        model = self.model
        return self.tokens * model.heads * model.latent[2] if model.latent else query.count

    def latent(self, hidden: Value, plain: int, rotary: int, value_dim: int) -> tuple[Value, Value, Value]:
        """Query, key and value of multi-head latent attention (modeling_deepseek_v3.py, DeepseekV3Attention)."""
        if "q_a" in self.roles:
            query = self.projection("q_b", self.norm(self.projection("q_a", hidden)))
        else:
            query = self.projection("q", hidden)
        passed, turned = self.split(query, plain / (plain + rotary))
        del query
        compressed = self.projection("kv_a", hidden)
        share = 1 - self.tokens * rotary / compressed.count
        inner, key_turned = self.split(compressed, share)
        inner = self.norm(inner)
        turned, key_turned = self.rotated(turned), self.rotated(key_turned)
        query = self.cat(passed, turned)
        del passed, turned, compressed
        expanded = self.projection("kv_b", inner)
        key_passed, value = self.split(expanded, plain / (plain + value_dim))
        return query, self.shared_key(key_passed, key_turned), value

    def shared_key(self, passed: Value, turned: Value) -> Value:
        """Keys of all heads, assembled from a part per head and a shared part, each of which copies the whole gradient
        (torch/csrc/autograd/functions/tensor.cpp, CopySlices)."""
        new, width, heads = self.tracer.new, passed.width, self.model.heads
        own, shared = passed.count, turned.count
        count = own + shared * heads
        result = new(count, width)

        def backward(gradient: Value) -> list[Value]:
            first, part = new(count, width), new(shared * heads, width)
            values = new(shared, width)
            del part, gradient
            second = new(count, width)
            del first
            rest = new(own, width)
            del second
            return [rest, values]

        result.source = self.tracer.node([passed, turned], [], backward)
        return result

    def fused(self, query: Value, key: Value, value: Value, mask: Value | None) -> Value:
        """Trace fused attention, which saves its inputs, its result, a number per head and token, and a mask in the
        model's width."""
        new, step = self.tracer.new, self.step
        saved = [query, key, value]
        if mask:
            saved.append(new(step.rows * step.length**2, step.width))
        result = new(self.attended(query), query.width)
        saved += [result, new(step.rows * self.model.heads * step.length, 4)]
        shapes = [(each.count, each.width) for each in (query, key, value)]
        result.source = self.tracer.node(
            [query, key, value], saved, lambda gradient: [new(count, width) for count, width in shapes]
        )
        return result

    def shared(self, query: Value, key: Value, value: Value) -> Value:
        """Attention of rows that ranks share, between two exchanges (train/sequence_parallel.py): of all tokens for a
        rank's share of the heads, as many elements as its share of the tokens for all heads."""
        query, key, value = self.exchanged(query, key, value)
        output = self.by_kernel(query, key, value, None)
        del query, key, value
        (output,) = self.exchanged(output)
        return output

    def exchanged(self, *values: Value) -> list[Value]:
        """Values after an all-to-all in the group: allocates a buffer and the result, saves nothing."""
        new = self.tracer.new
        buffer = [new(each.count, each.width) for each in values]
        results = [self.unary(each) for each in values]
        del buffer
        return results

    def unfused(self, query: Value, key: Value, value: Value, mask: Value | None, groups: float = 1) -> Value:
        """sdpa's fallback: scores, softmax and weighted sum in fp32, with each head of keys and values repeated for its
        group of queries (aten/src/ATen/native/transformers/attention.cpp, _scaled_dot_product_attention_math)."""
        width, step = query.width, self.step
        # Ranks that share rows have a share of the heads, and all tokens.
        count = step.rows * self.model.heads * step.length**2 * (step.shared_by if step.exchanges else 1)
        returned = self.attended(query)
        query, key, value = self.cast(query, 4), self.cast(key, 4), self.cast(value, 4)
        key, value = self.repeat(key, groups), self.repeat(value, groups)
        scores = self.matmul(self.unary(query), self.unary(key), count)
        if mask:
            scores = self.unary(scores)
        weights = self.narrow_softmax(scores)
        del query, key, scores
        return self.cast(self.matmul(weights, value, returned), width)

    def mlp(self, hidden: Value) -> Value:
        """Up, activation, down, and the gate if there is one."""
        if "gate_up" in self.roles:
            joined = self.projection("gate_up", hidden)
            gate, up = self.slice(joined, 0.5), self.slice(joined, 0.5)
            fused = "mlp" in self.step.kernels
            up = self.fused_product(gate, up) if fused else self.mul(up, self.unary(gate, "input"))
            del gate, joined
            return self.projection("down", up)
        if "gate" in self.roles and "mlp" in self.step.kernels:
            product = self.fused_product(self.projection("gate", hidden), self.projection("up", hidden))
            return self.projection("down", product)
        if "gate" in self.roles:
            product = self.mul(self.unary(self.projection("gate", hidden), "input"), self.projection("up", hidden))
            return self.projection("down", product)
        return self.projection("down", self.activation(self.projection("up", hidden)))

    def fused_product(self, gate: Value, up: Value) -> Value:
        """Trace the activation of `gate` times `up` in one kernel. It saves both, or copies of the parts of a joined
        projection, and writes their gradients over them (liger_kernel/ops/swiglu.py, geglu.py)."""
        new, count, width = self.tracer.new, gate.count, gate.width
        saved = [new(count, width) if self.model.family in COPIES else each for each in (gate, up)]
        result = new(count, width)
        over = [each.storage for each in saved]

        def backward(gradient: Value) -> list[Value]:
            gradients = [Value(storage, count, width, None) for storage in over]
            over.clear()  # they are freed with the gradients
            return gradients

        result.source = self.tracer.node([gate, up], saved, backward)
        return result

    def activation(self, value: Value) -> Value:
        """Trace the activation as one kernel, or as the several of gelu_new."""
        if self.model.activation == "relu":
            return self.unary(value, "output")
        if self.model.activation != "gelu_new":
            return self.unary(value, "input")
        cube = self.unary(value, "input")
        inner = self.unary(self.add(value, self.unary(cube)))
        del cube
        return self.mul(self.unary(value), self.unary(self.unary(inner, "output")))

    def experts(self, hidden: Value, mixture: ExpertLayer) -> Value:
        """Trace the experts of each token, and the MLP that computes every token.

        Tokens are sorted by expert, so each product is one kernel over all experts, whatever the routing
        (transformers/integrations/moe.py, grouped_mm_experts_forward, the default on CUDA).
        """
        early = mixture.shared and "shared_gate" in self.roles
        beside = self.mlp(hidden) if early else None
        weights, indices = self.routed(hidden, mixture)
        result = self.grouped(hidden, weights, indices, mixture)
        del weights, indices
        if early and beside:
            gate = self.unary(self.projection("shared_gate", hidden), "output")
            beside = self.mul(gate, beside)
        elif mixture.shared:
            beside = self.mlp(hidden)
        return self.add(result, beside) if beside else result

    def routed(self, hidden: Value, mixture: ExpertLayer) -> tuple[Value, Value]:
        """Weights and indices of each token's experts."""
        model, new, tokens = self.model, self.tracer.new, self.tokens
        chosen = tokens * model.experts_per_token
        adapted = self.adapted(mixture.router, "weight") if mixture.router else None
        self.reach(mixture.router.path if mixture.router else "")
        if model.family in FP32_ROUTERS:
            hidden = self.cast(hidden, 4)
        scores = self.linear(hidden, model.hidden, model.experts, adapted)
        del hidden
        scores = self.cast(self.softmax(scores), 4) if model.family not in NARROW_ROUTERS else self.unary(scores)
        count, width = scores.count, scores.width
        weights = new(chosen, width)
        indices = new(chosen, 8)
        weights.source = self.tracer.node([scores], [indices], lambda gradient: [new(count, width)])
        return (weights if model.family in FP32_WEIGHTS else self.cast(weights, self.step.width)), indices

    def grouped(self, hidden: Value, weights: Value, indices: Value, mixture: ExpertLayer) -> Value:
        """Trace the experts' products, multiplied by the token's weights and added up."""
        model, new, width = self.model, self.tracer.new, hidden.width
        rows = self.tokens * model.experts_per_token
        self.reach(mixture.experts.path)
        order, back = new(2 * rows, 8), new(rows, 8)
        chosen = self.picked(hidden, rows * model.hidden, order)
        wide = mixture.shape("gate_up_proj") or mixture.shape("up_proj")
        inner = wide[1] if wide[2] == model.hidden else wide[2]  # gpt-oss stores transposed weights
        name = "gate_up_proj" if mixture.shape("gate_up_proj") else "up_proj"
        first, joined = self.expert_product(chosen, mixture, name, rows * inner)
        bias = new(joined.count, width) if mixture.shape(f"{name}_bias") else None
        product = self.gated(joined) if name == "gate_up_proj" else self.activation(joined)
        del joined, chosen, bias
        second, output = self.expert_product(product, mixture, "down_proj", rows * model.hidden)
        bias = new(output.count, width) if mixture.shape("down_proj_bias") else None
        del product
        weighted = self.mul(output, Value(weights.storage, weights.count, weights.width, weights.source))
        del output
        ordered = self.picked(weighted, weighted.count, back)
        del weighted
        count, wider = ordered.count, ordered.width
        total = new(self.tokens * model.hidden, wider)
        total.source = self.tracer.node([ordered], [], lambda gradient: [Value(gradient.storage, count, wider, None)])
        del ordered, first, second, bias
        return self.cast(total, width)

    def picked(self, value: Value, count: float, indices: Value) -> Value:
        """Trace a selection of rows by index; their gradients are added row by row."""
        new, before, width = self.tracer.new, value.count, value.width
        result = new(count, width)
        result.source = self.tracer.node([value], [indices], lambda gradient: [new(before, width)])
        return result

    def gated(self, joined: Value) -> Value:
        """Trace the activation of one half times the other half, or gpt-oss's gate (GptOssExperts._apply_gate)."""
        if self.model.family != "gpt_oss":
            gate, up = self.split(joined, 0.5)
            return self.mul(self.unary(gate, "input"), up)
        gate, up = self.slice(joined, 0.5), self.slice(joined, 0.5)
        gate, up = self.unary(gate, "input"), self.unary(up, "input")
        glu = self.mul(gate, self.unary(self.unary(gate), "output"))
        return self.mul(self.unary(up), glu)

    def expert_product(self, value: Value, mixture: ExpertLayer, name: str, count: float) -> tuple[Value | None, Value]:
        """Trace the adapter's copy of all experts' weights, and the product with them.

        The adapter adds its product to a copy of the whole parameter, which is saved for the backward pass; the
        gradient is as large (peft/tuners/lora/layer.py, _LoraFactorsProxy). The unpacked weights of 4-bit experts are
        such a copy, adapted or not (train/quantized_experts.py).
        """
        new, before, width = self.tracer.new, value.count, value.width
        size = math.prod(mixture.shape(name))
        weight = self.adapted(mixture.experts, name)
        if self.trained.trains_base:
            weight = self.trained_weight(size)
        if not weight:
            copy = new(size, self.step.width) if self.trained.unpacks_experts else None
            result = new(count, width)
            result.source = self.tracer.node([value], [copy] if copy else [], lambda gradient: [new(before, width)])
            return copy, result
        stands = self.of(weight)
        if not self.trained.trains_base:
            stands = new(size, width)
            factors = self.cast(self.of(weight), width)
            small = factors.count
            stands.source = self.tracer.node([factors], [factors], lambda gradient: [new(small, width)])
        result = new(count, width)
        result.source = self.tracer.node(
            [value, stands], [value, stands], lambda gradient: [new(before, width), new(size, width)]
        )
        return stands, result

    def adapted(self, module: Module, name: str) -> Parameter | None:
        """Both factors of a parameter's adapter; None without one."""
        r = self.ranks.get(f"{module.path}.{name}", 0)
        shape = dict(module.weights).get(name, ())
        if not r or not shape:
            return None
        *experts, outputs, inputs = shape
        return self.adapter_weight(r * math.prod(experts) * (inputs + outputs))
