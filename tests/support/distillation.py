"""Teachers and students, and their losses in torch."""

import numpy as np
import torch
import transformers

from maxtext.checkpoint.open import open_checkpoint
from maxtext.configs.derive import Devices
from maxtext.configs.sources import from_overrides
from maxtext.models.configuration import load
from maxtext.optimizers import learning_rate_schedule
from maxtext.sharding import use_rules
from maxtext.trainers.build import build_run_context
from maxtext.trainers.checkpointing.init_state import initial_state, with_reference
from maxtext.trainers.step import make_train_step
from tests.trainers.conftest import CONSTANT_RATE, LENGTH, VOCABULARY, with_defaults

ALPHA, TEMPERATURE, RATE, Z_LOSS = 0.7, 2.0, 0.05, 0.01
PROBE = np.arange(1, 25).reshape(2, 12)
RUN = [
    f"max_target_length={LENGTH}", "per_device_batch_size=8", "dtype=float32", "remat_policy=none",
    "matmul_precision=highest", "scan_layers=false", "dataset_type=grain", "attention=dot_product",
    "steps=10", "opt_type=sgd", f"learning_rate={RATE}", "gradient_clipping_threshold=0",
    f"distill_alpha={ALPHA}", f"distill_temperature={TEMPERATURE}", "enable_tensorboard=false",
    *CONSTANT_RATE,
]  # fmt: skip


def save_llama(folder, layers, embed_dim, seed, vocab_size=VOCABULARY):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=embed_dim,
        intermediate_size=2 * embed_dim,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,  # large, so that logits differ
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model


class Run:
    """The state before the first step of a configuration, and its train step."""

    def __init__(self, folders, *overrides, quickly=None):
        paths = [f"load_parameters_path={folders['student']}"]
        if "teacher" in folders:
            paths.append(f"teacher_overrides.load_parameters_path={folders['teacher']}")
        self.config = load(
            None,
            from_overrides(with_defaults(overrides, [*paths, *RUN])),
            environ={},
            devices=Devices(1),
            model=open_checkpoint(folders["student"]).model_layer,
        )
        self.context = build_run_context(self.config)
        self.quickly = quickly

    def state(self):
        return with_reference(self.context, initial_state(self.context), 0, None)

    def step(self, state, batch):
        context = self.context
        step = make_train_step(
            context.objective, context.optimizer, learning_rate_schedule(self.config)
        )
        with use_rules(context.rules):
            state, metrics = self.quickly(step)(state, batch, context.key)
        return state, {name: float(value) for name, value in metrics.items()}

    def logits(self, weights, ids):
        model = self.context.template.bind(weights)
        return model(ids, np.broadcast_to(np.arange(ids.shape[1]), ids.shape))


def documents(batch):
    """(inputs, targets, mask) of each document of a batch, as torch tensors [1, T]."""
    for row in range(batch["inputs"].shape[0]):
        segments = batch["inputs_segmentation"][row]
        for number in range(1, segments.max() + 1):
            place = segments == number
            fields = (batch[name][row][place] for name in ("inputs", "targets"))
            mask = batch["targets_segmentation"][row][place] != 0
            yield tuple(torch.tensor(np.asarray(x))[None].long() for x in (*fields, mask))


def torch_losses(student, teacher, batch):
    """The closed form of each loss, documents one by one."""
    sums = dict.fromkeys(("kl", "hard_loss", "teacher_loss", "kl_temperature_1", "z_loss"), 0.0)
    tokens = 0
    for inputs, targets, mask in documents(batch):
        with torch.no_grad():
            teacher_logits = teacher(inputs).logits
        student_logits = student(inputs).logits

        def kl(temperature, student_logits=student_logits, teacher_logits=teacher_logits):
            p, q = (
                torch.log_softmax(x / temperature, -1) for x in (teacher_logits, student_logits)
            )
            return (p.exp() * (p - q)).sum(-1)

        def nll(logits, targets=targets):
            return -torch.log_softmax(logits, -1).gather(-1, targets[..., None])[..., 0]

        values = {
            "kl": kl(TEMPERATURE),
            "kl_temperature_1": kl(1.0).detach(),
            "hard_loss": nll(student_logits),
            "teacher_loss": nll(teacher_logits),
            "z_loss": Z_LOSS * torch.logsumexp(student_logits, -1) ** 2,
        }
        sums = {name: total + (values[name] * mask).sum() for name, total in sums.items()}
        tokens += int(mask.sum())
    means = {name: total / tokens for name, total in sums.items()}
    means["soft_loss"] = TEMPERATURE**2 * means["kl"]
    means["loss"] = ALPHA * means["soft_loss"] + (1 - ALPHA) * means["hard_loss"]
    means["loss"] = means["loss"] + means["z_loss"]
    return means
