"""Averages the weights of several checkpoints of a run into the folder of a new one.

    txl-average-checkpoints --model_dir=runs/my --num_last_checkpoints=5 --output_dir=runs/my-average
    txl-average-checkpoints --model_dir=runs/my --checkpoints=ckpt-900,ckpt-1200 --output_dir=runs/mean

Checkpoints may also be paths, of other runs of the same model or of the original program.
"""

from absl import flags

from txl_programs.program import run, values

flags.DEFINE_string("model_dir", None, "Folder of the run.")
flags.DEFINE_list("checkpoints", None, "Checkpoints to average, comma-separated: names in model_dir, or paths.")
flags.DEFINE_integer("num_last_checkpoints", None, "Average that many of the latest instead.")
flags.DEFINE_string("output_dir", None, "New folder for the average.")
flags.mark_flags_as_required(["model_dir", "output_dir"])


def main():
    from txl_tf.runs.checkpoints import average_checkpoints

    paths = average_checkpoints(**values("model_dir output_dir checkpoints num_last_checkpoints"))
    print(f"{flags.FLAGS.output_dir}: the average of {', '.join(paths)}")


if __name__ == "__main__":
    run(main)
