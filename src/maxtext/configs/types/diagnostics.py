"""Profiles, dumps, metrics and monitoring."""

from maxtext.configs.types.enums import ProfilerType, XProfTPUPowerTraceMode
from maxtext.configs.types.group import Group


class Profiling(Group):
    """When a performance trace is taken and what it contains."""

    profiler: ProfilerType = ProfilerType.NONE
    upload_all_profiler_results: bool = False
    skip_first_n_steps_for_profiler: int = 1
    profiler_steps: int = 5
    profile_cleanly: bool = True
    profile_periodically_period: int = -1
    hide_profiler_step_metric: bool = False
    enable_jax_profiler: bool = False
    jax_profiler_port: int = 9999
    enable_tpu_profiling_options: bool = False
    tpu_num_chips_to_profile_per_task: int = 1
    tpu_num_sparse_cores_to_trace: int = 2
    tpu_num_sparse_core_tiles_to_trace: int = 1
    xprof_tpu_power_trace_level: XProfTPUPowerTraceMode = XProfTPUPowerTraceMode.POWER_TRACE_NONE
    xprof_e2e_enable_fw_throttle_event: bool = False
    xprof_e2e_enable_fw_power_level_event: bool = False
    xprof_e2e_enable_fw_thermal_event: bool = False
    profile_power_events: bool = False


class HloDump(Group):
    """Saving compiler programs of the train step for later study."""

    dump_hlo: bool = False
    dump_step: int = -1
    dump_hlo_local_dir: str = "/tmp/xla_dump/"
    dump_hlo_delete_local_after: bool = True
    dump_hlo_gcs_dir: str = ""
    dump_hlo_module_name: str = "jit_train_step"
    dump_hlo_local_module_name: str = "jit_train_step"
    dump_hlo_xla_flags: str = ""
    dump_hlo_upload_all: bool = False
    dump_jaxpr: bool = False
    dump_jaxpr_local_dir: str = "/tmp/jaxpr_dump/"
    dump_jaxpr_delete_local_after: bool = True
    dump_jaxpr_gcs_dir: str = ""


class StackTrace(Group):
    """Periodic dumps of Python stacks to find where runs hang."""

    collect_stack_trace: bool = False
    stack_trace_to_cloud: bool = False
    stack_trace_interval_seconds: int = 600


class Metrics(Group):
    """Where run metrics are written beyond the console log."""

    metrics_file: None | str = None
    gcs_metrics: bool = False
    save_config_to_gcs: bool = False
    record_internal_nn_metrics: int = 0
    prometheus_port: int = 0
    enable_checkpoint_cloud_logger: bool = False
    enable_tunix_perf_metrics: bool = False


class ManagedMLDiagnostics(Group):
    """Reporting the run to the Google Cloud ML Diagnostics service."""

    managed_mldiagnostics: bool = False
    managed_mldiagnostics_run_group: str = ""


class Goodput(Group):
    """Measuring how much wall-clock time goes into productive training."""

    enable_goodput_recording: bool = False
    monitor_goodput: bool = False
    goodput_upload_interval_seconds: int = 30
    enable_pathways_goodput: bool = False
    monitor_step_time_deviation: bool = True
    step_deviation_interval_seconds: int = 30
    enable_gcp_goodput_metrics: bool = True
    enable_gcp_step_deviation_metrics: bool = True


class GcpMonitoring(Group):
    """Heartbeat and performance signals sent to Google Cloud Monitoring."""

    report_heartbeat_metric_for_gcp_monitoring: bool = False
    heartbeat_reporting_interval_in_seconds: int = 5
    report_performance_metric_for_gcp_monitoring: bool = False


class Tensorboard(Group):
    """Event files for TensorBoard, locally or on Vertex AI."""

    enable_tensorboard: bool = True
    use_vertex_tensorboard: bool = False
    vertex_tensorboard_project: str | None = ""
    vertex_tensorboard_region: str | None = ""
