"""All configuration keys as pydantic groups, and MaxTextConfig, which has them all."""

from typing import Any

from pydantic import PrivateAttr

from maxtext.configs.types.attention import (
    Attention,
    AttentionIndexer,
    Llama4Attention,
    MlaAttention,
    MoBa,
    PagedAttention,
    Qwen3Next,
    SplashAttention,
)
from maxtext.configs.types.checkpointing import Checkpointing, ElasticTraining, EmergencyCheckpointing, OrbaxStorage
from maxtext.configs.types.data import (
    BadData,
    DatasetGeneral,
    GrainDataset,
    HfDataset,
    OlmoGrainDataset,
    TfdsDataset,
    Tokenizer,
)
from maxtext.configs.types.derived import DerivedValues
from maxtext.configs.types.diagnostics import (
    GcpMonitoring,
    Goodput,
    HloDump,
    ManagedMLDiagnostics,
    Metrics,
    Profiling,
    StackTrace,
    Tensorboard,
)
from maxtext.configs.types.enums import (
    CustomRule,
    DatasetType,
    DecoderBlockType,
    DType,
    KvQuantAxis,
    LearningRateScheduleType,
    MatmulPrecision,
    OptimizerType,
    ProfilerType,
    QuantizationType,
    RematLocation,
    RematPolicy,
    ReorderStrategy,
    RopeType,
    SamplingStrategy,
    ShardMode,
    TokenizerType,
    WsdDecayStyle,
    XProfTPUPowerTraceMode,
)
from maxtext.configs.types.group import Group
from maxtext.configs.types.inference import (
    Decoding,
    InferenceBenchmark,
    InferenceGeneral,
    InferenceLayout,
    InferenceServer,
    PrefixCaching,
)
from maxtext.configs.types.model import (
    MTP,
    DataTypes,
    Engram,
    Logits,
    ManifoldConstrainedHyperConnections,
    ModelArchitecture,
    PositionalEmbedding,
    Quantization,
    Rope,
    YarnRope,
)
from maxtext.configs.types.moe import DeepSeekMoE, MoEGeneral, MoEKernels
from maxtext.configs.types.multimodal import AudioEncoder, MultimodalGeneral, VisionProjector, VisionTower
from maxtext.configs.types.parallelism import (
    DcnParallelism,
    DilocoParams,
    HardwareAndMesh,
    IciParallelism,
    LayoutAndSharding,
    PipelineParallelism,
    RematAndOffload,
)
from maxtext.configs.types.rl import RL, VLLM, Reward, RLDataset, RLEvaluation, RLHardware, SpecialTokens
from maxtext.configs.types.run import AOT, Debug, DevelopmentAndDebugging, RunInfo
from maxtext.configs.types.training import AdamW, Distillation, FineTuning, Muon, Optimizer, TrainingLoop

# The groups in the order of base.yml.
GROUPS: tuple[type[Group], ...] = (
    RunInfo,
    Checkpointing,
    OrbaxStorage,
    EmergencyCheckpointing,
    DataTypes,
    Quantization,
    ModelArchitecture,
    MTP,
    Logits,
    Attention,
    MoBa,
    MlaAttention,
    AttentionIndexer,
    Llama4Attention,
    SplashAttention,
    PagedAttention,
    MoEGeneral,
    MoEKernels,
    DeepSeekMoE,
    Qwen3Next,
    HardwareAndMesh,
    LayoutAndSharding,
    DcnParallelism,
    IciParallelism,
    PipelineParallelism,
    RematAndOffload,
    Tokenizer,
    DatasetGeneral,
    TfdsDataset,
    HfDataset,
    GrainDataset,
    OlmoGrainDataset,
    BadData,
    FineTuning,
    Distillation,
    TrainingLoop,
    ManifoldConstrainedHyperConnections,
    DilocoParams,
    Optimizer,
    AdamW,
    Muon,
    PositionalEmbedding,
    Rope,
    YarnRope,
    InferenceGeneral,
    Decoding,
    InferenceLayout,
    InferenceServer,
    InferenceBenchmark,
    PrefixCaching,
    AOT,
    DevelopmentAndDebugging,
    Profiling,
    HloDump,
    StackTrace,
    Metrics,
    ManagedMLDiagnostics,
    Goodput,
    ElasticTraining,
    GcpMonitoring,
    Tensorboard,
    MultimodalGeneral,
    VisionTower,
    VisionProjector,
    AudioEncoder,
    Debug,
    RLHardware,
    VLLM,
    RL,
    RLDataset,
    RLEvaluation,
    Reward,
    SpecialTokens,
    Engram,
    DerivedValues,
)


class MaxTextConfig(
    RunInfo,
    Checkpointing,
    OrbaxStorage,
    EmergencyCheckpointing,
    DataTypes,
    Quantization,
    ModelArchitecture,
    MTP,
    Logits,
    Attention,
    MoBa,
    MlaAttention,
    AttentionIndexer,
    Llama4Attention,
    SplashAttention,
    PagedAttention,
    MoEGeneral,
    MoEKernels,
    DeepSeekMoE,
    Qwen3Next,
    HardwareAndMesh,
    LayoutAndSharding,
    DcnParallelism,
    IciParallelism,
    PipelineParallelism,
    RematAndOffload,
    Tokenizer,
    DatasetGeneral,
    TfdsDataset,
    HfDataset,
    GrainDataset,
    OlmoGrainDataset,
    BadData,
    FineTuning,
    Distillation,
    TrainingLoop,
    ManifoldConstrainedHyperConnections,
    DilocoParams,
    Optimizer,
    AdamW,
    Muon,
    PositionalEmbedding,
    Rope,
    YarnRope,
    InferenceGeneral,
    Decoding,
    InferenceLayout,
    InferenceServer,
    InferenceBenchmark,
    PrefixCaching,
    AOT,
    DevelopmentAndDebugging,
    Profiling,
    HloDump,
    StackTrace,
    Metrics,
    ManagedMLDiagnostics,
    Goodput,
    ElasticTraining,
    GcpMonitoring,
    Tensorboard,
    MultimodalGeneral,
    VisionTower,
    VisionProjector,
    AudioEncoder,
    Debug,
    RLHardware,
    VLLM,
    RL,
    RLDataset,
    RLEvaluation,
    Reward,
    SpecialTokens,
    Engram,
    DerivedValues,
):
    """A whole configuration: one flat, frozen object, made by `maxtext.config()`."""

    _sources: dict[str, Any] = PrivateAttr(default_factory=dict)
    _architecture: Any = PrivateAttr(default=None)

    def source(self, key: str) -> Any:
        """The Source of a key's value: default, file and line, model file, environment, command line, derived."""
        return self._sources[key]

    @property
    def architecture(self) -> Any:
        """What a published checkpoint fixes and no key names: an Architecture."""
        return self._architecture


def group_of(key: str) -> type[Group]:
    return next(group for group in GROUPS if key in group.model_fields)


__all__ = [  # noqa: RUF022 (groups first, then choices)
    "GROUPS", "MaxTextConfig", "group_of",
    "RunInfo", "Checkpointing", "OrbaxStorage", "EmergencyCheckpointing", "DataTypes", "Quantization",
    "ModelArchitecture", "MTP", "Logits", "Attention", "MoBa", "MlaAttention", "AttentionIndexer", "Llama4Attention",
    "SplashAttention", "PagedAttention", "MoEGeneral", "MoEKernels", "DeepSeekMoE", "Qwen3Next", "HardwareAndMesh",
    "LayoutAndSharding", "DcnParallelism", "IciParallelism", "PipelineParallelism", "RematAndOffload", "Tokenizer",
    "DatasetGeneral", "TfdsDataset", "HfDataset", "GrainDataset", "OlmoGrainDataset", "FineTuning", "Distillation",
    "TrainingLoop", "ManifoldConstrainedHyperConnections", "DilocoParams", "Optimizer", "AdamW", "Muon",
    "PositionalEmbedding", "Rope", "YarnRope", "InferenceGeneral", "Decoding", "InferenceLayout", "InferenceServer",
    "InferenceBenchmark", "PrefixCaching", "AOT", "DevelopmentAndDebugging", "Profiling", "HloDump", "StackTrace",
    "Metrics", "ManagedMLDiagnostics", "Goodput", "ElasticTraining", "GcpMonitoring", "Tensorboard",
    "MultimodalGeneral", "VisionTower", "VisionProjector", "AudioEncoder", "Debug", "RLHardware", "VLLM", "RL",
    "RLDataset", "RLEvaluation", "Reward", "SpecialTokens", "Engram", "DerivedValues", "XProfTPUPowerTraceMode",
    "DType", "MatmulPrecision", "QuantizationType", "KvQuantAxis", "RematPolicy", "RematLocation", "OptimizerType",
    "LearningRateScheduleType", "WsdDecayStyle", "RopeType", "TokenizerType", "DatasetType", "SamplingStrategy",
    "ProfilerType", "DecoderBlockType", "ShardMode", "ReorderStrategy", "CustomRule",
]  # fmt: skip
