"""`python3 -m maxtext.trainers.pre_train.train`: the same as `maxtext train`."""

from maxtext.cli.entry import entry

if __name__ == "__main__":
    entry("train")
