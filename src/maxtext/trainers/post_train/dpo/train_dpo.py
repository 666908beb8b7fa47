"""`python3 -m maxtext.trainers.post_train.dpo.train_dpo`: the same as `maxtext dpo`."""

from maxtext.cli.entry import entry

if __name__ == "__main__":
    entry("dpo")
