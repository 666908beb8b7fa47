"""Derived values against hand-computed ones."""

import pytest

from maxtext.configs.derive import DERIVED, Devices, rampup_stages
from maxtext.configs.types import DerivedValues
from maxtext.models.configuration import load


def resolved(*overrides, devices=1, slices=1):
    return load(None, list(overrides), environ={}, devices=Devices(devices, slices))


# scale 2^n, n = 3a + r: layers 2^a, width 2^(a + [r > 1]), heads and MLP 2^(a + [r > 0])
@pytest.mark.parametrize(
    ("scale", "layers", "width", "heads"),
    [
        (1, 1, 1, 1),
        (2, 1, 1, 2),
        (4, 1, 2, 2),
        (8, 2, 2, 2),
        (16, 2, 2, 4),
        (32, 2, 4, 4),
        (64, 4, 4, 4),
    ],
)
def test_parameter_scale(scale, layers, width, heads):
    experts = ("decoder_block=mixtral", "num_experts=2", "base_moe_mlp_dim=100")
    config = resolved(f"global_parameter_scale={scale}", *experts)
    assert config.num_decoder_layers == 16 * layers
    assert config.emb_dim == 2048 * width
    assert (config.num_query_heads, config.num_kv_heads) == (16 * heads, 16 * heads)
    assert (config.mlp_dim, config.moe_mlp_dim) == (7168 * heads, 100 * heads)


def test_expert_width_defaults_to_the_mlp_width():
    assert resolved().moe_mlp_dim == 7168


@pytest.mark.parametrize(
    ("overrides", "devices", "expected"),
    [
        # per_device, devices -> load, train, micro train, load eval, eval
        (["per_device_batch_size=4"], 8, (32, 32, 32, 32, 32)),
        (["per_device_batch_size=0.25"], 8, (8, 2, 2, 8, 2)),
        (["per_device_batch_size=4", "gradient_accumulation_steps=3"], 2, (24, 24, 8, 8, 8)),
        (["per_device_batch_size=4", "eval_per_device_batch_size=2"], 2, (8, 8, 8, 4, 4)),
    ],
)
def test_batches(overrides, devices, expected):
    config = resolved(*overrides, devices=devices)
    assert (
        config.global_batch_size_to_load,
        config.global_batch_size_to_train_on,
        config.micro_batch_size_to_train_on,
        config.global_batch_size_to_load_eval,
        config.global_batch_size_to_eval_on,
    ) == expected


def sizes(config):
    return (
        dict(zip(config.mesh_axes, config.ici_parallelism, strict=True)),
        dict(zip(config.mesh_axes, config.dcn_parallelism, strict=True)),
    )


def test_free_axes_are_inferred():
    ici, dcn = sizes(resolved("ici_tensor_parallelism=2", devices=16, slices=2))
    assert (ici["fsdp"], ici["tensor"], dcn["data"]) == (4, 2, 2)
    ici, dcn = sizes(resolved("dcn_data_parallelism=2", "ici_fsdp_parallelism=4", devices=8))
    assert (ici["fsdp"], dcn["data"]) == (4, 2)
    ici, dcn = sizes(resolved("dcn_fsdp_parallelism=2", devices=8))
    assert (ici["fsdp"], dcn["fsdp"], dcn["data"]) == (4, 2, 1)


def test_special_axes():
    config = resolved(
        "ici_context_parallelism=2", "ici_fsdp_parallelism=2", "ici_data_parallelism=2", devices=8
    )
    assert config.context_parallel_size == 2
    assert config.num_target_devices == 8
    assert not resolved(devices=8).using_pipeline_parallelism
    config = resolved("context_sharding=expert", "ici_expert_parallelism=4", devices=4)
    assert config.context_parallel_size == 4


def test_rampup():
    config = resolved(
        "enable_rampup_batch_size=true",
        "per_device_batch_size=8",
        "per_device_batch_size_start=2",
        "per_device_batch_size_increment=3",
        "global_rampup_samples=100",
        devices=2,
    )
    # two increments from 4 by 6 to 16 sequences; 50 samples at 4 a step take 13 steps, 50 at 10
    # take 5
    assert config.global_batch_size_to_load_start == 4
    assert config.global_batch_size_to_load_increment == 6
    assert config.rampup_samples_per_increment_to_load == 50
    assert config.rampup_end_step == 13 + 5
    assert resolved().rampup_end_step is None


def test_rampup_of_an_elastic_run_keeps_the_batch_of_the_full_machine():
    overrides = [
        "enable_rampup_batch_size=true",
        "per_device_batch_size=8",
        "per_device_batch_size_start=2",
        "per_device_batch_size_increment=3",
        "global_rampup_samples=100",
    ]
    full = resolved(*overrides, devices=2)
    shrunk = load(
        None, [*overrides, "elastic_enabled=true"], environ={}, devices=Devices(1, full=2)
    )
    assert rampup_stages(shrunk) == rampup_stages(full) == [(4, 13), (10, 5)]
    assert shrunk.rampup_end_step == full.rampup_end_step


def test_every_derived_key_has_a_function():
    assert DERIVED.keys() == DerivedValues.model_fields.keys()


PROJECTIONS = {"query_proj", "key_proj", "value_proj", "kv_proj", "qkv_proj"}
MLP = {"mlpwi_0", "mlpwi_1", "mlpwi", "mlpwo"}


@pytest.mark.parametrize(
    ("policy", "kept", "offloaded"),
    [
        ("full", set(), set()),
        ("save_qkv_proj", PROJECTIONS, set()),
        ("save_out_proj", {"out_proj"}, set()),
        ("save_dot_except_mlp", PROJECTIONS | {"out_proj"}, set()),
        ("save_dot_with_context_except_mlp", PROJECTIONS | {"out_proj", "context"}, set()),
        ("save_dot_except_mlpwi", PROJECTIONS | {"out_proj", "mlpwo"}, set()),
        ("minimal", PROJECTIONS | {"out_proj"} | MLP, set()),
        ("minimal_with_context", PROJECTIONS | {"out_proj", "context"} | MLP, set()),
        ("minimal_flash", PROJECTIONS | {"out_proj", "context"} | MLP, set()),
        ("qkv_proj_offloaded", set(), {"query_proj", "key_proj", "value_proj", "kv_proj"}),
        ("minimal_offloaded", set(), PROJECTIONS | {"out_proj"} | MLP),
    ],
)
def test_remat_policies(policy, kept, offloaded):
    config = resolved(f"remat_policy={policy}")
    assert set(config.tensors_on_device) == kept
    assert set(config.tensors_to_offload) == offloaded


def test_custom_remat():
    config = resolved(
        "remat_policy=custom", "context=device", "out_proj=offload", "decoder_layer_input=remat"
    )
    assert (config.tensors_on_device, config.tensors_to_offload) == (["context"], ["out_proj"])


def test_folders():
    config = resolved("run_name=a", "base_output_directory=/out")
    assert (config.checkpoint_dir, config.metrics_dir) == ("/out/a/checkpoints", "/out/a/metrics")
    assert config.tensorboard_dir == "/out/a/tensorboard"
    assert config.managed_mldiagnostics_dir is None


@pytest.mark.parametrize(
    ("overrides", "platform", "scanned", "kind"),
    [
        ([], "cpu", True, "default"),
        ([], "tpu", True, "default"),
        ([], "gpu", False, "derived"),
        (["scan_layers=true"], "gpu", True, "command line"),
        (["param_scan_axis=0"], "gpu", True, "default"),
        (
            ["model_name=gpt-oss-20b"],
            "gpu",
            False,
            "derived",
        ),  # its file has a key of scanned layers
        (["parameter_memory_host_offload=true"], "gpu", False, "derived"),
        (["base_num_decoder_layers=100"], "gpu", True, "derived"),
    ],
)
def test_layers_are_unrolled_on_gpus(overrides, platform, scanned, kind):
    config = load(None, overrides, environ={}, devices=Devices(1, platform=platform))
    assert (config.scan_layers, config.source("scan_layers").kind) == (scanned, kind)


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "default-20260102-030405"),
        (["model_name=llama2-7b"], "llama2-7b-20260102-030405"),
        (["load_parameters_path=/models/Qwen3-0.6B/"], "Qwen3-0.6B-20260102-030405"),
        (["load_parameters_path=/out/first/checkpoints/300"], "first-20260102-030405"),
        (["load_parameters_path=/models/a", "model_name=llama2-7b"], "llama2-7b-20260102-030405"),
        (["load_parameters_path=/models/a", "run_name=mine"], "mine"),
    ],
)
def test_a_run_is_named_after_the_folder_that_it_starts_from(overrides, name):
    environ = {"MAXTEXT_STARTED": "20260102-030405"}
    assert load(None, overrides, environ=environ, devices=Devices(1)).run_name == name
