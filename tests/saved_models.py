"""Models of every family as this library saved them once, and the numbers that they gave then.

    python tests/saved_models.py                    makes in tests/saved/ what is missing there
    python tests/saved_models.py xl_adaptive ...    makes these anew; only where numbers are meant to change

`saved_models_test.py` loads the files with the library as it is now, and compares. See tests/saved/README.md.
"""

import io
import os
import re
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import keras
import numpy as np
import tensorflow as tf
from helpers import LEXICON, SMALL, TEXT, TINY_RUN, made_up, spread_emissions, train_run, word_vocab

import txl_tf
from txl_tf import config, layers
from txl_tf.data.tagged.batches import features
from txl_tf.data.tagged.sentences import encoder_of
from txl_tf.language.session import Session
from txl_tf.runs.train import train_run as train_any_run
from txl_tf.training.optimization import make_optimizer
from txl_tf.vanilla.translator import Translator

SAVED = Path(__file__).parent / "saved"
DROPS = {"dropout": 0.1, "dropatt": 0.1, "seed": 7}
STATE = "the state of the answer before"

# What a process that has no txl_tf answers: argv are a file of requests, `{case: (folder, [(signature, inputs)])}`, and
# the file for the answers, `{case: [{name: array}]}`. An input that is text stands for the state of the answer before.
STRANGER = """
import pickle, sys
sys.modules["txl_tf"] = None
import tensorflow as tf

with open(sys.argv[1], "rb") as file:
    requests = pickle.load(file)
found = {}
for case, (folder, asked) in requests.items():
    signatures, state, found[case] = tf.saved_model.load(folder).signatures, None, []
    for name, inputs in asked:
        inputs = {key: state if isinstance(x, str) else tf.constant(x) for key, x in inputs.items()}
        answer = signatures[name](**inputs)
        state = answer.get("state", state)
        found[case].append({key: x.numpy() for key, x in answer.items()})
with open(sys.argv[2], "wb") as file:
    pickle.dump(found, file)
"""


def names_of(variables):
    """Paths without the name of the model and without numbers that Keras counts up."""
    return ["/".join(re.sub(r"_\d+$", "", part) for part in v.path.split("/")[1:]) for v in variables]


def draw(shape, n, seed=0, first=0):
    """int32 ids from `first` on and below n. Not `default_rng`: --seed-offset must not change what was saved."""
    return np.random.RandomState(seed).randint(first, n, shape).astype(np.int32)


class Case:
    """A model that is made from a seed. A subclass has

        make()                  the model, with dropout and a seed
        batches()               pairs (inputs, targets) for `train_on_batch`
        answers(model)          arrays by name, of the model without dropout
        requests()              [(signature, inputs)], what its SavedModel is asked; none where there is no export

    and `loss`, as `compile` takes it.
    """

    loss, export_options = None, {}

    def __init__(self, name, served=True, **options):
        self.name, self.served, self.options = name, served, options
        self.folder = SAVED / name

    def randomise(self, model):
        rng = np.random.RandomState(0)  # whatever --seed-offset is
        for variable in model.trainable_variables:
            variable.assign(rng.normal(0, 0.3, variable.shape))

    def prepared(self):
        """The model of a seed with its initial weights."""
        keras.utils.set_random_seed(7)
        model = self.make()
        if not model.built or not model.weights:
            model(self.batches()[0][0])
        return model

    def start(self, model):
        """The initial weights, or of large ones the beginning, and their paths."""
        found = {f"start/{i}": v.numpy().ravel()[:40] for i, v in enumerate(model.weights)}
        return {**found, "names": np.array(names_of(model.weights))}

    def first_step(self, model):
        """Loss and gradients of a step with dropout, of random weights: those that plain SGD takes off."""
        self.randomise(model)
        model.compile(keras.optimizers.SGD(1.0), loss=self.loss)
        before, (inputs, targets) = [v.numpy() for v in model.trainable_variables], self.batches()[0]
        loss = np.ravel(model.train_on_batch(inputs, targets))[0]
        after = [v.numpy() for v in model.trainable_variables]
        found = {f"gradient/{i}": old - new for i, (old, new) in enumerate(zip(before, after, strict=True))}
        return {**found, "step/loss": loss}

    def train(self, model):
        """The losses of steps with dropout and this library's optimizer, from random weights."""
        self.randomise(model)
        model.compile(make_optimizer(0.02, train_steps=10, clip=0.25), loss=self.loss)
        return {f"train/loss_{i}": np.ravel(model.train_on_batch(*batch))[0] for i, batch in enumerate(self.batches())}

    def go_on(self, model):
        """The loss of one step more."""
        return np.ravel(model.train_on_batch(*self.batches()[0]))[0]

    def save(self):
        """Writes the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        model = self.prepared()
        numbers = self.start(model) | self.first_step(model)
        numbers |= self.train(model)
        model.save(self.folder / "model.keras")
        loaded = keras.saving.load_model(self.folder / "model.keras")
        numbers |= {f"answer/{name}": np.asarray(x) for name, x in self.answers(loaded).items()}
        if self.served and self.requests():
            with tempfile.TemporaryDirectory() as folder:
                self.export(loaded, f"{folder}/1")
                pack(f"{folder}/1", self.folder / "served.zip")
                numbers |= served_numbers(ask(f"{folder}/1", self.requests()))
        numbers["go_on/loss"] = self.go_on(loaded)
        np.savez_compressed(self.folder / "numbers.npz", **numbers)

    def requests(self):
        return []

    def export(self, model, folder):
        txl_tf.export_saved_model(model, folder, warmup=False, **self.export_options)

    def numbers(self):
        with np.load(self.folder / "numbers.npz") as file:
            return dict(file)


# ------------------------------------------------------------------------------------------------ language models

SAMPLING = {
    "max_new_tokens": np.int32([6, 6]), "temperature": np.float32([0, 0.8]), "top_k": np.int32([0, 12]),
    "top_p": np.float32([1, 0.9]), "seed": np.int32([3, 4]), "min_p": np.float32([0]),
    "repetition_penalty": np.float32([1]), "repetition_window": np.int32([64]),
}  # fmt: skip
WORDS = [b"w3 w5 w1 w0", b"w7 unheard-of\nw2"]


class LanguageModelCase(Case):
    def __init__(self, name, family, vocab=False, **options):
        super().__init__(name, **options)
        self.family, self.vocab = family, vocab
        self.export_options = {"vocab": word_vocab()} if vocab else {}

    def make(self):
        return self.family(**{**SMALL, **DROPS, **self.options})

    def segments(self):
        """int32 `[2, 16]`, for three segments of 5."""
        return draw([2, 16], SMALL["n_token"])

    def batches(self):
        text = self.segments()
        return [(text[:, i : i + 5], text[:, i + 1 : i + 6]) for i in (0, 5, 10)]

    def answers(self, lm):
        found, mems = {}, None
        for i, (tokens, labels) in enumerate(self.batches()):
            if i == 2:
                found["log_probs"], _ = lm.log_probs(tokens, mems)
            found[f"nll_{i}"], mems = lm.score(tokens, labels, mems)
            found |= {f"mems_{i}_{layer}": mem for layer, mem in enumerate(mems)}
        first, second = self.batches()[:2]
        found["first_nll"] = lm.first_nll(*map(tf.constant, first))
        data = tf.data.Dataset.from_generator(
            lambda: iter([first, second]), output_signature=(tf.TensorSpec([2, 5], tf.int32),) * 2
        )
        found["evaluate"] = np.ravel(lm.evaluate(data, verbose=0))[0]
        found["greedy"] = lm.generate(first[0], 6, temperature=0)
        found["sampled"] = lm.generate(first[0], 6, temperature=0.8, top_k=12, seed=[3, 4])
        found["attention"] = lm.attention(first[0])[0]
        session = Session(lm, batch_size=2)
        found["session_nll"] = session.read(first[0])[:, 1:]
        found["session_written"] = session.write(3, temperature=0)[0]
        return found

    def requests(self):
        (a, b), (c, d), (e, f) = self.batches()
        asked = [
            ("initial_state", {"batch_size": np.int32(2)}),
            ("score", {"tokens": a, "labels": b, "state": STATE}),
            ("next", {"tokens": c[:, :1], "state": STATE}),
            ("next", {"tokens": c[:, 1:], "state": STATE}),
            ("score", {"tokens": e, "labels": f, "state": STATE}),
            ("generate", {
                "tokens": a, "lengths": np.int32([5, 3]), **SAMPLING, "num_return_sequences": np.int32([1]),
                "stop_ids": np.zeros([1, 0, 0], np.int32),
            }),
        ]  # fmt: skip
        if self.vocab:
            asked += [(name, {"text": np.array(WORDS)}) for name in ("score_text", "score_lines")]
            asked += [("generate_text", {"text": np.array(WORDS), **SAMPLING, "stop": np.array([[b""]])})]
        return asked


# ------------------------------------------------------------------------------------------------ encoder-decoders


class PairsCase(Case):
    def make(self):
        sizes = {"num_layers": 2, "d_model": 8, "num_heads": 2, "dff": 12, "max_len": 9}
        sizes |= {"input_vocab_size": 23, "target_vocab_size": 23, "rate": 0.1, "dropatt": 0.1, "dropact": 0.1}
        return txl_tf.Transformer(**{**sizes, "seed": 7, **self.options})

    def pairs(self):
        source, target = draw([3, 6], 23, first=3), draw([3, 7], 23, 1, first=3)
        target[:, 0] = 1
        source[1, 3:] = target[2, 5:] = 0
        target[0, 6] = target[1, 6] = target[2, 4] = 2
        return source, target

    def batches(self):
        return [self.pairs()] * 2

    def answers(self, model):
        source, target = self.pairs()
        found = {"logits": model((source, target)), "evaluate": np.ravel(model.evaluate(source, target, verbose=0))}
        found["attention"] = model.attention(source, target)
        for name, size in (("greedy", 1), ("beam", 3)):
            found[name], found[f"{name}_scores"] = model.generate(
                source, start=1, end=2, beam_size=size, max_new_tokens=5
            )
        return found

    export_options = {"search": {"beam_size": 2, "max_new_tokens": 5}}

    def requests(self):
        source, target = self.pairs()
        return [("translate", {"source": source}), ("score", {"source": source, "target": target[:, 1:]})]


# -------------------------------------------------------------------------------------------------------- taggers


class TaggerCase(Case):
    labels = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]

    def __init__(self, name, network, **options):
        super().__init__(name, **options)
        self.network = network

    def make(self):
        sizes = {"n_token": 23, "n_bigram": 9, "d_embed": 6, "d_bigram": 4, "d_model": 8, "n_layer": 2}
        sizes |= {} if self.network is txl_tf.BiLSTM else {"n_head": 2, "d_inner": 12, "dropout": 0.1}
        network = self.network(**{**sizes, "seed": 7, **self.options})
        return txl_tf.Tagger(network, self.labels, output_dropout=0.1, seed=8)

    def randomise(self, tagger):
        super().randomise(tagger)
        spread_emissions(tagger, self.inputs())

    def inputs(self):
        chars, bigrams = draw([4, 5], 23, first=1), draw([4, 5], 9, 1, first=1)
        chars[1, 3:] = bigrams[1, 3:] = 0
        if self.network is not txl_tf.Flat:
            return {"chars": chars, "bigrams": bigrams}
        lattice = np.pad(chars, [(0, 0), (0, 2)])
        pos_s, pos_e = (np.tile(np.pad(np.arange(5), (0, 2)), (4, 1)).astype(np.int32) for _ in "se")
        lattice[0, 5:], pos_s[0, 5:], pos_e[0, 5:] = [7, 8], [0, 2], [1, 4]
        lattice[1, 3], pos_s[1, 3:], pos_e[1, 3:] = 9, [1, 0, 0, 0], [2, 0, 0, 0]
        lengths = {"seq_len": np.int32([5, 3, 5, 5]), "lex_num": np.int32([2, 1, 0, 0])}
        return {"lattice": lattice, "bigrams": bigrams, **lengths, "pos_s": pos_s, "pos_e": pos_e}

    def batches(self):
        return [(self.inputs(), draw([4, 5], len(self.labels), 2))] * 2

    def answers(self, tagger):
        inputs, tags = self.batches()[0]
        found = {"emissions": tagger(inputs), "nll": tagger.nll(inputs, tags)}
        found["tags"], found["score"] = tagger.decode(inputs)
        found |= tagger.entities(inputs)
        return {**found, "evaluate": np.ravel(tagger.evaluate(inputs, tags, verbose=0))}

    def requests(self):
        return [("tag", self.inputs())]


# ------------------------------------------------------------------------------------------------- layers in Keras

HEADS = {"n_head": 2, "d_head": 3}


class FunctionalCase(Case):
    """A functional model of public layers, `model(inputs)` -> a tensor or more."""

    def __init__(self, name, build, *shapes, **options):
        super().__init__(name, **options)
        self.build, self.shapes = build, shapes

    def make(self):
        types = ["int32" if len(shape) == 2 else "float32" for shape in self.shapes]
        batches = [(shape[0] if shape[0] == 1 else None, *shape[1:]) for shape in self.shapes]
        inputs = [keras.Input(batch_shape=x, dtype=dtype) for x, dtype in zip(batches, types, strict=True)]
        return keras.Model(inputs, self.build(*inputs))

    def inputs(self):
        rng = np.random.RandomState(3)
        return [draw(s, 23) if len(s) == 2 else rng.normal(0, 1, s).astype(np.float32) for s in self.shapes]

    def loss(self, _, output):
        return tf.reduce_mean(output**2)

    def batches(self):
        return [(self.inputs(), np.zeros(self.shapes[0][:1], np.float32))]

    def first_step(self, model):
        self.randomise(model)
        inputs = [tf.constant(x) for x in self.inputs()]
        with tf.GradientTape() as tape:
            outputs = keras.tree.flatten(model(inputs, training=True))
            loss = tf.add_n([tf.reduce_sum(output**2) for output in outputs])
        gradients = map(tf.convert_to_tensor, tape.gradient(loss, model.trainable_variables))
        return {**{f"gradient/{i}": x.numpy() for i, x in enumerate(gradients)}, "step/loss": loss.numpy()}

    def train(self, model):
        self.randomise(model)
        return {}

    def go_on(self, model):
        return 0.0

    def answers(self, model):
        return {f"output_{i}": x for i, x in enumerate(keras.tree.flatten(model(self.inputs())))}


def classifier(tokens):
    network = txl_tf.TransformerXL(**SMALL, **DROPS, mem_len=4, name="network")
    hidden, _ = network(tokens)
    return keras.layers.Dense(3)(hidden[:, -1])


def with_memory(tokens, *mems):
    """The memory as inputs and outputs, and the softmax tied to the embedding."""
    network = txl_tf.TransformerXL(
        **SMALL, **DROPS, mem_len=4, cutoffs=[5, 12], div_val=2, untie_r=True, name="network"
    )
    hidden, new_mems = network(tokens, list(mems))
    softmax = layers.AdaptiveSoftmax(23, 8, 8, cutoffs=[5, 12], div_val=2, name="softmax")
    return [softmax(hidden, embedding=network.embedding), *new_mems]


def relative_layer(w, r, u, v, mems):
    layer = layers.TransformerXLLayer(8, **HEADS, d_inner=12, dropout=0.1, dropatt=0.1, seed=7, name="layer")
    return layer(w, r, keras.ops.squeeze(u, 0), keras.ops.squeeze(v, 0), mems=mems)


def relative_attention(w, r, u, v, mems, attn_mask):
    attention = layers.RelMultiHeadAttn(8, **HEADS, dropout=0.1, dropatt=0.1, seed=7, name="attention")
    u, v = keras.ops.squeeze(u, 0), keras.ops.squeeze(v, 0)
    return attention(w, r=r, r_w_bias=u, r_r_bias=v, attn_mask=attn_mask > -0.5, mems=mems)


def vanilla_layers(x, y):
    options = {"d_model": 8, "num_heads": 2, "seed": 7}
    attended, weights = layers.MultiHeadAttention(**options, name="mha")(query=x, value=x, return_attention_scores=True)
    drops = {"dff": 12, "rate": 0.1, "dropatt": 0.1, "dropact": 0.1}
    encoded = layers.EncoderLayer(**options, **drops, name="encoder")(attended)
    decoder = layers.DecoderLayer(**options, **drops, norm_first=True, name="decoder")
    return [decoder(y, encoded, use_causal_mask=True, return_attention_scores=False), weights]


def tener_layers(x):
    x = layers.TenerLayer(8, 2, 12, dropout=0.1, seed=7, name="tener")(x)
    return layers.TransformerLMLayer(8, **HEADS, d_inner=12, dropout=0.1, seed=7, name="plain")(x)


class NetworkCase(FunctionalCase):
    """The bare network, saved by itself and called with memory."""

    def make(self):
        network = txl_tf.TransformerXL(**{**SMALL, **DROPS, "mem_len": 4, **self.options})
        network.build_at_once()
        return network

    def first_step(self, network):
        self.randomise(network)
        return {}

    def answers(self, network):
        found, mems = {}, None
        for i in range(3):
            found[f"hidden_{i}"], mems = network(draw([2, 5], 23, i), mems)
            found |= {f"mems_{i}_{layer}": mem for layer, mem in enumerate(mems)}
        mask = np.array([[1, 1, 1, 0, 0], [0, 1, 0, 1, 1]], bool)
        found["padded"], _ = network(draw([2, 5], 23, 4), padding_mask=mask)
        return found


ADAPTIVE = {"cutoffs": [5, 12], "div_val": 2}
SEGMENT = [(2, 5, 8), (1, 9, 8), (1, 2, 3), (1, 2, 3), (2, 4, 8)]
CASES = [
    LanguageModelCase(
        "xl_adaptive", txl_tf.TransformerXLLM, True, **ADAPTIVE, mem_len=4, proj_share_all_but_first=True,
        untie_r=True, clamp_len=3, same_length=True,
    ),
    LanguageModelCase("xl_plain", txl_tf.TransformerXLLM, mem_len=6),
    LanguageModelCase(
        "xl_projected", txl_tf.TransformerXLLM, mem_len=7, d_embed=6, cutoffs=[9], proj_same_dim=False, reset_token=0,
    ),
    LanguageModelCase("lm_sinusoids", txl_tf.TransformerLM, True, context_len=6),
    LanguageModelCase(
        "lm_learned", txl_tf.TransformerLM, served=False, **ADAPTIVE, context_len=6, pos_embed="learned", mem_len=3,
        d_embed=6,
    ),
    PairsCase("pairs_post_norm"),
    PairsCase("pairs_pre_norm", served=False, norm_first=True, share_embeddings=True, label_smoothing=0.1,
              pos_embed="learned"),
    TaggerCase("tener", txl_tf.Tener, embed_dropout=0.1, dropatt=0.1),
    TaggerCase("tener_plain", txl_tf.Tener, served=False, attn_type="transformer", pos_embed="sin",
               after_norm=False, scale=True),
    TaggerCase("flat", txl_tf.Flat, dropatt=0.1),
    TaggerCase("bilstm", txl_tf.BiLSTM, embed_dropout=0.1),
    NetworkCase("network", None, (2, 5), untie_r=True, same_length=True, clamp_len=3),
    FunctionalCase("in_keras_classifier", classifier, (2, 5)),
    FunctionalCase("in_keras_memory", with_memory, (2, 5), (2, 4, 8), (2, 4, 8)),
    FunctionalCase("in_keras_layer", relative_layer, *SEGMENT),
    FunctionalCase("in_keras_attention", relative_attention, *SEGMENT, (2, 5, 9)),
    FunctionalCase("in_keras_vanilla", vanilla_layers, (2, 5, 8), (2, 4, 8)),
    FunctionalCase("in_keras_tener", tener_layers, (2, 5, 8)),
]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ runs

RECIPE = {"learning_rate": 1e-2, "warmup_steps": 2, "clip": 1.0}
STEPS = {"train_steps": 12, "iterations": 3, "save_steps": 6}
PAIRS = "".join(f"{'abcabcab'[i % 3 :][: 1 + i % 5]}\t{i % 7} {i % 5}\n" for i in range(60))


class RunCase:
    """A run's folder, with checkpoints of the steps 6 and 12 of a training of 12, and what its model answers.

    A subclass has `train(folder, data)`, `data(folder)`, the files, and `answers(model, vocabs)`.
    """

    requests = staticmethod(list)

    def __init__(self, name):
        self.name, self.folder = name, SAVED / name

    def save(self):
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            self.train(run, self.data(Path(folder)))
            numbers = {f"answer/{name}": np.asarray(x) for name, x in self.answers(run).items()}
            if self.requests():
                model, vocabs = txl_tf.load_run(run)
                txl_tf.export_saved_model(model, f"{folder}/1", vocabs, warmup=False)
                pack(f"{folder}/1", self.folder / "served.zip")
                numbers |= served_numbers(ask(f"{folder}/1", self.requests()))
            pack(run, self.folder / "run.zip", lambda name: "events.out" not in name and not name.endswith(".lock"))
        np.savez_compressed(self.folder / "numbers.npz", **numbers)

    numbers = Case.numbers


class LanguageModelRun(RunCase):
    def data(self, folder):
        (folder / "text.txt").write_text(TEXT)
        return str(folder / "text.txt")

    def train(self, run, text):
        train_run(run, text)

    def answers(self, run):
        lm, vocab = txl_tf.load_run(run)
        ids = np.array([vocab.encode("the cat sat on the")], np.int32)
        nll, mems = lm.score(ids[:, :-1], ids[:, 1:])
        greedy = lm.generate(ids[:, :7], 8, temperature=0)
        return {"ids": ids, "nll": nll, "greedy": greedy, **{f"mems_{i}": mem for i, mem in enumerate(mems)}}


class VanillaRun(LanguageModelRun):
    def train(self, run, text):
        sizes = {name: value for name, value in TINY_RUN["model"].items() if name != "mem_len"}
        train_any_run(
            str(run), data={"dataset": "text", "data_path": text},
            model=config.TransformerLMConfig(**sizes, context_len=16),
            optimizer=config.OptimizerConfig(**TINY_RUN["optimizer"]),
            training=config.TrainingConfig(**TINY_RUN["training"]),
            final=config.EvaluationConfig(eval_batch_size=2, max_eval_batch=10),
        )  # fmt: skip


class PairsRun(RunCase):
    def data(self, folder):
        (folder / "pairs.tsv").write_text(PAIRS)
        return str(folder / "pairs.tsv")

    def train(self, run, path):
        sizes = {"num_layers": 1, "d_model": 8, "num_heads": 2, "dff": 12, "max_len": 20, "norm_first": True}
        train_any_run(
            str(run), data=config.PairsConfig(train_path=path, valid_fraction=0.2, target_level="word"),
            model=config.TransformerConfig(**sizes), optimizer=config.OptimizerConfig(**RECIPE),
            training=config.PairsTrainingConfig(**STEPS, batch_size=16, eval_sources=20),
        )  # fmt: skip

    def answers(self, run):
        model, vocabs = txl_tf.load_run(run)
        logits = model((draw([2, 4], len(vocabs[0]), first=3), draw([2, 5], len(vocabs[1]), first=3)))
        found = [best for best, *_ in Translator(model, *vocabs).translate(["abc", "ab"])]
        texts, scores = [each.text for each in found], [each.score for each in found]
        return {"logits": logits, "texts": np.array(texts), "scores": np.array(scores)}

    def requests(self):
        return [("translate_text", {"text": np.array([b"abc", b"ab"])})]


SENTENCES = ["我在南京市来", "叫京了看", "在长江大桥"]


class TaggerRun(RunCase):
    def __init__(self, name, group, **options):
        super().__init__(name)
        self.group, self.options = group, options

    def data(self, folder):
        for split, n in {"train": 120, "valid": 30}.items():
            (folder / split).write_text(made_up(n, np.random.Generator(np.random.PCG64(n))), encoding="utf-8")
        (folder / "words").write_text("\n".join(LEXICON), encoding="utf-8")
        paths = {"train_path": str(folder / "train"), "valid_path": str(folder / "valid")}
        return {**paths, "lexicon": str(folder / "words")} if self.group is config.FlatTaggerConfig else paths

    def train(self, run, paths):
        sizes = {"n_layer": 1, "d_model": 8, "max_seq_len": 30, "d_embed": 6, "d_bigram": 4, "embed_dropout": 0.1}
        recipe = {"learning_rate": 3e-2, "clip": 5.0, "optimizer": "adam", "schedule": "linear", "warmup_steps": 2}
        train_any_run(
            str(run), data=config.TaggedConfig(**paths), model=self.group(**sizes, **self.options),
            optimizer=config.OptimizerConfig(**recipe),
            training=config.TaggerTrainingConfig(**STEPS, batch_size=16),
        )  # fmt: skip

    def answers(self, run):
        tagger, vocabs = txl_tf.load_run(run)
        encoder = encoder_of(*vocabs)
        inputs = features([encoder.encode(text) for text in SENTENCES], self.group is config.FlatTaggerConfig)
        emissions, _ = tagger.emissions(inputs)
        tags, score = tagger.decode(inputs)
        return {"emissions": emissions, "tags": tags, "score": score}

    def requests(self):
        return [("tag_text", {"text": np.array([text.encode() for text in SENTENCES])})]


RUNS = [
    LanguageModelRun("run_transformer_xl"),
    VanillaRun("run_transformer_lm"),
    PairsRun("run_pairs"),
    TaggerRun("run_tener", config.TenerTaggerConfig, n_head=2, d_inner=16, dropout=0.1),
    TaggerRun("run_flat", config.FlatTaggerConfig, n_head=2, d_inner=16, dropout=0.1),
    TaggerRun("run_bilstm", config.BiLSTMTaggerConfig),
]


# ----------------------------------------------------------------------------------------------------------- files


def pack(folder, path, keep=lambda name: True):
    """A folder as a zip file that is the same for the same files."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        for file in sorted(p for p in Path(folder).rglob("*") if p.is_file() and keep(p.name)):
            name = zipfile.ZipInfo(str(file.relative_to(folder)))
            name.compress_type = zipfile.ZIP_LZMA
            archive.writestr(name, file.read_bytes())


def unpack(path, folder):
    """The folder of a zip file of `pack`, with the empty folder that every SavedModel has."""
    with zipfile.ZipFile(io.BytesIO(Path(path).read_bytes())) as archive:
        archive.extractall(folder)
    return str(folder)


def ask(folder, asked):
    """The answers of a SavedModel, in this process."""
    signatures, state, found = tf.saved_model.load(str(folder)).signatures, None, []
    for name, inputs in asked:
        inputs = {key: state if isinstance(x, str) else tf.constant(x) for key, x in inputs.items()}
        answer = signatures[name](**inputs)
        state = answer.get("state", state)
        found.append({key: x.numpy() for key, x in answer.items()})
    return found


def served_numbers(answers):
    """`{"served/<number of the request>/<output>": array}`, strings as bytes of one length."""
    arrays = {f"served/{i}/{name}": x for i, answer in enumerate(answers) for name, x in answer.items()}
    return {name: x.astype("S") if x.dtype == object else x for name, x in arrays.items()}


def main(names):
    unknown = {*names} - {case.name for case in (*CASES, *RUNS)}
    if unknown:
        sys.exit(f"there is no case {' '.join(sorted(unknown))}")
    for case in (*CASES, *RUNS):
        if case.name in names or not (names or (case.folder / "numbers.npz").exists()):
            case.save()
            size = sum(file.stat().st_size for file in case.folder.rglob("*"))
            print(f"{case.name}: {size // 1024} KB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
