"""The page in Chinese: labels, sentences, and messages of the library that a visitor can meet."""

# Labels and hints of components: the texts that a page has when it is opened.
LABELS = {
    "# Look into a trained model": "# 看看训练好的模型",
    "Language models": "语言模型",
    "Encoder-decoders": "编码器-解码器",
    "Taggers": "序列标注",
    "Runs, at most two side by side": "模型（最多选两个，并排比较）",
    "Stop": "停止",
    # Generate
    "Generate": "生成",
    "The model continues your prompt, token by token, in the style of the text that it was trained on.": (
        "模型接着提示词逐个 token 往下写，风格与训练文本一致。"
    ),
    "Prompt": "提示词",
    "New tokens": "生成的 token 数",
    "Samples": "样本数",
    "Temperature": "温度（temperature）",
    "0 takes the most likely token": "0：每次取概率最大的 token",
    "Continue": "继续",
    "More options": "更多选项",
    "Top k": "Top k",
    "only the k most likely tokens; empty: all": "只从概率最大的 k 个 token 中取；留空则不限",
    "Top p": "Top p",
    "only the most likely tokens that together have this probability": "只从概率之和达到 p 的最可能的 token 中取",
    "Min p": "Min p",
    "no tokens less likely than this fraction of the most likely one": "不取概率低于“最大概率 × 此值”的 token",
    "Repetition penalty": "重复惩罚",
    "above 1: tokens that were just written become less likely": "大于 1 时，刚出现过的 token 概率降低",
    "Repetition window": "重复窗口",
    "the penalty looks at so many last tokens": "重复惩罚考察最近多少个 token",
    "Seed": "随机种子",
    "empty: another text every time. Continue keeps the seed of the text": "留空则每次结果不同；“继续”沿用原文本的种子",
    "Stop strings": "停止字符串",
    r"one per line; \n is a newline": r"每行一个；\n 表示换行",
    "Stop at the end of a line": "遇到行尾停止",
    "Stop at the end of a document": "遇到文档末尾停止",
    # Score, Memory
    "Score": "评分",
    "The stronger the colour of a token, the less the model expected it. Click a token to see the alternatives.": (
        "颜色越深的 token，模型越没有料到。点击一个 token，查看此处还可能出现什么。"
    ),
    "Memory": "记忆",
    "Show the memory": "查看记忆",
    "The greener a token, the more the memory helps to predict it. Click a token to see where the model looks.": (
        "颜色越绿的 token，记忆（memory）对预测它的帮助越大。点击一个 token，查看模型的注意力落在哪里。"
    ),
    "Text": "文本",
    # encoder-decoders
    "The best targets for a source line. Click a target to see where each head looks.": (
        "一个源句的最佳译文。点击一条译文，查看生成它时每个头的注意力落在哪里。"
    ),
    "Source": "源句",
    "Beams": "束宽（beam size）",
    "Targets": "译文数",
    "Length penalty": "长度惩罚",
    "Translate": "翻译",
    # taggers
    "The entities of a sentence, with types and probabilities. Click a token to see where it looks.": (
        "句子中的实体及其类型和概率。点击一个字，查看它的注意力落在哪里。"
    ),
    "Sentence": "句子",
    "Tag": "标注",
}

# Sentences in answers of the page, and the names that are inserted into them.
SENTENCES = {
    # what the models are
    "It has {number:,} weights.": "它有 {number:,} 个参数。",
    "Paper": "论文",
    "a model of the family {family}.": "属于 {family} 一族。",
    "is a Transformer-XL: it predicts each token of a text from earlier tokens, and keeps a memory of what it read.": (
        "是一个 Transformer-XL：根据前面的 token 预测文本的每个 token，并对读过的内容保留记忆。"
    ),
    "is a vanilla Transformer language model: it predicts each token of a text from the tokens in its window, "
    "without memory.": "是一个普通 Transformer 语言模型：根据窗口内的 token 预测文本的每个 token，没有记忆。",
    "is an encoder-decoder: it reads a source line and generates a target line.": (
        "是一个编码器-解码器：读入一行源句，生成一行译文。"
    ),
    "is a TENER tagger: it finds the entities of a sentence, and its attention tells left from right.": (
        "是一个 TENER 标注模型：找出句子中的实体，其注意力能区分左右。"
    ),
    "is a FLAT tagger: it finds the entities of a sentence. It also reads the words of a lexicon.": (
        "是一个 FLAT 标注模型：找出句子中的实体，并读入词典在句中匹配到的词。"
    ),
    "is a BiLSTM tagger: it finds the entities of a sentence.": "是一个 BiLSTM 标注模型：找出句子中的实体。",
    "It was trained on Python's reference manual.": "训练文本是 Python 语言参考手册。",
    "It was trained on made-up dates, which it writes as ISO 8601.": (
        "训练数据是人造的日期，它把日期写成 ISO 8601 格式。"
    ),
    "It was trained on made-up sentences about people and towns.": "训练数据是关于人和城镇的人造句子。",
    # names in messages
    "The text": "文本",
    "The prompt": "提示词",
    "The source": "源句",
    "The sentence": "句子",
    "text": "文本",
    "source": "源句",
    "New tokens": "“生成的 token 数”",
    "Samples": "“样本数”",
    "Targets": "“译文数”",
    "temperature": "“温度”",
    "top_k": "“Top k”",
    "top_p": "“Top p”",
    "min_p": "“Min p”",
    "repetition_penalty": "“重复惩罚”",
    "repetition_window": "“重复窗口”",
    "seed": "“随机种子”",
    "length_penalty": "“长度惩罚”",
    "beam_size": "“束宽”",
    "n_best": "“译文数”",
    # wrong input
    "{name} is empty. Type or paste a text.": "{name}为空：请输入或粘贴内容。",
    "{name} has {number:,} characters. This page accepts at most {most:,}.": (
        "{name}有 {number:,} 个字符；本页最多接受 {most:,} 个。"
    ),
    "{name} has {number:,} tokens. This page accepts at most {most:,}.": (
        "{name}有 {number:,} 个 token；本页最多接受 {most:,} 个。"
    ),
    "{name} must be a whole number from 1 to {most:,}, got {value}.": (
        "{name}必须是 1 到 {most:,} 之间的整数，现在是 {value}。"
    ),
    "{name} must be a whole number, or empty, got {value}": "{name}必须是整数或留空，现在是 {value}",
    "{name} must be a number, and is empty.": "{name}必须是数字，现在为空。",
    "Choose one run, or two to compare. {number} are chosen.": "请选一个模型，或选两个比较；现在选了 {number} 个。",
    "There is no answer yet, or this click belongs to another page.": "还没有结果，或者这次点击属于另一个页面。",
    "This click belongs to another {what}. {remedy}": "这次点击属于另一个{what}。{remedy}",
    "page": "页面",
    "model": "模型",
    "Load the page again.": "请重新加载页面。",
    "Score the text again.": "请重新评分。",
    "Translate the source again.": "请重新翻译。",
    "Tag the sentence again.": "请重新标注句子。",
    "There is no text to continue, or the page has forgotten it. Generate a text first.": (
        "没有可继续的文本，或者它已被清除：请先生成一段文本。"
    ),
    "The text has one token only. No token before it can predict it.": (
        "文本只有一个 token：它前面没有可用来预测它的内容。"
    ),
    "The source has several lines. This page translates one line.": "源句有多行：本页一次翻译一行。",
    "The sentence has several lines. This page tags one line.": "句子有多行：本页一次标注一行。",
    "Targets must be at most Beams, {most}, got {value}.": "“译文数”不能超过“束宽” {most}，现在是 {value}。",
    "Beams must be one of {allowed}, got {value}.": "“束宽”必须是 {allowed} 之一，现在是 {value}。",
    "A box cannot hold {value}.": "输入框不接受 {value}。",
    "This request cannot be answered. The server's terminal says why.": "无法处理这个请求。原因见服务器的终端输出。",
    # requests that do not reach the page
    "The request names another host than this page's: see --host.": "请求中的主机名不是本页的主机名：参见 --host。",
    "The request comes from a page of another site.": "请求来自其他网站的页面。",
    "This page has no such address.": "本页没有这个地址。",
    "The request names no session.": "请求没有指明会话。",
    "Too many visitors have this page open: try again later.": "打开本页的访客太多：请稍后再试。",
    "The request is not JSON.": "请求不是 JSON。",
    "The request is no JSON object.": "请求不是 JSON 对象。",
    "The request took more than {seconds} seconds to come.": "请求超过 {seconds} 秒仍未传完。",
    "The request asks for what this page does not have: load the page again.": ("请求的内容本页没有：请重新加载页面。"),
    "The request has more or fewer values than this page sends: load the page again.": (
        "请求中值的个数与本页不符：请重新加载页面。"
    ),
    "The request has a field that this page does not send: load the page again.": (
        "请求含有本页不会发送的字段：请重新加载页面。"
    ),
    "The request has no {name}, or a wrong one: load the page again.": "请求缺少 {name}，或其值有误：请重新加载页面。",
    "trigger_id must be a whole number.": "trigger_id 必须是整数。",
    "A request to this page has at most {most:,} bytes, and no files.": (
        "对本页的请求最多 {most:,} 字节，且不能含文件。"
    ),
    "A request to this page has at most {most:,} values.": "对本页的请求最多含 {most:,} 个值。",
    "The request ended too early.": "请求中断。",
    # language models
    "{number} tokens, seed {seed}": "{number} 个 token，随机种子 {seed}",
    "{number} tokens, seed {seed}, ended": "{number} 个 token，随机种子 {seed}，已结束",
    "Sample {i}: {rest}": "样本 {i}：{rest}",
    "{done:,} of {total:,} tokens are read": "已读 {done:,} / {total:,} 个 token",
    "nothing predicts the first token": "第一个 token 没有预测",
    "{token}: {bits:.3f} bits, probability {prob:.3g}": "{token}：{bits:.3f} bits，概率 {prob:.3g}",
    "tokens": "个 token",
    "bits per token": "bits / token",
    "perplexity": "困惑度",
    "expected": "意料之中",
    "a surprise of {bits:.0f} bits or more": "意外程度达到 {bits:.0f} bits 或更多",
    "Alternatives for token {place}": "第 {place} 个 token 的其他可能",
    "Probabilities of the most likely tokens; the token of the text is outlined.": (
        "最可能的各个 token 的概率；文本中实际的 token 用框标出。"
    ),
    "{token}: memory saves {bits:.2f} bits": "{token}：记忆节省 {bits:.2f} bits",
    "{token}: memory costs {bits:.2f} bits": "{token}：记忆多用 {bits:.2f} bits",
    "bits per token without memory": "bits / token，无记忆",
    "with {kept} positions of memory": "记忆 {kept} 个位置",
    "with all {kept} positions of memory": "全部 {kept} 个位置的记忆",
    "memory of this model": "记忆（该模型没有）",
    "no": "无",
    "The model reads {number} tokens at a time: a blue bar stands before the first that such a segment predicts. "
    "The memory is what the model keeps of the segments before.": (
        "模型每次读 {number} 个 token：蓝色竖线位于这样一个 segment 预测的第一个 token 之前。"
        "记忆是模型对之前各 segment 的保留。"
    ),
    "The model reads {number} tokens at a time: a blue bar stands before the first that such a segment predicts.": (
        "模型每次读 {number} 个 token：蓝色竖线位于这样一个 segment 预测的第一个 token 之前。"
    ),
    "memory saves 0": "记忆节省 0",
    "{bits:.0f} bits or more": "{bits:.0f} bits 或更多",
    "costs": "记忆有害",
    "Token {place}, {token}: where the model looks to predict it": "第 {place} 个 token {token}：预测它时模型的注意力",
    "This model has no memory.": "该模型没有记忆。",
    "no memory": "无记忆",
    "half: {kept}": "一半：{kept}",
    "all: {kept}": "全部：{kept}",
    "{bits:.3f} bits": "{bits:.3f} bits",
    "{token}: {prob:.3f} of the attention, {back} back": "{token}：注意力的 {prob:.3f}，往前第 {back} 个",
    "the mean of all heads": "所有头的平均",
    "mean of all heads": "所有头的平均",
    "layer {layer}, head {head}": "第 {layer} 层，第 {head} 头",
    "layer {layer} head {head}": "第 {layer} 层 第 {head} 头",
    "{which}: {share:.0%} of the attention goes to the memory, which is underlined": (
        "{which}：{share:.0%} 的注意力落在记忆上（带下划线）"
    ),
    "; {share:.0%} of all attention to the zeros before the text": "；全部注意力的 {share:.0%} 落在文本之前的零上",
    "Layer": "层",
    "Shown above:": "上图所示：",
    # encoder-decoders
    "target": "译文",
    "score, nats": "得分（nats）",
    "The score is the log-probability; of a search, divided by the length penalty. Click a target.": (
        "得分是对数概率；束搜索时再除以长度惩罚。点击一条译文。"
    ),
    "Layer {layer}, head": "第 {layer} 层，头",
    "Layer {layer}, head {head}: where it looks to write “{target}”": (
        "第 {layer} 层，第 {head} 头：生成“{target}”时的注意力"
    ),
    "A row is a symbol that is written; a column, one of the source. Rows sum to 1; colours are roots.": (
        "每行是一个生成的符号，每列是源句的一个符号。每行之和为 1；颜色深浅按平方根。"
    ),
    # taggers
    "Entities": "实体",
    "Without {words}: {change}": "去掉 {words}：{change}",
    "No picture of attention: this network has none.": "没有注意力图：该网络没有注意力。",
    "No picture: the sentence has {number:,} tokens, and a picture at most {most}.": (
        "没有图：句子有 {number:,} 个 token，图中最多 {most} 个。"
    ),
    "{text}: {share:.3f} of the attention": "{text}：注意力的 {share:.3f}",
    "The lattice: characters, and the words that the lexicon finds": "词格：字，以及词典匹配到的词",
    "What the network reads": "网络的输入",
    "Click a character or a word: what it attends to is coloured.": "点击一个字或词：它所关注的位置会着色。",
    "none": "无",
    "most of the attention": "大部分注意力",
    "Attention": "注意力",
    "Take out of the lexicon": "从词典中去掉",
    "Put back": "放回词典",
    "{gone} of {number} entities disappear, {come} are new": "{number} 个实体中少了 {gone} 个，新增 {come} 个",
    "the same entities, probabilities change by at most {most:.3f}": "实体不变，概率最多变化 {most:.3f}",
}

# Pattern of a whole message of the library -> sentence for the page. The groups of the pattern are inserted into the
# sentence. A group whose text is a key of SENTENCES is translated.
MESSAGES = {
    r"(?P<name>[^:]*?)(?:, line \d+)?: (?P<symbol>.+?) is not in the vocabulary of (?P<number>[\d,]+) symbols.*": (
        "{name}：{symbol} 不在该模型的词表（{number} 个符号）中，请删去或换掉它。"
    ),
    r"(?P<name>\w+) must be 0 or more, got (?P<value>.*)": "{name}必须不小于 0，现在是 {value}。",
    r"(?P<name>\w+) must be 0 or more, at most (?P<most>\S+), got (?P<value>.*)": (
        "{name}必须不小于 0 且不超过 {most}，现在是 {value}。"
    ),
    r"(?P<name>\w+) must be positive, at most (?P<most>\S+), got (?P<value>.*)": (
        "{name}必须大于 0 且不超过 {most}，现在是 {value}。"
    ),
    r"(?P<name>\w+) must lie in (?P<range>[(\[].*?[)\]]), got (?P<value>.*)": (
        "{name}必须在 {range} 之内，现在是 {value}。"
    ),
    r"(?P<name>\w+) must be an integer from (?P<least>-?\d+) to (?P<most>\d+), got (?P<value>.*)": (
        "{name}必须是 {least} 到 {most} 之间的整数，现在是 {value}。"
    ),
    r"seed must be an integer of 32 bits.*got (?P<value>.*)": "“随机种子”必须是 32 位整数，现在是 {value}。",
    r".*cannot spell the stop string (?P<text>.*?)(?:[:,;].*)?": "词表无法拼出停止字符串 {text}。",
    r"(?P<name>.*?) is empty: it must have at least one token": "{name}为空：至少需要一个 token。",
    r".* has (?P<number>[\d,]+) symbols, its end included; .*max_len=(?P<most>\d+)": (
        "这一行连同结束符有 {number} 个符号；该模型最多接受 {most} 个。"
    ),
}
# For all other messages of the library.
OTHER = "模型不接受这个输入：{message}"
