"""Image, video and audio inputs."""

from maxtext.configs.types.group import Group


class MultimodalGeneral(Group):
    """Image, video and audio inputs, their placeholders and positions."""

    use_multimodal: bool = False
    freeze_vision_encoder_params: bool = True
    freeze_audio_encoder_params: bool = True
    use_audio: bool = False
    image_size_for_vit: int | list[int] = 896
    image_path: str = ""
    image_placeholder: str = "<|image|>"
    posemb_type_for_vit: str = "learn"
    max_num_images_per_example: int = -1
    video_path: str = ""
    audio_path: str = ""
    video_placeholder: str = "<|video|>"
    audio_placeholder: str = "<|audio|>"
    use_audio_in_video: bool = False
    use_mrope: bool = False
    mrope_section: list[int] = [24, 20, 20]
    position_id_per_seconds: int = 25


class VisionTower(Group):
    """Shape of the transformer that turns image patches into features."""

    hidden_size_for_vit: int = 1408
    intermediate_size_for_vit: int = 5632
    num_attention_heads_for_vit: int = 16
    num_channels_for_vit: int = 3
    tile_size_for_vit: int = 336
    patch_size_for_vit: int = 14
    conv_stride_for_vit: int = 14
    num_hidden_layers_for_vit: int = 34
    rope_theta_for_vit: int = 10000
    vision_output_dim_for_vit: int = 4096
    spatial_merge_size_for_vit: int = 2
    out_hidden_size_for_vit: int = 512
    temporal_patch_size_for_vit: int = 2
    num_position_embeddings_for_vit: int = 1024
    deepstack_visual_indexes_for_vit: list[int] = []
    vision_output_length: int = -1


class VisionProjector(Group):
    """The bridge that maps vision features to the decoder's width."""

    projector_input_dim_for_vit: int = 4096
    projector_output_dim_for_vit: int = 4096
    pixel_shuffle_ratio_for_vit: float = 0.5
    projector_dropout_for_vit: float = 0.0


class AudioEncoder(Group):
    """Shape of the network that turns spectrograms into features."""

    d_model_for_audio: int = 256
    encoder_attention_heads_for_audio: int = 4
    encoder_ffn_dim_for_audio: int = 512
    encoder_layers_for_audio: int = 2
    attention_dropout_for_audio: float = 0.0
    activation_dropout_for_audio: float = 0.0
    activation_function_for_audio: str = "gelu"
    num_mel_bins_for_audio: int = 128
    max_source_positions_for_audio: int = 1500
    scale_embedding_for_audio: bool = True
    n_window_for_audio: int = 50
    n_window_infer_for_audio: int = 800
    conv_chunksize_for_audio: int = 500
    downsample_hidden_size_for_audio: int = 256
    output_dim_for_audio: int = 512
    num_conv_layers_for_audio: int = 3
    max_timescale_for_audio: float = 10000.0
    max_sample_len_for_audio: int = 10000
