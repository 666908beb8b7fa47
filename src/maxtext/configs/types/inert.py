"""Why keys do not act. Setting such a key to anything but its default is an error that gives the
reason.
"""

from maxtext.configs.types.key import Status

# Will act in a later version.
EXPERT_SHARDING = Status(
    "not_yet",
    "this way to shard or store experts is not implemented yet",
)
CONTEXT_PARALLELISM = Status(
    "not_yet",
    "only context_parallel_strategy=all_gather is implemented",
)
DEVICE_ORDERS = Status(
    "not_yet",
    "custom device orders for TPU topologies are not implemented yet",
)
KERNELS = Status(
    "not_yet",
    "the GPU and TPU kernels that it tunes are not implemented yet",
)
QUANTIZATION_METHODS = Status(
    "not_yet",
    "this quantization method is not implemented yet",
)
MULTIMODAL = Status(
    "not_yet",
    "image, video and audio inputs are not implemented yet",
)
DIAGNOSTICS = Status(
    "not_yet",
    "this diagnostic is not implemented yet",
)
PIPELINES = Status(
    "not_yet",
    "pipeline parallelism is not implemented yet",
)
DILOCO = Status(
    "not_yet",
    "DiLoCo training is not implemented yet",
)
PROFILES_OF_HOSTS = Status(
    "not_yet",
    "only the first process writes profiles; profiles of every host are not implemented yet",
)
EXPERT_CHUNKS = Status(
    "not_yet",
    "experts do not overlap communication with computation in chunks yet",
)
DEEPSEEK_V4 = Status(
    "not_yet",
    "the layers of DeepSeek-V4 are not implemented yet",
)
GEMMA_4_SMALL = Status(
    "not_yet",
    "the layers of Gemma 4 E2B and E4B are not implemented yet",
)
BLOCK_DIFFUSION = Status(
    "not_yet",
    "training by block diffusion is not implemented yet",
)
DEEPSEEK_ATTENTION = Status(
    "not_yet",
    "this variant of DeepSeek's attention is not implemented yet",
)
UNNAMED_TENSORS = Status(
    "not_yet",
    "no layer names this tensor for remat_policy=custom yet",
)
MHC_LITE = Status(
    "not_yet",
    "mixing residual streams by permutations (mHC-lite) is not implemented yet",
)
TWO_STAGE_GATHER = Status(
    "not_yet",
    "weights of dense layers are gathered over fsdp and fsdp_transpose at once, not yet in "
    "two stages",
)

# Will not act in this package.
GOOGLE_CLOUD = Status(
    "never",
    "it only selects a Google Cloud service (Cloud Storage, Cloud Monitoring, Cloud Logging, "
    "Vertex AI); copy files with your own tools and use metrics_file, TensorBoard or "
    "Prometheus",
)
PATHWAYS = Status(
    "never",
    "it only acts under Pathways, the single-controller runtime of Google Cloud; here every "
    "host runs its own process",
)
OWN_SHARDS = Status(
    "never",
    "every process writes and reads its own shards of a checkpoint, and exported weights are "
    "always unrolled",
)
INTERNAL_TOPOLOGIES = Status(
    "never",
    "it compiles for topologies with Google-internal names; use compile_topology",
)
EXPERIMENTS = Status(
    "never",
    "it names experiments of the original MaxText",
)
ONE_CACHE_LAYOUT = Status(
    "never",
    "the KV cache has one layout, an array per layer of pages or slots, tokens, heads and "
    "head_dim, and inference never runs training code",
)
ONE_MODEL = Status(
    "never",
    "there is only one model implementation, in Flax NNX",
)
WHOLE_BATCH = Status(
    "never",
    "microbatches always add up to the whole batch, whichever trainer accumulates them",
)
VLLM_PARALLELISM = Status(
    "never",
    "rollouts use the engine of this package, not vLLM; to divide the sampler over devices, "
    "set rollout_data_parallelism, rollout_tensor_parallelism and rollout_expert_parallelism",
)
NOT_VLLM = Status(
    "never",
    "rollouts use the engine of this package, not vLLM",
)
JETSTREAM = Status(
    "never",
    "it configures the JetStream server, which this package does not use",
)
TRANSFORMER_ENGINE = Status(
    "never",
    "it configures Transformer Engine, which is not used here",
)
READ_ONCE = Status(
    "never",
    "the weights of a folder are always read once, and a reference is a copy of them on the "
    "devices",
)
NETWORK_SIMULATION = Status(
    "never",
    "it simulates a slow network by the traffic control (tc) of the machine; use tc for that",
)
TPU_PROGRAMS = Status(
    "never",
    "it changes how a TPU program is written and not its results; the compiler decides that here",
)
ESTIMATES = Status(
    "never",
    "use `maxtext estimate --format json` instead",
)
