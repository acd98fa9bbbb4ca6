"""The command lines of the original's scripts, with their variables filled in, and its defaults.

Each of TRAIN_DATA, TEST_DATA, TRAIN and EVAL holds `{script: {flag: value}}`, values as text, for the scripts that have
the command. The scripts `<dataset>_sota` evaluate the published models.
"""


# For each script: the folder of its data, the flags of the model, which train and eval share, and the other flags of
# each command but for those of folders, see `_flags`.
def _of_characters(dataset):
    """The scripts of enwik8 and text8, which are alike."""
    return {
        f"{dataset}_base": {
            "root": f"../data/{dataset}/",
            "model": "n_layer=12 d_model=512 d_embed=512 n_head=8 d_head=64 d_inner=2048",
            "train_data": (
                f"dataset={dataset} tgt_len=512 per_host_train_bsz=24 per_host_valid_bsz=24 num_passes=1 use_tpu=False"
            ),
            "test_data": f"dataset={dataset} tgt_len=80 per_host_test_bsz=10 num_passes=1 use_tpu=False",
            "train": (
                "dropout=0.1 dropatt=0.0 learning_rate=0.00025 warmup_steps=0 train_steps=400000 tgt_len=512 "
                "mem_len=512 train_batch_size=24 num_core_per_host=4 iterations=200 save_steps=4000 do_train=True "
                "do_eval=False"
            ),
            "eval": (
                "dropout=0.0 dropatt=0.0 tgt_len=80 mem_len=2100 clamp_len=820 same_length=True eval_batch_size=10 "
                "num_core_per_host=1 do_train=False do_eval=True eval_split=test"
            ),
        },
        f"{dataset}_large": {
            "root": f"../data/{dataset}/",
            "model": "n_layer=24 d_model=1024 d_embed=1024 n_head=8 d_head=128 d_inner=3072",
            "train_data": (
                f"dataset={dataset} tgt_len=768 per_host_train_bsz=64 per_host_valid_bsz=64 num_core_per_host=16 "
                "num_passes=10 use_tpu=True"
            ),
            "test_data": (
                f"dataset={dataset} tgt_len=128 per_host_test_bsz=16 num_core_per_host=8 num_passes=1 use_tpu=True"
            ),
            "train": (
                "dropout=0.15 dropatt=0.15 learning_rate=0.00025 warmup_steps=4000 train_steps=400000 tgt_len=768 "
                "mem_len=768 train_batch_size=64 use_tpu=True num_host=2 num_core_per_host=16 iterations=1000 "
                "save_steps=10000 do_train=True do_eval=False"
            ),
            "eval": (
                "tgt_len=128 mem_len=3800 eval_batch_size=16 num_host=1 num_core_per_host=8 use_tpu=True "
                "do_train=False do_eval_only=True eval_split=test"
            ),
        },
        f"{dataset}_sota": {
            "root": f".//pretrained_xl/tf_{dataset}/data",
            "model": "n_layer=24 d_model=1024 d_embed=1024 n_head=8 d_head=128 d_inner=3072",
            "test_data": f"dataset={dataset} tgt_len=128 per_host_test_bsz=16 num_passes=1 use_tpu=False",
            "eval": (
                f"eval_ckpt_path=.//pretrained_xl/tf_{dataset}/model/model.ckpt-0 dropout=0.0 dropatt=0.0 tgt_len=128 "
                "mem_len=3800 clamp_len=1000 same_length=True eval_batch_size=16 num_core_per_host=2 do_train=False "
                "do_eval=True eval_split=test"
            ),
        },
    }


SCRIPTS = {
    **_of_characters("enwik8"),
    **_of_characters("text8"),
    "wt103_base": {
        "root": "../data/wikitext-103/",
        "model": (
            "div_val=1 untie_r=True proj_share_all_but_first=True n_layer=16 d_model=410 d_embed=410 n_head=10 "
            "d_head=41 d_inner=2100"
        ),
        "train_data": (
            "dataset=wt103 tgt_len=150 per_host_train_bsz=60 per_host_valid_bsz=60 num_passes=1 use_tpu=False"
        ),
        "test_data": "dataset=enwik8 tgt_len=64 per_host_test_bsz=10 num_passes=1 use_tpu=False",
        "train": (
            "dropout=0.1 dropatt=0.0 learning_rate=0.00025 warmup_steps=0 train_steps=400000 tgt_len=150 mem_len=150 "
            "train_batch_size=60 num_core_per_host=4 iterations=200 save_steps=4000"
        ),
        "eval": (
            "dropout=0.0 dropatt=0.0 tgt_len=64 mem_len=640 clamp_len=400 same_length=True eval_batch_size=10 "
            "num_core_per_host=1 do_train=False do_eval=True eval_split=test"
        ),
    },
    "wt103_large": {
        "root": "../data/wikitext-103/",
        "model": (
            "div_val=4 untie_r=True proj_share_all_but_first=True proj_same_dim=True n_layer=18 d_model=1024 "
            "d_embed=1024 n_head=16 d_head=64 d_inner=4096"
        ),
        "train_data": (
            "dataset=wt103 tgt_len=384 per_host_train_bsz=128 per_host_valid_bsz=128 num_core_per_host=16 "
            "num_passes=10 use_tpu=True"
        ),
        "test_data": "dataset=wt103 tgt_len=128 per_host_test_bsz=8 num_core_per_host=8 num_passes=1 use_tpu=True",
        "train": (
            "dropout=0.2 dropatt=0.2 init_std=0.005 learning_rate=0.00025 warmup_steps=16000 train_steps=4000000 "
            "tgt_len=384 mem_len=384 train_batch_size=128 num_hosts=4 num_core_per_host=16 iterations=1000 "
            "save_steps=10000 use_tpu=True do_eval=False"
        ),
        "eval": (
            "tgt_len=128 mem_len=1600 clamp_len=1000 same_length=True eval_batch_size=8 num_host=1 num_core_per_host=8 "
            "use_tpu=True do_train=False do_eval_only=True eval_split=test"
        ),
    },
    "wt103_sota": {
        "root": ".//pretrained_xl/tf_wt103/data",
        "model": (
            "div_val=4 untie_r=True proj_share_all_but_first=True n_layer=18 d_model=1024 d_embed=1024 n_head=16 "
            "d_head=64 d_inner=4096"
        ),
        "test_data": "dataset=enwik8 tgt_len=128 per_host_test_bsz=16 num_passes=1 use_tpu=False",
        "eval": (
            "eval_ckpt_path=.//pretrained_xl/tf_wt103/model/model.ckpt-0 dropout=0.0 dropatt=0.0 tgt_len=128 "
            "mem_len=1600 clamp_len=1000 same_length=True eval_batch_size=16 num_core_per_host=1 do_train=False "
            "do_eval=True eval_split=test"
        ),
    },
    "lm1b_base": {
        "root": "../data/one-billion-words/",
        "model": (
            "div_val=4 untie_r=True proj_share_all_but_first=False proj_same_dim=False n_layer=18 d_model=1024 "
            "d_embed=1024 n_head=8 d_head=128 d_inner=4096"
        ),
        "train_data": (
            "dataset=lm1b tgt_len=256 per_host_train_bsz=256 per_host_valid_bsz=256 num_passes=1 use_tpu=False"
        ),
        "test_data": "dataset=lm1b tgt_len=32 per_host_test_bsz=16 num_passes=1 use_tpu=False",
        "train": (
            "dropout=0.1 dropatt=0.0 learning_rate=0.00025 warmup_steps=0 train_steps=400000 tgt_len=256 mem_len=256 "
            "train_batch_size=256 num_core_per_host=4 iterations=200 save_steps=4000"
        ),
        "eval": (
            "dropout=0.0 dropatt=0.0 tgt_len=32 mem_len=128 clamp_len=-1 same_length=True eval_batch_size=16 "
            "num_core_per_host=1 do_train=False do_eval=True eval_split=test"
        ),
    },
    "lm1b_large": {
        "root": "../data/one-billion-words/",
        "model": (
            "div_val=4 untie_r=True proj_share_all_but_first=False proj_same_dim=False n_layer=24 d_model=1280 "
            "d_embed=1280 n_head=16 d_head=80 d_inner=8192"
        ),
        "train_data": (
            "dataset=lm1b tgt_len=32 per_host_train_bsz=16 per_host_valid_bsz=16 num_core_per_host=16 num_passes=10 "
            "use_tpu=True"
        ),
        "test_data": "dataset=lm1b tgt_len=32 per_host_test_bsz=8 num_core_per_host=8 num_passes=1 use_tpu=True",
        "train": (
            "dropout=0.05 dropatt=0.05 init_std=0.005 learning_rate=0.0001 warmup_steps=30000 train_steps=1200000 "
            "tgt_len=32 mem_len=32 train_batch_size=512 num_hosts=32 num_core_per_host=16 iterations=1000 "
            "save_steps=10000 use_tpu=True do_eval=False"
        ),
        "eval": (
            "tgt_len=32 mem_len=128 clamp_len=-1 same_length=True eval_batch_size=8 num_host=1 num_core_per_host=8 "
            "use_tpu=True do_train=False do_eval_only=True eval_split=test"
        ),
    },
    "lm1b_sota": {
        "root": ".//pretrained_xl/tf_lm1b/data",
        "model": (
            "div_val=4 untie_r=True proj_share_all_but_first=False proj_same_dim=False n_layer=24 d_model=1280 "
            "d_embed=1280 n_head=16 d_head=80 d_inner=8192"
        ),
        "test_data": "dataset=lm1b tgt_len=32 per_host_test_bsz=16 num_passes=1 use_tpu=False",
        "eval": (
            "eval_ckpt_path=.//pretrained_xl/tf_lm1b/model/model.ckpt-1191000 dropout=0.0 dropatt=0.0 tgt_len=32 "
            "mem_len=128 clamp_len=-1 same_length=True eval_batch_size=16 num_core_per_host=1 do_train=False "
            "do_eval=True eval_split=test"
        ),
    },
}


def _pairs(text):
    return dict(flag.split("=") for flag in text.split())


def _flags(command):
    """`{script: {flag: value}}` of all the scripts that have the command."""
    found = {}
    for name, script in SCRIPTS.items():
        root, (dataset, size) = script["root"], name.split("_")
        if command not in script:
            continue
        if command.endswith("_data"):
            found[name] = {"data_dir": f"{root}/", **_pairs(script[command])}
            continue
        found[name] = {
            "data_dir": f"/{dataset}-tfrecords" if size == "large" else f"{root}/tfrecords",
            "record_info_dir": f"{root}/tfrecords/",
            "corpus_info_path": f"{root}/corpus-info.json",
            "model_dir": f"/{dataset}" if size == "large" else f"EXP-{dataset}",
            **_pairs(script["model"]),
            **_pairs(script[command]),
        }
    return found


TRAIN_DATA, TEST_DATA, TRAIN, EVAL = map(_flags, ("train_data", "test_data", "train", "eval"))

# Defaults of the original's train_gpu.py. Its train.py, for TPUs, has 0.01 for min_lr_ratio.
DEFAULTS = _pairs(
    "learning_rate=0.00025 clip=0.25 min_lr_ratio=0.004 warmup_steps=0 train_batch_size=60 eval_batch_size=60 "
    "train_steps=100000 iterations=500 save_steps=10000 max_eval_batch=-1 eval_split=valid do_train=True do_eval=False "
    "do_eval_only=False tgt_len=70 mem_len=70 same_length=False clamp_len=-1 n_layer=6 d_model=500 d_embed=500 "
    "n_head=10 d_head=50 d_inner=1000 dropout=0.1 dropatt=0.1 untie_r=False div_val=1 proj_share_all_but_first=False "
    "proj_same_dim=True init=normal init_std=0.02 proj_init_std=0.01 init_range=0.1"
)
