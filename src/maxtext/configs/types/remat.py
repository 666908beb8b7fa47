"""Keys of rematerialization, offloading, and replicas that rarely meet.

SAVED_ON_DEVICE and OFFLOADED say which activations each remat policy saves on the device, and which
it offloads to the host.
"""

from maxtext.configs.types import inert
from maxtext.configs.types.enums import RematLocation
from maxtext.configs.types.key import (
    CUSTOM_REMAT,
    CUSTOM_REMAT_ENGRAM,
    CUSTOM_REMAT_MLA,
    CUSTOM_REMAT_NAIVE_MLA,
    CUSTOM_REMAT_Q_LORA,
    Group,
    key,
)

_PROJECTIONS = ["query_proj", "key_proj", "value_proj", "kv_proj", "qkv_proj"]
_MINIMAL = [*_PROJECTIONS, "out_proj", "mlpwi_0", "mlpwi_1", "mlpwi", "mlpwo"]
# remat policy -> the tensors that it saves on the device
SAVED_ON_DEVICE = {
    "full": [],
    "save_qkv_proj": _PROJECTIONS,
    "save_out_proj": ["out_proj"],
    "save_dot_except_mlp": [*_PROJECTIONS, "out_proj"],
    "save_dot_with_context_except_mlp": [*_PROJECTIONS, "out_proj", "context"],
    "save_dot_except_mlpwi": [*_PROJECTIONS, "out_proj", "mlpwo"],
    "minimal": _MINIMAL,
    "minimal_with_context": [*_MINIMAL, "context"],
    "minimal_flash": [*_MINIMAL, "context"],
    "qkv_proj_offloaded": [],
    "minimal_offloaded": [],
}
# remat policy -> the tensors that it moves to pinned host memory
OFFLOADED = {
    "qkv_proj_offloaded": ["query_proj", "key_proj", "value_proj", "kv_proj"],
    "minimal_offloaded": _MINIMAL,
}
# the tensors whose location remat_policy=custom reads from the key of their name
CUSTOM_TENSORS = (
    "decoder_layer_input",
    "context",
    "mlpwi",
    "mlpwi_0",
    "mlpwi_1",
    "mlpwo",
    "moe_mlpwi_0",
    "moe_mlpwi_1",
    "moe_mlpwo",
    "query_proj",
    "key_proj",
    "value_proj",
    "query_wa_proj",
    "kv_wa_proj",
    "qkv_proj",
    "out_proj",
    "mla_q",
    "mla_kv",
    "attention_out",
    "engram",
)


class RematAndOffload(Group):
    """Which activations are saved, recomputed, or offloaded to host memory."""

    remat_policy: str = key(
        "full",
        "Which activations are saved for the backward pass: full (none), save_*, minimal*, "
        "*_offloaded, custom (each tensor by its own key); none: no remat",
        choices=(
            "",
            "none",
            "full",
            "minimal",
            "minimal_with_context",
            "minimal_flash",
            "minimal_offloaded",
            "save_dot_except_mlp",
            "save_dot_except_mlpwi",
            "save_dot_with_context_except_mlp",
            "save_out_proj",
            "save_qkv_proj",
            "qkv_proj_offloaded",
            "custom",
        ),
    )
    remat_policy_for_vit: str = key(
        "minimal",
        "Remat_policy of the vision encoder",
        choices=("", "none", "full", "minimal"),
        status=inert.MULTIMODAL,
    )
    decoder_layer_input: RematLocation = key(
        RematLocation.DEVICE,
        "What to do with each layer's input when remat_policy=custom: remat (recompute), "
        "device (save), offload (host)",
        needs=CUSTOM_REMAT,
    )
    context: RematLocation = key(
        RematLocation.REMAT,
        "What to do with the output saved by the attention kernel when remat_policy=custom: "
        "remat, device or offload",
        needs=CUSTOM_REMAT,
    )
    mlpwi: RematLocation = key(
        RematLocation.REMAT,
        "What to do with the packed or only input projection of the MLP when "
        "remat_policy=custom: remat, device or offload",
        needs=CUSTOM_REMAT,
    )
    mlpwi_0: RematLocation = key(
        RematLocation.REMAT,
        "What to do with the MLP's gate projection when remat_policy=custom: remat, device or"
        " offload",
        needs=CUSTOM_REMAT,
    )
    mlpwi_1: RematLocation = key(
        RematLocation.REMAT,
        "What to do with the MLP's up projection when remat_policy=custom: remat, device or "
        "offload",
        needs=CUSTOM_REMAT,
    )
    mlpwo: RematLocation = key(
        RematLocation.REMAT,
        "What to do with the MLP's down projection when remat_policy=custom: remat, device or"
        " offload",
        needs=CUSTOM_REMAT,
    )
    moe_mlpwi_0: RematLocation = key(
        RematLocation.REMAT,
        "What to do with the experts' gate projection when remat_policy=custom: remat, device"
        " or offload",
    )
    moe_mlpwi_1: RematLocation = key(
        RematLocation.REMAT,
        "What to do with the experts' up projection when remat_policy=custom: remat, device "
        "or offload",
    )
    moe_mlpwo: RematLocation = key(
        RematLocation.REMAT,
        "What to do with the experts' down projection when remat_policy=custom: remat, device"
        " or offload",
    )
    query_proj: RematLocation = key(
        RematLocation.REMAT,
        "What to do with the projected queries when remat_policy=custom: remat, device or offload",
        needs=CUSTOM_REMAT,
    )
    key_proj: RematLocation = key(
        RematLocation.REMAT,
        "What to do with the projected keys when remat_policy=custom: remat, device or offload",
        needs=CUSTOM_REMAT,
    )
    value_proj: RematLocation = key(
        RematLocation.REMAT,
        "What to do with the projected values when remat_policy=custom: remat, device or offload",
        needs=CUSTOM_REMAT,
    )
    query_wa_proj: RematLocation = key(
        RematLocation.REMAT,
        "What to do with MLA's down-projected query latent when remat_policy=custom: remat, "
        "device or offload",
        needs=CUSTOM_REMAT_Q_LORA,
    )
    kv_wa_proj: RematLocation = key(
        RematLocation.REMAT,
        "What to do with MLA's down-projected key/value latent when remat_policy=custom: "
        "remat, device or offload",
        needs=CUSTOM_REMAT_MLA,
    )
    qkv_proj: RematLocation = key(
        RematLocation.REMAT,
        "What to do with the packed QKV projection when remat_policy=custom: remat, device or"
        " offload",
        needs=("fused_qkv", CUSTOM_REMAT),
    )
    out_proj: RematLocation = key(
        RematLocation.REMAT,
        "What to do with the attention output projection when remat_policy=custom: remat, "
        "device or offload",
        needs=CUSTOM_REMAT,
    )
    mla_q: RematLocation = key(
        RematLocation.REMAT,
        "What to do with MLA's full-size queries when remat_policy=custom: remat, device or "
        "offload",
        needs=CUSTOM_REMAT_MLA,
    )
    mla_kv: RematLocation = key(
        RematLocation.REMAT,
        "What to do with MLA's full-size keys and values when remat_policy=custom: remat, "
        "device or offload",
        needs=CUSTOM_REMAT_NAIVE_MLA,
    )
    attention_out: RematLocation = key(
        RematLocation.REMAT,
        "What to do with the attention output before its projection when remat_policy=custom:"
        " remat, device or offload",
        needs=CUSTOM_REMAT,
    )
    engram: RematLocation = key(
        RematLocation.REMAT,
        "What to do with the Engram memory's output when remat_policy=custom: remat, device "
        "or offload",
        needs=CUSTOM_REMAT_ENGRAM,
    )
    optimizer_memory_host_offload: bool = key(
        False,
        "Keep the optimizer state in pinned host memory and copy it to the device for the update",
    )
    parameter_memory_host_offload: bool = key(
        False, "Keep the weights in pinned host memory and copy them to the device when used"
    )


class DilocoParams(Group):
    """Rarely synchronized replicas with an outer optimizer (DiLoCo)."""

    enable_diloco: bool = key(
        False,
        "Train replicas independently and synchronize them rarely, for slow links; see "
        "dcn_diloco_parallelism",
        status=inert.DILOCO,
    )
    diloco_sync_period: int = key(
        36,
        "Inner steps every replica takes between two outer synchronizations",
        low=1,
        status=inert.DILOCO,
    )
    diloco_outer_lr: float = key(
        0.3,
        "Learning rate of the outer Nesterov SGD that applies the replicas' averaged change",
        low=0,
        status=inert.DILOCO,
    )
    diloco_outer_momentum: float = key(
        0.9, "Nesterov momentum of the outer DiLoCo optimizer, 0 to 1", low=0, status=inert.DILOCO
    )
