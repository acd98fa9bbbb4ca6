"""Columns of tagged files: CoNLL-U, MultiCoNER, comments, tokens with spaces; read as they are meant, or refused."""

import pytest
from helpers import mentions, raises_parameter, write_text

from txl_tf.config import ColumnsConfig, TaggedConfig
from txl_tf.data.tagged.columns import BLANK, columns_in, line_of, with_blanks
from txl_tf.data.tagged.sentences import read_corpus, read_tagged, read_tagged_as
from txl_tf.errors import ParameterError

CONLLU = """# sent_id = 1
# text = The cat doesn't sit
1\tThe\tthe\tDET\tDT\t_\t2\tdet\t_\t_
2\tcat\tcat\tNOUN\tNN\t_\t4\tnsubj\t_\t_
3-4\tdoesn't\t_\t_\t_\t_\t_\t_\t_\t_
3\tdoes\tdo\tAUX\tVBZ\t_\t5\taux\t_\t_
4\tn't\tnot\tPART\tRB\t_\t5\tadvmod\t_\t_
5\tsit\tsit\tVERB\tVB\t_\t0\troot\t_\tSpaceAfter=No
5.1\tthere\tthere\tADV\tRB\t_\t_\t_\t5:advmod\t_

# newdoc
# text = Hà Nội
1\tHà Nội\tHà Nội\tPROPN\tNNP\t_\t0\troot\t_\t_
"""
MULTICONER = "# id 5239d808-f300\tdomain=en\nin _ _ O\nNew _ _ B-LOC\nYork _ _ I-LOC\n\n# id 7\tdomain=en\n# _ _ O\n"
IN_TWO = "# text = The cat\nThe\tDET\ncat\tNOUN\n\n# a remark\n#\tSYM\n1\tNUM\n\n$\tSYM\n"


def read(folder, text, scheme=None, **columns):
    """`(tokens, tags)` of every sentence."""
    sentences = read_tagged(write_text(folder / "file", text), scheme=scheme, columns=ColumnsConfig(**columns))
    return [sentence[:2] for sentence in sentences]


def test_conll_u(tmp_path):
    words = [["The", "cat", "does", "n't", "sit"], ["Hà␣Nội"]]
    tags = [["DET", "NOUN", "AUX", "PART", "VERB"], ["PROPN"]]
    expected = list(zip(words, tags, strict=True))
    for columns in ({"tag_column": 4}, {"tag_column": -7}, {"token_column": 2, "tag_column": 4}):
        assert read(tmp_path, CONLLU, "none", **columns) == expected
    lemmas = [["the", "cat", "do", "not", "sit"], ["Hà␣Nội"]]
    assert [tokens for tokens, _ in read(tmp_path, CONLLU, "none", token_column=3, tag_column=5)] == lemmas
    sentence = read_tagged(write_text(tmp_path / "file", CONLLU), scheme="none", columns=ColumnsConfig(tag_column=4))[0]
    assert [line_of(sentence, i) for i in range(5)] == [3, 4, 6, 7, 8]
    with raises_parameter(f"{tmp_path}/file, line 6", "AUX", ["DET", "NOUN"]):
        read_tagged_as(tmp_path / "file", ["DET", "NOUN"], scheme="none", columns=ColumnsConfig(tag_column=4))


@pytest.mark.parametrize("scheme", [None, "none"])
@pytest.mark.parametrize("columns", [{}, {"token_column": 2}])
def test_conll_u_without_a_column_of_tags_is_refused(tmp_path, scheme, columns):
    with pytest.raises(ParameterError) as caught:
        read(tmp_path, CONLLU, scheme, **columns)
    assert (caught.value.name, caught.value.value) == ("tag_column", None) and mentions(str(caught.value), "file", 3)


def test_other_files_that_number_their_tokens(tmp_path):
    """As UniversalNER's, and CoNLL-X without comments; the numbers need not begin with 1."""
    text = "# sent_id = 1\n1\tin\tO\t-\t-\n2\tOslo\tB-LOC\t-\t-\n"
    assert read(tmp_path, text, tag_column=3) == [(["in", "Oslo"], ["O", "B-LOC"])]
    assert read(tmp_path, "0 a X O\n1 b X B-Y\n", tag_column=-1) == [(["a", "b"], ["O", "B-Y"])]
    assert read(tmp_path, "0 a X O\n1 b X B-Y\n", token_column=1) == [(["0", "1"], ["O", "B-Y"])]
    numbered = "".join(f"{i} a X O\n" for i in range(20))
    with raises_parameter(f"{tmp_path}/file, line 21", "x b X O"):
        read(tmp_path, numbered + "x b X O\n", tag_column=4)


def test_multiconer(tmp_path, caplog):
    expected = [(["in", "New", "York"], ["O", "B-LOC", "I-LOC"]), (["#"], ["O"])]
    with caplog.at_level("INFO", "txl_tf"):
        for scheme in (None, "none"):
            assert read(tmp_path, MULTICONER, scheme) == expected
    assert sum(mentions(line, 2, 1, "'# id 5239d808-f300\\tdomain=en'") for line in caplog.messages) == 2


def test_comments_in_files_of_two_columns(tmp_path):
    expected = [(["The", "cat"], ["DET", "NOUN"]), (["#", "1"], ["SYM", "NUM"]), (["$"], ["SYM"])]
    assert read(tmp_path, IN_TWO, "none") == expected
    assert read(tmp_path, IN_TWO.replace("\t", " "), "none") == expected
    ner = "# text = Type B\nType O\nB O\n\n# id\n\n#begin document (x); part 000\n# O\n#0 B-X\n\n#end document\n"
    assert read(tmp_path, ner) == [(["Type", "B"], ["O", "O"]), (["#", "#0"], ["O", "B-X"])]


def test_what_may_be_a_comment_or_a_token_is_asked_for(tmp_path):
    text = "# remark\nThe DET\n\ncat NOUN\n"
    with raises_parameter(f"{tmp_path}/file, line 1", "# remark"):
        read(tmp_path, text, "none")
    assert read(tmp_path, text, "none", comments=True)[0] == (["The"], ["DET"])
    assert read(tmp_path, text, "none", comments=False)[0] == (["#", "The"], ["remark", "DET"])
    assert read(tmp_path, "# O\n#b O\nc O\n", comments=True) == [(["c"], ["O"])]
    assert read(tmp_path, "# O\n\n#0 O\n") == [(["#"], ["O"]), (["#0"], ["O"])]
    with raises_parameter(f"{tmp_path}/file", None):
        read(tmp_path, "# O\n", comments=True)


def test_json_too_deep_to_read_is_an_error_of_the_file(tmp_path):
    with raises_parameter(f"{tmp_path}/file, line 1", "[" * 100_000):
        read(tmp_path, "[" * 100_000 + "\n")


@pytest.mark.parametrize("scheme", [None, "none"])
@pytest.mark.parametrize("text", ["a O\n# text = b c\nb O\n", "# O\n# text = b c\nb O\n", "a x O\n# text = O\n"])
def test_a_comment_within_a_sentence_is_refused(tmp_path, scheme, text):
    with raises_parameter(f"{tmp_path}/file, line 2"):
        read(tmp_path, text, scheme)


def test_columns_by_number(tmp_path):
    text = "EU NNP I-NP I-ORG\nrejects VBZ I-VP O\n"
    tokens = ["EU", "rejects"]
    assert read(tmp_path, text) == [(tokens, ["I-ORG", "O"])]
    assert read(tmp_path, text, tag_column=3) == [(tokens, ["I-NP", "I-VP"])]
    assert read(tmp_path, text, "none", tag_column=2) == [(tokens, ["NNP", "VBZ"])]
    assert read(tmp_path, "O\ta\nB-X\tb\n", token_column=-1, tag_column=1) == [(["a", "b"], ["O", "B-X"])]


@pytest.mark.parametrize("name, column", [("tag_column", 5), ("token_column", -5), ("tag_column", 1)])
def test_columns_that_are_not_there_are_named(tmp_path, name, column):
    with pytest.raises(ParameterError) as caught:
        read(tmp_path, "EU NNP I-NP I-ORG\n", **{name: column})
    assert (caught.value.name, caught.value.value) == (name, column) and mentions(str(caught.value), "file", 1)


def test_a_line_with_a_single_column_is_named(tmp_path):
    with raises_parameter(f"{tmp_path}/file, line 2", "b"):
        read(tmp_path, "a O\nb\n")


@pytest.mark.parametrize("name", ["token_column", "tag_column"])
def test_there_is_no_column_0(name):
    with pytest.raises(ParameterError) as caught:
        TaggedConfig(**{name: 0})
    assert caught.value.name == name


def test_lines_of_several_widths(tmp_path):
    """A tag that is missing would be another column; with a column from the start, widths may vary as in CoNLL-2012."""
    text = "a X DET\nb NOUN\n"
    with raises_parameter(f"{tmp_path}/file, line 2", "b NOUN"):
        read(tmp_path, text, "none")
    assert read(tmp_path, text, "none", tag_column=2) == [(["a", "b"], ["X", "NOUN"])]
    with raises_parameter("tag", "DET") as raised:
        read(tmp_path, text)
    assert f"{tmp_path}/file, line 1: " in str(raised.value)
    assert mentions(str(raised.value), "--token_column", "--tag_column")
    rows = ["bc/x 0 0 a NN (A*) -", "bc/x 0 1 b NN *) * -"]
    text = "#begin document (bc/x); part 000\n" + "\n".join(rows) + "\n\n" + "\n".join(rows) + "\n#end document\n"
    with raises_parameter(f"{tmp_path}/file, line 3", "bc/x 0 1 b NN *) * -") as raised:
        read(tmp_path, text.replace("#end document\n", ""), "none")
    assert mentions(str(raised.value), 3, 8, 2, 7)
    same = "\n".join(f"bc/x 0 {i} w NN" for i in range(2)) + "\n"
    with pytest.raises(ParameterError) as caught:
        read(tmp_path, f"{same}\n{same}", "none")
    assert caught.value.name == "token_column"
    assert read(tmp_path, f"{same}\n{same}", "none", token_column=4) == 2 * [(["w", "w"], ["NN", "NN"])]


def test_json_is_refused(tmp_path):
    row = '{"text": "浙商银行企业", "label": {"company": {"浙商银行": [[0, 3]]}}}\n'
    for scheme in (None, "none"):
        with raises_parameter(
            f"{tmp_path}/file, line 1", '{"text": "浙商银行企业", "label": {"company": {"浙商银行": [[0, 3]]}}}'
        ):
            read(tmp_path, row, scheme)
    assert read(tmp_path, "[ O\n{ O\n") == [(["[", "{"], ["O", "O"])]


# ------------------------------------------------------------------------------------------------------------ spaces


def test_tabs_separate_columns_where_all_lines_have_them(tmp_path):
    assert read(tmp_path, "New York\tB-LOC\nis\tO\n") == [(["New␣York", "is"], ["B-LOC", "O"])]
    assert read(tmp_path, "高\tO\n \tO\n山\tO\n") == [(["高", BLANK, "山"], ["O"] * 3)]
    assert read(tmp_path, "a NN\tB-X\nb VB\tO\n") == [(["a", "b"], ["B-X", "O"])]  # three columns everywhere
    assert read(tmp_path, "c \t NN  O \nb NN B-X\n") == [(["c", "b"], ["O", "B-X"])]


def test_spaces_and_tabs_are_one_symbol():
    assert with_blanks(["a", " ", "\t", "b c", BLANK, "\u3000"]) == ["a", BLANK, BLANK, "b␣c", BLANK, "\u3000"]
    assert with_blanks("ab") == "ab" and with_blanks("a b") == ["a", BLANK, "b"]


def test_words_with_spaces_are_warned_of(tmp_path, caplog):
    path = write_text(tmp_path / "file", "New York\tB-LOC\nis\tO\n")
    read_corpus(TaggedConfig(train_path=path, valid_path=path, token_level="word"))
    assert mentions(caplog.text, "file", 1, "'New␣York'", 2)


def test_what_tag_py_writes_is_read_whatever_the_run_has_read(tmp_path):
    """Of a run with digits of segmentation, and of one whose tags are no entities: the label tells "#" apart."""
    path = write_text(tmp_path / "out", "科 B-X\n1 O\n\n␣ O\n")
    assert [s.tokens for s in read_tagged_as(path, ["O", "B-X", "I-X"], segment_digits=True)] == [["科", "1"], ["␣"]]
    digits = write_text(tmp_path / "digits", "科0 B-X\n10 O\n")
    assert read_tagged_as(digits, ["O", "B-X", "I-X"], segment_digits=True)[0].tokens == ["科", "1"]
    path = write_text(tmp_path / "pos", "# SYM\n1 NUM\n")
    assert read_tagged_as(path, ["NUM", "SYM"], scheme="none")[0].tokens == ["#", "1"]
    with raises_parameter(f"{tmp_path}/pos, line 1", "# SYM"):
        read_tagged(path, scheme="none")
    for columns in ({"token_column": 2, "tag_column": 4}, {"tag_column": 4}, {"token_column": 2}):
        read = read_tagged_as(path, ["NUM", "SYM"], scheme="none", columns=columns_in(path, ColumnsConfig(**columns)))
        assert read[0][:2] == (["#", "1"], ["SYM", "NUM"])
