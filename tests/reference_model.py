"""Transformer-XL as the original's TensorFlow 1 code writes it: oracle of the tests and speed baseline.

A plain port, for reading next to the original's code: the same functions, the same einsums, time-major
tensors, nothing cached, nothing fused. What TF1 hid in variable scopes is explicit here: functions take
`weights`, a dict {variable name of the original: tf.Variable}, and `scope`, the prefix under which they find
theirs. Nothing in this file knows about `txl_tf`. `reference_model_test.py` holds it to numbers computed by
the original program.

    model = ReferenceModel(n_token=256, n_layer=6, d_model=256, ..., mem_len=128)
    mems = model.initial_mems(batch=8)
    nll, mems = model.nll(inputs, labels, mems)
    model.compile(learning_rate=2.5e-4, train_steps=100_000)
    loss, grad_norm, learning_rate, mems = model.train_step(inputs, labels, mems)

Shapes, by the letters used in the einsums:
    i    position in the segment, query     tgt_len, qlen
    j    position among the keys            klen = mem_len + tgt_len (memory first, then the segment)
    b    row of the batch                   batch, bsz
    n    attention head                     n_head (in softmax einsums: word of a bin)
    d    width of the model, or of a head   d_model, d_head
    e    width of a word's embedding        d_embed; in bin k of the vocabulary d_embed // div_val**k
    inputs, labels  [i, b]     hidden, w  [i, b, d_model]     mems  n_layer times [mem_len, b, d_model]
    r (positions)   [j, 1, d_model]       attn_mask  [i, j], 1 = hidden       attn_score  [i, j, b, n]
"""

import itertools
import math

import numpy as np
import tensorflow as tf

EPSILON = 1e-12  # of layer norm, as in tf.contrib; layer_norm_epsilon_test.py sets another
FLOAT = tf.float32  # dtypes_test.py sets float64


def positional_embedding(pos_seq, inv_freq, bsz=None):
    """Sinusoids, all sines before all cosines: [j], [d_model / 2] -> [j, 1 or bsz, d_model]."""
    sinusoid_inp = tf.einsum("i,j->ij", pos_seq, inv_freq)
    pos_emb = tf.concat([tf.sin(sinusoid_inp), tf.cos(sinusoid_inp)], -1)
    if bsz is not None:
        return tf.tile(pos_emb[:, None, :], [1, bsz, 1])
    return pos_emb[:, None, :]


def rel_shift(x):
    """Shifts row i of x [i, j, b, n] left by qlen - 1 - i: from column = distance to column = key.

        columns: distance 2 1 0        columns: key 0 1 2        (qlen 2, mlen 1)
            [a2, a1, a0]         ->       [a1, a0,  0]
            [b2, b1, b0]                  [b2, b1, b0]

    What the shift brings in on the right belongs to keys after the query; the mask removes it.
    """
    x_size = tf.shape(x)
    x = tf.pad(x, [[0, 0], [1, 0], [0, 0], [0, 0]])
    x = tf.reshape(x, [x_size[1] + 1, x_size[0], x_size[2], x_size[3]])
    x = tf.slice(x, [1, 0, 0, 0], [-1, -1, -1, -1])
    return tf.reshape(x, x_size)


def create_mask(qlen, mlen, same_length=False):
    """Mask [qlen, mlen + qlen], 1 where the query must not look.

    That is at the keys after it and, with same_length, at those more than mlen before it.
    """
    attn_mask = tf.ones([qlen, qlen], FLOAT)
    mask_u = tf.linalg.band_part(attn_mask, 0, -1)
    mask_dia = tf.linalg.band_part(attn_mask, 0, 0)
    attn_mask_pad = tf.zeros([qlen, mlen], FLOAT)
    ret = tf.concat([attn_mask_pad, mask_u - mask_dia], 1)
    if same_length:
        mask_l = tf.linalg.band_part(attn_mask, -1, 0)
        ret = tf.concat([ret[:, :qlen] + mask_l - mask_dia, ret[:, qlen:]], 1)
    return ret


def layer_norm(x, weights, scope):
    """tf.contrib.layers.layer_norm over the last axis."""
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return tf.nn.batch_normalization(
        x,
        mean,
        variance,
        offset=weights[f"{scope}/LayerNorm/beta"],
        scale=weights[f"{scope}/LayerNorm/gamma"],
        variance_epsilon=EPSILON,
    )


def dropout(x, rate, is_training):
    """tf.layers.dropout."""
    if not is_training or rate == 0:
        return x
    return tf.nn.dropout(x, rate)


def dense(x, weights, scope, use_bias=True):
    """tf.layers.dense on the last axis."""
    y = tf.tensordot(x, weights[f"{scope}/kernel"], 1)
    return y + weights[f"{scope}/bias"] if use_bias else y


def rel_multihead_attn(
    w,
    r,
    r_w_bias,
    r_r_bias,
    attn_mask,
    mems,
    n_head,
    d_head,
    dropout_rate,
    dropatt,
    is_training,
    weights,
    scope,
    pre_lnorm=False,
):
    """Relative attention with its residual and layer norm: [i, b, d_model] -> the same.

    pre_lnorm is that of the original's PyTorch program.

    w is the segment, mems [mem_len, b, d_model] its memory, r [j, 1, d_model] the embedded distances
    klen - 1 ... 0; r_w_bias and r_r_bias [n, d_head] are the paper's u and v.
    """
    scale = 1 / (d_head**0.5)
    qlen = tf.shape(w)[0]
    rlen = tf.shape(r)[0]
    bsz = tf.shape(w)[1]

    # As in the original, the whole memory is projected for every segment, queries included (then dropped).
    cat = tf.concat([mems, w], 0) if mems is not None else w
    if pre_lnorm:
        cat = layer_norm(cat, weights, scope)
    w_heads = dense(cat, weights, f"{scope}/qkv", use_bias=False)  # [j, b, 3 * n * d_head]
    r_head_k = dense(r, weights, f"{scope}/r", use_bias=False)  # [j, 1, n * d_head]

    w_head_q, w_head_k, w_head_v = tf.split(w_heads, 3, -1)
    w_head_q = w_head_q[-qlen:]
    klen = tf.shape(w_head_k)[0]
    w_head_q = tf.reshape(w_head_q, [qlen, bsz, n_head, d_head])
    w_head_k = tf.reshape(w_head_k, [klen, bsz, n_head, d_head])
    w_head_v = tf.reshape(w_head_v, [klen, bsz, n_head, d_head])
    r_head_k = tf.reshape(r_head_k, [rlen, n_head, d_head])

    rw_head_q = w_head_q + r_w_bias
    rr_head_q = w_head_q + r_r_bias

    AC = tf.einsum("ibnd,jbnd->ijbn", rw_head_q, w_head_k)  # terms (a) + (c): content
    BD = tf.einsum("ibnd,jnd->ijbn", rr_head_q, r_head_k)  # terms (b) + (d): distance
    BD = rel_shift(BD)

    attn_score = (AC + BD) * scale
    attn_mask_t = attn_mask[:, :, None, None]
    attn_score = attn_score * (1 - attn_mask_t) - 1e30 * attn_mask_t

    attn_prob = tf.nn.softmax(attn_score, 1)  # over the keys
    attn_prob = dropout(attn_prob, dropatt, is_training)

    attn_vec = tf.einsum("ijbn,jbnd->ibnd", attn_prob, w_head_v)
    attn_vec = tf.reshape(attn_vec, [qlen, bsz, n_head * d_head])

    attn_out = dense(attn_vec, weights, f"{scope}/o", use_bias=False)
    attn_out = dropout(attn_out, dropout_rate, is_training)
    if pre_lnorm:
        return attn_out + w
    return layer_norm(attn_out + w, weights, scope)


def positionwise_ff(inp, dropout_rate, is_training, weights, scope, pre_lnorm=False):
    """Two dense layers with their residual and layer norm: [i, b, d_model] -> the same."""
    core = layer_norm(inp, weights, scope) if pre_lnorm else inp
    output = tf.nn.relu(dense(core, weights, f"{scope}/layer_1"))
    output = dropout(output, dropout_rate, is_training)
    output = dense(output, weights, f"{scope}/layer_2")
    output = dropout(output, dropout_rate, is_training)
    if pre_lnorm:
        return output + inp
    return layer_norm(output + inp, weights, scope)


def mask_adaptive_embedding_lookup(x, n_token, d_proj, cutoffs, div_val, weights, scope):
    """Word embeddings times sqrt(d_proj): x [i, b] -> [i, b, d_proj].

    With div_val > 1 the bins of rarer words have narrower tables, each projected to d_proj.
    """
    if div_val == 1:
        y = tf.nn.embedding_lookup(weights[f"{scope}/lookup_table"], x)
        if f"{scope}/proj_W" in weights:
            y = tf.einsum("ibe,ed->ibd", y, weights[f"{scope}/proj_W"])
    else:
        cutoff_ends = [0, *cutoffs, n_token]
        x_size = tf.shape(x)
        y = tf.zeros([x_size[0], x_size[1], d_proj], FLOAT)
        for i in range(len(cutoff_ends) - 1):
            l_idx, r_idx = cutoff_ends[i], cutoff_ends[i + 1]
            mask = (x >= l_idx) & (x < r_idx)
            cur_x = tf.boolean_mask(x, mask) - l_idx  # [words of this bin], ids within the bin
            cur_y = tf.nn.embedding_lookup(weights[f"{scope}/cutoff_{i}/lookup_table"], cur_x)
            if f"{scope}/cutoff_{i}/proj_W" in weights:
                cur_y = tf.einsum("id,de->ie", cur_y, weights[f"{scope}/cutoff_{i}/proj_W"])
            y += tf.scatter_nd(tf.where(mask), cur_y, tf.shape(y, out_type=tf.int64))
    return y * d_proj**0.5


def _logit(x, W, b, proj):
    """x [i, b, d_proj] -> [i, b, n], through proj [e, d_proj] (None: e is d_proj) and W [n, e]."""
    if proj is not None:
        x = tf.einsum("ibd,ed->ibe", x, proj)
    return tf.einsum("ibd,nd->ibn", x, W) + b


def _softmax_bins(n_token, cutoffs, div_val, tie_projs, weights, scope, embed_scope):
    """The parameters (W [words, e], b [words], proj [e, d_proj] or None) of every bin of the vocabulary.

    Words share their vectors with the embedding. The first bin, the head, has one more row per later bin, its
    cluster: that of bin i > 0 is row cutoffs[0] + i - 1.
    """
    cutoff_ends = [0, *cutoffs, n_token]
    bins = []
    for i in range(len(cutoff_ends) - 1):
        if div_val == 1:
            W = weights[f"{embed_scope}/lookup_table"][cutoff_ends[i] : cutoff_ends[i + 1]]
            tied_proj = weights.get(f"{embed_scope}/proj_W")
        else:
            W = weights[f"{embed_scope}/cutoff_{i}/lookup_table"]
            tied_proj = weights.get(f"{embed_scope}/cutoff_{i}/proj_W")
        b = weights[f"{scope}/cutoff_{i}/b"]
        proj = tied_proj if tie_projs[i] else weights.get(f"{scope}/cutoff_{i}/proj")
        if i == 0:
            W = tf.concat([W, weights[f"{scope}/cutoff_0/cluster_W"]], 0)
            b = tf.concat([b, weights[f"{scope}/cutoff_0/cluster_b"]], 0)
        bins.append((W, b, proj))
    return bins


def _gather_logprob(logprob, target):
    """logprob [words, n], target [words] -> [words]."""
    r = tf.range(tf.shape(logprob, out_type=target.dtype)[0])
    return tf.gather_nd(logprob, tf.stack([r, target], 1))


def mask_adaptive_logsoftmax(
    hidden,
    target,
    n_token,
    cutoffs,
    div_val,
    tie_projs,
    weights,
    scope,
    embed_scope="transformer/adaptive_embed",
):
    """Negative log-likelihood in nats of every target, in its place: [i, b, d_model], [i, b] -> [i, b]."""
    if not cutoffs:
        output = _logit(
            hidden,
            weights[f"{embed_scope}/lookup_table"],
            weights[f"{scope}/bias"],
            weights.get(f"{embed_scope}/proj_W"),
        )
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=target, logits=output)

    bins = _softmax_bins(n_token, cutoffs, div_val, tie_projs, weights, scope, embed_scope)
    cutoff_ends = [0, *cutoffs, n_token]
    nll = tf.zeros_like(target, dtype=FLOAT)
    for i, (cur_W, cur_b, cur_proj) in enumerate(bins):
        l_idx, r_idx = cutoff_ends[i], cutoff_ends[i + 1]
        mask = (target >= l_idx) & (target < r_idx)
        cur_target = tf.boolean_mask(target, mask) - l_idx
        if i == 0:
            head_logprob = tf.nn.log_softmax(_logit(hidden, cur_W, cur_b, cur_proj))
            cur_logprob = _gather_logprob(tf.boolean_mask(head_logprob, mask), cur_target)
        else:
            cur_head_logprob = tf.boolean_mask(head_logprob, mask)
            cur_hidden = tf.boolean_mask(hidden, mask)
            tail_logit = tf.squeeze(_logit(cur_hidden[None], cur_W, cur_b, cur_proj), 0)
            tail_logprob = tf.nn.log_softmax(tail_logit)
            cluster = cutoff_ends[1] + i - 1
            cur_logprob = cur_head_logprob[:, cluster] + _gather_logprob(tail_logprob, cur_target)
        nll += tf.scatter_nd(tf.where(mask), -cur_logprob, tf.shape(nll, out_type=tf.int64))
    return nll


def full_log_probs(
    hidden, n_token, cutoffs, div_val, tie_projs, weights, scope, embed_scope="transformer/adaptive_embed"
):
    """Log-probability of every word, in vocabulary order: [i, b, d_model] -> [i, b, n_token].

    The original has no such function. log p(word) is the head's for a word of the first bin, else the head's
    for the word's cluster plus the bin's own for the word.
    """
    if not cutoffs:
        table, proj = weights[f"{embed_scope}/lookup_table"], weights.get(f"{embed_scope}/proj_W")
        return tf.nn.log_softmax(_logit(hidden, table, weights[f"{scope}/bias"], proj))

    head, *tails = _softmax_bins(n_token, cutoffs, div_val, tie_projs, weights, scope, embed_scope)
    head_logprob = tf.nn.log_softmax(_logit(hidden, *head))
    n_head_words = cutoffs[0]
    logprobs = [head_logprob[:, :, :n_head_words]]
    for k, tail in enumerate(tails):
        cluster_logprob = head_logprob[:, :, n_head_words + k, None]
        logprobs.append(cluster_logprob + tf.nn.log_softmax(_logit(hidden, *tail)))
    return tf.concat(logprobs, -1)


def cache_mem(curr_out, prev_mem, mem_len):
    """The last mem_len positions of memory and segment, with no gradient; mem_len 0 keeps prev_mem."""
    if mem_len == 0:
        return prev_mem
    return tf.stop_gradient(tf.concat([prev_mem, curr_out], 0)[-mem_len:])


def transformer(
    dec_inp,
    mems,
    n_token,
    n_layer,
    d_model,
    n_head,
    d_head,
    dropout_rate,
    dropatt,
    is_training,
    mem_len,
    cutoffs,
    div_val,
    same_length,
    clamp_len,
    untie_r,
    weights,
    scope="transformer",
    pre_lnorm=False,
):
    """Tokens [i, b] and the memory -> hidden [i, b, d_model] and the new memory."""
    r_w_bias, r_r_bias = weights[f"{scope}/r_w_bias"], weights[f"{scope}/r_r_bias"]
    qlen = tf.shape(dec_inp)[0]
    mlen = tf.shape(mems[0])[0]
    klen = mlen + qlen

    embeddings = mask_adaptive_embedding_lookup(
        dec_inp, n_token, d_model, cutoffs, div_val, weights, f"{scope}/adaptive_embed"
    )
    attn_mask = create_mask(qlen, mlen, same_length)

    pos_seq = tf.range(klen - 1, -1, -1.0, dtype=FLOAT)
    if clamp_len > 0:
        pos_seq = tf.minimum(pos_seq, clamp_len)
    inv_freq = 1 / (10000 ** (tf.range(0, d_model, 2.0, dtype=FLOAT) / d_model))
    pos_emb = positional_embedding(pos_seq, inv_freq)

    output = dropout(embeddings, dropout_rate, is_training)
    pos_emb = dropout(pos_emb, dropout_rate, is_training)  # one mask for all layers and rows

    new_mems = []
    for i in range(n_layer):
        new_mems.append(cache_mem(output, mems[i], mem_len))  # a layer's memory is what went into it
        output = rel_multihead_attn(
            w=output,
            r=pos_emb,
            r_w_bias=r_w_bias[i] if untie_r else r_w_bias,
            r_r_bias=r_r_bias[i] if untie_r else r_r_bias,
            attn_mask=attn_mask,
            mems=mems[i],
            n_head=n_head,
            d_head=d_head,
            dropout_rate=dropout_rate,
            dropatt=dropatt,
            is_training=is_training,
            weights=weights,
            scope=f"{scope}/layer_{i}/rel_attn",
            pre_lnorm=pre_lnorm,
        )
        output = positionwise_ff(output, dropout_rate, is_training, weights, f"{scope}/layer_{i}/ff", pre_lnorm)

    return dropout(output, dropout_rate, is_training), new_mems


class ReferenceModel:
    """Weights under the original's names, and the functions above applied to them.

    Args: the original's flags, `pre_lnorm` of its PyTorch program, and `seed` for the initial weights (dropout
        follows tf.random.set_seed).
        `dropout` and `dropatt` act in `train_step` and where `is_training`.

    Attributes:
        weights: {original variable name: tf.Variable}, in the order in which the original creates them.

    `nll` and `log_probs` are plain Python: wrap them in `tf.function` where speed matters.
    """

    def __init__(
        self,
        n_token,
        n_layer,
        d_model,
        d_embed,
        n_head,
        d_head,
        d_inner,
        dropout=0.0,
        dropatt=0.0,
        mem_len=0,
        same_length=False,
        clamp_len=-1,
        untie_r=False,
        cutoffs=(),
        div_val=1,
        proj_share_all_but_first=False,
        proj_same_dim=True,
        init_std=0.02,
        proj_init_std=0.01,
        seed=0,
        pre_lnorm=False,
    ):
        self.n_token, self.n_layer, self.d_model, self.d_embed = n_token, n_layer, d_model, d_embed
        self.n_head, self.d_head, self.d_inner = n_head, d_head, d_inner
        self.dropout, self.dropatt = dropout, dropatt
        self.mem_len, self.same_length, self.clamp_len = mem_len, same_length, clamp_len
        self.untie_r = untie_r
        self.pre_lnorm = pre_lnorm
        self.cutoffs = list(cutoffs)
        # The original crashes on div_val > 1 without cutoffs; one bin has nothing to divide.
        self.div_val = div_val if self.cutoffs else 1
        self.tie_projs = [False] + [proj_share_all_but_first] * len(self.cutoffs)
        self.proj_same_dim = proj_same_dim

        rng = np.random.default_rng(seed)
        initializers = {
            "normal": lambda shape: rng.standard_normal(shape, np.float32) * np.float32(init_std),
            "proj": lambda shape: rng.standard_normal(shape, np.float32) * np.float32(proj_init_std),
            "zeros": lambda shape: np.zeros(shape, np.float32),
            "ones": lambda shape: np.ones(shape, np.float32),
        }
        self.weights = {
            name: tf.Variable(initializers[kind](shape), dtype=FLOAT, name=name)
            for name, shape, kind in self._variables()
        }
        self._train_function = None

    def _variables(self):
        """Yields (name, shape, initialiser) in the original's order."""
        d_model, d_embed, d_heads = self.d_model, self.d_embed, self.n_head * self.d_head
        cutoff_ends = [0, *self.cutoffs, self.n_token]
        bins = [  # (number of words, width of their embedding)
            (r_idx - l_idx, d_embed // self.div_val**i)
            for i, (l_idx, r_idx) in enumerate(itertools.pairwise(cutoff_ends))
        ]

        bias_shape = [self.n_head, self.d_head]
        if self.untie_r:
            bias_shape = [self.n_layer, *bias_shape]
        yield "transformer/r_w_bias", bias_shape, "normal"
        yield "transformer/r_r_bias", bias_shape, "normal"

        scope = "transformer/adaptive_embed"
        if self.div_val == 1:
            yield f"{scope}/lookup_table", [self.n_token, d_embed], "normal"
            if d_model != d_embed:
                yield f"{scope}/proj_W", [d_embed, d_model], "proj"
        else:
            for i, (n_words, width) in enumerate(bins):
                yield f"{scope}/cutoff_{i}/lookup_table", [n_words, width], "normal"
                if self.proj_same_dim or width != d_model:
                    yield f"{scope}/cutoff_{i}/proj_W", [width, d_model], "proj"

        for i in range(self.n_layer):
            scope = f"transformer/layer_{i}/rel_attn"
            yield f"{scope}/qkv/kernel", [d_model, 3 * d_heads], "normal"
            yield f"{scope}/r/kernel", [d_model, d_heads], "normal"
            yield f"{scope}/o/kernel", [d_heads, d_model], "normal"
            yield f"{scope}/LayerNorm/beta", [d_model], "zeros"
            yield f"{scope}/LayerNorm/gamma", [d_model], "ones"
            scope = f"transformer/layer_{i}/ff"
            yield f"{scope}/layer_1/kernel", [d_model, self.d_inner], "normal"
            yield f"{scope}/layer_1/bias", [self.d_inner], "zeros"
            yield f"{scope}/layer_2/kernel", [self.d_inner, d_model], "normal"
            yield f"{scope}/layer_2/bias", [d_model], "zeros"
            yield f"{scope}/LayerNorm/beta", [d_model], "zeros"
            yield f"{scope}/LayerNorm/gamma", [d_model], "ones"

        scope = "transformer/adaptive_softmax"
        if not self.cutoffs:
            yield f"{scope}/bias", [self.n_token], "zeros"
            return
        for i, (n_words, width) in enumerate(bins):
            yield f"{scope}/cutoff_{i}/b", [n_words], "zeros"
            # Square projections: always with div_val > 1 and proj_same_dim, never otherwise.
            needs_proj = width != d_model or (self.div_val > 1 and self.proj_same_dim)
            if needs_proj and not self.tie_projs[i]:
                yield f"{scope}/cutoff_{i}/proj", [width, d_model], "proj"
            if i == 0:
                yield f"{scope}/cutoff_0/cluster_W", [len(self.cutoffs), d_embed], "zeros"
                yield f"{scope}/cutoff_0/cluster_b", [len(self.cutoffs)], "zeros"

    def assign(self, arrays):
        """Sets all weights from {original variable name: array}; any other name or shape is an error."""
        missing = sorted(self.weights.keys() - arrays.keys())
        unknown = sorted(arrays.keys() - self.weights.keys())
        if missing or unknown:
            raise ValueError(f"arrays must hold exactly the variables; missing {missing}, unknown {unknown}")
        for name, variable in self.weights.items():
            if variable.shape != arrays[name].shape:
                raise ValueError(f"{name} must have shape {variable.shape}, got {arrays[name].shape}")
        for name, variable in self.weights.items():
            variable.assign(arrays[name])

    def initial_mems(self, batch):
        """n_layer times zeros [mem_len, batch, d_model]."""
        return [tf.zeros([self.mem_len, batch, self.d_model], FLOAT) for _ in range(self.n_layer)]

    def _hidden(self, inputs, mems, is_training):
        return transformer(
            inputs,
            mems,
            n_token=self.n_token,
            n_layer=self.n_layer,
            d_model=self.d_model,
            n_head=self.n_head,
            d_head=self.d_head,
            dropout_rate=self.dropout,
            dropatt=self.dropatt,
            is_training=is_training,
            mem_len=self.mem_len,
            cutoffs=self.cutoffs,
            div_val=self.div_val,
            same_length=self.same_length,
            clamp_len=self.clamp_len,
            untie_r=self.untie_r,
            weights=self.weights,
            pre_lnorm=self.pre_lnorm,
        )

    def _softmax_args(self):
        return dict(
            n_token=self.n_token,
            cutoffs=self.cutoffs,
            div_val=self.div_val,
            tie_projs=self.tie_projs,
            weights=self.weights,
            scope="transformer/adaptive_softmax",
        )

    def nll(self, inputs, labels, mems, is_training=False):
        """inputs, labels [tgt_len, batch] int32 or int64 -> nll [tgt_len, batch] in nats, new memory."""
        inputs, labels = tf.convert_to_tensor(inputs), tf.convert_to_tensor(labels)
        hidden, new_mems = self._hidden(inputs, mems, is_training)
        return mask_adaptive_logsoftmax(hidden, labels, **self._softmax_args()), new_mems

    def log_probs(self, inputs, mems):
        """inputs [tgt_len, batch] -> log-probabilities of the next word [tgt_len, batch, n_token]."""
        hidden, _ = self._hidden(tf.convert_to_tensor(inputs), mems, is_training=False)
        return full_log_probs(hidden, **self._softmax_args())

    def compile(self, learning_rate, train_steps, warmup_steps=0, min_lr_ratio=0.004, clip=0.25):
        """Sets the optimisation (the original's flags and defaults) and starts it at step 0."""
        self.step = tf.Variable(0, dtype=tf.int64, name="global_step")

        def learning_rate_now():
            step = tf.cast(self.step, tf.float32)
            done = tf.minimum((step - warmup_steps) / (train_steps - warmup_steps), 1.0)
            cosine = 0.5 * (1 + tf.cos(math.pi * done))
            decayed = learning_rate * ((1 - min_lr_ratio) * cosine + min_lr_ratio)
            if warmup_steps == 0:
                return decayed
            return tf.where(step < warmup_steps, step / warmup_steps * learning_rate, decayed)

        # TF1's Adam: its epsilon is added to sqrt(v) before, not after, the bias correction of v.
        optimizer = tf.compat.v1.train.AdamOptimizer(learning_rate=learning_rate_now)
        variables = list(self.weights.values())

        @tf.function
        def train_function(inputs, labels, mems):
            with tf.GradientTape() as tape:
                nll, new_mems = self.nll(inputs, labels, mems, is_training=True)
                loss = tf.reduce_mean(nll)
            clipped, grad_norm = tf.clip_by_global_norm(tape.gradient(loss, variables), clip)
            lr = learning_rate_now()
            optimizer.apply_gradients(zip(clipped, variables, strict=True), global_step=self.step)
            return loss, grad_norm, lr, new_mems

        self._train_function = train_function

    def train_step(self, inputs, labels, mems):
        """One update, with dropout, on inputs and labels [tgt_len, batch].

        Returns (loss, gradient norm before clipping, learning rate of this step, new memory).
        """
        if self._train_function is None:
            raise ValueError("call compile(learning_rate=..., train_steps=...) before train_step")
        return self._train_function(tf.convert_to_tensor(inputs), tf.convert_to_tensor(labels), mems)
