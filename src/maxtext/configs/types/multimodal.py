"""Image, video and audio inputs."""

from maxtext.configs.types import inert
from maxtext.configs.types.key import Group, key


class MultimodalGeneral(Group):
    """Image, video and audio inputs, their placeholders and positions."""

    use_multimodal: bool = key(
        False,
        "Build the vision encoder as well and accept images or video next to text",
        status=inert.MULTIMODAL,
    )
    freeze_vision_encoder_params: bool = key(
        True,
        "Keep the vision encoder's weights fixed in training, without gradients or optimizer state",
        status=inert.MULTIMODAL,
    )
    freeze_audio_encoder_params: bool = key(
        True,
        "Keep the audio encoder's weights fixed in training, without gradients or optimizer state",
        status=inert.MULTIMODAL,
    )
    use_audio: bool = key(
        False,
        "Build the audio encoder as well and accept sound next to text",
        status=inert.MULTIMODAL,
    )
    image_size_for_vit: int | list[int] = key(
        896,
        "Pixels a side that images are resized to before the vision encoder; one number or "
        "[height, width]",
        status=inert.MULTIMODAL,
    )
    image_path: str = key(
        "",
        "Image file for decode; several are separated by commas. Empty = no image",
        status=inert.MULTIMODAL,
    )
    image_placeholder: str = key(
        "<|image|>",
        "Mark in the prompt that is replaced by the tokens of one image",
        status=inert.MULTIMODAL,
    )
    posemb_type_for_vit: str = key(
        "learn",
        "Position embedding of vision patches: learn (a trained table) or sincos2d (fixed waves)",
        status=inert.MULTIMODAL,
    )
    max_num_images_per_example: int = key(
        -1, "Images kept and padded to per training example; -1 = no limit", status=inert.MULTIMODAL
    )
    video_path: str = key(
        "",
        "Video file for decode; several are separated by commas. Empty = no video",
        status=inert.MULTIMODAL,
    )
    audio_path: str = key(
        "", "Sound file for decode; empty = none. Needs use_audio", status=inert.MULTIMODAL
    )
    video_placeholder: str = key(
        "<|video|>",
        "Mark in the prompt that is replaced by the tokens of one video",
        status=inert.MULTIMODAL,
    )
    audio_placeholder: str = key(
        "<|audio|>",
        "Mark in the prompt that is replaced by the tokens of one sound clip",
        status=inert.MULTIMODAL,
    )
    use_audio_in_video: bool = key(
        False,
        "Decode the video's own sound track too and interleave its tokens with the frames by time",
        status=inert.MULTIMODAL,
    )
    use_mrope: bool = key(
        False,
        "Rotate by three positions (time, height, width) instead of one; see mrope_section",
        status=inert.MULTIMODAL,
    )
    mrope_section: list[int] = key(
        [24, 20, 20],
        "Rotary frequencies given to time, height and width; the sum is half the rotary head dim",
        status=inert.MULTIMODAL,
    )
    position_id_per_seconds: int = key(
        25, "Time positions per second of video or audio under use_mrope", status=inert.MULTIMODAL
    )


class VisionTower(Group):
    """Shape of the transformer that turns image patches into features."""

    hidden_size_for_vit: int = key(
        1408, "Width of the vision encoder's residual stream", low=1, status=inert.MULTIMODAL
    )
    intermediate_size_for_vit: int = key(
        5632, "Width of the MLP inside each vision encoder layer", low=1, status=inert.MULTIMODAL
    )
    num_attention_heads_for_vit: int = key(
        16,
        "Attention heads in each vision encoder layer; must divide hidden_size_for_vit",
        low=1,
        status=inert.MULTIMODAL,
    )
    num_channels_for_vit: int = key(
        3, "Colour channels of an input image; 3 = RGB", low=1, status=inert.MULTIMODAL
    )
    tile_size_for_vit: int = key(
        336,
        "Pixels a side of the tiles that a large image is cut into (Llama 4)",
        status=inert.MULTIMODAL,
    )
    patch_size_for_vit: int = key(
        14,
        "Pixels a side of one patch; each patch becomes one token of the vision encoder",
        low=1,
        status=inert.MULTIMODAL,
    )
    conv_stride_for_vit: int = key(
        14,
        "Pixels between neighbouring patches; equal to patch_size_for_vit = no overlap",
        status=inert.MULTIMODAL,
    )
    num_hidden_layers_for_vit: int = key(
        34, "Number of transformer layers in the vision encoder", status=inert.MULTIMODAL
    )
    rope_theta_for_vit: int = key(
        10000,
        "Base of the rotary position frequencies inside the vision encoder",
        status=inert.MULTIMODAL,
    )
    vision_output_dim_for_vit: int = key(
        4096,
        "Width of the vision encoder's output, as the projector receives it",
        status=inert.MULTIMODAL,
    )
    spatial_merge_size_for_vit: int = key(
        2,
        "Joins n x n neighbouring patches into one token for the decoder (Qwen); 1 = no merge",
        status=inert.MULTIMODAL,
    )
    out_hidden_size_for_vit: int = key(
        512,
        "Width of merged vision tokens; must equal the decoder's emb_dim (Qwen)",
        status=inert.MULTIMODAL,
    )
    temporal_patch_size_for_vit: int = key(
        2,
        "Video frames joined into one patch; a still image is repeated to fill it",
        status=inert.MULTIMODAL,
    )
    num_position_embeddings_for_vit: int = key(
        1024,
        "Rows of the learned position table, a square grid that is interpolated to the image size",
        status=inert.MULTIMODAL,
    )
    deepstack_visual_indexes_for_vit: list[int] = key(
        [],
        "Vision layers whose features are also added to early decoder layers (Qwen3 "
        "DeepStack); empty = none",
        status=inert.MULTIMODAL,
    )
    vision_output_length: int = key(
        -1,
        "Tokens one image takes in the decoder's sequence; -1 = follows from image and patch sizes",
        status=inert.MULTIMODAL,
    )


class VisionProjector(Group):
    """The bridge that maps vision features to the decoder's width."""

    projector_input_dim_for_vit: int = key(
        4096,
        "Width of the features that enter the projector between vision encoder and decoder",
        status=inert.MULTIMODAL,
    )
    projector_output_dim_for_vit: int = key(
        4096, "Width of the features that leave the vision projector", status=inert.MULTIMODAL
    )
    pixel_shuffle_ratio_for_vit: float = key(
        0.5,
        "Scales each side of the patch grid, folding patches into channels; 0.5 = a quarter "
        "of the tokens",
        status=inert.MULTIMODAL,
    )
    projector_dropout_for_vit: float = key(
        0.0,
        "Dropout probability in the vision projector while training; 0 = none",
        low=0,
        high=1,
        status=inert.MULTIMODAL,
    )


class AudioEncoder(Group):
    """Shape of the network that turns spectrograms into features."""

    d_model_for_audio: int = key(
        256, "Width of the audio encoder's residual stream", low=1, status=inert.MULTIMODAL
    )
    encoder_attention_heads_for_audio: int = key(
        4,
        "Attention heads in each audio encoder layer; must divide d_model_for_audio",
        low=1,
        status=inert.MULTIMODAL,
    )
    encoder_ffn_dim_for_audio: int = key(
        512, "Width of the MLP inside each audio encoder layer", status=inert.MULTIMODAL
    )
    encoder_layers_for_audio: int = key(
        2, "Number of transformer layers in the audio encoder", status=inert.MULTIMODAL
    )
    attention_dropout_for_audio: float = key(
        0.0,
        "Dropout probability on audio attention weights while training; 0 = none",
        low=0,
        high=1,
        status=inert.MULTIMODAL,
    )
    activation_dropout_for_audio: float = key(
        0.0,
        "Dropout probability after the audio MLP's activation while training; 0 = none",
        low=0,
        high=1,
        status=inert.MULTIMODAL,
    )
    activation_function_for_audio: str = key(
        "gelu",
        "Activation in the audio MLP, by JAX name: gelu, relu or silu",
        status=inert.MULTIMODAL,
    )
    num_mel_bins_for_audio: int = key(
        128,
        "Frequency bands of the mel spectrogram that the audio encoder reads",
        status=inert.MULTIMODAL,
    )
    max_source_positions_for_audio: int = key(
        1500,
        "Rows of the fixed sine position table: the maximum number of positions after the "
        "convolutions",
        status=inert.MULTIMODAL,
    )
    scale_embedding_for_audio: bool = key(
        True,
        "Multiply audio features by sqrt(d_model_for_audio) before positions are added",
        status=inert.MULTIMODAL,
    )
    n_window_for_audio: int = key(
        50,
        "Half the length of one convolution chunk: audio is split into chunks of 2n mel frames",
        status=inert.MULTIMODAL,
    )
    n_window_infer_for_audio: int = key(
        800,
        "Mel frames that may attend to each other in the audio encoder, in inference",
        status=inert.MULTIMODAL,
    )
    conv_chunksize_for_audio: int = key(
        500, "Audio chunks per convolution batch; smaller saves memory", status=inert.MULTIMODAL
    )
    downsample_hidden_size_for_audio: int = key(
        256, "Channels of the convolutions that shorten the spectrogram", status=inert.MULTIMODAL
    )
    output_dim_for_audio: int = key(
        512,
        "Width of the audio encoder's output; must equal the decoder's emb_dim",
        status=inert.MULTIMODAL,
    )
    num_conv_layers_for_audio: int = key(
        3,
        "Stride-2 convolutions before the audio layers; each halves the time and the "
        "frequency axis",
        status=inert.MULTIMODAL,
    )
    max_timescale_for_audio: float = key(
        10000.0,
        "Longest wavelength of the audio encoder's sine position embedding",
        status=inert.MULTIMODAL,
    )
    max_sample_len_for_audio: int = key(
        10000,
        "Longest sound clip accepted, in mel frames; longer ones are cut",
        status=inert.MULTIMODAL,
    )
