"""The named choices of configuration keys.

Members are also plain text (`config.dtype == "bfloat16"`); use `.value` to print one.
"""

import re
from enum import Enum, StrEnum


class XProfTPUPowerTraceMode(int, Enum):
    POWER_TRACE_NONE = 0
    POWER_TRACE_NORMAL = 1
    POWER_TRACE_SPI = 2


class DType(str, Enum):
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT16 = "float16"


class MatmulPrecision(str, Enum):
    DEFAULT = "default"
    HIGH = "high"
    HIGHEST = "highest"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


class QuantizationType(str, Enum):
    NONE = ""
    INT4 = "int4"
    INT8 = "int8"
    INTMP = "intmp"
    MXFP4 = "mxfp4"
    FP8 = "fp8"
    NANOO_FP8 = "nanoo_fp8"
    FP8_NANO_V2 = "fp8_nanoo"
    FP8_GPU = "fp8_gpu"
    FP8_FULL = "fp8_full"
    TE_FP8_DS = "te_fp8_delayedscaling"
    TE_FP8_CS = "te_fp8_currentscaling"
    TE_MXFP8 = "te_mxfp8"
    TE_NVFP4 = "te_nvfp4"
    TE_NVFP4_NO_RHT = "te_nvfp4_no_rht"


class KvQuantAxis(str, Enum):
    NONE = ""
    DKV = "dkv"
    HEADS_AND_DKV = "heads_and_dkv"


class RematPolicy(str, Enum):
    FULL = "full"
    MINIMAL = "minimal"
    SAVE_DOT_WITH_CONTEXT_EXCEPT_MLP = "save_dot_with_context_except_mlp"
    SAVE_DOT_EXCEPT_MLPWI = "save_dot_except_mlpwi"
    SAVE_DOT_EXCEPT_MLP = "save_dot_except_mlp"
    SAVE_QKV_PROJ = "save_qkv_proj"
    QKV_PROJ_OFFLOADED = "qkv_proj_offloaded"
    CUSTOM = "custom"
    MINIMAL_OFFLOADED = "minimal_offloaded"
    SAVE_OUT_PROJ = "save_out_proj"


class RematLocation(str, Enum):
    REMAT = "remat"
    DEVICE = "device"
    OFFLOAD = "offload"


class OptimizerType(str, Enum):
    ADAMW = "adamw"
    ADAM_PAX = "adam_pax"
    SGD = "sgd"
    MUON = "muon"


class LearningRateScheduleType(str, Enum):
    COSINE = "cosine"
    WSD = "wsd"


class WsdDecayStyle(str, Enum):
    LINEAR = "linear"
    COSINE = "cosine"


class RopeType(str, Enum):
    DEFAULT = "default"
    LLAMA3_1 = "llama3.1"
    YARN = "yarn"


class TokenizerType(str, Enum):
    SENTENCEPIECE = "sentencepiece"
    HUGGINGFACE = "huggingface"
    TIKTOKEN = "tiktoken"


class DatasetType(str, Enum):
    SYNTHETIC = "synthetic"
    HF = "hf"
    GRAIN = "grain"
    TFDS = "tfds"
    C4MLPERF = "c4_mlperf"
    OLMO_GRAIN = "olmo_grain"

    @classmethod
    def _missing_(cls, value: object) -> "DatasetType | None":
        """A dotted path, package.module:function, is a source of the user's own: a member without a
        name here.
        """
        if not isinstance(value, str) or not re.fullmatch(
            r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", value
        ):
            return None
        member = str.__new__(cls, value)
        member._name_, member._value_ = "CUSTOM", value
        return member


class SamplingStrategy(str, Enum):
    GREEDY = "greedy"
    WEIGHTED = "weighted"
    NUCLEUS = "nucleus"
    TOPK = "topk"
    COMPOSITE = "composite"


class ProfilerType(str, Enum):
    NONE = ""
    XPLANE = "xplane"
    NSYS = "nsys"


class DecoderBlockType(StrEnum):
    DEFAULT = "default"
    LLAMA2 = "llama2"
    MISTRAL = "mistral"
    MIXTRAL = "mixtral"
    DEEPSEEK = "deepseek"
    GEMMA = "gemma"
    GEMMA2 = "gemma2"
    GEMMA3 = "gemma3"
    GEMMA4 = "gemma4"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    QWEN3_MOE = "qwen3_moe"
    QWEN3_CUSTOM_MOE = "qwen3_custom_moe"
    QWEN3_NEXT = "qwen3_next"
    QWEN3_5 = "qwen3_5"
    GPT3 = "gpt3"
    GPT_OSS = "gpt_oss"
    LLAMA4 = "llama4"
    OLMO2 = "olmo2"
    OLMO3 = "olmo3"
    PHI3 = "phi3"
    COHERE = "cohere"
    COHERE2 = "cohere2"
    GLM4_MOE = "glm4_moe"
    MINIMAX_M2 = "minimax_m2"
    SMOLLM3 = "smollm3"
    SEED_OSS = "seed_oss"
    EXAONE4 = "exaone4"
    ERNIE4_5 = "ernie4_5"
    SIMPLE = "simple"
    SIMPLE_MLP = "simple_mlp"


class ShardMode(StrEnum):
    AUTO = "auto"
    EXPLICIT = "explicit"


class ReorderStrategy(str, Enum):
    AUTO = "auto"
    DUAL_CHUNK_SWAP = "dual_chunk_swap"
    STRIPED = "striped"


class CustomRule(str, Enum):
    DEFAULT = ""
    PURE_FSDP = "pure-fsdp"
    EP_AS_DP = "ep-as-dp"
    EP_AS_CP = "ep-as-cp"
    CP_AS_EP = "cp-as-ep"
    PIPELINE_LARGE_MOE = "pipeline-large-moe"
    SHARD_EXP_ON_FSDP = "shard-exp-on-fsdp"
