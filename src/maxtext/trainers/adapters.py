"""Which adapters a run trains."""

from maxtext.adapters.peft_folder import read_adapter
from maxtext.adapters.spec import adapter_spec
from maxtext.common.errors import ConfigError, as_config_error
from maxtext.configs.types import MaxTextConfig
from maxtext.layers.adapters import AdapterSpec
from maxtext.layers.context import TRAIN, BuildContext
from maxtext.layers.parameters import Template
from maxtext.models.transformer import build_context, make_template
from maxtext.sharding import AxisRules


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
    quantized = config.lora_weight_qtype is not None
    return build_context(config, rules, mode, quantized_weights=quantized, adapters=adapters)
