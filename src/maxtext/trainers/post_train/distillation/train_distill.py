"""`python3 -m maxtext.trainers.post_train.distillation.train_distill`: `maxtext distill`."""

from maxtext.cli.entry import entry

if __name__ == "__main__":
    entry("distill")
