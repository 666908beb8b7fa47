"""Values that no one sets: `maxtext.configs.derive` computes them."""

from maxtext.configs.types.group import Group


class DerivedValues(Group):
    """Values computed from other keys after loading; users never set them."""

    emb_dim: None | int = None
    mlp_dim: None | int = None
    moe_mlp_dim: None | int = None
    num_decoder_layers: None | int = None
    num_kv_heads: None | int = None
    num_query_heads: None | int = None
    num_diloco_replicas: None | int = None
    ici_parallelism: None | list[int] = None
    dcn_parallelism: None | list[int] = None
    using_pipeline_parallelism: None | bool = None
    context_parallel_size: None | int = None
    num_target_devices: None | int = None
    global_batch_size_to_train_on: None | int = None
    global_batch_size_to_eval_on: None | int = None
    global_batch_size_to_load: None | int = None
    global_batch_size_to_load_eval: None | int = None
    micro_batch_size_to_train_on: None | int = None
    micro_batch_size_to_eval_on: None | int = None
    checkpoint_dir: None | str = None
    convert_checkpoint_if_possible: bool = False
    metrics_dir: None | str = None
    tensorboard_dir: None | str = None
    managed_mldiagnostics_dir: None | str = None
    rampup_end_step: None | int = None
    tensors_on_device: None | list[str] = None
    tensors_to_offload: None | list[str] = None
    global_batch_size_to_load_start: None | int = None
    global_batch_size_to_load_increment: None | int = None
    rampup_samples_per_increment_to_load: None | float = None
