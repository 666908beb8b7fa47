"""All configuration keys as pydantic groups, and MaxTextConfig, which has them all.

The groups and the enums of their keys are public names of this package.
"""

from typing import Self, cast

from pydantic import PrivateAttr

from maxtext.configs.provenance import Source
from maxtext.configs.types.attention import *
from maxtext.configs.types.checkpointing import *
from maxtext.configs.types.data import *
from maxtext.configs.types.derived import *
from maxtext.configs.types.derived import Architecture
from maxtext.configs.types.diagnostics import *
from maxtext.configs.types.distillation import *
from maxtext.configs.types.enums import *
from maxtext.configs.types.inference import *
from maxtext.configs.types.key import Declaration, Group, declaration_of
from maxtext.configs.types.later import *
from maxtext.configs.types.model import *
from maxtext.configs.types.moe import *
from maxtext.configs.types.multimodal import *
from maxtext.configs.types.parallelism import *
from maxtext.configs.types.remat import *
from maxtext.configs.types.rl import *
from maxtext.configs.types.rl_scoring import *
from maxtext.configs.types.run import *
from maxtext.configs.types.training import *


class Settings(
    RunInfo,
    Checkpointing,
    InterimCheckpoints,
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
    DataOrder,
    FineTuning,
    Preferences,
    RewardModeling,
    Adapters,
    Distillation,
    GeneralizedDistillation,
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
    EngineMemory,
    PrefixCaching,
    Speculation,
    AOT,
    MemoryCheck,
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
    PolicyOptimization,
    RLDataset,
    RLEvaluation,
    Reward,
    SpecialTokens,
    Engram,
    RunControl,
    WeightsAndBiases,
    LaterReleases,
    DerivedValues,
):
    """The value of every key, before anything is derived."""

    _sources: dict[str, Source] = PrivateAttr(default_factory=dict)
    _architecture: Architecture = PrivateAttr(default_factory=Architecture)

    def source(self, key: str) -> Source:
        """Where a key's value was set: default, file and line, model file, environment, command
        line, derived.
        """
        return self._sources[key]

    def attributed_to(self, source: Source) -> Self:
        """A copy in which every key counts as set by `source`."""
        copy = self.model_copy()
        copy._sources = dict.fromkeys(type(self).model_fields, source)
        return copy

    @property
    def architecture(self) -> Architecture:
        """Attributes of a published checkpoint that no key names."""
        return self._architecture


GROUPS = cast(tuple[type[Group], ...], Settings.__bases__)


class MaxTextConfig(Settings):
    """A configuration as `load` returns it: flat, frozen, with every derived value computed."""

    emb_dim: int
    mlp_dim: int
    moe_mlp_dim: int
    num_decoder_layers: int
    num_kv_heads: int
    num_query_heads: int
    num_diloco_replicas: int
    ici_parallelism: list[int]
    dcn_parallelism: list[int]
    using_pipeline_parallelism: bool
    context_parallel_size: int
    num_target_devices: int
    global_batch_size_to_train_on: int
    global_batch_size_to_eval_on: int
    global_batch_size_to_load: int
    global_batch_size_to_load_eval: int
    micro_batch_size_to_train_on: int
    micro_batch_size_to_eval_on: int
    checkpoint_dir: str
    metrics_dir: str
    tensorboard_dir: str

    @property
    def has_lasting_name(self) -> bool:
        """Whether the same settings name the same run again: run_name does not come from the
        clock."""
        source = self.source("run_name")
        return source.is_user or source.location == "JOBSET_NAME"


def group_of(key: str) -> type[Group]:
    return next(group for group in GROUPS if key in group.model_fields)


def declaration(key: str) -> Declaration:
    """How a key is declared in its group."""
    return declaration_of(Settings.model_fields[key])
