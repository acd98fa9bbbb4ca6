"""The matrix products of a training step alone: how fast a step would be if nothing else took time.

This file imports neither TensorFlow nor PyTorch: the process of a contestant gives the function that multiplies.
"""

from typing import NamedTuple


class Product(NamedTuple):
    """A batch of products of a factor a, `[rows, inner]`, and a factor b, `[inner, columns]`."""

    batch: int
    rows: int
    inner: int
    columns: int
    transposed: str = ""  # "a" or "b": this factor is stored transposed

    @property
    def factors(self):
        """The shapes of both factors, as they are stored."""
        a = [self.inner, self.rows] if self.transposed == "a" else [self.rows, self.inner]
        b = [self.columns, self.inner] if self.transposed == "b" else [self.inner, self.columns]
        return [self.batch, *a], [self.batch, *b]

    @property
    def operations(self):
        """Floating-point operations."""
        return 2 * self.batch * self.rows * self.inner * self.columns


def input_gradient(of):
    """The product that gives the gradient of the first factor of `of`."""
    return Product(of.batch, of.rows, of.columns, of.inner, "b")


def weight_gradient(of):
    """The product that gives the gradient of the second factor of `of`."""
    return Product(of.batch, of.inner, of.rows, of.columns, "a")


def with_gradients(forward):
    """Products of the forward pass, and the two of the backward pass for each of them."""
    return [product for of in forward for product in (of, input_gradient(of), weight_gradient(of))]


def products_of_layer(shape):
    """The products of a layer in a training step: of Transformer-XL or, with a `mem_len` of 0, of a GPT."""
    rows, tgt_len, mem_len, d_model = (shape[name] for name in ("batch_size", "tgt_len", "mem_len", "d_model"))
    n_head, d_head, d_inner = shape["n_head"], shape["d_head"], shape["d_inner"]
    tokens, klen, width = rows * tgt_len, mem_len + tgt_len, n_head * d_head
    products = with_gradients([
        Product(1, tokens, d_model, 3 * width),  # queries, keys and values of the segment
        Product(1, tokens, width, d_model),  # output
        Product(1, tokens, d_model, d_inner),
        Product(1, tokens, d_inner, d_model),
        Product(rows * n_head, tgt_len, d_head, klen, "b"),  # scores
        Product(rows * n_head, tgt_len, klen, d_head),  # values
    ])  # fmt: skip
    if mem_len:
        products += with_gradients([Product(n_head, tokens, d_head, klen, "b")])  # scores of positions
        for inputs in (Product(1, rows * mem_len, d_model, 2 * width), Product(1, klen, d_model, width)):
            products += [inputs, weight_gradient(inputs)]  # memory and positions are constants without a gradient
    return products


def products_of_softmax(shape):
    """The products of the softmax over `n_token` words in a training step."""
    return with_gradients([Product(1, shape["batch_size"] * shape["tgt_len"], shape["d_model"], shape["n_token"])])


def products_work(shape, make):
    """Returns a function that computes all products of a training step.

    Args:
        shape: sizes of the model and of the batch.
        make: function of a list of `Product` that returns a function that computes them.
    """
    layer, softmax = make(products_of_layer(shape)), make(products_of_softmax(shape))

    def step():
        for _ in range(shape["n_layer"]):
            layer()
        softmax()

    return step
