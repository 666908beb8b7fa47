"""Rules of the vision and audio keys."""

from maxtext.configs.rules.rule import rule
from maxtext.configs.types import Settings


@rule("hidden_size_for_vit")
def vision_heads_divide_the_width(settings: Settings) -> str | None:
    if (
        settings.use_multimodal
        and settings.hidden_size_for_vit % settings.num_attention_heads_for_vit
    ):
        return (
            f"hidden_size_for_vit={settings.hidden_size_for_vit} is not a multiple of "
            f"num_attention_heads_for_vit={settings.num_attention_heads_for_vit}"
        )
    return None


@rule("mrope_section")
def mrope_has_three_sections(settings: Settings) -> str | None:
    if settings.use_mrope and len(settings.mrope_section) != 3:
        return f"mrope_section={settings.mrope_section} needs three numbers: time, height, width"
    return None
