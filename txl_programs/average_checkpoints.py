"""Averages the weights of several checkpoints, and writes the result as a new run.

    txl-average-checkpoints --model_dir=runs/my --num_last_checkpoints=5 --output_dir=runs/my-average
    txl-average-checkpoints --model_dir=runs/my --checkpoints=ckpt-900,ckpt-1200 --output_dir=runs/mean
    txl-average-checkpoints --model_dir=runs/lora --num_last_checkpoints=1 --merge_lora --output_dir=runs/merged

A checkpoint may also be a path: of another run of the same model, or of the original program.
"""

from absl import flags

from txl_programs.flag_values import values
from txl_programs.program import run

flags.DEFINE_string("model_dir", None, "Folder of the run.")
flags.DEFINE_list("checkpoints", None, "Checkpoints to average, separated by commas: names in model_dir, or paths.")
flags.DEFINE_integer("num_last_checkpoints", None, "Average this many latest checkpoints, without --checkpoints.")
flags.DEFINE_string("output_dir", None, "New folder for the averaged run.")
flags.DEFINE_bool("merge_lora", False, "Add the low-rank updates of LoRA to the weights.")
flags.mark_flags_as_required(["model_dir", "output_dir"])


def main():
    from txl_tf.runs.checkpoints import average_checkpoints

    paths = average_checkpoints(
        **values(("model_dir", "output_dir", "checkpoints", "num_last_checkpoints", "merge_lora"))
    )
    print(f"{flags.FLAGS.output_dir}: the average of {', '.join(paths)}")


if __name__ == "__main__":
    run(main)
