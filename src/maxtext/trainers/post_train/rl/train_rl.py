"""`python3 -m maxtext.trainers.post_train.rl.train_rl`: the same as `maxtext grpo`."""

from maxtext.cli.entry import entry

if __name__ == "__main__":
    entry("grpo")
