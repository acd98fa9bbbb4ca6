"""A page that shows what models read, remember and write, for a browser on this machine.

    txl-demo --model_dir=runs/quickstart
    txl-demo --model_dir=runs/quickstart --model_dir=runs/other --port=7861
    txl-demo --model_dir=runs/dates --model_dir=runs/flat_resume

What the page has depends on the runs. Two runs of one task can be looked at side by side.

language models   Write: text as it is made, with all sampling options. Read: a text coloured by nll; on a token, what
                  else could stand there. Remember: what the memory saves; on a token, where every layer and head looks,
                  and its nll with none, half and all of the memory.
encoder-decoders  The best targets, with scores; where each head looks in the source while one is written.
taggers           Entities with probabilities; FLAT's lattice; what an item attends to; what a word of the lexicon
                  changes.

It listens to this machine alone, unless --host says otherwise, loads nothing from elsewhere and reports to nobody. What
a visitor may ask for is bounded by --max_tokens, --max_new_tokens, --max_rows and --visitors. Ctrl-C ends it.

It needs gradio: in a clone, pip install -e ".[demo]".
"""

import os

from absl import flags

from txl_programs.program import FLAGS, read_flags, run

flags.DEFINE_multi_string("model_dir", None, "Folder of a run; may be given several times.")
flags.DEFINE_string("host", "127.0.0.1", "Address to listen at; 0.0.0.0 lets other machines in.")
flags.DEFINE_integer("port", 7860, "Port to listen at; 0 takes a free one.", lower_bound=0, upper_bound=65535)
flags.DEFINE_integer("max_tokens", 2000, "Most tokens of a text that is read.", lower_bound=2, upper_bound=100_000)
flags.DEFINE_integer("max_new_tokens", 500, "Most tokens to write at a time.", lower_bound=1, upper_bound=100_000)
flags.DEFINE_integer("max_rows", 4, "Most samples to write at a time.", lower_bound=1, upper_bound=64)
flags.DEFINE_integer("visitors", 4, "Requests that are answered at a time; others wait.", lower_bound=1, upper_bound=64)
flags.mark_flag_as_required("model_dir")

if __name__ == "__main__":
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # oneDNN keeps memory for every length of a text

read_flags(__name__)

from txl_programs.demo.limits import Limits
from txl_programs.program import names_of, values
from txl_tf.environment import is_installed

MISSING = 'the page needs gradio: in a clone, pip install -e ".[demo]"'


def main():
    if not is_installed("gradio"):
        raise ValueError(MISSING)
    from txl_programs.demo.runs import OpenRun
    from txl_programs.demo.shell import serve

    names = names_of(FLAGS.model_dir)
    if len(set(names)) < len(names):
        raise ValueError(f"model_dir must name different runs, got {', '.join(names)}")
    runs = [OpenRun(model_dir, name) for model_dir, name in zip(FLAGS.model_dir, names, strict=True)]
    serve(runs, Limits(**values("max_tokens max_new_tokens max_rows visitors")), FLAGS.host, FLAGS.port)


if __name__ == "__main__":
    run(main)
