"""The shapes of the benchmark: the sizes of its models and data. And the names of contestants."""

REFERENCE = "reference float32"
EVALUATION = "evaluation float32"
READING = "read of its bytes"
PRODUCTS = "products"  # the matrix products of a training step, and nothing else
ONE_PART = "txl_tf float32 1 part"  # all cores compute one operation after the other, TensorFlow's default
ROUNDED = "txl_tf bfloat16 products"  # with weights in float32, see `set_matmul_precision`
CONTINUED = "a text of 5,000 tokens goes on"
PROMPT = 5000  # tokens
TAGGER = {  # flags of train_ner.py for the run that tag.py answers with
    "dataset": "towns", "n_sentences": 100, "model": "tener", "n_layer": 2, "d_model": 64, "n_head": 4, "d_inner": 128,
    "batch_size": 32,
}  # fmt: skip
WRITING = {  # name of a contestant: arguments of `writing_work`
    "one row": {}, "2 rows": {"rows": 2}, "4 rows": {"rows": 4}, "16 rows": {"rows": 16},
    "temperature 0": {"temperature": 0.0}, "top_k 40": {"top_k": 40}, "top_p 0.9": {"top_p": 0.9},
    "min_p 0.1": {"min_p": 0.1}, "repetition_penalty 1.2": {"repetition_penalty": 1.2},
    "a prompt of 5,000 tokens is read": {"prompt": PROMPT, "tokens": 1},
}  # fmt: skip
# With --against and without --contestants: the cases of WRITING, and the modes with bfloat16, that are measured.
WRITING_AGAINST = ("4 rows", "top_p 0.9", "a prompt of 5,000 tokens is read")
BFLOAT16_AGAINST = ("training", "training_words", "evaluation", "generation", "seq2seq")
NETWORK = {
    "n_layer": 6, "d_model": 256, "n_head": 4, "d_head": 64, "d_inner": 1024, "n_token": 256, "cutoffs": [],
    "div_val": 1, "dropout": 0.1, "dropatt": 0.0, "same_length": False, "clamp_len": -1,
}  # fmt: skip
SEQ2SEQ = {"n_layer": 3, "d_model": 256, "n_head": 4, "d_inner": 1024, "n_token": 60, "dropout": 0.1}
TAGGING = {"d_embed": 50, "n_token": 8000, "n_bigram": 19000, "n_tag": 33, "sentences": 320, "tgt_len": 0}
TENER = {
    **TAGGING, "n_layer": 2, "d_model": 256, "n_head": 4, "d_inner": 512, "dropout": 0.15, "embed_dropout": 0.3,
    "batch_size": 16,
}  # fmt: skip
FLAT = {
    **TAGGING, "n_layer": 1, "d_model": 128, "n_head": 8, "d_inner": 384, "dropout": 0.15, "embed_dropout": 0.5,
    "batch_size": 10, "fusion": "ff",
}  # fmt: skip
STARTUP = {
    **NETWORK, "n_layer": 4, "d_model": 192, "d_head": 48, "d_inner": 768, "tgt_len": 96, "mem_len": 96,
    "batch_size": 16, "megabytes": 0.5,
}  # fmt: skip
_SEGMENT = {"tgt_len": 64, "mem_len": 64, "batch_size": 8}
SHAPES = {
    "training": {**NETWORK, "tgt_len": 128, "mem_len": 128, "batch_size": 8},
    "training_words": {
        **NETWORK, **_SEGMENT, "n_layer": 4, "batch_size": 16, "n_token": 33278, "cutoffs": [2000, 10000], "div_val": 2,
    },
    "evaluation": {
        **NETWORK, "n_layer": 12, "d_model": 512, "n_head": 8, "d_inner": 2048, "same_length": True, "clamp_len": 820,
        "tgt_len": 80, "mem_len": 2100, "batch_size": 10,
    },
    "generation": {**NETWORK, "tgt_len": 256, "mem_len": 1600, "batch_size": 1},
    "preparation": {"n_token": 50000, "megabytes": 30},
    "export": {**NETWORK, "mem_len": 1600, "batch_size": 1},
    "startup": STARTUP,
    "first_answer": {**STARTUP, "megabytes": 0.05},
    "softmax_wt103": {
        **NETWORK, **_SEGMENT, "n_layer": 1, "d_model": 410, "n_head": 10, "d_head": 41, "d_inner": 2100,
        "n_token": 267735, "cutoffs": [20000, 40000, 200000],
    },
    "softmax_lm1b": {
        **NETWORK, **_SEGMENT, "n_layer": 1, "d_model": 1024, "n_head": 8, "d_head": 128, "d_inner": 4096,
        "n_token": 793471, "cutoffs": [60000, 100000, 640000], "div_val": 4,
    },
    "workers": {**NETWORK, **_SEGMENT},
    "ray": {"n_token": 50000, "megabytes": 100},
    "ray_failures": {"n_token": 5000, "megabytes": 0.5},
    "peers": {**NETWORK, "tgt_len": 128, "mem_len": 128, "batch_size": 8},
    "serving": {
        **STARTUP, **_SEGMENT, "d_model": 128, "d_head": 32, "d_inner": 512, "batch_size": 16, "dropout": 0.0,
        "megabytes": 0.05,
    },
    "scoring": {
        **NETWORK, **_SEGMENT, "n_layer": 4, "d_model": 192, "d_head": 48, "d_inner": 768, "batch_size": 16,
        "n_token": 10000, "lines": 400,
    },
    "writing": {**NETWORK, "tgt_len": 256, "mem_len": 1600, "batch_size": 1},
    "seq2seq": {**SEQ2SEQ, "batch_size": 64, "tgt_len": 16},
    "seq2seq_pairs": {**SEQ2SEQ, "batch_size": 64, "pairs": 1280},
    "seq2seq_decoding": {**SEQ2SEQ, "batch_size": 64, "tgt_len": 24},
    "tener": TENER, "tener_tagging": TENER, "flat": FLAT, "flat_tagging": FLAT,
    "flat_long": {**FLAT, "tgt_len": 200, "sentences": 20},
}  # fmt: skip
SCALING = {  # mode: {argument: its values}. The other arguments have the values in SHAPES
    "training": {
        "tgt_len": [32, 64, 128, 256], "mem_len": [0, 128, 256, 512], "batch_size": [2, 4, 8, 16],
        "n_layer": [1, 2, 4, 8], "n_token": [256, 4096, 33278, 267735], "replicas": [1, 2, 4],
    },
    "evaluation": {"tgt_len": [20, 40, 80, 160], "mem_len": [525, 1050, 2100, 4200]},
    "generation": {"mem_len": [400, 800, 1600, 3200]},
}  # fmt: skip
CUTOFFS = {33278: [2000, 10000], 267735: [20000, 40000, 200000]}  # of the vocabularies in SCALING
