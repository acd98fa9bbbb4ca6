"""Serves a trained model over HTTP: TensorFlow Serving's REST interface, and OpenAI's completions.

    txl-serve --model_dir=runs/quickstart
    curl localhost:8501/v1/completions -d '{"prompt": "The import", "max_tokens": 40}'
    curl localhost:8501/v1/models/quickstart:predict -d '{"signature_name": "score_text", "inputs": {"text": ["if x"]}}'

    TXL_API_KEY=secret txl-serve --model_dir=runs/quickstart --host=0.0.0.0 --allowed_hosts=models.example.org

The server has the signatures of txl-export-saved-model, under /v1/models/NAME:predict, with status and metadata. A
language model also has /v1/completions, with stream, stop, logprobs, n, seed and echo. Requests that arrive at the same
time are computed as one batch.

The server accepts connections from this machine only, unless --host says otherwise. With the environment variable
TXL_API_KEY, or a file --api_key_file, every request needs the key: "Authorization: Bearer KEY". Ctrl-C stops it.

It needs starlette and uvicorn: pip install "txl_tf[serve]".
"""

import os

from absl import flags

from txl_config import SearchConfig
from txl_programs.flag_values import CKPT_HELP, FLAGS, check_used, define_flags, values
from txl_programs.program import read_flags, run

flags.DEFINE_string("model_dir", None, "Folder of the run.")
flags.DEFINE_string("ckpt_path", None, CKPT_HELP)
flags.DEFINE_string("name", None, "Name of the model. Default: the last part of --model_dir.")
flags.DEFINE_string("host", "127.0.0.1", "Address to listen at. 0.0.0.0 also accepts other machines.")
flags.DEFINE_integer("port", 8501, "Port to listen at; 0 for a free one.", lower_bound=0, upper_bound=65535)
flags.DEFINE_list("allowed_hosts", [], "Names of this server that requests may use besides --host, such as a proxy's.")
flags.DEFINE_string("api_key_file", None, "File with the API key. Default: the environment variable TXL_API_KEY.")
flags.DEFINE_integer(
    "max_rows", 16, "Most rows or texts of a request, and of a batch.", lower_bound=1, upper_bound=1024
)
flags.DEFINE_integer(
    "max_tokens", None, "Most tokens in a row of a request. Default: 4096, max_len or max_seq_len.", lower_bound=1
)
flags.DEFINE_integer(
    "max_new_tokens",
    None,
    "Most tokens of a text to generate. Default: 1024; for an encoder-decoder, by the lengths of the training targets.",
    lower_bound=1,
)
flags.DEFINE_integer("max_waiting", 128, "Requests that may wait. Others get status 503.", lower_bound=1)
flags.DEFINE_integer("max_request_bytes", 2**25, "Most bytes of a request.", lower_bound=1024)
flags.DEFINE_integer("top_n", None, "Number of tokens that the signature next returns. Default: 10.", lower_bound=1)
flags.DEFINE_integer("mem_len", None, "Length of the memory in positions. Default: as in the run.")
flags.DEFINE_integer(
    "clamp_len", None, "Treat greater distances as this one; 0 or -1 for no limit. Default: as in the run."
)
define_flags(SearchConfig)  # for an encoder-decoder
flags.mark_flag_as_required("model_dir")

if __name__ == "__main__":
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # oneDNN keeps memory for every length of text

read_flags(__name__)

import re
import sys
import threading
from pathlib import Path

from txl_config.environment import is_installed
from txl_config.errors import ParameterError, named
from txl_programs.opening import load_model, names_of
from txl_programs.printing import messages_to_stderr
from txl_programs.web.listening import listen, url_of

MISSING = 'the server needs starlette and uvicorn: pip install "txl_tf[serve]"'


def read_api_key():
    """Returns the API key of --api_key_file or, without it, of TXL_API_KEY; `None` if neither is set.

    Raises:
        ParameterError: the key is not a word of ASCII characters.
        OSError: the file cannot be read.
    """
    if FLAGS.api_key_file is None:
        key = os.environ.get("TXL_API_KEY")
        source = "TXL_API_KEY"
    else:
        from txl_tf.files import naming_read_errors

        source = FLAGS.api_key_file
        with naming_read_errors(source):
            key = Path(source).read_text("utf-8", "replace").strip()
    if key is not None and not re.fullmatch(r"[\x21-\x7e]{1,1000}", key):
        message = f"the API key in {named(source)} must be a word of 1 to 1,000 ASCII characters"
        raise ParameterError("api_key_file", source, "a file with a word of ASCII characters", message)
    return key


def name_of_model():
    """Returns the name of the model: --name, else the last part of --model_dir. It is part of the server's addresses.

    Raises:
        ParameterError: the name has characters that addresses must not have.
    """
    name = FLAGS.name or names_of([FLAGS.model_dir])[0]
    if not re.fullmatch(r"[\w.+-]{1,100}", name):
        message = f"name must be letters, digits, _ . + and -, got {named(name)}: give --name"
        raise ParameterError("name", name, "letters, digits, _ . + and -", message)
    return name


@messages_to_stderr()
def main():
    if not (is_installed("starlette") and is_installed("uvicorn")):
        raise ValueError(MISSING)
    from txl_tf.runs.folder import RunFolder

    check_used((("length_penalty",), FLAGS.beam_size > 1, "is for a beam search: give --beam_size, too"))
    api_key = read_api_key()
    name = name_of_model()
    folder = RunFolder(FLAGS.model_dir)
    is_language_model = folder.family.task == "language_model"
    why_unused = f"is for language models, and {folder} contains {folder.family.described}"
    # For a language model, --max_new_tokens bounds completions.
    of_search = [name for name in SearchConfig.names() if not (is_language_model and name == "max_new_tokens")]
    no_search = f"is for encoder-decoders, and {folder} contains {folder.family.described}"
    check_used(
        (("top_n",), is_language_model, why_unused),
        (of_search, folder.family.task == "encoder_decoder", no_search),
    )
    # Before the model is loaded, so that a port in use ends the program at once.
    listening = listen(FLAGS.host, FLAGS.port)
    vocabs = folder.load_vocabs()
    model = load_model(folder, **values(("mem_len", "clamp_len"), given_only=True))
    serve(name, model, vocabs, is_language_model, listening, api_key)


def warm_up(decoder, vocab):
    """Generates a short text, so that the decoder's graphs are compiled before the first request."""
    import numpy as np

    from txl_tf.serving.decoder import PIECE, Job

    done = threading.Event()
    prompt = np.array([vocab.start_id], np.int32)
    decoder.submit(Job(prompt, PIECE, lambda piece: done.set() if piece.done else None))
    done.wait()


def serve(name, model, vocabs, is_language_model, listening, api_key):
    """Serves a model until the program is stopped.

    Args:
        name: name of the model.
        model, vocabs: the model and its vocabularies.
        is_language_model: whether the model is a language model, for which the server also has /v1/completions.
        listening: socket at which the server listens.
        api_key: API key that requests must have; `None`: they need no key.
    """
    from txl_programs.server.app import Server, make_app
    from txl_programs.server.completions import Bounds, Completions
    from txl_programs.web.connections import make_server
    from txl_programs.web.terminal import plain_output
    from txl_tf.serving.batcher import Batcher
    from txl_tf.serving.decoder import Decoder
    from txl_tf.serving.export import local_signatures

    search = values(SearchConfig, given_only=True)
    if is_language_model:
        search.pop("max_new_tokens", None)  # for a language model, this flag bounds completions, not a search
    vocab = vocabs[0] if len(vocabs) == 1 else vocabs
    options = values(("max_tokens", "max_rows", "top_n"))
    stored_model = local_signatures(model, vocab, search=search or None, **options)
    signatures = stored_model.signatures()
    completions = decoder = None
    if is_language_model:
        bounds = Bounds(stored_model.limits.max_tokens, FLAGS.max_new_tokens or Bounds.max_new_tokens, FLAGS.max_rows)
        decoder = Decoder(
            model, vocab.document_id, max_rows=FLAGS.max_rows, max_waiting=FLAGS.max_waiting * FLAGS.max_rows
        )
        completions = Completions(name, vocab, decoder, bounds)
    batcher = Batcher(signatures, FLAGS.max_rows, FLAGS.max_waiting)
    server = Server(name, signatures, batcher, completions)
    app = make_app(server, FLAGS.host, FLAGS.allowed_hosts, api_key, FLAGS.max_request_bytes)
    if decoder is not None:
        warm_up(decoder, vocab)
    if api_key is None and FLAGS.host not in ("127.0.0.1", "localhost", "::1"):
        print("Anyone who reaches this address can use the model: set TXL_API_KEY to require a key.", file=sys.stderr)
    print(f"{url_of(FLAGS.host, listening)}/v1/models/{name}", flush=True)
    try:
        with plain_output():
            make_server(app).run(sockets=[listening])
    finally:
        if decoder is not None:
            decoder.close()


if __name__ == "__main__":
    run(main)
