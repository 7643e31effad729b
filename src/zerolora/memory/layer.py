"""A transformer layer on the memory tracer: norms, attention, MLP, experts.

Variables have the same lifetime as in the model code, which decides when a tensor is freed.
Sources: transformers/models/*/modeling_*.py, integrations/sdpa_attention.py.
"""

from zerolora.memory.model_spec import ModelSpec
from zerolora.memory.projections import ForwardSpec, Projections, Trained
from zerolora.memory.tracer import Value


class Layer(Projections):
    """One layer of a model; all layers are assumed to be equal."""

    def __init__(self, model: ModelSpec, step: ForwardSpec, trained: Trained) -> None:
        super().__init__(model, step, trained)
        # transformers' phi3 and gpt_neox rotate a part of each head, or all of it, and concatenate it with the rest.
        self.joined = model.family == "phi3" or 0 < model.rotary < 1

    def layer(self, hidden: Value, mask: Value | None) -> Value:
        """Attention and MLP with their norms and residuals."""
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
        hidden = self.experts(hidden) if self.model.experts else self.mlp(hidden)
        if self.model.hidden_dropout:
            hidden = self.dropped(hidden)
        if self.model.norms_per_layer > 2:
            hidden = self.norm(hidden)
        return self.add(residual, hidden)

    def norm(self, value: Value) -> Value:
        """Layer norm is one kernel; RMS norm several operations in fp32, with a copy for the weight."""
        full = self.trained.trains_base
        new, count, width = self.tracer.new, value.count, value.width
        if self.model.norm == "layer":
            saved = [value] if value.needs_gradient or full else []
            result = new(count, width)
            result.source = self.tracer.node(
                [value] if not full else [value, self.of(self.trained_weight(self.model.hidden))],
                saved,
                lambda gradient: [new(count, width), new(self.model.hidden, width)][: 1 + full],
            )
            return result
        in_fp32 = self.cast(value, 4)
        if self.model.norm == "rms_gemma":
            scaled = self.scaled_by_root(in_fp32)
            return self.cast(self.by_weight(scaled), width)
        in_fp32 = self.scaled_by_root(in_fp32)
        return self.by_weight(self.cast(in_fp32, width))

    def scaled_by_root(self, value: Value) -> Value:
        """x · rsqrt(mean(x²)): saves x once, and a number a token."""
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
        """Times the norm's weight."""
        if not self.trained.trains_base:
            return self.unary(value)
        new, count, width = self.tracer.new, value.count, value.width
        weight = self.of(self.trained_weight(self.model.hidden))
        result = new(count, width)
        result.source = self.tracer.node(
            [value, weight], [value], lambda gradient: [new(count, width), new(self.model.hidden, width)]
        )
        return result

    def attention(self, hidden: Value, mask: Value | None) -> Value:
        """Query, key and value projections, rotary embedding, attention, output projection."""
        model, step = self.model, self.step
        query, key, value = self.projections(hidden)
        if model.qk_norm:
            query, key = self.norm(query), self.norm(key)
        if model.rotary:
            query, key = self.rotated(query), self.rotated(key)
        groups = model.heads / model.key_heads
        if step.attention == "eager":
            output = self.eager(query, self.repeat(key, groups), self.repeat(value, groups), mask)
        else:
            if mask and step.attention == "sdpa":
                key, value = self.repeat(key, groups), self.repeat(value, groups)
            output = self.fused(query, key, value, mask)
        del query, key, value
        if self.joined and step.attention != "eager":
            output = self.unary(output)  # laid out by heads like its query, so that it is copied before it is projected
        output = self.projection("o", output)
        return self.dropped(output) if model.hidden_dropout else output

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
            result = self.unary(result)  # joined with the part that is not rotated
        return result

    def eager(self, query: Value, key: Value, value: Value, mask: Value | None) -> Value:
        """Scores, softmax in fp32, weighted sum."""
        count = self.step.rows * self.model.heads * self.step.length**2
        weights = self.unary(self.matmul(query, key, count))
        if self.model.softcap_attention:
            weights = self.unary(self.unary(self.unary(weights), "output"))
        if mask:
            weights = self.unary(weights)
        weights = self.softmax(weights)
        if self.model.attention_dropout:
            weights = self.dropped(weights)
        output = self.matmul(weights, value, query.count)
        return self.unary(output)  # transposed into one piece

    def softmax(self, value: Value) -> Value:
        """softmax(x, dtype=fp32).to(x.dtype): saves its fp32 result."""
        new, count, width = self.tracer.new, value.count, value.width
        result = new(count, 4)

        def backward(gradient: Value) -> list[Value]:
            return [new(count, width)]

        result.source = self.tracer.node([value], [result], backward)
        return self.cast(result, width)

    def fused(self, query: Value, key: Value, value: Value, mask: Value | None) -> Value:
        """One kernel: saves its inputs, its result and a number a head and token, and a mask in the model's width."""
        new, step = self.tracer.new, self.step
        saved = [query, key, value]
        if mask:
            saved.append(new(step.rows * step.length**2, step.width))
        result = new(query.count, query.width)
        saved += [result, new(step.rows * self.model.heads * step.length, 4)]
        shapes = [(each.count, each.width) for each in (query, key, value)]
        result.source = self.tracer.node(
            [query, key, value], saved, lambda gradient: [new(count, width) for count, width in shapes]
        )
        return result

    def mlp(self, hidden: Value) -> Value:
        """Up, activation, down, and the gate where there is one."""
        if "gate_up" in self.roles:
            joined = self.projection("gate_up", hidden)
            gate, up = self.slice(joined, 0.5), self.slice(joined, 0.5)
            up = self.mul(up, self.unary(gate, "input"))
            del gate, joined
            return self.projection("down", up)
        if "gate" in self.roles:
            product = self.mul(self.unary(self.projection("gate", hidden), "input"), self.projection("up", hidden))
            return self.projection("down", product)
        return self.projection("down", self.activation(self.projection("up", hidden)))

    def activation(self, value: Value) -> Value:
        """One kernel, or the several that gelu_new is written in."""
        if self.model.activation == "relu":
            return self.unary(value, "output")
        if self.model.activation != "gelu_new":
            return self.unary(value, "input")
        cube = self.unary(value, "input")
        inner = self.unary(self.add(value, self.unary(cube)))
        del cube
        return self.mul(self.unary(value), self.unary(self.unary(inner, "output")))

    def experts(self, hidden: Value) -> Value:
        """The experts of each token, gathered, computed and added up by weight."""
        model = self.model
        chosen = self.repeat(hidden, model.experts_per_token)
        joined = self.widened(chosen, 2 * model.inner)
        gate, up = self.slice(joined, 0.5), self.slice(joined, 0.5)
        product = self.mul(self.unary(gate, "input"), up)
        del gate, up, joined, chosen
        output = self.unary(self.widened(product, model.hidden), "input")
        del product
        return self.view(self.slice(output, 1 / model.experts_per_token))

    def widened(self, value: Value, outputs: int) -> Value:
        """A product of each token with its experts' weights, which are one parameter for all experts."""
        new, count, width = self.tracer.new, value.count, value.width
        rows = self.tokens * self.model.experts_per_token
        result = new(rows * outputs, width)
        weight = self.model.experts * outputs * count / rows
        if not self.trained.trains_base:
            result.source = self.tracer.node([value], [], lambda gradient: [new(count, width)])
            return result
        trained = self.of(self.trained_weight(weight))
        result.source = self.tracer.node(
            [value, trained], [value], lambda gradient: [new(count, width), new(weight, width)]
        )
        return result
