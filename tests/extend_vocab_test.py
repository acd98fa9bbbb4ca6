"""A tagger that has learned one kind of text and goes on with another, most of whose characters are new to it.

docs/ner.md has the figures of this data, which `python tests/extend_vocab_test.py FOLDER` writes.
"""

import random
import sys
from pathlib import Path

import pytest
from helpers import mentions

from txl_tf.config import OptimizerConfig, TaggedConfig, TaggerTrainingConfig, TenerTaggerConfig
from txl_tf.runs.train import train_run

NOTES = {
    "检查": "血常规 心电图 胸部CT 头颅MRI 肝功能 尿检 胃镜", "药物": "阿司匹林 头孢 布洛芬 胰岛素 硝苯地平 阿莫西林",
    "症状": "头痛 胸闷 咳嗽 发热 恶心 腹痛 乏力 呕吐", "疾病": "高血压 糖尿病 肺炎 冠心病 胃溃疡 哮喘",
    "部位": "左肺 右肾 头部 腹部 心脏 膝盖", "人": "王医生 李大夫 张主任 刘护士",
}  # fmt: skip
IN_NOTES = [
    "患者{症状}三天，伴{症状}，{部位}不适。", "{人}建议行{检查}，排除{疾病}。", "既往{疾病}病史，口服{药物}治疗。",
    "{检查}示{部位}异常，考虑{疾病}。", "给予{药物}后{症状}缓解，{人}查房。", "无{症状}及{症状}，{检查}正常。",
]  # fmt: skip
REVIEWS = {
    "品牌": "华为 小米 苹果 索尼 联想 雷蛇 飞利浦 美的", "产品": "手机 耳机 键盘 电饭煲 显示屏 充电宝 吹风机 台灯",
    "方面": "续航 音质 外观 手感 价格 包装 物流 客服 做工",
    "评价": "很差劲 非常棒 一般般 超级赞 太贵了 挺划算 有点慢 特别喜欢",
}  # fmt: skip
IN_REVIEWS = [
    "买了{品牌}{产品}，{方面}{评价}！", "{产品}的{方面}{评价}，推荐给朋友。",
    "双十一抢购的{品牌}，快递第二天就收到，{方面}{评价}。", "用过{品牌}和{品牌}，还是{品牌}的{方面}{评价}。",
    "这款{产品}颜值高，{方面}{评价}，但{方面}{评价}。", "第三次回购{产品}，{评价}，值得入手。",
    "店家说{品牌}{产品}断货，退款{评价}。",
]  # fmt: skip
SPLITS = (("hosp.train", NOTES, IN_NOTES, 500), ("hosp.dev", NOTES, IN_NOTES, 150),
          ("rev.train", REVIEWS, IN_REVIEWS, 400), ("rev.dev", REVIEWS, IN_REVIEWS, 150))  # fmt: skip


def sentence(rng, names, templates):
    """Characters and their tags; 3% of the names are unseen ones of known characters."""
    rows, text = [], rng.choice(templates)
    while text:
        if text[0] != "{":
            rows, text = [*rows, (text[0], "O")], text[1:]
            continue
        kind, text = text[1:].split("}", 1)
        name = rng.choice(names[kind].split())
        if rng.random() < 0.03:
            name = "".join(rng.sample(names[kind].replace(" ", ""), max(2, len(name) - 1)))
        rows += [(c, ("I-" if i else "B-") + kind) for i, c in enumerate(name)]
    return rows


def write(folder):
    """Writes hosp.train, hosp.dev, rev.train and rev.dev."""
    for name, names, templates, number in SPLITS:
        what, split = name.split(".")
        rng = random.Random(f"{what}{1 if split == 'train' else 2}")
        rows = (sentence(rng, names, templates) for _ in range(number))
        text = "\n".join("".join(f"{c} {tag}\n" for c, tag in each) for each in rows)
        (Path(folder) / name).write_text(text, encoding="utf-8")


@pytest.mark.slow
def test_fine_tuning_on_new_characters_is_as_good_as_a_training_from_scratch(tmp_path, capsys):
    """Where they are unknown, a quarter of the F1 is missing."""
    write(tmp_path)

    def f1(run, what, steps=300, **training):
        files = {
            f"{split}_path": str(tmp_path / f"{what}.{part}") for split, part in (("train", "train"), ("valid", "dev"))
        }
        steps = {"train_steps": steps, "iterations": steps, "save_steps": steps, "seed": 1}
        optimizer = {"learning_rate": 1e-3, "clip": None, "clip_value": 5.0, "schedule": "linear", "warmup_steps": 60}
        return train_run(
            str(tmp_path / run),
            data=TaggedConfig(**files),
            model=TenerTaggerConfig(n_layer=1, d_model=128, n_head=8, d_inner=384),
            optimizer=OptimizerConfig(**optimizer),
            training=TaggerTrainingConfig(**steps, **training),
        )["valid"]["f1"]

    f1("notes", "hosp", 400)
    scratch = f1("scratch", "rev")
    extended = f1("extended", "rev", init_from=str(tmp_path / "notes"), extend_vocab=True)
    said = capsys.readouterr().out
    assert mentions(said, "extend_vocab", 108) and extended > scratch - 0.01
    unknown = f1("unknown", "rev", init_from=str(tmp_path / "notes"))
    assert "<unk>" in capsys.readouterr().out and unknown < scratch - 0.1


if __name__ == "__main__":
    write(sys.argv[1])
