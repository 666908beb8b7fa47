"""`python3 -m maxtext.trainers.pre_train.train_compile`: the same as `maxtext compile`."""

from maxtext.cli.entry import entry

if __name__ == "__main__":
    entry("compile")
