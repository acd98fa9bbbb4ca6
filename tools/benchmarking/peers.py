"""Language models of other libraries, in PyTorch and JAX, which train on as many tokens per step as ours.

    pip install -e ".[peers]"
    python tools/benchmark.py --mode=peers

All have the sizes of the shape, Adam, clipped gradients and the same number of threads. But the GPT has no memory. Its
segment is as long as segment and memory of the others together, so that a token sees as much text. Its batch has fewer
rows, so that a step has as many tokens (fewer, if the numbers cannot be divided evenly).

This file is also the program that runs in a contestant's process. It imports only the framework of this contestant.
"""

import os
import time

import numpy as np
from benchmarking.products import products_work
from benchmarking.turns import answer_requests, do_twice, turn
from benchmarking.work import Calls

from txl_config.errors import ParameterError

LEARNING_RATE = 1e-3
CLIP = 0.25
COMPILED = " compiled"


def random_segments(shape):
    """Random tokens, always the same, and as labels the tokens that follow: int64 `[batch, tgt_len]` each."""
    size = [shape["batch_size"], shape["tgt_len"] + 1]
    drawn = np.random.default_rng(0).integers(shape["n_token"], size=size)
    return drawn[:, :-1], drawn[:, 1:]


def without_memory(shape):
    """The shape of a model without memory: fewer rows, whose segments are as long as segment and memory of `shape`.

    Raises:
        ParameterError: the tokens of a step do not fill one such row.
    """
    tgt_len, batch_size = shape["tgt_len"], shape["batch_size"]
    context = tgt_len + shape["mem_len"]
    if batch_size * tgt_len < context:
        rows = -(-context // tgt_len)
        raise ParameterError(
            "batch_size", batch_size, f"at least {rows}, so that a step fills a row of {context} tokens"
        )
    return {**shape, "batch_size": batch_size * tgt_len // context, "tgt_len": context, "mem_len": 0}


def shape_of(name, shape):
    """The shape that a contestant of `PEERS` has for a shape of the benchmark: a GPT has no memory."""
    return without_memory(shape) if name.startswith("GPT") else shape


# ------------------------------------------------------------------------------------------------------------ PyTorch


def torch_work(shape, make, compiled=False, bfloat16=False):
    """Training of a PyTorch model. Returns the work and the model's number of weights.

    Args:
        shape: sizes of the model and of the batch.
        make: function of a shape that returns a module. The module maps tokens, labels `[batch, tgt_len]` and the
            memory of the last segment (at first `None`) to the loss and the new memory.
        compiled: whether `torch.compile` compiles the module.
        bfloat16: whether products are computed in bfloat16, by `torch.autocast`.
    """
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    torch.manual_seed(0)
    model = make(shape).train()
    loss_of = torch.compile(model) if compiled else model
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE, fused=True)
    tokens, labels = map(torch.from_numpy, random_segments(shape))
    memory = None

    def step():
        nonlocal memory
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            loss, memory = loss_of(tokens, labels, memory)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return loss.item()

    return Calls(step), sum(weight.numel() for weight in model.parameters())


def gpt(shape):
    """A GPT of nanoGPT's shape: learned positions, layer norm before each part, GELU, tied softmax, no biases.

    The heads together are as wide as the model, whatever `shape["d_head"]` is.
    """
    from torch import nn
    from torch.nn import functional as F

    d_model, n_head, dropout = shape["d_model"], shape["n_head"], shape["dropout"]

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(d_model, bias=False) for _ in range(2))
            self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
            self.output = nn.Linear(d_model, d_model, bias=False)
            self.inner = nn.Linear(d_model, shape["d_inner"], bias=False)
            self.outer = nn.Linear(shape["d_inner"], d_model, bias=False)
            self.dropout = nn.Dropout(dropout)

        def forward(self, x):
            projected = self.qkv(self.norms[0](x)).chunk(3, -1)  # queries, keys, values: [batch, tgt_len, d_model] each
            q, k, v = (part.unflatten(-1, (n_head, -1)).transpose(1, 2) for part in projected)  # [batch, head, ...]
            attended = F.scaled_dot_product_attention(q, k, v, dropout_p=shape["dropatt"], is_causal=True)
            x = x + self.dropout(self.output(attended.transpose(1, 2).flatten(2)))
            return x + self.dropout(self.outer(F.gelu(self.inner(self.norms[1](x)))))

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(shape["n_token"], d_model)
            self.positions = nn.Embedding(shape["tgt_len"], d_model)
            self.blocks = nn.ModuleList(Block() for _ in range(shape["n_layer"]))
            self.norm = nn.LayerNorm(d_model, bias=False)
            for weight in self.parameters():
                if weight.ndim > 1:
                    nn.init.normal_(weight, std=0.02)

        def forward(self, tokens, labels, memory):
            x = F.dropout(self.tokens(tokens) + self.positions.weight, dropout, self.training)
            for block in self.blocks:
                x = block(x)
            logits = self.norm(x) @ self.tokens.weight.T
            return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()), memory

    return GPT()


def x_transformers(shape):
    """A model of x-transformers like Transformer-XL: memory, rotary positions, flash attention."""
    from torch import nn
    from torch.nn import functional as F
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(
        dim=shape["d_model"],
        depth=shape["n_layer"],
        heads=shape["n_head"],
        attn_dim_head=shape["d_head"],
        ff_mult=shape["d_inner"] / shape["d_model"],
        ff_dropout=shape["dropout"],
        attn_dropout=shape["dropatt"],
        attn_flash=True,
        rotary_pos_emb=True,
    )

    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = TransformerWrapper(
                num_tokens=shape["n_token"],
                max_seq_len=shape["tgt_len"],
                max_mem_len=shape["mem_len"],
                use_abs_pos_emb=False,
                emb_dropout=shape["dropout"],
                tie_embedding=True,
                attn_layers=layers,
            )

        def forward(self, tokens, labels, memory):
            logits, memory = self.network(tokens, mems=memory, return_mems=True)
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
            return loss, [layer.detach() for layer in memory]

    return WithLoss()


def multiplier(bfloat16):
    """Returns a function for the argument `make` of `products_work`, which multiplies with PyTorch."""
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    dtype = torch.bfloat16 if bfloat16 else torch.float32

    def make(products):
        pairs = []
        for product in products:
            a, b = (torch.randn(size, dtype=dtype) for size in product.factors)
            pairs.append((a.mT if product.transposed == "a" else a, b.mT if product.transposed == "b" else b))

        def multiply():
            for a, b in pairs:
                torch.matmul(a, b)

        return multiply

    return make


# ---------------------------------------------------------------------------------------------------------------- JAX


def jax_work(shape):
    """Training of the paper's Transformer-XL in plain JAX, compiled. Returns the work and the number of weights."""
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_prng_impl", "rbg")  # twice as fast as the default here
    rows, tgt_len, mem_len, d_model = (shape[name] for name in ("batch_size", "tgt_len", "mem_len", "d_model"))
    n_head, d_head, dropout = shape["n_head"], shape["d_head"], shape["dropout"]
    klen = mem_len + tgt_len
    sizes = {
        "qkv": [d_model, 3 * n_head * d_head], "positions": [d_model, n_head * d_head],
        "output": [n_head * d_head, d_model],
        "inner": [d_model, shape["d_inner"]], "outer": [shape["d_inner"], d_model],
    }  # fmt: skip
    n_drawn = 3 + shape["n_layer"] * len(sizes)  # embedding, u and v; and the kernels of each layer
    weight_keys = iter(jax.random.split(jax.random.key(0), n_drawn))

    def normal(size):
        return 0.02 * jax.random.normal(next(weight_keys), size)

    def layer_weights():
        vectors = {"inner_bias": shape["d_inner"], "outer_bias": d_model, "beta_1": d_model, "beta_2": d_model}
        ones = {"gamma_1": jnp.ones(d_model), "gamma_2": jnp.ones(d_model)}
        return (
            {name: normal(size) for name, size in sizes.items()} | {k: jnp.zeros(n) for k, n in vectors.items()} | ones
        )

    weights = {
        "embedding": normal([shape["n_token"], d_model]), "u": normal([n_head, d_head]), "v": normal([n_head, d_head]),
        "bias": jnp.zeros(shape["n_token"]), "layers": [layer_weights() for _ in range(shape["n_layer"])],
    }  # fmt: skip
    angles = np.arange(klen - 1, -1, -1)[:, None] / 10000 ** (np.arange(0, d_model, 2) / d_model)
    distances = jnp.asarray(np.concatenate([np.sin(angles), np.cos(angles)], -1), jnp.float32)  # [klen, d_model]
    is_future = jnp.arange(klen) > jnp.arange(tgt_len)[:, None] + mem_len

    def norm(x, gamma, beta):
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * gamma + beta

    def drop(x, key):
        return x * jax.random.bernoulli(key, 1 - dropout, x.shape) / (1 - dropout)

    def layer(x, memory, weights, u, v, dropout_keys):
        context = jnp.concatenate([memory, x], 1)  # [batch, klen, d_model]
        query, key, value = jnp.split((context @ weights["qkv"]).reshape(rows, klen, 3, n_head, d_head), 3, 2)
        query, key, value = query[:, mem_len:, 0], key[:, :, 0], value[:, :, 0]  # [batch, ..., n_head, d_head]
        positions = (drop(distances, dropout_keys[0]) @ weights["positions"]).reshape(klen, n_head, d_head)
        scores = jnp.einsum("bind,bjnd->bnij", query + u, key)
        # The scores by distance, and the shift of the original program, which moves each to its key:
        by_distance = jnp.einsum("bind,jnd->bnij", query + v, positions)
        padded = jnp.pad(by_distance, [(0, 0)] * 3 + [(1, 0)])
        shifted = padded.reshape(rows, n_head, klen + 1, tgt_len)[:, :, 1:].reshape(rows, n_head, tgt_len, klen)
        scores = (scores + shifted) / d_head**0.5
        probs = jax.nn.softmax(jnp.where(is_future, -1e30, scores))
        attended = jnp.einsum("bnij,bjnd->bind", probs, value).reshape(rows, tgt_len, -1)
        x = norm(x + drop(attended @ weights["output"], dropout_keys[1]), weights["gamma_1"], weights["beta_1"])
        inner = drop(jax.nn.relu(x @ weights["inner"] + weights["inner_bias"]), dropout_keys[2])
        outer = drop(inner @ weights["outer"] + weights["outer_bias"], dropout_keys[3])
        return norm(x + outer, weights["gamma_2"], weights["beta_2"])

    def loss_of(weights, tokens, labels, memory, key):
        dropout_keys = jax.random.split(key, (shape["n_layer"] + 1, 4))
        x = drop(weights["embedding"][tokens] * d_model**0.5, dropout_keys[-1, 0])
        memories = []
        for i, of_layer in enumerate(weights["layers"]):
            memories.append(jnp.concatenate([memory[i], jax.lax.stop_gradient(x)], 1)[:, -mem_len:])
            x = layer(x, memory[i], of_layer, weights["u"], weights["v"], dropout_keys[i])
        log_probs = jax.nn.log_softmax(drop(x, dropout_keys[-1, 1]) @ weights["embedding"].T + weights["bias"])
        return -jnp.take_along_axis(log_probs, labels[..., None], -1).mean(), memories

    def step(state, tokens, labels):
        weights, first, second, memory, count, key = state  # first and second: the moments of Adam
        key, own_key = jax.random.split(key)
        (loss, memory), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights, tokens, labels, memory, own_key)
        norm_of_all = sum((gradient**2).sum() for gradient in jax.tree.leaves(gradients)) ** 0.5
        gradients = jax.tree.map(lambda gradient: gradient * jnp.minimum(1, CLIP / norm_of_all), gradients)
        count += 1
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, gradients)
        rate = LEARNING_RATE * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
        weights = jax.tree.map(lambda w, m, v: w - rate * m / (jnp.sqrt(v) + 1e-8), weights, first, second)
        return (weights, first, second, memory, count, key), loss

    zeros = jax.tree.map(jnp.zeros_like, weights)
    memory = [jnp.zeros([rows, mem_len, d_model]) for _ in range(shape["n_layer"])]
    state = (weights, zeros, jax.tree.map(jnp.zeros_like, weights), memory, jnp.zeros(()), jax.random.key(1))
    tokens, labels = (jnp.asarray(ids, jnp.int32) for ids in random_segments(shape))
    compiled = jax.jit(step, donate_argnums=0)

    def call():
        nonlocal state
        state, loss = compiled(state, tokens, labels)
        return loss.item()

    return Calls(call), sum(weight.size for weight in jax.tree.leaves(weights))


# ------------------------------------------------------------------------------------------------------- the process


def make_work(name, shape):
    """Makes a contestant of `PEERS`. Returns its work and its number of weights."""
    kind, _, options = name.partition(" ")
    if kind == "JAX":
        return jax_work(shape)
    settings = {"compiled": "compiled" in options, "bfloat16": "bfloat16" in options}
    shape = shape_of(name, shape)
    if kind in PRODUCTS:
        return Calls(products_work(shape, multiplier(settings["bfloat16"]))), 0
    return torch_work(shape, gpt if kind == "GPT" else x_transformers, **settings)


# The matrix products of a step alone, by PyTorch: those of the library's model, and those of the GPT.
PRODUCTS = ("PyTorch-products", "GPT-products")
PEERS = tuple(
    f"{kind} {precision}{compiled}"
    for precision in ("float32", "bfloat16")
    for kind in ("x-transformers", "GPT")
    for compiled in ("", COMPILED)
) + ("JAX float32", *(f"{kind} {precision}" for precision in ("float32", "bfloat16") for kind in PRODUCTS))


def begin(mode, name, shape, jit=False, run=None):
    """Makes a contestant and does its work twice, which compiles it. Returns a dict of figures.

    `mode`, `jit` and `run` have no effect: the task `begin` of all processes has the same arguments.
    """
    started = time.perf_counter()
    work, weights = make_work(name, shape)
    built = time.perf_counter()
    computed = shape_of(name, shape)
    first = do_twice(work, computed["batch_size"] * computed["tgt_len"])
    return {"build_seconds": built - started, "first_step_seconds": first, "weights": weights}


if __name__ == "__main__":
    answer_requests(begin, turn)
