"""`python3 -m maxtext.trainers.post_train.sft.train_sft_native`: the same as `maxtext sft`."""

from maxtext.cli.entry import entry

if __name__ == "__main__":
    entry("sft")
