"""Which adapters a run trains, over a frozen base, and the weights of both before the first step.

With lora_weight_qtype (QLoRA) the matrices of the base are quantized as they are loaded.
"""

import jax

from maxtext.adapters.peft_folder import read_adapter
from maxtext.adapters.spec import Adapter, adapter_spec
from maxtext.checkpoint.open import Checkpoint, model_param_infos
from maxtext.checkpoint.quantized import load_base
from maxtext.common.errors import ConfigError, as_config_error
from maxtext.common.trees import flatten_dict, merge_dicts, unflatten_dict
from maxtext.common.types import Tree
from maxtext.configs.types import MaxTextConfig
from maxtext.layers.adapters import AdapterSpec
from maxtext.layers.context import TRAIN, BuildContext
from maxtext.layers.lora import copy_sources, init_magnitudes, split_adapter, update_copies
from maxtext.layers.parameters import Template
from maxtext.layers.quantized import initial_quantizer
from maxtext.models.transformer import build_context, initial_weights, make_template
from maxtext.sharding import AxisRules, use_rules
from maxtext.trainers.run_context import RunContext


def run_adapters(config: MaxTextConfig) -> AdapterSpec | None:
    """The adapters that a run trains: those of lora_restore_path, or of the lora_* keys. Raises
    ConfigError if the folder is no adapter of this model, or if a key contradicts it."""
    if not config.lora_restore_path:
        return adapter_spec(config)
    with as_config_error():
        spec = read_adapter(config.lora_restore_path, config).spec
    restored: dict[str, set] = {
        "lora_rank": {target.rank for _, target in spec.targets},
        "lora_alpha": {target.alpha for _, target in spec.targets},
        "lora_use_rslora": {spec.rslora},
        "lora_use_dora": {spec.dora},
    }
    for key, values in restored.items():
        value = getattr(config, key)
        if config.source(key).is_user and value not in values:
            raise ConfigError(
                f"{key}={value}, but the adapter at lora_restore_path={config.lora_restore_path} "
                f"has {', '.join(map(str, sorted(values)))}: leave the key out"
            )
    return spec


def base_template(config: MaxTextConfig, rules: AxisRules) -> Template:
    """The model without adapters."""
    return make_template(config, model_context(config, rules))


def model_context(
    config: MaxTextConfig,
    rules: AxisRules,
    mode: str = TRAIN,
    adapters: AdapterSpec | None = None,
) -> BuildContext:
    """The context of the model that is trained, over a base that may be quantized."""
    quantized = config.lora_weight_qtype or ""
    return build_context(config, rules, mode, quantized_weights=quantized, adapters=adapters)


def adapted_weights(context: RunContext, checkpoint: Checkpoint | None) -> Tree:
    """The base of a folder, or a random one, with the adapters before the first step."""
    config, template = context.config, base_template(context.config, context.rules)
    with use_rules(context.rules):
        if checkpoint is None:
            shardings = split_adapter(context.shardings.weights)[0]
            quantize = initial_quantizer(
                config.lora_weight_qtype, config.lora_tile_size, head=False
            )
            base = jax.jit(
                lambda: initial_weights(config, loop=True, quantize=quantize),
                out_shardings=shardings,
            )()
        else:
            param_infos = model_param_infos(template, config)
            base = load_base(
                checkpoint.weights(config, param_infos),
                param_infos,
                template,
                context.rules,
                config.lora_weight_qtype,
                config.lora_tile_size,
            )
        return merge_dicts(base, initial_adapter(context, base))


def initial_adapter(context: RunContext, base: Tree) -> Tree:
    """The parameters of the adapters: those of lora_restore_path, with the modules that it has in
    full (modules_to_save), or new ones."""
    config, template = context.config, context.template
    if config.lora_restore_path:
        restored = flatten_dict(
            read_adapter(config.lora_restore_path, config).tree(template, config)
        )
        shardings = flatten_dict(context.shardings.weights)
        return unflatten_dict(
            {path: jax.device_put(leaf, shardings[path]) for path, leaf in restored.items()}
        )
    shardings = split_adapter(context.shardings.weights)[1]
    build = build_context(config, adapters=context.adapters)

    def fresh(base: Tree) -> Tree:
        initial = initial_weights(config, loop=True, context=build)
        adapter = split_adapter(update_copies(initial, copy_sources(template)))[1]
        return split_adapter(init_magnitudes(template, merge_dicts(base, adapter)))[1]

    return jax.jit(fresh, out_shardings=shardings)(base)


def trained_adapter(context: RunContext, weights: Tree) -> Adapter:
    """The adapter of a run, on the host."""
    assert context.adapters is not None
    return Adapter.from_tree(context.adapters, weights, context.template, context.config)
