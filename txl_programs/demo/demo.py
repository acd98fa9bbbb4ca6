"""Opens a web page on this machine that shows what models read, remember and generate.

    txl-demo --model_dir=runs/quickstart
    txl-demo --model_dir=runs/quickstart --model_dir=runs/other --port=7861
    txl-demo --model_dir=runs/dates --model_dir=runs/flat_resume

The page has a tab for each task of the runs, and can compare two runs of one task.

language models   Generate: continues a prompt, with all sampling options. Score: a text coloured by nll; click a token
                  to see the most likely tokens in its place. Memory: the benefit of the memory; click a token to see
                  the attention of every layer and head, and its nll with no memory, half of it and all of it.
encoder-decoders  The best translations with their scores, and the attention of each head to the source.
taggers           Entities with probabilities, FLAT's lattice, the attention of an item, and the effect of a word of the
                  lexicon.

The server accepts connections from this machine only, unless --host says otherwise. It loads nothing from the network
and sends no reports. --max_tokens, --max_new_tokens, --max_rows and --visitors limit the requests. Ctrl-C stops it.

It needs gradio: pip install "txl_tf[demo]".
"""

import os

from absl import flags

from txl_programs.flag_values import FLAGS
from txl_programs.program import read_flags, run

flags.DEFINE_multi_string("model_dir", None, "Folder of a run. May be given several times.")
flags.DEFINE_string("host", "127.0.0.1", "Address to listen at. 0.0.0.0 also accepts other machines.")
flags.DEFINE_integer("port", 7860, "Port to listen at; 0 for a free one.", lower_bound=0, upper_bound=65535)
flags.DEFINE_integer("max_tokens", 2000, "Most tokens of a text to read.", lower_bound=2, upper_bound=100_000)
flags.DEFINE_integer("max_new_tokens", 500, "Most tokens to generate at a time.", lower_bound=1, upper_bound=100_000)
flags.DEFINE_integer("max_rows", 4, "Most samples to generate at a time.", lower_bound=1, upper_bound=64)
flags.DEFINE_integer("visitors", 4, "Requests to answer at the same time. Others wait.", lower_bound=1, upper_bound=64)
flags.DEFINE_bool("examples", True, "Show the answers to the example texts when the page is opened.")
flags.mark_flag_as_required("model_dir")

if __name__ == "__main__":
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # oneDNN keeps memory for every length of text

read_flags(__name__)

from txl_config.environment import is_installed
from txl_config.errors import ParameterError
from txl_programs.demo.limits import Limits
from txl_programs.flag_values import values
from txl_programs.opening import names_of

MISSING = 'the page needs gradio: pip install "txl_tf[demo]"'


def main():
    if not is_installed("gradio"):
        raise ValueError(MISSING)
    from txl_programs.demo.runs import OpenRun
    from txl_programs.demo.shell import serve

    names = names_of(FLAGS.model_dir)
    if len(set(names)) < len(names):
        message = f"model_dir must name different runs, got {', '.join(names)}"
        raise ParameterError("model_dir", FLAGS.model_dir, "different runs", message)
    runs = [OpenRun(model_dir, name) for model_dir, name in zip(FLAGS.model_dir, names, strict=True)]
    limits = Limits(**values(("max_tokens", "max_new_tokens", "max_rows", "visitors", "examples")))
    serve(runs, limits, FLAGS.host, FLAGS.port)


if __name__ == "__main__":
    run(main)
