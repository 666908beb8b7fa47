"""Profiles, dumps, metrics and monitoring."""

from maxtext.configs.types import inert
from maxtext.configs.types.enums import ProfilerType, XProfTPUPowerTraceMode
from maxtext.configs.types.key import Group, key


class Profiling(Group):
    """When a performance trace is taken and what it contains."""

    profiler: ProfilerType = key(
        ProfilerType.NONE,
        "Which profiler records a trace: xplane (view in TensorBoard or XProf), nsys "
        "(NVIDIA); empty = none",
    )
    upload_all_profiler_results: bool = key(
        False,
        "Write a trace from every host instead of only from the first",
        status=inert.PROFILES_OF_HOSTS,
    )
    skip_first_n_steps_for_profiler: int = key(
        1, "Steps to run before the trace begins, so compilation and warm-up stay out of it", low=0
    )
    profiler_steps: int = key(5, "Number of steps that one trace covers", low=1)
    profile_cleanly: bool = key(
        True,
        "Wait for the devices before starting and stopping a trace, so that it holds whole "
        "steps only",
    )
    profile_periodically_period: int = key(
        -1, "Take another trace every this many steps; -1 = only once", low=1, special=(-1,)
    )
    hide_profiler_step_metric: bool = key(
        False, "Leave performance metrics of traced steps out, since tracing slows those steps"
    )
    enable_jax_profiler: bool = key(
        False,
        "Start a live profiler server on jax_profiler_port, to capture a trace from outside "
        "on demand",
    )
    jax_profiler_port: int = key(
        9999, "Port of the live profiler server that enable_jax_profiler starts", low=0, high=65535
    )
    enable_tpu_profiling_options: bool = key(
        False,
        "Pass the tpu_num_* keys to the xplane profiler; false = its own defaults",
        status=inert.DIAGNOSTICS,
    )
    tpu_num_chips_to_profile_per_task: int = key(
        1,
        "TPU chips traced on each host; needs enable_tpu_profiling_options",
        status=inert.DIAGNOSTICS,
    )
    tpu_num_sparse_cores_to_trace: int = key(
        2,
        "SparseCores traced on each TPU chip; needs enable_tpu_profiling_options",
        status=inert.DIAGNOSTICS,
    )
    tpu_num_sparse_core_tiles_to_trace: int = key(
        1,
        "Tiles traced in each SparseCore; needs enable_tpu_profiling_options",
        status=inert.DIAGNOSTICS,
    )
    xprof_tpu_power_trace_level: XProfTPUPowerTraceMode = key(
        XProfTPUPowerTraceMode.POWER_TRACE_NONE,
        "Power samples in a TPU trace: 0 = none, 1 = normal, 2 = SPI (finer); needs "
        "profile_power_events",
        status=inert.DIAGNOSTICS,
    )
    xprof_e2e_enable_fw_throttle_event: bool = key(
        False,
        "Record when TPU firmware throttles the clock; needs profile_power_events",
        status=inert.DIAGNOSTICS,
    )
    xprof_e2e_enable_fw_power_level_event: bool = key(
        False,
        "Record TPU firmware changes of power level; needs profile_power_events",
        status=inert.DIAGNOSTICS,
    )
    xprof_e2e_enable_fw_thermal_event: bool = key(
        False,
        "Record TPU firmware temperature events; needs profile_power_events",
        status=inert.DIAGNOSTICS,
    )
    profile_power_events: bool = key(
        False,
        "Main switch for TPU power and thermal events in xplane traces; leave off on GPU",
        status=inert.DIAGNOSTICS,
    )


class HloDump(Group):
    """Saving compiler programs of the train step for later study."""

    dump_hlo: bool = key(
        False,
        "Save the compiler's HLO of the train step to dump_hlo_local_dir, to inspect what XLA did",
        status=inert.DIAGNOSTICS,
    )
    dump_step: int = key(
        -1,
        "Step after which the HLO dump is collected; -1 = the first step of the run",
        low=0,
        special=(-1,),
        status=inert.DIAGNOSTICS,
    )
    dump_hlo_local_dir: str = key(
        "/tmp/xla_dump/", "Local folder that XLA writes its HLO dump into", status=inert.DIAGNOSTICS
    )
    dump_hlo_delete_local_after: bool = key(
        True,
        "Remove the local HLO dump once it has been copied to dump_hlo_gcs_dir",
        status=inert.GOOGLE_CLOUD,
    )
    dump_hlo_gcs_dir: str = key(
        "",
        "Google Cloud Storage folder the HLO dump is uploaded to; empty = xla_dump under the "
        "run's output",
        status=inert.GOOGLE_CLOUD,
    )
    dump_hlo_module_name: str = key(
        "jit_train_step",
        "Upload only dump files whose name contains this compiled module; empty = all",
        status=inert.DIAGNOSTICS,
    )
    dump_hlo_local_module_name: str = key(
        "jit_train_step",
        "Let XLA dump only modules whose name matches this regex; empty = all",
        status=inert.DIAGNOSTICS,
    )
    dump_hlo_xla_flags: str = key(
        "",
        "XLA dump flags to use as they are; empty = built from the other dump_hlo keys",
        status=inert.DIAGNOSTICS,
    )
    dump_hlo_upload_all: bool = key(
        False,
        "Upload the HLO dump from every host instead of only from the first",
        status=inert.GOOGLE_CLOUD,
    )
    dump_jaxpr: bool = key(
        False,
        "Save the jaxpr of the train step, JAX's program before XLA compiles it",
        status=inert.DIAGNOSTICS,
    )
    dump_jaxpr_local_dir: str = key(
        "/tmp/jaxpr_dump/",
        "Local folder for the jaxpr text that dump_jaxpr writes",
        status=inert.DIAGNOSTICS,
    )
    dump_jaxpr_delete_local_after: bool = key(
        True,
        "Remove the local jaxpr once it has been copied to dump_jaxpr_gcs_dir",
        status=inert.GOOGLE_CLOUD,
    )
    dump_jaxpr_gcs_dir: str = key(
        "",
        "Google Cloud Storage folder the jaxpr is uploaded to; empty = jaxpr_dump under the "
        "run's output",
        status=inert.GOOGLE_CLOUD,
    )


class StackTrace(Group):
    """Periodic dumps of Python stacks to find where runs hang."""

    collect_stack_trace: bool = key(
        False,
        "Write the Python stacks of all threads at regular intervals, to see where a run hangs",
    )
    stack_trace_to_cloud: bool = key(
        False,
        "Send collected stacks to Google Cloud Logging; false = print them to the console",
        status=inert.GOOGLE_CLOUD,
    )
    stack_trace_interval_seconds: int = key(
        600, "Seconds between two stack dumps when collect_stack_trace=true", low=1
    )


class Metrics(Group):
    """Where run metrics are written beyond the console log."""

    metrics_file: None | str = key(
        None,
        "Local file that receives one JSON line of metrics per step; empty: metrics.jsonl in "
        "metrics_dir",
        is_path=True,
    )
    gcs_metrics: bool = key(
        False,
        "Also copy the metrics as JSON lines to Google Cloud Storage, under the run's metrics"
        " folder",
        status=inert.GOOGLE_CLOUD,
    )
    save_config_to_gcs: bool = key(
        False,
        "Upload the resolved configuration of the run to its Google Cloud Storage output folder",
        status=inert.GOOGLE_CLOUD,
    )
    record_internal_nn_metrics: int = key(
        0,
        "1 = also log per-layer activation statistics, such as mean and deviation; 0 = off",
        low=0,
        status=inert.DIAGNOSTICS,
    )
    prometheus_port: int = key(
        0, "Port on which training serves its metrics to Prometheus; 0: off", low=0, high=65535
    )
    enable_checkpoint_cloud_logger: bool = key(
        False,
        "Report checkpoint save and restore events to Google Cloud Logging",
        status=inert.GOOGLE_CLOUD,
    )
    enable_tunix_perf_metrics: bool = key(
        False,
        "Write the time of each phase (sync, rollout, score, reward, update) to spans.jsonl",
        needs="use_grpo",
    )


class ManagedMLDiagnostics(Group):
    """Reporting the run to the Google Cloud ML Diagnostics service."""

    managed_mldiagnostics: bool = key(
        False,
        "Send configuration, metrics and traces of the run to the Google Cloud ML Diagnostics"
        " service",
        status=inert.GOOGLE_CLOUD,
    )
    managed_mldiagnostics_run_group: str = key(
        "",
        "Group under which ML Diagnostics files this run, to compare related runs; empty = none",
        status=inert.GOOGLE_CLOUD,
    )


class Goodput(Group):
    """Measuring how much wall-clock time goes into productive training."""

    enable_goodput_recording: bool = key(
        False,
        "Log start-up, step, data and checkpoint times, to compute the share of productive time",
        status=inert.DIAGNOSTICS,
    )
    monitor_goodput: bool = key(
        False,
        "Report goodput in the background during the run; needs enable_goodput_recording",
        status=inert.DIAGNOSTICS,
    )
    goodput_upload_interval_seconds: int = key(
        30,
        "Seconds between two goodput reports when monitor_goodput=true",
        low=1,
        status=inert.GOOGLE_CLOUD,
    )
    enable_pathways_goodput: bool = key(
        False,
        "Measure goodput for a Google Pathways job, where one controller process drives all hosts",
        status=inert.PATHWAYS,
    )
    monitor_step_time_deviation: bool = key(
        True,
        "Report how far step times stray from their usual value; needs monitor_goodput",
        status=inert.DIAGNOSTICS,
        accepts=False,
    )
    step_deviation_interval_seconds: int = key(
        30, "Seconds between two reports of step-time deviation", low=1, status=inert.DIAGNOSTICS
    )
    enable_gcp_goodput_metrics: bool = key(
        True,
        "Also send goodput to Google Cloud Monitoring when monitor_goodput=true",
        status=inert.GOOGLE_CLOUD,
        accepts=False,
    )
    enable_gcp_step_deviation_metrics: bool = key(
        True,
        "Also send step-time deviation to Google Cloud Monitoring",
        status=inert.GOOGLE_CLOUD,
        accepts=False,
    )


class GcpMonitoring(Group):
    """Heartbeat and performance signals sent to Google Cloud Monitoring."""

    report_heartbeat_metric_for_gcp_monitoring: bool = key(
        False,
        "Send heartbeats to Google Cloud Monitoring, which can alert on a hang",
        status=inert.GOOGLE_CLOUD,
    )
    heartbeat_reporting_interval_in_seconds: int = key(
        5,
        "Seconds between two heartbeats to Google Cloud Monitoring",
        low=1,
        status=inert.GOOGLE_CLOUD,
    )
    report_performance_metric_for_gcp_monitoring: bool = key(
        False,
        "Send step-time performance of the run to Google Cloud Monitoring",
        status=inert.GOOGLE_CLOUD,
    )


class Tensorboard(Group):
    """Event files for TensorBoard, locally or on Vertex AI."""

    enable_tensorboard: bool = key(
        True, "Write metrics as TensorBoard events to the run's tensorboard folder"
    )
    use_vertex_tensorboard: bool = key(
        False,
        "Also upload TensorBoard events to Google Vertex AI TensorBoard",
        status=inert.GOOGLE_CLOUD,
    )
    vertex_tensorboard_project: str | None = key(
        "",
        "Google Cloud project of the Vertex AI TensorBoard; empty = the project of the machine",
        status=inert.GOOGLE_CLOUD,
    )
    vertex_tensorboard_region: str | None = key(
        "",
        "Google Cloud region of the Vertex AI TensorBoard, such as us-central1; needed to use it",
        status=inert.GOOGLE_CLOUD,
    )
