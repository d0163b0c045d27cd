"""The peer of `starling bench train`: the same GRPO step in torch, on the CPU.

Reads lines `full`, `lora` or `flat` and answers each with the seconds of one optimizer step on a fresh batch of that kind,
behind one that warmed up; begins with `ready`. The model has SmolLM2-135M's shape and random weights: time does not depend
on their values. Same maths: causal attention with rotation, RMSNorm, SwiGLU, tied embeddings, logits of trained tokens
only, PPO-clip over the mean of tokens, gradients clipped to a norm of 1, AdamW; all f32.

    python3 -m venv /tmp/torch && /tmp/torch/bin/pip install torch numpy
    target/release/starling bench train --torch /tmp/torch/bin/python
"""

import math
import sys
import time

import torch
import torch.nn.functional as F

HIDDEN, INNER, LAYERS, HEADS, KV, D, VOCAB, THETA = 576, 1536, 30, 9, 3, 64, 49152, 100_000.0
SHAPES = {"q": (HEADS * D, HIDDEN), "k": (KV * D, HIDDEN), "v": (KV * D, HIDDEN), "o": (HIDDEN, HEADS * D),
          "gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
RANK, ALPHA = 16, 32.0


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Model:
    def __init__(self, lora):
        torch.manual_seed(1)
        new = lambda shape, train: (torch.randn(shape) / math.sqrt(shape[-1])).requires_grad_(train)
        self.embed = (torch.randn(VOCAB, HIDDEN) * 0.02).requires_grad_(not lora)
        self.norms = [torch.ones(HIDDEN).requires_grad_(not lora) for _ in range(2 * LAYERS + 1)]
        self.layers = [{n: new(s, not lora) for n, s in SHAPES.items()} for _ in range(LAYERS)]
        self.a = [{n: new((RANK, s[1]), True) for n, s in SHAPES.items()} for _ in range(LAYERS)] if lora else None
        self.b = [{n: torch.zeros(s[0], RANK, requires_grad=True) for n, s in SHAPES.items()} for _ in range(LAYERS)] \
            if lora else None

    def parameters(self):
        if self.a:
            return [t for layer in self.a + self.b for t in layer.values()]
        return [self.embed, *self.norms, *(w for layer in self.layers for w in layer.values())]

    def linear(self, l, name, x):
        y = F.linear(x, self.layers[l][name])
        if self.a:
            y = y + F.linear(F.linear(x, self.a[l][name]), self.b[l][name]) * (ALPHA / RANK)
        return y

    def logits(self, tokens, wanted):
        batch, n = tokens.shape
        freq = 1.0 / THETA ** (torch.arange(0, D, 2) / D)
        angle = torch.arange(n)[:, None] * freq[None, :]
        cos, sin = angle.cos(), angle.sin()
        norm = lambda x, i: F.rms_norm(x, (HIDDEN,), self.norms[i], 1e-5)
        x = self.embed[tokens]
        for l in range(LAYERS):
            y = norm(x, 2 * l)
            q, k, v = (self.linear(l, m, y).view(batch, n, -1, D).transpose(1, 2) for m in "qkv")
            y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True,
                                               enable_gqa=True)
            x = x + self.linear(l, "o", y.transpose(1, 2).reshape(batch, n, -1))
            y = norm(x, 2 * l + 1)
            x = x + self.linear(l, "down", F.silu(self.linear(l, "gate", y)) * self.linear(l, "up", y))
        return F.linear(norm(x[:, :-1][wanted], 2 * LAYERS), self.embed)


class Trainer:
    def __init__(self, kind):
        self.model = Model(kind == "lora")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, betas=(0.9, 0.999), weight_decay=0.0)
        self.samples, self.prompt = (4, 192) if kind == "flat" else (8, 128)
        self.step()

    def step(self):
        samples, n = self.samples, 256
        prompt = torch.randint(VOCAB, (1, self.prompt)).expand(samples, -1)
        tokens = torch.cat([prompt, torch.randint(VOCAB, (samples, n - self.prompt))], 1)
        wanted = (torch.arange(1, n) >= self.prompt).expand(samples, -1)
        advantage = torch.tensor([1.0, -1.0]).repeat(samples // 2)[:, None].expand(-1, n - 1)[wanted]
        start = time.perf_counter()
        logits = self.model.logits(tokens, wanted)
        logprobs = -F.cross_entropy(logits, tokens[:, 1:][wanted], reduction="none")
        ratio = (logprobs + 5.5).clamp(-20, 20).exp()
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage).mean()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return time.perf_counter() - start


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    kind, trainer = None, None
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() != kind:
            kind, trainer = line.strip(), None  # one model at a time
            trainer = Trainer(kind)
        print(trainer.step(), flush=True)
